"""What the layouts share: settings that are checked when they are read, shapes of scales, scales by their exponents."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from jqinject.formats import safetensors_files, stored_matrix
from jqinject.formats.checkpoint_errors import CONTRADICTION, CheckpointError, nearest

Value = TypeVar("Value")
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)


class Settings:
    """The settings of a quantization method, each of which is checked when it is read.

    Args:
        values: of the config file, by name.
        where: what they are, for errors.
    """

    def __init__(self, values: object, where: str) -> None:
        if not isinstance(values, Mapping):
            raise CheckpointError(f"{where} is {values!r}, expected settings by name")
        self.values: Mapping[str, Any] = values
        self.where = where

    def choice(self, name: str, choices: Sequence[Value], default: Value | None = None) -> Value:
        """Return a setting that is one of several.

        Raises:
            CheckpointError: it is none of them.
        """
        stated = self.values.get(name)
        value = default if stated is None else stated
        alike = [choice for choice in choices if str(choice) == str(value)]
        if alike and type(alike[0]) is type(value):
            return alike[0]
        if alike:
            kinds = type(value).__name__, type(alike[0]).__name__
            raise CheckpointError(
                f"{self.where}: {name} is {value!r}, a {kinds[0]}; expected the {kinds[1]} {alike[0]!r}"
            )
        expected = ", ".join(map(repr, choices)) + nearest(str(value), map(str, choices))
        raise CheckpointError(f"{self.where}: {name} is {value!r}; known are {expected}")

    def integer(self, name: str, lowest: int = 1, default: int | None = None) -> int:
        """Return a setting that is an integer.

        Raises:
            CheckpointError: it is missing, no integer, or below `lowest`.
        """
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
            raise CheckpointError(f"{self.where}: {name} is {value!r}, expected an integer from {lowest} on")
        return value

    def number(self, name: str) -> float:
        """Return a setting that is a number.

        Raises:
            CheckpointError: it is missing, or no number.
        """
        value = self.values.get(name)
        if not isinstance(value, float | int):
            raise CheckpointError(f"{self.where}: {name} is {value!r}, expected a number")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return a setting that is true or false.

        Raises:
            CheckpointError: it is neither.
        """
        return self.choice(name, (True, False), default)

    def sizes(self, name: str, count: int | None = 2, lowest: int = 1) -> tuple[int, ...]:
        """Return a setting that is a list of sizes.

        Args:
            name: of the setting.
            count: how many sizes; None for any number.
            lowest: the least size.

        Raises:
            CheckpointError: it is something else.
        """
        value = self.values.get(name)
        sizes: list[Any] = value if isinstance(value, list) else [None]
        are_sizes = all(isinstance(size, int) and size >= lowest for size in sizes)
        if not are_sizes or count not in (None, len(sizes)):
            expected = "two sizes" if count == 2 else "sizes"
            raise CheckpointError(f"{self.where}: {name} is {value!r}, expected {expected}")
        return tuple(sizes)

    def below(self, name: str) -> Settings | None:
        """Return settings within these; None if absent."""
        values = self.values.get(name)
        return None if values is None else Settings(values, f"{self.where}.{name}")

    def within(self, name: str) -> Settings:
        """Return settings within these; empty ones if absent."""
        return self.below(name) or Settings({}, f"{self.where}.{name}")

    def only(self, names: Sequence[str]) -> Settings:
        """Return the settings themselves, if all have one of these names.

        Raises:
            CheckpointError: another one.
        """
        unknown = sorted({*map(str, self.values)} - {*names})
        if unknown:
            raise CheckpointError(f"{self.where}: {unknown[0]} is not known; known are {', '.join(names)}")
        return self


def parsed(text: str | bytes, where: str) -> Any:
    """Return what a text of JSON says.

    Raises:
        CheckpointError: it is no JSON.
    """
    try:
        return json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{where} is no JSON: {error}") from None


def stated_format(
    settings: Settings,
    strategies: Sequence[str],
    dynamic: Sequence[bool | str],
    kind: str = "type",
    bits: str = "num_bits",
) -> stored_matrix.InputFormat:
    """Return how settings say that numbers of a call are quantized.

    Args:
        settings: of an input, or a cache.
        strategies: those that are known.
        dynamic: the known values of `dynamic`.
        kind, bits: what the settings call the kind and the bits of the numbers.

    Raises:
        CheckpointError: a setting is unknown.
    """
    strategy = settings.choice("strategy", strategies, "tensor")
    return stored_matrix.InputFormat(
        settings.choice(kind, ("int", "float"), "int"),
        settings.integer(bits, default=8),
        settings.flag("symmetric", True),
        strategy,
        settings.integer("group_size") if strategy in ("group", "tensor_group") else None,
        settings.choice("dynamic", dynamic, False) is not False,
    )


def exponents(scale: np.ndarray) -> np.ndarray:
    """Return bytes `e`, which mean the scales `2^(e - 127)`, in the dtype of such scales."""
    return np.ascontiguousarray(scale).view(E8M0)


def columns_in_groups(
    tensors: safetensors_files.Tensors, name: str, columns: int, size: int
) -> dict[str, safetensors_files.Tensor]:
    """Return the group of each column, as a part of a matrix; nothing where groups are consecutive columns.

    Args:
        tensors: of the checkpoint.
        name: of the tensor; without it groups are consecutive.
        columns: how many there are.
        size: of a group.

    Raises:
        CheckpointError: a column is in none of the groups.
    """
    if name not in tensors:
        return {}
    tensor = tensors.take(name, (columns,), dtype=("int32", "int64"))
    groups, count = tensor.read(), math.ceil(columns / size)
    wrong = np.flatnonzero((groups < 0) | (groups >= count))
    if wrong.size:
        at = int(wrong[0])
        raise CheckpointError(f"{name}[{at}] is {groups[at]}, expected 0 to {count - 1}{CONTRADICTION}")
    if np.array_equal(groups, np.arange(columns) // size):
        return {}
    return {"group_of_column": tensor.map(lambda x: x.astype(np.int32))}
