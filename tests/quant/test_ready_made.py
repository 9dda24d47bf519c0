"""Every ready-made quantizer in every layer that it fits: on its grid, under jit, in copies and checkpoints, frozen."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jqinject
from jqinject import IntQuantTensor
from jqinject.catalogue import entry_of
from jqinject.catalogue.entries import ready_made
from jqinject.catalogue.examples import example_of, kind_of, left_to_users
from jqinject.dot import FrozenParam
from jqinject.nn import (
    QuantConv,
    QuantConvTranspose,
    QuantEinsum,
    QuantEmbed,
    QuantHardTanh,
    QuantIdentity,
    QuantLinear,
    QuantLinearGeneral,
    QuantReLU,
    QuantSigmoid,
    QuantTanh,
    TruncAvgPool,
)
from jqinject.quant import Int8ActPerTensorFloat
from jqinject.quant.integer.decoupled_int import AccumulatorAwareWeightQuant
from jqinject.quant_tensor import CodebookQuantTensor, FloatQuantTensor, GroupwiseQuantTensor

NEEDS = {
    "Int8ActPerTensorFloatBatchQuant1d": {"scaling_stats_permute_dims": (3, 0, 1, 2)},  # X has four axes
    "Uint8ActPerTensorFloatBatchQuant1d": {"scaling_stats_permute_dims": (3, 0, 1, 2)},
    "Int4WeightPerGroupAbsMax": {"group_padding": True},
}
# A row or group of numbers below 0 lies up to 510 steps from its zero point, where bfloat16 has 256 numbers.
BEYOND_BFLOAT16 = ("ShiftedUint8DynamicActPerRowFloat", "ShiftedUint8DynamicActPerGroupFloat")
X = jax.random.normal(jax.random.key(0), (3, 5, 5, 4))


def by_kind(kind):
    found = ((name, found) for name, found in ready_made().items() if not name.startswith("None"))
    return [name for name, quantizer in found if kind_of(quantizer) == kind]


def make_linear(**given):
    return QuantLinear(4, 6, **given)


def make_conv(**given):
    return QuantConv(4, 6, (3, 3), **given)


def make_conv_transpose(**given):
    return QuantConvTranspose(4, 6, (2, 2), **given)


def make_general(**given):
    return QuantLinearGeneral(4, (2, 3), **given)


def make_einsum(**given):
    return QuantEinsum("...c,cd->...d", (4, 6), (6,), **given)


def make_embed(bias_init=None, **given):
    return QuantEmbed(7, 4, **given)


def make_act(layer):
    return lambda *, rngs, dtype=None, param_dtype=None, **given: layer(rngs=rngs, **given)


WEIGHT_LAYERS = {
    "linear": make_linear,
    "conv": make_conv,
    "conv_transpose": make_conv_transpose,
    "general": make_general,
    "einsum": make_einsum,
    "embed": make_embed,
}
ACT_LAYERS = {
    kind.__name__: make_act(kind)
    for kind in (QuantIdentity, QuantReLU, QuantSigmoid, QuantTanh, QuantHardTanh)
}
LAYERS = {**WEIGHT_LAYERS, **ACT_LAYERS}


def fits(name, layer):
    """Weights that go by their input's bits need a layer with an input that is quantized."""
    return layer != "embed" or not issubclass(ready_made()[name], AccumulatorAwareWeightQuant)


def mechanism(name):
    """What a layer may have to do with: the component that quantizes, what shares a scale, where it comes from."""
    entry = entry_of(name)
    quantizer = example_of(ready_made()[name], {}).proxy.tensor_quant
    return entry.kind, type(quantizer).__name__, entry.granularity, entry.scaling


# Of quantizers with the same parts one is tried in layers of every kind; the others are in the exhaustive table.
FIRSTS = set(
    {mechanism(name): name for name in reversed(ready_made()) if not name.startswith("None")}.values()
)


def case(slot, name, layer):
    plainest = layer in ("linear", "QuantIdentity") and slot in ("weight_quant", "bias_quant", "act_quant")
    marks = () if plainest or name in FIRSTS else (pytest.mark.exhaustive,)
    return pytest.param(slot, name, layer, marks=marks)


