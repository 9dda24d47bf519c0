"""`quantized_cache`: the caches of keys and values that a model takes, in low bits by its rules."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.dot import LowBitCache, is_low_bit_cache
from jqinject.inject.errors import did_you_mean
from jqinject.model.walk import ModelIndex, check_module
from jqinject.program import QuantizedProgram, Site, dotted
from jqinject.proxy import ActQuantProxyFromInjector

Cache = TypeVar("Cache")


def quantized_cache(model: nnx.Module, cache: Cache = None) -> Cache:
    """A float cache in low bits, to be given to the model and returned by it in the place of the float one.

    Every array that a rule's `cache_quant` takes becomes a `jqinject.dot.LowBitCache`: its payload, and a float32 scale
    for each position and head (each row along the last axis), or for each group of features. Arrays that no rule takes
    (indices) stay. What the cache holds already is quantized, so it may be an empty one, or one after a float prefill.

    Args:
        model: a model of `quantize`, frozen or not.
        cache: what the model takes: an array, a pytree of arrays (a dict for each layer), a module with Variables, a
            list of these; concrete or abstract. If the model takes caches in several arguments, a dict of them by name.
            None for the Variables that the model itself holds.

    Returns:
        A cache of the same structure, or a copy of the model that shares its other arrays. `cache` is not changed.

    Raises:
        TypeError: `model` is not an NNX module.
        ValueError: the model has no rule for caches, or `cache` holds none of those it has; an array of another rank or
            with other features than the model was quantized with. Named by path.

    Example:
        >>> import jqinject
        >>> from jqinject.quant import Int8DynamicActPerRowFloat
        >>> class Memory(nnx.Module):
        ...     def __call__(self, x, cache):
        ...         cache = jax.lax.dynamic_update_slice(cache, x, (0, 2, 0))
        ...         return cache.sum(1), cache
        >>> empty = jnp.zeros((1, 8, 64))
        >>> rule = jqinject.Rule(cache_quant=Int8DynamicActPerRowFloat)
        >>> model = jqinject.quantize(Memory(), rule, inputs=(jnp.ones((1, 1, 64)), empty))
        >>> cache = quantized_cache(model, empty)
        >>> _, cache = model(jnp.ones((1, 1, 64)), cache)
        >>> empty.nbytes, cache.nbytes, cache[0, 1:4, 0]
        (2048, 544, Array([0.       , 0.9921875, 0.       ], dtype=float32))
    """
    check_module(model, "quantized_cache")
    sites: tuple[Site, ...] = model.op_quant.caches if isinstance(model, QuantizedProgram) else ()  # pyright: ignore
    if not sites:
        raise ValueError(
            f"quantized_cache: {type(model).__name__} has no rule for caches.\n"
            "  cure: jqinject.quantize(model, [..., Rule(cache_quant=Int8DynamicActPerRowFloat)], inputs=...), with "
            "inputs that hold a cache"
        )
    container: object = model if cache is None else cache
    flat, tree = jax.tree_util.tree_flatten_with_path(container, is_leaf=_is_leaf)
    leaves = {dotted(tuple(jax.tree_util.keystr((key,), simple=True) for key in path)): x for path, x in flat}
    copies = nnx.clone(leaves, graph=True)
    names: list[str] = []
    taken = sum(map(is_low_bit_cache, leaves.values()))
    for entry in ModelIndex(copies).variables:
        name, array = ".".join(filter(None, entry.path)), entry.variable.get_value()
        names.append(name)
        site = _site_of(name, sites, cache is None)
        if site is not None and not is_low_bit_cache(array):
            entry.variable.set_value(_quantized(model.op_quant.held[site.name], array, site, name))  # pyright: ignore
        taken += site is not None
    if not taken:
        near = did_you_mean(sites[0].name, names)
        raise ValueError(
            f"quantized_cache: none of the arrays {', '.join(names[:8]) or '(none)'} is a cache that the model's rules "
            f"take: {', '.join(site.name for site in sites[:8])}{'; ' + near if near else ''}.\n"
            "  cure: the argument itself, as in a call; a dict by the arguments' names, for several; "
            "quantized_cache(model), for Variables of the model"
        )
    return jax.tree.unflatten(tree, [copies[name] for name in leaves])


def check_cache_quantizer(site: Site, proxy: ActQuantProxyFromInjector) -> None:
    """Refuse a quantizer whose numbers a cache cannot hold.

    Raises:
        ValueError: it has no payload of at most 8 bits, or shares scales otherwise than by row.
    """
    try:
        jax.eval_shape(lambda: _encoded(proxy, jnp.zeros(site.shape, jnp.float32)))
    except Exception as error:
        error.add_note(f"while the quantizer of the cache {site.name} was tried on {site.shape}")
        raise


def _encoded(proxy: ActQuantProxyFromInjector, x: jax.Array) -> LowBitCache:
    """The rows of an array, through a copy of the quantizer in evaluation mode, whose statistics do not move."""
    copy = nnx.clone(proxy, graph=True)
    copy.eval()
    undone = proxy.pre_transform if proxy.undo_transform else None
    return LowBitCache.of(copy.quantize_for_cache(x), proxy.has_zero_point, undone)


def _quantized(proxy: ActQuantProxyFromInjector, array: Any, site: Site, name: str) -> LowBitCache:
    fits = array.ndim == site.cache_ndim and array.shape[-1:] == site.shape[-1:]
    if not fits or not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(
            f"quantized_cache: {name} is {array.dtype}{list(array.shape)}, and the model was quantized with a "
            f"float cache of {site.cache_ndim} axes and {site.shape[-1]} features in the last.\n"
            "  cure: a cache of that layout; its other sizes are free"
        )
    if proxy.has_range() is False:
        raise ValueError(
            f"quantized_cache: the quantizer of {site.name} ({proxy.binding.base.__name__}) has a static range that "
            "never saw data.\n  cure: jqinject.calibrate(model, batches) first; or "
            "cache_quant=Int8DynamicActPerRowFloat, whose scales come from the rows"
        )
    encode = _encoding(proxy, array.ndim - len(site.shape))
    return (
        jax.eval_shape(encode, array) if isinstance(array, jax.ShapeDtypeStruct) else jax.jit(encode)(array)
    )


def _encoding(proxy: ActQuantProxyFromInjector, stacked: int) -> Callable[..., LowBitCache]:
    """The function that quantizes the rows of a cache, of one that is stacked along leading axes too."""
    encode: Callable[..., LowBitCache] = partial(_encoded, proxy)
    for _ in range(stacked):
        encode = jax.vmap(encode)
    return encode


def bytes_in_low_bits(proxy: ActQuantProxyFromInjector, site: Site, shape: tuple[int, ...]) -> int:
    """Return the bytes that a cache takes in low bits.

    Args:
        proxy: its quantizer.
        site: where the model writes it.
        shape: of the float array.
    """
    encode = _encoding(proxy, len(shape) - len(site.shape))
    return jax.eval_shape(encode, jax.ShapeDtypeStruct(shape, jnp.float32)).nbytes


def _site_of(name: str, sites: Sequence[Site], of_model: bool) -> Site | None:
    """The site of an array by its name, in the model or below an argument."""
    exact = next((site for site in sites if site.name == name), None)
    if exact is not None or of_model:
        return exact
    matching = [site for site in sites if site.name.partition(".")[2] == name]
    if len(matching) > 1:
        raise ValueError(
            f"quantized_cache: {name or 'the array'} may be {' or '.join(site.name for site in matching)}.\n"
            f"  cure: {{{matching[0].name.partition('.')[0]!r}: cache}}, a dict by the arguments' names"
        )
    return matching[0] if matching else None


def _is_leaf(leaf: object) -> bool:
    return isinstance(leaf, nnx.Pytree | nnx.Variable) or is_low_bit_cache(leaf)
