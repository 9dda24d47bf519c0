"""Transforms of all three products, and the scheme `Quartet`: masks, random signs, stochastic rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject.core.transforms import Hadamard
from jqinject.dot import Kept, QDotGeneral, Scheme, dot_general
from jqinject.model import Rule
from jqinject.quant import (
    Int8DynamicActPerRowAbsMax,
    MXFloat4e2m1QuestAct,
    NVFP4TrainingAct,
    NVFP4TrainingWeight,
    Quartet,
)

DIMS = (((1,), (0,)), ((), ()))
OF_FLOATS = {"dgrad_rhs": Kept.FPROP, "wgrad_lhs": Kept.FPROP, "dgrad_grad": None, "wgrad_grad": None}
MASKS_ALONE = Quartet.let(**OF_FLOATS, random_signs=False)


def operands(rows=32, inputs=64, outputs=32):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (rows, inputs), (inputs, outputs), (rows, outputs)
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def all_three(scheme, x, w, g, key=None):
    y, vjp = jax.vjp(lambda x, w: dot_general(x, w, DIMS, config=scheme, key=key), x, w)
    return y, *vjp(g)


class Turned(NVFP4TrainingAct):
    """The transform alone, of activations and gradients."""

    tensor_quant = None
    signed = True
    pre_transform = Hadamard(32)


class TurnedWeight(NVFP4TrainingWeight):
    """The transform alone, of weights."""

    tensor_quant = None
    signed = True
    pre_transform = Hadamard(32)


class TurnedRow(Int8DynamicActPerRowAbsMax):
    """The transform alone, of a row that is merged of all summed axes."""

    tensor_quant = None
    pre_transform = Hadamard(32)


EVERY = {"dgrad_grad": Turned, "dgrad_rhs": Turned, "wgrad_grad": Turned, "wgrad_lhs": Turned}
SIGNS = {"dgrad_random_signs": True, "wgrad_random_signs": True}
SAW = {"dgrad_source": "dequantized", "wgrad_source": "dequantized"}


@pytest.mark.heavy
@pytest.mark.parametrize(
    "declared",
    [{}, {"dgrad_rhs": None, "wgrad_lhs": None}, EVERY | SIGNS, EVERY | SAW, {"fprop_rhs": TurnedWeight}],
    ids=["kept", "originals", "random signs", "dequantized", "weights"],
)
def test_transforms_without_quantizers_change_no_gradient(declared):
    x, w, g = operands()
    scheme = Scheme.let(**{"fprop_lhs": Turned, "fprop_rhs": Turned} | declared)
    exact = x @ w, g @ w.T, x.T @ g
    for found, wanted in zip(all_three(scheme, x, w, g, jax.random.key(1)), exact, strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_a_transform_of_several_summed_axes_goes_along_the_same_one():
    x, w = jax.random.normal(jax.random.key(0), (4, 2, 32)), jax.random.normal(jax.random.key(1), (32, 2, 8))
    for weight in (TurnedRow, TurnedWeight):
        scheme = Scheme.let(fprop_lhs=TurnedRow, fprop_rhs=weight)
        y = dot_general(x, w, (((1, 2), (1, 0)), ((), ())), config=scheme)
        np.testing.assert_allclose(y, jnp.einsum("bij,jio->bo", x, w), atol=2e-5)


@pytest.mark.heavy
def test_gradients_are_zero_where_the_mask_is_in_the_rotated_basis():
    """A Hadamard matrix of 16, and whole numbers: all sums are exact."""
    turn, scheme = Hadamard(16), MASKS_ALONE.let(hadamard=Hadamard(16))
    x, w, g = (jnp.round(4 * part) for part in operands())
    x = x.at[:, 5].set(64.0)
    _, dx, dw = all_three(scheme, x, w, g)
    for found, of, other in ((dx, x, w), (dw.T, w.T, None)):
        rotated = np.float64(turn(of)).reshape(len(of), 2, 32)
        scale = 2 ** np.floor(np.log2(2.92247856 / 6 * rotated.std(-1, keepdims=True) + 1e-8))
        passes = (np.abs(rotated / scale) < 6).reshape(of.shape)
        assert 0 < (~passes).sum() < of.size / 4
        back = np.asarray(turn(found))
        assert not back[~passes].any() and (back[passes] != 0).mean() > 0.9
        if other is not None:
            quantize = jqinject.nn.QuantIdentity(act_quant=MXFloat4e2m1QuestAct)
            np.testing.assert_array_equal(back[passes], (g @ quantize(turn(w.T)))[passes])


def forward_of_quartet(a):
    """What the forward product sees, and its mask, in float64: from the formulas of the paper."""
    matrix = np.ones((1, 1))
    for _ in range(5):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    rotated = (np.float64(a).reshape(len(a), -1, 32) @ matrix) / np.sqrt(32)
    scale = 2 ** np.floor(np.log2(2.92247856 / 6 * rotated.std(-1, keepdims=True) + 1e-8))
    steps = np.abs(rotated / scale)
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nearest = numbers[np.abs(steps[..., None] - numbers).argmin(-1)]
    return [part.reshape(a.shape) for part in (rotated, np.sign(rotated) * nearest * scale, steps < 6)]


@pytest.mark.heavy
def test_gradients_are_short_by_the_mask_and_by_what_the_forward_product_clipped():
    """`dw = (M_w * (x_q^T g))`, rotated: the algorithm's own bias, of which the mask is about half."""

    def slope(found, exact):
        return (found * exact).sum() / np.square(exact).sum()

    x, w, g = operands(256, 128, 64)
    _, dx, dw = all_three(MASKS_ALONE, x, w, g)
    rows, columns = forward_of_quartet(x), forward_of_quartet(w.T)
    cases = [(dx, columns, rows[2], np.float64(g)), (dw.T, rows, columns[2], np.float64(g).T)]
    for found, (rotated, seen, _), mask, factor in cases:
        exact = factor @ rotated
        mean = np.float64(Hadamard(32)(found))
        np.testing.assert_allclose(mean, mask * (factor @ seen), atol=1e-3)
        by_mask, by_clipping = slope(mask * exact, exact), slope(factor @ seen, exact)
        assert 0.85 < slope(mean, exact) < 0.93
        assert 0.92 < by_mask < 0.98 and 0.92 < by_clipping < 0.98
        np.testing.assert_allclose(slope(mean, exact), by_mask * by_clipping, atol=0.01)


