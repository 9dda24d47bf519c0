"""`Scheme`: six operands, each with a quantizer of the catalogue, against the same sums written out by hand."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jqinject
from jqinject.dot import Kept, QConvGeneralDilated, QDotGeneral, QEinsum, QuantMode, Scheme
from jqinject.inject import Binding
from jqinject.nn import QuantLinear
from jqinject.quant import (
    Fp8e4m3ActPerTensorDelayed,
    Fp8e4m3WeightPerTensorCurrent,
    Fp8e5m2GradPerTensorDelayed,
    Int4WeightPerGroupAbsMax,
    Int4WeightPerTensorFloatDecoupled,
    Int8ActPerTensorAbsMax,
    Int8ActPerTensorFloat,
    Int8BiasPerTensorFloatInternalScaling,
    Int8DynamicActPerRowAbsMax,
    Int8DynamicActPerRowFloat,
    Int8DynamicActPerTensorFloat,
    Int8DynamicGradPerRowFloat,
    Int8DynamicGradPerRowFloatStochastic,
    Int8DynamicGradPerTensorFloat,
    Int8WeightPerChannelFloat,
    Int8WeightPerTensorFloat,
    MXFloat4e2m1Act,
    MXFloat4e2m1Grad,
    MXFloat4e2m1Weight,
    NF4WeightPerChannelFloat,
    NVFP4Weight,
    ShiftedUint8WeightPerTensorFloat,
)
from jqinject.quant.aqt import OperandInjector, config_v4

NUMBERS = (((2,), (0,)), ((), ()))
X = jax.random.normal(jax.random.key(0), (4, 3, 16))
W = jax.random.normal(jax.random.key(1), (16, 8))
G = jax.random.normal(jax.random.key(2), (4, 3, 8))


class Rows(Int8DynamicActPerRowFloat):
    narrow_range = True


def quantized(x, *axes):
    """Whole numbers from -127 to 127, and what they count in: the largest magnitude along some axes over 127."""
    scale = np.abs(x).max(axes, keepdims=True) / np.float32(127)
    return np.clip(np.round(x / scale), -127, 127).astype(np.float64), scale.astype(np.float64)


def dequantized(x, *axes):
    whole, scale = quantized(x, *axes)
    return whole * scale


def through(gradient, x, *axes):
    """The derivative of `dequantized`: straight through, and by the scale to the largest magnitude."""
    whole, scale = quantized(x, *axes)
    of_scale = (gradient * (whole - x / scale)).sum(axes, keepdims=True) / 127
    return gradient + np.where(np.abs(x) == np.abs(x).max(axes, keepdims=True), np.sign(x) * of_scale, 0)


def products(op, x=X, w=W, g=G, numbers=NUMBERS):
    y, pull = jax.vjp(lambda x, w: op(x, w, numbers), x, w)
    return y, *pull(g)


x, w, g = (np.asarray(a) for a in (X, W, G))
FORWARD_X, FORWARD_W = dequantized(x, 2), dequantized(w, 0)
BY_ROW = dict(fprop_lhs=Rows, fprop_rhs=Int8WeightPerChannelFloat)
# names of a scheme -> the six operands, written out
TABLE = {
    "float": ({}, (x, w, g, w, x, g)),
    "forward": (BY_ROW, (FORWARD_X, FORWARD_W, g, FORWARD_W, FORWARD_X, g)),
    "weight": (dict(fprop_rhs=Int8WeightPerChannelFloat), (x, FORWARD_W, g, FORWARD_W, x, g)),
    "original": (BY_ROW | dict(dgrad_rhs=None, wgrad_lhs=None), (FORWARD_X, FORWARD_W, g, w, x, g)),
    "dgrad": (
        dict(dgrad_grad=Int8DynamicGradPerRowFloat, dgrad_rhs=Int8WeightPerChannelFloat),
        (x, w, dequantized(g, 2), dequantized(w, 1), x, g),
    ),
    "wgrad": (
        dict(wgrad_lhs=Rows, wgrad_grad=Int8DynamicGradPerRowFloat),
        (x, w, g, w, dequantized(x, 0, 1), dequantized(g, 0, 1)),
    ),
    "per tensor": (
        dict(
            fprop_rhs=Int8WeightPerTensorFloat,
            dgrad_grad=Int8DynamicGradPerTensorFloat,
            wgrad_grad=Int8DynamicGradPerTensorFloat,
        ),
        (
            x,
            dequantized(w, 0, 1),
            dequantized(g, 0, 1, 2),
            dequantized(w, 0, 1),
            x,
            dequantized(g, 0, 1, 2),
        ),
    ),
    "all": (
        BY_ROW
        | dict(
            dgrad_grad=Int8DynamicGradPerRowFloat,
            dgrad_rhs=Int8WeightPerChannelFloat,
            wgrad_lhs=Rows,
            wgrad_grad=Int8DynamicGradPerRowFloat,
        ),
        (
            FORWARD_X,
            FORWARD_W,
            dequantized(g, 2),
            dequantized(w, 1),
            dequantized(x, 0, 1),
            dequantized(g, 0, 1),
        ),
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_each_product_has_operands_of_its_own(name):
    names, (x1, w1, g2, w2, x3, g3) = TABLE[name]
    op = QDotGeneral(Scheme.let(**names))
    found = jax.jit(lambda: products(op))()
    dx, dw = np.einsum("abn,kn->abk", g2, w2), np.einsum("abk,abn->kn", x3, g3)
    if "fprop_lhs" in names:
        dx = through(dx, x, 2)
    if "fprop_rhs" in names:
        dw = through(dw, w, *((0, 1) if name == "per tensor" else (0,)))
    expected = np.einsum("abk,kn->abn", x1, w1), dx, dw
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", TABLE)
def test_however_it_is_compiled(name):
    op = QDotGeneral(Scheme.let(**TABLE[name][0]))
    found = products(op)
    for run in (
        jax.jit(lambda: products(op)),
        jax.jit(lambda: products(jax.checkpoint(op, static_argnums=2))),
    ):
        for one, other in zip(found, run(), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
    if name != "float":
        np.testing.assert_array_equal(op(X, W, NUMBERS), found[0])


def test_all_three_are_contracted_as_integers_and_the_sums_are_exact():
    op = QDotGeneral(Scheme.let(**TABLE["all"][0]))
    assert [product.kind for product in op.explain(X, W, NUMBERS)] == ["int", "int", "int"]
    found = jax.jit(lambda: products(op))()
    for one, other in zip(found, products(op), strict=True):
        np.testing.assert_array_equal(one, other)
    dtypes = str(jax.make_jaxpr(lambda: products(op))())
    assert dtypes.count("preferred_element_type=int32") >= 3


@pytest.mark.heavy
def test_a_layer_with_the_same_quantizers_makes_the_same_numbers():
    layer = QuantLinear(
        16, 8, use_bias=False, input_quant=Rows, weight_quant=Int8WeightPerChannelFloat,
        contraction="int", rngs=nnx.Rngs(0),
    )  # fmt: skip
    layer.kernel[...] = W
    op = QDotGeneral(Scheme.let(**BY_ROW))
    np.testing.assert_array_equal(layer(X), op(X, W, NUMBERS))
    _, pull = jax.vjp(lambda x: layer(x), X)
    np.testing.assert_array_equal(pull(G)[0], products(op)[1])


FORMATS = {
    "running range": dict(fprop_lhs=Int8ActPerTensorAbsMax, fprop_rhs=Int8WeightPerChannelFloat),
    "learned": dict(fprop_lhs=Int8ActPerTensorFloat, fprop_rhs=Int4WeightPerTensorFloatDecoupled),
    "groups": dict(fprop_lhs=Int8DynamicActPerTensorFloat, fprop_rhs=Int4WeightPerGroupAbsMax.let(group_size=8)),
    "codebook": dict(fprop_rhs=NF4WeightPerChannelFloat),
    "zero point": dict(fprop_lhs=Int8DynamicActPerTensorFloat, fprop_rhs=ShiftedUint8WeightPerTensorFloat),
    "mx": dict(
        fprop_lhs=MXFloat4e2m1Act,
        fprop_rhs=MXFloat4e2m1Weight,
        dgrad_grad=MXFloat4e2m1Grad,
        wgrad_grad=MXFloat4e2m1Grad,
    ),
    "fp8": dict(
        fprop_lhs=Fp8e4m3ActPerTensorDelayed,
        fprop_rhs=Fp8e4m3WeightPerTensorCurrent,
        dgrad_grad=Fp8e5m2GradPerTensorDelayed,
        wgrad_grad=Fp8e5m2GradPerTensorDelayed,
    ),
    "stochastic": dict(
        dgrad_grad=Int8DynamicGradPerRowFloatStochastic, wgrad_grad=Int8DynamicGradPerRowFloatStochastic
    ),
}  # fmt: skip


@pytest.mark.heavy
@pytest.mark.parametrize("name", FORMATS)
def test_quantizers_of_the_catalogue(name):
    op = QDotGeneral(Scheme.let(**FORMATS[name]), rngs=nnx.Rngs(3))
    layer = nnx.Linear(16, 8, dot_general=op, rngs=nnx.Rngs(0))
    jqinject.initialize(layer, X)
    nnx.jit(lambda m, x: m(x))(layer, X)
    loss = lambda m, x: (m(x) * G).sum()  # noqa: E731
    found = nnx.jit(jqinject.grad(loss, argnums=(0, 1)))(layer, X)
    exact = nnx.grad(loss, argnums=(0, 1))(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), X)
    for one, other in ((found[0]["kernel"], exact[0]["kernel"]), (found[1], exact[1])):
        one, other = (np.asarray(a[...]) for a in (one, other))
        error = np.linalg.norm(one - other) / np.linalg.norm(other)
        assert error < 0.35, error
    graphdef, _ = nnx.split(layer)
    assert pickle.loads(pickle.dumps(graphdef)) == graphdef


def test_a_layer_of_groups_makes_the_numbers_of_its_scheme():
    quantizer = Int4WeightPerGroupAbsMax.let(group_size=8)
    layer = QuantLinear(16, 8, use_bias=False, weight_quant=quantizer, rngs=nnx.Rngs(0))
    op = QDotGeneral(Scheme.let(fprop_rhs=quantizer))
    np.testing.assert_array_equal(layer(X), op(X, layer.kernel[...], NUMBERS))


@pytest.mark.heavy
def test_large_groups_are_contracted_as_integers():
    x, w = jax.random.normal(jax.random.key(5), (4, 512)), jax.random.normal(jax.random.key(6), (512, 8))
    op = QDotGeneral(Scheme.let(fprop_lhs=Rows, fprop_rhs=Int4WeightPerGroupAbsMax.let(group_size=128)))
    numbers = (((1,), (0,)), ((), ()))
    explained = op.explain(x, w, numbers)
    assert explained[0].kind == "int", str(explained)
    tensor = QuantLinear(
        512, 8, use_bias=False, weight_quant=Int4WeightPerGroupAbsMax, weight_group_size=128, rngs=nnx.Rngs(0)
    )
    tensor.kernel[...] = w
    expected = dequantized(np.asarray(x), 1) @ np.asarray(tensor.quant_weight().value, np.float64)
    np.testing.assert_allclose(op(x, w, numbers), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.heavy
def test_learned_scales_train():
    class Learned(Int8WeightPerTensorFloat):
        scaling_impl_type = "parameter_from_stats"

    scheme = Scheme.let(
        fprop_lhs=Int8ActPerTensorFloat.let(collect_stats_steps=1), fprop_rhs=Learned.let(bit_width=3)
    )
    layer = nnx.Linear(16, 8, dot_general=QDotGeneral(scheme), rngs=nnx.Rngs(0))
    target = jnp.einsum("abk,kn->abn", X, W)
    jqinject.initialize(layer, X)
    layer(X)
    before = {path: np.array(v[...]) for path, v in nnx.to_flat_state(nnx.state(layer, nnx.Param))}
    optimizer = nnx.Optimizer(layer, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(layer, optimizer):
        loss, gradients = jqinject.value_and_grad(lambda m: jnp.square(m(X) - target).mean())(layer)
        optimizer.update(layer, gradients)
        return loss

    losses = [float(step(layer, optimizer)) for _ in range(60)]
    assert losses[-1] < 0.4 * losses[0]
    after = dict(nnx.to_flat_state(nnx.state(layer, nnx.Param)))
    scales = [path for path in before if "scaling_impl" in path]
    assert len(scales) == 2
    assert all(not np.array_equal(before[path], after[path][...]) for path in before)


def test_amaxes_of_a_gradient_enter_once_a_step():
    names = dict(dgrad_grad=Fp8e5m2GradPerTensorDelayed, wgrad_grad=Fp8e5m2GradPerTensorDelayed)
    layer = nnx.Linear(16, 8, dot_general=QDotGeneral(Scheme.let(**names)), rngs=nnx.Rngs(0))
    jqinject.initialize(layer, X)
    step = nnx.jit(jqinject.grad(lambda m, g: (m(X) * g).sum()))
    for factor in (1.0, 3.0):
        step(layer, factor * G)
    for name in names:
        history = getattr(layer.dot_general, name).quant.amax_history
        newest = history.amax_history[...]
        np.testing.assert_allclose(newest[0], 3 * jnp.abs(G).max(), rtol=1e-6)
        np.testing.assert_allclose(newest[-1], jnp.abs(G).max(), rtol=1e-6)


def test_stochastic_rounding_draws_anew_and_again():
    def layer():
        op = QDotGeneral(Scheme.let(**FORMATS["stochastic"]), rngs=nnx.Rngs(3))
        made = nnx.Linear(16, 8, dot_general=op, rngs=nnx.Rngs(0))
        made(X)
        return made

    step = nnx.jit(nnx.grad(lambda m, x: (m(x) * G).sum(), argnums=1))
    one, other = layer(), layer()
    first, second = step(one, X), step(one, X)
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(step(other, X), first)
    one.eval()
    np.testing.assert_array_equal(step(one, X), step(one, X))


@pytest.mark.heavy
def test_tiles_have_scales_of_their_own():
    names = BY_ROW | dict(tile_size=4)
    op = QDotGeneral(Scheme.let(**names))
    pieces = [slice(start, start + 4) for start in range(0, 16, 4)]
    tiled = [dequantized(x[..., piece], 2) @ dequantized(w[piece], 0) for piece in pieces]
    y, dx, _ = products(op)
    np.testing.assert_allclose(y, sum(tiled), rtol=2e-6, atol=2e-6)
    of_pieces = [through(g @ dequantized(w[piece], 0).T, x[..., piece], 2) for piece in pieces]
    np.testing.assert_allclose(dx, np.concatenate(of_pieces, -1), rtol=2e-6, atol=2e-6)
    assert op.explain(X, W, NUMBERS)[0].kind == "int"
    wide = QDotGeneral(Scheme.let(wgrad_lhs=Rows, wgrad_grad=Int8DynamicGradPerRowFloat, wgrad_tile_size=2))
    dw = products(wide)[2]
    parts = [
        np.einsum("abk,abn->kn", dequantized(x[piece], 0, 1), dequantized(g[piece], 0, 1))
        for piece in (slice(0, 2), slice(2, 4))
    ]
    np.testing.assert_allclose(dw, sum(parts), rtol=2e-6, atol=2e-6)


def test_einsum_takes_the_operands_in_any_order():
    scheme = Scheme.let(**TABLE["all"][0])
    y = QEinsum(scheme)("abk,kn->nab", X, W)
    np.testing.assert_array_equal(y.transpose(1, 2, 0), QDotGeneral(scheme)(X, W, NUMBERS))
    heads = jax.random.normal(jax.random.key(7), (16, 2, 4))
    batch = QEinsum(Scheme.let(fprop_lhs=Rows, fprop_rhs=Rows))
    left, right = X[:, :, None, :4] + jnp.zeros((4, 3, 2, 4)), X[:, :, None, 4:8] + jnp.zeros((4, 3, 2, 4))
    found = batch("bqhd,bkhd->bhqk", left, right)
    expected = np.einsum(
        "bqhd,bkhd->bhqk", dequantized(np.asarray(left), 3), dequantized(np.asarray(right), 3)
    )
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-6)
    assert QEinsum(scheme)("abk,khd->abhd", X, heads).shape == (4, 3, 2, 4)


@pytest.mark.heavy
def test_a_convolution():
    images, kernel = (
        jax.random.normal(jax.random.key(8), (2, 6, 6, 3)),
        jax.random.normal(jax.random.key(9), (3, 3, 3, 4)),
    )
    names = dict(
        fprop_lhs=Int8DynamicActPerTensorFloat.let(narrow_range=True),
        fprop_rhs=Int8WeightPerChannelFloat,
        dgrad_grad=Int8DynamicGradPerTensorFloat,
        dgrad_rhs=None,
    )  # fmt: skip
    op = QConvGeneralDilated(Scheme.let(**names))
    arguments = ((1, 1), "SAME", None, None, ("NHWC", "HWIO", "NHWC"))
    y, pull = jax.vjp(lambda a, b: op(a, b, *arguments), images, kernel)
    plain = lambda a, b: jax.lax.conv_general_dilated(a, b, *arguments)  # noqa: E731
    a, b = dequantized(np.asarray(images), 0, 1, 2, 3), dequantized(np.asarray(kernel), 0, 1, 2)
    np.testing.assert_allclose(y, plain(jnp.float32(a), jnp.float32(b)), rtol=1e-5, atol=1e-5)
    gradient = jax.random.normal(jax.random.key(10), y.shape)
    da, db = pull(gradient)
    low = jnp.float32(dequantized(np.asarray(gradient), 0, 1, 2, 3))
    _, pull_original = jax.vjp(plain, images, kernel)
    _, pull_forward = jax.vjp(plain, jnp.float32(a), jnp.float32(b))
    expected = through(np.asarray(pull_original(low)[0]), np.asarray(images), 0, 1, 2, 3)
    np.testing.assert_allclose(da, expected, rtol=1e-4, atol=1e-4)
    expected = through(np.asarray(pull_forward(gradient)[1]), np.asarray(kernel), 0, 1, 2)
    np.testing.assert_allclose(db, expected, rtol=1e-4, atol=1e-4)


CONVOLUTIONS = {
    "strides": ((2, 1), ((1, 0), (2, 3)), (1, 1), (1, 1)),
    "dilated": ((1, 2), ((2, 1), (2, 2)), (2, 1), (1, 2)),
    "beyond the border": ((1, 1), ((4, 3), (-1, 0)), (1, 1), (1, 1)),
}


@pytest.mark.heavy
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_the_gradients_of_a_convolution_are_convolutions_of_integers(name):
    """By one scale for all of each operand, against the gradients of the float convolution of the same numbers."""
    strides, padding, left, right = CONVOLUTIONS[name]
    shapes = (2, 7, 6, 3), (3, 2, 3, 4)
    images, kernel = (jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate(shapes))
    arguments = (strides, padding, left, right, ("NHWC", "HWIO", "NHWC"))
    whole = OperandInjector.let(calibration_axes="tensor")
    rows = OperandInjector.let(bits=6)
    names = dict(
        fprop_lhs=whole, fprop_rhs=whole, dgrad_grad=rows, dgrad_rhs=rows, wgrad_lhs=rows, wgrad_grad=whole
    )

    def quantized(operand, x, kept):
        axes = tuple(range(x.ndim)) if operand is whole else tuple(a for a in range(x.ndim) if a != kept)
        return Binding(operand, {"shared_axes": axes}).resolve("tensor_quant")(x).value

    def plain(a, b):
        return jax.lax.conv_general_dilated(a, b, *arguments)

    op = QConvGeneralDilated(Scheme.let(**names))
    y, pull = jax.vjp(lambda a, b: op(a, b, *arguments), images, kernel)
    g = jax.random.normal(jax.random.key(5), y.shape)
    dx, dw = jax.vjp(plain, quantized(rows, images, 3), quantized(rows, kernel, 2))[1](quantized(rows, g, 0))
    dw = jax.vjp(plain, quantized(rows, images, 3), kernel)[1](quantized(whole, g, 3))[1]
    for found, expected in zip(pull(g), (dx, dw), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    program = str(jax.make_jaxpr(pull)(g))
    assert program.count("preferred_element_type=int32") == 2


@pytest.mark.parametrize(
    "names",
    [BY_ROW, dict(fprop_lhs=Fp8e4m3ActPerTensorDelayed, fprop_rhs=Fp8e4m3WeightPerTensorCurrent)],
    ids=["int8", "fp8"],
)
def test_frozen_it_serves_what_was_trained(names):
    layer = nnx.Linear(16, 8, dot_general=QDotGeneral(Scheme.let(**names)), rngs=nnx.Rngs(0))
    jqinject.initialize(layer, X)
    layer(X)
    layer.eval()
    expected = layer(X)
    frozen = jqinject.freeze(layer, allow_uncalibrated=True)
    assert frozen.kernel.shape == (16, 8) and set(frozen.kernel.get_raw_value()) == {"scale", "value"}
    np.testing.assert_array_equal(frozen(X), expected)
    gradient = jax.grad(lambda x: (frozen(x) * G).sum())(X)
    assert np.isfinite(gradient).all()


@pytest.mark.heavy
@pytest.mark.parametrize("quantizer", [NF4WeightPerChannelFloat, Int4WeightPerGroupAbsMax])
def test_every_format_is_converted_and_served(quantizer):
    scheme = Scheme.let(
        fprop_rhs=quantizer.let(group_size=8) if quantizer is Int4WeightPerGroupAbsMax else quantizer
    )
    op = QDotGeneral(scheme, rhs_quant_mode=QuantMode.CONVERT)
    expected = op(X, W, NUMBERS)
    np.testing.assert_allclose(expected, QDotGeneral(scheme)(X, W, NUMBERS), rtol=1e-6, atol=1e-6)
    op.rhs_quant_mode = QuantMode.SERVE
    np.testing.assert_array_equal(op(X, jnp.zeros_like(W), NUMBERS), expected)


def test_what_is_not_stored_says_so():
    op = QDotGeneral(
        Scheme.let(fprop_rhs=OperandInjector.let(dequant_mode="this_input")), rhs_quant_mode=QuantMode.CONVERT
    )
    with pytest.raises(ValueError, match=r"fprop_rhs = OperandInjector is not stored.*\n  cure: a quantizer"):
        op(X, W, NUMBERS)


def test_explain_says_what_does_not_fit():
    op = QDotGeneral(Scheme.let(**BY_ROW, dgrad_grad=Int8DynamicGradPerRowFloat))
    fprop, dgrad, wgrad = op.explain(X, W, NUMBERS)
    assert (fprop.kind, dgrad.kind, wgrad.kind) == ("int", "float", "float")
    assert "the scales of shape (1, 8) vary along what is summed over" in dgrad.why
    assert "the other operand is float" in wgrad.why
    assert str(op.explain(X, W, NUMBERS)).count("\n") == 2


def test_a_scheme_may_be_a_class_and_its_operands_read_from_it():
    from jqinject.inject import this

    class Low(Scheme):
        bits = 3
        fprop_rhs = Int8WeightPerChannelFloat.let(bit_width=(this << 1).bits)

    def wide(scheme):
        return QDotGeneral(scheme)(X, W, NUMBERS)

    expected = wide(Scheme.let(fprop_rhs=Int8WeightPerChannelFloat.let(bit_width=4)))
    np.testing.assert_array_equal(wide(Low.let(bits=4)), expected)
    bound = Binding(Int8WeightPerChannelFloat, {"bit_width": 4})
    np.testing.assert_array_equal(wide(Scheme.let(fprop_rhs=bound)), expected)
    assert not np.array_equal(wide(Low), expected)


REFUSED = {
    "no quantizer": (dict(fprop_rhs=8), TypeError, "fprop_rhs takes a quantizer .* None for float; got 8"),
    "kept forward": (dict(fprop_lhs=Kept.FPROP), TypeError, "fprop_lhs takes a quantizer"),
    "misspelt": (dict(fprop_rsh=None), TypeError, "'fprop_rsh' would have no effect.*\n.*fprop_rhs"),
    "tile": (dict(tile_size=0), ValueError, "tile_size must be at least 1, got 0"),
    "tile of no int": (dict(tile_size="4"), TypeError, "tile_size must be an int"),
    "accumulator": (dict(accumulator_dtype=jnp.float32), TypeError, "must be a dtype of integers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_nonsense_is_refused_at_once(name):
    names, kind, text = REFUSED[name]
    with pytest.raises(kind, match=text):
        QDotGeneral(Scheme.let(**names))


REFUSED_WHEN_CALLED = {
    "weights of a gradient": (
        dict(dgrad_grad=Int8WeightPerTensorFloat), TypeError, "quantizes weights, and this operand is a gradient",
    ),
    "a learned gradient": (dict(wgrad_grad=Int8ActPerTensorFloat), TypeError, "learns a parameter.*\n  cure: a ...G"),
    "running ranges of a gradient": (dict(dgrad_grad=Int8ActPerTensorAbsMax), TypeError, "keeps a statistic"),
    "a learned scale backward": (
        dict(dgrad_rhs=Int4WeightPerTensorFloatDecoupled), TypeError, "no derivative reaches from a backward product",
    ),
    "a bias": (dict(fprop_rhs=Int8BiasPerTensorFloatInternalScaling), TypeError, "quantizes biass?e?s?, and none is"),
    "no rngs": (
        dict(dgrad_grad=Int8DynamicGradPerRowFloatStochastic), ValueError, "there are no rngs.*\n  cure: QDotGeneral"
    ),
    "tiles that do not fit": (dict(tile_size=5), ValueError, "tile_size=5 does not divide"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_WHEN_CALLED)
def test_nonsense_is_refused_when_it_is_called(name):
    names, kind, text = REFUSED_WHEN_CALLED[name]
    with pytest.raises(kind, match=text):
        products(QDotGeneral(Scheme.let(**names)))


def test_one_module_does_not_keep_two_weights():
    scheme = Scheme.let(fprop_rhs=Int4WeightPerTensorFloatDecoupled)
    op = QDotGeneral(scheme, lhs_shape=(1, 3, 16), rhs_shape=(16, 8))
    op(X, W, NUMBERS)
    with pytest.raises(ValueError, match=r"for an operand of shape \(16, 8\).*given one of shape \(16, 4\)"):
        op(X, W[:, :4], NUMBERS)


def test_both_operands_can_be_stored():
    op = QDotGeneral(Scheme.let(**BY_ROW), lhs_quant_mode=QuantMode.CONVERT, rhs_quant_mode=QuantMode.CONVERT)
    expected = op(X, W, NUMBERS)
    np.testing.assert_array_equal(expected, QDotGeneral(Scheme.let(**BY_ROW))(X, W, NUMBERS))
    op.set_attributes(lhs_quant_mode=QuantMode.SERVE, rhs_quant_mode=QuantMode.SERVE)
    np.testing.assert_array_equal(op(0 * X, 0 * W, NUMBERS), expected)


def test_it_has_no_second_derivative():
    op = QDotGeneral(Scheme.let(**BY_ROW))
    with pytest.raises(TypeError, match="no second derivative"):
        jax.grad(lambda x: jax.grad(lambda x: (op(x, W, NUMBERS) ** 2).sum())(x).sum())(X)
    with pytest.raises(TypeError, match="forward-mode differentiation"):
        jax.jvp(lambda x: op(x, W, NUMBERS), (X,), (X,))


@pytest.mark.heavy
def test_explain_shows_the_operands_as_a_table():
    class Mixed(Scheme):
        fprop_lhs = Int8DynamicActPerRowAbsMax
        fprop_rhs = NVFP4Weight
        dgrad_grad = Fp8e5m2GradPerTensorDelayed
        dgrad_rhs = None

    tree = jqinject.explain(Mixed)
    assert str(tree).splitlines() == [
        "name        operand          numbers        quantizer                    decided by",
        "fprop_lhs   x in y = x w     8 bits         Int8DynamicActPerRowAbsMax   Mixed",
        "fprop_rhs   w in y = x w     e2m1 in 16s    NVFP4Weight                  Mixed",
        "dgrad_grad  g in dx = g w^T  float8_e5m2    Fp8e5m2GradPerTensorDelayed  Mixed",
        "dgrad_rhs   w in dx = g w^T  float                                       Mixed",
        "wgrad_lhs   x in dw = x^T g  as in y = x w                               Scheme",
        "wgrad_grad  g in dw = x^T g  float                                       Scheme",
    ]
    assert tree["fprop_rhs"].value is NVFP4Weight and not tree.errors()
    config = str(jqinject.explain(config_v4(fwd_bits=4, drhs_bits="e4m3")))
    assert [config.count(numbers) for numbers in ("4 bits", "8 bits", "float8_e4m3fn")] == [2, 2, 2]
