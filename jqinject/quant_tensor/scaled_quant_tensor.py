"""What quantized tensors without a zero point share: a value, a scale and a format of any kind."""

from collections.abc import Iterable
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.quant_tensor._fields import float_value, metadata
from jqinject.quant_tensor.attribute import attribute
from jqinject.quant_tensor.base import QuantTensor, as_array
from jqinject.quant_tensor.concrete import brief, hidden

_SLOTS = ("_value", "_scale", "_format", "_training", "_payload", "_shaped", "_dtype")


class ScaledQuantTensor(QuantTensor):
    """Abstract: `value = number * scale`, where a format says which numbers there are.

    It is immutable, and a pytree: value and scale are children, and so is a format with learned widths; other formats
    and `training` are static.

    Attributes:
        fields: what it is made of, as its constructor takes it: value, scale, the format by its name, training.
    """

    __slots__ = _SLOTS

    fields: ClassVar[tuple[str, ...]]
    _value: jax.Array | np.dtype  # the dtype, of a value that is made when it is read
    _scale: jax.Array
    _format: Any
    _training: bool
    _payload: jax.Array | None
    _shaped: jax.Array  # the value, or the payload that it is made from

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        jax.tree_util.register_pytree_with_keys(
            cls, _flatten, lambda aux, children: _unflatten(cls, aux, children)
        )

    def _store(
        self, value: Any, scale: Any, format: Any, training: bool, payload: jax.Array | None = None
    ) -> None:
        """Check and store what the constructor is given."""
        # With None or an axis number as value this is a pytree prefix, for `in_axes`: store everything unchanged.
        if value is not None and not isinstance(value, int):
            value = float_value(as_array(value), type(self).__name__)
            scale = metadata(scale, value.shape, "scale")
        self._hold((value, scale, format, training), payload)

    def _hold(self, fields: tuple[Any, ...], payload: jax.Array | None) -> None:
        value = fields[0]
        stored = isinstance(value, np.dtype)
        derived = (payload, value) if stored else (value, getattr(value, "dtype", None))
        for slot, content in zip(_SLOTS, (*fields, payload, *derived), strict=True):
            object.__setattr__(self, slot, content)

    @classmethod
    def _of(cls, *fields: Any) -> Self:
        """A tensor of these fields, unchecked: leaves of a transformation need not be arrays."""
        tensor = object.__new__(cls)
        tensor._hold(fields, None)
        return tensor

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self)._of, tuple(getattr(self, name) for name in self.fields)

    scale: jax.Array = attribute("_scale", "The factor of the format's numbers.")
    training: bool = attribute("_training", "Whether it was made in training mode.")
    bit_width: Any = attribute("_format.bit_width", "Bits of one number.")

    @property
    def value(self) -> jax.Array:
        """The dequantized float array."""
        value = self._value
        assert not isinstance(value, np.dtype), "a tensor that stores its payload alone dequantizes it"
        return value

    @property
    def zero_point(self) -> jax.Array:
        """The format has its zero at 0."""
        return jnp.zeros((), jnp.float32)

    def dequantize(self) -> jax.Array:
        """The dequantized float array, `value`."""
        return self.value

    def set(self, **changes: Any) -> Self:
        """A copy with some fields replaced; the names are those in `fields`.

        Raises:
            TypeError: a name is not a field.
        """
        for name in changes:
            if name not in self.fields:
                raise TypeError(
                    f"{type(self).__name__} has no field {name!r}; it has {', '.join(self.fields)}"
                )
        made = type(self)(**{name: changes.get(name, getattr(self, name)) for name in self.fields})
        if changes.keys() <= {"training"}:
            object.__setattr__(made, "_payload", self._payload)
        return made

    def __repr__(self) -> str:
        if not isinstance(self.value, jax.Array | np.ndarray):
            return f"{type(self).__name__}({', '.join(f'{n}={getattr(self, n)!r}' for n in self.fields)})"
        body = hidden(self.value) or np.array2string(np.asarray(self.value), threshold=20)
        return (
            f"{type(self).__name__}({self._format_name()}, {self.dtype.name}{list(self.shape)}, "
            f"scale={brief(self.scale)}, value={body})"
        )

    def _format_name(self) -> str:
        return str(self._format)


def _flatten(tensor: ScaledQuantTensor) -> tuple[list[tuple[Any, Any]], tuple[Any, bool]]:
    learned = tensor._format.is_learned
    names = tensor.fields[:3] if learned else tensor.fields[:2]
    children = [(jax.tree_util.GetAttrKey(name), getattr(tensor, name)) for name in names]
    return children, (None if learned else tensor._format, tensor.training)


def _unflatten(
    cls: type[ScaledQuantTensor], aux: tuple[Any, bool], children: Iterable[Any]
) -> ScaledQuantTensor:
    static, training = aux
    value, scale, *learned = children
    return cls._of(value, scale, learned[0] if static is None else static, training)
