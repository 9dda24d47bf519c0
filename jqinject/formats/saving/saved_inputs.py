"""What a file can say of input quantizers and of caches of keys and values: the inverse of `loading.layer_rules`.

A quantizer is written if the one that is loaded gives its numbers to the bit; else it is refused, by path.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core.scaling.of_memory import ConstScaling
from jqinject.core.transforms import Permutation
from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.layouts.compressed_tensors import settings_of_input
from jqinject.formats.loading.layer_rules import LARGEST, cache_proxies, input_quantizer, static_format
from jqinject.formats.loading.loading_plan import CACHE_SCALE, PROXIES
from jqinject.formats.loading.parameter_names import Name
from jqinject.formats.safetensors_files import Values
from jqinject.formats.stored_matrix import InputFormat
from jqinject.model.walk import ModelIndex, place_name
from jqinject.nn import QuantIdentity
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.program import QuantizedProgram, listed
from jqinject.proxy import ActQuantProxyFromInjector, QuantProxyFromInjector
from jqinject.quant_tensor import on_minifloats

CURE = (
    "Int8DynamicActPerRowAbsMax, Int8ActPerTensorMinMax or Int8ActPerTensorFloat, Fp8e4m3OCPDynamicActPerRowFloat, "
    "NVFP4Act; or rules without input_quant"
)
CACHE_CURE = (
    "Fp8e4m3OCPActPerTensorFloat or Int8ActPerTensorFloat, whose scale is static; or rules without it"
)


def input_format_of(proxy: ActQuantProxyFromInjector | None, path: str, permuted: bool) -> InputFormat | None:
    """Return how a layer quantizes its input; None for a float input.

    Args:
        proxy: of the input; None for a float one.
        path: of its weight, for errors.
        permuted: whether the input is permuted before it is quantized.

    Raises:
        CheckpointError: no file can say so.
    """
    if proxy is None or not proxy.is_quant_enabled:
        return None
    inputs = _dynamic(proxy) if proxy.is_dynamic else static_format(proxy)
    inputs = _exact(proxy, inputs, path, "input", CURE)
    if permuted and inputs.group_size is not None:
        raise CheckpointError(
            f"{path}: the input is permuted, then quantized in groups.\n  cure: a scale for the tensor or for each row"
        )
    return inputs


def _dynamic(proxy: ActQuantProxyFromInjector) -> InputFormat:
    """Return the format that a file would have for a quantizer of the tensor itself."""
    sample, size = proxy.sample(), proxy.group_size
    is_float = on_minifloats(sample)
    if is_float and sample.bit_width == 4:
        scales: Any = getattr(proxy.binding.base, "scale_quant", None)
        is_static = getattr(scales, "scaling_impl", None) is ConstScaling
        global_scale = np.asarray([LARGEST / scales.scaling_init], np.float32) if is_static else None
        return InputFormat("float", 4, True, "tensor_group", size, global_scale=global_scale)
    of_rows = np.size(proxy.trial(jnp.ones((2, size or 1))).scale) > 1
    strategy = "group" if size is not None else "token" if of_rows else "tensor"
    return InputFormat("float" if is_float else "int", 8, not proxy.has_zero_point, strategy, size)


def _exact(
    proxy: ActQuantProxyFromInjector, stated: InputFormat | None, path: str, what: str, cure: str
) -> InputFormat:
    """Return what a file says of a quantizer, if the one that is loaded gives its numbers to the bit."""
    if stated is None or not _is_exact(proxy, stated, path):
        raise CheckpointError(
            f"{path}: no checkpoint can say how {proxy.binding.base.__name__} quantizes the {what}: what is loaded "
            f"would compute other numbers.\n  cure: {cure}"
        )
    return stated


def _is_exact(proxy: ActQuantProxyFromInjector, inputs: InputFormat, path: str) -> bool:
    """Return whether the quantizer that is loaded for a format gives the numbers of the one that is saved, to the bit.

    Both are called: an injector does not show what a mixin, an override or a base of its own changes.
    """
    try:
        loaded = QuantIdentity(input_quantizer(inputs, path)).act_quant
    except CheckpointError:
        return False
    for probe in _probes(proxy, inputs):
        ours, theirs = proxy.trial(probe), loaded.trial(probe)
        pairs = ((ours.value, theirs.value), (ours.scale, theirs.scale), (ours.zero_point, theirs.zero_point))
        are_equal = all(np.array_equal(np.ravel(saved), np.ravel(again)) for saved, again in pairs)
        if type(ours) is not type(theirs) or not are_equal:
            return False
    return True


def _probes(proxy: ActQuantProxyFromInjector, inputs: InputFormat) -> Iterator[jax.Array]:
    """Return inputs that differ between quantizers: numbers next to every tie of rounding, rows of many magnitudes, and
    zeros."""
    columns = inputs.group_size or 64
    ends = np.resize(np.array([1, -1], np.float32), (64, columns if inputs.dynamic else 0))
    scale = np.ravel(proxy.trial(jnp.ones((1, columns)) * (ends[:1] if inputs.dynamic else 1)).scale)[0]
    ties = np.float32(scale) * (np.arange(-300, 300, dtype=np.float32) + np.float32(0.5))
    near = np.concatenate([ties, *(np.nextafter(ties, np.float32(end)) for end in (-np.inf, 0, np.inf))])
    if inputs.dynamic:  # the ends of the range are in every row, so that its scale is known
        near, ends = np.clip(near, -1, 1), ends[:, :2]
    rows = np.concatenate([ends, np.resize(near, (64, columns - ends.shape[1]))], axis=1)
    sizes = np.float32(1.1) ** np.arange(64, dtype=np.float32)[:, None]
    yield from map(jnp.asarray, (rows, rows * sizes, 0 * rows))


def caches_of(
    model: nnx.Module, rules: tuple[Name, ...] | None
) -> tuple[dict[str, np.ndarray], Values, list[ActQuantProxyFromInjector]]:
    """Return what is written of the quantizers of keys and values: their scales by name, and `kv_cache_scheme`, empty
    without caches; and the quantizers.

    Args:
        model: the model.
        rules: of names; None for those that the paths suggest.

    Raises:
        CheckpointError: one has no name, or no static scale of 8 bits; they are of different numbers.
    """
    ends = {proxy: f"{which}_scale" for which, proxy in PROXIES.items()}
    proxies = cache_proxies(model)
    for _, node in ModelIndex(model).places:
        if isinstance(node, QuantizedProgram):
            proxies |= {site.name: node.op_quant.held[site.name] for site in node.op_quant.caches}
    tensors: dict[str, np.ndarray] = {}
    settings: Values = {}
    for path, proxy in proxies.items():
        layer, _, leaf = path.rpartition(".")
        name = _by_rule(path, rules) or (f"{layer}.{ends[leaf]}".lstrip(".") if leaf in ends else None)
        if name is None:
            raise CheckpointError(
                f"no name is for the scale of cache {path}.\n  cure: names={{..., 'self_attn.k_scale': {path!r}}}"
            )
        form = None if proxy.is_dynamic else static_format(proxy)
        is_plain = form is not None and form.symmetric and vars(proxy).get("pre_transform") is None
        form = _exact(proxy, form if is_plain else None, path, "cache", CACHE_CURE)
        tensors[name] = np.asarray(form.scale, np.float32)
        scheme = settings_of_input(form)
        if settings.setdefault("kv_cache_scheme", scheme) != scheme:
            raise CheckpointError(
                f"{next(iter(proxies))} and {path} differ in their numbers; a file has one scheme for caches"
            )
    return tensors, settings, list(proxies.values())


def _by_rule(path: str, rules: tuple[Name, ...] | None) -> str | None:
    of_caches = (rule for rule in rules or () if CACHE_SCALE.fullmatch(rule.files[0]) and not rule.stacked())
    matches = ((rule, rule.matches_path(path)) for rule in of_caches)
    return next((rule.files[0].format(**match[1]) for rule, match in matches if match is not None), None)


def refuse_other_quantizers(
    model: nnx.Module, orders: Sequence[np.ndarray], caches: Sequence[ActQuantProxyFromInjector]
) -> None:
    """Raise if the model quantizes more than what is written: weights, inputs of their layers, and caches.

    Args:
        model: the model.
        orders: of the inputs of parameters without a layer, which are written.
        caches: quantizers of keys and values, whose scales are written.

    Raises:
        CheckpointError: names the quantizers.
    """
    places = ModelIndex(model).places
    layers = [node for _, node in places if isinstance(node, QuantWeightLayer) and node.frozen is not None]
    written = {id(proxy) for layer in layers for proxy in (layer.weight_quant, layer.input_quant)}
    written |= {id(proxy) for proxy in caches}
    lost = []
    for path, node in places:
        if isinstance(node, QuantProxyFromInjector) and id(node) not in written:
            transform = vars(node).get("pre_transform")
            order = transform.order.get_value() if isinstance(transform, Permutation) else None
            is_written = order is not None and any(np.array_equal(order, written) for written in orders)
            if node.is_quant_enabled or not (transform is None or is_written):
                lost.append(place_name(path))
    if lost:
        is_frozen = not any(path.endswith("weight_quant") for path in lost)
        frozen_cure = "rules without these, in the model that is saved"
        raise CheckpointError(
            f"checkpoints hold weights and the ranges of their layers' inputs; this model also has {listed(lost, 4)}.\n"
            f"  cure: {frozen_cure if is_frozen else 'save(jqinject.freeze(model), ...)'}"
        )
