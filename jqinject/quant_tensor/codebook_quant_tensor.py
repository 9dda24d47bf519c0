"""`CodebookQuantTensor`: a dequantized array of indices into a table."""

from typing import Any, final

import jax
import jax.numpy as jnp

from jqinject.ops.grid import TableGrid
from jqinject.quant_tensor.attribute import attribute
from jqinject.quant_tensor.concrete import is_concrete
from jqinject.quant_tensor.scaled_quant_tensor import ScaledQuantTensor


@final
class CodebookQuantTensor(ScaledQuantTensor):
    """A dequantized array with its scale and the table of its numbers: `value = table[code] * scale`.

    It is immutable and a pytree: value and scale are children, codebook and `training` static. Used as an array,
    including in arithmetic, it decays to `value`.

    Attributes:
        value: float array of any shape, the dequantized numbers; gradients pass straight through.
        scale: float32, broadcasts against `value`.
        codebook: the table.
        training: whether it was made in training mode.

    Raises:
        TypeError: `value` is not a float array, or `codebook` is not a `TableGrid`.
        ValueError: the scale does not broadcast against the value.

    Example:
        >>> x = CodebookQuantTensor(jnp.array([0.5, -2.0]), 2.0, TableGrid((-1.0, 0.0, 0.25, 1.0)))
        >>> x.codes()
        Array([2, 0], dtype=uint8)
        >>> x + 1
        Array([ 1.5, -1. ], dtype=float32)
    """

    __slots__ = ()
    fields = ("value", "scale", "codebook", "training")

    def __init__(self, value: Any, scale: Any, codebook: TableGrid, training: bool = False) -> None:
        if not isinstance(codebook, TableGrid):
            raise TypeError(f"CodebookQuantTensor: codebook must be a TableGrid, got {codebook!r}")
        self._store(value, scale, codebook, training)

    @classmethod
    def from_codes(
        cls,
        codes: jax.Array,
        scale: Any,
        codebook: TableGrid,
        *,
        training: bool = False,
        dtype: Any = jnp.float32,
    ) -> "CodebookQuantTensor":
        """The tensor of these indices: `value = table[code] * scale`, in `dtype`.

        Example:
            >>> CodebookQuantTensor.from_codes(jnp.array([0, 3], jnp.uint8), 2.0, TableGrid((-1, 0, 0.25, 1))).value
            Array([-2.,  2.], dtype=float32)
        """
        scale = jnp.asarray(scale, jnp.float32)
        return cls((codebook.decode(codes) * scale).astype(dtype), scale, codebook, training)

    codebook: TableGrid = attribute("_format", "The table.")

    @property
    def signed(self) -> bool:
        """Whether the table has numbers below 0."""
        return self._format.values[0] < 0

    def number_range(self, narrow_range: bool = False) -> tuple[float, float]:
        """The smallest and the largest number of the table."""
        return self.codebook.values[0], self.codebook.values[-1]

    def codes(self) -> jax.Array:
        """The indices, uint8; no gradient."""
        steps = jax.lax.stop_gradient(self.value).astype(jnp.float32) / self.scale
        return self._format.encode(steps)

    def payload(self) -> jax.Array:
        """As `codes`."""
        return self.codes()

    def int(self, float_datatype: bool = False) -> jax.Array:
        """The indices of the numbers, as `IntQuantTensor.int` returns integers.

        Args:
            float_datatype: the indices in float32; no gradient.

        Returns:
            uint8 of the shape of `value`; float32 with `float_datatype`.

        Raises:
            ValueError: the tensor is concrete, and a number is not one of the table's.
        """
        if is_concrete(self.value, self.scale) and not self.is_valid:
            raise ValueError(
                "CodebookQuantTensor not valid: value / scale is not in its table.\n"
                "  cure: quantize the tensor again, or use `.value` where no indices are needed"
            )
        codes = self.codes()
        return codes.astype(jnp.float32) if float_datatype else codes

    @property
    def is_valid(self) -> bool | jax.Array:
        """Whether every number is one of the table times the scale, up to the rounding of `value`'s dtype."""
        again = (self._format.decode(self.codes()) * self.scale).astype(self.dtype)
        near = jnp.abs(again - self.value) <= 2 * jnp.finfo(self.dtype).eps * jnp.abs(self.value)
        valid = jnp.all(near | (again == self.value))
        return bool(valid) if is_concrete(valid) else valid

    def _format_name(self) -> str:
        return f"{len(self.codebook.values)} values"
