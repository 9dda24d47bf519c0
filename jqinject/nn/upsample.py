"""Enlarging images and sequences, on QuantTensors and arrays."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.nn.base.quant_layer import Out, QuantTensorLayer, Results
from jqinject.ops.ste import round_ste
from jqinject.quant_tensor import as_array, on_integers, pre_round_integers
from jqinject.quant_tensor.shaping import map_metadata

METHODS = ("nearest", "bilinear")


@final
class QuantUpsample(QuantTensorLayer[Out]):
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

    _results: Results[QuantUpsample[jax.Array], QuantUpsample[Any]]

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
        if method not in METHODS:
            raise ValueError(f"QuantUpsample: method must be one of {METHODS}, got {method!r}")
        target: Any = scale_factor if size is None else size
        self.target = tuple(target) if isinstance(target, Sequence) else target
        self.is_factor = size is None
        for number in self.target if isinstance(self.target, tuple) else (self.target,):
            if not number > 0:
                raise ValueError(
                    f"QuantUpsample: {'scale_factor' if self.is_factor else 'size'} has to be positive, got {target!r}"
                )
        self.method = method
        self.align_corners = align_corners
        self.return_quant_tensor = return_quant_tensor

    def __call__(self, x: Any) -> Out:
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

    def _bilinear(self, x: Any, sizes: dict[int, tuple[int, Fraction]]) -> Any:
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
    return map_metadata(
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
