"""Quantized recurrent cells, for `nnx.RNN` and for our layers over whole sequences."""

from collections.abc import Mapping
from typing import Any, Unpack, final

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.nn.base import Slot, keywords
from jqinject.nn.recurrent_cell import (
    CELL_STATE,
    GATE_ACC,
    SIGMOID,
    TANH,
    Activation,
    CellOutput,
    CellParts,
    QuantRecurrentCell,
    set_bias,
)
from jqinject.quant_tensor import as_array

FORGET = ("forget_acc_quant", "forget_sigmoid_quant")


class QuantLSTMStep(QuantRecurrentCell):
    """Abstract: the arithmetic that cells of long short-term memories share, once the sums of their gates are made."""

    cell_state_quant = CELL_STATE
    input_acc_quant = GATE_ACC.of("input_acc_quant")
    forget_acc_quant = GATE_ACC.of("forget_acc_quant")
    cell_acc_quant = GATE_ACC.of("cell_acc_quant")
    output_acc_quant = GATE_ACC.of("output_acc_quant")
    input_sigmoid_quant = SIGMOID.of("input_sigmoid_quant")
    forget_sigmoid_quant = SIGMOID.of("forget_sigmoid_quant")
    cell_tanh_quant = TANH.of("cell_tanh_quant")
    output_sigmoid_quant = SIGMOID.of("output_sigmoid_quant")
    hidden_state_tanh_quant = TANH.of("hidden_state_tanh_quant")
    coupled_input_forget_gates: bool = False
    activation_fn: Activation

    def _held_slots(self) -> tuple[Slot, ...]:
        without = FORGET if self.coupled_input_forget_gates else ()
        return tuple(slot for slot in super()._held_slots() if slot.name not in without)

    def _step(self, parts: CellParts, carry: Any, projected: Mapping[str, jax.Array]) -> CellOutput:
        """One step; see `QuantRecurrentCell._step`."""
        memory, hidden = carry
        pairs = self._held_gates()
        sums = [projected[x] + self._affine(h, parts.parameters, hidden) for x, h in pairs]
        if len(sums) == 1:
            sums = jnp.split(sums[0], 4, axis=-1)
        of_input, *of_forget, of_cell, of_output = sums
        i = self._gate(parts, "input", of_input)
        if of_forget:
            f = self._gate(parts, "forget", of_forget[0])
        else:  # coupled gates add up to 1 as the quantizer of the input gate represents it
            f = parts.value_of("input_sigmoid_quant", jnp.ones_like(i)) - i
        g = parts.value_of("cell_acc_quant", of_cell)
        g = parts.value_of("cell_tanh_quant", self.activation_fn(g))
        o = self._gate(parts, "output", of_output)
        remembered = parts.value_of("cell_state_quant", f * memory)
        added = parts.value_of("cell_state_quant", i * g)
        new_memory = parts.quantized("cell_state_quant", remembered + added)
        c = as_array(new_memory)
        shown = parts.value_of("hidden_state_tanh_quant", self.activation_fn(c))
        output = parts.quantized("io_quant", o * shown)
        return CellOutput((c, as_array(output)), output, new_memory)


