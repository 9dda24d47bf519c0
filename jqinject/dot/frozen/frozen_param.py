"""`LowBitArray`, and `FrozenParam`: a parameter whose place holds low-bit numbers, dequantized when it is read."""

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Self

import jax
import numpy as np
from flax import nnx
from flax.nnx import reprlib
from jax.typing import DTypeLike

from jqinject.core import Frozen, flax_internals
from jqinject.dot.frozen.frozen_form import FrozenForm
from jqinject.dot.frozen.frozen_numbers import (
    ScaleForms,
    dequantize,
    frozen_numbers,
    parts_of,
    quant_tensor_of,
    stores_last,
)
from jqinject.dot.frozen.lookup import look_up
from jqinject.dot.geometry.dimensions import Dimensions
from jqinject.dot.kernels.integer import Affine
from jqinject.ops.cut import Cut
from jqinject.ops.groups import split_groups
from jqinject.quant_tensor import QuantTensor

#: Metadata of a `FrozenParam` that is dequantized before it is indexed, so that an adapter can follow the index.
READS_WHOLE = "reads_whole"


class LowBitArray:
    """Abstract: low-bit numbers in the place of a float array, whose facts are known without computing anything.

    Attributes:
        numbers: the arrays by name, as `frozen_numbers` lists them, or their shapes.
        form: what is static in the numbers.
    """

    is_stored: ClassVar[bool] = True
    numbers: Any
    form: Any

    def quant_tensor(self, dtype: DTypeLike | None = None) -> Any:
        """The numbers as a QuantTensor, dequantized when its value is read.

        Args:
            dtype: of its value; None for that of the float array.
        """
        form = self.form if dtype is None else replace(self.form, value_dtype=np.dtype(dtype))
        return quant_tensor_of(self.numbers, form)

    def operand(self, dtype: DTypeLike | None = None) -> Any:
        """The numbers as an operand of a contraction: dequantized if no contraction takes their scales or zero points.

        Args:
            dtype: as for `quant_tensor`.
        """
        tensor, form = self.quant_tensor(dtype), self.form
        between = "zero_point" in form.names and not form.whole_zero_point
        return tensor.value if between or form.in_turn is not None else tensor

    def integers(self, summed: tuple[int, ...] | None = None) -> Affine:
        """The integers of a form that `has_integers`, for a contraction, with two axes for one if there are groups.

        Args:
            summed: the axes that the contraction sums over; None for those of the stored sums.
        """
        numbers, form = self.numbers, self.form
        value = numbers["value"]
        form = form.fitted(value.shape)
        cut = form.cut
        payload, scale, zero = parts_of(numbers, form)
        if cut is not None:  # pieces of groups that no shard divides, each with the scale of its group
            length = payload.shape[cut.axis]
            zero = None if zero is None else cut.of_pieces(zero, length)
            return Affine(split_groups(payload, cut.piece, cut.axis), cut.of_pieces(scale, length), zero)
        has_sums = summed is None or {*summed} == {*form.stored.summed}
        packed = form.stored.in_halves(value) if stores_last(form, summed) else None
        return Affine(payload, scale, zero, numbers.get("sums") if has_sums else None, packed)

    def integers_as_stored(self, dims: Dimensions) -> tuple[Dimensions, Affine]:
        """The integers for a contraction along axes of the array, and the same contraction along their own axes.

        Whole bytes with one float scale a channel stay in the order in which they are stored, with the summed axes
        last, as kernels take them: nothing of the array's size is computed.

        Args:
            dims: of the contraction, with the array on the right.
        """
        numbers, form = self.numbers, self.form
        stored = form.fitted(numbers["value"].shape).stored
        plain = stored.grid is None and form.in_turn is None and "scale_factor" not in numbers
        if not plain or {*dims.rhs_contract} != {*stored.summed}:
            return dims, self.integers(dims.rhs_contract)
        scale = numbers["scale"].astype(np.float32).transpose(stored.order)
        zero, sums = numbers.get("zero_point"), numbers.get("sums")
        if zero is not None:
            zero = zero.transpose(stored.order).astype(np.float32)
        if sums is not None:
            sums = sums.transpose(stored.order)
        return dims.with_right(stored.back), Affine(numbers["value"], scale, zero, sums)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the float array: of a stack, with the axes in front that the numbers have."""
        return self.form.fitted(tuple(self.numbers["value"].shape)).shape

    @property
    def dtype(self) -> np.dtype:
        """Of the float array."""
        return self.form.value_dtype

    @property
    def ndim(self) -> int:
        """Number of axes of the float array."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements of the float array."""
        return math.prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]


