"""The state of layers that contract by a scheme: all of it is there before the first call."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jqinject
from jqinject import Rule, quant
from jqinject.core import Hadamard
from jqinject.dot import QConvGeneralDilated, QDotGeneral, QEinsum, Scheme
from jqinject.nn import QuantConv, QuantEinsum, QuantLinear, QuantLinearGeneral
from jqinject.quant import (
    Fp8DelayedTraining,
    Fp8e4m3ActPerTensorDelayed,
    Int4WeightPerTensorFloatDecoupled,
    Int8ActPerTensorAbsMax,
    Int8ActPerTensorFloat,
    Int8WeightPerChannelFloat,
)

LIBRARY = {
    scheme.__name__: scheme
    for scheme in vars(quant).values()
    if inspect.isclass(scheme) and issubclass(scheme, Scheme)
}
LIBRARY["QuartetII"] = quant.QuartetII.let(hadamard=Hadamard(32))  # the features and rows below
MORE = {
    "learned": Scheme.let(fprop_lhs=Int8ActPerTensorFloat, fprop_rhs=Int4WeightPerTensorFloatDecoupled),
    "channels": Scheme.let(
        fprop_rhs=Int8WeightPerChannelFloat.let(scaling_impl_type="parameter_from_stats"),
        wgrad_lhs=Int8ActPerTensorAbsMax,
    ),
    "tiles": Scheme.let(
        fprop_lhs=Fp8e4m3ActPerTensorDelayed, wgrad_lhs=Int8ActPerTensorAbsMax, wgrad_tile_size=8
    ),
}
SCHEMES = LIBRARY | MORE
LAYERS = {
    "linear": (QuantLinear, nnx.Linear, (32, 32), (32, 32)),
    "general": (QuantLinearGeneral, nnx.LinearGeneral, (32, (2, 32)), (32, 32)),
    "einsum": (QuantEinsum, nnx.Einsum, ("...d,dh->...h", (32, 32)), (8, 32, 32)),
    "conv": (QuantConv, nnx.Conv, (32, 32, (3, 3)), (2, 6, 6, 32)),
}
TRANSFORMS = ("NVFP4Training", "Quartet", "QuartetII")  # which convolutions refuse
CASES = [
    (layer, scheme)
    for layer in LAYERS
    for scheme in SCHEMES
    if not (layer == "conv" and scheme in TRANSFORMS)
]


def leaves(model):
    return {path: np.shape(x) for path, x in nnx.to_flat_state(nnx.state(model)) for x in jax.tree.leaves(x)}


def assert_complete(model, x):
    before, structure = leaves(model), nnx.graphdef(model)
    model(x)
    assert leaves(model) == before and nnx.graphdef(model) == structure


@pytest.mark.heavy
@pytest.mark.parametrize(("layer", "scheme"), CASES)
def test_a_call_makes_no_state(layer, scheme):
    ours, of_flax, arguments, shape = LAYERS[layer]
    x = jax.random.normal(jax.random.key(0), shape)
    assert_complete(ours(*arguments, scheme=SCHEMES[scheme], rngs=nnx.Rngs(0)), x)
    floats = nnx.Sequential(of_flax(*arguments, rngs=nnx.Rngs(0)))
    model = jqinject.quantize(floats, Rule(scheme=SCHEMES[scheme]), rngs=nnx.Rngs(1))
    assert_complete(model, x)
    if scheme in MORE or scheme == "Fp8DelayedTraining":
        assert len(leaves(model)) > 4


BY_HAND = {
    "linear": (lambda op: nnx.Linear(8, 4, dot_general=op, rngs=nnx.Rngs(0)), QDotGeneral, (3, 8)),
    "einsum": (lambda op: nnx.Einsum("bd,df->bf", (8, 4), einsum_op=op, rngs=nnx.Rngs(0)), QEinsum, (3, 8)),
    "conv": (
        lambda op: nnx.Conv(8, 4, (3,), conv_general_dilated=op, rngs=nnx.Rngs(0)),
        QConvGeneralDilated,
        (3, 5, 8),
    ),
}
SHAPES = {
    "linear": dict(lhs_shape=(1, 8), rhs_shape=(8, 4)),
    "einsum": dict(lhs_shape=(1, 8), rhs_shape=(8, 4), equation="bd,df->bf"),
    "conv": dict(lhs_shape=(1, 5, 8), rhs_shape=(3, 8, 4)),
}


@pytest.mark.heavy
@pytest.mark.parametrize("kind", BY_HAND)
def test_a_module_written_by_hand_is_completed_by_its_shapes_or_once_by_initialize(kind):
    make, op, shape = BY_HAND[kind]
    x = jax.random.normal(jax.random.key(0), shape)
    unfinished = make(op(Fp8DelayedTraining))
    with pytest.raises(ValueError, match=r"keeps state(.|\n)*cure: .*lhs_shape=(.|\n)*jqinject.initialize"):
        unfinished(x)
    jqinject.initialize(unfinished, x)
    shaped = make(op(Fp8DelayedTraining, **SHAPES[kind]))
    assert nnx.graphdef(shaped) == nnx.graphdef(unfinished)
    assert leaves(shaped) == leaves(unfinished)
    jqinject.initialize(shaped, jax.ShapeDtypeStruct(x.shape, x.dtype))
    np.testing.assert_array_equal(unfinished(x), shaped(x))
    assert_complete(shaped, x)


def test_what_is_missing_beside_a_shape_is_named():
    with pytest.raises(ValueError, match=r"rhs_shape is missing.*\n  cure: the shapes of both"):
        QDotGeneral(Fp8DelayedTraining, lhs_shape=(1, 8))
    with pytest.raises(ValueError, match=r"equation is missing.*\n  cure: equation="):
        QEinsum(Fp8DelayedTraining, lhs_shape=(1, 8), rhs_shape=(8, 4))
    with pytest.raises(TypeError, match="takes an NNX module, got int"):
        jqinject.initialize(3)


def test_initialize_changes_nothing_but_what_is_missing():
    layers = [nnx.Linear(8, 8, dot_general=QDotGeneral(Fp8DelayedTraining), rngs=nnx.Rngs(n)) for n in (0, 1)]
    model = nnx.Sequential(*layers, nnx.Dropout(0.5, rngs=nnx.Rngs(2)))
    counts = model.layers[2].rngs.count[...]
    jqinject.initialize(model, jnp.ones((4, 8)))
    assert model.layers[2].rngs.count[...] == counts
    structure, before = nnx.graphdef(model), jax.tree.leaves(nnx.state(model))
    jqinject.initialize(model, jnp.ones((4, 8)))
    assert nnx.graphdef(model) == structure
    assert all(one is other for one, other in zip(jax.tree.leaves(nnx.state(model)), before, strict=True))


def test_an_optimizer_made_before_the_first_step_fits_after_it():
    layer = nnx.Linear(8, 4, dot_general=QDotGeneral(MORE["learned"]), rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (16, 8))
    jqinject.initialize(layer, x)
    optimizer = nnx.Optimizer(layer, optax.sgd(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(layer, optimizer):
        loss, gradients = jqinject.value_and_grad(lambda layer: (layer(x) ** 2).mean())(layer)
        optimizer.update(layer, gradients)
        return loss

    losses = [float(step(layer, optimizer)) for _ in range(3)]
    assert losses[-1] < losses[0]


@pytest.mark.heavy
def test_a_parameter_that_a_model_contracts_by_itself():
    class Matrix(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jax.random.normal(jax.random.key(0), (8, 4)))

        def __call__(self, x):
            return x @ self.w

    x = jnp.ones((2, 8))
    for scheme in (Fp8DelayedTraining, MORE["learned"]):
        assert_complete(jqinject.quantize(Matrix(), Rule(scheme=scheme), inputs=(x,)), x)


@pytest.mark.heavy
def test_a_stack_of_layers_is_completed_layer_by_layer():
    @nnx.vmap
    def stack(key):
        return nnx.Linear(8, 8, dot_general=QDotGeneral(Fp8DelayedTraining), rngs=nnx.Rngs(key))

    class Stack(nnx.Module):
        def __init__(self):
            self.layers = stack(jax.random.split(jax.random.key(0), 3))

        def __call__(self, x):
            scan = nnx.scan(lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            return scan(self.layers, x)

    model, x = Stack(), jnp.ones((4, 8))
    with pytest.raises(ValueError, match=r"layers.dot_general belongs to a stack.*\n  cure: nnx.vmap"):
        jqinject.initialize(model, x)
    nnx.vmap(lambda layers, x: jqinject.initialize(layers, x), in_axes=(0, None))(model.layers, x)
    assert_complete(model, x)
    assert all(shape[0] == 3 for path, shape in leaves(model).items() if "dot_general" in path)
