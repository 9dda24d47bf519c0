"""The scheme NVFP4Training: 4 bits for all six operands, its ingredients, and what it keeps for the backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject.core.transforms import Hadamard
from jqinject.dot import QDotGeneral, Scheme
from jqinject.nn import QuantIdentity, QuantLinear
from jqinject.quant import (
    NVFP4Training,
    NVFP4TrainingAct,
    NVFP4TrainingGrad,
    NVFP4TrainingSigns,
    NVFP4TrainingWeight,
)

DIMS = (((1,), (0,)), ((), ()))
ROTATION = Hadamard(16, NVFP4TrainingSigns)
NEAREST = NVFP4Training.let(gradient_rounding="round")


def operands(rows=32, inputs=64, outputs=48, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (rows, inputs), (inputs, outputs), (rows, outputs)
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def by(scheme, rngs=None):
    op = QDotGeneral(scheme, rngs=rngs)
    return lambda x, w: op(x, w, DIMS)


def dequantized(x, **declared):
    """A matrix quantized along its last axis, in float64."""
    act = NVFP4TrainingAct.let(**declared) if declared else NVFP4TrainingAct
    made = QuantIdentity(act_quant=act, return_quant_tensor=True)(x)
    minifloats, block, shared = (np.float64(part) for part in made.grouped.levels)
    return (minifloats * block * shared).reshape(x.shape)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_each_product_is_that_of_its_quantized_operands(dtype):
    x, w, g = operands(dtype=dtype)
    y, vjp = jax.vjp(by(NEAREST), x, w)
    dx, dw = vjp(g)
    square = {"group_size": (16, 16)}
    turned = {"pre_transform": ROTATION}
    expected = (
        dequantized(x) @ dequantized(w.T, **square).T,
        dequantized(g) @ dequantized(w, **square).T,
        dequantized(x.T, **turned) @ dequantized(g.T, **turned).T,
    )
    eps = float(jnp.finfo(dtype).eps)
    for found, exact in zip((y, dx, dw), expected, strict=True):
        assert found.dtype == dtype
        np.testing.assert_allclose(np.float64(found), exact, rtol=eps, atol=1e-5)


def test_the_rotations_cancel():
    x, w, g = operands()
    plain = Scheme.let(wgrad_lhs=Float, wgrad_grad=Float)
    (_, dw), (_, expected) = (jax.vjp(by(scheme), x, w)[1](g) for scheme in (plain, Scheme))
    assert float(jnp.linalg.norm(dw - expected) / jnp.linalg.norm(expected)) < 1e-6


class Float(NVFP4TrainingAct):
    """The rotation alone."""

    tensor_quant = None
    pre_transform = ROTATION
    signed = True


def test_residuals_take_less_than_5_bits():
    x, w, _ = operands()
    for scheme in (NEAREST, NEAREST.let(weight_block=16, hadamard=None)):
        _, vjp = jax.vjp(by(scheme), x, w)
        assert sum(leaf.nbytes for leaf in jax.tree.leaves(vjp)) <= 0.15 * (x.nbytes + w.nbytes)


def test_stochastic_rounding_is_unbiased_and_the_same_under_remat():
    x, w, g = operands(rows=16, inputs=16, outputs=16)

    @jax.jit
    def gradients(key, remat=False):
        layer = nnx.Linear(
            16,
            16,
            dot_general=QDotGeneral(NVFP4Training.let(hadamard=None), rngs=nnx.Rngs(key)),
            rngs=nnx.Rngs(0),
        )
        call = layer.dot_general
        return jax.vjp(lambda x, w: call(x, w, DIMS), x, w)[1](g)

    keys = jax.random.split(jax.random.key(1), 400)
    drawn = jax.lax.map(gradients, keys)
    nearest = jax.vjp(by(NEAREST.let(hadamard=None)), x, w)[1](g)
    exact = (np.float64(g) @ dequantized(w, group_size=(16, 16)).T, dequantized(x.T) @ np.float64(g))
    for found, near, mean in zip(drawn, nearest, exact, strict=True):
        error = np.float64(found).std(0) / np.sqrt(len(keys))
        # 4 sigma for each of 512 numbers: of as many normal ones, 0.03 are beyond.
        assert (np.abs(np.float64(found).mean(0) - mean) <= 4 * error + 1e-5).mean() > 0.995
        assert np.abs(near - mean).mean() > 3 * error.mean()


def test_remat_draws_the_same_numbers():
    x, w, g = operands(rows=16, inputs=16, outputs=16)

    def gradients(transform):
        op = QDotGeneral(NVFP4Training, rngs=nnx.Rngs(3))
        key = op.quantizers.stream if hasattr(op, "quantizers") else None
        del key
        layer = nnx.Linear(16, 16, dot_general=op, rngs=nnx.Rngs(0))

        def loss(layer, x):
            return (layer(x) * g).sum()

        return nnx.grad(transform(loss))(layer, x).kernel[...]

    np.testing.assert_array_equal(gradients(lambda f: f), gradients(nnx.remat))


def test_eager_and_compiled_have_the_same_bits():
    x, w, g = operands(rows=16, inputs=32, outputs=16)

    def all_three(x, w, g):
        y, vjp = jax.vjp(by(NEAREST), x, w)
        return y, *vjp(g)

    for eager, compiled in zip(all_three(x, w, g), jax.jit(all_three)(x, w, g), strict=True):
        np.testing.assert_array_equal(eager, compiled)


def test_layers_take_it():
    layer = QuantLinear(32, 16, scheme=NVFP4Training, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 16, 32))
    grads = nnx.grad(lambda m, x: (m(x) ** 2).sum())(layer, x)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(grads))
    assert layer(x[:, :5]).shape == (2, 5, 16)  # no backward pass, no rows to fill


def test_what_does_not_fit_is_named():
    x, w, g = operands(rows=20)
    y, vjp = jax.vjp(by(NEAREST), x, w)
    with pytest.raises(
        ValueError, match=r"NVFP4Training.wgrad_lhs: .* blocks of 16, .* fill the 20 numbers(.|\n)*cure: "
    ):
        vjp(g)
    with pytest.raises(ValueError, match=r"stochastic rounding needs a key, and there are no rngs"):
        jax.vjp(by(NVFP4Training), *operands()[:2])[1](operands()[2])
    one = Scheme.let(wgrad_lhs=NVFP4TrainingAct.let(pre_transform=ROTATION), wgrad_grad=NVFP4TrainingGrad)
    with pytest.raises(
        TypeError, match=r"same transform, which then cancels: .*wgrad_grad has no pre_transform"
    ):
        QDotGeneral(one)
    kept = Scheme.let(wgrad_grad=NVFP4TrainingGrad.let(pre_transform=ROTATION))
    with pytest.raises(
        TypeError, match=r"wgrad_lhs has no pre_transform(.|\n)*cure: pre_transform = Hadamard"
    ):
        QDotGeneral(kept)
    with pytest.raises(TypeError, match=r"only a product whose operands both go through it undoes it"):
        QuantIdentity(None, grad_quant=NVFP4TrainingGrad.let(pre_transform=ROTATION))
    assert NVFP4TrainingWeight is not None
