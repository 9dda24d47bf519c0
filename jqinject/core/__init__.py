"""Components of quantizers, built by hand or wired by name. `_protocols.py` shows how they fit together."""

from jqinject.core._protocols import Packable as Packable
from jqinject.core._protocols import StaticRange as StaticRange
from jqinject.core.bit_width import BitWidthConst as BitWidthConst
from jqinject.core.bit_width import BitWidthParameter as BitWidthParameter
from jqinject.core.bit_width import BitWidthStatefulConst as BitWidthStatefulConst
from jqinject.core.bit_width import ComputeExponentBias as ComputeExponentBias
from jqinject.core.bit_width import ComputeMaxMantissa as ComputeMaxMantissa
from jqinject.core.bit_width import ExponentWidthConst as ExponentWidthConst
from jqinject.core.bit_width import MantissaWidthConst as MantissaWidthConst
from jqinject.core.bit_width import MsbClampBitWidth as MsbClampBitWidth
from jqinject.core.bit_width import RemoveBitwidthParameter as RemoveBitwidthParameter
from jqinject.core.bit_width import StaticExponentBias as StaticExponentBias
from jqinject.core.bit_width import StaticMaxMantissa as StaticMaxMantissa
from jqinject.core.clamping import ClampBeforeRounding as ClampBeforeRounding
from jqinject.core.clamping import ClampMin as ClampMin
from jqinject.core.clamping import FloatClamp as FloatClamp
from jqinject.core.clamping import FloatSaturate as FloatSaturate
from jqinject.core.clamping import Identity as Identity
from jqinject.core.clamping import LogTwo as LogTwo
from jqinject.core.clamping import PowerOfTwo as PowerOfTwo
from jqinject.core.clamping import ScalarClamp as ScalarClamp
from jqinject.core.clamping import ScalarClampMinSte as ScalarClampMinSte
from jqinject.core.clamping import ScalarClampSte as ScalarClampSte
from jqinject.core.clamping import ScalarSignedClampMinSte as ScalarSignedClampMinSte
from jqinject.core.clamping import TensorClamp as TensorClamp
from jqinject.core.clamping import TensorClampSte as TensorClampSte
from jqinject.core.component import Component as Component
from jqinject.core.component import components_in as components_in
from jqinject.core.memory.clipping_range import RangeScaling as RangeScaling
from jqinject.core.memory.clipping_range import RangeSteps as RangeSteps
from jqinject.core.memory.clipping_range import RangeZeroPoint as RangeZeroPoint
from jqinject.core.memory.clipping_range import SimpleMovingAverage as SimpleMovingAverage
from jqinject.core.memory.clipping_range import scale_and_zero_point as scale_and_zero_point
from jqinject.core.quantizers.delay import DelayWrapper as DelayWrapper
from jqinject.core.quantizers.float_quant import Float8Cast as Float8Cast
from jqinject.core.quantizers.float_quant import FloatQuant as FloatQuant
from jqinject.core.quantizers.int_quantizers import DecoupledIntQuant as DecoupledIntQuant
from jqinject.core.quantizers.int_quantizers import DecoupledRescalingIntQuant as DecoupledRescalingIntQuant
from jqinject.core.quantizers.int_quantizers import (
    DecoupledRescalingIntQuantWithInput as DecoupledRescalingIntQuantWithInput,
)
from jqinject.core.quantizers.int_quantizers import PrescaledRestrictIntQuant as PrescaledRestrictIntQuant
from jqinject.core.quantizers.int_quantizers import RescalingIntQuant as RescalingIntQuant
from jqinject.core.quantizers.int_quantizers import TruncIntQuant as TruncIntQuant
from jqinject.core.quantizers.int_quantizers import ZeroWeightsWarning as ZeroWeightsWarning
from jqinject.core.quantizers.quantizer import IntQuant as IntQuant
from jqinject.core.quantizers.quantizer import Quantized as Quantized
from jqinject.core.quantizers.quantizer import Quantizer as Quantizer
from jqinject.core.quantizers.table_quant import BinaryQuant as BinaryQuant
from jqinject.core.quantizers.table_quant import ClampedBinaryQuant as ClampedBinaryQuant
from jqinject.core.quantizers.table_quant import CodebookQuant as CodebookQuant
from jqinject.core.quantizers.table_quant import TernaryQuant as TernaryQuant
from jqinject.core.rounding import BelowMask as BelowMask
from jqinject.core.rounding import CeilSte as CeilSte
from jqinject.core.rounding import DPURoundSte as DPURoundSte
from jqinject.core.rounding import FloorSte as FloorSte
from jqinject.core.rounding import LearnedRoundHardSigmoid as LearnedRoundHardSigmoid
from jqinject.core.rounding import LearnedRoundIdentity as LearnedRoundIdentity
from jqinject.core.rounding import LearnedRoundSigmoid as LearnedRoundSigmoid
from jqinject.core.rounding import LearnedRoundSte as LearnedRoundSte
from jqinject.core.rounding import RoundHalfToZeroSte as RoundHalfToZeroSte
from jqinject.core.rounding import RoundSte as RoundSte
from jqinject.core.rounding import RoundToOddSte as RoundToOddSte
from jqinject.core.rounding import RoundToZeroSte as RoundToZeroSte
from jqinject.core.rounding import StochasticRoundSte as StochasticRoundSte
from jqinject.core.rounding import TrustMask as TrustMask
from jqinject.core.scaling.amax import AmaxScaling as AmaxScaling
from jqinject.core.scaling.block_scaling import CeilExponent as CeilExponent
from jqinject.core.scaling.block_scaling import EvenExponent as EvenExponent
from jqinject.core.scaling.block_scaling import FloorExponent as FloorExponent
from jqinject.core.scaling.block_scaling import QuantRestrictValue as QuantRestrictValue
from jqinject.core.scaling.block_scaling import RoundMidMaxSte as RoundMidMaxSte
from jqinject.core.scaling.block_scaling import RoundUpExponent as RoundUpExponent
from jqinject.core.scaling.block_scaling import SharedExponentScaling as SharedExponentScaling
from jqinject.core.scaling.of_memory import ConstScaling as ConstScaling
from jqinject.core.scaling.of_memory import LearnedActStepScaling as LearnedActStepScaling
from jqinject.core.scaling.of_memory import LearnedStepScaling as LearnedStepScaling
from jqinject.core.scaling.of_memory import (
    ParameterFromRuntimeStatsScaling as ParameterFromRuntimeStatsScaling,
)
from jqinject.core.scaling.of_memory import (
    ParameterFromStatsFromParameterScaling as ParameterFromStatsFromParameterScaling,
)
from jqinject.core.scaling.of_memory import ParameterScaling as ParameterScaling
from jqinject.core.scaling.of_memory import RuntimeDynamicGroupStatsScaling as RuntimeDynamicGroupStatsScaling
from jqinject.core.scaling.of_memory import RuntimeDynamicStatsScaling as RuntimeDynamicStatsScaling
from jqinject.core.scaling.of_memory import RuntimeStatsScaling as RuntimeStatsScaling
from jqinject.core.scaling.of_memory import StatsFromParameterScaling as StatsFromParameterScaling
from jqinject.core.scaling.pre_scaling import (
    AccumulatorAwareParameterPreScaling as AccumulatorAwareParameterPreScaling,
)
from jqinject.core.scaling.pre_scaling import (
    AccumulatorAwareZeroCenterParameterPreScaling as AccumulatorAwareZeroCenterParameterPreScaling,
)
from jqinject.core.scaling.pre_scaling import InputAwarePreScaling as InputAwarePreScaling
from jqinject.core.scaling.pre_scaling import ParameterPreScalingWeightNorm as ParameterPreScalingWeightNorm
from jqinject.core.scaling.pre_scaling import PreZeroCenterZeroPoint as PreZeroCenterZeroPoint
from jqinject.core.scaling.rule import FloatRestrictValue as FloatRestrictValue
from jqinject.core.scaling.rule import FloatScaling as FloatScaling
from jqinject.core.scaling.rule import IntRestrictValue as IntRestrictValue
from jqinject.core.scaling.rule import IntScaling as IntScaling
from jqinject.core.scaling.rule import LogFloatRestrictValue as LogFloatRestrictValue
from jqinject.core.scaling.rule import MaxIntScaling as MaxIntScaling
from jqinject.core.scaling.rule import PowerOfTwoIntScaling as PowerOfTwoIntScaling
from jqinject.core.scaling.rule import PowerOfTwoRestrictValue as PowerOfTwoRestrictValue
from jqinject.core.scaling.rule import ScaledRestrictValue as ScaledRestrictValue
from jqinject.core.scaling.rule import SignedFloatRestrictValue as SignedFloatRestrictValue
from jqinject.core.scaling.rule import SingleArgStatelessBuffer as SingleArgStatelessBuffer
from jqinject.core.scaling.rule import TruncMsbScaling as TruncMsbScaling
from jqinject.core.scaling.rule import TruncScalingWrapper as TruncScalingWrapper
from jqinject.core.scaling.rule import ZeroRestrictValue as ZeroRestrictValue
from jqinject.core.scaling.two_level_scaling import BlockScales as BlockScales
from jqinject.core.scaling.two_level_scaling import EdenScales as EdenScales
from jqinject.core.scaling.two_level_scaling import FourOverSixScales as FourOverSixScales
from jqinject.core.scaling.two_level_scaling import LeastErrorScales as LeastErrorScales
from jqinject.core.scaling.two_level_scaling import LeastNormalScales as LeastNormalScales
from jqinject.core.scaling.two_level_scaling import NVFP4Scales as NVFP4Scales
from jqinject.core.scaling.two_level_scaling import (
    RuntimeDynamicTwoLevelScaling as RuntimeDynamicTwoLevelScaling,
)
from jqinject.core.state import Frozen as Frozen
from jqinject.core.state import GradSlot as GradSlot
from jqinject.core.state import GradStat as GradStat
from jqinject.core.state import LostStateWarning as LostStateWarning
from jqinject.core.state import QuantParam as QuantParam
from jqinject.core.state import QuantStat as QuantStat
from jqinject.core.state import UncalibratedWarning as UncalibratedWarning
from jqinject.core.statistics.exact_scale import least_squares_scales as least_squares_scales
from jqinject.core.statistics.extremes import AbsMax as AbsMax
from jqinject.core.statistics.extremes import AbsMaxAve as AbsMaxAve
from jqinject.core.statistics.extremes import AbsMaxL2 as AbsMaxL2
from jqinject.core.statistics.extremes import AbsMinMax as AbsMinMax
from jqinject.core.statistics.extremes import AbsPercentile as AbsPercentile
from jqinject.core.statistics.extremes import InterpolatedAbsPercentile as InterpolatedAbsPercentile
from jqinject.core.statistics.extremes import MinMax as MinMax
from jqinject.core.statistics.extremes import NegativeMinOrZero as NegativeMinOrZero
from jqinject.core.statistics.extremes import NegativePercentileOrZero as NegativePercentileOrZero
from jqinject.core.statistics.extremes import PercentileInterval as PercentileInterval
from jqinject.core.statistics.extremes import SignedAbsMax as SignedAbsMax
from jqinject.core.statistics.half_quadratic_search import (
    HalfQuadraticOptimizerScale as HalfQuadraticOptimizerScale,
)
from jqinject.core.statistics.half_quadratic_search import (
    HalfQuadraticOptimizerZeroPoint as HalfQuadraticOptimizerZeroPoint,
)
from jqinject.core.statistics.means import RMS as RMS
from jqinject.core.statistics.means import AbsAve as AbsAve
from jqinject.core.statistics.means import AbsMean as AbsMean
from jqinject.core.statistics.means import L1Norm as L1Norm
from jqinject.core.statistics.means import L2Norm as L2Norm
from jqinject.core.statistics.means import MeanLearnedSigmaStd as MeanLearnedSigmaStd
from jqinject.core.statistics.means import MeanSigmaStd as MeanSigmaStd
from jqinject.core.statistics.means import SigmaStd as SigmaStd
from jqinject.core.statistics.ranges import AbsMaxRange as AbsMaxRange
from jqinject.core.statistics.ranges import AbsMeanRange as AbsMeanRange
from jqinject.core.statistics.ranges import AbsPercentileRange as AbsPercentileRange
from jqinject.core.statistics.ranges import ClippingRange as ClippingRange
from jqinject.core.statistics.ranges import FixedRange as FixedRange
from jqinject.core.statistics.ranges import MinMaxRange as MinMaxRange
from jqinject.core.statistics.ranges import MSERange as MSERange
from jqinject.core.statistics.ranges import NonzeroRange as NonzeroRange
from jqinject.core.statistics.ranges import RangeMethod as RangeMethod
from jqinject.core.statistics.ranges import RMSRange as RMSRange
from jqinject.core.statistics.search import MSE as MSE
from jqinject.core.statistics.search import Candidate as Candidate
from jqinject.core.statistics.search import Search as Search
from jqinject.core.statistics.search import SearchedStat as SearchedStat
from jqinject.core.statistics.statistic import TwoPhaseStat as TwoPhaseStat
from jqinject.core.transforms import Chain as Chain
from jqinject.core.transforms import ChannelScale as ChannelScale
from jqinject.core.transforms import Hadamard as Hadamard
from jqinject.core.transforms import Orthogonal as Orthogonal
from jqinject.core.transforms import Permutation as Permutation
from jqinject.core.transforms import Sized as Sized
from jqinject.core.transforms import Transform as Transform
from jqinject.core.views import DynamicOverSubChannelBlockView as DynamicOverSubChannelBlockView
from jqinject.core.views import OverBatchOverOutputChannelView as OverBatchOverOutputChannelView
from jqinject.core.views import OverBatchOverTensorView as OverBatchOverTensorView
from jqinject.core.views import OverOutputChannelView as OverOutputChannelView
from jqinject.core.views import OverOutputFeaturesView as OverOutputFeaturesView
from jqinject.core.views import OverSubChannelBlockView as OverSubChannelBlockView
from jqinject.core.views import OverTensorView as OverTensorView
from jqinject.core.zero_point import ParameterFromRuntimeZeroPoint as ParameterFromRuntimeZeroPoint
from jqinject.core.zero_point import (
    ParameterFromStatsFromParameterZeroPoint as ParameterFromStatsFromParameterZeroPoint,
)
from jqinject.core.zero_point import ParameterZeroPoint as ParameterZeroPoint
from jqinject.core.zero_point import RuntimeDynamicGroupZeroPoint as RuntimeDynamicGroupZeroPoint
from jqinject.core.zero_point import RuntimeDynamicStatsZeroPoint as RuntimeDynamicStatsZeroPoint
from jqinject.core.zero_point import ScaleShiftQuantZeroPoint as ScaleShiftQuantZeroPoint
from jqinject.core.zero_point import StatsFromParameterZeroPoint as StatsFromParameterZeroPoint
from jqinject.core.zero_point import ZeroZeroPoint as ZeroZeroPoint
from jqinject.ops.cut import GatheredWarning as GatheredWarning
