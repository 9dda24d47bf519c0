"""The fields of every quantized tensor: construction, checks, changed copies, the pytree, text."""

import difflib
from collections.abc import Iterable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jqinject.ops import float_grid, lean, processes, ste
from jqinject.ops.float8_cast import from_float8
from jqinject.ops.grid import Grid
from jqinject.quant_tensor.array_methods import ArrayMethods, as_array, attribute
from jqinject.quant_tensor.group_layout import Layout
from jqinject.quant_tensor.validity import brief, dequantized, hidden, is_concrete

_SLOTS = (
    *("_array", "_scale", "_zero_point", "_grid", "_training", "_payload", "_layout", "_dtype"),
    *("_levels", "_scale_dtype", "_carrier", "_is_stored"),
)


class Levels(NamedTuple):
    """What a tensor was rounded to, by a scale in two levels: `value = minifloats * block * shared`.

    Attributes:
        minifloats: float32, of the shape of the value; zeros keep their signs.
        block: numbers of the scales' format, float32; broadcasts against them.
        shared: float32, likewise.
    """

    minifloats: jax.Array
    block: jax.Array
    shared: jax.Array

    def codes(self, form: float_grid.FloatGrid) -> jax.Array:
        """The codes of the minifloats; zeros keep their signs.

        Args:
            form: their format.
        """
        plain = form.codes(self.minifloats)
        sign = plain.dtype.type(1 << (form.exponent_bit_width + form.mantissa_bit_width))
        return jnp.where(jnp.signbit(self.minifloats) & form.signed, plain | sign, plain)


