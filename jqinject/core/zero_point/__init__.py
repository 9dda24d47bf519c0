"""Zero points: `zero_point_impl(x, scale, bit_width)` returns the integer that stands for 0, as float32.

They are learned or measured in floats: `z` is how far the range reaches below zero, and `zero_point = clamp(round(z /
scale + min_int))`, or `z / scale + min_int` if it is not quantized.
"""

from jqinject.core.zero_point.dynamic_zero_point import (
    RuntimeDynamicGroupZeroPoint as RuntimeDynamicGroupZeroPoint,
)
from jqinject.core.zero_point.dynamic_zero_point import (
    RuntimeDynamicStatsZeroPoint as RuntimeDynamicStatsZeroPoint,
)
from jqinject.core.zero_point.learned import ParameterFromRuntimeZeroPoint as ParameterFromRuntimeZeroPoint
from jqinject.core.zero_point.learned import ParameterZeroPoint as ParameterZeroPoint
from jqinject.core.zero_point.pre_zero_point import PreZeroCenterZeroPoint as PreZeroCenterZeroPoint
from jqinject.core.zero_point.shift import ScaleShiftQuantZeroPoint as ScaleShiftQuantZeroPoint
from jqinject.core.zero_point.shift import ZeroZeroPoint as ZeroZeroPoint
from jqinject.core.zero_point.zero_point_from_parameter import (
    ParameterFromStatsFromParameterZeroPoint as ParameterFromStatsFromParameterZeroPoint,
)
from jqinject.core.zero_point.zero_point_from_parameter import (
    StatsFromParameterZeroPoint as StatsFromParameterZeroPoint,
)
