"""Recurrent layers over whole sequences."""

from __future__ import annotations

from typing import Any, Unpack, final

import jax
from flax import nnx

from jqinject.nn.base.keywords import QuantLSTMKeywords, QuantRNNKeywords
from jqinject.nn.base.quant_layer import Out, Results
from jqinject.nn.recurrent.recurrent_cells import QuantLSTMCell, QuantSimpleCell
from jqinject.nn.recurrent.recurrent_stack import QuantRecurrentStack
from jqinject.quant import QuantizerLike
from jqinject.quant_tensor import AnyQuantTensor

NONLINEARITIES = {"tanh": nnx.tanh, "relu": nnx.relu}


@final
class QuantLSTM(QuantRecurrentStack[Out]):
    """Long short-term memories over whole sequences, quantized; `torch.nn.LSTM` with Brevitas's quantizers.

    `layers[layer][direction]` is a `QuantLSTMCell`, which says what is quantized where. Weights are quantized once a
    sequence, activations at every step: each call of a quantizer counts for its statistics, as in Brevitas. All layers
    and directions share `io_quant`, and with `shared_cell_state_quant` the quantizer of cell states. The first layer
    quantizes its input; the others get what is quantized already.

    Source: Brevitas's `QuantLSTM`. Differs from Brevitas: parameters are those of `nnx.LSTMCell` (kernels are
    (in, out); `recurrent_state_from_torch` converts); no slot has a quantizer by default; initial states of several
    layers in one direction are understood; an override without effect is an error.

    Args:
        input_size: features of the input.
        hidden_size: features of the hidden state.
        num_layers: layers, each of which runs over the outputs of the one before.
        bias: whether there are biases.
        batch_first: whether data is (batch, time, features) instead of (time, batch, features).
        bidirectional: also run backwards; the outputs of both directions stand side by side.
        weight_quant: quantizer of the weights; the two of a gate share it.
        bias_quant: quantizer of the biases; `Int32Bias` counts in steps of input scale * weight scale.
        io_quant: quantizer of the input and of the hidden states.
        gate_acc_quant: quantizer of each gate's sum.
        sigmoid_quant: quantizer of the gates.
        tanh_quant: quantizer of the cell's input, and of the tanh of its state.
        cell_state_quant: quantizer of the cell state and its two parts.
        coupled_input_forget_gates: forget gate = 1 - input gate, without its own weights.
        cat_output_cell_states: return the cell states as one array instead of a tuple.
        shared_input_hidden_weights: both directions have the kernels of the input in common (input and forget gate
            crossed, as in Brevitas).
        shared_intra_layer_weight_quant: one weight quantizer for all gates of a cell.
        shared_intra_layer_gate_acc_quant: one quantizer for the sums of all gates of a cell.
        shared_cell_state_quant: one quantizer for the cell states of all cells.
        return_quant_tensor: return `IntQuantTensor`s; in training mode with the mean of the scales of all steps.
        rngs: for the parameters, and for quantizers that draw random numbers.
        more: `dtype`, `param_dtype` and other keywords of `nnx.LSTMCell`, and overrides: `weight_...`, `bias_...`,
            `io_...`, `gate_acc_...`, `sigmoid_...`, `tanh_...`, `cell_state_...`.

    Raises:
        TypeError: an argument that is not a quantizer or is one of another kind, or an override that has no effect.
        ValueError: arguments that do not go together; the text names them.
        DependencyError: a quantizer that cannot be assembled; the text shows the path.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.quant import Int8ActPerTensorFloat, Int8WeightPerTensorFloat
        >>> lstm = QuantLSTM(
        ...     3, 4, batch_first=True, weight_quant=Int8WeightPerTensorFloat, weight_bit_width=4,
        ...     io_quant=Int8ActPerTensorFloat, rngs=nnx.Rngs(0))
        >>> out, (h, c) = lstm(jnp.ones((2, 5, 3)))
        >>> out.shape, h.shape, c.shape
        ((2, 5, 4), (1, 2, 4), (1, 2, 4))
    """

    cell_class = QuantLSTMCell
    state_quantizers = ("io_quant", "cell_state_quant")
    # The input gate takes the kernel of the forget gate and the other way round, as in Brevitas, whose models would
    # give other numbers else.
    crossed = {"ii": "if_", "if_": "ii", "ig": "ig", "io": "io"}

    _results: Results[QuantLSTM[jax.Array], QuantLSTM[AnyQuantTensor]]

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        bidirectional: bool = False,
        *,
        weight_quant: QuantizerLike = None,
        bias_quant: QuantizerLike = None,
        io_quant: QuantizerLike = None,
        gate_acc_quant: QuantizerLike = None,
        sigmoid_quant: QuantizerLike = None,
        tanh_quant: QuantizerLike = None,
        cell_state_quant: QuantizerLike = None,
        coupled_input_forget_gates: bool = False,
        cat_output_cell_states: bool = True,
        shared_input_hidden_weights: bool = False,
        shared_intra_layer_weight_quant: bool = False,
        shared_intra_layer_gate_acc_quant: bool = False,
        shared_cell_state_quant: bool = True,
        return_quant_tensor: bool = False,
        rngs: nnx.Rngs,
        **more: Unpack[QuantLSTMKeywords],
    ) -> None:
        if cat_output_cell_states and cell_state_quant is not None and not shared_cell_state_quant:
            raise ValueError(
                "QuantLSTM: cell states that are quantized each by a quantizer of its own cannot be one array.\n"
                "  cure: cat_output_cell_states=False, or shared_cell_state_quant=True"
            )
        self.cat_output_cell_states = cat_output_cell_states
        self._build(locals(), more)

    def __call__(self, inputs: Any, hx: Any = None, cx: Any = None) -> tuple[Out, tuple[Out, Any]]:
        """Run over sequences.

        Args:
            inputs: float array or QuantTensor, (time, batch, features), or (batch, time, features) with `batch_first`.
            hx: initial hidden states, (layers * directions, batch, hidden); None for zeros.
            cx: initial cell states likewise.

        Returns:
            (outputs, (hidden, cell)): the hidden states of the last layer at all steps, and the last states of all
            layers and directions, (layers * directions, batch, hidden); with `cat_output_cell_states=False` the cell
            states as a tuple.

        Raises:
            ValueError: a wrong shape; a bias takes its scale from an input that is not quantized.
        """
        out, hidden, cells = self._run(inputs, (hx, cx))
        joins = self.cat_output_cell_states
        memory = self._returned(cells) if joins else tuple(self._returned(cell) for cell in cells)
        return self._returned(out), (self._returned(hidden), memory)


