"""Quantizers: from a tensor to a `QuantResult`."""

from jqinject.core.quant.binary import BinaryQuant as BinaryQuant
from jqinject.core.quant.binary import ClampedBinaryQuant as ClampedBinaryQuant
from jqinject.core.quant.calibrated import CalibratedQuant as CalibratedQuant
from jqinject.core.quant.codebook_quant import CodebookQuant as CodebookQuant
from jqinject.core.quant.codebook_quant import CodebookQuantResult as CodebookQuantResult
from jqinject.core.quant.committed import CommittedQuant as CommittedQuant
from jqinject.core.quant.decoupled import DecoupledIntQuant as DecoupledIntQuant
from jqinject.core.quant.decoupled import DecoupledQuantResult as DecoupledQuantResult
from jqinject.core.quant.decoupled import DecoupledRescalingIntQuant as DecoupledRescalingIntQuant
from jqinject.core.quant.decoupled_with_input import (
    DecoupledRescalingIntQuantWithInput as DecoupledRescalingIntQuantWithInput,
)
from jqinject.core.quant.decoupled_with_input import ZeroWeightsWarning as ZeroWeightsWarning
from jqinject.core.quant.float8_quant import Float8Quant as Float8Quant
from jqinject.core.quant.float8_quant import Float8QuantResult as Float8QuantResult
from jqinject.core.quant.float_quant import FloatQuant as FloatQuant
from jqinject.core.quant.float_quant import FloatQuantResult as FloatQuantResult
from jqinject.core.quant.grids import Grid as Grid
from jqinject.core.quant.grids import IntegerGrid as IntegerGrid
from jqinject.core.quant.grids import MinifloatGrid as MinifloatGrid
from jqinject.core.quant.grids import TableGrid as TableGrid
from jqinject.core.quant.int_quant import IntQuant as IntQuant
from jqinject.core.quant.rescaling_int_quant import PrescaledRestrictIntQuant as PrescaledRestrictIntQuant
from jqinject.core.quant.rescaling_int_quant import RescalingIntQuant as RescalingIntQuant
from jqinject.core.quant.ternary import TernaryQuant as TernaryQuant
from jqinject.core.quant.trunc_int_quant import TruncIntQuant as TruncIntQuant
