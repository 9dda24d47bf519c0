"""`CodebookQuantTensor`: a dequantized array of indices into a table."""

from collections.abc import Iterable
from typing import Any, Self, final

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.ops.minifloats.nearest_code import Codebook
from jqinject.quant_tensor._fields import float_value, metadata
from jqinject.quant_tensor.base import QuantTensor, as_array
from jqinject.quant_tensor.concrete import brief, hidden, is_concrete

FIELDS = ("value", "scale", "codebook", "training")


@final
class CodebookQuantTensor(QuantTensor):
    """A dequantized array with its scale and the table of its numbers: `value = table[code] * scale`.

    It is immutable and a pytree: value and scale are children, codebook and `training` static. Used as an array,
    including in arithmetic, it decays to `value`.

    Attributes:
        value: float array of any shape, the dequantized numbers; gradients pass straight through.
        scale: float32, broadcasts against `value`.
        codebook: the table.
        training: whether it was made in training mode.

    Raises:
        TypeError: `value` is not a float array, or `codebook` is not a `Codebook`.
        ValueError: the scale does not broadcast against the value.

    Example:
        >>> x = CodebookQuantTensor(jnp.array([0.5, -2.0]), 2.0, Codebook((-1.0, 0.0, 0.25, 1.0)))
        >>> x.codes()
        Array([2, 0], dtype=uint8)
        >>> x + 1
        Array([ 1.5, -1. ], dtype=float32)
    """

    __slots__ = ("_codebook", "_scale", "_training", "_value")

    _value: jax.Array
    _scale: jax.Array
    _codebook: Codebook
    _training: bool

    def __init__(self, value: Any, scale: Any, codebook: Codebook, training: bool = False) -> None:
        if not isinstance(codebook, Codebook):
            raise TypeError(f"CodebookQuantTensor: codebook must be a Codebook, got {codebook!r}")
        # With None or an axis number as value this is a pytree prefix, for `in_axes`: store everything unchanged.
        if value is not None and not isinstance(value, int):
            value = float_value(as_array(value), "CodebookQuantTensor")
            scale = metadata(scale, value.shape, "scale")
        for name, field in zip(FIELDS, (value, scale, codebook, training), strict=True):
            object.__setattr__(self, "_" + name, field)

    @classmethod
    def from_codes(
        cls,
        codes: jax.Array,
        scale: Any,
        codebook: Codebook,
        *,
        training: bool = False,
        dtype: Any = jnp.float32,
    ) -> "CodebookQuantTensor":
        """The tensor of these indices: `value = table[code] * scale`, in `dtype`.

        Example:
            >>> CodebookQuantTensor.from_codes(jnp.array([0, 3], jnp.uint8), 2.0, Codebook((-1, 0, 0.25, 1))).value
            Array([-2.,  2.], dtype=float32)
        """
        scale = jnp.asarray(scale, jnp.float32)
        return cls((codebook.decode(codes) * scale).astype(dtype), scale, codebook, training)

    @property
    def value(self) -> jax.Array:
        """The dequantized float array."""
        return self._value

    @property
    def scale(self) -> jax.Array:
        """The factor of the table."""
        return self._scale

    @property
    def codebook(self) -> Codebook:
        """The table."""
        return self._codebook

    @property
    def training(self) -> bool:
        """Whether it was made in training mode."""
        return self._training

    @property
    def zero_point(self) -> jax.Array:
        """A table has its zero at 0."""
        return jnp.zeros((), jnp.float32)

    @property
    def bit_width(self) -> int:
        """Bits of one index."""
        return self._codebook.bit_width

    @property
    def signed(self) -> bool:
        """Whether the table has numbers below 0."""
        return self._codebook.values[0] < 0

    def codes(self) -> jax.Array:
        """The indices, uint8; no gradient."""
        steps = jax.lax.stop_gradient(self.value).astype(jnp.float32) / self.scale
        return self._codebook.encode(steps)

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

    def dequantize(self) -> jax.Array:
        """The dequantized float array, `value`."""
        return self.value

    @property
    def is_valid(self) -> bool | jax.Array:
        """Whether every number is one of the table times the scale, up to the rounding of `value`'s dtype."""
        again = (self._codebook.decode(self.codes()) * self.scale).astype(self.dtype)
        near = jnp.abs(again - self.value) <= 2 * jnp.finfo(self.dtype).eps * jnp.abs(self.value)
        valid = jnp.all(near | (again == self.value))
        return bool(valid) if is_concrete(valid) else valid

    def set(self, **changes: Any) -> Self:
        """A copy with some fields replaced.

        Args:
            **changes: value, scale, codebook, training.

        Raises:
            TypeError: a name is not a field.
        """
        for name in changes:
            if name not in FIELDS:
                raise TypeError(f"CodebookQuantTensor has no field {name!r}; it has {', '.join(FIELDS)}")
        return type(self)(**{name: changes.get(name, getattr(self, name)) for name in FIELDS})

    def __repr__(self) -> str:
        if not isinstance(self.value, jax.Array | np.ndarray):
            return f"CodebookQuantTensor({', '.join(f'{n}={getattr(self, n)!r}' for n in FIELDS)})"
        body = hidden(self.value) or np.array2string(np.asarray(self.value), threshold=20)
        return (
            f"CodebookQuantTensor({len(self.codebook.values)} values, {self.dtype.name}{list(self.shape)}, "
            f"scale={brief(self.scale)}, value={body})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return CodebookQuantTensor._of, tuple(getattr(self, name) for name in FIELDS)

    @staticmethod
    def _of(*fields: Any) -> "CodebookQuantTensor":
        """A tensor of these fields, unchecked: leaves of a transformation need not be arrays."""
        tensor = object.__new__(CodebookQuantTensor)
        for name, field in zip(FIELDS, fields, strict=True):
            object.__setattr__(tensor, "_" + name, field)
        return tensor


def _flatten_with_keys(tensor: CodebookQuantTensor) -> tuple[list[tuple[Any, Any]], tuple[Codebook, bool]]:
    children = [(jax.tree_util.GetAttrKey(name), getattr(tensor, name)) for name in FIELDS[:2]]
    return children, (tensor.codebook, tensor.training)


def _unflatten(aux: tuple[Codebook, bool], children: Iterable[Any]) -> CodebookQuantTensor:
    return CodebookQuantTensor._of(*children, *aux)


jax.tree_util.register_pytree_with_keys(CodebookQuantTensor, _flatten_with_keys, _unflatten)
