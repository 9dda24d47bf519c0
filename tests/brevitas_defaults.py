"""The quantizers that Brevitas puts into slots nobody names; ours stay empty until they are named."""

from typing import Any

from jqinject.quant import (
    Int8ActPerTensorFloat,
    Int8WeightPerTensorFloat,
    Int32Bias,
    Uint8ActPerTensorFloat,
)

WITHIN_ATTENTION = {
    "q_scaled_quant": Int8ActPerTensorFloat,
    "k_transposed_quant": Int8ActPerTensorFloat,
    "attn_output_weights_quant": Uint8ActPerTensorFloat,
    "v_quant": Int8ActPerTensorFloat,
}
PROJECTIONS = {
    f"{part}_{name}_quant": quantizer
    for part in ("in_proj", "out_proj")
    for name, quantizer in {
        "input": Int8ActPerTensorFloat,
        "weight": Int8WeightPerTensorFloat,
        "bias": Int32Bias,
    }.items()
}
ATTENTION = WITHIN_ATTENTION | PROJECTIONS
SIMPLE_CELL = {
    "weight_quant": Int8WeightPerTensorFloat,
    "bias_quant": Int32Bias,
    "io_quant": Int8ActPerTensorFloat,
    "gate_acc_quant": Int8ActPerTensorFloat,
}
GRU_CELL = SIMPLE_CELL | {"sigmoid_quant": Uint8ActPerTensorFloat, "tanh_quant": Int8ActPerTensorFloat}
LSTM_CELL = GRU_CELL | {"cell_state_quant": Int8ActPerTensorFloat}
RECURRENT: dict[str, dict[str, Any]] = {
    "QuantSimpleCell": SIMPLE_CELL,
    "QuantRNN": SIMPLE_CELL,
    "QuantGRUCell": GRU_CELL,
    "QuantLSTMCell": LSTM_CELL,
    "QuantOptimizedLSTMCell": LSTM_CELL,
    "QuantLSTM": LSTM_CELL,
}
