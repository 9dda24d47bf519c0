"""Quantized layers: Flax's, with a quantizer for each tensor, and activations, normalizations and pooling around them.

A layer takes Flax's arguments, then quantizers (`weight_quant=`, `input_quant=`, ...), then names that a quantizer
declares anew, with the prefix of its argument (`weight_bit_width=3`). `QuantLinear.overrides(weight_quant=...)` lists
these.
"""

import inspect as _inspect

from jqinject.nn.activations import QuantCheckpoint as QuantCheckpoint
from jqinject.nn.activations import QuantHardSwish as QuantHardSwish
from jqinject.nn.activations import QuantHardTanh as QuantHardTanh
from jqinject.nn.activations import QuantIdentity as QuantIdentity
from jqinject.nn.activations import QuantReLU as QuantReLU
from jqinject.nn.activations import QuantSigmoid as QuantSigmoid
from jqinject.nn.activations import QuantTanh as QuantTanh
from jqinject.nn.base import ContractionKind as ContractionKind
from jqinject.nn.base import merge_bn as merge_bn
from jqinject.nn.conv import QuantConv as QuantConv
from jqinject.nn.conv import QuantConvTranspose as QuantConvTranspose
from jqinject.nn.dot_product_attention import QuantScaledDotProductAttention as QuantScaledDotProductAttention
from jqinject.nn.dot_product_attention import ScaledDotProductAttention as ScaledDotProductAttention
from jqinject.nn.elementwise_weights import QuantEmbed as QuantEmbed
from jqinject.nn.elementwise_weights import QuantScaleBias as QuantScaleBias
from jqinject.nn.linear import QuantEinsum as QuantEinsum
from jqinject.nn.linear import QuantLinear as QuantLinear
from jqinject.nn.linear import QuantLinearGeneral as QuantLinearGeneral
from jqinject.nn.linear import QuantLoRALinear as QuantLoRALinear
from jqinject.nn.merging_and_resizing import QuantCat as QuantCat
from jqinject.nn.merging_and_resizing import QuantConcat as QuantConcat
from jqinject.nn.merging_and_resizing import QuantEltwiseAdd as QuantEltwiseAdd
from jqinject.nn.merging_and_resizing import QuantUpsample as QuantUpsample
from jqinject.nn.multi_head_attention import QuantMultiHeadAttention as QuantMultiHeadAttention
from jqinject.nn.norms import MergedBatchNorm as MergedBatchNorm
from jqinject.nn.norms import QuantBatchNorm as QuantBatchNorm
from jqinject.nn.norms import QuantGroupNorm as QuantGroupNorm
from jqinject.nn.norms import QuantLayerNorm as QuantLayerNorm
from jqinject.nn.norms import QuantRMSNorm as QuantRMSNorm
from jqinject.nn.pooling import QuantAvgPool as QuantAvgPool
from jqinject.nn.pooling import QuantMaxPool as QuantMaxPool
from jqinject.nn.pooling import TruncAdaptiveAvgPool2d as TruncAdaptiveAvgPool2d
from jqinject.nn.pooling import TruncAvgPool as TruncAvgPool
from jqinject.nn.pooling import TruncAvgPool2d as TruncAvgPool2d
from jqinject.nn.recurrent_cells import QuantGRUCell as QuantGRUCell
from jqinject.nn.recurrent_cells import QuantLSTMCell as QuantLSTMCell
from jqinject.nn.recurrent_cells import QuantOptimizedLSTMCell as QuantOptimizedLSTMCell
from jqinject.nn.recurrent_cells import QuantSimpleCell as QuantSimpleCell
from jqinject.nn.recurrent_layers import QuantLSTM as QuantLSTM
from jqinject.nn.recurrent_layers import QuantRNN as QuantRNN

# `help(jqinject.nn)` describes these.
__all__ = sorted(  # pyright: ignore[reportUnsupportedDunderAll]
    name for name, thing in globals().items() if name[0] != "_" and not _inspect.ismodule(thing)
)


def __dir__() -> list[str]:
    return [*__all__, "__all__", "__doc__", "__name__"]
