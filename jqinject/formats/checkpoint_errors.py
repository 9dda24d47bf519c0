"""Why a checkpoint cannot be read, or does not fit; and the formats' own libraries, imported when a file needs them."""

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jqinject.inject.errors import did_you_mean

#: The end of messages about tensors that fit neither one another nor the settings.
CONTRADICTION = (
    "\n  cure: fetch config.json and the files again, of one revision; they contradict one another"
)
#: How a file begins that a clone of a repository left out.
POINTER = b"version https://git-lfs"
#: Endings of files that may hold code, and are never opened.
PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".joblib")
#: What can be inspected; `read_checkpoint` takes no Orbax folder, whose arrays `load_state` takes.
KINDS = "an Orbax folder, a .safetensors file (or a folder of them) or a .gguf file"


class CheckpointError(ValueError):
    """A checkpoint is broken, contradicts itself, or is of an unknown kind; the message names the tensor."""


class MissingLibraryError(ImportError):
    """A checkpoint needs a library that is not installed; the message says how to install it."""


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the end of a message about a name that is none of `names`; empty if none is like it.

    Example:
        >>> nearest("q.kernl", ["q.kernel"])
        "; did you mean 'q.kernel'?"
    """
    hint = did_you_mean(name, list(names))
    return f"; {hint}" if hint else ""


def existing(path: str | Path) -> Path:
    """Return a path at which there is something.

    Raises:
        FileNotFoundError: there is nothing.
    """
    place = Path(path)
    if not place.exists():
        raise FileNotFoundError(f"there is no file or folder {str(path)!r}.\n  cure: give {KINDS}")
    return place


def file_kind(path: Path) -> str:
    """Return whether a file is "safetensors" or "GGUF", by how it begins, or else by its name.

    Raises:
        CheckpointError: it is neither, or may hold code.
    """
    with path.open("rb") as file:
        start = file.read(9)
    suffix = path.suffix.lower()
    if suffix in PICKLES or start[:2] in (b"PK", b"\x80\x02", b"\x80\x04"):
        raise CheckpointError(
            f"{path} looks like a pickle or an archive, which may hold code: it is not opened.\n"
            f"  cure: convert it, and give {KINDS}"
        )
    if start[:4] == b"GGUF" or suffix == ".gguf":
        return "GGUF"
    if suffix == ".safetensors" or start[8:] == b"{":
        return "safetensors"
    raise CheckpointError(f"{path} is not a checkpoint.\n  cure: give {KINDS}")


def library(name: str, path: Path) -> Any:
    """Import the library that reads a file.

    Raises:
        MissingLibraryError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        raise MissingLibraryError(
            f"reading {path} needs the library {name}, which is not installed.\n"
            '  cure: pip install "jqinject[formats]"'
        ) from None


def broken(path: Path, kind: str, why: object) -> CheckpointError:
    """Return the error of a file that cannot be read as what it claims to be."""
    if path.is_file():
        with path.open("rb") as file:
            if file.read(len(POINTER)) == POINTER:
                return CheckpointError(
                    f"{path} is not {kind} but a pointer of Git LFS to one: a few lines of text.\n"
                    "  cure: git lfs pull, where the repository was cloned"
                )
    reason = " ".join(str(why).split())[:200].rstrip(".")
    return CheckpointError(
        f"{path} is not {kind}, or not a whole one: {reason}.\n  cure: fetch or write it again"
    )
