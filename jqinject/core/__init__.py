"""Components of quantizers, built by hand or wired by name. `_protocols.py` shows how they fit together."""

from jqinject.core._protocols import PackableResult as PackableResult
from jqinject.core._protocols import QuantResult as QuantResult
from jqinject.core.amax_history import AmaxHistory as AmaxHistory
from jqinject.core.bit_width import BitWidthConst as BitWidthConst
from jqinject.core.bit_width import BitWidthParameter as BitWidthParameter
from jqinject.core.bit_width import BitWidthStatefulConst as BitWidthStatefulConst
from jqinject.core.bit_width import MsbClampBitWidth as MsbClampBitWidth
from jqinject.core.bit_width import RemoveBitwidthParameter as RemoveBitwidthParameter
from jqinject.core.calibration import AbsMaxRange as AbsMaxRange
from jqinject.core.calibration import AbsPercentileRange as AbsPercentileRange
from jqinject.core.calibration import ClippingRange as ClippingRange
from jqinject.core.calibration import FixedRange as FixedRange
from jqinject.core.calibration import MinMaxRange as MinMaxRange
from jqinject.core.calibration import MSERange as MSERange
from jqinject.core.calibration import RangeMethod as RangeMethod
from jqinject.core.calibration import RMSRange as RMSRange
from jqinject.core.calibration import SimpleMovingAverage as SimpleMovingAverage
from jqinject.core.clamp import ClampMin as ClampMin
from jqinject.core.clamp import Identity as Identity
from jqinject.core.clamp import ScalarClamp as ScalarClamp
from jqinject.core.clamp import ScalarClampMinSte as ScalarClampMinSte
from jqinject.core.clamp import ScalarClampSte as ScalarClampSte
from jqinject.core.clamp import ScalarSignedClampMinSte as ScalarSignedClampMinSte
from jqinject.core.clamp import TensorClamp as TensorClamp
from jqinject.core.clamp import TensorClampSte as TensorClampSte
from jqinject.core.delay import DelayWrapper as DelayWrapper
from jqinject.core.functions import Abs as Abs
from jqinject.core.functions import LogTwo as LogTwo
from jqinject.core.functions import PowerOfTwo as PowerOfTwo
from jqinject.core.quant import BinaryQuant as BinaryQuant
from jqinject.core.quant import CalibratedQuant as CalibratedQuant
from jqinject.core.quant import ClampedBinaryQuant as ClampedBinaryQuant
from jqinject.core.quant import DecoupledIntQuant as DecoupledIntQuant
from jqinject.core.quant import DecoupledQuantResult as DecoupledQuantResult
from jqinject.core.quant import DecoupledRescalingIntQuant as DecoupledRescalingIntQuant
from jqinject.core.quant import DecoupledRescalingIntQuantWithInput as DecoupledRescalingIntQuantWithInput
from jqinject.core.quant import FloatQuant as FloatQuant
from jqinject.core.quant import FloatQuantResult as FloatQuantResult
from jqinject.core.quant import IntQuant as IntQuant
from jqinject.core.quant import PrescaledRestrictIntQuant as PrescaledRestrictIntQuant
from jqinject.core.quant import RescalingIntQuant as RescalingIntQuant
from jqinject.core.quant import TernaryQuant as TernaryQuant
from jqinject.core.quant import TruncIntQuant as TruncIntQuant
from jqinject.core.quant import scale_and_zero_point as scale_and_zero_point
from jqinject.core.restrict_val import FloatRestrictValue as FloatRestrictValue
from jqinject.core.restrict_val import IntRestrictValue as IntRestrictValue
from jqinject.core.restrict_val import LogFloatRestrictValue as LogFloatRestrictValue
from jqinject.core.restrict_val import PowerOfTwoRestrictValue as PowerOfTwoRestrictValue
from jqinject.core.restrict_val import QuantRestrictValue as QuantRestrictValue
from jqinject.core.restrict_val import SignedFloatRestrictValue as SignedFloatRestrictValue
from jqinject.core.rounding import CeilSte as CeilSte
from jqinject.core.rounding import DPURoundSte as DPURoundSte
from jqinject.core.rounding import FloorSte as FloorSte
from jqinject.core.rounding import RoundSte as RoundSte
from jqinject.core.rounding import RoundToZeroSte as RoundToZeroSte
from jqinject.core.rounding import StochasticRoundSte as StochasticRoundSte
from jqinject.core.scaling import AccumulatorAwareParameterPreScaling as AccumulatorAwareParameterPreScaling
from jqinject.core.scaling import (
    AccumulatorAwareZeroCenterParameterPreScaling as AccumulatorAwareZeroCenterParameterPreScaling,
)
from jqinject.core.scaling import AmaxScaling as AmaxScaling
from jqinject.core.scaling import ConstScaling as ConstScaling
from jqinject.core.scaling import CurrentScaling as CurrentScaling
from jqinject.core.scaling import DelayedScaling as DelayedScaling
from jqinject.core.scaling import InputAwarePreScaling as InputAwarePreScaling
from jqinject.core.scaling import IntScaling as IntScaling
from jqinject.core.scaling import ParameterFromRuntimeStatsScaling as ParameterFromRuntimeStatsScaling
from jqinject.core.scaling import (
    ParameterFromStatsFromParameterScaling as ParameterFromStatsFromParameterScaling,
)
from jqinject.core.scaling import ParameterPreScalingWeightNorm as ParameterPreScalingWeightNorm
from jqinject.core.scaling import ParameterScaling as ParameterScaling
from jqinject.core.scaling import PowerOfTwoIntScaling as PowerOfTwoIntScaling
from jqinject.core.scaling import RuntimeStatsScaling as RuntimeStatsScaling
from jqinject.core.scaling import SingleArgStatelessBuffer as SingleArgStatelessBuffer
from jqinject.core.scaling import StatsFromParameterScaling as StatsFromParameterScaling
from jqinject.core.scaling import TruncMsbScaling as TruncMsbScaling
from jqinject.core.scaling import TruncScalingWrapper as TruncScalingWrapper
from jqinject.core.stats import AbsAve as AbsAve
from jqinject.core.stats import AbsMax as AbsMax
from jqinject.core.stats import AbsMaxAve as AbsMaxAve
from jqinject.core.stats import AbsMaxL2 as AbsMaxL2
from jqinject.core.stats import AbsMinMax as AbsMinMax
from jqinject.core.stats import AbsPercentile as AbsPercentile
from jqinject.core.stats import L1Norm as L1Norm
from jqinject.core.stats import L2Norm as L2Norm
from jqinject.core.stats import MeanLearnedSigmaStd as MeanLearnedSigmaStd
from jqinject.core.stats import MeanSigmaStd as MeanSigmaStd
from jqinject.core.stats import NegativeMinOrZero as NegativeMinOrZero
from jqinject.core.stats import NegativePercentileOrZero as NegativePercentileOrZero
from jqinject.core.stats import PercentileInterval as PercentileInterval
from jqinject.core.stats import SignedAbsMax as SignedAbsMax
from jqinject.core.stats import TwoPhaseStat as TwoPhaseStat
from jqinject.core.variables import Frozen as Frozen
from jqinject.core.variables import GradSlot as GradSlot
from jqinject.core.variables import GradStat as GradStat
from jqinject.core.variables import QuantParam as QuantParam
from jqinject.core.variables import QuantStat as QuantStat
from jqinject.core.view import OverBatchOverOutputChannelView as OverBatchOverOutputChannelView
from jqinject.core.view import OverBatchOverTensorView as OverBatchOverTensorView
from jqinject.core.view import OverOutputChannelView as OverOutputChannelView
from jqinject.core.view import OverOutputFeaturesView as OverOutputFeaturesView
from jqinject.core.view import OverTensorView as OverTensorView
from jqinject.core.zero_point import ParameterFromRuntimeZeroPoint as ParameterFromRuntimeZeroPoint
from jqinject.core.zero_point import (
    ParameterFromStatsFromParameterZeroPoint as ParameterFromStatsFromParameterZeroPoint,
)
from jqinject.core.zero_point import ParameterZeroPoint as ParameterZeroPoint
from jqinject.core.zero_point import PreZeroCenterZeroPoint as PreZeroCenterZeroPoint
from jqinject.core.zero_point import ScaleShiftQuantZeroPoint as ScaleShiftQuantZeroPoint
from jqinject.core.zero_point import StatsFromParameterZeroPoint as StatsFromParameterZeroPoint
from jqinject.core.zero_point import ZeroZeroPoint as ZeroZeroPoint
