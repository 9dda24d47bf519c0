"""Results in a JSON file, trial by trial, so that a run can be stopped, gone on with and added to."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

import jqinject

FLOAT = "float"


@dataclass(frozen=True)
class Trial:
    """One quantized model.

    Attributes:
        track, format, method, seed: which.
        scores: one for each window or image.
        seconds: to make it.
        bits: of a weight, scales included.
    """

    track: str
    format: str
    method: str
    seed: int
    scores: tuple[float, ...]
    seconds: float
    bits: float

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What no two trials share."""
        return self.track, self.format, self.method, self.seed


@dataclass
class Records:
    """All trials so far.

    Attributes:
        settings: what must be the same for all.
        trials: by key.
        path: of the file; None to keep nothing.
    """

    settings: dict[str, Any]
    path: Path | None
    trials: dict[Any, Trial] = field(default_factory=dict)

    @classmethod
    def at(cls, path: Path | None, settings: dict[str, Any]) -> Records:
        """Those in a file, if there is one.

        Raises:
            ValueError: the file's were made with other settings.
        """
        found = cls(settings, path)
        if path is not None and path.exists():
            held = json.loads(path.read_text(encoding="utf-8"))
            if held["settings"] != settings:
                raise ValueError(
                    f"{path} holds trials with other settings: {held['settings']}, now {settings}.\n"
                    "  cure: another --json file, or the same options"
                )
            for one in held["trials"]:
                trial = Trial(**{**one, "scores": tuple(one["scores"])})
                found.trials[trial.key] = trial
        return found

    def add(self, trial: Trial) -> None:
        """Note a trial, in the file too."""
        self.trials[trial.key] = trial
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(
                {
                    "versions": versions(),
                    "settings": self.settings,
                    "trials": [asdict(one) for one in self.trials.values()],
                }
            )
            beside = self.path.with_suffix(".part")
            beside.write_text(text, encoding="utf-8")
            beside.replace(self.path)

    def of(self, track: str, format_: str, method: str) -> list[Trial]:
        """The trials of a cell, by seed."""
        found = [t for t in self.trials.values() if t.key[:3] == (track, format_, method)]
        return sorted(found, key=lambda trial: trial.seed)

    def scores(self, cell: tuple[str, str, str]) -> np.ndarray | None:
        """(seeds, windows) of a cell; None without trials."""
        found = self.of(*cell)
        return np.array([trial.scores for trial in found]) if found else None


def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    found = {name: version(name) for name in ("jax", "jaxlib", "flax", "numpy", "optax")}
    return {"python": platform.python_version(), "jqinject": jqinject.__version__, **found}
