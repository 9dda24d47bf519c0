"""Layers that bring tensors together on one grid, sums and concatenations, and that enlarge images and sequences."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Unpack, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core import check
from jqinject.nn import base
from jqinject.nn.base import keywords
from jqinject.ops.ste import round_ste
from jqinject.quant import Int8ActPerTensorFloat, QuantizerLike
from jqinject.quant_tensor import (
    AnyQuantTensor,
    as_array,
    concatenate,
    is_quantized,
    on_integers,
    pre_round_integers,
    shaping,
)
from jqinject.quant_tensor.arithmetic import add


class QuantMergeLayer(base.QuantLayer[base.Out]):
    """Abstract: y = output_quant(merge(input_quant(a), input_quant(b), ...)), with one quantizer for all inputs.

    Attributes:
        input_quant, output_quant: proxies, or None; the same one where they are tied.
        return_quant_tensor: whether the output is a QuantTensor.
    """

    input_quant = base.INPUT
    output_quant = base.OUTPUT

    def __init__(
        self,
        input_quant: QuantizerLike = Int8ActPerTensorFloat,
        output_quant: QuantizerLike = Int8ActPerTensorFloat,
        *,
        tie_input_output_quant: bool = False,
        rngs: nnx.Rngs | None = None,
        **more: Unpack[keywords.QuantConcatKeywords],
    ) -> None:
        self._init_layer(locals())

    def _init_quantizers(
        self, arguments: base.Arguments, overrides: base.Arguments, rngs: nnx.Rngs | None
    ) -> None:
        arguments = dict(arguments)
        if not arguments.pop("tie_input_output_quant"):
            super()._init_quantizers(arguments, overrides, rngs)
            return
        if not nnx.set_graph_mode.current_value():
            raise ValueError(
                f"{type(self).__name__}(tie_input_output_quant=True) shares a quantizer, and NNX's tree mode knows no "
                "shared objects.\n  cure: graph mode, or tie_input_output_quant=False"
            )
        self.return_quant_tensor = arguments["return_quant_tensor"]
        input_quant, output_quant = arguments["input_quant"], arguments["output_quant"]
        slot, unused, quantizer = base.INPUT, base.OUTPUT, input_quant
        if input_quant is None:
            slot, unused, quantizer = base.OUTPUT, base.INPUT, output_quant
        idle = [name for name in overrides if name.startswith(unused.prefix)]
        if idle or (input_quant is not None and output_quant not in (None, input_quant)):
            raise ValueError(
                f"{type(self).__name__}(tie_input_output_quant=True) has one quantizer for inputs and output, got two"
                + (f" ({', '.join(idle)})" if idle else "")
                + f".\n  cure: {unused.name}=None, and overrides that start with {slot.prefix}"
            )
        base.hold_proxies(self, {slot.name: quantizer}, overrides, rngs, slots=(slot,))
        proxy = slot.__get__(self)
        if proxy is not None:
            setattr(self, unused.name, proxy)

    def _quantized(self, x: object) -> Any:
        return base.through(self.input_quant, x if is_quantized(x) else jnp.asarray(x))

    def _output(self, y: object) -> Any:
        y = base.through(self.output_quant, y)
        if not self.return_quant_tensor:
            return as_array(y)
        if not is_quantized(y):
            raise ValueError(
                f"{type(self).__name__}(return_quant_tensor=True): neither inputs nor output are quantized, so the "
                "output has no scale.\n  cure: input_quant=... or output_quant=..., or feed it QuantTensors"
            )
        return y


@final
class QuantEltwiseAdd(QuantMergeLayer[base.Out]):
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
        more: names that quantizers declare anew: `input_bit_width=4`, `output_...`.

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

    _results: "base.Results[QuantEltwiseAdd[jax.Array], QuantEltwiseAdd[AnyQuantTensor]]"

    def __call__(self, input: Any, other: Any) -> base.Out:
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
class QuantConcat(QuantMergeLayer[base.Out]):
    """Tensors joined along an axis, on one grid: y = output_quant(concatenate([input_quant(x) for x in tensors])).

    Args:
        input_quant: quantizer of every tensor: an injector, a proxy to share, or None, where tensors have to be arrays
            or QuantTensors on one grid.
        output_quant: quantizer of the result. Both are `Int8ActPerTensorFloat` by default, as in Brevitas.
        tie_input_output_quant: one quantizer for both: that of the two which is given.
        return_quant_tensor: return a QuantTensor.
        rngs: for quantizers that draw random numbers.
        more: names that quantizers declare anew: `input_bit_width=4`, `output_...`.

    Raises:
        TypeError: an argument that is not a quantizer of activations, or an override that has no effect.
        ValueError: tied, and two quantizers are given, or in NNX's tree mode.

    Source: Brevitas's `QuantCat`, where tying fails; the axis is the last by default, that of Flax's channels.

    Example:
        >>> join = QuantConcat(return_quant_tensor=True, input_bit_width=4, output_quant=None)
        >>> join([jnp.array([0.5, -1.0]), jnp.array([1.0])]).int()
        Array([ 4, -8,  7], dtype=int8)
    """

    _results: "base.Results[QuantConcat[jax.Array], QuantConcat[AnyQuantTensor]]"

    def __call__(self, tensors: Sequence[Any], axis: int = -1) -> base.Out:
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


METHODS = check.among(("nearest", "bilinear"))


@final
class QuantUpsample(base.QuantTensorLayer[base.Out]):
    """`x` enlarged along its spatial axes, channels last. A QuantTensor keeps scale, zero point and bit width.

    "nearest" repeats elements: output i is input floor(i * r), where r = n / m, or 1 / scale_factor. "bilinear"
    interpolates linearly along every axis, around (i + 0.5) * r - 0.5, and rounds to the integers of the input's grid,
    with a straight-through gradient. It has no quantizer.

    Args:
        size: m, the size wanted along every spatial axis; an int for all axes between the first and the last.
        scale_factor: what sizes are multiplied by instead, a whole number or not: m = floor(n * scale_factor).
        method: "nearest" or "bilinear".
        align_corners: of "bilinear": first and last elements stay where they are, instead of the outer edges of pixels.
        return_quant_tensor: return a QuantTensor where one comes in.

    Raises:
        ValueError: neither or both of `size` and `scale_factor`; one that is not positive; an unknown method.

    Source: Brevitas's `QuantUpsample`, and its `QuantUpsamplingNearest2d` and `QuantUpsamplingBilinear2d`, which aligns
    corners.

    Example:
        >>> from jqinject.quant_tensor import IntQuantTensor
        >>> x = IntQuantTensor.from_int(jnp.array([0, 4]).reshape(1, 2, 1), 0.5)
        >>> QuantUpsample(scale_factor=2)(x).int().ravel()
        Array([0, 0, 4, 4], dtype=int8)
        >>> QuantUpsample(size=4, method="bilinear")(x).int().ravel()
        Array([0, 1, 3, 4], dtype=int8)
    """

    _results: "base.Results[QuantUpsample[jax.Array], QuantUpsample[Any]]"

    def __init__(
        self,
        size: int | Sequence[int] | None = None,
        scale_factor: float | Sequence[float] | None = None,
        method: str = "nearest",
        *,
        align_corners: bool = False,
        return_quant_tensor: bool = True,
    ) -> None:
        if (size is None) == (scale_factor is None):
            raise ValueError("QuantUpsample takes either size or scale_factor, got both or none of them")
        target: Any = scale_factor if size is None else size
        self.target = tuple(target) if isinstance(target, Sequence) else target
        self.is_factor = size is None
        for number in self.target if isinstance(self.target, tuple) else (self.target,):
            if not number > 0:
                raise ValueError(
                    f"QuantUpsample: {'scale_factor' if self.is_factor else 'size'} has to be positive, got {target!r}"
                )
        self.method = METHODS(method, "QuantUpsample", "method")
        self.align_corners = align_corners
        self.return_quant_tensor = return_quant_tensor

    def __call__(self, x: Any) -> base.Out:
        """The enlarged tensor.

        Args:
            x: (*batch, *spatial, channels), float array or QuantTensor.

        Returns:
            (*batch, *enlarged, channels).

        Raises:
            ValueError: fewer spatial axes than sizes; "bilinear" of a scale that varies along a spatial axis.
        """
        sizes = self._sizes(x.shape)
        if self.method == "nearest":
            y: Any = x if on_integers(x) else as_array(x)
            for axis, (size, step) in sizes.items():
                y = _nearest(y, axis, size, step)
        else:
            y = self._bilinear(x, sizes)
        return y if self.return_quant_tensor else as_array(y)

    def _sizes(self, shape: tuple[int, ...]) -> dict[int, tuple[int, Fraction]]:
        """Spatial axis -> its size wanted, and how far apart in the input two elements of the output are."""
        spatial = len(shape) - 2
        targets = self.target if isinstance(self.target, tuple) else (self.target,) * spatial
        if not 0 < len(targets) <= len(shape) - 1:
            raise ValueError(
                f"QuantUpsample: {self.target!r} is for {len(targets)} spatial axes, got an input of shape {shape}; "
                "expected (*batch, *spatial, channels)"
            )
        first = len(shape) - 1 - len(targets)
        lengths = shape[first : first + len(targets)]
        if self.is_factor:
            steps = [
                (int(n * factor), 1 / Fraction(factor)) for n, factor in zip(lengths, targets, strict=True)
            ]
        else:
            steps = [(int(size), Fraction(n, int(size))) for n, size in zip(lengths, targets, strict=True)]
        return dict(enumerate(steps, first))

    def _bilinear(self, x: object, sizes: dict[int, tuple[int, Fraction]]) -> Any:
        y = as_array(x)
        for axis, (size, step) in sizes.items():
            y = _linear(y, axis, size, None if self.align_corners else step)
        if not on_integers(x):
            return y
        for name, metadata in (("scale", x.scale), ("zero point", x.zero_point)):
            axes = [axis for axis in sizes if metadata.ndim > axis - x.ndim + metadata.ndim >= 0]
            if any(metadata.shape[axis - x.ndim] != 1 for axis in axes):
                raise ValueError(
                    f"QuantUpsample: a {name} of shape {metadata.shape} varies along a spatial axis, and elements of "
                    "different grids have no mean on either.\n"
                    "  cure: a scale for the tensor or for each channel, or x.value"
                )
        integers = round_ste(pre_round_integers(y, x.scale, x.zero_point))
        return x.set(value=((integers - x.zero_point) * x.scale).astype(y.dtype))


def _nearest(x: Any, axis: int, size: int, step: Fraction) -> Any:
    # In integers: what is a whole number stays one.
    index = np.array([i * step.numerator // step.denominator for i in range(size)], np.int32)

    def taken(array: jax.Array) -> jax.Array:
        return jnp.take(array, index, axis=axis)

    if not on_integers(x):
        return taken(x)
    return shaping.map_metadata(
        x, taken(x.value), lambda varying: taken(varying) if varying.shape[axis] > 1 else varying
    )


def _linear(x: jax.Array, axis: int, size: int, step: Fraction | None) -> jax.Array:
    """Without a step the first and the last element stay where they are."""
    length = x.shape[axis]
    if step is None:
        places = np.arange(size) * ((length - 1) / max(size - 1, 1))
    else:
        places = np.maximum((np.arange(size) + 0.5) * float(step) - 0.5, 0.0)
    low = np.minimum(np.floor(places).astype(np.int32), length - 1)
    shape = [1] * x.ndim
    shape[axis] = size
    share = jnp.asarray(places - low, x.dtype).reshape(shape)
    left, right = (jnp.take(x, i, axis=axis) for i in (low, np.minimum(low + 1, length - 1)))
    return left + (right - left) * share
