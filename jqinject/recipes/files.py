"""Recipes as data: what is written to a file, and read from one."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from jqinject.inject.errors import did_you_mean
from jqinject.recipes.passes.allocate_bits import AllocateBits
from jqinject.recipes.passes.awq import AWQ
from jqinject.recipes.passes.correct_batch_norm import CorrectBatchNorm
from jqinject.recipes.passes.correct_biases import CorrectBiases
from jqinject.recipes.passes.equalize import Equalize
from jqinject.recipes.passes.fold_batch_norm import FoldBatchNorm
from jqinject.recipes.passes.fold_norms import FoldNorms
from jqinject.recipes.passes.learned_rotation import LearnedRotation
from jqinject.recipes.passes.low_rank import LowRank
from jqinject.recipes.passes.rotate import Rotate
from jqinject.recipes.passes.smooth_quant import SmoothQuant
from jqinject.recipes.passes.solve import Solve
from jqinject.recipes.passes.split_channels import SplitChannels
from jqinject.recipes.passes.tweak_norms import TweakNorms
from jqinject.recipes.solvers.auto_round import AutoRound
from jqinject.recipes.solvers.clip import Clip
from jqinject.recipes.solvers.corrections import QEP, MagR
from jqinject.recipes.solvers.gpfq import GPFQ, Qronos
from jqinject.recipes.solvers.gptq import GPTQ, RTN
from jqinject.recipes.solvers.half_quadratic import HQO
from jqinject.recipes.solvers.learned_rounding import LearnedRounding

KIND = "is"
VERSION = 1
PASSES = (
    *(
        AWQ,
        AllocateBits,
        CorrectBatchNorm,
        CorrectBiases,
        Equalize,
        FoldBatchNorm,
        FoldNorms,
        LearnedRotation,
    ),
    *(LowRank, Rotate, SmoothQuant, Solve, SplitChannels, TweakNorms),
)
SOLVERS = (GPFQ, GPTQ, HQO, QEP, RTN, AutoRound, Clip, LearnedRounding, MagR, Qronos)
BY_NAME: dict[str, type] = {kind.__name__: kind for kind in (*PASSES, *SOLVERS)}
"""The passes and solvers that a file may name."""


def as_data(given: Any) -> Any:
    """A pass, or what it is made of, as numbers, text, lists and dicts.

    Raises:
        TypeError: it is no dataclass of such parts: a pass of the user's own may hold a function.

    Example:
        >>> from jqinject.recipes import GPTQ
        >>> as_data(GPTQ(block_size=64))["is"], as_data(GPTQ(block_size=64))["block_size"]
        ('GPTQ', 64)
    """
    if given is None or isinstance(given, bool | int | float | str):
        return given
    if isinstance(given, tuple | list):
        return [as_data(each) for each in given]
    if isinstance(given, Mapping) and KIND not in given and all(isinstance(name, str) for name in given):
        return {name: as_data(part) for name, part in given.items()}
    if is_dataclass(given) and not isinstance(given, type):
        parts = {one.name: as_data(getattr(given, one.name)) for one in fields(given) if one.init}
        # TOML has no null: what is None is left out, as it is the default.
        return {KIND: type(given).__name__} | {name: part for name, part in parts.items() if part is not None}
    raise TypeError(
        f"{given!r:.80} cannot be written to a file: it is no number, text or dataclass of such parts.\n"
        "  cure: a frozen dataclass with the choices as fields"
    )


def from_data(data: Any, where: str) -> Any:
    """The reverse of `as_data`.

    Args:
        data: what `as_data` made.
        where: of the data, for messages.

    Raises:
        ValueError: an unknown class or field, or a value that the class refuses; the text says where.
    """
    if isinstance(data, list):
        return tuple(from_data(each, f"{where}[{place}]") for place, each in enumerate(data))
    if not isinstance(data, Mapping):
        return data
    name = data.get(KIND)
    if not isinstance(name, str) or name not in BY_NAME:
        hint = did_you_mean(str(name), BY_NAME)
        raise ValueError(f"{where}: there is no pass or solver {name!r}{'; ' + hint if hint else '.'}")
    kind = BY_NAME[name]
    parts = {key: value for key, value in data.items() if key != KIND}
    names = [one.name for one in fields(kind) if one.init]
    for key in parts:
        if key not in names:
            hint = did_you_mean(key, names)
            raise ValueError(f"{where}: {name} has no choice {key!r}{'; ' + hint if hint else '.'}")
    made = {key: _part(value, f"{where}.{key}") for key, value in parts.items()}
    try:
        return kind(**made)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error


def _part(value: Any, where: str) -> Any:
    """What a pass or solver is given: a table of numbers has no class."""
    if isinstance(value, Mapping) and KIND not in value:
        return {name: from_data(part, f"{where}.{name}") for name, part in value.items()}
    return from_data(value, where)


def write(passes: tuple[Any, ...], path: str | Path) -> None:
    """Write passes to a JSON file."""
    data = {"version": VERSION, "passes": [as_data(each) for each in passes]}
    Path(path).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def read(path: str | Path) -> tuple[Any, ...]:
    """The passes in a JSON or TOML file (by its suffix, `.toml`).

    Raises:
        ValueError: it is not such a file; it is of another version; see `from_data`.
    """
    text = Path(path).read_text(encoding="utf-8")
    try:
        data = tomllib.loads(text) if Path(path).suffix == ".toml" else json.loads(text)
    except ValueError as error:
        raise ValueError(f"{Path(path).name} is not a recipe: {error}") from error
    if not isinstance(data, dict) or not isinstance(data.get("passes"), list):
        raise ValueError(
            f"{Path(path).name} is not a recipe: it has no list of passes.\n  cure: Recipe.save writes one"
        )
    if data.get("version") != VERSION:
        raise ValueError(
            f"{Path(path).name} has version {data.get('version')!r} of recipes, expected {VERSION}"
        )
    return from_data(data["passes"], "passes")
