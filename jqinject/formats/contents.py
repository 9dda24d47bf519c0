"""What is in a checkpoint, by the headers of its files: `python -m jqinject inspect CHECKPOINT`.

Numbers are not read, and nothing is executed. Libraries are imported when a file asks for them: safetensors and gguf
are optional, and Orbax takes JAX along.
"""

import argparse
import math
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jqinject.formats.checkpoint_errors import KINDS, broken, existing, file_kind, library
from jqinject.formats.gguf_files import gguf_reader, gguf_shape
from jqinject.formats.safetensors_files import header_of
from jqinject.terminal import table

# Names of formats of more than 8 bits in all three kinds of files (F32, bfloat16); every other one is low-bit.
WIDE = re.compile(r"bool|(f|bf|i|u|c|float|bfloat|int|uint|complex)(16|32|64|128)", re.IGNORECASE)
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
        return WIDE.fullmatch(self.format) is None

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
        >>> int8, float32 = StoredArray("w", "int8", (4, 2), 8), StoredArray("b", "float32", (2,), 8)
        >>> contents = Contents("m", "Orbax", (int8, float32))
        >>> contents.bytes, contents.low_bytes, contents.coverage
        (16, 8, 0.5)
        >>> print(contents)
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
        return _bytes(self.arrays)

    @property
    def low_bytes(self) -> int:
        """Of the arrays in low bits."""
        return _bytes(array for array in self.arrays if array.is_low)

    @property
    def coverage(self) -> float:
        """The share of the bytes that is in low bits; 0 of an empty checkpoint."""
        return self.low_bytes / self.bytes if self.bytes else 0.0

    def formats(self) -> dict[str, tuple[StoredArray, ...]]:
        """Return the arrays of each format, the largest first."""
        by_format: dict[str, list[StoredArray]] = {}
        for array in self.arrays:
            by_format.setdefault(array.format, []).append(array)
        largest = sorted(by_format.items(), key=lambda item: -_bytes(item[1]))
        return {name: tuple(arrays) for name, arrays in largest}

    def __str__(self) -> str:
        total, count = self.bytes or 1, len(self.arrays)
        by_format = [
            (
                name,
                f"{len(arrays):,}",
                f"{sum(array.numbers for array in arrays):,}",
                f"{_bytes(arrays):,}",
                _percent(_bytes(arrays) / total),
            )
            for name, arrays in self.formats().items()
        ]
        single = [
            (array.format, "x".join(map(str, array.shape)) or "()", f"{array.bytes:,}", array.name)
            for array in self.arrays
        ]
        numbers = ("arrays", "numbers", "bytes")
        lines = [
            f"{self.path}: {self.kind}, {count:,} array{'s' * (count != 1)}, {self.bytes:,} bytes",
            f"{_percent(self.coverage)} of the bytes have at most 8 bits a number.",
            "",
            *table(("format", *numbers, "share"), by_format, right=numbers),
            "",
            *table(("format", "shape", "bytes", "name"), single, right=("bytes",)),
        ]
        return "\n".join(lines)


def _bytes(arrays: Iterable[StoredArray]) -> int:
    return sum(array.bytes for array in arrays)


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"


def inspect_checkpoint(path: str | Path) -> Contents:
    """List the names, formats, shapes and bytes of a checkpoint's arrays.

    Args:
        path: an Orbax folder, a safetensors file or a folder of them, or a GGUF file.

    Raises:
        FileNotFoundError: there is nothing at `path`.
        ValueError: it is not such a checkpoint, or not a complete one.
        MissingLibraryError: its library is not installed.
    """
    place = existing(path)
    if place.is_file():
        kind, shards = file_kind(place), [place]
    else:
        shards = [] if _is_orbax(place) else sorted(place.glob("*.safetensors"))
        kind = "safetensors" if shards else "Orbax"
    read = {"GGUF": _in_gguf, "safetensors": _in_safetensors, "Orbax": _in_orbax}[kind]
    return Contents(str(path), kind, tuple(array for shard in shards or [place] for array in read(shard)))


def _in_safetensors(path: Path) -> Iterator[StoredArray]:
    header, _, _ = header_of(path)
    for name, entry in header.items():
        kind, (start, stop) = str(entry["dtype"]), entry["data_offsets"]
        packed = kind in ("I32", "U32") and name.rpartition(".")[2] in PACKED
        yield StoredArray(name, f"{kind} packed" if packed else kind, tuple(entry["shape"]), stop - start)


def _in_gguf(path: Path) -> Iterator[StoredArray]:
    for tensor in gguf_reader(path).tensors:
        yield StoredArray(str(tensor.name), tensor.tensor_type.name, gguf_shape(tensor), int(tensor.n_bytes))


def _in_orbax(path: Path) -> Iterator[StoredArray]:
    if not _is_orbax(path):
        inside = sorted(child.name for child in path.iterdir() if child.is_dir())
        checkpoints = [name for name in inside if _is_orbax(path / name)]
        if len(checkpoints) == 1:
            yield from _in_orbax(path / checkpoints[0])
            return
        shown = ", ".join(checkpoints or [name for name in inside if name.isdigit()])
        several = f"; it holds several: {shown}.\n  cure: name one" if shown else f".\n  cure: give {KINDS}"
        raise ValueError(f"{path} is not a checkpoint{several}")
    handler = library("orbax.checkpoint", path).PyTreeCheckpointHandler()
    try:
        tree = handler.metadata(path.absolute())
    except Exception as error:  # of a broken folder: whatever its storage raises
        raise broken(path, "an Orbax checkpoint", error) from None
    jax = library("jax", path)
    for names, leaf in jax.tree_util.tree_flatten_with_path(getattr(tree, "tree", tree))[0]:
        name = jax.tree_util.keystr(names, simple=True, separator=".")
        if getattr(leaf, "shape", None) is not None:
            size = -(-math.prod(leaf.shape) * jax.dtypes.itemsize_bits(leaf.dtype) // 8)
            yield StoredArray(name, str(leaf.dtype), tuple(leaf.shape), size)


def _is_orbax(path: Path) -> bool:
    return (path / "_METADATA").is_file() or (path / "manifest.ocdbt").is_file()


def main(arguments: Sequence[str]) -> int:
    """Print what is in a checkpoint.

    Args:
        arguments: the command line without the program's name and `inspect`.

    Returns:
        The exit status: 2 if the checkpoint cannot be read, with the reason on stderr.
    """
    parser = argparse.ArgumentParser(
        prog="python -m jqinject inspect",
        description="What is in a checkpoint: names, formats, shapes and bytes of its arrays, and how much of it is "
        "in low bits. Its numbers are not read.",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help=KINDS)
    try:
        print(inspect_checkpoint(parser.parse_args(arguments).checkpoint))
    except (ValueError, OSError, ImportError) as error:
        print(f"python -m jqinject inspect: {error}", file=sys.stderr)
        return 2
    return 0