@pytest.mark.lengthy
def test_the_backward_products_are_right_on_average():
    x, w, g = operands(inputs=32)
    keys = jax.random.split(jax.random.key(1), 300)
    run = jax.jit(lambda keys: jax.lax.map(lambda key: all_three(Quartet, x, w, g, key), keys))
    drawn, exact = run(keys), all_three(MASKS_ALONE, x, w, g)
    np.testing.assert_allclose(drawn[0], jnp.broadcast_to(exact[0], drawn[0].shape), rtol=1e-5, atol=1e-5)
    for found, mean in zip(drawn[1:], exact[1:], strict=True):
        error = np.float64(found).std(0) / np.sqrt(len(keys))
        assert (np.abs(np.float64(found).mean(0) - mean) <= 4 * error).mean() > 0.999
        assert (found[0] != found[1]).mean() > 0.9
    nearest = all_three(Quartet.let(gradient_rounding="round"), x, w, g, keys[0])
    assert jnp.linalg.norm(nearest[1] - exact[1]) < jnp.linalg.norm(drawn[1][0] - exact[1])


@pytest.mark.heavy
def test_the_backward_pass_keeps_about_six_bits_and_masks():
    x, w, _ = (jax.ShapeDtypeStruct(part.shape, jnp.float32) for part in operands(256, 256, 256))
    scheme = Quartet.let(gradient_rounding="round", random_signs=False)
    pull = jax.eval_shape(
        lambda x, w: jax.vjp(lambda *ops: dot_general(*ops, DIMS, config=scheme), x, w)[1], x, w
    )
    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pull))
    assert kept <= 0.19 * 4 * (x.size + w.size)


@pytest.mark.lengthy
def test_a_model_trains_by_rule_and_is_compiled_once():
    x = jax.random.normal(jax.random.key(0), (32, 32))
    model = nnx.Sequential(
        nnx.Linear(32, 32, rngs=nnx.Rngs(0)), jnp.tanh, nnx.Linear(32, 32, rngs=nnx.Rngs(1))
    )
    model = jqinject.quantize(model, Rule(scheme=Quartet), rngs=nnx.Rngs(2))
    traces = []

    @nnx.jit
    def step(model, x):
        traces.append(1)
        loss, grads = nnx.value_and_grad(nnx.remat(lambda model, x: ((model(x) - x) ** 2).mean()))(model, x)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.5 * g, nnx.state(model, nnx.Param), grads))
        return loss

    losses = [float(step(model, x)) for _ in range(8)]
    assert len(traces) == 1 and losses[-1] < 0.8 * losses[0]


@pytest.mark.heavy
def test_what_does_not_fit_is_named():
    x, w, g = operands()
    with pytest.raises(
        ValueError, match=r"dgrad_rhs: .*random signs needs a key(.|\n)*cure: .*random_signs = False"
    ):
        all_three(Quartet.let(gradient_rounding="round"), x, w, g)
    with pytest.raises(TypeError, match=r"dgrad_random_signs draws signs for a transform(.|\n)*cure: "):
        QDotGeneral(Scheme.let(dgrad_random_signs=True))
    with pytest.raises(TypeError, match=r"tile_size cuts what the pre_transform(.|\n)*cure: "):
        QDotGeneral(Quartet.let(tile_size=32))
    plain = Quartet.let(hadamard=None, gradient_rounding="round")
    assert all(bool(jnp.isfinite(part).all()) for part in all_three(plain, x, w, g))
