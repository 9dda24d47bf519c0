"""Which parameter a tensor is for, by rules or by both names; and which quantizer a scale of a cache is for."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax

from jqinject.formats.checkpoint import Checkpoint
from jqinject.formats.checkpoint_errors import CheckpointError, listed, nearest
from jqinject.formats.loading.parameter_names import READY, Name, compiled, published_name

# Names of parameters in the models of JAX that hold what a checkpoint calls a weight.
LEAVES = ("kernel", "embedding", "scale", "weight", "w", "value")
PREFIXES = ("", "model.", "language_model.model.", "model.language_model.", "transformer.")
CACHE_SCALE = re.compile(r"(?P<module>.*?)(?:\.[kv]_proj)?\.(?P<which>[kv])_scale")
PROXIES = {"k": "k_transposed_quant", "v": "v_quant"}
"""The quantizers of an attention layer through which keys and values go into its cache."""

Parameters = Mapping[str, jax.ShapeDtypeStruct]
"""The model's parameters by their paths."""


class Match(NamedTuple):
    """A parameter that a tensor is for.

    Attributes:
        path: of the parameter.
        place: in its stack; and of the tensor among those that are joined.
        rule: that says so, for this parameter.
    """

    path: str
    place: tuple[tuple[int | str, ...], int]
    rule: Name


def by_rules(name: str, rules: Iterable[Name], parameters: Parameters) -> list[Match]:
    """Return the parameters that rules have for a tensor.

    Raises:
        ValueError: a rule names a parameter that does not exist.
    """
    matches = []
    for rule in rules:
        match = rule.matches(name) or rule.matches(published_name(name))
        if match is None:
            continue
        at, places = match
        stack = tuple(int(text) if (text := places[place]).isdigit() else text for place in rule.stacked())
        filled = rule.filled(places)
        for model, path in zip(rule.models, filled.models, strict=True):
            if path not in parameters:
                why = _deeper(model, places, parameters) or (
                    f"which is not a parameter of the model{nearest(path, parameters)}"
                )
                raise ValueError(f"names: {name} is for {path}, {why}")
            matches.append(Match(path, (stack, at), filled))
    return matches


def _deeper(model: str, places: Mapping[str, str], parameters: Parameters) -> str:
    """Return what to do about a path that lies beyond the last of the model's layers; empty for other paths."""
    for place, text in places.items():
        pattern = compiled(model.format(**{**places, place: f"{{{place}}}"}))
        matches = (pattern.fullmatch(path) for path in parameters)
        numbers = [int(match[place]) for match in matches if match is not None and match[place].isdigit()]
        if text.isdigit() and numbers and int(text) > max(numbers):
            prefix = model.partition(f"{{{place}}}")[0].format(**places)
            return (
                f"and the model ends with {prefix}{max(numbers)}: the checkpoint has more layers.\n"
                "  cure: a model as deep as the checkpoint; or ignore=['...'] for tensors of further layers"
            )
    return ""


def by_likeness(name: str, parameters: Parameters, checkpoint: Checkpoint) -> list[Match]:
    """Return the parameter that has the same path, except for the names of the root and the leaf."""
    if checkpoint.is_tree and name in parameters:
        return [Match(name, ((), 0), Name(name, name))]
    called = dict.fromkeys(_paths_like(published_name(name)), published_name(name))
    called = called if checkpoint.method == "gguf" else {}
    called |= dict.fromkeys(_paths_like(name), name)
    paths = sorted(called.keys() & parameters.keys())
    if len(paths) > 1:
        raise CheckpointError(
            f"{name} may be for {' or '.join(paths)}.\n  cure: names={{{name!r}: {paths[0]!r}}}"
        )
    return [Match(path, ((), 0), Name(called[path], path)) for path in paths]


def _paths_like(name: str) -> set[str]:
    """Return paths that a tensor's parameter may have."""
    module, _, leaf = name.rpartition(".")
    places = _roots(module)
    leaves = LEAVES if leaf == "weight" else (leaf,)
    return {f"{place}.{end}" if place else end for place in places for end in leaves} | places - {""}


def _roots(module: str) -> set[str]:
    """Return the path of a module under each of the usual roots."""
    bare = {module.removeprefix(prefix) for prefix in PREFIXES if module.startswith(prefix)}
    return {f"{prefix}{path}".strip(".") for path in bare for prefix in PREFIXES}


def idle_rules(names: Iterable[str], rules: Iterable[Name]) -> tuple[str, ...]:
    """Return the patterns of rules that no tensor has, each with the nearest tensor; ready tables are left out."""
    stored = [called for name in names for called in dict.fromkeys((name, published_name(name)))]
    idle = [
        pattern
        for rule in rules
        if rule not in READY
        for pattern in rule.files
        if not any(compiled(pattern).fullmatch(name) for name in stored)
    ]
    return tuple(pattern + nearest(pattern, stored) for pattern in idle)


@dataclass(frozen=True)
class CacheScale:
    """A quantizer of keys or values, and the scales that it gets.

    Attributes:
        target: the path of an attention layer's quantizer; else the name of a cache, as `Rule(cache_quant=...)` knows
            it (`cache.layer_0.k`).
        sources: names of the tensors. Of several, for a cache that layers share, the largest scale counts.
        is_proxy: whether the target is a quantizer of the model.
    """

    target: str
    sources: tuple[str, ...]
    is_proxy: bool


def cache_target(name: str, rules: Sequence[Name] | None, proxies: Collection[str]) -> str | None:
    """Return what a scale of a cache is for; None if nothing says it.

    Args:
        name: of the tensor.
        rules: of names; None for the attention layer that has the same path.
        proxies: paths of quantizers that the model has.
    """
    scale = CACHE_SCALE.fullmatch(name)
    if scale is None:
        return None
    if rules is not None:
        matches = ((rule, rule.matches(name)) for rule in rules)
        return next((rule.models[0].format(**match[1]) for rule, match in matches if match is not None), None)
    leaf, places = PROXIES[scale["which"]], _roots(scale["module"])
    near = [
        path
        for path in proxies
        if path.endswith(f".{leaf}") and any(path.startswith(f"{place}.") for place in places)
    ]
    return near[0] if len(near) == 1 else None


def unused_scales(left: Sequence[str]) -> str:
    """Return what a report says of scales of caches that nothing takes; empty without any.

    Args:
        left: tensors that nothing takes.

    Example:
        >>> print(unused_scales(["model.layers.0.self_attn.k_scale"]))
        1 scale of a quantized cache is not used (model.layers.0.self_attn.k_scale): the model's caches stay float
          to use it: names={..., 'model.layers.{i}.self_attn.k_scale': 'cache.layer_{i}.k'}, the cache's name in inputs,
          which then hold one; and jqinject.quantized_cache(model, cache)
    """
    scales = [name for name in left if CACHE_SCALE.fullmatch(name)]
    if not scales:
        return ""
    pattern = re.sub(r"\.\d+\.", ".{i}.", scales[0])
    which = "k" if scales[0].endswith("k_scale") else "v"
    plural, verb, them = ("", "is", "it") if len(scales) == 1 else ("s", "are", "them")
    shown = listed(scales, 2)
    return (
        f"{len(scales)} scale{plural} of a quantized cache {verb} not used ({shown}): the model's caches stay float\n"
        f"  to use {them}: names={{..., '{pattern}': 'cache.layer_{{i}}.{which}'}}, the cache's name in inputs,\n"
        "  which then hold one; and jqinject.quantized_cache(model, cache)"
    )
