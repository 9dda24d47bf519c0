"""Which numbers a layer contracts: floats, integers, 8-bit floats, and what it says where it can't."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject.quant as q
from jqinject.nn import QuantConv, QuantLinear
from jqinject.quant_tensor import IntQuantTensor

X = jax.random.normal(jax.random.key(0), (4, 8))
IMAGES = jax.random.normal(jax.random.key(1), (2, 7, 7, 4))
INPUTS = [q.Int8ActPerTensorFloat, q.ShiftedUint8ActPerTensorFloat, q.Uint8ActPerTensorFloat]
WEIGHTS = [
    q.Int8WeightPerChannelFloat,
    q.ShiftedUint8WeightPerTensorFloat,
    q.SignedTernaryWeightPerTensorConst,
]


def twins(make, x):
    """The same layer, contracting integers and floats, in evaluation mode."""
    layers = [make(contraction) for contraction in ("int", "float")]
    for layer in layers:
        layer(x)
        layer.eval()
    return layers


@pytest.mark.heavy
@pytest.mark.parametrize("input_quant", INPUTS, ids=lambda i: i.__name__)
@pytest.mark.parametrize("weight_quant", WEIGHTS, ids=lambda w: w.__name__)
@pytest.mark.parametrize("run", [nnx.jit(lambda m, x: m(x)), lambda m, x: m(x)], ids=["jit", "eager"])
def test_dense_integers_are_the_floats(input_quant, weight_quant, run):
    integers, floats = twins(
        lambda contraction: QuantLinear(
            8,
            6,
            weight_quant=weight_quant,
            input_quant=input_quant,
            contraction=contraction,
            rngs=nnx.Rngs(0),
        ),
        X,
    )
    np.testing.assert_allclose(run(integers, X), run(floats, X), rtol=1e-5, atol=1e-6)


@pytest.mark.heavy
@pytest.mark.parametrize("input_quant", INPUTS, ids=lambda i: i.__name__)
@pytest.mark.parametrize(
    "options", [{}, {"strides": 2, "padding": "VALID"}, {"padding": "CIRCULAR"}, {"feature_group_count": 2}]
)
def test_convolved_integers_are_the_floats(input_quant, options):
    integers, floats = twins(
        lambda contraction: QuantConv(
            4,
            6,
            (3, 3),
            weight_quant=q.Int8WeightPerChannelFloat,
            input_quant=input_quant,
            contraction=contraction,
            rngs=nnx.Rngs(0),
            **options,
        ),
        IMAGES,
    )
    for x in (IMAGES, IMAGES[0], IMAGES[None]):  # any number of batch axes
        np.testing.assert_allclose(nnx.jit(lambda m, x: m(x))(integers, x), floats(x), rtol=1e-4, atol=1e-5)


@pytest.mark.heavy
def test_gradients_are_those_of_fake_quantization():
    integers, floats = (
        QuantLinear(
            8,
            6,
            weight_quant=q.Int8WeightPerChannelFloat,
            input_quant=q.Int8ActPerTensorFloat,
            contraction=contraction,
            rngs=nnx.Rngs(0),
        )
        for contraction in ("int", "float")
    )
    for _ in range(2):
        ours, theirs = (
            nnx.jit(nnx.grad(lambda m, x: jnp.sin(m(x)).sum()))(layer, X) for layer in (integers, floats)
        )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), ours, theirs)


def test_a_quant_tensor_is_input_enough():
    layer = QuantLinear(8, 6, weight_quant=q.Int8WeightPerChannelFloat, contraction="int", rngs=nnx.Rngs(0))
    x = IntQuantTensor.from_int(jnp.round(X * 20), 0.05)
    np.testing.assert_allclose(layer(x), x.value @ layer.quant_weight().value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {},
            "needs an input and a weight in integers of at most 8 bits.*got float32 numbers without a quantizer",
        ),
        ({"input_quant": q.Int8ActPerTensorFloat, "input_bit_width": 12}, "got 12-bit integers"),
        ({"input_quant": q.Fp8e4m3ActPerTensorCurrent}, "got float8_e4m3fn"),
        (
            {"input_quant": q.Int8ActPerTensorFloat, "weight_quant": None},
            "and float32 numbers without a quantizer",
        ),
    ],
)
def test_integers_that_are_not_there(given, text):
    layer = QuantLinear(8, 6, contraction="int", rngs=nnx.Rngs(0), **given)
    with pytest.raises(ValueError, match=text):
        layer(X)


def test_8_bit_floats_when_integers_are_asked_for():
    layer = QuantLinear(
        8,
        6,
        weight_quant=q.Fp8e4m3WeightPerTensorCurrent,
        input_quant=q.Fp8e4m3ActPerTensorCurrent,
        contraction="int",
        rngs=nnx.Rngs(0),
    )
    with pytest.raises(ValueError, match=r"QuantLinear\(contraction='int'\) needs"):
        layer(X)


def test_masked_filters_are_no_integers():
    layer = QuantConv(
        4,
        6,
        (3, 3),
        mask=jnp.ones((3, 3, 4, 6)),
        input_quant=q.Int8ActPerTensorFloat,
        contraction="int",
        rngs=nnx.Rngs(0),
    )
    with pytest.raises(ValueError, match="and no mask"):
        layer(IMAGES)


def test_an_unknown_contraction():
    with pytest.raises(
        ValueError, match="contraction must be one of 'auto', 'float', 'int', 'fp8', got 'int4'"
    ):
        QuantLinear(8, 6, contraction="int4", rngs=nnx.Rngs(0))


@pytest.mark.parametrize("contraction", ["int", "fp8"])
def test_a_function_that_would_never_be_called_is_refused(contraction):
    def own(*args, **kwargs):
        return jax.lax.dot_general(*args, **kwargs)

    message = rf"QuantLinear\(contraction='{contraction}'\) .* would never call dot_general=<function"
    with pytest.raises(ValueError, match=message) as caught:
        QuantLinear(4, 3, dot_general=own, contraction=contraction, rngs=nnx.Rngs(0))
    assert "cure: contraction='auto' or 'float', which call it; or leave dot_general out" in str(caught.value)
    layer = QuantLinear(4, 3, contraction=contraction, rngs=nnx.Rngs(0))
    layer.dot_general = own
    with pytest.raises(ValueError, match=message):
        layer(jnp.ones((2, 4)))
