"""Normalizations with a quantized output: Flax's arithmetic between two quantizers."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject.nn import QuantBatchNorm, QuantGroupNorm, QuantLayerNorm, QuantRMSNorm
from jqinject.quant import Fp8e5m2GradPerTensorCurrent, Int8ActPerTensorFloat, Int8WeightPerTensorFloat

X = 3 * jax.random.normal(jax.random.key(0), (5, 4, 6)) + 1
NO_QUANTIZERS = {"output_quant": None}
call = nnx.jit(lambda model, x: model(x))


@pytest.fixture(scope="module", autouse=True)
def optimized():
    """Two programs are the same to the last bit where both are optimized."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


class Act(Int8ActPerTensorFloat):
    collect_stats_steps = 1


# ours, Flax's, where, given
CASES = {
    "batch": (
        QuantBatchNorm,
        nnx.BatchNorm,
        (6,),
        {"momentum": 0.5, "scale_init": nnx.initializers.normal(1.0)},
    ),
    "batch, bare": (QuantBatchNorm, nnx.BatchNorm, (4,), {"axis": 1, "use_bias": False, "use_scale": False}),
    "layer": (QuantLayerNorm, nnx.LayerNorm, (6,), {"bias_init": nnx.initializers.normal(1.0)}),
    "rms": (QuantRMSNorm, nnx.RMSNorm, (6,), {"epsilon": 0.1}),
    "group": (QuantGroupNorm, nnx.GroupNorm, (6, 3), {"scale_init": nnx.initializers.normal(1.0)}),
    "group by size": (QuantGroupNorm, nnx.GroupNorm, (6, None, 2), {}),
}
every = pytest.mark.parametrize(("ours", "theirs", "where", "given"), CASES.values(), ids=CASES)


@pytest.mark.heavy
@every
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_without_quantizers_it_is_the_parent(ours, theirs, where, given, dtype):
    with jax.numpy_dtype_promotion("standard"):  # Flax's own norms mix dtypes
        check_twins(ours, theirs, where, given, dtype)


def check_twins(ours, theirs, where, given, dtype):
    layer = ours(*where, **given, dtype=dtype, **NO_QUANTIZERS, rngs=nnx.Rngs(0))
    parent = theirs(*where, **given, dtype=dtype, rngs=nnx.Rngs(0))
    for evaluated in (False, True):
        if evaluated:
            layer.eval(), parent.eval()
        y, expected = call(layer, X), call(parent, X)
        assert y.dtype == expected.dtype
        np.testing.assert_array_equal(y, expected)
    jax.tree.map(
        np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(layer)), nnx.to_pure_dict(nnx.state(parent))
    )


@pytest.mark.heavy
@every
def test_the_output_is_quantized_and_the_norm_is_not(ours, theirs, where, given):
    layer = ours(
        *where,
        **given,
        input_quant=Act,
        output_quant=Act,
        output_bit_width=4,
        return_quant_tensor=True,
        rngs=nnx.Rngs(0),
    )
    parent = theirs(*where, **given, rngs=nnx.Rngs(0))
    for _ in range(2):
        y, expected = call(layer, X), parent(layer.input_quant(X).value)
    scale = np.abs(expected).max() / 8
    assert (y.bit_width, y.is_valid) == (4, True)
    np.testing.assert_allclose(y.scale, scale, rtol=1e-4)
    np.testing.assert_allclose(y.value, np.clip(np.round(expected / y.scale), -8, 7) * y.scale, rtol=1e-6)


