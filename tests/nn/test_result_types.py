"""The type of a layer's result, and what it says of itself, never depend on the numbers or on tracing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject.dot import dot_general
from jqinject.nn import (
    QuantConcat,
    QuantConv,
    QuantConvTranspose,
    QuantEinsum,
    QuantEltwiseAdd,
    QuantEmbed,
    QuantIdentity,
    QuantLinear,
    QuantLinearGeneral,
    QuantMaxPool,
    QuantScaleBias,
    TruncAvgPool,
)
from jqinject.quant import (
    Int8ActPerTensorFloat,
    Int8BiasPerTensorFloatInternalScaling,
    Int8WeightPerChannelFloat,
    Int8WeightPerTensorFloat,
    Int32Bias,
    IntWeightSymmetricGroupQuant,
    MXInt8Act,
    MXInt8Weight,
    ShiftedUint8ActPerTensorFloat,
    ShiftedUint8WeightGroupQuantFloat,
    ShiftedUint8WeightPerChannelFloat,
    ShiftedUint8WeightPerTensorFloat,
    TruncTo8bit,
)
from jqinject.quant_tensor import IntQuantTensor

BATCHES = [np.linspace(*ends, 64, dtype=np.float32).reshape(2, 4, 8) for ends in ((-3, 2), (0.5, 4), (-1, 1))]
LAYERS = {
    "linear": lambda **given: QuantLinear(8, 4, **given),
    "general": lambda **given: QuantLinearGeneral(8, (2, 2), **given),
    "einsum": lambda **given: QuantEinsum("btd,dh->bth", (8, 4), (4,), **given),
    "conv": lambda **given: QuantConv(8, 4, (3,), **given),
    "depthwise": lambda **given: QuantConv(8, 8, (3,), feature_group_count=8, **given),
    "conv transpose": lambda **given: QuantConvTranspose(8, 4, (3,), **given),
    "scale bias": lambda **given: QuantScaleBias(8, **given),
}
WEIGHTS = {
    "int": Int8WeightPerTensorFloat,
    "int, channels": Int8WeightPerChannelFloat,
    "zero point": ShiftedUint8WeightPerTensorFloat,
    "zero points, channels": ShiftedUint8WeightPerChannelFloat,
    "groups": IntWeightSymmetricGroupQuant,
    "groups, zero points": ShiftedUint8WeightGroupQuantFloat,
    "groups, MX": MXInt8Weight,
}
INPUTS = {"int": Int8ActPerTensorFloat, "zero point": ShiftedUint8ActPerTensorFloat}
BIASES = {"none": None, "on the grid": Int32Bias, "own scale": Int8BiasPerTensorFloatInternalScaling}


def shapes(tree):
    """Structure, shapes and dtypes."""
    return jax.tree.structure(tree), [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]


def check(layer, *arguments, valid=True):
    """Eager results for different numbers, and the abstract one, are alike; what has integers is valid."""
    results = [layer(*inputs) for inputs in arguments]
    abstract = jax.eval_shape(lambda *inputs: layer(*inputs), *arguments[0])
    for y in results:
        assert shapes(y) == shapes(abstract)
        if valid and isinstance(y, IntQuantTensor):
            assert y.is_valid
    return results


def calibrated(layer):
    """In evaluation mode, with ranges from the first batch."""
    layer(BATCHES[0])
    layer.eval()
    return layer


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("kind", "weight"),
    [(k, w) for k in LAYERS for w in WEIGHTS if k != "scale bias" or "groups" not in w],
)
def test_a_layer_with_a_weight(kind, weight):
    grouped = "groups" in weight
    size = {"weight_group_size": 4} if grouped else {}
    for input_quant in INPUTS.values():
        given = {"weight_quant": WEIGHTS[weight], "input_quant": input_quant, "return_quant_tensor": True}
        layer = calibrated(LAYERS[kind](**given, **size, rngs=nnx.Rngs(0)))
        for y in check(layer, *((x,) for x in BATCHES)):
            assert isinstance(y, IntQuantTensor) is not grouped


@pytest.mark.heavy
@pytest.mark.parametrize("frozen", [False, True], ids=["float", "frozen"])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_bias(kind, frozen):
    for weight_quant in (Int8WeightPerTensorFloat, ShiftedUint8WeightPerTensorFloat):
        for bias_quant in BIASES.values():
            layer = LAYERS[kind](
                weight_quant=weight_quant,
                input_quant=Int8ActPerTensorFloat,
                bias_quant=bias_quant,
                return_quant_tensor=True,
                rngs=nnx.Rngs(0),
            )
            layer.bias[...] = jnp.linspace(-0.5, 0.5, layer.bias.size).reshape(layer.bias.shape)
            calibrated(layer)
            if frozen:
                jqinject.freeze(layer)
            check(layer, *((x,) for x in BATCHES))


@pytest.mark.parametrize("weight", ["int", "zero point", "zero points not whole"])
def test_an_input_that_comes_as_a_quant_tensor(weight):
    quant = ShiftedUint8WeightPerTensorFloat if "zero" in weight else Int8WeightPerTensorFloat
    overrides = {"weight_quantize_zero_point": False} if "not whole" in weight else {}
    layer = QuantLinear(8, 4, weight_quant=quant, return_quant_tensor=True, **overrides, rngs=nnx.Rngs(0))
    before = calibrated(QuantIdentity(ShiftedUint8ActPerTensorFloat, return_quant_tensor=True))
    layer.eval()
    for y in check(layer, *((before(x),) for x in BATCHES)):
        assert isinstance(y, IntQuantTensor) is ("not whole" not in weight)
    y = nnx.jit(lambda layer, x: layer(x))(layer, before(BATCHES[0]))
    assert shapes(y) == shapes(layer(before(BATCHES[0])))


def test_the_zero_points_are_taken_out_of_the_sums():
    layer = QuantLinear(
        8,
        4,
        use_bias=False,
        weight_quant=ShiftedUint8WeightPerTensorFloat,
        input_quant=ShiftedUint8ActPerTensorFloat,
        return_quant_tensor=True,
        rngs=nnx.Rngs(0),
    )
    calibrated(layer)
    x, w = layer.input_quant(BATCHES[0]), layer.quant_weight()
    y = layer(BATCHES[0])
    left, right = (np.asarray(t.int(), np.int64) - np.asarray(t.zero_point, np.int64) for t in (x, w))
    assert x.zero_point > 0 < w.zero_point and left.min() < 0 > right.min()
    np.testing.assert_array_equal(y.int(), left @ right)
    # Nine signed bits a factor, eight of them summed: 511 * 511 * 8 needs 21 bits.
    assert (y.signed, y.bit_width) == (True, 21)
    np.testing.assert_array_equal(y.zero_point, np.zeros_like(y.zero_point))


MERGED = {
    "add": (QuantEltwiseAdd, lambda x, y: (x, y)),
    "concat": (QuantConcat, lambda x, y: ([x, y],)),
}


@pytest.mark.parametrize("quant", [*INPUTS, "MX"])
@pytest.mark.parametrize("kind", MERGED)
def test_layers_of_two_inputs(kind, quant):
    make, arguments = MERGED[kind]
    given = MXInt8Act if quant == "MX" else INPUTS[quant]
    layer = make(given, None, return_quant_tensor=quant != "MX")
    inputs = [arguments(x, x[::-1]) for x in BATCHES]
    layer(*inputs[0])
    layer.eval()
    check(layer, *inputs)


@pytest.mark.parametrize("quant", INPUTS)
def test_layers_without_a_weight(quant):
    for layer in (
        QuantIdentity(INPUTS[quant], return_quant_tensor=True),
        QuantMaxPool((2,), input_quant=INPUTS[quant]),
    ):
        check(calibrated(layer), *((x,) for x in BATCHES))
    before = calibrated(QuantIdentity(INPUTS[quant], return_quant_tensor=True))
    trunc = TruncAvgPool((2,), trunc_quant=TruncTo8bit, return_quant_tensor=True)
    # A truncated zero point need not be whole.
    check(trunc, *((before(x),) for x in BATCHES), valid=quant == "int")
    for operation in (abs, lambda x: -x, lambda x: x + x, lambda x: x + 0.5, lambda x: x[..., :2]):
        # The least integer, -128, has no negative of 8 bits.
        check(operation, *((before(x),) for x in BATCHES), valid=quant != "int")


@pytest.mark.parametrize("weight", [w for w in WEIGHTS if w != "groups, MX"])
def test_an_embedding(weight):
    size = {"weight_group_size": 4} if "groups" in weight else {}
    layer = QuantEmbed(6, 8, weight_quant=WEIGHTS[weight], **size, return_quant_tensor=True, rngs=nnx.Rngs(0))
    layer.eval()
    check(layer, (np.array([0, 3]),), (np.array([5, 5]),))


def test_a_learned_bit_width_is_never_contracted_as_integers():
    x = IntQuantTensor(jnp.array([0.5, 1.0]), 0.5, 0.0, jnp.float32(4.0), True, False)
    for contract in (dot_general, jax.jit(dot_general, static_argnums=(2,), static_argnames="contraction")):
        np.testing.assert_array_equal(contract(x, x, (((0,), (0,)), ((), ()))), 1.25)
        with pytest.raises(ValueError, match="contraction='int' needs two IntQuantTensors of at most 8 bits"):
            contract(x, x, (((0,), (0,)), ((), ())), contraction="int")


def test_the_absolute_value_of_an_unsigned_tensor_with_a_zero_point_has_no_negative_numbers():
    x = IntQuantTensor.from_int(jnp.array([0, 3, 255]), 0.5, 100.0, 8, signed=False)
    for y in (abs(x), jax.jit(abs)(x)):
        np.testing.assert_array_equal(y.value, [50.0, 48.5, 77.5])
        assert y.is_valid and (y.bit_width, y.signed) == (8, False)
    slope = jax.grad(lambda v: abs(x.set(value=v, zero_point=0.0)).value.sum())(jnp.array([0.0, 1.0, 2.0]))
    np.testing.assert_array_equal(slope, [1.0, 1.0, 1.0])
