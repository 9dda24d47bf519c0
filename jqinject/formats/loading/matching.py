"""Which parameter a tensor is for: by rules of names, or by the likeness of both names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jqinject.formats.checkpoint import Checkpoint
from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.loading.gguf_names import published_name
from jqinject.formats.loading.name_tables import READY
from jqinject.formats.loading.parameter_names import Name, compiled
from jqinject.inject.errors import did_you_mean

# Names of parameters in the models of JAX that hold what a checkpoint calls a weight.
LEAVES = ("kernel", "embedding", "scale", "weight", "w", "value")
PREFIXES = ("", "model.", "language_model.model.", "model.language_model.", "transformer.")

# A parameter's path; the place in its stack and that of the tensor among those that are joined; which of the parameters
# that divide the tensor it is, and of how many; and the rule.
Found = tuple[str, tuple[Any, ...], int, int, Name]


def by_rules(name: str, rules: tuple[Name, ...], shapes: Mapping[str, Any]) -> list[Found]:
    """The parameters that rules have for a tensor.

    Raises:
        ValueError: a rule names a parameter that does not exist.
    """
    found = []
    for rule in rules:
        for own in (name, published_name(name)):
            match = rule.matches(own)
            if match is None:
                continue
            at, places = match
            stack = tuple(_number(places[place]) for place in rule.stacked())
            for part, model in enumerate(rule.models):
                path = model.format(**places)
                if path not in shapes:
                    deeper = _deeper(model, places, shapes)
                    if deeper:
                        raise ValueError(f"names: {name} is for {path}, {deeper}")
                    hint = did_you_mean(path, list(shapes))
                    nearest = f"; {hint}" if hint else ""
                    raise ValueError(
                        f"names: {name} is for {path}, which is not a parameter of the model{nearest}"
                    )
                found.append((path, (stack, at), part, len(rule.models), rule))
            break
    return found


def _deeper(model: str, places: Mapping[str, str], shapes: Mapping[str, Any]) -> str:
    """What to do about a path that lies beyond the last of the model's layers; empty for other paths."""
    for place, text in places.items():
        pattern = compiled(model.format(**{**places, place: f"{{{place}}}"}))
        matches = (pattern.fullmatch(path) for path in shapes)
        numbers = [int(match[place]) for match in matches if match is not None and match[place].isdigit()]
        if text.isdigit() and numbers and int(text) > max(numbers):
            prefix = model.partition(f"{{{place}}}")[0].format(**places)
            return (
                f"and the model ends with {prefix}{max(numbers)}: the checkpoint has more layers.\n"
                "  cure: a model as deep as the checkpoint; or ignore=['...'] for tensors of further layers"
            )
    return ""


def _number(text: str) -> Any:
    return int(text) if text.isdigit() else text


def by_likeness(name: str, shapes: Mapping[str, Any], checkpoint: Checkpoint) -> list[Found]:
    """The parameter that has the same path, except for what the root and the leaf are called."""
    if checkpoint.is_tree and name in shapes:
        return [(name, ((), 0), 0, 1, Name(name, name))]
    own = (name, published_name(name)) if checkpoint.method == "gguf" else (name,)
    called: dict[str, str] = {}
    for each in reversed(own):
        called |= dict.fromkeys(_paths_like(each), each)
    found = sorted({*called} & {*shapes})
    if len(found) > 1:
        raise CheckpointError(
            f"{name} may be for {' or '.join(found)}.\n  cure: names={{{name!r}: {found[0]!r}}}"
        )
    return [(path, ((), 0), 0, 1, Name(called[path], path)) for path in found]


def _paths_like(name: str) -> set[str]:
    """Paths that a tensor's parameter may have."""
    module, _, leaf = name.rpartition(".")
    leaves = LEAVES if leaf == "weight" else (leaf,)
    bare = {module.removeprefix(prefix) for prefix in PREFIXES if module.startswith(prefix)}
    places = [f"{prefix}{each}".strip(".") for each in sorted(bare) for prefix in PREFIXES]
    return {f"{place}.{each}" if place else each for place in places for each in leaves} | {*places} - {""}


def idle_rules(names: Iterable[str], rules: tuple[Name, ...]) -> tuple[str, ...]:
    """The patterns of rules that no tensor has, each with the nearest tensor; ready tables are for several models."""
    known = [each for name in names for each in dict.fromkeys((name, published_name(name)))]
    idle = [
        pattern
        for rule in rules
        if rule not in READY
        for pattern in rule.files
        if not any(compiled(pattern).fullmatch(each) for each in known)
    ]
    return tuple(
        f"{pattern}{'; ' + hint if (hint := did_you_mean(pattern, known)) else ''}" for pattern in idle
    )
