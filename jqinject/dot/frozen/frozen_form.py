"""`FrozenForm`: what is static in the low-bit numbers of a weight. Next: `frozen_numbers` makes and reads them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.native.library import library
from jqinject.native.stored_matmul import three_bits
from jqinject.ops import Grid, IntGrid, processes
from jqinject.ops.cut import Cut
from jqinject.ops.grid import in_triples
from jqinject.quant_tensor import Groups

#: Metadata of a Variable with a name for each axis.
PER_AXIS = ("out_sharding", "sharding_names", "sharding")


@dataclass(frozen=True)
class StoredForm:
    """How a payload is stored: summed axes last, integers of at most 4 bits packed into bytes.

    Attributes:
        shape: of the payload.
        dtype: of the payload.
        summed: its summed axes, counted from the front.
        packed_bits: of an integer that is packed into bytes; None for whole bytes.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    summed: tuple[int, ...]
    packed_bits: int | None

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The axes in stored order."""
        return (*(axis for axis in range(len(self.shape)) if axis not in self.summed), *self.summed)

    @cached_property
    def back(self) -> tuple[int, ...]:
        """The permutation of stored axes to the order of the payload."""
        return tuple(self.order.index(axis) for axis in range(len(self.shape)))

    @cached_property
    def grid(self) -> IntGrid | None:
        """The integers that are packed into bytes; None for whole bytes."""
        signed = bool(jnp.issubdtype(self.dtype, jnp.signedinteger))
        return None if self.packed_bits is None else IntGrid(self.packed_bits, signed)

    def in_halves(self, stored: jax.Array) -> jax.Array | None:
        """Numbers of 3 or 4 bits, two a byte, as kernels take them; None of any others."""
        if self.grid is None or self.packed_bits == 2:
            return None
        shape = tuple(self.shape[axis] for axis in self.order)
        plain = processes.Bound(_in_halves, (self.grid, shape))
        if self.packed_bits == 4 or library().target is None:
            return plain(stored)
        return processes.on_one_device(processes.Bound(_by_platform, (self.grid, shape)), plain, stored)

    def stored(self, payload: jax.Array) -> jax.Array:
        """A payload in its stored form."""
        moved = payload.transpose(self.order)
        return moved if self.grid is None else self.grid.pack(moved.astype(jnp.int8))

    def payload(self, stored: jax.Array) -> jax.Array:
        """The payload from its stored form."""
        if self.grid is not None:
            shape = tuple(self.shape[axis] for axis in self.order)
            stored = self.grid.unpack(stored, shape).astype(self.dtype)
        return jax.lax.transpose(stored, self.back)


def _in_halves(grid: IntGrid, shape: tuple[int, ...], stored: jax.Array) -> jax.Array:
    return grid.in_halves(stored, shape)


def _by_platform(grid: IntGrid, shape: tuple[int, ...], stored: jax.Array) -> jax.Array:
    """The same by the means of the platform."""

    def on_cpu(stored: jax.Array) -> jax.Array:
        return three_bits(in_triples(stored), grid.signed)[..., : -(-shape[-1] // 2)]

    default = processes.Bound(_in_halves, (grid, shape))
    return jax.lax.platform_dependent(stored, cpu=on_cpu, default=default)


@dataclass(frozen=True)
class FrozenForm:
    """What is static in frozen numbers.

    Attributes:
        stored: how the payload is stored.
        value_dtype: of the dequantized weight.
        whole_zero_point: whether every zero point is one of the integers.
        grid: the number format.
        groups: how an axis of the weight is cut into groups; None without groups.
        cut: the same for groups that cross shards, whose payload is stored in the weight's shape.
        names: of the numbers, sorted.
        in_turn: an axis, counted from the end, along which scales and zero points repeat: index `i` has those of
            `i % count`, where `count` of them are stored. None if none repeat.
        block_width: how many groups beside each other had one scale when the weight was quantized.
    """

    stored: StoredForm
    value_dtype: np.dtype
    whole_zero_point: bool
    grid: Grid
    groups: Groups | None = None
    cut: Cut | None = None
    names: tuple[str, ...] = ("scale", "value")
    in_turn: int | None = None
    block_width: int = 1

    @cached_property
    def has_integers(self) -> bool:
        """Whether contractions take the numbers as integers of at most 8 bits."""
        narrow = self.grid.is_integer and self.grid.bit_width <= 8
        return narrow and self.whole_zero_point and self.in_turn is None

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Of the weight."""
        groups = self.groups
        return self.stored.shape if groups is None or self.cut else groups.shape_of(self.stored.shape)

    @property
    def summed(self) -> tuple[int, ...]:
        """The axes of the weight that are stored last."""
        if self.groups is None or self.cut:
            return self.stored.summed
        dim = self.groups.dim % len(self.shape)
        return tuple(dict.fromkeys(axis - (axis > dim) for axis in self.stored.summed))

    @cached_property
    def contracted_groups(self) -> Groups | None:
        """How a contraction of integers cuts an axis: into groups, or into pieces of groups that cross shards."""
        groups, cut = self.groups, self.cut
        return groups if groups is None or cut is None else Groups(cut.piece, groups.dim, groups.length)

    @lru_cache(maxsize=1024)  # noqa: B019 (forms are compared by value and small)
    def fitted(self, payload_shape: tuple[int, ...]) -> "FrozenForm":
        """The form of numbers that were stacked, sliced or looked up: along axes in front, or other sizes.

        Args:
            payload_shape: of the payload as stored; axes may have been added in front, or taken away there.

        Raises:
            ValueError: more axes were taken away than lie in front.
        """
        stored, cut = self.stored, self.cut
        if stored.packed_bits is None and payload_shape == tuple(stored.shape[axis] for axis in stored.order):
            return self
        added = len(payload_shape) - len(stored.shape)
        taken = max(-added, 0)
        _check_in_front(self, taken)
        order = (*range(added), *(axis + added for axis in stored.order[taken:]))
        sizes = dict(zip(order, payload_shape, strict=True))
        if stored.packed_bits is not None:
            sizes[order[-1]] = stored.shape[stored.order[-1]]
        shape = tuple(sizes[axis] for axis in range(len(order)))
        summed = tuple(axis + added for axis in stored.summed)
        if cut is not None:
            cut = replace(cut, axis=cut.axis + added, beside=tuple(axis + added for axis in cut.beside))
        return replace(self, stored=replace(stored, shape=shape, summed=summed), cut=cut)

    def axis_of_payload(self, axis: int) -> int | None:
        """Where an axis of the weight lies in the payload as stored; None if its numbers have to stay together."""
        stored, groups = self.stored, self.groups
        if groups is not None and axis == groups.dim % len(self.shape):
            return None
        if self.in_turn is not None and axis == self.in_turn % len(self.shape):
            return None
        place = stored.back[axis if self.cut else self.axis_of_scale(axis)]
        packed = stored.packed_bits is not None and place == len(stored.shape) - 1
        return None if packed else place

    def axis_of_scale(self, axis: int) -> int:
        """Where an axis of the weight lies in the scales."""
        return axis if self.groups is None else axis + (axis > self.groups.dim % len(self.shape))

    def in_full(self, x: jax.Array) -> jax.Array:
        """Scales or zero points along the axis on which they repeat, if any, as often as there are numbers.

        Args:
            x: of the payload's rank.
        """
        if self.in_turn is None:
            return x
        axis = self.in_turn % len(self.stored.shape)
        count = x.shape[axis]
        return x if count == 1 else jnp.concatenate([x] * (self.stored.shape[axis] // count), axis)

    def partition_specs(
        self, names: Iterable[object], numbers: Mapping[str, jax.Array]
    ) -> dict[str, jax.sharding.PartitionSpec]:
        """How the numbers are sharded if the weight is sharded so; axes of a scale of size 1 are not.

        Args:
            names: a `PartitionSpec` of the weight, or the names of its axes.
            numbers: their arrays, or their shapes.
        """
        form = self.fitted(numbers["value"].shape)
        groups, in_turn = form.groups, form.in_turn
        named = tuple(names)
        full = wide = (*named, *(None,) * (len(form.shape) - len(named)))
        if groups is not None and form.cut is None:  # what shards the axis shards its groups
            behind = groups.dim % len(form.shape) + 1
            wide = (*full[:behind], None, *full[behind:])
        specs = {}
        for name, number in numbers.items():
            sizes = enumerate(number.shape)
            if len(number.shape) < len(form.shape):  # one factor for each layer of a stack
                spec = full[: len(number.shape)]
            elif name == "value":
                spec = tuple(wide[axis] for axis in form.stored.order)
            else:
                repeated = None if in_turn is None else in_turn % len(wide)
                spec = tuple(wide[axis] if size > 1 and axis != repeated else None for axis, size in sizes)
            specs[name] = jax.sharding.PartitionSpec(*spec)
        return specs

    def partition_spec(
        self, spec: jax.sharding.PartitionSpec, payload_shape: tuple[int, ...]
    ) -> jax.sharding.PartitionSpec:
        """How the weight is sharded whose payload is sharded so: the inverse of `partition_specs`.

        Args:
            spec: of the payload as stored.
            payload_shape: its shape.
        """
        form = self.fitted(payload_shape)
        full = (*spec, *(None,) * (len(payload_shape) - len(spec)))
        names = [full[place] for place in form.stored.back]
        if form.groups is not None and form.cut is None:
            del names[form.groups.dim % len(form.shape) + 1]
        return jax.sharding.PartitionSpec(*names)


def _check_in_front(form: FrozenForm, taken: int) -> None:
    """Refuse to take away axes that are not stored in front, or that are cut into groups."""
    grouped = None if form.groups is None else form.groups.dim % len(form.shape)
    if form.stored.order[:taken] != tuple(range(taken)) or (grouped is not None and grouped < taken):
        raise ValueError(
            f"{taken} axes were taken away from the payload of a frozen weight of shape {form.shape}; those in front "
            f"are stored as axes {form.stored.order[:taken]}.\n  cure: index the axes in front"
        )
