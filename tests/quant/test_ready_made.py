"""Every ready-made quantizer, in every layer that it fits: on the grid, under jit, in copies and checkpoints."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
import jqinject.quant as ready_made
from jqinject import ExtendedInjector
from jqinject.core import AbsMaxRange
from jqinject.nn import (
    QuantConv,
    QuantHardTanh,
    QuantIdentity,
    QuantLinear,
    QuantReLU,
    QuantSigmoid,
    QuantTanh,
)
from jqinject.quant import Int8ActPerTensorFloat
from jqinject.quant_tensor import CodebookQuantTensor, FloatQuantTensor, GroupwiseFloatQuantTensor

QUANTIZERS = {
    name: found
    for name, found in vars(ready_made).items()
    if isinstance(found, type) and issubclass(found, ExtendedInjector)
}


def _named(part):
    return [name for name in QUANTIZERS if part in name and not name.startswith("None")]


# Their largest magnitude lies at 127.5 steps, a tie that a compiler may break either way: here it is clipped.
OFF_THE_TIE = {"calibration_impl": AbsMaxRange(0.99)}
NEEDS = {
    "Int8WeightPerChannelAbsMax": OFF_THE_TIE,
    "Int8WeightPerTensorAbsMax": OFF_THE_TIE,
    "Int4WeightPerGroupAbsMax": {**OFF_THE_TIE, "group_size": 2},
    "IntBias": {"bit_width": 8},
    "Int8ActPerTensorFloatMinMaxInit": {"min_val": -1.0, "max_val": 1.0},
    "Int8ActPerTensorFixedPointMinMaxInit": {"min_val": -1.0, "max_val": 1.0},
    "Uint8ActPerTensorFloatMaxInit": {"max_val": 1.0},
    "Uint8ActPerTensorFixedPointMaxInit": {"max_val": 1.0},
}
# Quantizers of groups whose size is declared where they are used; 3 does not divide the 4 features there are.
OPEN_GROUPS = ("SymmetricGroupQuant", "WeightGroupQuant", "DynamicActPerGroup")
# A row or group of numbers below 0 lies up to 510 steps from its zero point, where bfloat16 has 256 numbers.
BEYOND_BFLOAT16 = ("ShiftedUint8DynamicActPerRowFloat", "ShiftedUint8DynamicActPerGroupFloat")
# Quantizers of a format that is declared where they are used.
OPEN_FORMAT = {"bit_width": 8, "exponent_bit_width": 4, "mantissa_bit_width": 3}
BOUNDS = {
    (1, True): (-1, 1),
    (2, True): (-1, 1),  # narrow
    (4, True): (-8, 7),
    (8, True): (-128, 127),
    (8, False): (0, 255),
    **{(bits, True): (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (16, 24, 32)},
}
X = jax.random.normal(jax.random.key(0), (3, 5, 5, 4))


def _linear(slot, **given):
    return QuantLinear(
        4, 6, bias_init=nnx.initializers.normal(0.5), rngs=nnx.Rngs(given.pop("seed", 0)), **given
    )


def _conv(slot, **given):
    return QuantConv(
        4, 6, (3, 3), bias_init=nnx.initializers.normal(0.5), rngs=nnx.Rngs(given.pop("seed", 0)), **given
    )


def _activation(layer):
    return lambda slot, seed=0, dtype=None, param_dtype=None, **given: layer(**given)


WEIGHT_LAYERS = {"linear": _linear, "conv": _conv}
ACT_LAYERS = {
    layer.__name__: _activation(layer)
    for layer in (QuantIdentity, QuantReLU, QuantSigmoid, QuantTanh, QuantHardTanh)
}
# every quantizer in every layer, and where one layer of a kind stands for the others
CASES = [
    *((slot, name, layer) for slot, part in (("weight_quant", "Weight"), ("bias_quant", "Bias"))
      for name in _named(part) for layer in WEIGHT_LAYERS),
    *(("act_quant", name, layer) for name in _named("Act") for layer in ACT_LAYERS),
    *((slot, name, "linear") for name in _named("Act") for slot in ("input_quant", "output_quant")
      if not (slot == "output_quant" and "PerChannel" in name)),
]  # fmt: skip
FEW = [case for case in CASES if case[2] in ("linear", "QuantIdentity") and case[0] != "output_quant"]


def builder(slot, name, layer):
    """A function that builds a layer with the quantizer in the slot."""
    prefix = "" if slot == "act_quant" else slot.removesuffix("quant")
    more = {prefix + key: found for key, found in NEEDS.get(name, {}).items()}
    if any(part in name for part in OPEN_GROUPS):
        more[prefix + "group_size"] = 3
    if "BatchQuant" in name:
        more[prefix + "scaling_stats_permute_dims"] = (3, 0, 1, 2)  # channels last
    if name.startswith(("FpOCP", "FpFNUZ")):
        more |= {prefix + key: given for key, given in OPEN_FORMAT.items()}
    if "PerChannelFloat2d" in name:
        more[prefix + "scaling_stats_permute_dims"] = (3, 0, 1, 2)  # channels last
        more[prefix + "per_channel_broadcastable_shape"] = (1, 1, 1, 4)
    if slot == "bias_quant" and "InternalScaling" not in name:
        more["input_quant"] = Int8ActPerTensorFloat
    make = {**WEIGHT_LAYERS, **ACT_LAYERS}[layer]
    return lambda **given: make(slot, **{slot: QUANTIZERS[name]}, **more, **given)


def quantized(layer, slot):
    """The quantizer's own result in a forward pass of the layer."""
    if slot == "weight_quant":
        return layer.quant_weight()
    if slot == "bias_quant":
        x = X if layer.input_quant is None else layer.input_quant(X)
        return layer.quant_bias(x)
    return getattr(layer, slot)(X.astype(getattr(layer, "dtype", None) or X.dtype))


