"""Static scales of caches of keys and values as compressed-tensors has them: the inverse of `loading.loaded_caches`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import nnx

from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.loading.cache_names import PROXIES, SCALE
from jqinject.formats.loading.loaded_caches import cache_proxies
from jqinject.formats.loading.loaded_quantizers import static_format
from jqinject.formats.loading.parameter_names import Name, compiled
from jqinject.formats.stored_matrix import InputFormat
from jqinject.model.walk import ModelIndex
from jqinject.program import QuantizedProgram


@dataclass(frozen=True)
class CacheQuantizer:
    """A quantizer of keys or values whose scale is written.

    Attributes:
        path: of the quantizer, or the name of the cache.
        name: of the scale in the file.
        form: of the numbers.
        proxy: the quantizer.
    """

    path: str
    name: str
    form: InputFormat
    proxy: Any


def cache_quantizers(model: nnx.Module, rules: tuple[Name, ...] | None) -> list[CacheQuantizer]:
    """The quantizers of keys and values of a model, each with its name in the file.

    Args:
        model: the model.
        rules: of names; None for those that the paths suggest.

    Raises:
        CheckpointError: one has no name, or no static scale of 8 bits.
    """
    return [_written(path, name, proxy) for path, name, proxy in _named(model, rules)]


def _named(model: nnx.Module, rules: tuple[Name, ...] | None) -> Iterator[tuple[str, str, Any]]:
    ends = {proxy: f"{which}_scale" for which, proxy in PROXIES.items()}
    for path, proxy in cache_proxies(model).items():
        layer, _, leaf = path.rpartition(".")
        yield path, _by_rule(path, rules) or f"{layer}.{ends[leaf]}".lstrip("."), proxy
    for _, node in ModelIndex(model).places:
        for site in node.op_quant.caches if isinstance(node, QuantizedProgram) else ():
            name = _by_rule(site.name, rules)
            if name is None:
                raise CheckpointError(
                    f"the cache {site.name} is quantized, and no name is for its scale.\n"
                    f"  cure: names={{..., 'model.layers.0.self_attn.k_scale': {site.name!r}}}"
                )
            yield site.name, name, node.op_quant.held[site.name]


def _by_rule(path: str, rules: tuple[Name, ...] | None) -> str | None:
    for rule in rules or ():
        match = compiled(rule.models[0]).fullmatch(path) if SCALE.fullmatch(rule.files[0]) else None
        if match is not None and not rule.stacked():
            return rule.files[0].format(**match.groupdict())
    return None


def _written(path: str, name: str, proxy: Any) -> CacheQuantizer:
    form = None if proxy.is_dynamic else static_format(proxy)
    if form is None or not form.symmetric or vars(proxy).get("pre_transform") is not None:
        raise CheckpointError(
            f"{path} quantizes a cache as {proxy.binding.base.__name__}, which no checkpoint can say.\n"
            "  cure: Fp8e4m3OCPActPerTensorFloat or Int8ActPerTensorFloat, whose scale is static; or rules without it"
        )
    return CacheQuantizer(path, name, form, proxy)


def cache_tensors(caches: Sequence[CacheQuantizer]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The scales by name, and `kv_cache_scheme`; both empty without caches.

    Args:
        caches: that are written.

    Raises:
        CheckpointError: keys and values are of different numbers.
    """
    if not caches:
        return {}, {}
    first = caches[0].form
    for each in caches:
        if each.form.kind != first.kind:
            raise CheckpointError(
                f"{caches[0].path} and {each.path} are of different numbers; a checkpoint has one scheme for caches"
            )
    scheme = {"num_bits": 8, "type": first.kind, "symmetric": True, "strategy": "tensor", "dynamic": False}
    tensors = {each.name: np.asarray(each.form.scale, np.float32) for each in caches}
    return tensors, {"kv_cache_scheme": scheme}
