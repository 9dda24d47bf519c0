"""MS-EDEN and the scheme `QuartetII`: right on average, with less error than stochastic rounding of numbers."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject.core import EdenScales, Hadamard, RoundSte
from jqinject.dot import Kept, QDotGeneral, dot_general
from jqinject.dot.schemes.scheme import SchemeSpec
from jqinject.model import Rule
from jqinject.nn import QuantIdentity, QuantLinear
from jqinject.quant import (
    NVFP4TrainingAct,
    NVFP4TrainingActEden,
    NVFP4TrainingGradStochastic,
    QuartetII,
)

DIMS = (((1,), (0,)), ((), ()))
GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
TURN = Hadamard(128)
STOCHASTIC = NVFP4TrainingAct.let(float_to_int_impl_type="stochastic_round")
NEAREST = NVFP4TrainingActEden.let(scale_to_int_impl_type="round")
OF_FLOATS = {"dgrad_rhs": Kept.FPROP, "wgrad_lhs": Kept.FPROP, "dgrad_grad": None, "wgrad_grad": None}
EXACT = QuartetII.let(**OF_FLOATS, random_signs=False)
# The same operands, all rounded stochastically themselves, without rotations.
BY_NUMBERS = QuartetII.let(
    dgrad_grad=NVFP4TrainingGradStochastic,
    wgrad_grad=NVFP4TrainingGradStochastic,
    dgrad_rhs=STOCHASTIC,
    wgrad_lhs=STOCHASTIC,
    random_signs=False,
)


def normal(key, shape):
    return jax.random.normal(jax.random.key(key), shape)


def heavy(key, shape):
    """Student's t of 4 degrees: the largest of thousands is ten and more times the usual number."""
    return jax.random.t(jax.random.key(key), 4.0, shape)


def quantized(quantizer, x, key=None):
    rngs = None if key is None else nnx.Rngs(key)
    return QuantIdentity(act_quant=quantizer, return_quant_tensor=True, rngs=rngs)(x)


def eden(x, key):
    """`x` through a rotation with random signs, MS-EDEN, and back."""
    of_signs, of_scales = jax.random.split(key)
    signs = jax.random.rademacher(of_signs, x.shape[-1:], jnp.float32)
    return signs * TURN.inverse(quantized(NVFP4TrainingActEden, TURN(signs * x), of_scales).value)


def sampled(draw, count, *operands):
    """The means over keys, their standard errors, and the mean squared errors of single draws."""
    keys = jax.random.split(jax.random.key(7), count)
    drawn = jax.jit(lambda keys, *xs: jax.lax.map(lambda key: draw(*xs, key), keys))(keys, *operands)
    return [(np.float64(x).mean(0), np.float64(x).std(0) / np.sqrt(count), np.float64(x)) for x in drawn]


def assert_right_on_average(mean, error, exact):
    off = (mean - np.float64(exact)) / np.maximum(error, 1e-12)
    assert (np.abs(off) <= 4).mean() > 0.999
    # With a bias of a tenth of a deviation it would be 4 and more.
    assert np.square(off).mean() < 1.2


@pytest.mark.lengthy
@pytest.mark.parametrize("data", [normal, heavy])
def test_a_tensor_is_right_on_average_with_half_of_the_error(data):
    x = data(0, (64, 256))

    def both(x, key):
        return eden(x, key), quantized(STOCHASTIC, x, key).value

    (mean, error, drawn), (_, _, by_numbers) = sampled(both, 300, x)
    assert_right_on_average(mean, error, x)
    slopes = (drawn * np.float64(x)).sum((1, 2)) / np.square(np.float64(x)).sum()
    assert abs(slopes.mean() - 1) <= 4 * slopes.std() / np.sqrt(len(slopes))
    of_eden, of_numbers = (np.square(part - np.float64(x)).mean() for part in (drawn, by_numbers))
    assert of_eden <= 0.6 * of_numbers


def gradients(scheme):
    def draw(x, w, g, key):
        return jax.vjp(lambda x, w: dot_general(x, w, DIMS, config=scheme, key=key), x, w)[1](g)

    return draw


@pytest.mark.lengthy
@pytest.mark.parametrize("data", [normal, heavy])
def test_gradients_are_right_on_average_with_half_of_the_error(data):
    x, w, g = data(0, (128, 64)), data(1, (64, 128)), data(2, (128, 128))
    exact = gradients(EXACT)(x, w, g, None)
    of_eden = sampled(gradients(QuartetII), 300, x, w, g)
    by_numbers = sampled(gradients(BY_NUMBERS), 20, x, w, g)
    for (mean, error, drawn), (_, _, others), of_floats in zip(of_eden, by_numbers, exact, strict=True):
        assert_right_on_average(mean, error, of_floats)
        own, of_numbers = (np.square(part - np.float64(of_floats)).mean() for part in (drawn, others))
        assert own <= 0.6 * of_numbers