@final
class QuantLSTMCell(QuantLSTMStep, nnx.LSTMCell):
    """`nnx.LSTMCell` with quantizers, for `nnx.RNN`, `nnx.Bidirectional`, and `QuantLSTM`.

    With Q the quantizer of each place, x_q = Q_io(x), and W, b quantized:

        i = Q(sigmoid(Q_acc(W_ii x_q + W_hi h + b_i)))     f, o likewise
        g = Q(tanh(Q_acc(W_ig x_q + W_hg h + b_g)))
        c' = Q_cell(Q_cell(f c) + Q_cell(i g))
        h' = Q_io(o Q(tanh(c')))

    Every quantizer of activations is called at every step, and each place has one of its own (input and output share
    `io_quant`, the three cell states `cell_state_quant`). The two weights of a gate share one quantizer, so that their
    products add up on one grid. A quantizer argument is an injector, a proxy to share, or None, the default, for
    none; further keywords override what it declares, by prefix. With every quantizer None the cell is `nnx.LSTMCell` to
    the bit, and parameters are always those of `nnx.LSTMCell`, so float checkpoints fit.

    `nnx.RNN` carries the whole cell from step to step, statistics included, and quantizes the weights at every step;
    `QuantLSTM` does so once a sequence.

    Source: Brevitas's `QuantLSTM`, of which this is one direction of one layer. Differs from Brevitas: no slot has
    a quantizer by default; input is quantized step by step.

    Args:
        in_features: features of the input.
        hidden_features: features of the hidden state.
        weight_quant: quantizer of the kernels; channels are their last axis.
        bias_quant: quantizer of the biases; `Int32Bias` counts in steps of input scale * weight scale.
        io_quant: quantizer of the input and of the hidden state.
        gate_acc_quant: quantizer of each gate's sum.
        sigmoid_quant: quantizer of what `gate_fn` makes.
        tanh_quant: quantizer of what `activation_fn` makes.
        cell_state_quant: quantizer of the cell state and its two parts.
        use_bias: whether there are biases.
        coupled_input_forget_gates: f = 1 - i, without its own weights.
        shared_intra_layer_weight_quant: one weight quantizer for all gates.
        shared_intra_layer_gate_acc_quant: one quantizer for the sums of all gates.
        input_layers: layer, as "ii" -> the layer of another cell to take in its place.
        rngs: for the parameters, and for quantizers that draw random numbers.
        gate_fn, activation_fn, kernel_init, recurrent_kernel_init, bias_init, dtype, param_dtype, carry_init,
            promote_dtype, keep_rngs, kernel_metadata, recurrent_kernel_metadata, bias_metadata: as for
            `nnx.LSTMCell`.
        more: overrides of quantizers: `weight_...`, `bias_...`, `io_...`, `gate_acc_...`, `sigmoid_...`, `tanh_...`,
            `cell_state_...`.

    Raises:
        TypeError: an argument that is not a quantizer or is one of another kind, or an override that has no effect.
        DependencyError: a quantizer that cannot be assembled; the text shows the path.

    Example:
        >>> from jqinject.quant import Int8WeightPerTensorFloat
        >>> cell = QuantLSTMCell(3, 4, weight_quant=Int8WeightPerTensorFloat, weight_bit_width=4, rngs=nnx.Rngs(0))
        >>> rnn = nnx.RNN(cell)
        >>> rnn(jnp.ones((2, 5, 3))).shape, rnn.cell.ii.quant_weight().bit_width
        ((2, 5, 4), 4)
    """

    gates = {"ii": "hi", "if_": "hf", "ig": "hg", "io": "ho"}

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        rngs: nnx.Rngs,
        use_bias: bool = True,
        coupled_input_forget_gates: bool = False,
        shared_intra_layer_weight_quant: bool = False,
        shared_intra_layer_gate_acc_quant: bool = False,
        input_layers: Mapping[str, object] = {},
        **more: Unpack[keywords.QuantLSTMCellKeywords],
    ) -> None:
        overrides = self._init_flax(locals(), more)
        if coupled_input_forget_gates:
            self.coupled_input_forget_gates = True
            del self.if_, self.hf
        if not use_bias:
            for name in self.gates.values():
                if name in vars(self):
                    set_bias(vars(self)[name], None)
        self._init_declared(locals(), overrides)


@final
class QuantOptimizedLSTMCell(QuantLSTMStep, nnx.OptimizedLSTMCell):
    """`nnx.OptimizedLSTMCell` with quantizers: `QuantLSTMCell` with the kernels of all gates in one.

    All gates share one weight quantizer, and biases one quantizer; sums and activations are quantized as in
    `QuantLSTMCell`. With every quantizer None, the default, the cell is `nnx.OptimizedLSTMCell` to the bit.

    Args:
        in_features: features of the input.
        hidden_features: features of the hidden state.
        weight_quant: quantizer of the two kernels; channels are their last axis, those of the gates side by side.
        bias_quant: quantizer of the bias; `Int32Bias` counts in steps of input scale * weight scale.
        io_quant: quantizer of the input and of the hidden state.
        gate_acc_quant: quantizer of each gate's sum.
        sigmoid_quant: quantizer of what `gate_fn` makes.
        tanh_quant: quantizer of what `activation_fn` makes.
        cell_state_quant: quantizer of the cell state and its two parts.
        shared_intra_layer_gate_acc_quant: one quantizer for the sums of all gates.
        rngs: for the parameters, and for quantizers that draw random numbers.
        gate_fn, activation_fn, kernel_init, recurrent_kernel_init, bias_init, dtype, param_dtype, carry_init,
            promote_dtype, keep_rngs, kernel_metadata, recurrent_kernel_metadata, bias_metadata: as for
            `nnx.OptimizedLSTMCell`.
        more: overrides of quantizers: `weight_...`, `bias_...`, `io_...`, `gate_acc_...`, `sigmoid_...`, `tanh_...`,
            `cell_state_...`.

    Raises:
        TypeError: an argument that is not a quantizer or is one of another kind, or an override that has no effect.
        DependencyError: a quantizer that cannot be assembled; the text shows the path.

    Example:
        >>> from jqinject.quant import Int8WeightPerTensorFloat
        >>> cell = QuantOptimizedLSTMCell(3, 4, weight_quant=Int8WeightPerTensorFloat, rngs=nnx.Rngs(0))
        >>> rnn = nnx.RNN(cell)
        >>> rnn(jnp.ones((2, 5, 3))).shape, rnn.cell.dense_i.quant_weight().shape
        ((2, 5, 4), (3, 16))
    """

    gates = {"dense_i": "dense_h"}

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        rngs: nnx.Rngs,
        shared_intra_layer_gate_acc_quant: bool = False,
        **more: Unpack[keywords.QuantOptimizedLSTMCellKeywords],
    ) -> None:
        self._init_layer(locals())


