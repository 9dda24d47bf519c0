"""What the layouts share: settings that are checked, shapes of scales, scales by their exponents."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from jqinject.formats.checkpoint_errors import CONTRADICTION, CheckpointError
from jqinject.formats.files.tensors import Tensor, Tensors
from jqinject.inject.errors import did_you_mean

FLOATS = ("float32", "bfloat16", "float16", "float64")


class Settings:
    """The settings of a quantization method, each of which is checked when it is read.

    Args:
        held: of the config file.
        where: what they are, for errors.
    """

    def __init__(self, held: Any, where: str) -> None:
        if not isinstance(held, Mapping):
            raise CheckpointError(f"{where} is {held!r}, expected settings by name")
        self.held, self.where = held, where

    def choice(self, name: str, known: Sequence[Any], default: Any = None) -> Any:
        """A setting that is one of several.

        Raises:
            CheckpointError: it is none of them.
        """
        found = self.held.get(name)
        found = default if found is None else found
        if not any(found == each and type(found) is type(each) for each in known):
            other = next((each for each in known if str(each) == str(found)), None)
            if other is not None:
                kinds = type(found).__name__, type(other).__name__
                raise CheckpointError(
                    f"{self.where}: {name} is {found!r}, a {kinds[0]}; expected the {kinds[1]} {other!r}"
                )
            hint = did_you_mean(str(found), [str(each) for each in known])
            expected = ", ".join(map(repr, known)) + ("; " + hint if hint else "")
            raise CheckpointError(f"{self.where}: {name} is {found!r}; known are {expected}")
        return found

    def integer(self, name: str, lowest: int = 1, default: int | None = None) -> int:
        """A setting that is an integer.

        Raises:
            CheckpointError: it is missing, no integer, or below `lowest`.
        """
        found = self.held.get(name)
        found = default if found is None else found
        if not isinstance(found, int) or isinstance(found, bool) or found < lowest:
            raise CheckpointError(f"{self.where}: {name} is {found!r}, expected an integer from {lowest} on")
        return found

    def flag(self, name: str, default: bool) -> bool:
        """A setting that is true or false.

        Raises:
            CheckpointError: it is neither.
        """
        return bool(self.choice(name, (True, False), default))

    def below(self, name: str) -> Settings | None:
        """Settings within these; None if there are none."""
        found = self.held.get(name)
        return None if found is None else Settings(found, f"{self.where}.{name}")


def groups_of(columns: int, group_size: int) -> int:
    """How many groups a row of a matrix has; -1 means one.

    Example:
        >>> groups_of(96, 32), groups_of(96, -1), groups_of(100, 64)
        (3, 1, 2)
    """
    return 1 if group_size == -1 else math.ceil(columns / group_size)


def as_blocks(scale: np.ndarray) -> np.ndarray:
    """Scales of a tensor or of channels as those of blocks: a matrix.

    Example:
        >>> as_blocks(np.ones(())).shape, as_blocks(np.ones(1)).shape, as_blocks(np.ones((4, 1))).shape
        ((1, 1), (1, 1), (4, 1))
    """
    return scale if scale.ndim == 2 else scale.reshape(-1, 1)


def exponents(scale: np.ndarray) -> np.ndarray:
    """Bytes `e` that stand for the scales `2^(e - 127)`, in the dtype that says so."""
    return np.ascontiguousarray(scale).view(ml_dtypes.float8_e8m0fnu)


def checked_groups(found: Tensor, name: str, groups: int) -> Tensor:
    """A group for each column, if every one of them exists.

    Args:
        found: the tensor of groups.
        name: its name.
        groups: how many there are.

    Raises:
        CheckpointError: a column is in none.
    """
    held = found.read()
    wrong = np.flatnonzero((held < 0) | (held >= groups))
    if wrong.size:
        at = int(wrong[0])
        raise CheckpointError(
            f"{name}[{at}] is {int(held[at])}, but there are {groups} groups, from 0 on{CONTRADICTION}"
        )
    return found


def integer_dtype(tensor: Tensor, name: str) -> None:
    """Raise if words of 32 bits are something else.

    Raises:
        CheckpointError: they are.
    """
    if tensor.dtype.name not in ("int32", "uint32"):
        raise CheckpointError(f"{name} ({tensor.file}) is {tensor.dtype.name}, expected words of 32 bits")


def scale_of(tensors: Tensors, name: str, shapes: Sequence[tuple[int, ...]], why: str) -> Tensor:
    """Scales in a float dtype, of one of several shapes.

    Raises:
        CheckpointError: they are missing, or other ones.
    """
    found = tensors.of_shape(name, shapes, why)
    if found.dtype.name not in FLOATS:
        raise CheckpointError(f"{name} ({found.file}) is {found.dtype.name}, expected floats")
    return found
