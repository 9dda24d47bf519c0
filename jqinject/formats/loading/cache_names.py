"""Scales of a quantized cache (`k_scale`, `v_scale`) by their names: what each is for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jqinject.formats.loading.parameter_names import Name

SCALE = re.compile(r"(?P<module>.*?)(?:\.[kv]_proj)?\.(?P<which>[kv])_scale")
PROXIES = {"k": "k_transposed_quant", "v": "v_quant"}
"""The quantizers of an attention layer through which keys and values go into its cache."""


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


def cache_target(
    name: str, rules: Sequence[Name] | None, proxies: Iterable[str], prefixes: Sequence[str]
) -> str | None:
    """What a scale of a cache is for; None if nothing says it.

    Args:
        name: of the tensor.
        rules: of names; None for the attention layer that has the same path.
        proxies: paths of quantizers that the model has.
        prefixes: of the root, which only one of the two may have.
    """
    found = SCALE.fullmatch(name)
    if found is None:
        return None
    for rule in rules or ():
        match = rule.matches(name)
        if match is not None:
            return rule.models[0].format(**match[1])
    if rules is not None:
        return None
    module, leaf = found["module"], PROXIES[found["which"]]
    bare = {module.removeprefix(prefix) for prefix in prefixes if module.startswith(prefix)}
    places = {f"{prefix}{each}" for each in bare for prefix in prefixes}
    near = [
        path
        for path in proxies
        if path.endswith(f".{leaf}") and any(path.startswith(f"{at}.") for at in places)
    ]
    return near[0] if len(near) == 1 else None


def unused_scales(left: Sequence[str]) -> str:
    """What a report says of scales of caches that nothing takes; empty without any.

    Args:
        left: tensors that nothing takes.

    Example:
        >>> print(unused_scales(["model.layers.0.self_attn.k_scale"]))
        1 scale of a quantized cache is not used (model.layers.0.self_attn.k_scale): the model's caches stay float
          to use it: names={..., 'model.layers.{i}.self_attn.k_scale': 'cache.layer_{i}.k'}, the cache's name in inputs,
          which then hold one; and jqinject.quantized_cache(model, cache)
    """
    found = [name for name in left if SCALE.fullmatch(name)]
    if not found:
        return ""
    pattern = re.sub(r"\.\d+\.", ".{i}.", found[0])
    which = "k" if found[0].endswith("k_scale") else "v"
    shown = ", ".join(found[:2]) + (f" and {len(found) - 2} more" if len(found) > 2 else "")
    one = len(found) == 1
    return (
        f"{len(found)} scale{'' if one else 's'} of a quantized cache {'is' if one else 'are'} not used ({shown}): "
        f"the model's caches stay float\n  to use {'it' if one else 'them'}: names={{..., '{pattern}': "
        f"'cache.layer_{{i}}.{which}'}}, the cache's name in inputs,\n"
        "  which then hold one; and jqinject.quantized_cache(model, cache)"
    )
