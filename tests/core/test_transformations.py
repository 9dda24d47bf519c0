"""Every quantizer under every transformation: the same numbers, the same state."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

X = jax.random.normal(jax.random.key(0), (16, 4))


def _loss(quant, x):
    return jnp.sum(quant(x).value * jnp.cos(x))


def _train(quant, step, steps=4):
    losses = []
    for i in range(steps):
        loss, grads = step(quant, X * (i + 1))
        losses.append(loss)
    return losses, grads, nnx.state(quant)


def _assert_same(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), a, b)


STEPS = {
    "jit": nnx.jit(lambda q, x: nnx.value_and_grad(_loss)(q, x)),
    "remat": lambda q, x: nnx.value_and_grad(nnx.remat(_loss))(q, x),
    "jit remat": nnx.jit(lambda q, x: nnx.value_and_grad(nnx.remat(_loss))(q, x)),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_the_same_as_eager(build, step):
    _assert_same(_train(build(), nnx.value_and_grad(_loss)), _train(build(), step))


def test_functional_style_is_the_same(build):
    def loss(state, x):
        quant = nnx.merge(graphdef, state)
        return _loss(quant, x), nnx.state(quant)

    graphdef, state = nnx.split(build())
    losses = []
    for i in range(4):
        value, state = jax.jit(loss)(state, X * (i + 1))
        losses.append(value)
    expected = build()
    _assert_same(losses, [_loss(expected, X * (i + 1)) for i in range(4)])
    _assert_same(state, nnx.state(expected))


def test_stacked_under_vmap_and_scan(build):
    stack = nnx.vmap(lambda _: build())(jnp.arange(3))
    xs = jnp.stack([X, 2 * X, 3 * X])
    for _ in range(4):
        values = nnx.vmap(lambda q, x: q(x).value)(stack, xs)
    single = build()
    for _ in range(4):
        value = single(xs[1]).value
    np.testing.assert_allclose(values[1], value, rtol=1e-5, atol=1e-6)
    _assert_same(jax.tree.map(lambda v: v[1], nnx.state(stack)), nnx.state(single))

    scan = nnx.scan(lambda q, x: q(x).value, in_axes=(0, nnx.Carry), out_axes=nnx.Carry, length=3)
    grads = nnx.grad(lambda q, x: scan(q, x).sum())(stack, X)
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(grads))


def test_evaluation_moves_nothing_and_needs_no_module_transform(build):
    quant = build()
    for _ in range(4):
        quant(X)
    quant.eval()
    before = jax.tree.map(lambda v: v + 0, nnx.state(quant))
    a = jax.jit(lambda x: quant(x).value)(X) if "delay" not in str(nnx.state(quant)) else quant(X).value
    b = nnx.view(quant, use_running_average=True)(X).value if "running" in repr(quant) else quant(X).value
    np.testing.assert_array_equal(a, b)
    _assert_same(before, nnx.state(quant))


def test_two_built_alike_compile_once(build):
    traces = []

    @nnx.jit
    def run(quant, x):
        traces.append(1)
        return quant(x).value

    for quant in (build(), build()):
        for i in range(4):
            run(quant, X * (i + 1))
    assert len(traces) == 1
    assert nnx.graphdef(build()) == nnx.graphdef(quant)
    assert hash(nnx.graphdef(build())) == hash(nnx.graphdef(quant))


def test_train_and_eval_come_back_to_the_same_graph(build):
    quant = build()
    graphdef = nnx.graphdef(quant)
    quant.eval()
    quant.train()
    assert nnx.graphdef(quant) == graphdef


def test_state_has_explicit_dtypes(build):
    for value in jax.tree.leaves(nnx.state(build())):
        assert not value.weak_type
        assert value.dtype in (jnp.float32, jnp.int32)


def test_shapes_and_types_of_state_never_change(build):
    quant = build()
    shapes = jax.tree.map(lambda v: (v.shape, v.dtype, v.weak_type), nnx.state(quant))
    for _ in range(4):
        quant(X)
    assert jax.tree.map(lambda v: (v.shape, v.dtype, v.weak_type), nnx.state(quant)) == shapes


def test_copies(build):
    quant = build()
    quant(X)
    for copy in (nnx.clone(quant), pickle.loads(pickle.dumps(quant))):
        np.testing.assert_array_equal(copy(X).value, nnx.clone(quant)(X).value)


def test_abstract(build):
    abstract = nnx.eval_shape(build)
    assert jax.tree.structure(nnx.state(abstract)) == jax.tree.structure(nnx.state(build()))
    assert jax.eval_shape(lambda x: build()(x).value, X).shape == X.shape


def test_result_types(build):
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        result = nnx.jit(lambda q, x: q(x))(build(), X.astype(dtype))
        assert result.value.dtype == dtype
        assert all(
            number.dtype == jnp.float32 for number in (result.scale, result.zero_point) if number is not None
        )
        assert not result.scale.weak_type


def test_forward_mode(build):
    quant = build()
    for _ in range(4):
        quant(X)
    quant.eval()
    graphdef, state = nnx.split(quant)
    _, tangent = jax.jvp(
        lambda x: nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf, state))(x).value,
        (X,),
        (jnp.ones_like(X),),
    )
    assert bool(jnp.all(jnp.isfinite(tangent)))
