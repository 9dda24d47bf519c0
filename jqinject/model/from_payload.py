"""Unfreezing weights whose float numbers are gone: they begin at their low-bit numbers, on the same scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.dot import FrozenParam
from jqinject.dot.frozen.frozen_form import FrozenForm
from jqinject.dot.frozen.frozen_numbers import Numbers, in_two_levels, quant_tensor_of, scale_of
from jqinject.inject import ExtendedInjector
from jqinject.model.frozen_weights import put_in_place, without_masters
from jqinject.model.quantizing.parameter_sites import PlannedParameter, parameter_site
from jqinject.model.walk import ModelIndex, Path, place_name
from jqinject.nn.base.parameter_site import ParameterSite
from jqinject.nn.base.slots import warn_of_cut_groups
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.program import QuantizedProgram
from jqinject.proxy import WeightQuantProxyFromInjector, stack_of
from jqinject.quant import (
    Fp4e2m1OCPWeightPerChannelFloat,
    Fp6e2m3OCPWeightPerChannelFloat,
    Fp6e3m2OCPWeightPerChannelFloat,
    Fp8e4m3OCPWeightPerChannelFloat,
    Fp8e5m2OCPWeightPerChannelFloat,
    Int8WeightPerChannelFloat,
    IntWeightSymmetricGroupQuant,
    MXFloat4e2m1Weight,
    MXFloat6e2m3Weight,
    MXFloat6e3m2Weight,
    MXFloat8e4m3Weight,
    MXFloat8e5m2Weight,
    NF4WeightPerChannelFloat,
    NVFP4Weight,
    ShiftedUint8WeightGroupQuantFloat,
    ShiftedUint8WeightPerChannelFloat,
)
from jqinject.quant.enums import ScalingPerOutputType
from jqinject.quant_tensor import is_grouped

# Quantizers of minifloats with float scales, and in groups with scales that are powers of two.
MINIFLOATS = {
    "float8_e4m3fn": (Fp8e4m3OCPWeightPerChannelFloat, MXFloat8e4m3Weight),
    "float8_e5m2": (Fp8e5m2OCPWeightPerChannelFloat, MXFloat8e5m2Weight),
    "float6_e2m3fn": (Fp6e2m3OCPWeightPerChannelFloat, MXFloat6e2m3Weight),
    "float6_e3m2fn": (Fp6e3m2OCPWeightPerChannelFloat, MXFloat6e3m2Weight),
    "float4_e2m1fn": (Fp4e2m1OCPWeightPerChannelFloat, MXFloat4e2m1Weight),
}


def unfreeze_from_payload(index: ModelIndex) -> None:
    """Put float weights and their quantizers in the places of the frozen ones that were not kept.

    Raises:
        ValueError: no quantizer is for the numbers of a weight; nothing is changed then.
    """
    stored = without_masters(index)
    for path, frozen in stored.items():
        _quantizer(place_name(path), frozen.numbers, frozen.form)
    nodes = dict(index.places)
    for path, frozen in stored.items():
        name, layer = place_name(path), nodes.get(path[:-1])
        value = frozen.quant_tensor().value
        variable = nnx.Param(value, **_own(frozen.get_metadata()))
        put_in_place(index, frozen, variable)
        if isinstance(layer, QuantWeightLayer) and path[-1] == layer.weight_name:
            proxy = _proxy_of_layer(layer, name, frozen)
        else:
            layer, proxy = _site(index, path, frozen, value)
        _keep_scales(proxy, layer, frozen.numbers, frozen.form, name)


def _proxy_of_layer(layer: QuantWeightLayer, name: str, frozen: FrozenParam) -> WeightQuantProxyFromInjector:
    """A layer with its new quantizer."""
    declared, overrides = _quantizer(name, frozen.numbers, frozen.form)
    where = f"the weight quantizer of {name}"
    proxy = WeightQuantProxyFromInjector(
        declared, layer, overrides=overrides, where=(where, ""), stack=stack_of((layer,))
    )
    warn_of_cut_groups(proxy, layer, where)
    layer.weight_quant = proxy
    return proxy


def _site(
    index: ModelIndex, path: Path, frozen: FrozenParam, value: jax.Array
) -> tuple[ParameterSite, WeightQuantProxyFromInjector]:
    """The new site of a parameter in the model that runs it, with its quantizer."""
    numbers, form = frozen.numbers, frozen.form
    owner_path, owner = _owner(index, path)
    depth = value.ndim - len(form.shape)
    declared, overrides = _quantizer(place_name(path), numbers, form)
    inner, groups = _scaled(numbers, form)
    scale = inner.scale if groups is None else jnp.squeeze(inner.scale, inner.scale.ndim + groups.dim)
    ndim = len(form.shape)
    scale = scale.reshape((1,) * (value.ndim - scale.ndim) + scale.shape)
    grouped = None if groups is None else groups.dim % ndim
    shared = tuple(
        axis
        for axis in range(ndim)
        if axis == grouped or scale.shape[axis + depth] < value.shape[axis + depth]
    )
    own = tuple(path[len(owner_path) :])
    injector = declared.let(**overrides) if overrides else declared
    planned = PlannedParameter(own, (), injector, depth, shared, summed=form.summed)
    site = parameter_site(ModelIndex(owner), planned, None)
    sites = vars(owner.op_quant).get("weights")
    if sites is None:
        owner.op_quant.weights = sites = nnx.Dict({})
    sites[place_name(own)] = site
    return site, site.weight_quant


def _owner(index: ModelIndex, path: Path) -> tuple[Path, QuantizedProgram]:
    """The model that runs a parameter's contraction as a program, the innermost one."""
    owners = [
        (place, node)
        for place, node in index.places
        if isinstance(node, QuantizedProgram) and path[: len(place)] == place
    ]
    if not owners:
        raise ValueError(f"unfreeze: no model runs {place_name(path)}, so nothing would quantize it")
    return max(owners, key=lambda entry: len(entry[0]))


