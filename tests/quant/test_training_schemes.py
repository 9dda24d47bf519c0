"""Ready-made schemes of training in low bits: whole models, transformations, what is kept, what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject import Rule
from jqinject.dot import (
    Kept,
    QConvGeneralDilated,
    QDotGeneral,
    QEinsum,
    Scheme,
    conv_general_dilated,
    dot_general,
    einsum,
)
from jqinject.nn import QuantLinear
from jqinject.quant import (
    Fp8BlockTraining,
    Fp8CurrentTraining,
    Fp8DelayedTraining,
    Fp8RowTraining,
    Fp8RowTrainingWeight,
    Fp8TrainingAct,
    Fp8TrainingWeight,
    MXFP4Training,
    MXFP8e5m2TrainingGrad,
    MXFP8Training,
    MXFP8TrainingAct,
    MXFP8TrainingWeight,
    NVFP4Training,
)

STATELESS = (MXFP8Training, MXFP4Training, Fp8CurrentTraining, Fp8RowTraining, Fp8BlockTraining)
X_W = (((1,), (0,)), ((), ()))
X = jax.random.normal(jax.random.key(0), (64, 96))
W = 0.1 * jax.random.normal(jax.random.key(1), (96, 32))
KEY = jax.random.key(2)
CHANNELS_LAST: dict = {"dimension_numbers": ("NWC", "WIO", "NWC"), "key": KEY}


def product(scheme):
    return lambda x, w: dot_general(x, w, X_W, config=scheme, key=KEY)


@pytest.mark.parametrize(("scheme", "most"), [(s, 0.15 if s is MXFP4Training else 0.26) for s in STATELESS])
def test_the_backward_pass_keeps_payloads_and_scales_in_bytes(scheme, most):
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((256, 512), (512, 256))]
    pull = jax.eval_shape(lambda x, w: jax.vjp(product(scheme), x, w)[1], *shapes)
    kept = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pull))
    assert kept <= most * sum(x.size * 4 for x in shapes)


@pytest.mark.heavy
def test_rematerialisation_has_the_same_gradients():
    scheme = MXFP8Training
    both = jax.checkpoint(product(scheme), policy=jax.checkpoint_policies.everything_saveable)
    again, once = (
        jax.jit(jax.grad(lambda x, w, f=f: f(x, w).sum(), argnums=(0, 1)))(X, W)
        for f in (both, product(scheme))
    )
    for a, b in zip(again, once, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.lengthy
@pytest.mark.parametrize("scheme", [MXFP8Training, MXFP4Training, Fp8CurrentTraining])
def test_eager_compiled_and_mapped_give_the_same(scheme):
    def run(x, w):
        y, pull = jax.vjp(product(scheme), x, w)
        return y, *pull(y)

    eager, compiled = run(X, W), jax.jit(run)(X, W)
    for a, b in zip(eager, compiled, strict=True):
        np.testing.assert_array_equal(a, b)
    exact = X @ W, (X @ W) @ W.T, X.T @ (X @ W)
    for found, wanted in zip(eager, exact, strict=True):
        error = jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted)
        assert error < (0.3 if scheme is MXFP4Training else 0.08)
    mapped = jax.vmap(product(scheme), (0, None))(X.reshape(2, 32, 96), W)
    assert bool(jnp.isfinite(mapped).all()) and mapped.shape == (2, 32, 32)


def test_a_scheme_of_floats_has_no_error():
    y, pull = jax.vjp(product(Scheme), X, W)
    wanted, pull_float = jax.vjp(lambda x, w: jax.lax.dot_general(x, w, X_W), X, W)
    for found, exact in zip((y, *pull(y)), (wanted, *pull_float(y)), strict=True):
        np.testing.assert_array_equal(found, exact)


def test_a_product_in_high_precision_overrides_its_operands():
    scheme = MXFP8Training.let(wgrad_lhs=None, wgrad_grad=None)
    g = jax.random.normal(jax.random.key(3), (64, 32))
    _, pull = jax.vjp(product(scheme), X, W)
    np.testing.assert_allclose(pull(g)[1], X.T @ g, rtol=1e-5, atol=1e-4)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Linear(64, 64, rngs=rngs)
        self.conv = nnx.Conv(64, 64, (3,), rngs=rngs)
        self.mix = nnx.Einsum("btk,kn->btn", (64, 64), rngs=rngs)
        self.head = nnx.Linear(64, 8, rngs=rngs)

    def __call__(self, x):
        x = jnp.tanh(self.conv(self.embed(x)))
        return self.head(jnp.tanh(self.mix(x)))


@pytest.mark.lengthy
@pytest.mark.parametrize("scheme", [Fp8DelayedTraining, Fp8BlockTraining])
def test_a_model_trains_by_rules_with_its_head_in_float(scheme):
    model = jqinject.quantize(
        Model(nnx.Rngs(0)), [Rule("head", scheme=None), Rule(scheme=scheme)], rngs=nnx.Rngs(1)
    )
    assert model.head.dot_general is jax.lax.dot_general and isinstance(model.embed.dot_general, QDotGeneral)
    assert isinstance(model.conv.conv_general_dilated, QConvGeneralDilated)
    assert isinstance(model.mix.einsum_op, QEinsum)
    x = jax.random.normal(jax.random.key(4), (2, 32, 64))
    model(x)

    @nnx.jit
    def step(model, x):
        return jqinject.value_and_grad(lambda model, x: (model(x) ** 2).mean())(model, x)

    loss, gradients = step(model, x)
    exact, wanted = nnx.value_and_grad(lambda model, x: (model(x) ** 2).mean())(Model(nnx.Rngs(0)), x)
    assert abs(loss / exact - 1) < 0.2
    for path, value in nnx.to_flat_state(nnx.state(wanted, nnx.Param)):
        found = dict(nnx.to_flat_state(gradients))[path][...]
        assert bool(jnp.isfinite(found).all())
        error = jnp.linalg.norm(found - value[...]) / jnp.linalg.norm(value[...])
        assert error < 0.6, f"{path}: {error}"


@pytest.mark.heavy
def test_a_layer_takes_a_scheme():
    layer = QuantLinear(96, 32, scheme=MXFP8Training, use_bias=False, rngs=nnx.Rngs(0))
    layer.kernel[...] = W
    np.testing.assert_allclose(layer(X), product(MXFP8Training)(X, W), rtol=1e-6)
    with pytest.raises(ValueError, match="got weight_quant too"):
        QuantLinear(96, 32, scheme=MXFP8Training, weight_quant=MXFP8TrainingWeight, rngs=nnx.Rngs(0))


@pytest.mark.heavy
def test_einsum_over_several_axes_quantizes_along_them():
    x, w = X.reshape(2, 32, 96), W.reshape(96, 4, 8)
    y = jax.jit(lambda x, w: einsum("btk,khd->bthd", x, w, config=MXFP8Training))(x, w)
    np.testing.assert_allclose(y.reshape(64, 32), jax.jit(product(MXFP8Training))(X, W), rtol=1e-5, atol=1e-5)


@pytest.mark.heavy
def test_what_the_forward_product_saw_is_quantized_again():
    scheme = MXFP8Training.let(dgrad_source="dequantized")
    g = jax.random.normal(jax.random.key(3), (64, 32))
    seen = jqinject.nn.QuantLinear(96, 32, weight_quant=MXFP8TrainingWeight, use_bias=False, rngs=nnx.Rngs(0))
    seen.kernel[...] = W
    rounded = seen.quant_weight().value
    dx = jax.vjp(product(scheme), X, W)[1](g)[0]
    wanted = jax.vjp(product(MXFP8Training.let(fprop_rhs=None)), X, rounded)[1](g)[0]
    np.testing.assert_array_equal(dx, wanted)
    window = jax.vjp(
        lambda x: conv_general_dilated(x, W[None], (1,), "VALID", **CHANNELS_LAST, config=scheme), X[None]
    )[1](g[None])[0]
    np.testing.assert_allclose(window[0], dx, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="dgrad_source must be one of 'original', 'dequantized', got 'both'"):
        product(MXFP8Training.let(dgrad_source="both"))(X, W)


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (
            Scheme.let(fprop_lhs=MXFP8TrainingAct, wgrad_lhs=Kept.PAYLOAD),
            r"wgrad_lhs asks for the payload .* MXFP8TrainingAct quantizes in groups of 32 along",
        ),
        (
            Scheme.let(fprop_rhs=Fp8RowTrainingWeight, dgrad_rhs=Kept.PAYLOAD),
            r"dgrad_rhs asks for the payload .* Fp8RowTrainingWeight has a scale for each row or channel",
        ),
        (
            Scheme.let(dgrad_rhs=Kept.PAYLOAD),
            "dgrad_rhs asks for the payload .* fprop_rhs is float, and has none",
        ),
    ],
)
def test_a_payload_along_the_contracted_axis_is_not_reused(scheme, message):
    with pytest.raises(ValueError, match=message) as caught:
        QDotGeneral(scheme)
    assert "cure:" in str(caught.value)


@pytest.mark.heavy
def test_payloads_that_fit_are_reused():
    scheme = Fp8CurrentTraining.let(dgrad_rhs=Kept.PAYLOAD, wgrad_lhs=Kept.PAYLOAD)
    for a, b in zip(
        jax.vjp(product(scheme), X, W)[1](X @ W),
        jax.vjp(product(Fp8CurrentTraining), X, W)[1](X @ W),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
    QDotGeneral(Fp8BlockTraining.let(dgrad_rhs=Kept.PAYLOAD))  # square blocks are those of the transpose


def test_a_scheme_explains_its_six_operands():
    table = str(jqinject.explain(MXFP8Training.let(dgrad_grad=MXFP8e5m2TrainingGrad)))
    assert [line.split()[0] for line in table.splitlines()[1:]] == [
        *("fprop_lhs", "fprop_rhs", "dgrad_grad", "dgrad_rhs", "wgrad_lhs", "wgrad_grad")
    ]
    assert "e5m2 in 32s" in table and "e4m3 in 128 x 128" in str(jqinject.explain(Fp8BlockTraining))


def test_a_trained_weight_is_frozen_and_served():
    scheme = Scheme.let(fprop_lhs=Fp8TrainingAct, fprop_rhs=Fp8TrainingWeight)
    model = nnx.Sequential(nnx.Linear(96, 32, rngs=nnx.Rngs(0)))
    quantized = jqinject.quantize(model, Rule(scheme=scheme))
    wanted = quantized(X)
    np.testing.assert_allclose(jqinject.freeze(quantized)(X), wanted, rtol=1e-5, atol=1e-5)


class Experts(nnx.Module):
    def __init__(self):
        self.weights = nnx.Param(0.1 * jax.random.normal(jax.random.key(5), (3, 96, 32)))

    def __call__(self, x, sizes):
        return jax.lax.ragged_dot(x, self.weights[...], sizes)


@pytest.mark.heavy
def test_experts_train_by_a_scheme():
    sizes = jnp.array([32, 0, 32])
    scheme = MXFP8Training.let(dgrad_source="dequantized", wgrad_source="dequantized")
    model = jqinject.quantize(Experts(), Rule(scheme=scheme), inputs=(X, sizes))
    g = jax.random.normal(jax.random.key(3), (64, 32))

    @nnx.jit
    def run(model, x):
        loss = lambda model, x: ((y := model(x, sizes)) * g).sum() + 0 * y.sum()  # noqa: E731
        of_model, dx = nnx.grad(loss, argnums=(0, 1))(model, x)
        return model(x, sizes), dx, of_model.weights[...]

    y, dx, dw = run(model, X)
    weights = Experts().weights[...]
    for expert, rows in ((0, slice(0, 32)), (2, slice(32, 64))):
        found, pull = jax.vjp(jax.jit(product(scheme)), X[rows], weights[expert])
        of_x, of_weights = pull(g[rows])
        np.testing.assert_allclose(y[rows], found, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(dx[rows], of_x, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(dw[expert], of_weights, rtol=1e-5, atol=1e-4)
    assert not dw[1].any()


@pytest.mark.lengthy
def test_experts_train_in_four_bits():
    """One expert that has every row, and others with the same weight, which the scale of the tensor sees too."""
    scheme = NVFP4Training.let(hadamard=None, gradient_rounding="round")
    model = Experts()
    model.weights[...] = jnp.stack([W] * 3)
    sizes, g = jnp.array([64, 0, 0]), jax.random.normal(jax.random.key(3), (64, 32))
    model = jqinject.quantize(model, Rule(scheme=scheme), inputs=(X, sizes))
    of_model, dx = nnx.jit(nnx.grad(lambda model, x: (model(x, sizes) * g).sum(), argnums=(0, 1)))(model, X)
    of_x, of_weight = jax.jit(lambda x, w: jax.vjp(product(scheme), x, w)[1](g))(X, W)
    np.testing.assert_allclose(dx, of_x, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(of_model.weights[0], of_weight, rtol=1e-5, atol=1e-4)
    assert not of_model.weights[1:].any()


def test_experts_take_no_transform_of_rows():
    with pytest.raises(
        TypeError, match=r"wgrad_lhs declares a pre_transform, which would mix rows of several"
    ) as caught:
        jqinject.quantize(
            Experts(), Rule(scheme=NVFP4Training), inputs=(X, jnp.array([32, 0, 32])), rngs=nnx.Rngs(0)
        )
    assert "hadamard=None" in str(caught.value)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.wide = nnx.Linear(32, 64, rngs=rngs)
        self.back = nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, x):
        return x + self.back(nnx.gelu(self.wide(x)))


class Scanned(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.vmap(Block)(rngs.split(2))

    def __call__(self, x):
        carry = nnx.Carry
        return nnx.scan(lambda x, block: block(x), in_axes=(carry, 0), out_axes=carry)(x, self.blocks)


class Looped(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs), Block(rngs)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.lengthy
@pytest.mark.parametrize("scheme", [MXFP8Training, Fp8DelayedTraining], ids=["MXFP8", "Fp8Delayed"])
def test_flax_layers_in_a_stack_train_as_in_a_loop(scheme):
    x = jax.random.normal(jax.random.key(1), (32, 32))
    scanned, looped = Scanned(nnx.Rngs(0)), Looped(nnx.Rngs(0))
    for at, block in enumerate(looped.blocks):
        nnx.update(block, jax.tree.map(lambda leaf, at=at: leaf[at], nnx.state(scanned.blocks)))

    def steps(model):
        model = jqinject.quantize(model, Rule(scheme=scheme), inputs=x, rngs=nnx.Rngs(7))
        model(x)

        def loss(model, x):
            return (model(x) ** 2).mean()

        step = nnx.jit(jqinject.value_and_grad(loss))
        return [step(model, x * (1 + n)) for n in range(2)]

    for (loss, gradients), (wanted, each) in zip(steps(scanned), steps(looped), strict=True):
        np.testing.assert_allclose(loss, wanted, rtol=1e-5)
        one = nnx.to_pure_dict(each)["blocks"]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), one[0], one[1])
        for name in ("wide", "back"):
            found = nnx.to_pure_dict(gradients)["blocks"][name]["kernel"]
            np.testing.assert_allclose(found, stacked[name]["kernel"], rtol=1e-4, atol=1e-5)


@pytest.mark.heavy
def test_layers_of_a_stack_draw_their_own_random_numbers():
    model = jqinject.quantize(Scanned(nnx.Rngs(0)), Rule(scheme=MXFP4Training), rngs=nnx.Rngs(7))
    keys = jax.random.key_data(model.blocks.wide.dot_general.stream.key[...])
    assert keys.shape[0] == 2 and not np.array_equal(keys[0], keys[1])