@final
class QuantSimpleCell(QuantRecurrentCell, nnx.SimpleCell):
    """`nnx.SimpleCell` with quantizers: h' = Q_io(tanh(Q_acc(W_i Q_io(x) + W_h h + b))), for `nnx.RNN` and `QuantRNN`.

    Quantizers of activations are called at every step. The two weights share one quantizer. With every quantizer
    None, the default, the cell is `nnx.SimpleCell` to the bit.

    Source: Brevitas's `QuantRNN`, of which this is one direction of one layer. Differs from Brevitas: no slot has a
    quantizer by default; input is quantized step by step.

    Args:
        in_features: features of the input.
        hidden_features: features of the hidden state.
        weight_quant: quantizer of the two kernels; channels are their last axis.
        bias_quant: quantizer of the bias; `Int32Bias` counts in steps of input scale * weight scale.
        io_quant: quantizer of the input and of the hidden state.
        gate_acc_quant: quantizer of the sum.
        use_bias: whether there is a bias.
        bias_of_hidden: whether the bias is in `dense_h` instead of `dense_i`, as two cells need it that share
            `dense_i`.
        input_layers: {"dense_i": the layer of another cell to take in its place}.
        rngs: for the parameters, and for quantizers that draw random numbers.
        dtype, param_dtype, carry_init, residual, activation_fn, kernel_init, recurrent_kernel_init, bias_init,
            promote_dtype, keep_rngs, kernel_metadata, recurrent_kernel_metadata, bias_metadata: as for
            `nnx.SimpleCell`.
        more: overrides of quantizers: `weight_...`, `bias_...`, `io_...`, `gate_acc_...`.

    Raises:
        TypeError: an argument that is not a quantizer or is one of another kind, or an override that has no effect.
        DependencyError: a quantizer that cannot be assembled; the text shows the path.

    Example:
        >>> from jqinject.quant import Int8ActPerTensorFloat
        >>> cell = QuantSimpleCell(3, 4, io_quant=Int8ActPerTensorFloat, io_bit_width=4, rngs=nnx.Rngs(0))
        >>> rnn = nnx.RNN(cell)
        >>> rnn(jnp.ones((2, 5, 3))).shape
        (2, 5, 4)
    """

    gates = {"dense_i": "dense_h"}
    gate_acc_quant = GATE_ACC

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        rngs: nnx.Rngs,
        use_bias: bool = True,
        bias_of_hidden: bool = False,
        input_layers: Mapping[str, object] = {},
        **more: Unpack[keywords.QuantSimpleCellKeywords],
    ) -> None:
        overrides = self._init_flax(locals(), more)
        # Layers that share a quantizer are held in the order in which they share it, so that assembling it again finds
        # the same structure.
        of_hidden = self.dense_h
        del self.dense_h
        self.dense_h = of_hidden
        if use_bias and bias_of_hidden:
            set_bias(self.dense_h, self.dense_i.bias)
        if bias_of_hidden or not use_bias:
            set_bias(self.dense_i, None)
        self._init_declared(locals(), overrides)

    def _step(self, parts: CellParts, carry: Any, projected: Mapping[str, jax.Array]) -> CellOutput:
        """One step; see `QuantRecurrentCell._step`."""
        total = projected["dense_i"] + self._affine("dense_h", parts.parameters, carry)
        if self.residual:
            total += carry
        total = parts.value_of("gate_acc_quant", total)
        output = parts.quantized("io_quant", self.activation_fn(total))
        return CellOutput(as_array(output), output)


