"""What a recipe has finished, kept in a folder, so that a run that is stopped goes on from there."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jqinject.ops.processes import on_host

IDENTITY = "recipe.json"
VERSION = 1
NAME = "__name"
Arrays = dict[str, Any]


@dataclass
class Journal:
    """Remembers what parts of a recipe have computed; without a folder it forgets it at once.

    A part is written whole or not at all, and never twice: to another name first, which is then changed.

    Attributes:
        folder: None to keep nothing.
        step: which pass is running.
    """

    folder: Path | None = None
    step: int = 0
    _count: int = field(default=0, init=False)

    @classmethod
    def opened(cls, folder: str | Path, identity: Mapping[str, str]) -> Journal:
        """The journal of a run, begun or gone on with.

        Args:
            folder: made if it does not exist.
            identity: what has to be the same in a run that goes on -> a short text of it.

        Raises:
            ValueError: the folder is of another run, and which part of the identity differs; or it holds other files.
        """
        where = Path(folder)
        if jax.process_count() > 1:
            where = where / f"process_{jax.process_index()}_of_{jax.process_count()}"
        where.mkdir(parents=True, exist_ok=True)
        kept = where / IDENTITY
        if not kept.exists():
            _refuse_strange(where)
            _written(kept, lambda file: file.write(_identity_text(identity).encode()))
            return cls(where)
        _check_identity(folder, kept, identity)
        return cls(where)

    def begin(self, step: int) -> None:
        """A pass begins.

        Args:
            step: its place in the recipe.
        """
        self.step, self._count = step, 0

    def once(self, name: str, compute: Callable[[], Arrays]) -> Arrays:
        """What `compute` returns, or returned in the run that this one goes on with.

        Parts are asked for in the same order in every run of a recipe.

        Args:
            name: of the part: a site's.
            compute: makes arrays by name.

        Raises:
            ValueError: the folder holds a damaged part, or that of something else.
        """
        if self.folder is None:
            return compute()
        file = self.folder / f"pass_{self.step:02d}_part_{self._count:05d}.npz"
        self._count += 1
        if _everywhere(file.exists()):
            return _read(file, name)
        made = {
            key: on_host(x) if isinstance(x, jax.Array) else np.asarray(x) for key, x in compute().items()
        }
        stored: dict[str, Any] = {NAME: np.array(name), **made}
        _written(file, lambda out: np.savez(out, **stored))
        return made


def _identity_text(identity: Mapping[str, str]) -> str:
    return json.dumps({"version": VERSION, **identity}, indent=2) + "\n"


def _refuse_strange(folder: Path) -> None:
    others = sorted(one.name for one in folder.iterdir() if not one.name.endswith(".part"))
    if others:
        raise ValueError(
            f"Recipe.apply: the checkpoint folder {folder.name} holds no run of a recipe, but {others[0]}.\n"
            "  cure: an empty folder, or one that does not exist yet"
        )


def _check_identity(folder: str | Path, kept: Path, identity: Mapping[str, str]) -> None:
    try:
        before = json.loads(kept.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"Recipe.apply: {kept.name} in the checkpoint folder is damaged: {error}") from error
    wanted = {"version": VERSION, **identity}
    other = [name for name, text in wanted.items() if before.get(name) != text]
    if other:
        raise ValueError(
            f"Recipe.apply: the checkpoint folder {Path(folder).name} is of a run with another "
            f"{' and another '.join(other)}.\n  cure: the same {', '.join(other)} as in that run; or another folder"
        )


def _read(file: Path, name: str) -> Arrays:
    try:
        with np.load(file, allow_pickle=False) as stored:
            found = {key: stored[key] for key in stored.files}
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"Recipe.apply: {file.name} in the checkpoint folder is damaged: {error}.\n  cure: delete this file"
        ) from error
    if str(found.pop(NAME, "")) != name:
        raise ValueError(
            f"Recipe.apply: {file.name} in the checkpoint folder is not of {name}.\n  cure: another folder"
        )
    return found


def _written(file: Path, write: Callable[[Any], Any]) -> None:
    """Write a file whole: a process that is killed leaves the old one, or none."""
    part = file.with_name(file.name + ".part")
    with part.open("wb") as out:
        write(out)
        out.flush()
        os.fsync(out.fileno())
    part.replace(file)


def _everywhere(here: bool) -> bool:
    """Whether something holds in every process: they go on from the last part that all of them have."""
    if jax.process_count() == 1:
        return here
    return bool(multihost_utils.process_allgather(np.array(here)).all())
