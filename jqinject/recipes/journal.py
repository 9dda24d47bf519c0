"""What a recipe has finished, kept in a folder, so that a run that is stopped goes on from there."""

from __future__ import annotations

import hashlib
import json
import os
import pprint
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from jqinject.inject.binding import key_of
from jqinject.inject.injector import InjectorMeta
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
        """Open or resume the journal of a run.

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
        file, parts = where / IDENTITY, {"version": VERSION, **identity}
        strange = sorted(x.name for x in where.iterdir() if not x.name.endswith(".part"))
        if file.exists():
            _check_identity(folder, file, parts)
        elif strange:
            raise ValueError(
                f"Recipe.apply: the checkpoint folder {where.name} holds no run of a recipe, but {strange[0]}.\n"
                "  cure: an empty folder, or one that does not exist yet"
            )
        else:
            text = json.dumps(parts, indent=2) + "\n"
            _written(file, lambda out: out.write(text.encode()))
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
        # All processes go on from the last part that each of them has.
        if multihost_utils.process_allgather(np.array(file.exists())).all():
            return _read(file, name)
        arrays = {
            key: on_host(x) if isinstance(x, jax.Array) else np.asarray(x) for key, x in compute().items()
        }
        stored: dict[str, Any] = {NAME: np.array(name), **arrays}
        _written(file, lambda out: np.savez(out, **stored))
        return arrays


def _check_identity(folder: str | Path, file: Path, parts: Mapping[str, object]) -> None:
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"Recipe.apply: {file.name} in the checkpoint folder is damaged: {error}") from error
    changed = [name for name, text in parts.items() if before.get(name) != text]
    if changed:
        raise ValueError(
            f"Recipe.apply: the checkpoint folder {Path(folder).name} is of a run with another "
            f"{' and another '.join(changed)}.\n  cure: the same {', '.join(changed)} as in that run; or another folder"
        )


def _read(file: Path, name: str) -> Arrays:
    try:
        with np.load(file, allow_pickle=False) as stored:
            arrays = {key: stored[key] for key in stored.files}
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"Recipe.apply: {file.name} in the checkpoint folder is damaged: {error}.\n  cure: delete this file"
        ) from error
    if str(arrays.pop(NAME, "")) != name:
        raise ValueError(
            f"Recipe.apply: {file.name} in the checkpoint folder is not of {name}.\n  cure: another folder"
        )
    return arrays


def _written(file: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file whole: a process that is killed leaves the old one, or none."""
    part = file.with_name(file.name + ".part")
    with part.open("wb") as out:
        write(out)
        out.flush()
        os.fsync(out.fileno())
    part.replace(file)


def identity_of(
    passes: object, model: nnx.Module, rules: object, batches: object, call: object
) -> dict[str, str]:
    """The parts of a run, each as a short text that is another one where anything that it depends on is another.

    Args:
        passes: of the recipe.
        model: the float model.
        rules: which quantizer each site gets.
        batches: the data.
        call: how batches become calls.
    """
    graphdef, state = nnx.split(model, graph=True)
    jax_and_devices = jax.__version__, jax.default_backend(), jax.process_count(), jax.device_count()
    return {
        "recipe": _hashed(written(key_of(passes))),
        "model": _hashed((written(repr(graphdef)), state)),
        "rules": _hashed(written(key_of(rules))),
        "batches": _hashed(batches),
        "method or call": _hashed(written(key_of(call))),
        "JAX or number of devices": _hashed(jax_and_devices),
    }


def written(key: object) -> str:
    """A key of a value (`jqinject.inject.binding.key_of`) as text that does not change from process to process.

    Injectors of the user's are written with what they declare: a body may change from one run to the next.

    Example:
        >>> written(key_of({"bits": (2, 4)})) == written(key_of({"bits": (2, 4)})) != written(key_of({"bits": (2, 3)}))
        True
    """
    text = pprint.pformat((key, list(_declared(key))))
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _declared(key: object) -> Iterator[object]:
    """The declarations of the user's injectors in a key."""
    if isinstance(key, tuple | frozenset):
        for part in key:
            yield from _declared(part)
    if isinstance(key, InjectorMeta):
        for base in key.__mro__:
            if isinstance(base, InjectorMeta) and not base.__module__.startswith("jqinject."):
                own = {name: key_of(spec.declared) for name, spec in base.__declared__.items()}
                yield own
                yield from _declared((*own.values(),))


def _hashed(tree: object) -> str:
    """The digest of a pytree's leaves, with their paths: arrays by their numbers, others by their text."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(tree):
        digest.update(jax.tree_util.keystr(path).encode() + b"\0")
        if isinstance(leaf, jax.Array | np.ndarray) and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            x = on_host(leaf) if isinstance(leaf, jax.Array) else leaf
            digest.update(f"{x.shape}{x.dtype}".encode())
            digest.update(np.ascontiguousarray(x).tobytes())
        else:
            digest.update(repr(leaf).encode() + b"\0")
    return digest.hexdigest()
