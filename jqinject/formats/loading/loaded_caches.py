"""Scales of a quantized cache (`k_scale`, `v_scale`) in the quantizers of keys and values."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from flax import nnx

from jqinject.core.scaling.of_memory import ParameterFromRuntimeStatsScaling
from jqinject.formats.checkpoint import Checkpoint
from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.loading.cache_names import PROXIES, CacheScale
from jqinject.formats.loading.loaded_quantizers import input_quantizer, put_ranges, static_format
from jqinject.formats.stored_matrix import InputFormat
from jqinject.model import Rule
from jqinject.model.walk import ModelIndex, dotted
from jqinject.nn import QuantMultiHeadAttention, QuantScaledDotProductAttention


def cache_proxies(model: nnx.Module) -> dict[str, Any]:
    """The quantizers of keys and values that a model's attention layers have, by path."""
    found = {}
    for path, node in ModelIndex(model).places:
        if isinstance(node, QuantMultiHeadAttention | QuantScaledDotProductAttention):
            for name in PROXIES.values():
                proxy = getattr(node, name)
                if proxy is not None and proxy.is_quant_enabled:
                    found[dotted((*path, name))] = proxy
    return found


def cache_formats(checkpoint: Checkpoint, scales: Sequence[CacheScale]) -> dict[str, InputFormat]:
    """How each target quantizes keys or values.

    Args:
        checkpoint: the checkpoint.
        scales: what its scales are for.

    Raises:
        CheckpointError: the checkpoint does not say what the scales are, or says something that no cache can do; a
            scale is none.
    """
    if not scales:
        return {}
    form = checkpoint.cache_format
    if form is None:
        raise CheckpointError(
            f"{scales[0].sources[0]} is a scale of a cache, but the settings do not say of which numbers "
            "(kv_cache_scheme).\n  cure: ignore=['.*_scale'], for float caches"
        )
    if form.dynamic or form.strategy != "tensor" or form.bits != 8 or not form.symmetric:
        raise CheckpointError(
            f"the checkpoint's caches are {form}; known are 8 bits without zero points and one static scale of the "
            "tensor.\n  cure: ignore=['.*_scale'], for float caches"
        )
    return {each.target: replace(form, scale=_largest(checkpoint, each)) for each in scales}


def _largest(checkpoint: Checkpoint, each: CacheScale) -> np.ndarray:
    found = np.asarray([_one(checkpoint, name) for name in each.sources], np.float32)
    return found.max(keepdims=True)


def _one(checkpoint: Checkpoint, name: str) -> float:
    held = np.asarray(checkpoint.array(name), np.float32)
    if held.size != 1 or not np.isfinite(held).all() or held.reshape(()) <= 0:
        raise CheckpointError(f"{name} is {held.tolist()}, expected one scale above 0")
    return float(held.reshape(()))


def cache_rules(scales: Sequence[CacheScale], formats: Mapping[str, InputFormat]) -> list[Rule]:
    """A rule for each cache that is no attention layer's."""
    return [
        Rule(re.escape(each.target), cache_quant=input_quantizer(formats[each.target], each.target))
        for each in scales
        if not each.is_proxy
    ]


def refuse_caches(scales: Sequence[CacheScale]) -> None:
    """Raise if a name is for a cache of a model with adapters.

    Raises:
        CheckpointError: names it.
    """
    if scales:
        raise CheckpointError(
            f"{scales[0].target} should get {scales[0].sources[0]}, which is not written under adapters.\n"
            "  cure: ignore=['.*_scale'], and rules with cache_quant for lora"
        )


def check_proxies(
    proxies: Mapping[str, Any], scales: Sequence[CacheScale], formats: Mapping[str, InputFormat]
) -> None:
    """Refuse quantizers of the model that cannot have a checkpoint's scale.

    Args:
        proxies: by path.
        scales: what the checkpoint's scales are for.
        formats: of each target.

    Raises:
        CheckpointError: one is dynamic, or of other numbers.
    """
    for each in scales if formats else ():
        if not each.is_proxy:
            continue
        proxy, wanted = proxies[each.target], formats[each.target]
        part = vars(proxy.tensor_quant).get("scaling_impl")
        own = None if proxy.is_dynamic else static_format(proxy)
        learns_range = isinstance(part, ParameterFromRuntimeStatsScaling)
        if own is None or own.kind != wanted.kind or not own.symmetric or not learns_range:
            cure = {"float": "Fp8e4m3OCPActPerTensorFloat", "int": "Int8ActPerTensorFloat"}[wanted.kind]
            raise CheckpointError(
                f"{each.target} is {proxy.binding.base.__name__}, and {each.sources[0]} is the static scale of "
                f"{'8-bit minifloats' if wanted.kind == 'float' else 'int8'}.\n"
                f"  cure: {cure} there, or ignore=['.*_scale'] to keep the quantizer"
            )


def put_cache_scales(
    model: nnx.Module, scales: Sequence[CacheScale], formats: Mapping[str, InputFormat]
) -> None:
    """Give attention layers' quantizers of keys and values their scales.

    Args:
        model: it is written to.
        scales: what the checkpoint's scales are for.
        formats: of each target.
    """
    proxies = cache_proxies(model) if any(each.is_proxy for each in scales) else {}
    for each in scales:
        if each.is_proxy:
            proxy = proxies[each.target]
            put_ranges(proxy, [formats[each.target]], ())
