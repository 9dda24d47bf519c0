"""Unfreezing weights whose float numbers are gone: they begin at their low-bit numbers, on the same scales."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject import quant
from jqinject.dot import FrozenParam
from jqinject.dot.frozen.frozen_numbers import in_two_levels, scale_of
from jqinject.inject import ExtendedInjector
from jqinject.model.frozen_weights import WeightHolder, float_param, put_in_place, without_masters
from jqinject.model.quantizing.parameter_sites import parameter_site
from jqinject.model.walk import ModelIndex, Path, place_name
from jqinject.nn.base.parameter_site import ParameterSite, PlannedParameter
from jqinject.nn.base.slots import WEIGHT, make_proxy
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.nn.freeze_layer import stored_record
from jqinject.program import QuantizedProgram
from jqinject.quant.minifloat.blocks import Fp8e4m3ConstScales

# Quantizers of minifloats with float scales, and in groups with scales that are powers of two.
MINIFLOATS = {
    "float8_e4m3fn": (quant.Fp8e4m3OCPWeightPerChannelFloat, quant.MXFloat8e4m3Weight),
    "float8_e5m2": (quant.Fp8e5m2OCPWeightPerChannelFloat, quant.MXFloat8e5m2Weight),
    "float6_e2m3fn": (quant.Fp6e2m3OCPWeightPerChannelFloat, quant.MXFloat6e2m3Weight),
    "float6_e3m2fn": (quant.Fp6e3m2OCPWeightPerChannelFloat, quant.MXFloat6e3m2Weight),
    "float4_e2m1fn": (quant.Fp4e2m1OCPWeightPerChannelFloat, quant.MXFloat4e2m1Weight),
}


def unfreeze_from_payload(index: ModelIndex) -> None:
    """Put float weights and their quantizers in the places of the frozen ones that were not kept.

    Raises:
        ValueError: no quantizer is for the numbers of a weight; nothing is changed then.
    """
    stored = without_masters(index)
    quantizers = {path: _quantizer(place_name(path), frozen) for path, frozen in stored.items()}
    for path, frozen in stored.items():
        layer, (declared, overrides) = index.nodes.get(path[:-1]), quantizers[path]
        value = frozen.quant_tensor().value
        put_in_place(index, frozen, float_param(frozen, value))
        if isinstance(layer, QuantWeightLayer) and path[-1] == layer.weight_name:
            layer.weight_quant = make_proxy(layer, WEIGHT, declared, overrides, None, layer._facts())
        else:
            layer = _site(index, path, frozen, value, declared.let(**overrides))
        _keep_scales(layer, frozen, place_name(path))


def _site(
    index: ModelIndex, path: Path, frozen: FrozenParam, value: jax.Array, quantizer: type[ExtendedInjector]
) -> ParameterSite:
    """The new site of a parameter in the innermost model that runs it, with its quantizer."""
    owners = [
        (at, node)
        for at, node in index.places
        if isinstance(node, QuantizedProgram) and path[: len(at)] == at
    ]
    if not owners:
        raise ValueError(f"unfreeze: no model runs {place_name(path)}, so nothing would quantize it")
    owner_path, owner = owners[-1]
    form, scale = frozen.form, frozen.numbers["scale"]
    depth = value.ndim - len(form.shape)
    sizes = scale.shape if form.groups is None else jnp.squeeze(scale, scale.ndim + form.groups.dim).shape
    shared = tuple(axis - depth for axis in range(depth, value.ndim) if sizes[axis] < value.shape[axis])
    own = path[len(owner_path) :]
    planned = PlannedParameter(own, quantizer, depth, shared, summed=form.summed)
    site = parameter_site(ModelIndex(owner), planned, None)
    sites = vars(owner.op_quant).get("weights")
    if sites is None:
        owner.op_quant.weights = sites = nnx.Dict({})
    sites[place_name(own)] = site
    return site


def _quantizer(path: str, frozen: FrozenParam) -> tuple[type[ExtendedInjector], dict[str, object]]:
    """The injector that rounds to the numbers' grid, and what is declared anew."""
    numbers, form = frozen.numbers, frozen.form
    if form.cut is not None:
        raise ValueError(f"unfreeze: {path} has groups that cross shards.\n  cure: gather the model first")
    if form.in_turn is not None:
        raise ValueError(
            f"unfreeze: {path} has groups of outputs that lie in turn (HQQ's axis 0), which no quantizer makes.\n"
            "  cure: unfreeze(model), for float weights; or a checkpoint with axis = 1"
        )
    groups = form.groups
    overrides: dict[str, object] = {}
    by_group: dict[str, object] = {}
    if groups is not None:
        overrides = {"group_size": groups.size, "group_dim": groups.dim, "group_padding": True}
        by_group = {"scaling_per_output_type": quant.enums.ScalingPerOutputType.GROUP}
    if form.grid.is_table:
        return quant.NF4WeightPerChannelFloat, overrides | by_group | {"codebook": form.grid}
    if form.grid.is_minifloat:
        name = "" if form.grid.dtype is None else form.grid.dtype.name
        if name not in MINIFLOATS:
            raise ValueError(f"unfreeze: {path} is {form.grid}, which no quantizer of weights is for")
        plain, powers = MINIFLOATS[name]
        if groups is not None and numbers["scale"].dtype == jnp.float8_e8m0fnu:
            return powers, overrides
        two_levels = groups is not None and "scale_factor" in numbers and name == "float4_e2m1fn"
        scales = _two_levels(numbers) if two_levels else None
        if scales is not None:
            return quant.NVFP4Weight, overrides | scales
        return plain, overrides | by_group
    plain, shifted = quant.Int8WeightPerChannelFloat, quant.ShiftedUint8WeightPerChannelFloat
    if groups is not None:
        plain, shifted = quant.IntWeightSymmetricGroupQuant, quant.ShiftedUint8WeightGroupQuantFloat
    overrides["bit_width"] = form.grid.bit_width
    if "zero_point" in numbers:
        return shifted, overrides | ({} if form.whole_zero_point else {"quantize_zero_point": False})
    return plain, overrides | {"narrow_range": False, "signed": form.grid.signed}