def bounds(result):
    """The lowest and the highest number that the payload may hold."""
    if isinstance(result, FloatQuantTensor | GroupwiseFloatQuantTensor):
        highest = result.format.max_value
        return -highest, highest
    if isinstance(result, CodebookQuantTensor):
        return 0, len(result.codebook.values) - 1
    return BOUNDS[result.bit_width, result.signed]


def payload_of(result):
    if isinstance(result, CodebookQuantTensor):
        return result.codes()
    minifloats = isinstance(result, FloatQuantTensor | GroupwiseFloatQuantTensor)
    return result.minifloat() if minifloats else result.int(float_datatype=True)


def numbers(module):
    return jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(module)))


@pytest.mark.parametrize(("slot", "name", "layer"), CASES)
def test_on_the_grid_in_every_dtype(slot, name, layer):
    build = builder(slot, name, layer)
    for dtype in (jnp.float32, jnp.bfloat16):
        layer = build(dtype=dtype, param_dtype=dtype)
        for _ in range(2):
            y = layer(X.astype(dtype))
        assert y.dtype == dtype
        assert bool(jnp.all(jnp.isfinite(y.astype(jnp.float32))))
        if dtype == jnp.bfloat16 and name in BEYOND_BFLOAT16:
            continue
        result = quantized(layer, slot)
        assert (result.is_valid, result.scale.dtype) == (True, jnp.float32)
        assert bool(jnp.all(result.scale > 0))
        lowest, highest = bounds(result)
        payload = np.asarray(payload_of(result), np.float32)
        assert (lowest <= payload).all() and (payload <= highest).all()


@pytest.mark.parametrize(("slot", "name", "layer"), FEW)
def test_jit_and_gradients_are_those_of_the_plain_call(slot, name, layer):
    build = builder(slot, name, layer)
    eager, jitted = build(), build()

    def step(layer):
        return nnx.value_and_grad(lambda m: jnp.sum(m(X) * jnp.cos(X.sum())))(layer)

    for _ in range(2):
        (a, da), (b, db) = step(eager), nnx.jit(step)(jitted)
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)
    jax.tree.map(lambda u, v: np.testing.assert_allclose(u, v, rtol=1e-3, atol=1e-3), da, db)
    assert all(bool(jnp.all(jnp.isfinite(g))) for g in jax.tree.leaves(da))


@pytest.mark.parametrize(("slot", "name", "layer"), FEW)
def test_copies_and_checkpoints_compute_the_same(slot, name, layer):
    build = builder(slot, name, layer)
    layer, loaded = build(), build(seed=1)
    layer(X)
    jqinject.load_state(loaded, nnx.state(layer))
    copies = [nnx.clone(layer), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded]
    expected = layer(X)
    for other in copies:
        np.testing.assert_array_equal(other(X), expected)
        jax.tree.map(np.testing.assert_array_equal, numbers(other), numbers(layer))
        assert nnx.graphdef(other) == nnx.graphdef(layer)


@pytest.mark.parametrize("layer", WEIGHT_LAYERS)
def test_no_quantizers_quantize_nothing(layer):
    given = {"weight_quant": "NoneWeightQuant", "bias_quant": "NoneBiasQuant", "input_quant": "NoneActQuant"}
    plain = dict.fromkeys(given)
    off = WEIGHT_LAYERS[layer]("", **{slot: QUANTIZERS[name] for slot, name in given.items()})
    np.testing.assert_array_equal(off(X), WEIGHT_LAYERS[layer]("", **plain)(X))
    assert not any(getattr(off, slot).is_quant_enabled for slot in given)
