"""`IntQuantTensor`: a dequantized array of integers, as a pytree."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Self, final

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.ops.power import max_int, min_int
from jqinject.ops.ste import round_ste
from jqinject.quant_tensor._fields import (
    FIELDS,
    are_metadata,
    changed_fields,
    checked_bit_width,
    describe,
    flatten_with_keys,
    float_value,
    metadata,
    why_invalid,
)
from jqinject.quant_tensor.attribute import attribute
from jqinject.quant_tensor.base import as_array
from jqinject.quant_tensor.bit_widths import BitWidth
from jqinject.quant_tensor.concrete import is_concrete
from jqinject.quant_tensor.integer_operations import IntegerOperations
from jqinject.quant_tensor.validity import checked_integers, dequantized, holds_integers, pre_round_integers

_SLOTS = tuple("_" + name for name in FIELDS)


@final
class IntQuantTensor(IntegerOperations):
    """A dequantized array with the scale, zero point, bit width and signedness of its integers.

    value = (integer - zero_point) * scale, where scale and zero point broadcast against the value by NumPy's
    rules: a scalar for a whole tensor, size 1 everywhere but on the channel axis for one scale per channel.

    It is immutable; `set` makes changed copies. It is a pytree: value, scale and zero point are children, and so is
    the bit width if it is an array (learned); as a Python int it is static, and so are `signed` and `training`. So
    it crosses `jit`, `grad`, `vmap`, `scan` and NNX modules. In `jax.numpy` and in Flax layers it decays to `value`;
    `+ - * / abs`, unary minus, the shape methods and the functions of this package keep the type. JAX sets two
    limits: `array + quant_tensor` with a `jax.Array` on the left is a plain array (JAX converts the right operand
    first), and functions that directly call `jax.lax`, like `jax.nn.sigmoid`, need `x.value`.

    A tensor whose value does not lie on its grid can be built; its `is_valid` is false. Operations that need the
    numbers (`int`, comparing scales) check them if they are concrete; under tracing they are unchecked.

    Attributes:
        value: float array of any shape, the dequantized numbers.
        scale: float32 array, the float per integer step; broadcasts against `value`.
        zero_point: float32 array, the integer that stands for 0.0; broadcasts against `value`.
        bit_width: Python int, or float32 scalar array if learned.
        signed: whether the integers are signed.
        training: whether it was made in training mode, where scales of two operands may differ.

    A tensor that a quantizer has just made also keeps its integers, for `int` and for contractions. They are not a
    child of the pytree: after a transformation they are recomputed from the value.

    Raises:
        TypeError: `value` is not a float array (use `from_int` for integers).
        ValueError: scale or zero point do not broadcast against the value, or a bit width is below 1.

    Example:
        >>> import jax.numpy as jnp
        >>> x = IntQuantTensor(jnp.array([-0.5, 1.0]), 0.25, 0.0, 8, signed=True, training=False)
        >>> x.int()
        Array([-2,  4], dtype=int8)
        >>> (x + x).bit_width
        9
        >>> jnp.sum(x)
        Array(0.5, dtype=float32)
    """

    __slots__ = (
        "_bit_width",
        "_dtype",
        "_payload",
        "_scale",
        "_shaped",
        "_signed",
        "_training",
        "_value",
        "_zero_point",
    )

    _dtype: np.dtype  # of the value
    _payload: jax.Array | None
    _shaped: jax.Array  # the value, or the payload that it is made from

    def __init__(
        self,
        value: Any,
        scale: Any,
        zero_point: Any,
        bit_width: Any,
        signed: bool,
        training: bool,
        payload: jax.Array | None = None,
    ) -> None:
        # With None or an axis number as value this is a pytree prefix, for `in_axes`: store everything unchanged.
        if value is not None and not isinstance(value, int):
            if not (isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.floating)):
                value = float_value(as_array(value))
            arrays = isinstance(scale, jax.Array) and isinstance(zero_point, jax.Array)
            if not (arrays and are_metadata(value.shape, scale.aval, zero_point.aval)):
                scale = metadata(scale, value.shape, "scale")
                zero_point = metadata(zero_point, value.shape, "zero_point")
            if type(bit_width) is not int or bit_width < 1:
                bit_width = checked_bit_width(bit_width)
        self._hold((value, scale, zero_point, bit_width, signed, training), payload)

    def _hold(self, fields: tuple[Any, ...], payload: jax.Array | None) -> None:
        value = fields[0]
        hold = object.__setattr__
        for slot, content in zip(_SLOTS, fields, strict=True):
            hold(self, slot, content)
        hold(self, "_payload", payload)
        hold(self, "_shaped", value)
        hold(self, "_dtype", getattr(value, "dtype", None))

    @classmethod
    def from_int(
        cls,
        integers: Any,
        scale: Any,
        zero_point: Any = 0.0,
        bit_width: Any = 8,
        *,
        signed: bool = True,
        training: bool = False,
        dtype: Any = jnp.float32,
    ) -> "IntQuantTensor":
        """The tensor of these integers: value = (integers - zero_point) * scale, in `dtype`.

        Example:
            >>> IntQuantTensor.from_int(jnp.array([0, 3]), scale=0.5, zero_point=1.0, signed=False).value
            Array([-0.5,  1. ], dtype=float32)
        """
        scale, zero_point = jnp.asarray(scale, jnp.float32), jnp.asarray(zero_point, jnp.float32)
        value = dequantized(jnp.asarray(integers), scale, zero_point, dtype)
        return cls(value, scale, zero_point, bit_width, signed, training)

    @classmethod
    def stored(
        cls,
        payload: jax.Array,
        scale: jax.Array,
        zero_point: jax.Array,
        bit_width: int,
        signed: bool,
        dtype: Any,
    ) -> "IntQuantTensor":
        """As `from_int`, for integers that are known to fit; they are dequantized only when the value is read.

        Args:
            payload: the integers, of any integer dtype.
            scale, zero_point: float32 arrays that broadcast against them.
            bit_width: bits of an integer.
            signed: whether the integers are signed.
            dtype: of the value.
        """
        tensor = object.__new__(cls)
        tensor._hold((payload, scale, zero_point, bit_width, signed, False), payload)
        object.__setattr__(tensor, "_dtype", np.dtype(dtype))
        object.__delattr__(tensor, "_value")  # an empty slot: see `__getattr__`
        return tensor

    @property
    def is_stored(self) -> bool:
        """Whether it keeps its integers only, so that no gradient can reach its value."""
        return self._payload is not None and self._shaped is self._payload

    if not TYPE_CHECKING:  # it would hide misspelt names

        def __getattr__(self, name: str) -> Any:
            """The value of a `stored` tensor, whose slot is empty: dequantized when it is read."""
            if name != "value":
                raise AttributeError(f"IntQuantTensor has no attribute {name!r}", name=name, obj=self)
            return dequantized(self._shaped, self.scale, self.zero_point, self._dtype)

    if TYPE_CHECKING:

        @property
        def value(self) -> jax.Array: ...  # abstract in the base, so that it must be a property

    else:
        value: jax.Array = attribute("_value", "The dequantized float array.")
    scale: jax.Array = attribute("_scale", "Float per integer step.")
    zero_point: jax.Array = attribute("_zero_point", "The integer that stands for 0.0.")
    bit_width: BitWidth = attribute("_bit_width", "Bits: a Python int, or an array if learned.")
    signed: bool = attribute("_signed", "Whether the integers are signed.")
    training: bool = attribute("_training", "Whether it was made in training mode.")
    payload: jax.Array | None = attribute(
        "_payload", "The integers, if they are kept; else `int` makes them."
    )

    def set(self, **changes: Any) -> Self:
        """A copy with some fields replaced.

        Args:
            **changes: value, scale, zero_point, bit_width, signed, training.

        Raises:
            TypeError: a name is not a field.

        Example:
            >>> x = IntQuantTensor(jnp.array([1.0]), 0.5, 0.0, 8, signed=True, training=True)
            >>> x.set(training=False).training
            False
        """
        kept = self._payload if changes.keys() <= {"training"} else None
        return type(self)(**changed_fields(self, changes), payload=kept)

    def keeping(self, payload: jax.Array) -> Self:
        """The same tensor, which keeps its integers for `int` and for contractions.

        Args:
            payload: its integers.
        """
        return type(self)(*(getattr(self, field) for field in FIELDS), payload=payload)

    def axes(
        self, value: Any = None, scale: Any = None, zero_point: Any = None, bit_width: Any = None
    ) -> "IntQuantTensor":
        """A pytree prefix with this tensor's structure, for `in_axes`, `out_axes` or shardings.

        Args:
            value: the entry for the value, for example the axis to map over.
            scale: the same for the scale; None if it is per tensor and not mapped.
            zero_point: the same for the zero point.
            bit_width: the same for a learned bit width; a constant one stays.

        Example:
            >>> x = IntQuantTensor(jnp.ones((3, 2)), 0.5, 0.0, 8, signed=True, training=False)
            >>> jax.vmap(lambda row: row.int().sum(), in_axes=(x.axes(value=0),))(x)
            Array([4, 4, 4], dtype=int32)
        """
        bits = self.bit_width if isinstance(self.bit_width, int) else bit_width
        return self._of(value, scale, zero_point, bits, self.signed, self.training)

    @property
    def is_valid(self) -> bool | jax.Array:
        """Whether the value lies on its integer grid, within the range of its bit width.

        See `holds_integers` for the tolerances. A Python bool for concrete arrays, a boolean array under
        tracing.
        """
        valid = holds_integers(self.value, self.scale, self.zero_point, self.bit_width, self.signed)
        return bool(valid) if is_concrete(valid) else valid

    def int(self, float_datatype: bool = False) -> jax.Array:
        """The integers: round(value / scale + zero_point).

        Under tracing validity is not checked; the integers are those that the quantizer kept, if it did. A learned bit
        width then does not determine the dtype: int32.

        Args:
            float_datatype: keep the integers in float32, with the straight-through gradient of the rounding.

        Returns:
            int8 or uint8 up to 8 bits, int32 above; float32 with `float_datatype`.

        Raises:
            ValueError: the tensor is concrete and not valid. A one-bit tensor may hold the same number everywhere
                (Brevitas considers that invalid, and raises).
        """
        narrow = is_concrete(self.bit_width) and float(self.bit_width) <= 8
        dtype = (jnp.int8 if self.signed else jnp.uint8) if narrow else jnp.int32
        payload = self._payload
        # Of a concrete value the integers are checked; a stored tensor has no value but these.
        known = payload is not None and (self.is_stored or not is_concrete(self.value))
        if known and payload is not None and not float_datatype:
            return payload.astype(dtype)
        if is_concrete(*self._grid, self.bit_width):
            integers, exist = checked_integers(*self._grid, self.bit_width, self.signed, dtype)
            if not exist:
                raise ValueError(why_invalid(self))
        else:
            integers = jnp.round(pre_round_integers(*self._grid)).astype(dtype)
        if float_datatype:
            return round_ste(pre_round_integers(*self._grid)).astype(jnp.float32)
        return integers

    def number_range(self, narrow_range: bool = False) -> tuple[Any, Any]:
        """The smallest and the largest integer.

        Args:
            narrow_range: whether one integer is left out; the tensor itself does not know.
        """
        grid = (self.signed, narrow_range, self.bit_width)
        return min_int(*grid), max_int(*grid)

    @property
    def _grid(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        return self.value, self.scale, self.zero_point

    def __repr__(self) -> str:
        return describe(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return IntQuantTensor._of, tuple(getattr(self, field) for field in FIELDS)

    @staticmethod
    def _of(*fields: Any) -> "IntQuantTensor":
        """A tensor of these fields, unchecked: leaves of a transformation need not be arrays."""
        tensor = object.__new__(IntQuantTensor)
        tensor._hold(fields, None)
        return tensor


def _unflatten(aux: tuple[Any, bool, bool], children: Iterable[Any]) -> IntQuantTensor:
    static_bits, signed, training = aux
    value, scale, zero_point, *learned = children
    return IntQuantTensor._of(value, scale, zero_point, *(learned or (static_bits,)), signed, training)


jax.tree_util.register_pytree_with_keys(IntQuantTensor, flatten_with_keys, _unflatten)
