"""The public classes of quantized tensors: constructors and names of each number format, without groups.

Behaviour is in `jqinject.quant_tensor.quantized`.
"""

from functools import lru_cache
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jqinject.ops.float_grid import FloatGrid
from jqinject.ops.grid import Codebook, IntGrid
from jqinject.ops.lean import Bits
from jqinject.quant_tensor import arithmetic, quantized, tensor_fields, validity
from jqinject.quant_tensor.array_methods import as_array, attribute

int_grid = lru_cache(maxsize=256)(IntGrid)


@final
class IntQuantTensor(quantized.QuantTensor):
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
        zero_point: float32 array, the integer that represents 0.0; broadcasts against `value`. The constructor takes
            None for no zero point: then it is 0, no arithmetic is done for it, and it is no leaf of the pytree.
        bit_width: Python int, or float32 scalar array if learned.
        signed: whether the integers are signed.
        training: whether it was made in training mode, where scales of two operands may differ.
        payload: the integers that a quantizer has just rounded to, for `int` and for contractions; else None. They are
            not a child of the pytree: after a transformation they are recomputed from the value.

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

    __slots__ = ()
    fields = ("value", "scale", "zero_point", "bit_width", "signed", "training")
    kind = "integers"
    cure = "From integers: IntQuantTensor.from_int(integers, scale, zero_point, bit_width, signed=...)."

    def __init__(
        self,
        value: ArrayLike,
        scale: ArrayLike,
        zero_point: ArrayLike | None,
        bit_width: validity.BitWidth,
        signed: bool,
        training: bool,
        payload: jax.Array | None = None,
    ) -> None:
        if type(bit_width) is not int or bit_width < 1:
            is_prefix = value is None or isinstance(value, int)
            bit_width = bit_width if is_prefix else _checked_bit_width(bit_width)
        grid = int_grid(bit_width, signed) if type(bit_width) is int else IntGrid(bit_width, signed)
        self._store(value, scale, zero_point, grid, training, payload)

    @classmethod
    def from_int(
        cls,
        integers: ArrayLike,
        scale: ArrayLike,
        zero_point: ArrayLike | None = 0.0,
        bit_width: validity.BitWidth = 8,
        *,
        signed: bool = True,
        training: bool = False,
        dtype: DTypeLike = jnp.float32,
    ) -> "IntQuantTensor":
        """Return the tensor of these integers: value = (integers - zero_point) * scale, in `dtype`.

        Example:
            >>> IntQuantTensor.from_int(jnp.array([0, 3]), scale=0.5, zero_point=1.0, signed=False).value
            Array([-0.5,  1. ], dtype=float32)
        """
        scale = jnp.asarray(scale, jnp.float32)
        zero = None if zero_point is None else jnp.asarray(zero_point, jnp.float32)
        value = validity.dequantized(jnp.asarray(integers), scale, zero, IntGrid(8), dtype)
        return cls(value, scale, zero, bit_width, signed, training)

    payload: jax.Array | None = attribute("_payload", "The integers of a tensor just quantized.")

    def __add__(self, operand: object) -> "IntQuantTensor | jax.Array":
        if isinstance(operand, IntQuantTensor):
            return arithmetic.add(self, operand)
        if isinstance(operand, quantized.QuantTensor):
            return self.value + operand.value
        return arithmetic.shift(self, operand)

    def __sub__(self, operand: Any) -> Any:
        return self + (-operand)

    def __rsub__(self, operand: object) -> Any:
        return (-self) + operand

    def __mul__(self, operand: object) -> Any:
        value = self.value * as_array(operand)
        if not isinstance(operand, IntQuantTensor):
            return value
        return arithmetic.product(self, operand, "a * b", value, self.scale * operand.scale)

    def __truediv__(self, operand: object) -> Any:
        integers = isinstance(operand, IntQuantTensor)
        return arithmetic.divide(self, operand) if integers else self.value / as_array(operand)

    __radd__ = __add__
    __rmul__ = __mul__
    __neg__ = arithmetic.negate
    __abs__ = arithmetic.absolute


class FloatNames:
    """The names of a tensor of minifloats, with and without groups."""

    __slots__ = ()

    format: FloatGrid = attribute("_grid", "The format of its minifloats.")
    exponent_bit_width: Any = attribute("_grid.exponent_bit_width", "Bits of the exponent.")
    mantissa_bit_width: Any = attribute("_grid.mantissa_bit_width", "Bits of the mantissa.")
    exponent_bias: Any = attribute("_grid.exponent_bias", "What is subtracted from the exponent field.")
    saturating: bool = attribute("_grid.saturating", "Whether numbers that are too large become the largest.")
    inf_values: tuple[str, ...] | None = attribute("_grid.inf_values", "Mantissas of inf; see `FloatGrid`.")
    nan_values: tuple[str, ...] | None = attribute("_grid.nan_values", "Mantissas of nan; see `FloatGrid`.")
    payload = quantized.QuantTensor.low_bits
    codes = quantized.QuantTensor.code_numbers
    minifloat = quantized.QuantTensor.grid_numbers


