"""The fragments that quantizers are composed of: each declares a few related choices, none is a quantizer by itself.

A quantizer lists which numbers it has (`IntQuant`, `UintQuant`, ..., or the format of a minifloat), where its scale
comes from (`MaxStatsScaling`, ...), what shares a scale and which values it may take (`PerTensorFloatScaling8bit`,
...), and its role (`WeightQuantSolver`, ...). Names and numbers are Brevitas's.
"""

from jqinject.quant.fragments.decoupled_weights import (
    AccumulatorAwarePerChannelPreNorm as AccumulatorAwarePerChannelPreNorm,
)
from jqinject.quant.fragments.decoupled_weights import (
    AccumulatorAwareWeightQuant as AccumulatorAwareWeightQuant,
)
from jqinject.quant.fragments.decoupled_weights import (
    AccumulatorAwareZeroCenterPerChannelPreNorm as AccumulatorAwareZeroCenterPerChannelPreNorm,
)
from jqinject.quant.fragments.decoupled_weights import (
    AccumulatorAwareZeroCenterWeightQuant as AccumulatorAwareZeroCenterWeightQuant,
)
from jqinject.quant.fragments.decoupled_weights import DecoupledWeightQuant as DecoupledWeightQuant
from jqinject.quant.fragments.decoupled_weights import PerChannelPreNorm as PerChannelPreNorm
from jqinject.quant.fragments.decoupled_weights import (
    WeightNormPerChannelFloatDecoupled as WeightNormPerChannelFloatDecoupled,
)
from jqinject.quant.fragments.decoupled_weights import (
    WeightPerChannelFloatDecoupled as WeightPerChannelFloatDecoupled,
)
from jqinject.quant.fragments.decoupled_weights import (
    WeightPerTensorFloatDecoupledL2Param as WeightPerTensorFloatDecoupledL2Param,
)
from jqinject.quant.fragments.integers import IntQuant as IntQuant
from jqinject.quant.fragments.integers import NarrowIntQuant as NarrowIntQuant
from jqinject.quant.fragments.integers import ShiftedMinUintQuant as ShiftedMinUintQuant
from jqinject.quant.fragments.integers import (
    ShiftedParamFromPercentileUintQuant as ShiftedParamFromPercentileUintQuant,
)
from jqinject.quant.fragments.integers import SignedBinaryClampedConst as SignedBinaryClampedConst
from jqinject.quant.fragments.integers import UintQuant as UintQuant
from jqinject.quant.fragments.minifloats import FloatActBase as FloatActBase
from jqinject.quant.fragments.minifloats import FloatBase as FloatBase
from jqinject.quant.fragments.minifloats import FloatWeightBase as FloatWeightBase
from jqinject.quant.fragments.minifloats import Fp4e2m1Mixin as Fp4e2m1Mixin
from jqinject.quant.fragments.minifloats import Fp6e2m3Mixin as Fp6e2m3Mixin
from jqinject.quant.fragments.minifloats import Fp6e3m2Mixin as Fp6e3m2Mixin
from jqinject.quant.fragments.minifloats import Fp8e4m3Mixin as Fp8e4m3Mixin
from jqinject.quant.fragments.minifloats import Fp8e5m2Mixin as Fp8e5m2Mixin
from jqinject.quant.fragments.minifloats import FpFNUZMixin as FpFNUZMixin
from jqinject.quant.fragments.minifloats import FpOCPMixin as FpOCPMixin
from jqinject.quant.fragments.minifloats import ScaledFloatActBase as ScaledFloatActBase
from jqinject.quant.fragments.minifloats import ScaledFloatWeightBase as ScaledFloatWeightBase
from jqinject.quant.fragments.scales import BatchQuantStatsScaling1d as BatchQuantStatsScaling1d
from jqinject.quant.fragments.scales import BatchQuantStatsScaling2d as BatchQuantStatsScaling2d
from jqinject.quant.fragments.scales import DynamicPerGroup as DynamicPerGroup
from jqinject.quant.fragments.scales import DynamicPerRow as DynamicPerRow
from jqinject.quant.fragments.scales import LearnedStepFromInput as LearnedStepFromInput
from jqinject.quant.fragments.scales import LearnedStepFromWeight as LearnedStepFromWeight
from jqinject.quant.fragments.scales import MaxStatsScaling as MaxStatsScaling
from jqinject.quant.fragments.scales import MinMaxStatsScaling as MinMaxStatsScaling
from jqinject.quant.fragments.scales import ParamFromRuntimeMinMaxScaling as ParamFromRuntimeMinMaxScaling
from jqinject.quant.fragments.scales import (
    ParamFromRuntimePercentileIntervalScaling as ParamFromRuntimePercentileIntervalScaling,
)
from jqinject.quant.fragments.scales import (
    ParamFromRuntimePercentileScaling as ParamFromRuntimePercentileScaling,
)
from jqinject.quant.fragments.scales import ParamMinMaxInitScaling as ParamMinMaxInitScaling
from jqinject.quant.fragments.scales import PerChannelFloatScaling8bit as PerChannelFloatScaling8bit
from jqinject.quant.fragments.scales import PerChannelPoTScaling8bit as PerChannelPoTScaling8bit
from jqinject.quant.fragments.scales import PerGroupFloatScaling8bit as PerGroupFloatScaling8bit
from jqinject.quant.fragments.scales import PerTensorConstScaling2bit as PerTensorConstScaling2bit
from jqinject.quant.fragments.scales import PerTensorFloatScaling8bit as PerTensorFloatScaling8bit
from jqinject.quant.fragments.scales import PerTensorPoTScaling8bit as PerTensorPoTScaling8bit
from jqinject.quant.fragments.searched_scales import HQOActZeroPoint as HQOActZeroPoint
from jqinject.quant.fragments.searched_scales import HQOAsymmetricScale as HQOAsymmetricScale
from jqinject.quant.fragments.searched_scales import HQOSymmetricScale as HQOSymmetricScale
from jqinject.quant.fragments.searched_scales import HQOWeightZeroPoint as HQOWeightZeroPoint
from jqinject.quant.fragments.searched_scales import MSEActZeroPoint as MSEActZeroPoint
from jqinject.quant.fragments.searched_scales import MSEActZeroPointSubInjector as MSEActZeroPointSubInjector
from jqinject.quant.fragments.searched_scales import MSEAsymmetricScale as MSEAsymmetricScale
from jqinject.quant.fragments.searched_scales import (
    MSEAsymmetricScaleSubInjector as MSEAsymmetricScaleSubInjector,
)
from jqinject.quant.fragments.searched_scales import MSESymmetricScale as MSESymmetricScale
from jqinject.quant.fragments.searched_scales import (
    MSESymmetricScaleSubInjector as MSESymmetricScaleSubInjector,
)
from jqinject.quant.fragments.searched_scales import MSEWeightZeroPoint as MSEWeightZeroPoint
from jqinject.quant.fragments.searched_scales import MSEZeroPointSubInjector as MSEZeroPointSubInjector
