"""Quantized layers."""

from jqinject.nn.activations import QuantHardTanh as QuantHardTanh
from jqinject.nn.activations import QuantIdentity as QuantIdentity
from jqinject.nn.activations import QuantReLU as QuantReLU
from jqinject.nn.activations import QuantSigmoid as QuantSigmoid
from jqinject.nn.activations import QuantTanh as QuantTanh
from jqinject.nn.checkpoint import QuantCheckpoint as QuantCheckpoint
from jqinject.nn.conv import QuantConv as QuantConv
from jqinject.nn.linear import QuantLinear as QuantLinear
