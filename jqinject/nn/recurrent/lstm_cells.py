"""Quantized cells of long short-term memories, for `nnx.RNN`."""

from collections.abc import Callable, Mapping
from typing import Any, Unpack, final

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype as default_promote_dtype
from flax.nnx.nn.linear import default_kernel_init
from flax.nnx.nn.recurrent import modified_orthogonal
from flax.typing import Dtype, Initializer, PromoteDtypeFn

from jqinject.nn.base.override_keywords import QuantLSTMCellOverrides, QuantOptimizedLSTMCellOverrides
from jqinject.nn.base.slots import flax_arguments
from jqinject.nn.recurrent._cell import (
    ORTHOGONAL,
    CellArguments,
    CellOutput,
    Parameters,
    Quantizers,
    set_bias,
    sigmoid,
    tanh,
)
from jqinject.nn.recurrent._lstm_step import QuantLSTMStep
from jqinject.quant import QuantizerLike


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
        overrides: `weight_...`, `bias_...`, `io_...`, `gate_acc_...`, `sigmoid_...`, `tanh_...`,
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
        gate_fn: Callable[..., Any] = sigmoid,
        activation_fn: Callable[..., Any] = tanh,
        kernel_init: Initializer = default_kernel_init,
        recurrent_kernel_init: Initializer = modified_orthogonal,
        bias_init: Initializer = nnx.initializers.zeros,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        carry_init: Initializer | None = None,
        promote_dtype: PromoteDtypeFn = default_promote_dtype,
        keep_rngs: bool = False,
        kernel_metadata: Mapping[str, Any] = {},
        recurrent_kernel_metadata: Mapping[str, Any] = {},
        bias_metadata: Mapping[str, Any] = {},
        rngs: nnx.Rngs,
        weight_quant: QuantizerLike = None,
        bias_quant: QuantizerLike = None,
        io_quant: QuantizerLike = None,
        gate_acc_quant: QuantizerLike = None,
        sigmoid_quant: QuantizerLike = None,
        tanh_quant: QuantizerLike = None,
        cell_state_quant: QuantizerLike = None,
        use_bias: bool = True,
        coupled_input_forget_gates: bool = False,
        shared_intra_layer_weight_quant: bool = False,
        shared_intra_layer_gate_acc_quant: bool = False,
        input_layers: Mapping[str, Any] = {},
        **overrides: Unpack[QuantLSTMCellOverrides],
    ) -> None:
        nnx.LSTMCell.__init__(self, **flax_arguments(nnx.LSTMCell, locals()))
        if coupled_input_forget_gates:
            self.coupled_input_forget_gates = True
            del self.if_, self.hf
        if not use_bias:
            for name in self.gates.values():
                if name in vars(self):
                    set_bias(getattr(self, name), None)
        quantizers = {
            "weight_quant": weight_quant,
            "bias_quant": bias_quant,
            "io_quant": io_quant,
            "gate_acc_quant": gate_acc_quant,
            "sigmoid_quant": sigmoid_quant,
            "tanh_quant": tanh_quant,
            "cell_state_quant": cell_state_quant,
        }
        arguments = CellArguments(
            quantizers,
            overrides,
            shared_intra_layer_gate_acc_quant,
            shared_intra_layer_weight_quant,
            input_layers,
        )
        self._init_quantizers(arguments, rngs)

    def _step(
        self,
        quantizers: Quantizers,
        parameters: Parameters,
        carry: tuple[jax.Array, jax.Array],
        projected: Mapping[str, jax.Array],
    ) -> CellOutput:
        """One step; see `QuantRecurrentCell.step`."""
        memory, hidden = carry

        def total(of_input: str) -> jax.Array:
            return projected[of_input] + self._affine(self.gates[of_input], parameters, hidden)

        forget = None if self.coupled_input_forget_gates else total("if_")
        return self._update(quantizers, (total("ii"), forget, total("ig"), total("io")), memory)


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
        overrides: `weight_...`, `bias_...`, `io_...`, `gate_acc_...`, `sigmoid_...`, `tanh_...`,
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
        gate_fn: Callable[..., Any] = sigmoid,
        activation_fn: Callable[..., Any] = tanh,
        kernel_init: Initializer = default_kernel_init,
        recurrent_kernel_init: Initializer = ORTHOGONAL,
        bias_init: Initializer = nnx.initializers.zeros,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        carry_init: Initializer | None = None,
        promote_dtype: PromoteDtypeFn = default_promote_dtype,
        keep_rngs: bool = False,
        kernel_metadata: Mapping[str, Any] = {},
        recurrent_kernel_metadata: Mapping[str, Any] = {},
        bias_metadata: Mapping[str, Any] = {},
        rngs: nnx.Rngs,
        weight_quant: QuantizerLike = None,
        bias_quant: QuantizerLike = None,
        io_quant: QuantizerLike = None,
        gate_acc_quant: QuantizerLike = None,
        sigmoid_quant: QuantizerLike = None,
        tanh_quant: QuantizerLike = None,
        cell_state_quant: QuantizerLike = None,
        shared_intra_layer_gate_acc_quant: bool = False,
        **overrides: Unpack[QuantOptimizedLSTMCellOverrides],
    ) -> None:
        nnx.OptimizedLSTMCell.__init__(self, **flax_arguments(nnx.OptimizedLSTMCell, locals()))
        quantizers = {
            "weight_quant": weight_quant,
            "bias_quant": bias_quant,
            "io_quant": io_quant,
            "gate_acc_quant": gate_acc_quant,
            "sigmoid_quant": sigmoid_quant,
            "tanh_quant": tanh_quant,
            "cell_state_quant": cell_state_quant,
        }
        self._init_quantizers(CellArguments(quantizers, overrides, shared_intra_layer_gate_acc_quant), rngs)

    def _step(
        self,
        quantizers: Quantizers,
        parameters: Parameters,
        carry: tuple[jax.Array, jax.Array],
        projected: Mapping[str, jax.Array],
    ) -> CellOutput:
        """One step; see `QuantRecurrentCell.step`."""
        memory, hidden = carry
        sums = jnp.split(projected["dense_i"] + self._affine("dense_h", parameters, hidden), 4, axis=-1)
        return self._update(quantizers, (sums[0], sums[1], sums[2], sums[3]), memory)
