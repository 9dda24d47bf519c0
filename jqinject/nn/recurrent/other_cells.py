"""Quantized cells with a hidden state alone, for `nnx.RNN`."""

from collections.abc import Callable, Mapping
from typing import Any, Unpack, final

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype as default_promote_dtype
from flax.nnx.nn.linear import default_kernel_init
from flax.typing import Dtype, Initializer, PromoteDtypeFn

from jqinject.nn.base.override_keywords import QuantGRUCellOverrides, QuantSimpleCellOverrides
from jqinject.nn.base.slots import flax_arguments
from jqinject.nn.recurrent._cell import (
    GATE_ACC,
    ORTHOGONAL,
    SIGMOID,
    TANH,
    CellArguments,
    CellOutput,
    Parameters,
    Quantizers,
    QuantRecurrentCell,
    quantized,
    set_bias,
    sigmoid,
    tanh,
    value_of,
)
from jqinject.quant import QuantizerLike
from jqinject.quant_tensor import as_array


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
        overrides: `weight_...`, `bias_...`, `io_...`, `gate_acc_...`.

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
    gate_acc_quant: Any = GATE_ACC

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        dtype: Dtype = jnp.float32,
        param_dtype: Dtype = jnp.float32,
        carry_init: Initializer | None = None,
        residual: bool = False,
        activation_fn: Callable[..., Any] = tanh,
        kernel_init: Initializer = default_kernel_init,
        recurrent_kernel_init: Initializer = ORTHOGONAL,
        bias_init: Initializer = nnx.initializers.zeros,
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
        use_bias: bool = True,
        bias_of_hidden: bool = False,
        input_layers: Mapping[str, Any] = {},
        **overrides: Unpack[QuantSimpleCellOverrides],
    ) -> None:
        nnx.SimpleCell.__init__(self, **flax_arguments(nnx.SimpleCell, locals()))
        # Layers that share a quantizer are held in the order in which they share it, so that assembling it again finds
        # the same structure.
        of_hidden = self.dense_h
        del self.dense_h
        self.dense_h = of_hidden
        if use_bias and bias_of_hidden:
            set_bias(self.dense_h, self.dense_i.bias)
        if bias_of_hidden or not use_bias:
            set_bias(self.dense_i, None)
        quantizers = {
            "weight_quant": weight_quant,
            "bias_quant": bias_quant,
            "io_quant": io_quant,
            "gate_acc_quant": gate_acc_quant,
        }
        self._init_quantizers(CellArguments(quantizers, overrides, input_layers=input_layers), rngs)

    def _step(
        self, quantizers: Quantizers, parameters: Parameters, carry: Any, projected: Mapping[str, jax.Array]
    ) -> CellOutput:
        """One step; see `QuantRecurrentCell.step`."""
        total = projected["dense_i"] + self._affine("dense_h", parameters, carry)
        if self.residual:
            total += carry
        total = value_of(quantizers, "gate_acc_quant", total)
        output = quantized(quantizers, "io_quant", self.activation_fn(total))
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
        overrides: `weight_...`, `bias_...`, `io_...`, `gate_acc_...`, `sigmoid_...`, `tanh_...`.

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
    reset_acc_quant: Any = GATE_ACC.of("reset_acc_quant")
    update_acc_quant: Any = GATE_ACC.of("update_acc_quant")
    hidden_acc_quant: Any = GATE_ACC.of("hidden_acc_quant")
    new_acc_quant: Any = GATE_ACC.of("new_acc_quant")
    reset_sigmoid_quant: Any = SIGMOID.of("reset_sigmoid_quant")
    update_sigmoid_quant: Any = SIGMOID.of("update_sigmoid_quant")
    new_tanh_quant: Any = TANH.of("new_tanh_quant")

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
        shared_intra_layer_gate_acc_quant: bool = False,
        **overrides: Unpack[QuantGRUCellOverrides],
    ) -> None:
        nnx.GRUCell.__init__(self, **flax_arguments(nnx.GRUCell, locals()))
        quantizers = {
            "weight_quant": weight_quant,
            "bias_quant": bias_quant,
            "io_quant": io_quant,
            "gate_acc_quant": gate_acc_quant,
            "sigmoid_quant": sigmoid_quant,
            "tanh_quant": tanh_quant,
        }
        self._init_quantizers(CellArguments(quantizers, overrides, shared_intra_layer_gate_acc_quant), rngs)

    def _step(
        self, quantizers: Quantizers, parameters: Parameters, carry: Any, projected: Mapping[str, jax.Array]
    ) -> CellOutput:
        """One step; see `QuantRecurrentCell.step`."""
        of_input = jnp.split(projected["dense_i"], 3, axis=-1)
        of_hidden = jnp.split(self._affine("dense_h", parameters, carry), 3, axis=-1)
        r, z = (
            self._gate(quantizers, gate, of_input[index] + of_hidden[index])
            for index, gate in enumerate(("reset", "update"))
        )
        hidden = value_of(quantizers, "hidden_acc_quant", of_hidden[2])
        total = value_of(quantizers, "new_acc_quant", of_input[2] + r * hidden)
        n = value_of(quantizers, "new_tanh_quant", self.activation_fn(total))
        output = quantized(quantizers, "io_quant", (1.0 - z) * n + z * carry)
        return CellOutput(as_array(output), output)

    def _gate(self, quantizers: Quantizers, gate: str, x: jax.Array) -> jax.Array:
        x = value_of(quantizers, f"{gate}_acc_quant", x)
        return value_of(quantizers, f"{gate}_sigmoid_quant", self.gate_fn(x))
