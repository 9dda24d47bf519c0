"""Ready-made quantizers, by the names Brevitas gives them: declarations only."""

from jqinject.proxy import QuantizerLike as QuantizerLike
from jqinject.quant.codebook import NF4WeightPerChannelFloat as NF4WeightPerChannelFloat
from jqinject.quant.codebook import NF4WeightPerGroupFloat as NF4WeightPerGroupFloat
from jqinject.quant.codebook import NF4WeightPerTensorFloat as NF4WeightPerTensorFloat
from jqinject.quant.enums import BitWidthImplType as BitWidthImplType
from jqinject.quant.enums import FloatToIntImplType as FloatToIntImplType
from jqinject.quant.enums import LearnedRoundImplType as LearnedRoundImplType
from jqinject.quant.enums import QuantType as QuantType
from jqinject.quant.enums import RestrictValueType as RestrictValueType
from jqinject.quant.enums import ScalingImplType as ScalingImplType
from jqinject.quant.enums import ScalingPerOutputType as ScalingPerOutputType
from jqinject.quant.enums import StatsOp as StatsOp
from jqinject.quant.enums import TruncScalingImplType as TruncScalingImplType
from jqinject.quant.integer.binary_and_ternary import (
    SignedBinaryActPerTensorConst as SignedBinaryActPerTensorConst,
)
from jqinject.quant.integer.binary_and_ternary import (
    SignedBinaryWeightPerTensorConst as SignedBinaryWeightPerTensorConst,
)
from jqinject.quant.integer.binary_and_ternary import (
    SignedTernaryActPerTensorConst as SignedTernaryActPerTensorConst,
)
from jqinject.quant.integer.binary_and_ternary import (
    SignedTernaryWeightPerTensorConst as SignedTernaryWeightPerTensorConst,
)
from jqinject.quant.integer.calibrated_int import Int4WeightPerGroupAbsMax as Int4WeightPerGroupAbsMax
from jqinject.quant.integer.calibrated_int import Int8ActDynamicPerRow as Int8ActDynamicPerRow
from jqinject.quant.integer.calibrated_int import Int8ActDynamicPerTensor as Int8ActDynamicPerTensor
from jqinject.quant.integer.calibrated_int import Int8ActPerTensorAbsMax as Int8ActPerTensorAbsMax
from jqinject.quant.integer.calibrated_int import Int8ActPerTensorMinMax as Int8ActPerTensorMinMax
from jqinject.quant.integer.calibrated_int import Int8ActPerTensorMSE as Int8ActPerTensorMSE
from jqinject.quant.integer.calibrated_int import Int8ActPerTensorPercentile as Int8ActPerTensorPercentile
from jqinject.quant.integer.calibrated_int import Int8ActPerTensorRMS as Int8ActPerTensorRMS
from jqinject.quant.integer.calibrated_int import Int8WeightPerChannelAbsMax as Int8WeightPerChannelAbsMax
from jqinject.quant.integer.calibrated_int import Int8WeightPerTensorAbsMax as Int8WeightPerTensorAbsMax
from jqinject.quant.integer.decoupled_int import (
    Int4WeightPerTensorFixedPointDecoupled as Int4WeightPerTensorFixedPointDecoupled,
)
from jqinject.quant.integer.decoupled_int import (
    Int4WeightPerTensorFloatDecoupled as Int4WeightPerTensorFloatDecoupled,
)
from jqinject.quant.integer.decoupled_int import (
    Int8AccumulatorAwareWeightQuant as Int8AccumulatorAwareWeightQuant,
)
from jqinject.quant.integer.decoupled_int import (
    Int8AccumulatorAwareZeroCenterWeightQuant as Int8AccumulatorAwareZeroCenterWeightQuant,
)
from jqinject.quant.integer.decoupled_int import (
    Int8WeightNormL2PerChannelFixedPoint as Int8WeightNormL2PerChannelFixedPoint,
)
from jqinject.quant.integer.decoupled_int import (
    Int8WeightPerChannelFloatDecoupled as Int8WeightPerChannelFloatDecoupled,
)
from jqinject.quant.integer.dynamic_int import Int8DynamicActPerGroupFloat as Int8DynamicActPerGroupFloat
from jqinject.quant.integer.dynamic_int import (
    Int8DynamicActPerRowFixedPoint as Int8DynamicActPerRowFixedPoint,
)
from jqinject.quant.integer.dynamic_int import Int8DynamicActPerRowFloat as Int8DynamicActPerRowFloat
from jqinject.quant.integer.dynamic_int import Int8DynamicActPerTensorFloat as Int8DynamicActPerTensorFloat
from jqinject.quant.integer.dynamic_int import (
    ShiftedUint8DynamicActPerGroupFloat as ShiftedUint8DynamicActPerGroupFloat,
)
from jqinject.quant.integer.dynamic_int import (
    ShiftedUint8DynamicActPerRowFloat as ShiftedUint8DynamicActPerRowFloat,
)
from jqinject.quant.integer.dynamic_int import (
    ShiftedUint8DynamicActPerTensorFloat as ShiftedUint8DynamicActPerTensorFloat,
)
from jqinject.quant.integer.fixed_point import Int8ActPerTensorFixedPoint as Int8ActPerTensorFixedPoint
from jqinject.quant.integer.fixed_point import (
    Int8ActPerTensorFixedPointMinMaxInit as Int8ActPerTensorFixedPointMinMaxInit,
)
from jqinject.quant.integer.fixed_point import Int8ActPerTensorFixedPointMSE as Int8ActPerTensorFixedPointMSE
from jqinject.quant.integer.fixed_point import (
    Int8BiasPerTensorFixedPointInternalScaling as Int8BiasPerTensorFixedPointInternalScaling,
)
from jqinject.quant.integer.fixed_point import (
    Int8WeightPerChannelFixedPoint as Int8WeightPerChannelFixedPoint,
)
from jqinject.quant.integer.fixed_point import (
    Int8WeightPerChannelFixedPointMSE as Int8WeightPerChannelFixedPointMSE,
)
from jqinject.quant.integer.fixed_point import Int8WeightPerTensorFixedPoint as Int8WeightPerTensorFixedPoint
from jqinject.quant.integer.fixed_point import (
    Int8WeightPerTensorFixedPointMSE as Int8WeightPerTensorFixedPointMSE,
)
from jqinject.quant.integer.fixed_point import Uint8ActPerTensorFixedPoint as Uint8ActPerTensorFixedPoint
from jqinject.quant.integer.fixed_point import (
    Uint8ActPerTensorFixedPointMaxInit as Uint8ActPerTensorFixedPointMaxInit,
)
from jqinject.quant.integer.fixed_point import (
    Uint8ActPerTensorFixedPointMSE as Uint8ActPerTensorFixedPointMSE,
)
from jqinject.quant.integer.group_int import IntWeightSymmetricGroupQuant as IntWeightSymmetricGroupQuant
from jqinject.quant.integer.group_int import (
    IntWeightSymmetricGroupQuantMSE as IntWeightSymmetricGroupQuantMSE,
)
from jqinject.quant.integer.group_int import (
    ShiftedUint8WeightGroupQuantFloat as ShiftedUint8WeightGroupQuantFloat,
)
from jqinject.quant.integer.group_int import (
    ShiftedUint8WeightGroupQuantFloatMSE as ShiftedUint8WeightGroupQuantFloatMSE,
)
from jqinject.quant.integer.group_int import (
    ShiftedUint8WeightPerGroupFloatHQO as ShiftedUint8WeightPerGroupFloatHQO,
)
from jqinject.quant.integer.scaled_int import Int8ActPerTensorFloat as Int8ActPerTensorFloat
from jqinject.quant.integer.scaled_int import (
    Int8ActPerTensorFloatBatchQuant1d as Int8ActPerTensorFloatBatchQuant1d,
)
from jqinject.quant.integer.scaled_int import (
    Int8ActPerTensorFloatBatchQuant2d as Int8ActPerTensorFloatBatchQuant2d,
)
from jqinject.quant.integer.scaled_int import (
    Int8ActPerTensorFloatMinMaxInit as Int8ActPerTensorFloatMinMaxInit,
)
from jqinject.quant.integer.scaled_int import Int8ActPerTensorFloatMSE as Int8ActPerTensorFloatMSE
from jqinject.quant.integer.scaled_int import Int8Bias as Int8Bias
from jqinject.quant.integer.scaled_int import (
    Int8BiasPerTensorFloatInternalScaling as Int8BiasPerTensorFloatInternalScaling,
)
from jqinject.quant.integer.scaled_int import Int8WeightPerChannelFloat as Int8WeightPerChannelFloat
from jqinject.quant.integer.scaled_int import Int8WeightPerChannelFloatHQO as Int8WeightPerChannelFloatHQO
from jqinject.quant.integer.scaled_int import Int8WeightPerChannelFloatMSE as Int8WeightPerChannelFloatMSE
from jqinject.quant.integer.scaled_int import Int8WeightPerTensorFloat as Int8WeightPerTensorFloat
from jqinject.quant.integer.scaled_int import Int8WeightPerTensorFloatHQO as Int8WeightPerTensorFloatHQO
from jqinject.quant.integer.scaled_int import Int8WeightPerTensorFloatMSE as Int8WeightPerTensorFloatMSE
from jqinject.quant.integer.scaled_int import Int16Bias as Int16Bias
from jqinject.quant.integer.scaled_int import Int24Bias as Int24Bias
from jqinject.quant.integer.scaled_int import Int32Bias as Int32Bias
from jqinject.quant.integer.scaled_int import IntBias as IntBias
from jqinject.quant.integer.scaled_int import Uint8ActPerTensorFloat as Uint8ActPerTensorFloat
from jqinject.quant.integer.scaled_int import (
    Uint8ActPerTensorFloatBatchQuant1d as Uint8ActPerTensorFloatBatchQuant1d,
)
from jqinject.quant.integer.scaled_int import (
    Uint8ActPerTensorFloatBatchQuant2d as Uint8ActPerTensorFloatBatchQuant2d,
)
from jqinject.quant.integer.scaled_int import Uint8ActPerTensorFloatMaxInit as Uint8ActPerTensorFloatMaxInit
from jqinject.quant.integer.scaled_int import Uint8ActPerTensorFloatMSE as Uint8ActPerTensorFloatMSE
from jqinject.quant.integer.shifted_scaled_int import (
    ShiftedUint8ActPerTensorFixedPoint as ShiftedUint8ActPerTensorFixedPoint,
)
from jqinject.quant.integer.shifted_scaled_int import (
    ShiftedUint8ActPerTensorFixedPointMSE as ShiftedUint8ActPerTensorFixedPointMSE,
)
from jqinject.quant.integer.shifted_scaled_int import (
    ShiftedUint8ActPerTensorFloat as ShiftedUint8ActPerTensorFloat,
)
from jqinject.quant.integer.shifted_scaled_int import (
    ShiftedUint8ActPerTensorFloatHQO as ShiftedUint8ActPerTensorFloatHQO,
)
from jqinject.quant.integer.shifted_scaled_int import (
    ShiftedUint8ActPerTensorFloatMSE as ShiftedUint8ActPerTensorFloatMSE,
)
from jqinject.quant.integer.shifted_scaled_int import (
    ShiftedUint8WeightPerChannelFloat as ShiftedUint8WeightPerChannelFloat,
)
from jqinject.quant.integer.shifted_scaled_int import (
    ShiftedUint8WeightPerChannelFloatHQO as ShiftedUint8WeightPerChannelFloatHQO,
)
from jqinject.quant.integer.shifted_scaled_int import (
    ShiftedUint8WeightPerChannelFloatMSE as ShiftedUint8WeightPerChannelFloatMSE,
)
from jqinject.quant.integer.shifted_scaled_int import (
    ShiftedUint8WeightPerTensorFloat as ShiftedUint8WeightPerTensorFloat,
)
from jqinject.quant.integer.shifted_scaled_int import (
    ShiftedUint8WeightPerTensorFloatHQO as ShiftedUint8WeightPerTensorFloatHQO,
)
from jqinject.quant.integer.shifted_scaled_int import (
    ShiftedUint8WeightPerTensorFloatMSE as ShiftedUint8WeightPerTensorFloatMSE,
)
from jqinject.quant.integer.truncated_int import RoundTo8bit as RoundTo8bit
from jqinject.quant.integer.truncated_int import ShiftRoundSaturateTo8bit as ShiftRoundSaturateTo8bit
from jqinject.quant.integer.truncated_int import TruncTo8bit as TruncTo8bit
from jqinject.quant.minifloat.dynamic_float import (
    Fp8e4m3DynamicActPerGroupFloat as Fp8e4m3DynamicActPerGroupFloat,
)
from jqinject.quant.minifloat.dynamic_float import (
    FP8e4m3FNUZDynamicActPerRowFloat as FP8e4m3FNUZDynamicActPerRowFloat,
)
from jqinject.quant.minifloat.dynamic_float import (
    Fp8e4m3FNUZDynamicActPerTensorFloat as Fp8e4m3FNUZDynamicActPerTensorFloat,
)
from jqinject.quant.minifloat.dynamic_float import (
    Fp8e4m3OCPDynamicActPerGroupFloat as Fp8e4m3OCPDynamicActPerGroupFloat,
)
from jqinject.quant.minifloat.dynamic_float import (
    FP8e4m3OCPDynamicActPerRowFixedPoint as FP8e4m3OCPDynamicActPerRowFixedPoint,
)
from jqinject.quant.minifloat.dynamic_float import (
    FP8e4m3OCPDynamicActPerRowFloat as FP8e4m3OCPDynamicActPerRowFloat,
)
from jqinject.quant.minifloat.dynamic_float import (
    Fp8e4m3OCPDynamicActPerTensorFloat as Fp8e4m3OCPDynamicActPerTensorFloat,
)
from jqinject.quant.minifloat.dynamic_float import (
    Fp8e4m3OCPWeightSymmetricGroupQuant as Fp8e4m3OCPWeightSymmetricGroupQuant,
)
from jqinject.quant.minifloat.dynamic_float import (
    Fp8e4m3WeightSymmetricGroupQuant as Fp8e4m3WeightSymmetricGroupQuant,
)
from jqinject.quant.minifloat.float8 import Fp8e4m3ActPerTensorCurrent as Fp8e4m3ActPerTensorCurrent
from jqinject.quant.minifloat.float8 import Fp8e4m3ActPerTensorDelayed as Fp8e4m3ActPerTensorDelayed
from jqinject.quant.minifloat.float8 import Fp8e4m3FNUZActPerTensorCurrent as Fp8e4m3FNUZActPerTensorCurrent
from jqinject.quant.minifloat.float8 import Fp8e4m3FNUZActPerTensorDelayed as Fp8e4m3FNUZActPerTensorDelayed
from jqinject.quant.minifloat.float8 import Fp8e4m3FNUZGradPerTensorCurrent as Fp8e4m3FNUZGradPerTensorCurrent
from jqinject.quant.minifloat.float8 import Fp8e4m3FNUZGradPerTensorDelayed as Fp8e4m3FNUZGradPerTensorDelayed
from jqinject.quant.minifloat.float8 import (
    Fp8e4m3FNUZWeightPerChannelCurrent as Fp8e4m3FNUZWeightPerChannelCurrent,
)
from jqinject.quant.minifloat.float8 import (
    Fp8e4m3FNUZWeightPerChannelDelayed as Fp8e4m3FNUZWeightPerChannelDelayed,
)
from jqinject.quant.minifloat.float8 import (
    Fp8e4m3FNUZWeightPerTensorCurrent as Fp8e4m3FNUZWeightPerTensorCurrent,
)
from jqinject.quant.minifloat.float8 import (
    Fp8e4m3FNUZWeightPerTensorDelayed as Fp8e4m3FNUZWeightPerTensorDelayed,
)
from jqinject.quant.minifloat.float8 import Fp8e4m3GradPerTensorCurrent as Fp8e4m3GradPerTensorCurrent
from jqinject.quant.minifloat.float8 import Fp8e4m3GradPerTensorDelayed as Fp8e4m3GradPerTensorDelayed
from jqinject.quant.minifloat.float8 import Fp8e4m3WeightPerChannelCurrent as Fp8e4m3WeightPerChannelCurrent
from jqinject.quant.minifloat.float8 import Fp8e4m3WeightPerChannelDelayed as Fp8e4m3WeightPerChannelDelayed
from jqinject.quant.minifloat.float8 import Fp8e4m3WeightPerTensorCurrent as Fp8e4m3WeightPerTensorCurrent
from jqinject.quant.minifloat.float8 import Fp8e4m3WeightPerTensorDelayed as Fp8e4m3WeightPerTensorDelayed
from jqinject.quant.minifloat.float8 import Fp8e5m2FNUZGradPerTensorCurrent as Fp8e5m2FNUZGradPerTensorCurrent
from jqinject.quant.minifloat.float8 import Fp8e5m2FNUZGradPerTensorDelayed as Fp8e5m2FNUZGradPerTensorDelayed
from jqinject.quant.minifloat.float8 import Fp8e5m2GradPerTensorCurrent as Fp8e5m2GradPerTensorCurrent
from jqinject.quant.minifloat.float8 import Fp8e5m2GradPerTensorDelayed as Fp8e5m2GradPerTensorDelayed
from jqinject.quant.minifloat.float_fnuz import Fp8e4m3FNUZAct as Fp8e4m3FNUZAct
from jqinject.quant.minifloat.float_fnuz import Fp8e4m3FNUZActPerTensorFloat as Fp8e4m3FNUZActPerTensorFloat
from jqinject.quant.minifloat.float_fnuz import (
    Fp8e4m3FNUZActPerTensorFloatMSE as Fp8e4m3FNUZActPerTensorFloatMSE,
)
from jqinject.quant.minifloat.float_fnuz import Fp8e4m3FNUZWeight as Fp8e4m3FNUZWeight
from jqinject.quant.minifloat.float_fnuz import (
    Fp8e4m3FNUZWeightPerChannelFloat as Fp8e4m3FNUZWeightPerChannelFloat,
)
from jqinject.quant.minifloat.float_fnuz import (
    Fp8e4m3FNUZWeightPerChannelFloatMSE as Fp8e4m3FNUZWeightPerChannelFloatMSE,
)
from jqinject.quant.minifloat.float_fnuz import (
    Fp8e4m3FNUZWeightPerTensorFloat as Fp8e4m3FNUZWeightPerTensorFloat,
)
from jqinject.quant.minifloat.float_fnuz import (
    Fp8e4m3FNUZWeightPerTensorFloatMSE as Fp8e4m3FNUZWeightPerTensorFloatMSE,
)
from jqinject.quant.minifloat.float_fnuz import Fp8e5m2FNUZAct as Fp8e5m2FNUZAct
from jqinject.quant.minifloat.float_fnuz import Fp8e5m2FNUZActPerTensorFloat as Fp8e5m2FNUZActPerTensorFloat
from jqinject.quant.minifloat.float_fnuz import (
    Fp8e5m2FNUZActPerTensorFloatMSE as Fp8e5m2FNUZActPerTensorFloatMSE,
)
from jqinject.quant.minifloat.float_fnuz import Fp8e5m2FNUZWeight as Fp8e5m2FNUZWeight
from jqinject.quant.minifloat.float_fnuz import (
    Fp8e5m2FNUZWeightPerChannelFloat as Fp8e5m2FNUZWeightPerChannelFloat,
)
from jqinject.quant.minifloat.float_fnuz import (
    Fp8e5m2FNUZWeightPerChannelFloatMSE as Fp8e5m2FNUZWeightPerChannelFloatMSE,
)
from jqinject.quant.minifloat.float_fnuz import (
    Fp8e5m2FNUZWeightPerTensorFloat as Fp8e5m2FNUZWeightPerTensorFloat,
)
from jqinject.quant.minifloat.float_fnuz import (
    Fp8e5m2FNUZWeightPerTensorFloatMSE as Fp8e5m2FNUZWeightPerTensorFloatMSE,
)
from jqinject.quant.minifloat.float_fnuz import FpFNUZAct as FpFNUZAct
from jqinject.quant.minifloat.float_fnuz import FpFNUZActPerChannelFloat2d as FpFNUZActPerChannelFloat2d
from jqinject.quant.minifloat.float_fnuz import FpFNUZActPerChannelFloat2dMSE as FpFNUZActPerChannelFloat2dMSE
from jqinject.quant.minifloat.float_fnuz import FpFNUZActPerTensorFloat as FpFNUZActPerTensorFloat
from jqinject.quant.minifloat.float_fnuz import FpFNUZActPerTensorFloatMSE as FpFNUZActPerTensorFloatMSE
from jqinject.quant.minifloat.float_fnuz import FpFNUZWeight as FpFNUZWeight
from jqinject.quant.minifloat.float_fnuz import FpFNUZWeightPerChannelFloat as FpFNUZWeightPerChannelFloat
from jqinject.quant.minifloat.float_fnuz import (
    FpFNUZWeightPerChannelFloatMSE as FpFNUZWeightPerChannelFloatMSE,
)
from jqinject.quant.minifloat.float_fnuz import FpFNUZWeightPerTensorFloat as FpFNUZWeightPerTensorFloat
from jqinject.quant.minifloat.float_fnuz import FpFNUZWeightPerTensorFloatMSE as FpFNUZWeightPerTensorFloatMSE
from jqinject.quant.minifloat.float_ocp import Fp4e2m1OCPAct as Fp4e2m1OCPAct
from jqinject.quant.minifloat.float_ocp import Fp4e2m1OCPActPerTensorFloat as Fp4e2m1OCPActPerTensorFloat
from jqinject.quant.minifloat.float_ocp import Fp4e2m1OCPWeight as Fp4e2m1OCPWeight
from jqinject.quant.minifloat.float_ocp import (
    Fp4e2m1OCPWeightPerChannelFloat as Fp4e2m1OCPWeightPerChannelFloat,
)
from jqinject.quant.minifloat.float_ocp import (
    Fp4e2m1OCPWeightPerTensorFloat as Fp4e2m1OCPWeightPerTensorFloat,
)
from jqinject.quant.minifloat.float_ocp import Fp6e2m3OCPAct as Fp6e2m3OCPAct
from jqinject.quant.minifloat.float_ocp import Fp6e2m3OCPActPerTensorFloat as Fp6e2m3OCPActPerTensorFloat
from jqinject.quant.minifloat.float_ocp import Fp6e2m3OCPWeight as Fp6e2m3OCPWeight
from jqinject.quant.minifloat.float_ocp import (
    Fp6e2m3OCPWeightPerChannelFloat as Fp6e2m3OCPWeightPerChannelFloat,
)
from jqinject.quant.minifloat.float_ocp import (
    Fp6e2m3OCPWeightPerTensorFloat as Fp6e2m3OCPWeightPerTensorFloat,
)
from jqinject.quant.minifloat.float_ocp import Fp6e3m2OCPAct as Fp6e3m2OCPAct
from jqinject.quant.minifloat.float_ocp import Fp6e3m2OCPActPerTensorFloat as Fp6e3m2OCPActPerTensorFloat
from jqinject.quant.minifloat.float_ocp import Fp6e3m2OCPWeight as Fp6e3m2OCPWeight
from jqinject.quant.minifloat.float_ocp import (
    Fp6e3m2OCPWeightPerChannelFloat as Fp6e3m2OCPWeightPerChannelFloat,
)
from jqinject.quant.minifloat.float_ocp import (
    Fp6e3m2OCPWeightPerTensorFloat as Fp6e3m2OCPWeightPerTensorFloat,
)
from jqinject.quant.minifloat.float_ocp import Fp8e4m3OCPAct as Fp8e4m3OCPAct
from jqinject.quant.minifloat.float_ocp import Fp8e4m3OCPActPerTensorFloat as Fp8e4m3OCPActPerTensorFloat
from jqinject.quant.minifloat.float_ocp import (
    Fp8e4m3OCPActPerTensorFloatMSE as Fp8e4m3OCPActPerTensorFloatMSE,
)
from jqinject.quant.minifloat.float_ocp import Fp8e4m3OCPWeight as Fp8e4m3OCPWeight
from jqinject.quant.minifloat.float_ocp import (
    Fp8e4m3OCPWeightPerChannelFloat as Fp8e4m3OCPWeightPerChannelFloat,
)
from jqinject.quant.minifloat.float_ocp import (
    Fp8e4m3OCPWeightPerChannelFloatMSE as Fp8e4m3OCPWeightPerChannelFloatMSE,
)
from jqinject.quant.minifloat.float_ocp import (
    Fp8e4m3OCPWeightPerTensorFloat as Fp8e4m3OCPWeightPerTensorFloat,
)
from jqinject.quant.minifloat.float_ocp import (
    Fp8e4m3OCPWeightPerTensorFloatMSE as Fp8e4m3OCPWeightPerTensorFloatMSE,
)
from jqinject.quant.minifloat.float_ocp import Fp8e5m2OCPAct as Fp8e5m2OCPAct
from jqinject.quant.minifloat.float_ocp import Fp8e5m2OCPActPerTensorFloat as Fp8e5m2OCPActPerTensorFloat
from jqinject.quant.minifloat.float_ocp import (
    Fp8e5m2OCPActPerTensorFloatMSE as Fp8e5m2OCPActPerTensorFloatMSE,
)
from jqinject.quant.minifloat.float_ocp import Fp8e5m2OCPWeight as Fp8e5m2OCPWeight
from jqinject.quant.minifloat.float_ocp import (
    Fp8e5m2OCPWeightPerChannelFloat as Fp8e5m2OCPWeightPerChannelFloat,
)
from jqinject.quant.minifloat.float_ocp import (
    Fp8e5m2OCPWeightPerChannelFloatMSE as Fp8e5m2OCPWeightPerChannelFloatMSE,
)
from jqinject.quant.minifloat.float_ocp import (
    Fp8e5m2OCPWeightPerTensorFloat as Fp8e5m2OCPWeightPerTensorFloat,
)
from jqinject.quant.minifloat.float_ocp import (
    Fp8e5m2OCPWeightPerTensorFloatMSE as Fp8e5m2OCPWeightPerTensorFloatMSE,
)
from jqinject.quant.minifloat.float_ocp import FpOCPAct as FpOCPAct
from jqinject.quant.minifloat.float_ocp import FpOCPActPerChannelFloat2d as FpOCPActPerChannelFloat2d
from jqinject.quant.minifloat.float_ocp import FpOCPActPerChannelFloat2dMSE as FpOCPActPerChannelFloat2dMSE
from jqinject.quant.minifloat.float_ocp import FpOCPActPerTensorFloat as FpOCPActPerTensorFloat
from jqinject.quant.minifloat.float_ocp import FpOCPActPerTensorFloatMSE as FpOCPActPerTensorFloatMSE
from jqinject.quant.minifloat.float_ocp import FpOCPWeight as FpOCPWeight
from jqinject.quant.minifloat.float_ocp import FpOCPWeightPerChannelFloat as FpOCPWeightPerChannelFloat
from jqinject.quant.minifloat.float_ocp import FpOCPWeightPerChannelFloatMSE as FpOCPWeightPerChannelFloatMSE
from jqinject.quant.minifloat.float_ocp import FpOCPWeightPerTensorFloat as FpOCPWeightPerTensorFloat
from jqinject.quant.minifloat.float_ocp import FpOCPWeightPerTensorFloatMSE as FpOCPWeightPerTensorFloatMSE
from jqinject.quant.minifloat.float_plain import Fp8e4m3Act as Fp8e4m3Act
from jqinject.quant.minifloat.float_plain import Fp8e4m3ActPerChannelFloat2d as Fp8e4m3ActPerChannelFloat2d
from jqinject.quant.minifloat.float_plain import (
    Fp8e4m3ActPerChannelFloat2dMSE as Fp8e4m3ActPerChannelFloat2dMSE,
)
from jqinject.quant.minifloat.float_plain import Fp8e4m3ActPerTensorFloat as Fp8e4m3ActPerTensorFloat
from jqinject.quant.minifloat.float_plain import Fp8e4m3ActPerTensorFloatMSE as Fp8e4m3ActPerTensorFloatMSE
from jqinject.quant.minifloat.float_plain import Fp8e4m3Weight as Fp8e4m3Weight
from jqinject.quant.minifloat.float_plain import Fp8e4m3WeightPerChannelFloat as Fp8e4m3WeightPerChannelFloat
from jqinject.quant.minifloat.float_plain import (
    Fp8e4m3WeightPerChannelFloatMSE as Fp8e4m3WeightPerChannelFloatMSE,
)
from jqinject.quant.minifloat.float_plain import Fp8e4m3WeightPerTensorFloat as Fp8e4m3WeightPerTensorFloat
from jqinject.quant.minifloat.float_plain import (
    Fp8e4m3WeightPerTensorFloatMSE as Fp8e4m3WeightPerTensorFloatMSE,
)
from jqinject.quant.minifloat.float_plain import Fp8e5m2Act as Fp8e5m2Act
from jqinject.quant.minifloat.float_plain import Fp8e5m2ActPerChannelFloat2d as Fp8e5m2ActPerChannelFloat2d
from jqinject.quant.minifloat.float_plain import (
    Fp8e5m2ActPerChannelFloat2dMSE as Fp8e5m2ActPerChannelFloat2dMSE,
)
from jqinject.quant.minifloat.float_plain import Fp8e5m2ActPerTensorFloat as Fp8e5m2ActPerTensorFloat
from jqinject.quant.minifloat.float_plain import Fp8e5m2ActPerTensorFloatMSE as Fp8e5m2ActPerTensorFloatMSE
from jqinject.quant.minifloat.float_plain import Fp8e5m2Weight as Fp8e5m2Weight
from jqinject.quant.minifloat.float_plain import Fp8e5m2WeightPerChannelFloat as Fp8e5m2WeightPerChannelFloat
from jqinject.quant.minifloat.float_plain import (
    Fp8e5m2WeightPerChannelFloatMSE as Fp8e5m2WeightPerChannelFloatMSE,
)
from jqinject.quant.minifloat.float_plain import Fp8e5m2WeightPerTensorFloat as Fp8e5m2WeightPerTensorFloat
from jqinject.quant.minifloat.float_plain import (
    Fp8e5m2WeightPerTensorFloatMSE as Fp8e5m2WeightPerTensorFloatMSE,
)
from jqinject.quant.minifloat.mx import MXFloat4e2m1Act as MXFloat4e2m1Act
from jqinject.quant.minifloat.mx import MXFloat4e2m1Weight as MXFloat4e2m1Weight
from jqinject.quant.minifloat.mx import MXFloat6e2m3Act as MXFloat6e2m3Act
from jqinject.quant.minifloat.mx import MXFloat6e2m3Weight as MXFloat6e2m3Weight
from jqinject.quant.minifloat.mx import MXFloat6e3m2Act as MXFloat6e3m2Act
from jqinject.quant.minifloat.mx import MXFloat6e3m2Weight as MXFloat6e3m2Weight
from jqinject.quant.minifloat.mx import MXFloat8e4m3Act as MXFloat8e4m3Act
from jqinject.quant.minifloat.mx import MXFloat8e4m3Weight as MXFloat8e4m3Weight
from jqinject.quant.minifloat.mx import MXFloat8e4m3WeightMSE as MXFloat8e4m3WeightMSE
from jqinject.quant.minifloat.mx import MXFloat8e5m2Act as MXFloat8e5m2Act
from jqinject.quant.minifloat.mx import MXFloat8e5m2Weight as MXFloat8e5m2Weight
from jqinject.quant.minifloat.mx import MXInt8Act as MXInt8Act
from jqinject.quant.minifloat.mx import MXInt8Weight as MXInt8Weight
from jqinject.quant.minifloat.mx import MXInt8WeightMSE as MXInt8WeightMSE
from jqinject.quant.minifloat.mx import ShiftedMXUInt8Weight as ShiftedMXUInt8Weight
from jqinject.quant.minifloat.mx import ShiftedMXUInt8WeightMSE as ShiftedMXUInt8WeightMSE
from jqinject.quant.minifloat.nvfp4 import NVFP4Act as NVFP4Act
from jqinject.quant.minifloat.nvfp4 import NVFP4Weight as NVFP4Weight
from jqinject.quant.none import NoneActQuant as NoneActQuant
from jqinject.quant.none import NoneBiasQuant as NoneBiasQuant
from jqinject.quant.none import NoneTruncQuant as NoneTruncQuant
from jqinject.quant.none import NoneWeightQuant as NoneWeightQuant