EVERYWHERE = [
    *(
        case("weight_quant", name, layer)
        for name in by_kind("weight")
        for layer in WEIGHT_LAYERS
        if fits(name, layer)
    ),
    *(
        case("bias_quant", name, layer)
        for name in by_kind("bias")
        for layer in ("linear", "conv", "conv_transpose")
    ),
    *(case("act_quant", name, layer) for name in by_kind("act") for layer in ACT_LAYERS),
    *(case("input_quant", name, "linear") for name in by_kind("act")),
    # The 6 outputs have no Hadamard matrix.
    *(
        case("output_quant", name, "linear")
        for name in by_kind("act")
        if "PerChannel" not in name and not name.startswith("TurboQuant")
    ),
]
# Each quantizer in the plainest layer: those with the same parts as another in the exhaustive table.
ONCE = [
    pytest.param(slot, name, layer, marks=() if name in FIRSTS else (pytest.mark.exhaustive,))
    for kind, slot, layer in (
        ("weight", "weight_quant", "linear"),
        ("bias", "bias_quant", "linear"),
        ("act", "act_quant", "QuantIdentity"),
    )
    for name in by_kind(kind)
]
FROZEN = [
    pytest.param(name, marks=() if name in FIRSTS else (pytest.mark.exhaustive,))
    for name in by_kind("weight")
]


def builder(slot, name, layer):
    """A function that builds a layer with the quantizer in the slot."""
    quantizer = ready_made()[name]
    prefix = "" if slot == "act_quant" else slot.removesuffix("quant")
    declared = {**left_to_users(quantizer), **NEEDS.get(name, {})}
    if "group_size" in declared:
        declared["group_size"] = 3  # does not divide the 4 features that there are
    given = {slot: quantizer, **{prefix + key: value for key, value in declared.items()}}
    if (slot == "bias_quant" and "InternalScaling" not in name) or issubclass(
        quantizer, AccumulatorAwareWeightQuant
    ):
        given["input_quant"] = Int8ActPerTensorFloat
    if slot != "act_quant":
        given["bias_init"] = nnx.initializers.normal(0.5)
    return lambda seed=0, **more: LAYERS[layer](rngs=nnx.Rngs(seed), **given, **more)


def input_for(layer, dtype=jnp.float32):
    return jnp.array([[0, 3], [6, 1]]) if isinstance(layer, QuantEmbed) else X.astype(dtype)


def quantized(layer, slot, dtype):
    """The quantizer's own result in a forward pass of the layer."""
    if slot == "weight_quant":
        return layer.quant_weight()
    if slot == "bias_quant":
        return layer.quant_bias(None if layer.input_quant is None else layer.input_quant(X.astype(dtype)))
    proxy = getattr(layer, slot)
    return (proxy.quantize_for_cache if proxy.undo_transform else proxy)(X.astype(dtype))


def on_the_grid(result):
    """Whether every number is one that the format has."""
    plain = result.grouped if isinstance(result, GroupwiseQuantTensor) else result
    if isinstance(plain, FloatQuantTensor):
        numbers = np.abs(np.asarray(plain.minifloat(), np.float32))
        return numbers.max() <= plain.known_format("a test").largest
    if isinstance(plain, CodebookQuantTensor):
        return plain.codes().max() < len(plain.codebook.values)
    numbers, bits = np.asarray(plain.int(float_datatype=True)), int(plain.bit_width)
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if plain.signed else (0, 2**bits - 1)
    return bool(low <= numbers.min() and numbers.max() <= (1 if bits == 1 else high))


def numbers(module):
    return jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(module)))


@pytest.mark.heavy
@pytest.mark.parametrize(("slot", "name", "layer"), EVERYWHERE)
def test_on_the_grid_in_every_layer_and_dtype(slot, name, layer):
    build = builder(slot, name, layer)
    for dtype in (jnp.float32, jnp.bfloat16):
        made = build(dtype=dtype, param_dtype=dtype)
        y = made(input_for(made, dtype))
        assert y.dtype == dtype
        assert bool(jnp.all(jnp.isfinite(y.astype(jnp.float32))))
        if dtype == jnp.bfloat16 and name in BEYOND_BFLOAT16:
            continue
        result = quantized(made, slot, dtype)
        assert (result.is_valid, result.scale.dtype, result.value.dtype) == (True, jnp.float32, dtype)
        assert bool(jnp.all(result.scale > 0))
        assert on_the_grid(result)