@dataclass(frozen=True)
class Unrounded:
    """No rounding."""

    def __call__(self, x):
        return x


def by_formula(x, size=128):
    """MS-EDEN without the last rounding of scales, in float64."""
    x = np.float64(x)
    blocks = x.reshape(len(x), -1, 16)
    shared = np.abs(x).max() / (6 * 256)
    scale = 0.988 * np.abs(blocks).max(-1, keepdims=True) / 6 / shared
    scale = np.float64(scale.astype(jnp.float8_e4m3fn)) * shared
    between = (GRID[1:] + GRID[:-1]) / 2
    rounded = np.sign(blocks) * GRID[np.searchsorted(between, np.abs(blocks) / scale)] * scale
    rounded = rounded.reshape(x.shape)
    for start in range(0, x.shape[1], size):
        part = slice(start, start + size)
        factor = np.square(x[:, part]).sum(1) / (x[:, part] * rounded[:, part]).sum(1)
        rounded[:, part] *= factor[:, None]
    return rounded


@pytest.mark.heavy
@pytest.mark.parametrize(("columns", "size"), [(256, 128), (208, 128), (96, 32)])
def test_the_correction_is_that_of_the_numbers_rotated_together(columns, size):
    x = heavy(3, (16, columns))
    scales = EdenScales(Unrounded(), correction_size=size)
    found = quantized(NVFP4TrainingActEden.let(block_scale_impl=scales), x).value
    np.testing.assert_allclose(found, by_formula(x, size), rtol=2e-5)
    along = quantized(NVFP4TrainingActEden.let(block_scale_impl=scales, group_dim=0), x.T).value
    np.testing.assert_allclose(along.T, found, rtol=1e-6)
    slope = (found * x).sum() / jnp.square(x).sum()
    np.testing.assert_allclose(slope, 1, rtol=1e-5)


@pytest.mark.heavy
def test_scales_are_numbers_of_e4m3_next_to_the_corrected_ones():
    x = normal(4, (8, 256))
    corrected = quantized(NVFP4TrainingActEden.let(block_scale_impl=EdenScales(Unrounded())), x)
    identity = QuantIdentity(act_quant=NVFP4TrainingActEden, return_quant_tensor=True, rngs=nnx.Rngs(0))
    drawn = [identity(x).grouped.levels for _ in range(2)]
    exact = np.float64(corrected.grouped.levels.block)
    for levels in drawn:
        assert set(np.unique(np.abs(levels.minifloats))) <= set(GRID)
        block = np.asarray(levels.block)
        np.testing.assert_array_equal(block, block.astype(jnp.float8_e4m3fn).astype(np.float32))
        step = 2.0 ** (np.floor(np.log2(exact)) - 3)
        assert (np.abs(block - exact) < step * 1.001).all()
        np.testing.assert_array_equal(levels.minifloats, corrected.grouped.levels.minifloats)
    assert (np.asarray(drawn[0].block) != np.asarray(drawn[1].block)).mean() > 0.2
    identity.eval()
    np.testing.assert_array_equal(identity(x).value, quantized(NEAREST, x).value)


@pytest.mark.heavy
def test_eager_and_compiled_have_the_same_bits_and_odd_numbers_a_result():
    x = normal(5, (8, 256)) * jnp.exp2(jnp.arange(8.0) * 12 - 60)[:, None]

    def value(x):
        return quantized(NEAREST, x).value

    compiled = jax.jit(value)
    np.testing.assert_array_equal(value(x), compiled(x))
    assert not np.asarray(compiled(jnp.zeros((8, 256)))).any()
    constant = np.asarray(compiled(jnp.full((8, 256), 3.0)))
    np.testing.assert_allclose(constant, 3.0, rtol=2**-4)
    small = compiled(jnp.full((8, 256), 1e-33)) / 1e-33
    np.testing.assert_allclose(small, 1, rtol=2**-4)
    assert value(jnp.zeros((0, 256))).shape == (0, 256)
    assert np.isnan(np.asarray(compiled(x.at[0, 0].set(jnp.nan)))[0, 0])


def test_a_small_block_is_kept_on_average():
    """Its scale is below the smallest number of e4m3: it is that number, or 0."""
    x = jnp.zeros((512, 128)).at[:].set(2e-6).at[0].set(1.0)
    rows = np.float64(quantized(NVFP4TrainingActEden, x, 0).value)[1:]
    error = rows.std() / np.sqrt(rows.size / 16)
    assert abs(rows.mean() - 2e-6) <= 4 * error and (rows == 0).mean() > 0.1


