"""Quantized layers: Flax's, with a quantizer for each tensor, and activations, normalizations and pooling around them.

A layer takes Flax's arguments, then quantizers (`weight_quant=`, `input_quant=`, ...), then names that a quantizer
declares anew, with the prefix of its argument (`weight_bit_width=3`). `QuantLinear.overrides(weight_quant=...)` lists
these.
"""

from jqinject.nn.activations import QuantHardTanh as QuantHardTanh
from jqinject.nn.activations import QuantIdentity as QuantIdentity
from jqinject.nn.activations import QuantReLU as QuantReLU
from jqinject.nn.activations import QuantSigmoid as QuantSigmoid
from jqinject.nn.activations import QuantTanh as QuantTanh
from jqinject.nn.attention.dot_product_attention import (
    QuantScaledDotProductAttention as QuantScaledDotProductAttention,
)
from jqinject.nn.attention.dot_product_attention import ScaledDotProductAttention as ScaledDotProductAttention
from jqinject.nn.attention.multi_head_attention import QuantMultiHeadAttention as QuantMultiHeadAttention
from jqinject.nn.attention.torch_attention import attention_from_torch as attention_from_torch
from jqinject.nn.base.batch_norm_folding import MergedBatchNorm as MergedBatchNorm
from jqinject.nn.base.batch_norm_folding import merge_bn as merge_bn
from jqinject.nn.base.weight_layer import ContractionKind as ContractionKind
from jqinject.nn.batch_norm import QuantBatchNorm as QuantBatchNorm
from jqinject.nn.checkpoint import QuantCheckpoint as QuantCheckpoint
from jqinject.nn.conv.conv import QuantConv as QuantConv
from jqinject.nn.conv.conv_transpose import QuantConvTranspose as QuantConvTranspose
from jqinject.nn.eltwise import QuantCat as QuantCat
from jqinject.nn.eltwise import QuantConcat as QuantConcat
from jqinject.nn.eltwise import QuantEltwiseAdd as QuantEltwiseAdd
from jqinject.nn.hard_swish import QuantHardSwish as QuantHardSwish
from jqinject.nn.linear.einsum import QuantEinsum as QuantEinsum
from jqinject.nn.linear.embed import QuantEmbed as QuantEmbed
from jqinject.nn.linear.linear import QuantLinear as QuantLinear
from jqinject.nn.linear.linear_general import QuantLinearGeneral as QuantLinearGeneral
from jqinject.nn.linear.lora import QuantLoRALinear as QuantLoRALinear
from jqinject.nn.norms import QuantGroupNorm as QuantGroupNorm
from jqinject.nn.norms import QuantLayerNorm as QuantLayerNorm
from jqinject.nn.norms import QuantRMSNorm as QuantRMSNorm
from jqinject.nn.pooling import QuantAvgPool as QuantAvgPool
from jqinject.nn.pooling import QuantMaxPool as QuantMaxPool
from jqinject.nn.recurrent import QuantGRUCell as QuantGRUCell
from jqinject.nn.recurrent import QuantLSTM as QuantLSTM
from jqinject.nn.recurrent import QuantLSTMCell as QuantLSTMCell
from jqinject.nn.recurrent import QuantOptimizedLSTMCell as QuantOptimizedLSTMCell
from jqinject.nn.recurrent import QuantRNN as QuantRNN
from jqinject.nn.recurrent import QuantSimpleCell as QuantSimpleCell
from jqinject.nn.recurrent import recurrent_state_from_torch as recurrent_state_from_torch
from jqinject.nn.scale_bias import QuantScaleBias as QuantScaleBias
from jqinject.nn.trunc_pool import TruncAdaptiveAvgPool2d as TruncAdaptiveAvgPool2d
from jqinject.nn.trunc_pool import TruncAvgPool as TruncAvgPool
from jqinject.nn.trunc_pool import TruncAvgPool2d as TruncAvgPool2d
from jqinject.nn.upsample import QuantUpsample as QuantUpsample

__all__ = [
    "ContractionKind",
    "MergedBatchNorm",
    "QuantAvgPool",
    "QuantBatchNorm",
    "QuantCat",
    "QuantCheckpoint",
    "QuantConcat",
    "QuantConv",
    "QuantConvTranspose",
    "QuantEinsum",
    "QuantEltwiseAdd",
    "QuantEmbed",
    "QuantGRUCell",
    "QuantGroupNorm",
    "QuantHardSwish",
    "QuantHardTanh",
    "QuantIdentity",
    "QuantLSTM",
    "QuantLSTMCell",
    "QuantLayerNorm",
    "QuantLinear",
    "QuantLinearGeneral",
    "QuantLoRALinear",
    "QuantMaxPool",
    "QuantMultiHeadAttention",
    "QuantOptimizedLSTMCell",
    "QuantRMSNorm",
    "QuantRNN",
    "QuantReLU",
    "QuantScaleBias",
    "QuantScaledDotProductAttention",
    "QuantSigmoid",
    "QuantSimpleCell",
    "QuantTanh",
    "QuantUpsample",
    "ScaledDotProductAttention",
    "TruncAdaptiveAvgPool2d",
    "TruncAvgPool",
    "TruncAvgPool2d",
    "attention_from_torch",
    "merge_bn",
    "recurrent_state_from_torch",
]


def __dir__() -> list[str]:
    return [*__all__, "__all__", "__doc__", "__name__"]
