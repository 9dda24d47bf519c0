"""The marker that device compilers know: a composite operation around quantizing and dequantizing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

COMPOSITE_NAME = "quant.fake_quant"
LEAST_OF_WEIGHTS = -127  # their range is narrow


@dataclass(frozen=True)
class FakeQuantMarker:
    """One `quant.fake_quant`: everything that is known before the program runs.

    Attributes:
        scale: of the tensor, flat; None if the range is found at run time.
        zero_point: flat; None if the range is symmetric.
        shape: of scale and zero point, for broadcasting with the tensor.
        dimension: the axis along which the scale varies, if any.
        is_weight: whether the tensor is a weight.
        dynamic: quantizes the tensor if the range is found at run time.
        least: the smallest integer.
    """

    scale: tuple[float, ...] | None
    zero_point: tuple[int, ...] | None
    shape: tuple[int, ...]
    dimension: int | None
    is_weight: bool
    dynamic: Any = None
    least: int = -128

    def attributes(self) -> dict[str, Any]:
        """The compiler's attributes: `scale` (float32, empty if dynamic), `dtype`, `narrow_range` (true for weights),
        and if present `zero_point` (int64) and `quantization_dimension`."""
        found: dict[str, Any] = {
            "scale": np.asarray(() if self.scale is None else self.scale, np.float32),
            "dtype": "i8",
            "narrow_range": self.is_weight,
        }
        if self.zero_point is not None:
            found["zero_point"] = np.asarray(self.zero_point, np.int64)
        if self.dimension is not None:
            found["quantization_dimension"] = self.dimension
        return found

    def __call__(self, x: jax.Array) -> jax.Array:
        """Quantize and dequantize `x`, marked; the gradient passes straight through."""
        return _marked(self, x)

    def with_batch_axis(self) -> FakeQuantMarker:
        """The same for a tensor with an extra leading axis."""
        moved = None if self.dimension is None else self.dimension + 1
        dynamic = None if self.dynamic is None else jax.vmap(self.dynamic)
        return replace(self, shape=(1, *self.shape), dimension=moved, dynamic=dynamic)

    def decomposed(self, x: jax.Array) -> jax.Array:
        """Quantize and dequantize `x` as the compiler does."""
        if self.dynamic is not None:
            return self.dynamic(x)
        scale, zero = self._constants()
        integers = jnp.clip(jnp.round(x.astype(jnp.float32) / scale + zero), self.least, 127)
        return ((integers - zero) * scale).astype(x.dtype)

    def _constants(self) -> tuple[jax.Array, jax.Array | float]:
        scale = jnp.asarray(np.asarray(self.scale, np.float32).reshape(self.shape))
        if self.zero_point is None:
            return scale, 0.0
        return scale, jnp.asarray(np.asarray(self.zero_point, np.float32).reshape(self.shape))


def _marked(marker: FakeQuantMarker, x: jax.Array) -> jax.Array:
    """The composite, which has no derivative or batching rule of its own: both are defined around it."""

    @jax.custom_batching.custom_vmap
    def composite(x: jax.Array) -> jax.Array:
        return jax.lax.composite(lambda x, **_: marker.decomposed(x), name=COMPOSITE_NAME)(
            x, **marker.attributes()
        )

    @composite.def_vmap
    def batched(size: int, in_batched: Any, x: jax.Array) -> Any:
        return _marked(marker.with_batch_axis(), x), True

    @jax.custom_vjp
    def straight_through(x: jax.Array) -> jax.Array:
        return composite(x)

    straight_through.defvjp(lambda x: (composite(x), None), lambda kept, g: (g,))
    return straight_through(x)