def _own(metadata: Mapping[str, object]) -> dict[str, Any]:
    return {name: value for name, value in metadata.items() if value is not None} | {"eager_sharding": False}


def _scaled(numbers: Numbers, form: FrozenForm) -> tuple[Any, Any]:
    """The weight with its groups as an axis, and these."""
    tensor = quant_tensor_of(numbers, form)
    return (tensor.grouped, tensor.groups) if is_grouped(tensor) else (tensor, None)


def _quantizer(
    path: str, numbers: Numbers, form: FrozenForm
) -> tuple[type[ExtendedInjector], dict[str, object]]:
    """The injector that rounds to the numbers' grid, and what is declared anew."""
    if form.cut is not None:
        raise ValueError(f"unfreeze: {path} has groups that cross shards.\n  cure: gather the model first")
    if form.in_turn is not None:
        raise ValueError(
            f"unfreeze: {path} has groups of outputs that lie in turn (HQQ's axis 0), which no quantizer makes.\n"
            "  cure: unfreeze(model), for float weights; or a checkpoint with axis = 1"
        )
    groups = form.groups
    overrides: dict[str, object] = {}
    if groups is not None:
        overrides = {"group_size": groups.size, "group_dim": groups.dim, "group_padding": True}
    if form.grid.is_table:
        by_group = {} if groups is None else {"scaling_per_output_type": ScalingPerOutputType.GROUP}
        return NF4WeightPerChannelFloat, overrides | by_group | {"codebook": form.grid}
    if form.grid.is_minifloat:
        name = "" if form.grid.dtype is None else form.grid.dtype.name
        if name not in MINIFLOATS:
            raise ValueError(f"unfreeze: {path} is {form.grid}, which no quantizer of weights is for")
        plain, powers = MINIFLOATS[name]
        if groups is None:
            return plain, overrides
        if numbers["scale"].dtype == jnp.float8_e8m0fnu:
            return powers, overrides
        if "scale_factor" in numbers and name == "float4_e2m1fn" and _has_two_levels(scale_of(numbers)):
            return NVFP4Weight, overrides
        return plain, overrides | {"scaling_per_output_type": ScalingPerOutputType.GROUP}
    bits = {"bit_width": form.grid.bit_width}
    if "zero_point" in numbers:
        rounding = {} if form.whole_zero_point else {"quantize_zero_point": False}
        shifted = ShiftedUint8WeightPerChannelFloat if groups is None else ShiftedUint8WeightGroupQuantFloat
        return shifted, overrides | bits | rounding
    plain = Int8WeightPerChannelFloat if groups is None else IntWeightSymmetricGroupQuant
    return plain, overrides | bits | {"narrow_range": False, "signed": form.grid.signed}


def _has_two_levels(scale: jax.Array) -> bool:
    """Whether freezing finds the bytes of the scales again, as it does where one of them is the largest byte."""
    codes, factor = in_two_levels(scale, np.dtype(jnp.float8_e4m3fn))
    return bool(jnp.all(codes.astype(jnp.float32) * factor == scale))


def _keep_scales(
    proxy: WeightQuantProxyFromInjector, layer: object, numbers: Numbers, form: FrozenForm, path: str
) -> None:
    """Commit a quantizer to the scales and zero points of frozen numbers."""
    inner, _ = _scaled(numbers, form)
    proxy.commit(layer)
    assert proxy.record is not None, "made by commit"
    record, chosen = dict(proxy.record[...]), {"scale": inner.scale}
    if "zero_point" in record and "zero_point" in numbers:
        chosen["zero_point"] = inner.zero_point + (2 ** (form.grid.bit_width - 1) if form.grid.signed else 0)
    for name, value in chosen.items():
        shape = record[name].shape
        padded = value.reshape((1,) * (len(shape) - value.ndim) + value.shape)
        if len(padded.shape) != len(shape) or any(
            n not in (1, m) for n, m in zip(padded.shape, shape, strict=True)
        ):
            raise ValueError(
                f"unfreeze: {path} has scales of {tuple(value.shape)}, its quantizer {tuple(shape)}.\n"
                "  cure: load_state of a float checkpoint, into a model that was not frozen"
            )
        record[name] = jnp.broadcast_to(padded, shape).astype(np.float32)
    proxy.record.set_value(record)
