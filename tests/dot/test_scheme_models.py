"""Models whose layers contract by a `Scheme`: copies, loading, calibration, stacks, reports."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject.dot import QDotGeneral, Scheme, dot_general
from jqinject.quant import (
    Fp8e5m2GradPerTensorDelayed,
    Int4WeightPerTensorFloatDecoupled,
    Int8ActPerTensorFloat,
    Int8DynamicActPerRowFloat,
    Int8WeightPerChannelFloat,
)

X = jax.random.normal(jax.random.key(0), (32, 16))
STATEFUL = Scheme.let(
    fprop_lhs=Int8ActPerTensorFloat,
    fprop_rhs=Int4WeightPerTensorFloatDecoupled,
    wgrad_grad=Fp8e5m2GradPerTensorDelayed,
)
STATELESS = Scheme.let(fprop_lhs=Int8DynamicActPerRowFloat, fprop_rhs=Int8WeightPerChannelFloat)


def model(seed):
    layers = [
        nnx.Linear(16, 16, dot_general=QDotGeneral(STATEFUL), rngs=nnx.Rngs(seed)),
        nnx.Linear(16, 4, dot_general=QDotGeneral(STATELESS), rngs=nnx.Rngs(seed + 1)),
    ]
    made = nnx.Sequential(*layers)
    jqinject.initialize(made, X)
    made(X)
    return made


@pytest.mark.lengthy
def test_copies_and_checkpoints():
    one, other = model(0), model(5)
    jqinject.load_state(other, nnx.state(one))
    one.eval()
    other.eval()
    expected = one(X)
    for twin in (other, nnx.clone(one), copy.deepcopy(one)):
        np.testing.assert_array_equal(twin(X), expected)


def test_float_weights_reassemble_the_quantizers():
    floats = nnx.Sequential(nnx.Linear(16, 16, rngs=nnx.Rngs(3)), nnx.Linear(16, 4, rngs=nnx.Rngs(4)))
    loaded = model(0)
    report = jqinject.load_state(loaded, nnx.to_pure_dict(nnx.state(floats)))
    assert "layers.0.dot_general.fprop_rhs.quant" in str(report)
    assert jqinject.reassemble(loaded).reassembled


def test_ranges_are_calibrated():
    made = model(0)
    op = made.layers[0].dot_general
    jqinject.calibrate(made, [X, 2 * X])
    assert op.has_range() is True and made.layers[1].dot_general.has_range() is None
    np.testing.assert_array_equal(made(X), made(X))


@pytest.mark.heavy
def test_a_stack_of_layers():
    @nnx.vmap(in_axes=0, out_axes=0)
    def stack(key):
        return nnx.Linear(16, 16, dot_general=QDotGeneral(STATELESS), rngs=nnx.Rngs(key))

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def run(layer, x):
        return layer(x)

    layers = stack(jax.random.split(jax.random.key(0), 3))
    expected = X
    for index in range(3):
        one = nnx.Linear(16, 16, dot_general=QDotGeneral(STATELESS), rngs=nnx.Rngs(0))
        one.kernel[...], one.bias[...] = layers.kernel[index], layers.bias[index]
        expected = one(expected)
    np.testing.assert_allclose(run(layers, X), expected, rtol=1e-6, atol=1e-6)
    gradients = nnx.grad(lambda layers: (run(layers, X) ** 2).sum())(layers)
    assert gradients["kernel"].shape == (3, 16, 16)
    assert bool(jnp.isfinite(gradients["kernel"][...]).all())


def test_the_report_reads_the_program():
    made = nnx.Sequential(nnx.Linear(16, 4, dot_general=QDotGeneral(STATELESS), rngs=nnx.Rngs(0)))
    assert "s8 x s8 -> s32" in str(jqinject.report(made, X))
    half = Scheme.let(fprop_rhs=Int8WeightPerChannelFloat)
    made = nnx.Sequential(nnx.Linear(16, 4, dot_general=QDotGeneral(half), rngs=nnx.Rngs(0)))
    assert "the input has no bits in the configuration" in str(jqinject.report(made, X))


def test_a_function_has_no_place_for_state():
    numbers = (((1,), (0,)), ((), ()))
    found = dot_general(X, X.T, numbers, config=STATELESS)
    np.testing.assert_array_equal(found, QDotGeneral(STATELESS)(X, X.T, numbers))
    with pytest.raises(
        TypeError, match=r"Int8ActPerTensorFloat keeps state.*\n  cure: QDotGeneral\(scheme\)"
    ):
        dot_general(X, X.T, numbers, config=STATEFUL)