def _two_levels(numbers: Mapping[str, jax.Array]) -> dict[str, object] | None:
    """What is declared anew of NVFP4, so that freezing finds the bytes of the scales again; None if it would not.

    It does where one of them is the largest byte; other tensors keep their factor as a constant.
    """
    scale, largest = scale_of(numbers), np.float32(448)
    codes, factor = in_two_levels(scale, np.dtype(jnp.float8_e4m3fn))
    factors = np.unique(np.asarray(numbers["scale_factor"]))
    if factors.size == 1 and factor != factors[0] and largest * factors[0] / largest == factors[0]:
        return {"scale_quant": Fp8e4m3ConstScales.let(scaling_init=float(largest * factors[0]))}
    return {} if bool(jnp.all(codes.astype(jnp.float32) * factor == scale)) else None


def _keep_scales(layer: WeightHolder, frozen: FrozenParam, path: str) -> None:
    """Commit a quantizer to the scales and zero points of frozen numbers."""
    numbers, proxy = frozen.numbers, layer.weight_quant
    proxy.commit(layer)
    record = proxy.record[...]
    try:
        chosen = stored_record(numbers, frozen.form, record)
    except ValueError:
        shapes = tuple(scale_of(numbers).shape), tuple(record["scale"].shape)
        raise ValueError(
            f"unfreeze: {path} has scales of {shapes[0]}, its quantizer {shapes[1]}.\n"
            "  cure: load_state of a float checkpoint, into a model that was not frozen"
        ) from None
    proxy.record.set_value({name: x.astype(np.float32) for name, x in chosen.items()})
