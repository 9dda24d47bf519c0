"""Ready-made quantizers, by the names Brevitas gives them: declarations only."""

from jqinject.quant.binary import SignedBinaryActPerTensorConst as SignedBinaryActPerTensorConst
from jqinject.quant.binary import SignedBinaryWeightPerTensorConst as SignedBinaryWeightPerTensorConst
from jqinject.quant.fixed_point import Int8ActPerTensorFixedPoint as Int8ActPerTensorFixedPoint
from jqinject.quant.fixed_point import (
    Int8ActPerTensorFixedPointMinMaxInit as Int8ActPerTensorFixedPointMinMaxInit,
)
from jqinject.quant.fixed_point import (
    Int8BiasPerTensorFixedPointInternalScaling as Int8BiasPerTensorFixedPointInternalScaling,
)
from jqinject.quant.fixed_point import Int8WeightPerChannelFixedPoint as Int8WeightPerChannelFixedPoint
from jqinject.quant.fixed_point import Int8WeightPerTensorFixedPoint as Int8WeightPerTensorFixedPoint
from jqinject.quant.fixed_point import Uint8ActPerTensorFixedPoint as Uint8ActPerTensorFixedPoint
from jqinject.quant.fixed_point import (
    Uint8ActPerTensorFixedPointMaxInit as Uint8ActPerTensorFixedPointMaxInit,
)
from jqinject.quant.none import NoneActQuant as NoneActQuant
from jqinject.quant.none import NoneBiasQuant as NoneBiasQuant
from jqinject.quant.none import NoneWeightQuant as NoneWeightQuant
from jqinject.quant.scaled_int import Int8ActPerTensorFloat as Int8ActPerTensorFloat
from jqinject.quant.scaled_int import Int8ActPerTensorFloatBatchQuant1d as Int8ActPerTensorFloatBatchQuant1d
from jqinject.quant.scaled_int import Int8ActPerTensorFloatBatchQuant2d as Int8ActPerTensorFloatBatchQuant2d
from jqinject.quant.scaled_int import Int8ActPerTensorFloatMinMaxInit as Int8ActPerTensorFloatMinMaxInit
from jqinject.quant.scaled_int import Int8Bias as Int8Bias
from jqinject.quant.scaled_int import (
    Int8BiasPerTensorFloatInternalScaling as Int8BiasPerTensorFloatInternalScaling,
)
from jqinject.quant.scaled_int import Int8WeightPerChannelFloat as Int8WeightPerChannelFloat
from jqinject.quant.scaled_int import Int8WeightPerTensorFloat as Int8WeightPerTensorFloat
from jqinject.quant.scaled_int import Int16Bias as Int16Bias
from jqinject.quant.scaled_int import Int24Bias as Int24Bias
from jqinject.quant.scaled_int import Int32Bias as Int32Bias
from jqinject.quant.scaled_int import IntBias as IntBias
from jqinject.quant.scaled_int import Uint8ActPerTensorFloat as Uint8ActPerTensorFloat
from jqinject.quant.scaled_int import Uint8ActPerTensorFloatBatchQuant1d as Uint8ActPerTensorFloatBatchQuant1d
from jqinject.quant.scaled_int import Uint8ActPerTensorFloatBatchQuant2d as Uint8ActPerTensorFloatBatchQuant2d
from jqinject.quant.scaled_int import Uint8ActPerTensorFloatMaxInit as Uint8ActPerTensorFloatMaxInit
from jqinject.quant.shifted_scaled_int import (
    ShiftedUint8ActPerTensorFixedPoint as ShiftedUint8ActPerTensorFixedPoint,
)
from jqinject.quant.shifted_scaled_int import ShiftedUint8ActPerTensorFloat as ShiftedUint8ActPerTensorFloat
from jqinject.quant.shifted_scaled_int import (
    ShiftedUint8WeightPerChannelFloat as ShiftedUint8WeightPerChannelFloat,
)
from jqinject.quant.shifted_scaled_int import (
    ShiftedUint8WeightPerTensorFloat as ShiftedUint8WeightPerTensorFloat,
)
from jqinject.quant.ternary import SignedTernaryActPerTensorConst as SignedTernaryActPerTensorConst
from jqinject.quant.ternary import SignedTernaryWeightPerTensorConst as SignedTernaryWeightPerTensorConst
