"""What a file can say of a layer's input quantizer: the inverse of `loading.loaded_quantizers`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core.scaling.of_memory import ConstScaling
from jqinject.core.transforms import Permutation
from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.loading.loaded_quantizers import LARGEST, input_quantizer, static_format
from jqinject.formats.saving.saved_caches import CacheQuantizer
from jqinject.formats.saving.weights import Weight
from jqinject.formats.stored_matrix import InputFormat
from jqinject.model.walk import ModelIndex, dotted
from jqinject.nn import QuantIdentity
from jqinject.proxy import QuantProxyFromInjector
from jqinject.quant_tensor import on_minifloats

CURE = (
    "Int8DynamicActPerRowAbsMax, Int8ActPerTensorMinMax or Int8ActPerTensorFloat, Fp8e4m3OCPDynamicActPerRowFloat, "
    "NVFP4Act; or rules without input_quant"
)


def input_format_of(layer: Any, path: str, permuted: bool = False) -> InputFormat | None:
    """How a layer quantizes its input; None for a float input.

    Args:
        layer: a frozen layer; None for a parameter without one.
        path: of its weight, for errors.
        permuted: whether the input is permuted before it is quantized.

    Raises:
        CheckpointError: no file can say so.
    """
    proxy = getattr(layer, "input_quant", None)
    if proxy is None or not proxy.is_quant_enabled:
        return None
    found = _dynamic(proxy) if proxy.is_dynamic else static_format(proxy)
    if found is None or not _is_exact(proxy, found, path):
        raise CheckpointError(
            f"{path}: no checkpoint can say how {proxy.binding.base.__name__} quantizes the input: what is loaded "
            f"would compute other numbers.\n  cure: {CURE}"
        )
    if permuted and found.group_size is not None:
        raise CheckpointError(
            f"{path}: the input is permuted and then quantized in groups, which no checkpoint can say.\n"
            "  cure: an input quantizer with a scale for the tensor or for each row"
        )
    return found


def _dynamic(proxy: Any) -> InputFormat | None:
    """The format that a file would have for a quantizer of the tensor at hand, if it has one."""
    sample, size = proxy.sample(), proxy.group_size
    is_float = on_minifloats(sample)
    if is_float and sample.bit_width == 4:
        scales: Any = getattr(proxy.binding.base, "scale_quant", None)
        is_static = getattr(scales, "scaling_impl", None) is ConstScaling
        whole = np.asarray([LARGEST / scales.scaling_init], np.float32) if is_static else None
        return InputFormat("float", 4, True, "tensor_group", size, global_scale=whole)
    of_rows = np.size(proxy.trial(jnp.ones((2, size or 1))).scale) > 1
    strategy = "group" if size is not None else "token" if of_rows else "tensor"
    return InputFormat("float" if is_float else "int", 8, not proxy.has_zero_point, strategy, size)


def _is_exact(proxy: Any, given: InputFormat, path: str) -> bool:
    """Whether the quantizer that is loaded for a format gives the numbers of the one that is saved, to the bit.

    Both are called: an injector does not show what a mixin, an override or a base of its own changes.
    """
    try:
        loaded = QuantIdentity(input_quantizer(given, path)).act_quant
    except CheckpointError:
        return False
    for probe in _probes(proxy, given):
        ours, theirs = proxy.trial(probe), loaded.trial(probe)
        if type(ours) is not type(theirs) or not all(
            np.array_equal(np.ravel(getattr(ours, name)), np.ravel(getattr(theirs, name)))
            for name in ("value", "scale", "zero_point")
        ):
            return False
    return True


def _probes(proxy: Any, given: InputFormat) -> Iterator[jax.Array]:
    """Inputs that tell quantizers apart: numbers beside every tie of rounding, rows of many magnitudes, and zeros."""
    columns = given.group_size or 64
    ends = np.resize(np.array([1, -1], np.float32), (64, columns if given.dynamic else 0))
    scale = np.ravel(proxy.trial(jnp.ones((1, columns)) * (ends[:1] if given.dynamic else 1)).scale)[0]
    ties = np.float32(scale) * (np.arange(-300, 300, dtype=np.float32) + np.float32(0.5))
    near = np.concatenate([ties, *(np.nextafter(ties, np.float32(end)) for end in (-np.inf, 0, np.inf))])
    if given.dynamic:  # the ends of the range are in every row, so that its scale is known
        near, ends = np.clip(near, -1, 1), ends[:, :2]
    rows = np.concatenate([ends, np.resize(near, (64, columns - ends.shape[1]))], axis=1)
    sizes = np.float32(1.1) ** np.arange(64, dtype=np.float32)[:, None]
    yield from map(jnp.asarray, (rows, rows * sizes, 0 * rows))


def refuse_other_quantizers(
    model: nnx.Module, weights: Sequence[Weight], caches: Sequence[CacheQuantizer] = ()
) -> None:
    """Raise if the model quantizes more than what is written: weights, inputs of their layers, and caches.

    Args:
        model: the model.
        weights: what is written.
        caches: whose scales are written.

    Raises:
        CheckpointError: names the quantizers, or that of a cache which would be loaded as another.
    """
    for each in caches:
        if not _is_exact(each.proxy, each.form, each.path):
            raise CheckpointError(
                f"{each.path}: no checkpoint can say how {each.proxy.binding.base.__name__} quantizes the cache: what "
                "is loaded would compute other numbers.\n  cure: Fp8e4m3OCPActPerTensorFloat or Int8ActPerTensorFloat"
            )
    written = {
        id(getattr(each.stack, name, None)) for each in weights for name in ("weight_quant", "input_quant")
    }
    written |= {id(each.proxy) for each in caches}
    orders = [each.order for each in weights if each.layer is None and each.order is not None]
    lost = []
    for path, node in ModelIndex(model).places:
        if isinstance(node, QuantProxyFromInjector) and id(node) not in written:
            transform = vars(node).get("pre_transform")
            if node.is_quant_enabled or not (transform is None or _is_written(transform, orders)):
                lost.append(dotted(path))
    if lost:
        shown = ", ".join(lost[:4]) + (f" and {len(lost) - 4} more" if len(lost) > 4 else "")
        frozen = not any(path.endswith("weight_quant") for path in lost)
        cure = (
            "rules without these, in the model that is saved"
            if frozen
            else "save(jqinject.freeze(model), ...)"
        )
        raise CheckpointError(
            f"checkpoints hold weights and the ranges of their layers' inputs; this model also has {shown}.\n"
            f"  cure: {cure}"
        )


def _is_written(transform: Any, orders: Sequence[np.ndarray]) -> bool:
    """Whether a transform before a parameter without a layer is an order of columns that is written."""
    known = isinstance(transform, Permutation)
    return known and any(np.array_equal(transform.order.get_value(), order) for order in orders)
