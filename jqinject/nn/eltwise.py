"""Layers that bring several tensors together on one grid: sums and concatenations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack, final

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.nn.base.keywords import QuantConcatKeywords
from jqinject.nn.base.quant_layer import Out, QuantLayer, Results
from jqinject.nn.base.slots import INPUT, OUTPUT, hold_proxies, through
from jqinject.quant import Int8ActPerTensorFloat, QuantizerLike
from jqinject.quant_tensor import AnyQuantTensor, as_array, concatenate, is_quantized, on_integers
from jqinject.quant_tensor.arithmetic import add


class QuantMergeLayer(QuantLayer[Out]):
    """Abstract: y = output_quant(merge(input_quant(a), input_quant(b), ...)), with one quantizer for all inputs.

    Attributes:
        input_quant, output_quant: proxies, or None; the same one where they are tied.
        return_quant_tensor: whether the output is a QuantTensor.
    """

    input_quant: Any = INPUT
    output_quant: Any = OUTPUT
    return_quant_tensor: bool

    def __init__(
        self,
        input_quant: QuantizerLike = Int8ActPerTensorFloat,
        output_quant: QuantizerLike = Int8ActPerTensorFloat,
        *,
        tie_input_output_quant: bool = False,
        return_quant_tensor: bool = False,
        rngs: nnx.Rngs | None = None,
        **overrides: Unpack[QuantConcatKeywords],
    ) -> None:
        self.return_quant_tensor = return_quant_tensor
        if not tie_input_output_quant:
            arguments = {"input_quant": input_quant, "output_quant": output_quant}
            hold_proxies(self, arguments, overrides, rngs)
            return
        if not nnx.set_graph_mode.current_value():
            raise ValueError(
                f"{type(self).__name__}(tie_input_output_quant=True) shares a quantizer, and NNX's tree mode knows no "
                "shared objects.\n  cure: graph mode, or tie_input_output_quant=False"
            )
        slot, other, quantizer = INPUT, OUTPUT, input_quant
        if input_quant is None:
            slot, other, quantizer = OUTPUT, INPUT, output_quant
        idle = [name for name in overrides if name.startswith(other.prefix)]
        if idle or (input_quant is not None and output_quant not in (None, input_quant)):
            raise ValueError(
                f"{type(self).__name__}(tie_input_output_quant=True) has one quantizer for inputs and output, got two"
                + (f" ({', '.join(idle)})" if idle else "")
                + f".\n  cure: {other.name}=None, and overrides that start with {slot.prefix}"
            )
        hold_proxies(self, {slot.name: quantizer}, overrides, rngs, slots=(slot,))
        if getattr(self, slot.name) is not None:
            setattr(self, other.name, getattr(self, slot.name))

    def _quantized(self, x: Any) -> Any:
        return through(self.input_quant, x if is_quantized(x) else jnp.asarray(x))

    def _output(self, y: Any) -> Any:
        y = through(self.output_quant, y)
        if not self.return_quant_tensor:
            return as_array(y)
        if not is_quantized(y):
            raise ValueError(
                f"{type(self).__name__}(return_quant_tensor=True): neither inputs nor output are quantized, so the "
                "output has no scale.\n  cure: input_quant=... or output_quant=..., or feed it QuantTensors"
            )
        return y


@final
class QuantEltwiseAdd(QuantMergeLayer[Out]):
    """A residual sum: y = output_quant(input_quant(a) + input_quant(b)).

    Both operands have one quantizer, so that in evaluation their integers count in the same steps and add as integers.
    Without it, QuantTensors add by their own rule: scales have to be the same, bits grow by one.

    Args:
        input_quant: quantizer of both operands: an injector, a proxy to share, or None. By default
            `Int8ActPerTensorFloat`, as in Brevitas; None leaves them as they come.
        output_quant: quantizer of the sum; likewise.
        tie_input_output_quant: one quantizer for operands and sum: that of the two which is given.
        return_quant_tensor: return a QuantTensor.
        rngs: for quantizers that draw random numbers.
        overrides: names that quantizers declare anew: `input_bit_width=4`, `output_...`.

    Raises:
        TypeError: an argument that is not a quantizer of activations, or an override that has no effect.
        ValueError: tied, and two quantizers are given, or in NNX's tree mode.

    Source: Brevitas, where tying fails.

    Example:
        >>> add = QuantEltwiseAdd(return_quant_tensor=True)
        >>> y = add(jnp.array([0.5, -1.0]), jnp.array([0.25, 1.0]))
        >>> y.value.round(1), y.bit_width
        (Array([ 0.7, -0. ], dtype=float32), 8)
    """

    _results: Results[QuantEltwiseAdd[jax.Array], QuantEltwiseAdd[AnyQuantTensor]]

    def __call__(self, input: Any, other: Any) -> Out:
        """The sum.

        Args:
            input, other: float arrays or QuantTensors that broadcast against each other.

        Returns:
            An array, or a QuantTensor with `return_quant_tensor`.

        Raises:
            ValueError: QuantTensors of different scales and no `input_quant`, in evaluation; a QuantTensor is to be
                returned, and nothing is quantized.
        """
        operands = self._quantized(input), self._quantized(other)
        if self.input_quant is not None and all(map(on_integers, operands)):
            return self._output(add(*operands, same_quantizer=True))
        return self._output(operands[0] + operands[1])


@final
class QuantConcat(QuantMergeLayer[Out]):
    """Tensors joined along an axis, on one grid: y = output_quant(concatenate([input_quant(x) for x in tensors])).

    Args:
        input_quant: quantizer of every tensor: an injector, a proxy to share, or None, where tensors have to be arrays
            or QuantTensors on one grid.
        output_quant: quantizer of the result. Both are `Int8ActPerTensorFloat` by default, as in Brevitas.
        tie_input_output_quant: one quantizer for both: that of the two which is given.
        return_quant_tensor: return a QuantTensor.
        rngs: for quantizers that draw random numbers.
        overrides: names that quantizers declare anew: `input_bit_width=4`, `output_...`.

    Raises:
        TypeError: an argument that is not a quantizer of activations, or an override that has no effect.
        ValueError: tied, and two quantizers are given, or in NNX's tree mode.

    Source: Brevitas's `QuantCat`, where tying fails; the axis is the last by default, that of Flax's channels.

    Example:
        >>> join = QuantConcat(return_quant_tensor=True, input_bit_width=4, output_quant=None)
        >>> join([jnp.array([0.5, -1.0]), jnp.array([1.0])]).int()
        Array([ 4, -8,  7], dtype=int8)
    """

    _results: Results[QuantConcat[jax.Array], QuantConcat[AnyQuantTensor]]

    def __call__(self, tensors: Sequence[Any], axis: int = -1) -> Out:
        """The tensors joined.

        Args:
            tensors: float arrays or QuantTensors, at least one, of the same shape but along the axis.
            axis: the axis to join along.

        Returns:
            An array, or a QuantTensor with `return_quant_tensor`.

        Raises:
            ValueError: no tensors; QuantTensors on different grids and no `input_quant`; a QuantTensor is to be
                returned, and nothing is quantized.
        """
        shared = self.input_quant is not None
        return self._output(concatenate([self._quantized(x) for x in tensors], axis, same_quantizer=shared))


QuantCat = QuantConcat  # Brevitas's name
