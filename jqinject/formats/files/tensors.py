"""`Tensors`: the tensors of a checkpoint by name, and which of them were used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jqinject.formats.checkpoint_errors import CONTRADICTION, CheckpointError


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file.

    Attributes:
        dtype: of NumPy, or of ml_dtypes.
        shape: its shape.
        file: the file's name.
        read: gives its array, a read-only view of the file where its layout allows.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    file: str
    read: Callable[[], np.ndarray] = field(repr=False)


class Tensors:
    """The tensors of a checkpoint.

    Args:
        found: by name.
        metadata: texts that the files carry beside them.
    """

    def __init__(self, found: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
        self.found, self.metadata = found, metadata or {}
        self.used: set[str] = set()

    def __contains__(self, name: object) -> bool:
        return name in self.found

    def ending(self, end: str) -> Iterator[str]:
        """What stands before `end` in the names that end so."""
        yield from (name.removesuffix(end) for name in self.found if name.endswith(end))

    def take(
        self,
        name: str,
        shape: Sequence[int | None] | None = None,
        dtype: str | Sequence[str] | None = None,
        why: str = "",
    ) -> Tensor:
        """A tensor that becomes a part of something else.

        Args:
            name: its name.
            shape: that it must have; None for any, as a whole or along an axis.
            dtype: the names of dtypes, one of which it must have.
            why: what says so.

        Raises:
            CheckpointError: it is missing, or another.
        """
        found = self.found.get(name)
        if found is None:
            raise CheckpointError(
                f"the checkpoint has no {name}{', ' + why if why else ''}.\n  cure: fetch it again"
            )
        wanted = None if shape is None else tuple(shape)
        if wanted is not None and (
            len(found.shape) != len(wanted)
            or any(w is not None and w != got for w, got in zip(wanted, found.shape, strict=True))
        ):
            shown = "x".join("any" if size is None else str(size) for size in wanted) or "()"
            got = "x".join(map(str, found.shape)) or "()"
            raise CheckpointError(
                f"{name} ({found.file}) has the shape {got}, expected {shown}{': ' + why if why else ''}"
                + CONTRADICTION
            )
        names = (dtype,) if isinstance(dtype, str) else dtype
        if names is not None and found.dtype.name not in names:
            raise CheckpointError(
                f"{name} ({found.file}) is {found.dtype.name}, expected {' or '.join(names)}" + CONTRADICTION
            )
        self.used.add(name)
        return found

    def of_shape(self, name: str, shapes: Sequence[tuple[int, ...]], why: str) -> Tensor:
        """A tensor that has one of several shapes.

        Raises:
            CheckpointError: it is missing, or has none of them.
        """
        found = self.take(name, why=why)
        if found.shape not in shapes:
            expected = " or ".join("x".join(map(str, shape)) or "()" for shape in shapes)
            got = "x".join(map(str, found.shape)) or "()"
            raise CheckpointError(
                f"{name} ({found.file}) has the shape {got}, expected {expected}: {why}{CONTRADICTION}"
            )
        return found

    def text(self, name: str) -> str:
        """A tensor of bytes as text.

        Raises:
            CheckpointError: it is no UTF-8 text.
        """
        try:
            return self.take(name, (None,), "uint8").read().tobytes().decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{name} is no UTF-8 text: {error}") from None

    def rest(self) -> dict[str, Tensor]:
        """The tensors that nothing took."""
        return {name: tensor for name, tensor in self.found.items() if name not in self.used}