@final
class QuantGRUCell(QuantRecurrentCell, nnx.GRUCell):
    """`nnx.GRUCell` with quantizers, for `nnx.RNN`.

    With Q the quantizer of each place, x_q = Q_io(x), and W, b quantized:

        r = Q(sigmoid(Q_acc(W_ir x_q + b_r + W_hr h)))    z likewise
        n = Q(tanh(Q_acc(W_in x_q + b_n + r Q_acc(W_hn h))))
        h' = Q_io((1 - z) n + z h)

    Quantizers of activations are called at every step, and each place has one of its own (input and output share
    `io_quant`). All kernels share one weight quantizer. With every quantizer None, the default, the cell is
    `nnx.GRUCell` to the bit.

    Args:
        in_features: features of the input.
        hidden_features: features of the hidden state.
        weight_quant: quantizer of the two kernels; channels are their last axis, those of the gates side by side.
        bias_quant: quantizer of the bias; `Int32Bias` counts in steps of input scale * weight scale.
        io_quant: quantizer of the input and of the hidden state.
        gate_acc_quant: quantizer of each gate's sum, and of W_hn h.
        sigmoid_quant: quantizer of what `gate_fn` makes.
        tanh_quant: quantizer of what `activation_fn` makes.
        shared_intra_layer_gate_acc_quant: one quantizer for all sums.
        rngs: for the parameters, and for quantizers that draw random numbers.
        gate_fn, activation_fn, kernel_init, recurrent_kernel_init, bias_init, dtype, param_dtype, carry_init,
            promote_dtype, keep_rngs, kernel_metadata, recurrent_kernel_metadata, bias_metadata: as for
            `nnx.GRUCell`.
        more: overrides of quantizers: `weight_...`, `bias_...`, `io_...`, `gate_acc_...`, `sigmoid_...`, `tanh_...`.

    Raises:
        TypeError: an argument that is not a quantizer or is one of another kind, or an override that has no effect.
        DependencyError: a quantizer that cannot be assembled; the text shows the path.

    Example:
        >>> from jqinject.quant import Int8WeightPerTensorFloat
        >>> rnn = nnx.RNN(QuantGRUCell(3, 4, weight_quant=Int8WeightPerTensorFloat, rngs=nnx.Rngs(0)))
        >>> rnn(jnp.ones((2, 5, 3))).shape
        (2, 5, 4)
    """

    gates = {"dense_i": "dense_h"}
    reset_acc_quant = GATE_ACC.of("reset_acc_quant")
    update_acc_quant = GATE_ACC.of("update_acc_quant")
    hidden_acc_quant = GATE_ACC.of("hidden_acc_quant")
    new_acc_quant = GATE_ACC.of("new_acc_quant")
    reset_sigmoid_quant = SIGMOID.of("reset_sigmoid_quant")
    update_sigmoid_quant = SIGMOID.of("update_sigmoid_quant")
    new_tanh_quant = TANH.of("new_tanh_quant")

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        rngs: nnx.Rngs,
        shared_intra_layer_gate_acc_quant: bool = False,
        **more: Unpack[keywords.QuantGRUCellKeywords],
    ) -> None:
        self._init_layer(locals())

    def _step(self, parts: CellParts, carry: Any, projected: Mapping[str, jax.Array]) -> CellOutput:
        """One step; see `QuantRecurrentCell._step`."""
        of_input = jnp.split(projected["dense_i"], 3, axis=-1)
        of_hidden = jnp.split(self._affine("dense_h", parts.parameters, carry), 3, axis=-1)
        r, z = (
            self._gate(parts, gate, of_input[index] + of_hidden[index])
            for index, gate in enumerate(("reset", "update"))
        )
        hidden = parts.value_of("hidden_acc_quant", of_hidden[2])
        total = parts.value_of("new_acc_quant", of_input[2] + r * hidden)
        n = parts.value_of("new_tanh_quant", self.activation_fn(total))
        output = parts.quantized("io_quant", (1.0 - z) * n + z * carry)
        return CellOutput(as_array(output), output)