class TensorFields(ArrayMethods):
    """Abstract: an immutable pytree of an array, its scale, zero point, grid and layout; see `QuantTensor`.

    The array is the value; of a stored tensor it is the payload, and `levels` are one more child.

    Attributes:
        fields: names of the constructor's arguments that `set` takes, in order.
        cure: how a tensor is made of the numbers that a constructor refuses as `value`, for the error text.
        kind: "integers", "minifloats" or "table", the numbers of its grid; in groups with "grouped " in front.
        is_grouped: whether it has a scale for each group along an axis.
        group_size: elements of a group; None without groups.
        partner: the class of the same tensor with a scale for each group; of a class in groups, the one without.
        of_kind: the class without groups of each kind.
    """

    __slots__ = (*_SLOTS, "_value", "_shaped")

    fields: ClassVar[tuple[str, ...]] = ()
    cure: ClassVar[str] = ""
    partner: ClassVar[Any] = None
    of_kind: ClassVar[dict[str, Any]] = {}
    is_grouped: ClassVar[bool] = False
    group_size: Any = None

    _array: Any  # the value as the layout has it, or the payload if it is dequantized when it is read
    _layout: Any

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        jax.tree_util.register_pytree_with_keys(cls, _flatten, partial(_unflatten, cls))
        if cls.kind and not cls.is_grouped:
            cls.of_kind[cls.kind] = cls

    def _store(
        self,
        array: Any,
        scale: Any,
        zero: Any,
        grid: Any,
        training: bool,
        payload: jax.Array | None = None,
        check: bool = True,
    ) -> None:
        """Store the fields of a tensor without groups.

        Args:
            array: the value.
            scale, zero, grid, training: as `QuantTensor` has them.
            payload: the low-bit numbers, if they are known.
            check: whether to check and convert the arrays; leaves of a transformation need not be arrays.
        """
        # With None or an axis number as value this is a pytree prefix, for `in_axes`: store everything unchanged.
        if check and array is not None and not isinstance(array, int):
            arrays = isinstance(array, jax.Array) and isinstance(scale, jax.Array)
            arrays = arrays and (zero is None or isinstance(zero, jax.Array))
            if not (arrays and _fit(array.aval, scale.aval, None if zero is None else zero.aval)):
                array = _float_value(as_array(array), type(self))
                scale = _metadata(scale, array.shape, "scale")
                zero = None if zero is None else _metadata(zero, array.shape, "zero_point")
        self._array = self._value = self._shaped = array
        self._scale, self._zero_point, self._grid = scale, zero, grid
        self._training, self._payload = training, payload
        self._dtype = getattr(array, "dtype", None)
        self._layout = self._levels = self._scale_dtype = self._carrier = None
        self._is_stored = False

    @classmethod
    def _of(cls, *fields: Any) -> Self:
        """Return a tensor without groups of fields that are not checked; the arguments are those of `_store`."""
        tensor = object.__new__(cls)
        tensor._store(*fields, check=False)
        return tensor

    @classmethod
    def stored(
        cls,
        payload: jax.Array,
        scale: jax.Array,
        zero_point: jax.Array | None,
        grid: Grid,
        dtype: DTypeLike,
        scale_dtype: DTypeLike | None = None,
        levels: Levels | None = None,
    ) -> Any:
        """Return the tensor of numbers that are known to be on the grid; it is dequantized when its value is read.

        Its class is that of the grid.

        Args:
            payload: the integers, of any integer dtype; minifloats of a float dtype, or codes.
            scale, zero_point: float32 arrays that broadcast against them; no zero point if None.
            grid: theirs.
            dtype: of the value.
            scale_dtype: a dtype of 8 bits that holds the scales; None if unknown.
            levels: both levels of the scale, if they are known.
        """
        kind = "integers" if grid.is_integer else "minifloats" if grid.is_minifloat else "table"
        tensor: Any = cls.of_kind[kind]._of(payload, scale, zero_point, grid, False, payload)
        tensor._dtype, tensor._scale_dtype, tensor._levels = np.dtype(dtype), scale_dtype, levels
        tensor._is_stored = True
        del tensor._value  # an empty slot: see `__getattr__`
        return tensor

    @classmethod
    def cast(cls, x: jax.Array, payload: Any, scale: jax.Array, grid: Any, training: bool) -> Self:
        """Return the tensor that `x` was cast to; its value is dequantized when it is read, and `x` has its gradient.

        Args:
            x: in the dtype of the value.
            payload: `x` in one of the 8-bit float dtypes.
            scale: float32, broadcasts against it.
            grid: that of the payload.
            training: whether it was made in training mode.
        """
        tensor = cls.stored(payload, scale, None, grid, x.dtype)
        tensor._carrier, tensor._training, tensor._is_stored = x, training, False
        return tensor

    def _take(self, tensor: "TensorFields", layout: Layout | None) -> Self:
        """Take over the fields of another tensor, in a layout."""
        for slot in _SLOTS:
            setattr(self, slot, getattr(tensor, slot))
        self._layout = layout
        if layout is None:
            self._shaped = self._array
            if self._array is not self._payload:
                self._value = self._array
        return self

    def _like(self, cls: Any, layout: Layout | None = None) -> Any:
        """Return a copy of another class and layout."""
        return object.__new__(cls)._take(self, layout)

    @property
    def _bare(self) -> Any:
        """The arrays of a tensor in groups as a tensor without groups; a tensor without groups itself."""
        return self if self._layout is None else self._like(self.partner)

    @property
    def _grouped(self) -> Any:
        """The arrays of a tensor in groups, with two axes for the groups, as a tensor without groups."""
        layout, bare = self._layout, self._bare
        if layout is None or layout.piece is None:
            return bare
        of_groups = partial(layout.of_groups, ndim=bare.ndim)
        metadata = jax.tree.map(of_groups, (bare._scale, bare._zero_point))
        return bare._of(layout.groups.split(bare.value), *metadata, bare._grid, bare._training)

    if not TYPE_CHECKING:  # it would hide misspelt names

        def __getattr__(self, name: str) -> Any:
            """Return the value, and its shape, where the slot is empty: dequantized and joined when they are read."""
            if name == "_shaped":
                return jax.ShapeDtypeStruct(self._layout.shape_of(self._array.shape), self._dtype)
            if name != "_value":
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}", name=name, obj=self)
            array = self._array
            if self._carrier is not None:
                array = ste.with_gradient_of(self._carrier, from_float8(array, self._scale, self._dtype))
            elif self._is_stored:
                array = dequantized(array, self._scale, self._zero_point, self._grid, self._dtype)
            return array if self._layout is None else self._layout.join(array)

    value: jax.Array = attribute("_value", "The dequantized float array.")
    scale: jax.Array = attribute("_scale", "Float per step of the grid, float32; broadcasts against `value`.")
    grid: Any = attribute("_grid", "The number format: what its numbers are, and how they are stored.")
    training: bool = attribute("_training", "Whether it was made in training mode.")
    bit_width: Any = attribute("_grid.bit_width", "Bits of one number: a Python int, or an array if learned.")
    signed: bool = attribute("_grid.signed", "Whether there are numbers below 0.")
    shape: tuple[int, ...] = attribute("_shaped.shape", "Shape of `value`.")
    ndim: int = attribute("_shaped.ndim", "Number of axes of `value`.")
    size: int = attribute("_shaped.size", "Number of elements of `value`.")
    dtype: np.dtype = attribute("_dtype", "The float dtype of `value`.")
    kept_payload: Any = attribute("_payload", "The low-bit numbers that it was rounded to, if it keeps them.")
    levels: Levels | None = attribute("_levels", "Both levels of the scale, if they are known.")
    is_stored: bool = attribute(
        "_is_stored", "Whether it keeps its payload only: no gradient can reach its value."
    )
    scale_dtype: np.dtype | None = attribute("_scale_dtype", "An 8-bit dtype that holds the scales.")

    @property
    def zero_point(self) -> jax.Array:
        """The number of the grid, in steps, that represents 0.0; 0 if the tensor has no zero point."""
        return lean.known_zero() if self._zero_point is None else self._zero_point

    @property
    def has_zero_point(self) -> bool:
        """Whether the zero point may be other than 0: ask this instead of comparing `zero_point`.

        False if the tensor has none, or one of concrete zeros; a traced zero point counts as one.
        """
        zero = self._zero_point
        return zero is not None and not (is_concrete(zero) and not np.any(processes.on_host(zero)))

    @property
    def carrier(self) -> jax.Array:
        """The array that the gradient of the value goes to: the tensor that was cast, or the value itself."""
        return self.value if self._carrier is None else self._carrier

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a QuantTensor without axes; its shape is ()")
        return self.shape[0]

    def set(self, **changes: Any) -> Self:
        """Return a copy with some fields replaced.

        Args:
            **changes: arguments of the constructor, by name; of a tensor in groups those without groups, where
                `scale_` and `zero_point_` may lack the underscore and `value` is the array without groups.

        Raises:
            TypeError: a name is not a field.

        Example:
            >>> from jqinject.quant_tensor import IntQuantTensor
            >>> x = IntQuantTensor(jnp.array([1.0]), 0.5, 0.0, 8, signed=True, training=True)
            >>> x.set(training=False).training
            False
        """
        if self._layout is not None:
            return self._set_in_groups(self._layout, changes)
        for name in changes:
            if name not in self.fields:
                near = difflib.get_close_matches(name, self.fields, 1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                names = ", ".join(self.fields)
                raise TypeError(f"{type(self).__name__} has no field {name!r}; it has {names}.{hint}")
        if changes.keys() <= {"training"}:
            tensor = self._like(type(self))
            tensor._training = changes.get("training", self.training)
            return tensor
        unchanged = {name: getattr(self, name) for name in self.fields if name not in changes}
        if "zero_point" in unchanged:
            unchanged["zero_point"] = self._zero_point
        return type(self)(**unchanged, **changes)

    def _set_in_groups(self, layout: Layout, changes: dict[str, object]) -> Self:
        inner = {name.removesuffix("_"): field for name, field in changes.items() if name != "value"}
        if "value" in changes:
            value = as_array(changes["value"])
            if layout.piece is not None and not inner:
                return self._bare.set(value=value)._like(type(self), layout)
            inner["value"] = layout.groups.split(value)
        return self._grouped.set(**inner)._like(type(self), Layout(layout.groups, layout.group_dim))

    def keeping(self, payload: jax.Array) -> Self:
        """Return the same tensor, which keeps its payload for `int` and for contractions.

        Args:
            payload: the low-bit numbers.
        """
        return self._of(self.value, self._scale, self._zero_point, self._grid, self.training, payload)

    def __reduce__(self) -> tuple[Any, ...]:
        children, static = _flatten(self)
        return _unflatten, (type(self), static, [child for _, child in children])

    def __repr__(self) -> str:
        name, layout, grid = type(self).__name__, self._layout, self._grid
        if layout is not None:
            return f"{name}(group_size={layout.groups.size}, group_dim={layout.group_dim}, {self._bare!r})"
        arrays = (self.value, self.scale, self.zero_point)
        if not all(isinstance(array, jax.Array | np.ndarray) for array in arrays):
            return f"{name}({', '.join(f'{field}={getattr(self, field)!r}' for field in self.fields)})"
        head = f"{grid_name(grid)}, {self.dtype.name}{list(self.shape)}, scale={brief(self.scale)}"
        options: dict[str, Any] = {}
        if grid.is_integer:
            head += f", zero_point={brief(self.zero_point)}" + ", training" * self.training
            options = {"precision": 6, "separator": ", ", "edgeitems": 2, "prefix": "  value="}
        body = hidden(self.value) or np.array2string(np.asarray(self.value), threshold=20, **options)
        separator = ",\n " if grid.is_integer else ","
        return f"{name}({head}{separator} value={body})"


def _flatten(tensor: TensorFields) -> tuple[list[tuple[Any, Any]], Any]:
    """Children with their names, and what is static; the widths of a learned grid are leaves of it."""
    key = jax.tree_util.GetAttrKey
    if tensor._layout is not None:
        # What a transformation has put in the place of the tensor in groups may be anything.
        return [(key("grouped"), tensor._array if tensor._grid is None else tensor._bare)], tensor._layout
    names: tuple[str, ...] = ("value", "scale", "zero_point", "grid")
    static: object = tensor._training
    if tensor._is_stored:
        names = ("payload", *names[1:], "levels")
        static = tensor._dtype, tensor._scale_dtype
    return [(key(name), getattr(tensor, "_" + name)) for name in names], static


def _unflatten(cls: Any, static: Any, children: Iterable[object]) -> Any:
    if isinstance(static, Layout):
        (child,) = children
        if not isinstance(child, TensorFields):
            child = cls._of(child, None, None, None, False)
        return child._like(cls, static)
    if isinstance(static, tuple):
        *children, levels = children
        return cls.stored(*children, *static, levels)
    return cls._of(*children, static)


def _float_value(value: object, cls: type[TensorFields]) -> jax.Array:
    """`value` as a float array; Python floats and lists become float32."""
    array = value if isinstance(value, jax.Array | np.ndarray) else np.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(
            f"{cls.__name__}(value=...) got {array.dtype} of shape {array.shape}, expected the dequantized floats. "
            f"{cls.cure}"
        )
    return jnp.asarray(value) if array is value else jnp.asarray(value, jnp.float32)


def _metadata(x: jax.Array, shape: tuple[int, ...], name: str) -> jax.Array:
    """Scale or zero point as a float32 array that broadcasts against a value of this shape."""
    array = jnp.asarray(x, jnp.float32)
    if array.ndim and not _broadcasts_to(array.shape, shape):
        raise ValueError(
            f"{name} of shape {array.shape} does not broadcast against the value of shape {shape}. Expected "
            "shape () for a whole tensor, or size 1 on every axis but those it varies over, for example "
            f"{(*(1,) * (len(shape) - 1), shape[-1]) if shape else ()} for one {name} a channel on the last "
            "axis."
        )
    return array


@lru_cache(maxsize=1024)
def _fit(value: Any, *metadata: Any) -> bool:
    """Whether value, scale and zero point, of these abstract values, can be kept as they are."""
    present = [x for x in metadata if x is not None]
    floats = all(x.dtype == jnp.float32 and not x.weak_type for x in present)
    broadcast = all(not x.shape or _broadcasts_to(x.shape, value.shape) for x in present)
    return floats and broadcast and jnp.issubdtype(value.dtype, jnp.floating)


@lru_cache(maxsize=1024)
def _broadcasts_to(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether an array of `shape` broadcasts against `target` without enlarging it."""
    offset = len(target) - len(shape)
    return offset >= 0 and all(n in (1, target[offset + axis]) for axis, n in enumerate(shape))


def grid_name(grid: Grid) -> str:
    """For example "8-bit signed"."""
    if grid.is_integer:
        bits = f"{brief(grid.bit_width)}-bit" if is_concrete(grid.bit_width) else "learned bit width,"
        return f"{bits} {'signed' if grid.signed else 'unsigned'}"
    return f"{len(grid.table)} values" if grid.is_table else str(grid)
