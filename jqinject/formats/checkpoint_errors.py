"""Why a checkpoint cannot be read, or does not fit; and the formats' own libraries, imported when a file needs them."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jqinject.inject.errors import did_you_mean

CONTRADICTION = (
    "\n  cure: fetch config.json and the files again, of one revision; they contradict one another"
)
"""The end of messages about tensors that fit neither one another nor the settings."""
POINTER = b"version https://git-lfs"
"""How a file begins that a clone of a repository left out."""
PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".joblib")
"""Endings of files that may hold code, and are never opened."""


class CheckpointError(ValueError):
    """A checkpoint is broken, contradicts itself, or is of an unknown kind; the message names the tensor."""


class MissingLibraryError(ImportError):
    """A checkpoint needs a library that is not installed; the message says how to install it."""


def listed(names: Sequence[str], count: int = 4) -> str:
    """Return the first of some names as text, and how many more there are.

    Example:
        >>> listed(["a", "b", "c"], 2)
        'a, b and 1 more'
    """
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the end of a message about a name that is none of `names`; empty if none is like it.

    Example:
        >>> nearest("q.kernl", ["q.kernel"])
        "; did you mean 'q.kernel'?"
    """
    hint = did_you_mean(name, list(names))
    return f"; {hint}" if hint else ""


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
