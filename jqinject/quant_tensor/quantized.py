"""The one implementation of quantized tensors: operators and the numbers behind the value, for every number format."""

from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jqinject.ops import float8_cast, minifloat, processes, ste
from jqinject.quant_tensor import shaping, tensor_fields
from jqinject.quant_tensor.validity import (
    checked_integers,
    integer_bounds,
    is_concrete,
    pre_round_integers,
    validity,
)

CONTRACTED = tuple(np.dtype(dtype) for dtype in float8_cast.FLOAT8_DTYPES)
_SMALLEST_NORMAL = float(jnp.finfo(jnp.float32).tiny)


def _moving(name: str, move: Any, doc: str, in_groups: bool = False) -> Any:
    """Define a shape method that keeps the grid if scale and zero point follow; else it returns the plain array.

    Args:
        name: of the array method.
        move: the same of a quantized tensor.
        doc: the docstring.
        in_groups: whether `move` keeps groups.
    """

    def method(self: "QuantTensor", *args: Any) -> "jax.Array | QuantTensor":
        keeps = in_groups if self.is_grouped else self._is_movable
        return move(self, *args) if keeps else getattr(self.value, name)(*args)

    method.__name__, method.__doc__ = name, doc
    return method


class QuantTensor(tensor_fields.TensorFields):
    """A dequantized array that knows the low-bit numbers behind it: `value = (number - zero_point) * scale`.

    It works where a plain array is expected, in `jax.numpy`, `jax.nn`, NumPy and Flax layers, by decaying to `value`.
    JAX refuses it in functions that pass their arguments directly to `jax.lax` (`jax.nn.sigmoid`, `jax.lax.exp`): give
    these `x.value`. It is immutable and a pytree.

    The public classes differ in the arguments of their constructors and in names. Code that takes any of them asks

    * `grid`, the number format: its bit width, sign, bounds, rounding and storage;
    * `has_zero_point`, whether a zero point has to be corrected for;
    * `is_grouped` and `group_size`, whether there is a scale for each group along an axis.

    What operations keep: arithmetic and concatenation keep a tensor of integers without groups; `-x` and `abs(x)` also
    one of minifloats. Shape methods keep integers, and every format with one scale. `transpose`, `swapaxes` and
    indexing of other axes keep groups. Everything else returns the plain array.

    Example:
        >>> from jqinject.quant_tensor import IntQuantTensor
        >>> x = IntQuantTensor(jnp.array([0.5, 1.0]), 0.5, None, 4, signed=True, training=False)
        >>> x.grid.bit_width, x.has_zero_point, x.zero_point, x.is_grouped, x.group_size
        (4, False, Array(0., dtype=float32), False, None)
    """

    __slots__ = ()

    def astype(self, dtype: DTypeLike) -> Self:
        """Return the same low-bit numbers with `value` in another float dtype; the scale stays float32.

        Raises:
            TypeError: `dtype` is not a float dtype.
        """
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"astype({np.dtype(dtype).name}): the value of {type(self).__name__} is float; use .int() for its "
                "integers, or .value.astype(...)"
            )
        bare = self._bare
        return bare.set(value=bare.value.astype(dtype))._like(type(self), self._layout)

    def dequantize(self) -> jax.Array:
        """Return the dequantized float array, `value`."""
        return self.value

    # --- shape

    @property
    def _is_movable(self) -> bool:
        """Whether scale and zero point follow any move of axes."""
        return self._layout is None and (self._grid.is_integer or self.scale.size == 1)

    def reshape(self, *shape: Any, order: str = "C", **options: Any) -> Any:
        """Return the same elements in another shape; see `shaping.reshape`. Another order gives a plain array."""
        if not self._is_movable or order != "C" or any(option is not None for option in options.values()):
            return self.value.reshape(*shape, order=order, **options)
        return shaping.reshape(self, _one_sequence(shape))

    def ravel(self, order: str = "C", **options: Any) -> Any:
        """Return the same elements along one axis."""
        return self.reshape(-1, order=order, **options)

    flatten = ravel

    def transpose(self, *axes: Any) -> Any:
        """Return it with axes permuted; reversed without arguments."""
        order = None if axes == (None,) else _one_sequence(axes) or None
        moves = self._is_movable or self.is_grouped
        return shaping.transpose(self, order) if moves else self.value.transpose(order)

    swapaxes: Any = _moving("swapaxes", shaping.swapaxes, "Two axes exchanged.", in_groups=True)
    squeeze: Any = _moving("squeeze", shaping.squeeze, "No axes of size 1.")
    __getitem__: Any = _moving("__getitem__", shaping.index, "Return some elements.", in_groups=True)
    T: Any = property(lambda self: self.transpose(), doc="All axes reversed.")
    mT: Any = property(lambda self: self.swapaxes(-1, -2), doc="The last two axes exchanged.")

    # --- the numbers behind the value

    @property
    def is_valid(self) -> bool | jax.Array:
        """Whether every number lies on the grid, up to the rounding of `value`'s dtype, and is finite.

        See `validity` for the tolerances of integers. A Python bool for concrete arrays, a boolean array under
        tracing.
        """
        if self._layout is not None:
            return self._bare.is_valid
        if not self._grid.is_integer:
            return self._on_grid(finite=True)
        valid, _ = validity(self.value, self._scale, self._zero_point, self._grid)
        return bool(valid) if is_concrete(valid) else valid

    @property
    def q_dtype(self) -> np.dtype:
        """Dtype of the payload: the float dtype of this format, else unsigned integers for its codes."""
        return self.known_format("its payload").storage

    @property
    def is_contractible(self) -> bool:
        """Whether it is in one of the 8-bit float formats that backends contract."""
        return self.kind == "minifloats" and self._grid.dtype in CONTRACTED

    def known_format(self, what: str = "its payload") -> Any:
        """Return the grid with static widths; learned widths with their current values.

        Args:
            what: its purpose, for the error text.

        Raises:
            ValueError: learned widths are traced, or not whole numbers.
        """
        form = self._grid
        if not form.is_learned or form.is_integer:
            return form
        if not is_concrete(form.exponent_bit_width, form.mantissa_bit_width, form.exponent_bias):
            raise ValueError(
                f"a minifloat of learned widths has no known dtype while it is traced, so {what} cannot be made.\n"
                "  cure: outside of jit, or constant widths: exponent_bit_width_impl_type = 'const'"
            )
        return form.known()

    def low_bits(self) -> jax.Array:
        """Return the payload of minifloats or indices: the one it keeps, else made of the value; no gradient.

        If JAX has no dtype for the format, these are its codes.
        """
        if self._layout is not None:
            return self._layout.join(self._bare.low_bits())
        form, payload = self.known_format("its payload"), self._payload
        if jnp.issubdtype(form.storage, jnp.integer):
            return self.code_numbers()
        if payload is None:
            return float8_cast.to_float8(self.value, self._divisor(), form.storage)
        return payload if payload.dtype == form.storage else form.cast(form.decode(payload))

    def code_numbers(self) -> jax.Array:
        """Return the codes of minifloats (sign, exponent and mantissa), or indices, as unsigned integers."""
        if self._layout is not None:
            return self._layout.join(self._bare.code_numbers())
        form, payload = self.known_format("its codes"), self._payload
        dtype = form.storage if form.is_table else form.code_dtype
        if payload is not None and jnp.issubdtype(payload.dtype, jnp.integer):
            return payload.astype(dtype)
        if form.is_table:
            return form.encode(self._steps()).astype(dtype)
        return form.codes(self._steps()) if self._levels is None else self._levels.codes(form)

    def narrow_numbers(self) -> jax.Array:
        """Return the payload in the narrowest dtype that holds it in memory: integers, codes, or 8-bit floats."""
        form, levels = self.known_format("its payload"), self._levels
        if form.is_integer:
            bits = int(form.bit_width)
            wide = jnp.int16 if bits <= 16 and form.signed else jnp.int32
            return self.int().astype(form.packed_dtype if bits <= 8 else wide)
        if form.is_minifloat and form.bit_width == 8 and jnp.issubdtype(form.storage, jnp.floating):
            return self.low_bits()
        # Of the two zeros the code of one is nan's in formats that have no other for it.
        numbers = self.code_numbers() if levels is None else form.codes(levels.minifloats)
        return numbers.astype(form.packed_dtype) if form.bit_width <= 8 else numbers

    def without_value(self) -> Self:
        """Return it stored, as its payload and scales, if it keeps a payload; else unchanged.

        Example:
            >>> from jqinject.quant_tensor import FloatQuantTensor
            >>> x = FloatQuantTensor.from_payload(jnp.array([3.0], jnp.float8_e5m2), 0.25)
            >>> x.is_stored, x.without_value().is_stored, x.without_value().value
            (False, True, Array([0.75], dtype=float32))
        """
        if self._layout is not None:
            return self._bare.without_value()._like(type(self), self._layout)
        payload, scale, levels = self._payload, self._scale, self._levels
        if levels is not None:
            payload, scale = levels.minifloats, levels.block * levels.shared
        elif self.is_contractible:
            payload = self.low_bits()
        if payload is None or self.is_stored or self._grid.is_learned:
            return self
        zero = self._zero_point if self.has_zero_point else None
        return self.stored(payload, scale, zero, self._grid, self.dtype, self._scale_dtype, levels)

    def grid_numbers(self) -> jax.Array:
        """Return the numbers of the grid in float32: `value / scale`, rounded to it; no gradient.

        Raises:
            ValueError: a finite number is not on the grid.
        """
        if self._layout is not None:
            return self._layout.join(self._bare.grid_numbers())
        self._check_on_grid()
        return self.minifloats()

    def _check_on_grid(self) -> None:
        table = self._grid.is_table  # which has no codes for inf and nan
        if is_concrete(self.value, self._scale) and not self._on_grid(finite=table):
            grid = "in its table" if table else f"on the grid of {self._grid}"
            numbers = "indices" if table else "minifloats"
            raise ValueError(
                f"{type(self).__name__} not valid: value / scale is not {grid}.\n"
                f"  cure: quantize the tensor again, or use `.value` where no {numbers} are needed"
            )

    def _on_grid(self, *, finite: bool) -> bool | jax.Array:
        value = self.value
        again = minifloat.from_float_steps(self.minifloats(), self._scale, self.dtype)
        near = jnp.abs(again - value) <= 2 * jnp.finfo(self.dtype).eps * jnp.abs(value)
        off = ~(near | (again == value))
        valid = ~jnp.any(off | ~jnp.isfinite(value) if finite else off & jnp.isfinite(value))
        return bool(valid) if is_concrete(valid) else valid

    def _steps(self) -> jax.Array:
        return jax.lax.stop_gradient(self.value).astype(jnp.float32) / self._divisor()

    def _divisor(self) -> jax.Array:
        """The scale, without numbers so small that processors take them for 0: those are scales of zeros."""
        scale = jax.lax.stop_gradient(self._scale)
        return jnp.where(jnp.abs(scale) < _SMALLEST_NORMAL, _SMALLEST_NORMAL, scale)

    def minifloats(self) -> jax.Array:
        """Return what it was rounded to, float32, from what it keeps of that; no gradient."""
        if self._levels is not None:
            return self._levels.minifloats
        if self._payload is not None:
            return self.known_format("its minifloats").decode(self._payload)
        steps = self._steps()
        return jax.lax.stop_gradient(jnp.where(jnp.isfinite(steps), self._grid.round(steps), steps))

    def int(self, float_datatype: bool = False) -> jax.Array:
        """Return the integers, `round(value / scale + zero_point)`; the codes of minifloats; the indices into a table.

        Under tracing validity is not checked; the integers are those that the quantizer kept, if it did. A learned bit
        width then does not determine the dtype: int32. A minifloat's code is sign, exponent field and mantissa as one
        unsigned integer; `FloatQuantTensor.from_payload` with the format converts it back.

        Args:
            float_datatype: return float32; integers with the straight-through gradient of the rounding, others with no
                gradient.

        Returns:
            Of the shape of `value`. Integers: int8 or uint8 up to 8 bits, int32 above. Codes and indices: uint8 up to
            8 bits, else uint16 or uint32.

        Raises:
            ValueError: the tensor is concrete and not valid. A one-bit tensor may hold the same number everywhere
                (Brevitas considers that invalid, and raises). Codes: a finite number is not on the grid; learned
                widths are traced.

        Example:
            >>> from jqinject.ops import FloatGrid
            >>> from jqinject.quant_tensor import FloatQuantTensor
            >>> FloatQuantTensor(jnp.array([0.5, -3.0]), 0.5, FloatGrid(2, 1)).int()
            Array([ 2, 15], dtype=uint8)
        """
        if self._layout is not None:
            return self._layout.join(self._bare.int(float_datatype))
        if self._grid.is_integer:
            return self._integers(float_datatype)
        self._check_on_grid()
        numbers = self.code_numbers()
        return numbers.astype(jnp.float32) if float_datatype else numbers

    def _integers(self, as_float: bool) -> jax.Array:
        bits, payload = self.bit_width, self._payload
        narrow = is_concrete(bits) and float(bits) <= 8
        dtype = np.dtype((jnp.int8 if self.signed else jnp.uint8) if narrow else jnp.int32)
        # Of a concrete value the integers are checked; a stored tensor has no value but these.
        if payload is not None and not as_float and (self.is_stored or not is_concrete(self.value)):
            return payload.astype(dtype)
        arrays = self.value, self._scale, self._zero_point
        if is_concrete(*arrays, bits):
            integers, exist = checked_integers(*arrays, self._grid, dtype)
            if not exist:
                raise ValueError(_why_invalid(self))
        else:
            integers = jnp.round(pre_round_integers(*arrays)).astype(dtype)
        return ste.round_ste(pre_round_integers(*arrays)).astype(jnp.float32) if as_float else integers


