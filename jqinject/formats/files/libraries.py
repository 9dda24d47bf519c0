"""The formats' own libraries, imported when a file needs them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from jqinject.formats.checkpoint_errors import CheckpointError, MissingLibraryError

POINTER = b"version https://git-lfs"
"""What stands in the place of a large file that a clone of a repository left out."""


def library(name: str, path: Path) -> Any:
    """A library that reads a file.

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


def broken(path: Path, kind: str, why: Any) -> CheckpointError:
    """The error of a file that cannot be read as what it claims to be."""
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