@final
class FloatQuantTensor(FloatNames, quantized.QuantTensor):
    """A dequantized array with the scale and the format of its minifloats: `value = minifloat * scale`.

    It is immutable and a pytree: value and scale are children, the format (a child if its widths are learned) and
    `training` are static. Used as an array, including in arithmetic, it decays to `value`; `-x` (if the format is
    signed) and `abs(x)` keep the type, and so do the shape methods of a tensor with one scale.

    Attributes:
        value: float array of any shape, the dequantized numbers; gradients pass straight through.
        scale: float32, broadcasts against `value`.
        format: a `FloatGrid`, or given as the JAX dtype that has it, such as `jnp.float8_e4m3fn`.
        training: whether it was made in training mode.
        levels: both levels of its scale and its minifloats, of a quantizer with a scale in two levels; else None.
        scale_dtype: a dtype of 8 bits that holds its scales; None if unknown.

    A tensor that a quantizer has just made also keeps its payload, for `payload` and for contractions. Payload, levels
    and scale dtype are not children of the pytree: after a transformation the payload is recomputed from value and
    scale, and the others are None.

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

    __slots__ = ()
    fields = ("value", "scale", "format", "training")
    kind = "minifloats"
    cure = "From minifloats: FloatQuantTensor.from_payload(payload, scale)."

    def __init__(
        self,
        value: ArrayLike,
        scale: ArrayLike,
        format: object,
        training: bool = False,
        payload: jax.Array | None = None,
        levels: tensor_fields.Levels | None = None,
        scale_dtype: np.dtype | None = None,
    ) -> None:
        self._store(value, scale, None, _float_format(format, "FloatQuantTensor"), training, payload)
        self._levels, self._scale_dtype = levels, scale_dtype

    def __neg__(self) -> "FloatQuantTensor | jax.Array":
        return self.set(value=-self.value) if self.signed else -self.value

    def __abs__(self) -> "FloatQuantTensor":
        return self.set(value=jnp.abs(self.value))

    @classmethod
    def from_payload(
        cls,
        payload: jax.Array,
        scale: jax.Array,
        *,
        format: FloatGrid | None = None,
        training: bool = False,
        dtype: DTypeLike = jnp.float32,
    ) -> "FloatQuantTensor":
        """Return the tensor of these minifloats: `value = payload * scale`, in `dtype`.

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
        form = _float_format(payload.dtype if format is None else format, "FloatQuantTensor.from_payload")
        low_bits = payload if payload.dtype in quantized.CONTRACTED and format is None else None
        return cls(validity.dequantized(payload, scale, None, form, dtype), scale, form, training, low_bits)


class CodebookNames:
    """The names of a tensor of indices, with and without groups."""

    __slots__ = ()

    codebook: Codebook = attribute("_grid", "The table.")
    payload = codes = quantized.QuantTensor.code_numbers


@final
class CodebookQuantTensor(CodebookNames, quantized.QuantTensor):
    """A dequantized array with its scale and the table of its numbers: `value = table[code] * scale`.

    It is immutable and a pytree: value and scale are children, codebook and `training` static. Used as an array,
    including in arithmetic, it decays to `value`; the shape methods of a tensor with one scale keep the type.

    Attributes:
        value: float array of any shape, the dequantized numbers; gradients pass straight through.
        scale: float32, broadcasts against `value`.
        codebook: the table.
        training: whether it was made in training mode.

    Raises:
        TypeError: `value` is not a float array, or `codebook` is not a `Codebook`.
        ValueError: the scale does not broadcast against the value.

    Example:
        >>> from jqinject.ops import TableGrid
        >>> x = CodebookQuantTensor(jnp.array([0.5, -2.0]), 2.0, TableGrid((-1.0, 0.0, 0.25, 1.0)))
        >>> x.codes()
        Array([2, 0], dtype=uint8)
        >>> x + 1
        Array([ 1.5, -1. ], dtype=float32)
    """

    __slots__ = ()
    fields = ("value", "scale", "codebook", "training")
    kind = "table"
    cure = "From indices: CodebookQuantTensor.from_codes(codes, scale, codebook)."

    def __init__(
        self, value: ArrayLike, scale: ArrayLike, codebook: Codebook, training: bool = False
    ) -> None:
        if not isinstance(codebook, Codebook):
            raise TypeError(
                f"CodebookQuantTensor: codebook must be a Codebook such as TableGrid, got {codebook!r}"
            )
        self._store(value, scale, None, codebook, training)

    @classmethod
    def from_codes(
        cls,
        codes: jax.Array,
        scale: jax.Array,
        codebook: Codebook,
        *,
        training: bool = False,
        dtype: DTypeLike = jnp.float32,
    ) -> "CodebookQuantTensor":
        """Return the tensor of these indices: `value = table[code] * scale`, in `dtype`.

        Example:
            >>> from jqinject.ops import TableGrid
            >>> CodebookQuantTensor.from_codes(jnp.array([0, 3], jnp.uint8), 2.0, TableGrid((-1, 0, 0.25, 1))).value
            Array([-2.,  2.], dtype=float32)
        """
        scale = jnp.asarray(scale, jnp.float32)
        value = validity.dequantized(codes.astype(codebook.storage), scale, None, codebook, dtype)
        return cls(value, scale, codebook, training)


def _checked_bit_width(bit_width: Bits) -> validity.BitWidth:
    """A Python int for a whole Python or NumPy number, else a float32 array."""
    if isinstance(bit_width, int | float | np.number) and float(bit_width).is_integer():
        if bit_width < 1:
            raise ValueError(f"bit_width must be at least 1, got {bit_width}.")
        return int(bit_width)
    return jnp.asarray(bit_width, jnp.float32)


def _float_format(form: Any, where: str) -> FloatGrid:
    """Return a format, from itself or from a JAX dtype.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(form, FloatGrid):
        return form
    try:
        return FloatGrid.of_dtype(form)
    except TypeError as error:
        raise TypeError(
            f"{where}: expected a FloatGrid or a narrow float dtype, got {form!r}; {error}"
        ) from None
