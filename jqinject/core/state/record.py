"""Several arrays in one Variable: NNX handles every Variable at each call of a compiled function.

    class Mean(nnx.Module):
        count, total = Part(), Part()

        def __init__(self):
            self.record = QuantStat({"count": float_array(0.0), "total": float_array(0.0)})

A part is read and written like a Variable: `mean.count.get_value()`, `mean.count.set_value(...)`, `mean.count[...]`.
Its state path is `record.count`; `load_state` also reads `count`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, overload

import jax
from flax import nnx


class RecordPart:
    """One array of a record, read and written like a Variable.

    Args:
        record: the Variable, which holds a dict.
        name: the array's.
    """

    __slots__ = ("name", "record")

    def __init__(self, record: nnx.Variable[Any], name: str) -> None:
        self.record = record
        self.name = name

    def get_value(self) -> jax.Array:
        """The array."""
        return self.record.get_raw_value()[self.name]

    def set_value(self, value: Any) -> None:
        """Replace the array."""
        self.record.set_value({**self.record.get_raw_value(), self.name: value})

    def __getitem__(self, index: Any) -> jax.Array:
        return self.get_value()[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.set_value(self.get_value().at[index].set(value))

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's."""
        return self.get_value().shape

    @property
    def dtype(self) -> Any:
        """The array's."""
        return self.get_value().dtype

    @property
    def size(self) -> int:
        """The array's."""
        return self.get_value().size

    def __repr__(self) -> str:
        return f"RecordPart({self.name}={self.get_value()!r})"


class Part:
    """A module attribute that is the part of that name in its `record`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, module: None, owner: type) -> Part: ...
    @overload
    def __get__(self, module: Any, owner: type) -> RecordPart: ...
    def __get__(self, module: Any, owner: type) -> Part | RecordPart:
        return self if module is None else RecordPart(module.record, self.name)


def state_parts(
    variable: nnx.Variable[Any],
) -> Iterator[tuple[tuple[str, ...], nnx.Variable[Any] | RecordPart]]:
    """A Variable's readable and writable items, by path below its own: itself, or the parts of a record."""
    held = variable.get_raw_value()
    if isinstance(held, dict):
        yield from (((name,), RecordPart(variable, name)) for name in held)
    else:
        yield (), variable


def kind_of(variable: Any) -> type:
    """The class of a Variable, or of the record that it is a part of."""
    return type(variable.record if isinstance(variable, RecordPart) else variable)


def flat_parts(state: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """The readable and writable items of an `nnx.State`, by path: Variables, parts of records, and arrays."""
    found: list[tuple[tuple[Any, ...], Any]] = []
    for path, leaf in nnx.to_flat_state(state):
        below = state_parts(leaf) if isinstance(leaf, nnx.Variable) else [((), leaf)]
        found.extend(((*path, *name), part) for name, part in below)
    return found
