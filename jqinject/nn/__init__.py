"""Quantized layers."""

from jqinject.nn.activations import QuantHardTanh as QuantHardTanh
from jqinject.nn.activations import QuantIdentity as QuantIdentity
from jqinject.nn.activations import QuantReLU as QuantReLU
from jqinject.nn.activations import QuantSigmoid as QuantSigmoid
from jqinject.nn.activations import QuantTanh as QuantTanh
from jqinject.nn.batch_norm_merging import merge_bn as merge_bn
from jqinject.nn.checkpoint import QuantCheckpoint as QuantCheckpoint
from jqinject.nn.conv import QuantConv as QuantConv
from jqinject.nn.conv_transpose import QuantConvTranspose as QuantConvTranspose
from jqinject.nn.einsum import QuantEinsum as QuantEinsum
from jqinject.nn.embed import QuantEmbed as QuantEmbed
from jqinject.nn.linear import QuantLinear as QuantLinear
from jqinject.nn.linear_general import QuantLinearGeneral as QuantLinearGeneral
from jqinject.nn.lora import QuantLoRALinear as QuantLoRALinear
from jqinject.nn.norms import QuantBatchNorm as QuantBatchNorm
from jqinject.nn.norms import QuantGroupNorm as QuantGroupNorm
from jqinject.nn.norms import QuantLayerNorm as QuantLayerNorm
from jqinject.nn.norms import QuantRMSNorm as QuantRMSNorm
from jqinject.nn.recurrent import QuantGRUCell as QuantGRUCell
from jqinject.nn.recurrent import QuantLSTM as QuantLSTM
from jqinject.nn.recurrent import QuantLSTMCell as QuantLSTMCell
from jqinject.nn.recurrent import QuantOptimizedLSTMCell as QuantOptimizedLSTMCell
from jqinject.nn.recurrent import QuantRNN as QuantRNN
from jqinject.nn.recurrent import QuantSimpleCell as QuantSimpleCell
from jqinject.nn.recurrent import recurrent_state_from_torch as recurrent_state_from_torch
from jqinject.nn.scale_bias import QuantScaleBias as QuantScaleBias