@pytest.mark.parametrize(("slot", "name", "layer"), ONCE)
def test_compiled_with_finite_gradients(slot, name, layer):
    build = builder(slot, name, layer)
    plain, compiled = build(), build()
    step = nnx.jit(nnx.value_and_grad(lambda module: jnp.sum(module(X) * jnp.cos(X.sum()))))
    for _ in range(2):
        expected = jnp.sum(plain(X) * jnp.cos(X.sum()))
        loss, gradients = step(compiled)
    np.testing.assert_allclose(loss, expected, rtol=1e-4, atol=1e-3)
    assert all(bool(jnp.all(jnp.isfinite(g))) for g in jax.tree.leaves(gradients))
    for mine, theirs in zip(jax.tree.leaves(numbers(plain)), jax.tree.leaves(numbers(compiled)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("slot", "name", "layer"), ONCE)
def test_copies_and_checkpoints_compute_the_same(slot, name, layer, tmp_path):
    build = builder(slot, name, layer)
    made, loaded, restored = build(), build(seed=1), build(seed=2)
    made(X)
    jqinject.load_state(loaded, nnx.state(made))
    state = nnx.to_pure_dict(nnx.state(made))
    if state:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "state", state)
        with ocp.StandardCheckpointer() as checkpointer:
            state = checkpointer.restore(tmp_path / "state", state)
    jqinject.load_state(restored, state)
    copies = [nnx.clone(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made)), loaded, restored]
    expected = made(X)
    for other in copies:
        np.testing.assert_array_equal(other(X), expected)
        jax.tree.map(np.testing.assert_array_equal, numbers(other), numbers(made))
        assert nnx.graphdef(other) == nnx.graphdef(made)


@pytest.mark.heavy
@pytest.mark.parametrize("name", FROZEN)
def test_frozen_it_computes_what_it_evaluated(name):
    build = builder("weight_quant", name, "linear")
    made = build()
    made(X)
    made.eval()
    expected, weight = made(X), made.quant_weight()
    frozen = jqinject.freeze(nnx.clone(made))
    assert isinstance(frozen.kernel, FrozenParam) and frozen.weight_quant is None
    np.testing.assert_allclose(frozen.quant_weight().value, weight.value, rtol=1e-6)
    np.testing.assert_allclose(frozen(X), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", by_kind("trunc"))
def test_accumulators_are_cut_in_both_dtypes(name):
    for dtype in (jnp.float32, jnp.bfloat16):
        sums = IntQuantTensor.from_int(jnp.arange(-1024, 1024).reshape(1, -1, 1), 0.5, 0.0, 11, signed=True)
        pool = TruncAvgPool((2,), strides=(2,), trunc_quant=ready_made()[name])
        for layer in (pool, nnx.clone(pool), pickle.loads(pickle.dumps(pool))):
            cut = nnx.jit(lambda m, x: m(x))(layer, sums.astype(dtype))
            assert (cut.dtype, cut.bit_width, cut.signed, cut.scale.dtype) == (dtype, 8, True, jnp.float32)
            assert on_the_grid(cut)


@pytest.mark.parametrize("layer", ["linear", "conv"])
def test_no_quantizers_quantize_nothing(layer):
    given = {"weight_quant": "NoneWeightQuant", "bias_quant": "NoneBiasQuant", "input_quant": "NoneActQuant"}
    plain = LAYERS[layer](rngs=nnx.Rngs(0), **dict.fromkeys(given))
    off = LAYERS[layer](rngs=nnx.Rngs(0), **{slot: ready_made()[name] for slot, name in given.items()})
    np.testing.assert_array_equal(off(X), plain(X))
    assert not any(getattr(off, slot).is_quant_enabled for slot in given)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("slot", "name", "layer"), ONCE)
def test_in_bfloat16_it_trains_is_copied_and_frozen(slot, name, layer):
    made = builder(slot, name, layer)(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    x = X.astype(jnp.bfloat16)
    step = nnx.jit(nnx.value_and_grad(lambda module: jnp.sum(module(x).astype(jnp.float32))))
    for _ in range(2):
        gradients = step(made)[1]
    assert all(bool(jnp.all(jnp.isfinite(g))) for g in jax.tree.leaves(gradients))
    if slot != "act_quant":
        assert gradients.kernel.dtype == jnp.bfloat16
    for other in (nnx.clone(made), pickle.loads(pickle.dumps(made))):
        np.testing.assert_array_equal(other(x), nnx.clone(made)(x))
    made.eval()
    expected = made(x)
    frozen = jqinject.freeze(nnx.clone(made))
    assert frozen(x).dtype == expected.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        frozen(x).astype(jnp.float32), expected.astype(jnp.float32), rtol=2**-7, atol=2**-5
    )