@pytest.mark.lengthy
def test_a_model_trains_as_in_float_and_is_compiled_once():
    x = normal(0, (128, 32))
    target = jnp.tanh(x @ normal(1, (32, 128))) @ normal(2, (128, 128)) / 11

    def trained(scheme):
        model = nnx.Sequential(
            nnx.Linear(32, 128, rngs=nnx.Rngs(0)), jnp.tanh, nnx.Linear(128, 128, rngs=nnx.Rngs(1))
        )
        if scheme is not None:
            model = jqinject.quantize(model, Rule(scheme=scheme), rngs=nnx.Rngs(2))
        traces = []

        @nnx.jit
        def step(model, x):
            traces.append(1)
            loss, grads = nnx.value_and_grad(nnx.remat(lambda m, x: ((m(x) - target) ** 2).mean()))(model, x)
            nnx.update(model, jax.tree.map(lambda p, g: p - 8 * g, nnx.state(model, nnx.Param), grads))
            return loss

        losses = [float(step(model, x)) for _ in range(40)]
        assert len(traces) == 1
        return losses

    losses, of_float = trained(QuartetII), trained(None)
    assert losses[-1] < 0.5 * losses[0] and losses[-1] < 1.2 * of_float[-1]


@pytest.mark.lengthy
def test_a_stack_of_layers_takes_it_and_remat_draws_the_same_numbers():
    x = normal(0, (128, 128))

    def grads(wrap):
        layers = nnx.vmap(
            lambda rngs: nnx.Linear(128, 128, dot_general=QDotGeneral(QuartetII, rngs=rngs), rngs=rngs)
        )(nnx.Rngs(0).split(2) if hasattr(nnx.Rngs, "split") else nnx.split_rngs(nnx.Rngs(0), 2))

        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @wrap
        def run(layer, x):
            return jnp.tanh(layer(x))

        return nnx.grad(lambda stack, x: (run(stack, x) ** 2).sum())(layers, x).kernel[...]

    np.testing.assert_array_equal(grads(lambda f: f), grads(nnx.remat))


@pytest.mark.heavy
def test_a_layer_is_frozen_with_its_weight_in_4_bits():
    layer = QuantLinear(64, 128, scheme=QuartetII, rngs=nnx.Rngs(0))
    x = normal(1, (4, 64))
    layer.eval()
    frozen = jqinject.freeze(layer)
    np.testing.assert_allclose(frozen(x), layer(x), rtol=1e-5, atol=1e-5)


@pytest.mark.heavy
def test_the_backward_pass_keeps_less_than_5_bits():
    x, w = (jax.ShapeDtypeStruct((256, 256), jnp.float32) for _ in range(2))
    scheme = QuartetII.let(gradient_rounding="round", random_signs=False)
    pull = jax.eval_shape(
        lambda x, w: jax.vjp(lambda *ops: dot_general(*ops, DIMS, config=scheme), x, w)[1], x, w
    )
    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pull))
    assert kept <= 0.15 * 4 * (x.size + w.size)


@pytest.mark.heavy
def test_what_does_not_fit_is_named():
    with pytest.raises(ValueError, match=r"QuartetII.dgrad_grad: .*blocks of 128, .* the 20 outputs"):
        QuantLinear(64, 20, scheme=QuartetII, rngs=nnx.Rngs(0))
    layer = QuantLinear(64, 128, scheme=QuartetII, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"QuartetII.wgrad_lhs: .* fill the 5 numbers(.|\n)*cure: "):
        layer(jnp.ones((5, 64)))
    assert layer.eval() is None and layer(jnp.ones((5, 64))).shape == (5, 128)
    with pytest.raises(
        ValueError, match=r"QuartetII\S* draws random numbers .*there are no rngs(.|\n)*cure: "
    ):
        jqinject.quantize(nnx.Sequential(nnx.Linear(64, 128, rngs=nnx.Rngs(0))), Rule(scheme=QuartetII))
    with pytest.raises(ValueError, match=r"EdenScales cuts one axis into groups, got the block(.|\n)*cure: "):
        quantized(NVFP4TrainingActEden.let(group_size=(16, 16)), jnp.ones((32, 32)))
    with pytest.raises(
        ValueError,
        match=r"EdenScales: blocks of 16 do not fill the 100 numbers(.|\n)*cure: correction_size = 128",
    ):
        EdenScales(RoundSte(), correction_size=100)


def test_scales_are_corrected_for_what_the_transform_mixes():
    for hadamard, size in ((Hadamard(64), 64), (Hadamard(), 128), (None, 128)):
        operand = SchemeSpec.of(QuartetII.let(hadamard=hadamard))["wgrad_grad"]
        assert operand.resolve("correction_size") == size
