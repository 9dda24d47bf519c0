"""What is in a checkpoint: its arrays, and how much of it is in low bits."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from jqinject.terminal import table

# Formats of more than 8 bits, by their names in all three kinds of files; every other one is low-bit.
WIDE = {
    *("f64", "f32", "f16", "bf16", "i64", "u64", "i32", "u32", "i16", "u16", "c64", "bool"),
    *("float64", "float32", "float16", "bfloat16", "int64", "uint64", "int32", "uint32", "int16", "uint16"),
    *("complex64", "complex128"),
}
# Integers of 32 bits that hold several numbers each, by the names that GPTQ, AWQ and compressed-tensors give them.
PACKED = ("qweight", "qzeros", "weight_packed")


@dataclass(frozen=True)
class StoredArray:
    """An array of a checkpoint.

    Attributes:
        name: its name, the parts of a path joined by dots.
        format: of its numbers, as the file calls it.
        shape: its shape.
        bytes: of its numbers in memory; of blocks, scales included.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    bytes: int

    @property
    def is_low(self) -> bool:
        """Whether its numbers have at most 8 bits, scales of blocks aside."""
        return self.format.lower() not in WIDE

    @property
    def numbers(self) -> int:
        """How many numbers it has; words that hold several count as one."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint.

    Attributes:
        path: where it is.
        kind: "Orbax", "safetensors" or "GGUF".
        arrays: in the order of the checkpoint.

    Example:
        >>> found = Contents("m", "Orbax", (StoredArray("w", "int8", (4, 2), 8), StoredArray("b", "float32", (2,), 8)))
        >>> found.bytes, found.low_bytes, found.coverage
        (16, 8, 0.5)
        >>> print(found)
        m: Orbax, 2 arrays, 16 bytes
        50.0 % of the bytes have at most 8 bits a number.
        <BLANKLINE>
        format   arrays  numbers  bytes  share
        int8          1        8      8  50.0 %
        float32       1        2      8  50.0 %
        <BLANKLINE>
        format   shape  bytes  name
        int8     4x2        8  w
        float32  2          8  b
    """

    path: str
    kind: str
    arrays: tuple[StoredArray, ...]

    @property
    def bytes(self) -> int:
        """Of all arrays."""
        return sum(array.bytes for array in self.arrays)

    @property
    def low_bytes(self) -> int:
        """Of the arrays in low bits."""
        return sum(array.bytes for array in self.arrays if array.is_low)

    @property
    def coverage(self) -> float:
        """The share of the bytes that is in low bits; 0 of an empty checkpoint."""
        return self.low_bytes / self.bytes if self.bytes else 0.0

    def formats(self) -> dict[str, tuple[StoredArray, ...]]:
        """The arrays of each format, the largest first."""
        found: dict[str, list[StoredArray]] = {}
        for array in self.arrays:
            found.setdefault(array.format, []).append(array)
        largest = sorted(found.items(), key=lambda item: -_bytes(item[1]))
        return {name: tuple(arrays) for name, arrays in largest}

    def __str__(self) -> str:
        total = self.bytes or 1
        by_format = [
            (
                name,
                f"{len(arrays):,}",
                f"{sum(array.numbers for array in arrays):,}",
                f"{_bytes(arrays):,}",
                f"{_bytes(arrays) / total:.1%}".replace("%", " %"),
            )
            for name, arrays in self.formats().items()
        ]
        one_by_one = [
            (array.format, "x".join(map(str, array.shape)) or "()", f"{array.bytes:,}", array.name)
            for array in self.arrays
        ]
        numbers = ("arrays", "numbers", "bytes")
        low = f"{self.coverage:.1%}".replace("%", " %")
        return "\n".join(
            [
                f"{self.path}: {self.kind}, {len(self.arrays):,} array{'s' * (len(self.arrays) != 1)}, "
                f"{self.bytes:,} bytes",
                f"{low} of the bytes have at most 8 bits a number.",
                "",
                *table(("format", *numbers, "share"), by_format, right=numbers),
                "",
                *table(("format", "shape", "bytes", "name"), one_by_one, right=("bytes",)),
            ]
        )


def _bytes(arrays: Iterable[StoredArray]) -> int:
    return sum(array.bytes for array in arrays)
