"""The source text of Python's standard library, as bytes, split by file."""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
VALIDATION = 1 / 16


@dataclass(frozen=True)
class Corpus:
    """A text in bytes, split by file.

    Attributes:
        train, validation: uint8.
        sha256: of both, to say which text a number was measured on: another Python has another library.
        python: version of the Python whose library it is.
    """

    train: np.ndarray
    validation: np.ndarray
    sha256: str
    python: str

    @classmethod
    @cache
    def of_standard_library(cls) -> Corpus:
        """The modules of this Python's standard library without their tests: some 12 MB.

        Which side a file is on depends on its path alone, so that a file is on the same side in every Python.
        """
        root = Path(sysconfig.get_paths()["stdlib"])
        files = {file.relative_to(root).as_posix(): file for file in root.rglob("*.py")}
        sides: dict[bool, list[bytes]] = {False: [], True: []}
        for name in sorted(name for name in files if not LEFT_OUT & set(name.split("/"))):
            sides[is_validation(name)].append(files[name].read_bytes())
        train, validation = (b"\n".join(sides[side]) for side in (False, True))
        digest = hashlib.sha256(train + b"\0" + validation).hexdigest()
        as_numbers = (np.frombuffer(text, np.uint8) for text in (train, validation))
        return cls(*as_numbers, digest, platform.python_version())

    def batch(self, number: int, batch: int, context: int, seed: int) -> jax.Array:
        """The batch of a step, windows at random places of the training text: int32 (batch, context + 1).

        It depends on the arguments alone, so that training can go on from any step.
        """
        random = np.random.default_rng((seed, number))
        return self._windows(self.train, random.integers(0, len(self.train) - context, batch), context)

    def validation_windows(self, windows: int, context: int) -> jax.Array:
        """Windows evenly spread over the validation text: int32 (windows, context + 1)."""
        starts = np.linspace(0, len(self.validation) - context - 1, windows).astype(int)
        return self._windows(self.validation, starts, context)

    def __str__(self) -> str:
        sizes = " + ".join(f"{len(part) / 1e6:.1f} MB" for part in (self.train, self.validation))
        return f"standard library of Python {self.python}, {sizes}, sha256 {self.sha256[:16]}"

    @staticmethod
    def _windows(text: np.ndarray, starts: np.ndarray, context: int) -> jax.Array:
        return jnp.asarray(text[starts[:, None] + np.arange(context + 1)].astype(np.int32))


def is_validation(name: str) -> bool:
    """Whether a file is held out, by the hash of its path in the library."""
    return hashlib.sha256(name.encode()).digest()[0] < 256 * VALIDATION
