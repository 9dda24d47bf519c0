"""Quantized recurrent cells, and layers of them over whole sequences."""

from jqinject.nn.recurrent.lstm_cells import QuantLSTMCell as QuantLSTMCell
from jqinject.nn.recurrent.lstm_cells import QuantOptimizedLSTMCell as QuantOptimizedLSTMCell
from jqinject.nn.recurrent.other_cells import QuantGRUCell as QuantGRUCell
from jqinject.nn.recurrent.other_cells import QuantSimpleCell as QuantSimpleCell
from jqinject.nn.recurrent.recurrent_layers import QuantLSTM as QuantLSTM
from jqinject.nn.recurrent.recurrent_layers import QuantRNN as QuantRNN
from jqinject.nn.recurrent.torch_state import recurrent_state_from_torch as recurrent_state_from_torch
