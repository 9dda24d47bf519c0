"""`FloatQuantTensor`: a dequantized array of minifloats."""

from typing import Any, Self, final

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.ops.float8_cast import from_float8, to_float8
from jqinject.ops.float_grid import FloatGrid
from jqinject.ops.minifloat import from_float_steps, to_float_grid
from jqinject.quant_tensor._float_fields import CONTRACTED, Levels, float_format
from jqinject.quant_tensor.attribute import attribute
from jqinject.quant_tensor.concrete import is_concrete
from jqinject.quant_tensor.scaled_quant_tensor import ScaledQuantTensor

_SMALLEST_NORMAL = float(jnp.finfo(jnp.float32).tiny)


@final
class FloatQuantTensor(ScaledQuantTensor):
    """A dequantized array with the scale and the format of its minifloats: `value = minifloat * scale`.

    It is immutable and a pytree: value and scale are children, the format (a child if its widths are learned) and
    `training` are static. Used as an array, including in arithmetic, it decays to `value`; `-x` (if the format is
    signed) and `abs(x)` keep the type, and so do `reshape` and `transpose` of a tensor with one scale.

    Attributes:
        value: float array of any shape, the dequantized numbers; gradients pass straight through.
        scale: float32, broadcasts against `value`.
        format: a `FloatGrid`, or given as the JAX dtype that has it, such as `jnp.float8_e4m3fn`.
        training: whether it was made in training mode.

    A tensor that a quantizer has just made also keeps its payload, for `payload` and for contractions. The payload is
    not a child of the pytree: after a transformation it is recomputed from value and scale.

    Raises:
        TypeError: `value` is not a float array, or `format` is neither a format nor a narrow float dtype.
        ValueError: the scale does not broadcast against the value.

    Example:
        >>> x = FloatQuantTensor(jnp.array([0.5, 4.0]), 0.5, jnp.float8_e4m3fn)
        >>> x.payload()
        Array([1, 8], dtype=float8_e4m3fn)
        >>> x + 1
        Array([1.5, 5. ], dtype=float32)
        >>> FloatQuantTensor(jnp.array([0.5, 4.0]), 0.5, FloatGrid(3, 2)).minifloat()
        Array([1., 8.], dtype=float32)
    """

    __slots__ = ("_levels", "_scale_dtype")
    fields = ("value", "scale", "format", "training")
    _levels: Levels | None
    _scale_dtype: np.dtype | None

    def __init__(
        self, value: Any, scale: Any, format: Any, training: bool = False, payload: jax.Array | None = None
    ) -> None:
        self._store(value, scale, float_format(format, "FloatQuantTensor"), training, payload)

    def _hold(self, fields: tuple[Any, ...], payload: jax.Array | None) -> None:
        super()._hold(fields, payload)
        object.__setattr__(self, "_levels", None)
        object.__setattr__(self, "_scale_dtype", None)

    def with_levels(self, levels: Levels) -> Self:
        """The same tensor, which also keeps what it was rounded to, as it keeps a payload.

        Args:
            levels: both levels of its scale, and its minifloats.
        """
        made = type(self)._of(self._value, self._scale, self._format, self._training)
        object.__setattr__(made, "_levels", levels)
        return made

    def with_scale_dtype(self, dtype: np.dtype | None) -> Self:
        """The same tensor, which also knows a dtype of 8 bits that holds its scales, as it keeps a payload."""
        object.__setattr__(self, "_scale_dtype", dtype)
        return self

    @property
    def scale_dtype(self) -> np.dtype | None:
        """A dtype of 8 bits that holds its scales, of a tensor that a quantizer has just made; None if unknown."""
        return self._scale_dtype

    @property
    def keeps_minifloats(self) -> bool:
        """Whether it keeps what it was rounded to."""
        return self._payload is not None or self._levels is not None

    def minifloats(self) -> jax.Array:
        """What it was rounded to and keeps, float32; no gradient."""
        if self._levels is not None:
            return self._levels.minifloats
        payload = self.payload()
        if jnp.issubdtype(payload.dtype, jnp.integer):
            return self.known_format("its minifloats").decode(payload)
        return payload.astype(jnp.float32)

    @property
    def levels(self) -> Levels | None:
        """What it was rounded to, of a tensor that a quantizer with a scale in two levels has just made; else None."""
        return self._levels

    @classmethod
    def from_payload(
        cls,
        payload: jax.Array,
        scale: Any,
        *,
        format: Any = None,
        training: bool = False,
        dtype: Any = jnp.float32,
    ) -> "FloatQuantTensor":
        """The tensor of these minifloats: `value = payload * scale`, in `dtype`.

        Args:
            payload: minifloats in the dtype of their format; or, with a `format`, their codes.
            scale: float per step of the minifloat.
            format: the format of the codes; None for the format of the payload's dtype.
            training: whether it was made in training mode.
            dtype: of `value`.

        Example:
            >>> FloatQuantTensor.from_payload(jnp.array([3.0], jnp.float8_e5m2), 0.25).value
            Array([0.75], dtype=float32)
            >>> FloatQuantTensor.from_payload(jnp.array([2, 15], jnp.uint8), 0.5, format=FloatGrid(2, 1)).value
            Array([ 0.5, -3. ], dtype=float32)
        """
        scale = jnp.asarray(scale, jnp.float32)
        form = payload.dtype if format is None else format
        if jnp.issubdtype(payload.dtype, jnp.integer):
            known = float_format(form, "FloatQuantTensor.from_payload")
            assert not known.is_learned, "a learned format has no codes"
            payload = known.decode(payload)
        kept = payload if payload.dtype in CONTRACTED and format is None else None
        return cls(from_float8(payload, scale, dtype), scale, form, training, kept)

    @classmethod
    def stored(cls, payload: jax.Array, scale: jax.Array, dtype: Any) -> "FloatQuantTensor":
        """As `from_payload`, for 8-bit floats that are dequantized only when the value is read.

        Args:
            payload: in one of the 8-bit float dtypes.
            scale: float32, broadcasts against it.
            dtype: of the value.
        """
        form = float_format(payload.dtype, "FloatQuantTensor.stored")
        tensor = object.__new__(cls)
        tensor._hold((np.dtype(dtype), scale, form, False), payload)
        return tensor

    @property
    def is_stored(self) -> bool:
        """Whether it keeps its payload only, so that no gradient can reach its value."""
        return isinstance(self._value, np.dtype)

    @property
    def value(self) -> jax.Array:
        """The dequantized float array."""
        value = self._value
        if not isinstance(value, np.dtype):
            return value
        assert self._payload is not None, "what is dequantized when it is read"
        return from_float8(self._payload, self._scale, value)

    format: FloatGrid = attribute("_format", "The format of its minifloats.")
    exponent_bit_width: Any = attribute(
        "_format.exponent_bit_width", "Bits of the exponent: an int, or an array if learned."
    )
    mantissa_bit_width: Any = attribute(
        "_format.mantissa_bit_width",
        "Bits of the mantissa, without the implicit 1: an int, or an array if learned.",
    )
    exponent_bias: Any = attribute(
        "_format.exponent_bias", "The bias that is subtracted from the exponent field."
    )
    saturating: bool = attribute(
        "_format.saturating", "Whether numbers that are too large saturate at the largest."
    )
    inf_values: tuple[str, ...] | None = attribute(
        "_format.inf_values", "Mantissas that mean inf together with the largest exponent."
    )
    nan_values: tuple[str, ...] | None = attribute(
        "_format.nan_values", "Mantissas that mean nan together with the largest exponent."
    )
    signed: bool = attribute("_format.signed", "Whether there are numbers below 0.")

    def number_range(self, narrow_range: bool = False) -> tuple[Any, Any]:
        """The smallest and the largest minifloat."""
        largest = self._format.largest
        return (-largest if self.signed else 0.0), largest

    @property
    def q_dtype(self) -> np.dtype:
        """Dtype of the payload: the float dtype of this format, else unsigned integers for its codes."""
        return self.known_format("its payload").storage

    @property
    def is_contractible(self) -> bool:
        """Whether it is in one of the 8-bit float formats that backends contract."""
        return self._format.dtype in CONTRACTED

    def payload(self) -> jax.Array:
        """The numbers in `q_dtype`: the kept ones, or `value / scale`, exact for a value on the grid; no gradient.

        If JAX has no dtype for this format, these are its `codes`.
        """
        if self._payload is not None:
            return self._payload
        dtype = self.q_dtype
        return (
            self.codes()
            if jnp.issubdtype(dtype, jnp.integer)
            else to_float8(self.value, self._divisor(), dtype)
        )

    def codes(self) -> jax.Array:
        """The codes of the minifloats: sign, exponent and mantissa as an unsigned integer."""
        form = self.known_format("its codes")
        return form.codes(self._steps()) if self._levels is None else self._levels.codes(form)

    def int(self, float_datatype: bool = False) -> jax.Array:
        """The codes of the minifloats, as `IntQuantTensor.int` returns integers.

        A code is sign, exponent field and mantissa as one unsigned integer; `from_payload` with the format converts it
        back.

        Args:
            float_datatype: the codes in float32; no gradient.

        Returns:
            uint8 up to 8 bits, else uint16 or uint32, of the shape of `value`; float32 with `float_datatype`.

        Raises:
            ValueError: the tensor is concrete, and a finite number is not on the grid; learned widths are traced.

        Example:
            >>> FloatQuantTensor(jnp.array([0.5, -3.0]), 0.5, FloatGrid(2, 1)).int()
            Array([ 2, 15], dtype=uint8)
        """
        self._check_on_grid()
        codes = self.codes()
        return codes.astype(jnp.float32) if float_datatype else codes

    def minifloat(self) -> jax.Array:
        """The minifloats in float32: `value / scale`, rounded to the format's grid; no gradient.

        Raises:
            ValueError: a finite number is not on the grid.
        """
        self._check_on_grid()
        return self._rounded()

    def _check_on_grid(self) -> None:
        if is_concrete(self.value) and not self._on_grid(finite=False):
            raise ValueError(
                f"FloatQuantTensor not valid: value / scale is not on the grid of {self._format}.\n"
                "  cure: quantize the tensor again, or use `.value` where no minifloats are needed"
            )

    @property
    def is_valid(self) -> bool | jax.Array:
        """Whether every number is finite and one of the format's, up to the rounding of `value`'s dtype."""
        return self._on_grid(finite=True)

    def _on_grid(self, *, finite: bool) -> Any:
        again = from_float_steps(self._rounded(), self.scale, self.dtype)
        near = jnp.abs(again - self.value) <= 2 * jnp.finfo(self.dtype).eps * jnp.abs(self.value)
        off = ~(near | (again == self.value))
        valid = ~jnp.any(off | ~jnp.isfinite(self.value) if finite else off & jnp.isfinite(self.value))
        return bool(valid) if is_concrete(valid) else valid

    def _steps(self) -> jax.Array:
        return jax.lax.stop_gradient(self.value).astype(jnp.float32) / self._divisor()

    def _divisor(self) -> jax.Array:
        """The scale, without numbers so small that processors take them for 0: those are scales of zeros."""
        scale = jax.lax.stop_gradient(self.scale)
        return jnp.where(jnp.abs(scale) < _SMALLEST_NORMAL, _SMALLEST_NORMAL, scale)

    def _rounded(self) -> jax.Array:
        if self._levels is not None:
            return self._levels.minifloats
        form, steps = self._format, self._steps()
        rounded = to_float_grid(steps, form.mantissa_bit_width, form.exponent_bias, jnp.round)
        largest = form.largest
        inside = jnp.clip(rounded, -largest if form.signed else 0.0, largest)
        return jax.lax.stop_gradient(jnp.where(jnp.isfinite(steps), inside, steps))

    def known_format(self, what: str = "its payload") -> FloatGrid:
        """The format with static widths; learned widths with their current values.

        Args:
            what: its purpose, for the error text.

        Raises:
            ValueError: learned widths are traced, or not whole numbers.
        """
        form = self._format
        if not form.is_learned:
            return form
        if not is_concrete(form.exponent_bit_width, form.mantissa_bit_width, form.exponent_bias):
            raise ValueError(
                f"a minifloat of learned widths has no known dtype while it is traced, so {what} cannot be made.\n"
                "  cure: outside of jit, or constant widths: exponent_bit_width_impl_type = 'const'"
            )
        return form.known()

    def with_value(self, value: jax.Array) -> Self:
        """The same minifloats with another dequantized array: the value in another dtype, which gets the gradients."""
        return type(self)(value, self.scale, self.format, self.training, self._payload)

    def __neg__(self) -> Any:
        return self.set(value=-self.value) if self.signed else -self.value

    def __abs__(self) -> Any:
        return self.set(value=jnp.abs(self.value))

    def reshape(self, *shape: Any, **options: Any) -> Any:
        """The same numbers in another shape; a plain array if there are several scales."""
        return self._moved(self.value.reshape(*shape, **options))

    def transpose(self, *axes: Any) -> Any:
        """Axes permuted, reversed without arguments; a plain array if there are several scales."""
        return self._moved(self.value.transpose(*axes))

    def __getitem__(self, index: Any) -> Any:
        return self._moved(self.value[index])

    def _moved(self, value: jax.Array) -> Any:
        return self.set(value=value, scale=self.scale.reshape(())) if self.scale.size == 1 else value
