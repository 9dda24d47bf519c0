"""Scales: `scaling_impl(x, threshold)` returns float per integer step."""

from jqinject.core.scaling.accumulator_aware import (
    AccumulatorAwareParameterPreScaling as AccumulatorAwareParameterPreScaling,
)
from jqinject.core.scaling.accumulator_aware import (
    AccumulatorAwareZeroCenterParameterPreScaling as AccumulatorAwareZeroCenterParameterPreScaling,
)
from jqinject.core.scaling.accumulator_aware import InputAwarePreScaling as InputAwarePreScaling
from jqinject.core.scaling.amax import AmaxScaling as AmaxScaling
from jqinject.core.scaling.amax import CurrentScaling as CurrentScaling
from jqinject.core.scaling.amax import DelayedScaling as DelayedScaling
from jqinject.core.scaling.block_scales import BlockScales as BlockScales
from jqinject.core.scaling.block_scales import FourOverSixScales as FourOverSixScales
from jqinject.core.scaling.block_scales import LeastNormalScales as LeastNormalScales
from jqinject.core.scaling.block_scales import NVFP4Scales as NVFP4Scales
from jqinject.core.scaling.constant import ConstScaling as ConstScaling
from jqinject.core.scaling.constant import ParameterScaling as ParameterScaling
from jqinject.core.scaling.dynamic_scaling import (
    RuntimeDynamicGroupStatsScaling as RuntimeDynamicGroupStatsScaling,
)
from jqinject.core.scaling.dynamic_scaling import RuntimeDynamicStatsScaling as RuntimeDynamicStatsScaling
from jqinject.core.scaling.float_scaling import FloatScaling as FloatScaling
from jqinject.core.scaling.from_statistics import (
    ParameterFromRuntimeStatsScaling as ParameterFromRuntimeStatsScaling,
)
from jqinject.core.scaling.from_statistics import (
    ParameterFromStatsFromParameterScaling as ParameterFromStatsFromParameterScaling,
)
from jqinject.core.scaling.from_statistics import RuntimeStatsScaling as RuntimeStatsScaling
from jqinject.core.scaling.from_statistics import (
    StatsFromParameterScaling as StatsFromParameterScaling,
)
from jqinject.core.scaling.int_scaling import IntScaling as IntScaling
from jqinject.core.scaling.int_scaling import MaxIntScaling as MaxIntScaling
from jqinject.core.scaling.int_scaling import PowerOfTwoIntScaling as PowerOfTwoIntScaling
from jqinject.core.scaling.int_scaling import SingleArgStatelessBuffer as SingleArgStatelessBuffer
from jqinject.core.scaling.learned_step import LearnedActStepScaling as LearnedActStepScaling
from jqinject.core.scaling.learned_step import LearnedStepScaling as LearnedStepScaling
from jqinject.core.scaling.mid_max import RoundMidMaxSte as RoundMidMaxSte
from jqinject.core.scaling.pre_scaling import ParameterPreScalingWeightNorm as ParameterPreScalingWeightNorm
from jqinject.core.scaling.shared_exponent import CeilExponent as CeilExponent
from jqinject.core.scaling.shared_exponent import EvenExponent as EvenExponent
from jqinject.core.scaling.shared_exponent import FloorExponent as FloorExponent
from jqinject.core.scaling.shared_exponent import RoundUpExponent as RoundUpExponent
from jqinject.core.scaling.shared_exponent import SharedExponentScaling as SharedExponentScaling
from jqinject.core.scaling.trunc_scaling import TruncMsbScaling as TruncMsbScaling
from jqinject.core.scaling.trunc_scaling import TruncScalingWrapper as TruncScalingWrapper
from jqinject.core.scaling.two_level_scaling import (
    RuntimeDynamicTwoLevelScaling as RuntimeDynamicTwoLevelScaling,
)
