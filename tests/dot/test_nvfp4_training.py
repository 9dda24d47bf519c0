"""The scheme NVFP4Training: 4 bits for all six operands, its ingredients, and what it keeps for the backward pass."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject.core.transforms import Hadamard
from jqinject.dot import QConvGeneralDilated, QDotGeneral, Scheme, dot_general
from jqinject.model import Rule
from jqinject.nn import QuantIdentity
from jqinject.quant import (
    NVFP4Training,
    NVFP4TrainingAct,
    NVFP4TrainingGrad,
    NVFP4TrainingSigns,
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


@pytest.mark.lengthy
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


@dataclass(frozen=True)
class Unrounded:
    """No rounding."""

    def __call__(self, x):
        return x


class Float(NVFP4TrainingAct):
    """The rotation alone."""

    tensor_quant = None
    pre_transform = ROTATION
    signed = True


@pytest.mark.heavy
def test_residuals_take_less_than_5_bits():
    x, w, _ = operands()
    for scheme in (NEAREST, NEAREST.let(weight_block=16, hadamard=None)):
        _, vjp = jax.vjp(by(scheme), x, w)
        assert sum(leaf.nbytes for leaf in jax.tree.leaves(vjp)) <= 0.15 * (x.nbytes + w.nbytes)


@pytest.mark.heavy
def test_stochastic_rounding_is_unbiased():
    x, w, g = operands(rows=16, inputs=16, outputs=16)
    scheme = NVFP4Training.let(hadamard=None)

    def gradients(key):
        return jax.vjp(lambda x, w: dot_general(x, w, DIMS, config=scheme, key=key), x, w)[1](g)

    keys = jax.random.split(jax.random.key(1), 400)
    drawn = jax.jit(lambda keys: jax.lax.map(gradients, keys))(keys)
    nearest = jax.vjp(by(NEAREST.let(hadamard=None)), x, w)[1](g)
    # The mean over keys is the gradient as it is scaled and clipped, not rounded.
    gradient, turned = (dequantized(part, float_to_int_impl=Unrounded()) for part in (g, g.T))
    exact = gradient @ dequantized(w, group_size=(16, 16)).T, dequantized(x.T) @ turned.T
    for found, near, mean in zip(drawn, nearest, exact, strict=True):
        error = np.float64(found).std(0) / np.sqrt(len(keys))
        assert (np.abs(np.float64(found).mean(0) - mean) <= 4 * error + 1e-5).mean() > 0.99
        assert np.abs(near - mean).mean() > 3 * error.mean()


@pytest.mark.lengthy
def test_remat_draws_the_same_numbers():
    x, _, g = operands(rows=16, inputs=16, outputs=16)

    def gradients(transform):
        op = QDotGeneral(NVFP4Training, rngs=nnx.Rngs(3))
        layer = nnx.Linear(16, 16, dot_general=op, rngs=nnx.Rngs(0))
        return nnx.grad(transform(lambda layer, x: (layer(x) * g).sum()))(layer, x).kernel[...]

    np.testing.assert_array_equal(gradients(lambda f: f), gradients(nnx.remat))


@pytest.mark.lengthy
def test_eager_and_compiled_have_the_same_bits():
    x, w, g = operands(rows=16, inputs=32, outputs=16)

    def all_three(x, w, g):
        y, vjp = jax.vjp(by(NEAREST), x, w)
        return y, *vjp(g)

    for eager, compiled in zip(all_three(x, w, g), jax.jit(all_three)(x, w, g), strict=True):
        np.testing.assert_array_equal(eager, compiled)


def finite(grads):
    return all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(grads))


@pytest.mark.lengthy
def test_a_model_takes_it_by_rule():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.fc = nnx.Linear(32, 16, rngs=rngs)
            self.mix = nnx.Einsum("bti,io->bto", (16, 32), rngs=rngs)
            self.head = nnx.Linear(32, 8, rngs=rngs)

        def __call__(self, x):
            return self.head(self.mix(nnx.relu(self.fc(x))))

    x = jax.random.normal(jax.random.key(0), (2, 16, 32))
    rules = [Rule("head", scheme=None), Rule(scheme=NVFP4Training)]
    model = jqinject.quantize(Model(nnx.Rngs(0)), rules, inputs=(x,), rngs=nnx.Rngs(1))
    loss = lambda m, x: (m(x) ** 2).sum()  # noqa: E731
    assert finite(nnx.jit(nnx.grad(loss))(model, x))
    model.eval()
    assert model(x[:, :5]).shape == (2, 5, 8)  # no backward pass, no rows to fill


@pytest.mark.heavy
def test_a_stack_of_layers_takes_it():
    @nnx.vmap(in_axes=0, out_axes=0)
    def layers(rngs):
        op = QDotGeneral(NVFP4Training, rngs=rngs)
        return nnx.Linear(16, 16, dot_general=op, rngs=rngs)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    @nnx.remat
    def run(layer, x):
        return jnp.tanh(layer(x))

    stack = (
        layers(nnx.Rngs(0).split(3)) if hasattr(nnx.Rngs, "split") else layers(nnx.split_rngs(nnx.Rngs(0), 3))
    )
    x = jax.random.normal(jax.random.key(0), (16, 16))
    assert finite(nnx.grad(lambda stack, x: (run(stack, x) ** 2).sum())(stack, x))


@pytest.mark.lengthy
def test_a_convolution_takes_it_without_the_transform():
    x = jax.random.normal(jax.random.key(0), (2, 6, 6, 16))
    with pytest.raises(TypeError, match=r"a convolution sums over windows(.|\n)*cure: .*hadamard=None"):
        QConvGeneralDilated(NEAREST)
    op = QConvGeneralDilated(NEAREST.let(hadamard=None))
    conv = nnx.Conv(16, 16, (3, 3), conv_general_dilated=op, rngs=nnx.Rngs(0))
    assert finite(nnx.grad(lambda conv: (conv(x) ** 2).sum())(conv))


@pytest.mark.heavy
def test_what_does_not_fit_is_named():
    x, w, g = operands(rows=20)
    misfit = r"NVFP4Training.wgrad_lhs: .* blocks of 16, .* fill the 20 numbers(.|\n)*cure: .*model.eval()"
    with pytest.raises(ValueError, match=misfit):
        by(NEAREST)(x, w)
    _, vjp = jax.vjp(lambda x, w: dot_general(x, w, DIMS, config=NEAREST), x, w)  # a function has no modes
    with pytest.raises(ValueError, match=misfit):
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
