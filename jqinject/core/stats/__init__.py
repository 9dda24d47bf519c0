"""Statistics for scales and zero points."""

from jqinject.core.stats.deviation import SigmaStd as SigmaStd
from jqinject.core.stats.extremes import AbsMax as AbsMax
from jqinject.core.stats.extremes import AbsMaxAve as AbsMaxAve
from jqinject.core.stats.extremes import AbsMaxL2 as AbsMaxL2
from jqinject.core.stats.extremes import AbsMinMax as AbsMinMax
from jqinject.core.stats.extremes import NegativeMinOrZero as NegativeMinOrZero
from jqinject.core.stats.extremes import SignedAbsMax as SignedAbsMax
from jqinject.core.stats.half_quadratic import HalfQuadraticOptimizerScale as HalfQuadraticOptimizerScale
from jqinject.core.stats.half_quadratic import (
    HalfQuadraticOptimizerZeroPoint as HalfQuadraticOptimizerZeroPoint,
)
from jqinject.core.stats.means import AbsAve as AbsAve
from jqinject.core.stats.means import L1Norm as L1Norm
from jqinject.core.stats.means import L2Norm as L2Norm
from jqinject.core.stats.means import MeanLearnedSigmaStd as MeanLearnedSigmaStd
from jqinject.core.stats.means import MeanSigmaStd as MeanSigmaStd
from jqinject.core.stats.mse import MSE as MSE
from jqinject.core.stats.mse import MSEUniformStepBase as MSEUniformStepBase
from jqinject.core.stats.percentiles import AbsPercentile as AbsPercentile
from jqinject.core.stats.percentiles import NegativePercentileOrZero as NegativePercentileOrZero
from jqinject.core.stats.percentiles import PercentileInterval as PercentileInterval
from jqinject.core.stats.search import Candidate as Candidate
from jqinject.core.stats.search import Search as Search
from jqinject.core.stats.search import SearchedStat as SearchedStat
from jqinject.core.stats.two_phase import TwoPhaseStat as TwoPhaseStat
