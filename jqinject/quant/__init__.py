"""Ready-made quantizers, by the names Brevitas gives them: declarations only.

Names read: number format, `Dynamic` if the scale is that of the current tensor, role, what shares a scale, where the
scale comes from or which values it takes, method. `docs/which-quantizer.md` has the rule.
"""

# ruff: noqa: I001, F403
# fmt: off
# a module that is taken over as it stands has nothing but ready-made quantizers

import typing as _typing

from jqinject.inject.errors import did_you_mean as _did_you_mean
from jqinject.proxy import QuantizerLike as QuantizerLike
from jqinject.quant.codebook import (
    LloydMaxDynamicActPerRowFloat as LloydMaxDynamicActPerRowFloat, MXFloat4e2m1QuestAct as MXFloat4e2m1QuestAct,
    MXFloat4e2m1QuestWeight as MXFloat4e2m1QuestWeight, NF4DynamicActPerGroupFloat as NF4DynamicActPerGroupFloat,
    NF4DynamicActPerRowFloat as NF4DynamicActPerRowFloat,
    NF4WeightPerChannelFloat as NF4WeightPerChannelFloat, NF4WeightPerGroupFloat as NF4WeightPerGroupFloat,
    NF4WeightPerGroupFp8Scale as NF4WeightPerGroupFp8Scale, NF4WeightPerTensorFloat as NF4WeightPerTensorFloat,
    QuestActPerRowFloat as QuestActPerRowFloat, QuestWeightPerChannelFloat as QuestWeightPerChannelFloat,
    TurboQuant2Act as TurboQuant2Act, TurboQuant3Act as TurboQuant3Act, TurboQuant4Act as TurboQuant4Act,
)
from jqinject.quant.enums import (
    BitWidthImplType as BitWidthImplType, FloatToIntImplType as FloatToIntImplType,
    LearnedRoundImplType as LearnedRoundImplType, QuantType as QuantType, RestrictValueType as RestrictValueType,
    ScaleRounding as ScaleRounding, ScalingImplType as ScalingImplType, ScalingPerOutputType as ScalingPerOutputType,
    StatsOp as StatsOp, TruncScalingImplType as TruncScalingImplType,
)
from jqinject.quant.gradients import (
    Fp8e5m2OCPDynamicGradPerTensorFloat as Fp8e5m2OCPDynamicGradPerTensorFloat,
    Fp8e5m2OCPDynamicGradPerTensorFloatStochastic as Fp8e5m2OCPDynamicGradPerTensorFloatStochastic,
    Int8DynamicGradPerRowFloat as Int8DynamicGradPerRowFloat,
    Int8DynamicGradPerRowFloatStochastic as Int8DynamicGradPerRowFloatStochastic,
    Int8DynamicGradPerTensorFloat as Int8DynamicGradPerTensorFloat,
    Int8DynamicGradPerTensorFloatStochastic as Int8DynamicGradPerTensorFloatStochastic,
    Int8GradPerTensorDelayed as Int8GradPerTensorDelayed, MXFloat4e2m1Grad as MXFloat4e2m1Grad,
    MXFloat4e2m1GradStochastic as MXFloat4e2m1GradStochastic, MXFloat6e2m3Grad as MXFloat6e2m3Grad,
    MXFloat6e3m2Grad as MXFloat6e3m2Grad, MXFloat8e4m3Grad as MXFloat8e4m3Grad, MXFloat8e5m2Grad as MXFloat8e5m2Grad,
    MXInt8Grad as MXInt8Grad,
)
from jqinject.quant.integer.calibrated_int import (
    Int4WeightPerGroupAbsMax as Int4WeightPerGroupAbsMax, Int8ActPerTensorAbsMax as Int8ActPerTensorAbsMax,
    Int8ActPerTensorMSE as Int8ActPerTensorMSE, Int8ActPerTensorMinMax as Int8ActPerTensorMinMax,
    Int8ActPerTensorPercentile as Int8ActPerTensorPercentile, Int8ActPerTensorRMS as Int8ActPerTensorRMS,
    Int8DynamicActPerRowAbsMax as Int8DynamicActPerRowAbsMax,
    Int8DynamicActPerTensorAbsMax as Int8DynamicActPerTensorAbsMax,
    Int8WeightPerChannelAbsMax as Int8WeightPerChannelAbsMax, Int8WeightPerTensorAbsMax as Int8WeightPerTensorAbsMax,
)
from jqinject.quant.integer.decoupled_int import (
    Int4WeightPerTensorFixedPointDecoupled as Int4WeightPerTensorFixedPointDecoupled,
    Int4WeightPerTensorFloatDecoupled as Int4WeightPerTensorFloatDecoupled,
    Int8AccumulatorAwareWeightQuant as Int8AccumulatorAwareWeightQuant,
    Int8AccumulatorAwareZeroCenterWeightQuant as Int8AccumulatorAwareZeroCenterWeightQuant,
    Int8WeightNormL2PerChannelFixedPoint as Int8WeightNormL2PerChannelFixedPoint,
    Int8WeightPerChannelFloatDecoupled as Int8WeightPerChannelFloatDecoupled,
)
from jqinject.quant.integer.other_int import (
    Int2WeightPerChannelLearned as Int2WeightPerChannelLearned, Int4ActPerTensorLearned as Int4ActPerTensorLearned,
    Int4WeightPerChannelLearned as Int4WeightPerChannelLearned, Int8ActPerTensorLearned as Int8ActPerTensorLearned,
    Int8DynamicActPerGroupFloat as Int8DynamicActPerGroupFloat,
    Int8DynamicActPerRowFixedPoint as Int8DynamicActPerRowFixedPoint,
    Int8DynamicActPerRowFloat as Int8DynamicActPerRowFloat,
    Int8DynamicActPerTensorFloat as Int8DynamicActPerTensorFloat,
    Int8WeightPerChannelLearned as Int8WeightPerChannelLearned, RoundTo8bit as RoundTo8bit,
    ShiftRoundSaturateTo8bit as ShiftRoundSaturateTo8bit,
    ShiftedUint8DynamicActPerGroupFloat as ShiftedUint8DynamicActPerGroupFloat,
    ShiftedUint8DynamicActPerRowFloat as ShiftedUint8DynamicActPerRowFloat,
    ShiftedUint8DynamicActPerTensorFloat as ShiftedUint8DynamicActPerTensorFloat,
    SignedBinaryActPerTensorConst as SignedBinaryActPerTensorConst,
    SignedBinaryWeightPerTensorConst as SignedBinaryWeightPerTensorConst,
    SignedTernaryActPerTensorConst as SignedTernaryActPerTensorConst,
    SignedTernaryWeightPerTensorConst as SignedTernaryWeightPerTensorConst, TruncTo8bit as TruncTo8bit,
    Uint4ActPerTensorLearned as Uint4ActPerTensorLearned, Uint8ActPerTensorLearned as Uint8ActPerTensorLearned,
)
from jqinject.quant.integer.scaled_int import (
    Int16Bias as Int16Bias, Int24Bias as Int24Bias, Int32Bias as Int32Bias,
    Int8ActPerTensorFixedPoint as Int8ActPerTensorFixedPoint,
    Int8ActPerTensorFixedPointMSE as Int8ActPerTensorFixedPointMSE,
    Int8ActPerTensorFixedPointMinMaxInit as Int8ActPerTensorFixedPointMinMaxInit,
    Int8ActPerTensorFloat as Int8ActPerTensorFloat,
    Int8ActPerTensorFloatBatchQuant1d as Int8ActPerTensorFloatBatchQuant1d,
    Int8ActPerTensorFloatBatchQuant2d as Int8ActPerTensorFloatBatchQuant2d,
    Int8ActPerTensorFloatMSE as Int8ActPerTensorFloatMSE,
    Int8ActPerTensorFloatMinMaxInit as Int8ActPerTensorFloatMinMaxInit, Int8Bias as Int8Bias,
    Int8BiasPerTensorFixedPointInternalScaling as Int8BiasPerTensorFixedPointInternalScaling,
    Int8BiasPerTensorFloatInternalScaling as Int8BiasPerTensorFloatInternalScaling,
    Int8WeightPerChannelFixedPoint as Int8WeightPerChannelFixedPoint,
    Int8WeightPerChannelFixedPointMSE as Int8WeightPerChannelFixedPointMSE,
    Int8WeightPerChannelFloat as Int8WeightPerChannelFloat,
    Int8WeightPerChannelFloatHQO as Int8WeightPerChannelFloatHQO,
    Int8WeightPerChannelFloatMSE as Int8WeightPerChannelFloatMSE,
    Int8WeightPerTensorFixedPoint as Int8WeightPerTensorFixedPoint,
    Int8WeightPerTensorFixedPointMSE as Int8WeightPerTensorFixedPointMSE,
    Int8WeightPerTensorFloat as Int8WeightPerTensorFloat, Int8WeightPerTensorFloatHQO as Int8WeightPerTensorFloatHQO,
    Int8WeightPerTensorFloatMSE as Int8WeightPerTensorFloatMSE, IntBias as IntBias,
    IntWeightSymmetricGroupQuant as IntWeightSymmetricGroupQuant,
    IntWeightSymmetricGroupQuantMSE as IntWeightSymmetricGroupQuantMSE,
    ShiftedUint8ActPerTensorFixedPoint as ShiftedUint8ActPerTensorFixedPoint,
    ShiftedUint8ActPerTensorFixedPointMSE as ShiftedUint8ActPerTensorFixedPointMSE,
    ShiftedUint8ActPerTensorFloat as ShiftedUint8ActPerTensorFloat,
    ShiftedUint8ActPerTensorFloatHQO as ShiftedUint8ActPerTensorFloatHQO,
    ShiftedUint8ActPerTensorFloatMSE as ShiftedUint8ActPerTensorFloatMSE,
    ShiftedUint8WeightGroupQuantFloat as ShiftedUint8WeightGroupQuantFloat,
    ShiftedUint8WeightGroupQuantFloatMSE as ShiftedUint8WeightGroupQuantFloatMSE,
    ShiftedUint8WeightPerChannelFloat as ShiftedUint8WeightPerChannelFloat,
    ShiftedUint8WeightPerChannelFloatHQO as ShiftedUint8WeightPerChannelFloatHQO,
    ShiftedUint8WeightPerChannelFloatMSE as ShiftedUint8WeightPerChannelFloatMSE,
    ShiftedUint8WeightPerGroupFloatHQO as ShiftedUint8WeightPerGroupFloatHQO,
    ShiftedUint8WeightPerTensorFloat as ShiftedUint8WeightPerTensorFloat,
    ShiftedUint8WeightPerTensorFloatHQO as ShiftedUint8WeightPerTensorFloatHQO,
    ShiftedUint8WeightPerTensorFloatMSE as ShiftedUint8WeightPerTensorFloatMSE,
    Uint8ActPerTensorFixedPoint as Uint8ActPerTensorFixedPoint,
    Uint8ActPerTensorFixedPointMSE as Uint8ActPerTensorFixedPointMSE,
    Uint8ActPerTensorFixedPointMaxInit as Uint8ActPerTensorFixedPointMaxInit,
    Uint8ActPerTensorFloat as Uint8ActPerTensorFloat,
    Uint8ActPerTensorFloatBatchQuant1d as Uint8ActPerTensorFloatBatchQuant1d,
    Uint8ActPerTensorFloatBatchQuant2d as Uint8ActPerTensorFloatBatchQuant2d,
    Uint8ActPerTensorFloatMSE as Uint8ActPerTensorFloatMSE,
    Uint8ActPerTensorFloatMaxInit as Uint8ActPerTensorFloatMaxInit,
)
from jqinject.quant.minifloat.blocks import (
    MXFloat4e2m1Act as MXFloat4e2m1Act, MXFloat4e2m1Weight as MXFloat4e2m1Weight, MXFloat6e2m3Act as MXFloat6e2m3Act,
    MXFloat6e2m3Weight as MXFloat6e2m3Weight, MXFloat6e3m2Act as MXFloat6e3m2Act,
    MXFloat6e3m2Weight as MXFloat6e3m2Weight, MXFloat8e4m3Act as MXFloat8e4m3Act,
    MXFloat8e4m3Weight as MXFloat8e4m3Weight, MXFloat8e4m3WeightMSE as MXFloat8e4m3WeightMSE,
    MXFloat8e5m2Act as MXFloat8e5m2Act, MXFloat8e5m2Weight as MXFloat8e5m2Weight, MXInt8Act as MXInt8Act,
    MXInt8Weight as MXInt8Weight, MXInt8WeightMSE as MXInt8WeightMSE, NVFP4Act as NVFP4Act,
    NVFP4TrainingAct as NVFP4TrainingAct, NVFP4TrainingActEden as NVFP4TrainingActEden,
    NVFP4TrainingGrad as NVFP4TrainingGrad, NVFP4TrainingGradEden as NVFP4TrainingGradEden,
    NVFP4TrainingGradStochastic as NVFP4TrainingGradStochastic, NVFP4TrainingSigns as NVFP4TrainingSigns,
    NVFP4TrainingWeight as NVFP4TrainingWeight, NVFP4Weight as NVFP4Weight,
    ShiftedMXUInt8Weight as ShiftedMXUInt8Weight, ShiftedMXUInt8WeightMSE as ShiftedMXUInt8WeightMSE,
)
from jqinject.quant.minifloat.float8 import *
from jqinject.quant.minifloat.scaled_float import *
from jqinject.quant.quartet import Quartet as Quartet, QuartetII as QuartetII
from jqinject.quant.solver.roles import (
    NoneActQuant as NoneActQuant, NoneBiasQuant as NoneBiasQuant, NoneTruncQuant as NoneTruncQuant,
    NoneWeightQuant as NoneWeightQuant,
)
from jqinject.quant.training import (
    BitNet158 as BitNet158, DelayedScaling as DelayedScaling, Float8BlockScaling as Float8BlockScaling,
    Float8CurrentScaling as Float8CurrentScaling, Fp8BlockTraining as Fp8BlockTraining,
    Fp8BlockTrainingAct as Fp8BlockTrainingAct,
    Fp8BlockTrainingGrad as Fp8BlockTrainingGrad, Fp8BlockTrainingWeight as Fp8BlockTrainingWeight,
    Fp8CurrentTraining as Fp8CurrentTraining, Fp8DelayedTraining as Fp8DelayedTraining,
    Fp8RowTraining as Fp8RowTraining, Fp8RowTrainingAct as Fp8RowTrainingAct, Fp8RowTrainingGrad as Fp8RowTrainingGrad,
    Fp8RowTrainingWeight as Fp8RowTrainingWeight, Fp8TrainingAct as Fp8TrainingAct, Fp8TrainingGrad as Fp8TrainingGrad,
    Fp8TrainingWeight as Fp8TrainingWeight, Int8Training as Int8Training, MXFP4Training as MXFP4Training,
    MXFP4TrainingAct as MXFP4TrainingAct, MXFP4TrainingGrad as MXFP4TrainingGrad,
    MXFP4TrainingWeight as MXFP4TrainingWeight, MXFP8BlockScaling as MXFP8BlockScaling,
    MXFP8Training as MXFP8Training, MXFP8TrainingAct as MXFP8TrainingAct,
    MXFP8TrainingGrad as MXFP8TrainingGrad, MXFP8TrainingWeight as MXFP8TrainingWeight,
    MXFP8e5m2TrainingGrad as MXFP8e5m2TrainingGrad, NVFP4BlockScaling as NVFP4BlockScaling,
    NVFP4Training as NVFP4Training,
)

# fmt: on

if not _typing.TYPE_CHECKING:  # it would hide misspelt names

    def __getattr__(name: str) -> _typing.Any:
        near = "" if name.startswith("_") else _did_you_mean(name, __dir__())
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}{near and ': ' + near}", name=name
        )


def __dir__() -> list[str]:
    return [name for name in globals() if name[0].isupper()] + ["__doc__", "__name__"]