class FrozenParam(LowBitArray, Frozen):
    """A frozen parameter: a dict of arrays, `value` (the payload), `scale`, and any others that `frozen_numbers` lists.

    It is not an `nnx.Param`: nothing trains it. It answers as the parameter did: `shape`, `dtype`, `ndim`, `size`,
    `nbytes` and `sharding` without computing anything; read as an array, indexed, or in arithmetic, it is the
    dequantized array in the parameter's dtype. An index dequantizes only what it reads, except along axes that are cut
    into groups or packed into bytes. `get_raw_value()` returns the numbers; `nnx.as_pure(nnx.state(model))`,
    `nnx.to_pure_dict` and Orbax store them, at the paths `<parameter>/value`, `<parameter>/scale`.

    Its metadata holds a static `form`, and the sharding that the parameter had. Axes in front may be added and taken
    away (`nnx.vmap`, `nnx.scan`); all numbers have them.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.quant_tensor import IntQuantTensor
        >>> weight = IntQuantTensor.from_int(jnp.array([[2, -1], [4, 0]], jnp.int8), jnp.array([[0.5], [1.0]]))
        >>> table = FrozenParam.of(weight, has_zero_point=False)
        >>> table.shape, table[1], table[jnp.array([1, 0])] @ jnp.ones(2)
        ((2, 2), Array([4., 0.], dtype=float32), Array([4. , 0.5], dtype=float32))
        >>> sorted(table.get_raw_value())
        ['scale', 'value']
    """

    @classmethod
    def of(
        cls,
        weight: QuantTensor,
        summed: tuple[int, ...] = (),
        metadata: Mapping[str, object] | None = None,
        has_zero_point: bool = True,
        axes_of_sums: tuple[int, ...] | None = None,
        forms: ScaleForms | None = None,
        cut: Cut | None = None,
    ) -> Self:
        """The frozen parameter of a quantized weight.

        Args:
            weight: a QuantTensor.
            summed: its axes that contractions sum over; stored last.
            metadata: of the parameter's Variable.
            has_zero_point: whether the zero point may be another than 0.
            axes_of_sums: its axes along which a contraction of integers needs their sums; None for no sums.
            forms: what is known of its scales and zero points.
            cut: groups that cross shards; None for any others.

        Raises:
            TypeError: `weight` is not a QuantTensor.
            ValueError: its bit width is unknown because the model is abstract and the bit width is learned.
        """
        forms = ScaleForms() if forms is None else forms
        return cls.holding(
            *frozen_numbers(weight, summed, has_zero_point, axes_of_sums, forms, cut), metadata
        )

    @classmethod
    def holding(
        cls, numbers: Mapping[str, object], form: FrozenForm, metadata: Mapping[str, object] | None = None
    ) -> Self:
        """The frozen parameter of numbers that `frozen_numbers` returned, perhaps stacked.

        Args:
            numbers: the arrays, or their shapes.
            form: their form.
            metadata: of the parameter's Variable. The numbers are sharded already, so NNX must not.
        """
        required = {"hijax": False, "ref": False, "eager_sharding": False}
        param = cls.from_metadata(dict(numbers), {**(metadata or {}), **required, "form": form})
        assert isinstance(param, cls), "not a hijax Variable"
        return param

    @property
    def numbers(self) -> dict[str, Any]:
        """The arrays by name, or their shapes."""
        return self.get_raw_value()

    @property
    def form(self) -> FrozenForm:
        """What is static in the numbers."""
        return self.get_metadata("form")

    # --- what an array answers, without computing anything

    @property
    def itemsize(self) -> int:
        """Bytes of one element of the parameter."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the dequantized parameter."""
        return self.size * self.itemsize

    @property
    def sharding(self) -> Any:
        """Of the parameter: that of the payload, whose axes may be stored in another order."""
        payload = self.numbers["value"]
        sharding = payload.sharding
        if isinstance(sharding, jax.sharding.NamedSharding):
            spec = self.form.partition_spec(sharding.spec, payload.shape)
            return sharding.update(spec=spec)
        simple = sharding is None or sharding.is_fully_replicated or len(sharding.device_set) == 1
        return sharding if simple else self.get_value().sharding

    # --- read as an array

    def get_value(self, *, index: object = ...) -> Any:
        """The dequantized array, or what an index reads of it; its shape and dtype if the model is abstract.

        `nnx.to_pure_dict`, which reads states to store them, gets the numbers, and `nnx.bridge.to_linen` the parameter,
        as it would take the numbers for variables.
        """
        numbers = self.get_raw_value()
        reader = sys._getframe(1).f_code
        if reader is flax_internals.READER_OF_LINEN:
            return self
        if reader in flax_internals.READERS_OF_PURE_DICTS:
            return numbers
        kinds = {_kind(leaf) for leaf in jax.tree.leaves(numbers)}
        if kinds == {jax.ShapeDtypeStruct}:
            array = jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.sharding)
            return array if index is ... else jax.eval_shape(lambda x: x[index], array)
        if not isinstance(numbers, dict) or kinds != {jax.Array}:
            return numbers  # a prefix of a transformation, or a tree of shardings
        value = self._read(numbers, index.get_value() if isinstance(index, nnx.Variable) else index)
        hooks = self.get_metadata("on_get_value", ())
        for hook in hooks if isinstance(hooks, tuple) else (hooks,):
            value = hook(self, value)
        return value

    def _read(self, numbers: dict[str, jax.Array], index: object) -> jax.Array:
        read = partial(dequantize, form=self.form)
        if index is ...:
            return read(numbers)
        if self.get_metadata(READS_WHOLE, False):
            return read(numbers)[index]
        return look_up(numbers, self.form.fitted(tuple(numbers["value"].shape)), index, read)

    def __getattr__(self, name: str) -> Any:
        metadata = flax_internals.metadata_of(self)
        if name in metadata:
            return metadata[name]
        if name.startswith("__") or getattr(jax.Array, name, None) is None:
            raise AttributeError(f"FrozenParam has no attribute {name!r}", name=name, obj=self)
        return getattr(self.get_value(), name)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.get_value(), dtype=dtype)

    # --- written by NNX and by loading alone

    def set_value(self, value: object, *, index: object = None) -> None:
        """Replace the numbers.

        Args:
            value: a dict of the same names; or, of an abstract parameter, an abstract array with a sharding.
            index: None; a part cannot be replaced.

        Raises:
            TypeError: it is anything else, such as a float array.
        """
        if index is not None:
            raise self.refusal(value)
        numbers = self._of_each(value)
        if not isinstance(numbers, dict) or numbers.keys() != self.numbers.keys():
            raise self.refusal(value)
        super().set_value(numbers)

    def set_raw_value(self, value: object, **options: Any) -> None:
        """As of an `nnx.Variable`; a float array is refused.

        Raises:
            TypeError: an array is given.
        """
        self._check_not_array(value)
        super().set_raw_value(dict(value) if isinstance(value, nnx.State) else value, **options)

    def update_from_state(self, variable_state: nnx.Variable[object]) -> None:
        """As of an `nnx.Variable`; a float parameter is refused.

        Raises:
            TypeError: the Variable holds an array.
        """
        self._check_not_array(variable_state.get_raw_value())
        super().update_from_state(variable_state)

    def copy(self, *value: object, **updates: object) -> Any:
        """As of an `nnx.Variable`. What NNX gives for the parameter as a whole becomes one for each number: a
        `PartitionSpec` (`nnx.get_partition_spec`), an abstract array with a sharding (`nnx.as_abstract`).

        Raises:
            TypeError: a float array is given.
        """
        if "value" in updates:
            value = (updates.pop("value"),)
        return super().copy(*(self._of_each(entry) for entry in value), **updates)

    replace = copy  # type: ignore[assignment]
    to_state = copy  # type: ignore[assignment]

    def _of_each(self, value: object) -> object:
        numbers = self.numbers
        if isinstance(value, jax.sharding.PartitionSpec):
            return self.form.partition_specs(value, numbers)
        if not isinstance(value, jax.ShapeDtypeStruct):
            self._check_not_array(value)
            return value
        if value.shape != self.shape or not isinstance(value.sharding, jax.sharding.NamedSharding):
            raise self.refusal(value)
        specs = self.form.partition_specs(value.sharding.spec, numbers)
        return {
            name: jax.ShapeDtypeStruct(
                number.shape, number.dtype, sharding=value.sharding.update(spec=specs[name])
            )
            for name, number in numbers.items()
        }

    def _check_not_array(self, value: object) -> None:
        if isinstance(value, jax.Array | np.ndarray):
            raise self.refusal(value)

    def refusal(self, value: object) -> TypeError:
        """The error of assigning a value."""
        described = type(value).__name__
        if isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
            described = f"{value.dtype} numbers of shape {tuple(value.shape)}"
        form = self.form
        return TypeError(
            f"a frozen parameter of shape {self.shape} holds {form.stored.dtype.name} numbers "
            f"({', '.join(form.names)}) and cannot be assigned, got {described}.\n  cure: load float weights before "
            "jqinject.freeze; jqinject.unfreeze(model) after freeze(model, keep_masters=True); or "
            "jqinject.load_state(model, state) with the state of a frozen model"
        )

    def __nnx_repr__(self) -> Iterator[Any]:  # type: ignore[override]
        has_shapes = object not in {_kind(leaf) for leaf in jax.tree.leaves(self.numbers)}
        # A tree of shardings in the place of the numbers has no shape.
        comment = f" # {self.dtype.name}{list(self.shape)}" if has_shapes else ""
        yield reprlib.Object(type=type(self).__name__, comment=comment)
        yield from (reprlib.Attr(name, number) for name, number in self.numbers.items())


def _kind(leaf: object) -> type:
    """What a leaf is: an array, a shape, or something else."""
    kinds = (jax.Array, np.ndarray), (jax.ShapeDtypeStruct,)
    return next((kind[0] for kind in kinds if isinstance(leaf, kind)), object)