def _one_sequence(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """`f(2, 3)` and `f((2, 3))` alike: the only sequence, or all arguments."""
    alone = len(arguments) == 1 and isinstance(arguments[0], Sequence)
    return tuple(arguments[0]) if alone else arguments


def _why_invalid(tensor: QuantTensor) -> str:
    """Return the error text of a concrete tensor whose value is not on its grid of integers."""
    exact = processes.on_host(pre_round_integers(tensor.value, tensor._scale, tensor._zero_point))
    lower, upper = integer_bounds(tensor.bit_width, tensor.signed)
    with np.errstate(invalid="ignore"):  # inf - inf
        off = np.max(np.abs(exact - np.round(exact)))
    two = " (two different ones, or one of them everywhere)" if float(tensor.bit_width) < 2 else ""
    return (
        f"QuantTensor not valid: value / scale + zero_point lies up to {off:.3g} away from an integer and "
        f"runs from {exact.min():.6g} to {exact.max():.6g}, while "
        f"{tensor_fields.grid_name(tensor._grid)} holds integers from {float(lower):.0f} to "
        f"{float(upper):.0f}{two}. Operands of different scales (allowed in training mode) and a scale along "
        "the wrong axis lead here. Quantize the tensor again, or use `.value` where no integers are needed."
    )


def split_payload(x: jax.Array | QuantTensor) -> tuple[Any, Any]:
    """The arrays of an operand of a contraction, and what is static, compared by value: see `joined_payload`.

    A pytree of an operand that keeps its payload would have the value in its place. This has neither the value nor a
    Python function to flatten it.

    Args:
        x: anything; what is no QuantTensor, keeps no payload on a grid of static widths, or has a value that is traced
            (derivatives go to it), stays as it is.

    Example:
        >>> from jqinject.quant_tensor import IntQuantTensor
        >>> x = IntQuantTensor.from_int(jnp.array([3, -2]), 0.5)
        >>> joined_payload(*split_payload(x)).value
        Array([ 1.5, -1. ], dtype=float32)
    """
    if not isinstance(x, QuantTensor) or x._payload is None or not isinstance(x.bit_width, int):
        return x, None
    if isinstance(x._array, jax.core.Tracer) or isinstance(x._carrier, jax.core.Tracer):
        return x, None
    arrays = x._payload, x._scale, x._zero_point, x._levels
    return arrays, (x._grid, x._dtype, x._scale_dtype, x._layout, type(x))


def joined_payload(arrays: Any, static: Any) -> Any:
    """The operand of what `split_payload` returned; a QuantTensor is stored."""
    if static is None:
        return arrays
    payload, scale, zero, levels = arrays
    grid, dtype, scale_dtype, layout, kind = static
    tensor = QuantTensor.stored(payload, scale, zero, grid, dtype, scale_dtype, levels)
    return tensor if layout is None else tensor._like(kind, layout)
