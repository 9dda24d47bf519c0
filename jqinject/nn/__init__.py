"""Quantized layers."""

from jqinject.nn.activations import QuantHardTanh as QuantHardTanh
from jqinject.nn.activations import QuantIdentity as QuantIdentity
from jqinject.nn.activations import QuantReLU as QuantReLU
from jqinject.nn.activations import QuantSigmoid as QuantSigmoid
from jqinject.nn.activations import QuantTanh as QuantTanh
from jqinject.nn.attention import QuantScaledDotProductAttention as QuantScaledDotProductAttention
from jqinject.nn.attention import ScaledDotProductAttention as ScaledDotProductAttention
from jqinject.nn.checkpoint import QuantCheckpoint as QuantCheckpoint
from jqinject.nn.conv import QuantConv as QuantConv
from jqinject.nn.conv_transpose import QuantConvTranspose as QuantConvTranspose
from jqinject.nn.einsum import QuantEinsum as QuantEinsum
from jqinject.nn.embed import QuantEmbed as QuantEmbed
from jqinject.nn.linear import QuantLinear as QuantLinear
from jqinject.nn.linear_general import QuantLinearGeneral as QuantLinearGeneral
from jqinject.nn.lora import QuantLoRALinear as QuantLoRALinear
from jqinject.nn.multi_head_attention import QuantMultiHeadAttention as QuantMultiHeadAttention
from jqinject.nn.norms import QuantBatchNorm as QuantBatchNorm
from jqinject.nn.norms import QuantGroupNorm as QuantGroupNorm
from jqinject.nn.norms import QuantLayerNorm as QuantLayerNorm
from jqinject.nn.norms import QuantRMSNorm as QuantRMSNorm
from jqinject.nn.torch_attention import attention_from_torch as attention_from_torch
