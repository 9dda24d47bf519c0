"""`FloatQuantTensor`: a float array that is 8-bit floats in disguise."""

from collections.abc import Iterable
from typing import Any, Self, final

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.ops.float8 import float8_dtype, from_float8, to_float8

from ._fields import float_value, metadata
from .base import QuantTensor, as_array
from .concrete import brief, is_concrete

FIELDS = ("value", "scale", "q_dtype", "training")


@final
class FloatQuantTensor(QuantTensor):
    """A dequantized array with the scale and the dtype of its payload: `value = payload * scale`.

    It is immutable and a pytree: value and scale are children, `q_dtype` and `training` static. Wherever an array
    stands, arithmetic included, it decays to `value`; `reshape` and `transpose` of a tensor with one scale keep it.

    Attributes:
        value: float array of any shape, the dequantized numbers; gradients pass straight through.
        scale: float32, broadcasts against `value`.
        q_dtype: dtype of the payload, an 8-bit float.
        training: whether it was made in training mode.

    Raises:
        TypeError: `value` is no float array, or `q_dtype` no 8-bit float.
        ValueError: the scale does not broadcast against the value.

    Example:
        >>> x = FloatQuantTensor(jnp.array([0.5, 4.0]), 0.5, jnp.float8_e4m3fn)
        >>> x.payload()
        Array([1, 8], dtype=float8_e4m3fn)
        >>> x + 1
        Array([1.5, 5. ], dtype=float32)
    """

    __slots__ = ("_q_dtype", "_scale", "_training", "_value")

    _value: jax.Array
    _scale: jax.Array
    _q_dtype: np.dtype
    _training: bool

    def __init__(self, value: Any, scale: Any, q_dtype: Any, training: bool = False) -> None:
        # None or an axis number as value makes a prefix of the pytree, for `in_axes`: all stored as it comes.
        if value is not None and not isinstance(value, int):
            value = float_value(as_array(value), "FloatQuantTensor")
            scale = metadata(scale, value.shape, "scale")
        fields = (value, scale, float8_dtype(q_dtype, "FloatQuantTensor"), training)
        for name, field in zip(FIELDS, fields, strict=True):
            object.__setattr__(self, "_" + name, field)

    @classmethod
    def from_payload(
        cls, payload: jax.Array, scale: Any, *, training: bool = False, dtype: Any = jnp.float32
    ) -> "FloatQuantTensor":
        """The tensor of these 8-bit floats: `value = payload * scale`, in `dtype`.

        Example:
            >>> FloatQuantTensor.from_payload(jnp.array([3.0], jnp.float8_e5m2), 0.25).value
            Array([0.75], dtype=float32)
        """
        scale = jnp.asarray(scale, jnp.float32)
        return cls(from_float8(payload, scale, dtype), scale, payload.dtype, training)

    @property
    def value(self) -> jax.Array:
        """The dequantized float array."""
        return self._value

    @property
    def scale(self) -> jax.Array:
        """Float per step of the payload."""
        return self._scale

    @property
    def q_dtype(self) -> np.dtype:
        """Dtype of the payload."""
        return self._q_dtype

    @property
    def training(self) -> bool:
        """Whether it was made in training mode."""
        return self._training

    @property
    def zero_point(self) -> jax.Array:
        """Floats have their zero at 0."""
        return jnp.zeros((), jnp.float32)

    @property
    def bit_width(self) -> int:
        """Bits of one number of the payload."""
        return self._q_dtype.itemsize * 8

    def payload(self) -> jax.Array:
        """The numbers in `q_dtype`: `value / scale`, exact for a value that lies on the grid; no gradient."""
        return to_float8(self.value, self.scale, self.q_dtype)

    def dequantize(self) -> jax.Array:
        """The dequantized float array, `value`."""
        return self.value

    @property
    def is_valid(self) -> bool | jax.Array:
        """Whether every number is the payload's, up to the rounding of `value`'s dtype; nan is."""
        again = from_float8(self.payload(), self.scale, self.dtype)
        near = jnp.abs(again - self.value) <= 2 * jnp.finfo(self.dtype).eps * jnp.abs(self.value)
        valid = jnp.all(near | (again == self.value) | jnp.isnan(again))
        return bool(valid) if is_concrete(valid) else valid

    def set(self, **changes: Any) -> Self:
        """A copy with some fields replaced.

        Args:
            **changes: value, scale, q_dtype, training.

        Raises:
            TypeError: a name is no field.
        """
        for name in changes:
            if name not in FIELDS:
                raise TypeError(f"FloatQuantTensor has no field {name!r}; it has {', '.join(FIELDS)}")
        return type(self)(**{name: changes.get(name, getattr(self, name)) for name in FIELDS})

    def reshape(self, *shape: Any) -> Any:
        """The same numbers in another shape; the plain array where there are several scales."""
        return self._moved(self.value.reshape(*shape))

    def transpose(self, *axes: Any) -> Any:
        """Axes permuted, reversed without arguments; the plain array where there are several scales."""
        return self._moved(self.value.transpose(*axes))

    def __getitem__(self, index: Any) -> Any:
        return self._moved(self.value[index])

    def _moved(self, value: jax.Array) -> Any:
        return self.set(value=value, scale=self.scale.reshape(())) if self.scale.size == 1 else value

    def __repr__(self) -> str:
        if not isinstance(self.value, jax.Array | np.ndarray):
            return f"FloatQuantTensor({', '.join(f'{n}={getattr(self, n)!r}' for n in FIELDS)})"
        body = (
            "traced" if not is_concrete(self.value) else np.array2string(np.asarray(self.value), threshold=20)
        )
        return (
            f"FloatQuantTensor({self.q_dtype.name}, {self.dtype.name}{list(self.shape)}, "
            f"scale={brief(self.scale)}, value={body})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return FloatQuantTensor._of, tuple(getattr(self, name) for name in FIELDS)

    @staticmethod
    def _of(*fields: Any) -> "FloatQuantTensor":
        """A tensor of these fields as they are: leaves of a transformation need not be arrays."""
        tensor = object.__new__(FloatQuantTensor)
        for name, field in zip(FIELDS, fields, strict=True):
            object.__setattr__(tensor, "_" + name, field)
        return tensor


def _flatten_with_keys(tensor: FloatQuantTensor) -> tuple[list[tuple[Any, Any]], tuple[np.dtype, bool]]:
    children = [(jax.tree_util.GetAttrKey(name), getattr(tensor, name)) for name in FIELDS[:2]]
    return children, (tensor.q_dtype, tensor.training)


def _unflatten(aux: tuple[np.dtype, bool], children: Iterable[Any]) -> FloatQuantTensor:
    return FloatQuantTensor._of(*children, *aux)


jax.tree_util.register_pytree_with_keys(FloatQuantTensor, _flatten_with_keys, _unflatten)