@pytest.mark.heavy
@every
def test_copies_gradients_and_evaluation(ours, theirs, where, given):
    layer = ours(*where, **given, output_quant=Act, grad_quant=Fp8e5m2GradPerTensorCurrent, rngs=nnx.Rngs(0))
    for _ in range(2):
        call(layer, X)
    gradient = jqinject.grad(lambda x, m: jnp.sum(jnp.sin(m(x))))(X, layer)
    assert bool(jnp.all(jnp.isfinite(gradient))) and float(jnp.abs(gradient).max()) > 0
    assert float(layer.grad_quant.amax_history.newest) > 0
    layer.eval()
    y = call(layer, X)
    np.testing.assert_array_equal(call(layer, X), y)
    for duplicate in (nnx.clone, lambda m: pickle.loads(pickle.dumps(m))):
        np.testing.assert_array_equal(call(duplicate(layer), X), y)
    np.testing.assert_array_equal(call(jqinject.freeze(layer), X), y)


@every
@pytest.mark.parametrize("stacked", [False, True])
def test_a_norm_of_flax_becomes_ours_in_place(ours, theirs, where, given, stacked):
    rngs = nnx.Rngs(0).split(5) if stacked else nnx.Rngs(0)
    build = nnx.vmap if stacked else lambda make: make
    made = build(lambda rngs: ours(*where, **given, output_quant=Act, rngs=rngs))(rngs)
    layer = build(lambda rngs: theirs(*where, **given, rngs=rngs))(
        nnx.Rngs(0).split(5) if stacked else nnx.Rngs(0)
    )
    object.__setattr__(layer, "__class__", ours)
    layer._init_quantizers({"output_quant": Act}, {}, nnx.Rngs(0))
    assert nnx.graphdef(layer) == nnx.graphdef(made)
    run = nnx.jit(nnx.vmap(lambda m, x: m(x), in_axes=(0, None)) if stacked else lambda m, x: m(x))
    for _ in range(2):
        np.testing.assert_array_equal(run(layer, X), run(made, X))


def test_a_mask_and_the_mode_of_a_call_reach_the_norm():
    mask = jnp.arange(6) < 4
    for ours, theirs in ((QuantLayerNorm, nnx.LayerNorm), (QuantRMSNorm, nnx.RMSNorm)):
        layer, parent = ours(6, **NO_QUANTIZERS, rngs=nnx.Rngs(0)), theirs(6, rngs=nnx.Rngs(0))
        np.testing.assert_array_equal(layer(X, mask=mask), parent(X, mask=mask))
        assert not np.array_equal(layer(X, mask=mask), layer(X))
    layer = QuantBatchNorm(6, **NO_QUANTIZERS, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(layer(X, use_running_average=True), X, rtol=1e-4)
    view = nnx.view(layer, use_running_average=True)
    np.testing.assert_array_equal(view(X), layer(X, True))


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (
            {"epsilom": 1e-3},
            TypeError,
            r"QuantLayerNorm takes no argument 'epsilom'(?s:.)*did you mean 'epsilon'",
        ),
        (
            {"output_bitwidth": 3},
            TypeError,
            r"'output_bitwidth' would have no effect(?s:.)*'output_bit_width'",
        ),
        ({"weight_quant": Int8WeightPerTensorFloat}, TypeError, "takes no argument 'weight_quant'"),
        ({"output_quant": Int8WeightPerTensorFloat}, TypeError, "quantizes activations"),
        ({"input_quant": Act, "act_quant": Act}, TypeError, "two names of one argument"),
        (
            {"output_quant": None, "return_quant_tensor": True},
            ValueError,
            r"needs output_quant to have a scale to return.\n  cure",
        ),
    ],
)
def test_wrong_arguments(wrong, error, text):
    with pytest.raises(error, match=text):
        QuantLayerNorm(6, **wrong, rngs=nnx.Rngs(0))


def test_a_quantizer_for_a_place_that_a_norm_does_not_have():
    layer = nnx.LayerNorm(6, rngs=nnx.Rngs(0))
    object.__setattr__(layer, "__class__", QuantLayerNorm)
    with pytest.raises(
        TypeError, match="QuantLayerNorm has no weight_quant: it takes input_quant, output_quant"
    ):
        layer._init_quantizers({"weight_quant": Int8WeightPerTensorFloat}, {}, nnx.Rngs(0))
