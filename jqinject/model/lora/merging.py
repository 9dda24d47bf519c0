"""`merge_lora`: puts low-rank updates into the weights."""

from __future__ import annotations

from typing import Any, TypeVar

import jax.numpy as jnp
from flax import nnx

from jqinject.dot import READS_WHOLE, FrozenParam
from jqinject.model.lora.factors import dense_update
from jqinject.model.quantizing.parameter_sites import parameter_site
from jqinject.model.quantizing.rules import matches_path
from jqinject.model.site_freezing import frozen_parameter, put_in_place
from jqinject.model.walk import ModelIndex, Path, dotted
from jqinject.program import HELD, Adapter, QuantizedProgram, change_class, program_class_of

Model = TypeVar("Model", bound=nnx.Module)


def merge_lora(model: Model, path: str = ".*", *, rngs: nnx.Rngs | None = None) -> Model:
    """Put adapters into the weights, in place: w becomes `w + (alpha / rank) A B`, and the adapter is removed.

    A float weight takes the update up to rounding in its dtype. A quantized one is dequantized, updated and quantized
    again by its rule, with new scales, so it is rounded a second time: the error of the base's format is in the output
    twice, and updates below half a step of the format are lost. Memory: one float weight at a time.

    Args:
        model: a model that `jqinject.lora` made, or one that holds such models.
        path: a regular expression for the whole path of a weight, or of the module that holds it.
        rngs: for weight quantizers that draw random numbers.

    Returns:
        The model itself; a float one without quantizers is of its former class again.

    Raises:
        TypeError: `model` is not an NNX module.
        ValueError: no adapter matches; a weight whose rows are looked up too, without the update. Nothing is changed
            then.

    Example:
        >>> from jqinject.model.lora.adapting import lora
        >>> from jqinject.model.quantizing.rules import Rule
        >>> x = jnp.ones((3, 8))
        >>> model = lora(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), Rule(), rank=2, inputs=x, rngs=nnx.Rngs(1))
        >>> type(merge_lora(model)) is nnx.Linear
        True
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(f"merge_lora takes an NNX module, got {type(model).__name__}")
    index = ModelIndex(model)
    held = [(at, node) for at, node in index.places if isinstance(node, QuantizedProgram)]
    chosen = [
        (at, owner, name, adapter)
        for at, owner in held
        for name, adapter in list(owner.op_quant.adapters_by_path().items())
        if matches_path(path, name) or matches_path(path, dotted(adapter.weight_path[:-1]))
    ]
    if not chosen:
        known = [name for _, owner in held for name in owner.op_quant.adapters_by_path()]
        raise ValueError(
            f"merge_lora: no adapter matches {path!r}; here are {', '.join(known[:8]) or 'none'}.\n"
            "  cure: a regular expression for the whole path of a weight"
        )
    looked_up = [f"{name} ({', '.join(adapter.lookups)})" for *_, name, adapter in chosen if adapter.lookups]
    if looked_up:
        raise ValueError(
            f"merge_lora: rows of {', '.join(looked_up)} are looked up too, without the update, which would change.\n"
            "  cure: keep these adapters; merge_lora(model, path) takes a pattern that leaves them out"
        )
    for at, owner, name, adapter in chosen:
        _merge(model, at, adapter, rngs)
        del owner.op_quant.adapters[name]
    for _, owner in held:
        _without_adapters(owner)
    return model


def _merge(model: Any, at: Path, adapter: Adapter, rngs: nnx.Rngs | None) -> None:
    """Put one adapter into its weight."""
    index = ModelIndex(model)
    place = (*at, *map(str, adapter.weight_path))
    variable: Any = dict(index.places)[place]
    value = variable.get_value()
    merged = (value.astype(jnp.float32) + dense_update(adapter, value.shape)).astype(value.dtype)
    if not isinstance(variable, FrozenParam):
        variable.set_value(merged)
        owner: Any = dict(index.places)[at] if at else model
        site = owner.op_quant.weight_sites().get(dotted(adapter.weight_path))
        if site is not None and site.weight_quant is not None:
            site.weight_quant.release(site)
            site.weight_quant.init_tensor_quant(site)
        return
    metadata = {k: v for k, v in variable.get_metadata().items() if k not in ("form", READS_WHOLE)}
    whole = nnx.Param.from_metadata(merged, metadata)
    put_in_place(index, variable, whole)
    owner = dict(index.places)[at] if at else model
    site = parameter_site(ModelIndex(owner), adapter.base, rngs)
    frozen = frozen_parameter(site)
    if variable.get_metadata(READS_WHOLE, False):
        frozen.set_metadata(**{READS_WHOLE: True})
    put_in_place(ModelIndex(model), whole, frozen)


def _without_adapters(owner: Any) -> None:
    held = owner.op_quant
    if held.adapters_by_path():
        return
    if "adapters" in vars(held):
        del held.adapters
    if not (len(held) or held.tied):
        delattr(owner, HELD)
        change_class(owner, program_class_of(type(owner)))