@final
class QuantRNN(QuantRecurrentStack[Out]):
    """Simple recurrent layers over whole sequences, quantized; `torch.nn.RNN` with Brevitas's quantizers.

    `layers[layer][direction]` is a `QuantSimpleCell`, which says what is quantized where; its bias stands in `dense_h`.
    Weights are quantized once a sequence, activations at every step. All layers and directions share `io_quant`. The
    first layer quantizes its input; the others get what is quantized already.

    Source: Brevitas's `QuantRNN`. Differs from Brevitas: no slot has a quantizer by default; that of the sums has no
    prefix of its own, and its learned scale does not begin with a random number added; kernels are (in, out)
    (`recurrent_state_from_torch` converts); initial states of several layers in one direction are understood; an
    override without effect is an error.

    Args:
        input_size: features of the input.
        hidden_size: features of the hidden state.
        num_layers: layers, each of which runs over the outputs of the one before.
        nonlinearity: "tanh" or "relu".
        bias: whether there are biases.
        batch_first: whether data is (batch, time, features) instead of (time, batch, features).
        bidirectional: also run backwards; the outputs of both directions stand side by side.
        weight_quant: quantizer of the weights; the two of a cell share it.
        bias_quant: quantizer of the biases; `Int32Bias` counts in steps of input scale * weight scale.
        io_quant: quantizer of the input and of the hidden states.
        gate_acc_quant: quantizer of the sums.
        shared_input_hidden_weights: both directions have the kernel of the input in common.
        return_quant_tensor: return `IntQuantTensor`s; in training mode with the mean of the scales of all steps.
        rngs: for the parameters, and for quantizers that draw random numbers.
        more: `dtype`, `param_dtype` and other keywords of `nnx.SimpleCell`, and overrides: `weight_...`, `bias_...`,
            `io_...`, `gate_acc_...` (`gate_acc_quant_...` means the same, as Brevitas writes it).

    Raises:
        TypeError: an argument that is not a quantizer or is one of another kind, or an override that has no effect.
        ValueError: arguments that do not go together; the text names them.
        DependencyError: a quantizer that cannot be assembled; the text shows the path.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.quant import Int8WeightPerTensorFloat
        >>> rnn = QuantRNN(
        ...     3, 4, num_layers=2, bidirectional=True, weight_quant=Int8WeightPerTensorFloat, rngs=nnx.Rngs(0))
        >>> out, h = rnn(jnp.ones((5, 2, 3)))
        >>> out.shape, h.shape
        ((5, 2, 8), (4, 2, 4))
    """

    cell_class = QuantSimpleCell
    state_quantizers = ("io_quant",)
    crossed = {"dense_i": "dense_i"}

    _results: Results[QuantRNN[jax.Array], QuantRNN[AnyQuantTensor]]

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        bidirectional: bool = False,
        *,
        weight_quant: QuantizerLike = None,
        bias_quant: QuantizerLike = None,
        io_quant: QuantizerLike = None,
        gate_acc_quant: QuantizerLike = None,
        shared_input_hidden_weights: bool = False,
        return_quant_tensor: bool = False,
        rngs: nnx.Rngs,
        **more: Unpack[QuantRNNKeywords],
    ) -> None:
        if nonlinearity not in NONLINEARITIES:
            known = " or ".join(map(repr, NONLINEARITIES))
            raise ValueError(f"QuantRNN: nonlinearity has to be {known}, got {nonlinearity!r}")
        own = {"bias_of_hidden": bias, "activation_fn": NONLINEARITIES[nonlinearity], "dtype": None}
        overrides = {key.replace("gate_acc_quant_", "gate_acc_", 1): value for key, value in more.items()}
        self._build(locals(), {**own, **overrides})

    def __call__(self, inputs: Any, hx: jax.Array | None = None) -> tuple[Out, Out]:
        """Run over sequences.

        Args:
            inputs: float array or QuantTensor, (time, batch, features), or (batch, time, features) with `batch_first`.
            hx: initial hidden states, (layers * directions, batch, hidden); None for zeros.

        Returns:
            (outputs, hidden): the hidden states of the last layer at all steps, and the last ones of all layers and
            directions, (layers * directions, batch, hidden).

        Raises:
            ValueError: a wrong shape; a bias takes its scale from an input that is not quantized.
        """
        out, hidden, _ = self._run(inputs, (hx,))
        return self._returned(out), self._returned(hidden)
