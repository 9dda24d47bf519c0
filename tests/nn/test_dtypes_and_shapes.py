"""What comes out has the parent's dtype and shape, whatever is quantized, also of empty batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject import ExtendedInjector
from jqinject.core import ClampedBinaryQuant, ConstScaling
from jqinject.nn import QuantHardTanh, QuantIdentity, QuantLinear, QuantReLU, QuantSigmoid, QuantTanh
from jqinject.quant import (
    Int8ActPerTensorFloat,
    Int8ActPerTensorFloatMinMaxInit,
    Int8BiasPerTensorFloatInternalScaling,
    Int8WeightPerChannelFloat,
    Int32Bias,
    ShiftedUint8ActPerTensorFloat,
)
from jqinject.quant_tensor import IntQuantTensor

X = jax.random.normal(jax.random.key(1), (2, 3, 4, 6))
EVERYTHING = {
    "weight_quant": Int8WeightPerChannelFloat,
    "input_quant": Int8ActPerTensorFloat,
    "bias_quant": Int32Bias,
    "output_quant": ShiftedUint8ActPerTensorFloat,
}
SETS = {
    "weight": {"weight_quant": Int8WeightPerChannelFloat},
    "accumulator": {**EVERYTHING, "output_quant": None},
    "all": EVERYTHING,
    "own bias": {**EVERYTHING, "bias_quant": Int8BiasPerTensorFloatInternalScaling},
}
DTYPES = {
    "float32": ({}, jnp.float32),
    "computed in bfloat16": ({"dtype": jnp.bfloat16}, jnp.bfloat16),
    "computed in float16": ({"dtype": jnp.float16}, jnp.float16),
    "bfloat16": ({"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}, jnp.bfloat16),
}
ACTIVATIONS = [QuantIdentity, QuantReLU, QuantSigmoid, QuantTanh, QuantHardTanh]


@pytest.mark.parametrize("quantizers", SETS.values(), ids=SETS)
@pytest.mark.parametrize("given", DTYPES.values(), ids=DTYPES)
def test_dtype(make, given, quantizers):
    given, dtype = given
    layer = make(**given, **quantizers)
    for x in (X, X.astype(dtype)):
        y, floats = layer(x), make(**given, weight_quant=None)(x)
        assert (y.dtype, y.shape) == (dtype, floats.shape)
        reach = float(jnp.max(jnp.abs(floats.astype(jnp.float32))))
        np.testing.assert_allclose(y.astype(jnp.float32), floats.astype(jnp.float32), atol=0.03 * reach)
    assert layer.weight_quant.scale().dtype == jnp.float32
    if layer.return_quant_tensor is False and layer.output_quant is not None:
        layer.return_quant_tensor = True
        assert (layer(X).value.dtype, layer(X).is_valid) == (dtype, True)


@pytest.mark.parametrize("quantizers", SETS.values(), ids=SETS)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_an_empty_batch_is_empty_and_is_no_statistic(make, quantizers, training):
    layer = make(**quantizers)
    layer(X)
    if not training:
        layer.eval()
    before = jax.tree.map(np.asarray, nnx.state(layer))
    y = layer(X[:0])
    assert y.shape == make(weight_quant=None)(X[:0]).shape
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, nnx.state(layer)))
    assert bool(jnp.all(jnp.isfinite(layer(X))))


@pytest.mark.parametrize("layer", ACTIVATIONS)
def test_empty_activations(layer):
    quant = layer(return_quant_tensor=True)
    for shape in ((0,), (0, 5), (3, 0)):
        y = quant(jnp.zeros(shape))
        assert (y.shape, y.is_valid) == (shape, True)
        assert np.isfinite(y.scale)


@pytest.mark.heavy
def test_a_layer_of_no_outputs_or_no_inputs():
    for sizes in ((3, 0), (0, 3)):
        layer = QuantLinear(
            *sizes,
            rngs=nnx.Rngs(0),
            kernel_init=nnx.initializers.zeros_init(),
            weight_quant=Int8WeightPerChannelFloat,
        )
        np.testing.assert_array_equal(layer(jnp.ones((2, sizes[0]))), np.zeros((2, sizes[1])))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("layer", ACTIVATIONS)
def test_activations(layer, dtype):
    x = jnp.linspace(-2, 2, 64, dtype=dtype).reshape(8, 8)
    quant = layer(return_quant_tensor=True)
    y = quant(x)
    assert (y.value.dtype, y.scale.dtype, y.is_valid) == (dtype, jnp.float32, True)
    expected = layer(act_quant=None)(x).astype(jnp.float32)
    within = float(y.scale) / 2 + 2.0**-7  # half a step, and rounding to bfloat16
    reach = 127 / 128 if layer is QuantHardTanh else np.inf  # 1.0 itself is one step beyond
    np.testing.assert_allclose(y.value.astype(jnp.float32), jnp.minimum(expected, reach), atol=within)


@pytest.mark.parametrize("layer", ACTIVATIONS)
def test_activations_of_a_quant_tensor(layer):
    x = IntQuantTensor.from_int(jnp.arange(-8, 8), scale=0.25, bit_width=4)
    np.testing.assert_array_equal(layer()(x), layer()(x.value))
    np.testing.assert_array_equal(layer(act_quant=None)(x), layer(act_quant=None)(x.value))
    inside = layer(act_quant=None, return_quant_tensor=False)
    assert isinstance(inside(x), jax.Array)


@pytest.mark.parametrize(
    ("layer", "bounds"), [(QuantIdentity, (-8, 7)), (QuantReLU, (0, 7)), (QuantHardTanh, (-4, 4))]
)
def test_without_a_quantizer_the_scale_is_kept(layer, bounds):
    x = IntQuantTensor.from_int(jnp.arange(-8, 8), scale=0.25, bit_width=4)
    passing = layer(act_quant=None, return_quant_tensor=True)
    y = passing(x)
    np.testing.assert_array_equal(y.int(), np.clip(np.arange(-8, 8), *bounds))
    assert (float(y.scale), y.bit_width, y.signed) == (0.25, 4, True)
    assert isinstance(passing(x.value), jax.Array)


def test_without_a_quantizer_relu_keeps_the_scale_of_its_input_quantizer():
    x = IntQuantTensor.from_int(jnp.arange(-8, 8), scale=0.25, bit_width=4)
    y = QuantReLU(act_quant=None, input_quant=Int8ActPerTensorFloat, return_quant_tensor=True)
    y.input_quant.disable_quant = True
    assert isinstance(y(x), IntQuantTensor)
    np.testing.assert_array_equal(y(x).int(), np.maximum(np.arange(-8, 8), 0))


def test_hard_tanh_takes_its_bounds_from_the_call_then_from_the_quantizer():
    x = jnp.linspace(-4, 4, 33)
    wide = Int8ActPerTensorFloatMinMaxInit.let(min_val=-2.0, max_val=2.0)
    for layer, bound in (
        (QuantHardTanh(), 1.0),
        (QuantHardTanh(wide), 2.0),
        (QuantHardTanh(Int8ActPerTensorFloatMinMaxInit.let(max_val=2.5)), 2.5),
        (QuantHardTanh(wide, min_val=-3.0, max_val=3.0), 3.0),
        (QuantHardTanh(min_val=-0.5, max_val=0.5), 0.5),
    ):
        y = layer(x)
        assert float(y.min()) == -bound
        assert float(y.max()) == pytest.approx(bound * 127 / 128)
    np.testing.assert_array_equal(QuantHardTanh(None, min_val=-3.0, max_val=2.0)(x), jnp.clip(x, -3.0, 2.0))


def test_hard_tanh_with_a_quantizer_that_asks_for_no_bounds():
    class Half(ExtendedInjector):
        tensor_quant = ClampedBinaryQuant
        scaling_impl = ConstScaling
        scaling_init = 0.5
        signed = True

    np.testing.assert_array_equal(QuantHardTanh(Half)(jnp.array([-3.0, 0.25])), [-0.5, 0.5])
    with pytest.raises(TypeError, match="'min_val' would have no effect"):
        QuantHardTanh(Half, min_val=-2.0)


@pytest.mark.parametrize("bounds", [(1.0, -1.0), (0.5, 0.5)])
def test_hard_tanh_refuses_bounds_with_nothing_between(bounds):
    with pytest.raises(ValueError, match="min_val has to be below max_val"):
        QuantHardTanh(None, min_val=bounds[0], max_val=bounds[1])
