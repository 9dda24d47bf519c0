"""`FloatQuant`: values, gradients, what is no number, learned widths, and what it refuses."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject.core import (
    BitWidthParameter,
    ComputeExponentBias,
    ConstScaling,
    ExponentWidthConst,
    FloatClamp,
    FloatQuant,
    FloatScaling,
    MantissaWidthConst,
    ParameterScaling,
    StaticExponentBias,
)
from jqinject.nn import QuantIdentity, QuantLinear
from jqinject.ops import FloatGrid
from jqinject.quant import (
    Fp4e2m1OCPWeightPerTensorFloat,
    Fp6e3m2OCPActPerTensorFloat,
    Fp8e4m3OCPAct,
    Fp8e4m3OCPWeightPerChannelFloat,
    Fp8e4m3Weight,
    Fp8e5m2OCPAct,
)


def quantizer(exponent, mantissa, bias=None, **more):
    clamp = {
        n: more.pop(n) for n in ("inf_values", "nan_values", "max_available_float", "saturating") if n in more
    }
    signed = more.pop("signed", True)
    bias = 2 ** (exponent - 1) - 1 if bias is None else bias
    return FloatQuant(
        signed,
        ExponentWidthConst(exponent),
        MantissaWidthConst(mantissa),
        StaticExponentBias(bias),
        FloatClamp(signed=signed, **clamp),
        **more,
    )


def test_values_scale_and_fields():
    result = quantizer(2, 1, scaling_impl=ConstScaling(0.5))(jnp.array([0.12, -0.13, 0.9, 99.0]))
    np.testing.assert_array_equal(result.value, [0.0, -0.25, 1.0, 3.0])
    value, scale, zero_point, *facts = result
    assert (float(scale), float(zero_point), facts) == (0.5, 0.0, [2, 1, 1, True, None, None])
    assert value is result.value and result.bit_width == 4


def test_the_statistic_is_brought_to_the_largest_number():
    largest = FloatScaling(max_available_float=448.0)
    quant = quantizer(
        4, 3, max_available_float=448.0, scaling_impl=ConstScaling(896.0), float_scaling_impl=largest
    )
    assert float(quant(jnp.ones(2)).scale) == 2.0


@pytest.mark.heavy
@pytest.mark.parametrize("signed", [True, False])
def test_gradient_is_that_of_the_rounding_with_its_step(signed):
    # The step doubles with x, so y / x is the slope of a normal number, 1 that of a subnormal one, 0 beyond the end.
    x = jnp.array([5.3, -1.9, 0.3, 100.0, -100.0])
    quant = quantizer(2, 2, signed=signed)
    y = quant(x).value
    slopes = jax.vmap(jax.grad(lambda x: quant(x).value))(x)
    inside = [y[0] / x[0], y[1] / x[1] if signed else 0.0, 1.0, 0.0, 0.0]
    np.testing.assert_allclose(slopes, inside, rtol=1e-6)


@pytest.mark.heavy
def test_gradient_of_a_learned_scale_is_the_largest_number_where_clamped():
    quant = quantizer(2, 1, scaling_impl=ParameterScaling(1.0))
    given = jnp.array([7.0, 1.1, 0.3])  # clamped, normal, subnormal
    gradients = [
        nnx.grad(lambda q, x: q(x).value)(quant, x)["scaling_impl"]["value"].get_value() for x in given
    ]
    np.testing.assert_allclose(gradients, [6.0, 0.0, 0.5 - 0.3], atol=1e-6)


@pytest.mark.parametrize(
    ("quant", "expected"),
    [
        (Fp8e4m3OCPAct, [np.nan, np.nan, np.nan, 448.0]),
        (Fp8e5m2OCPAct, [np.nan, np.inf, -np.inf, 57344.0]),
        (Fp8e4m3OCPAct.let(saturating=False), [np.nan, np.nan, np.nan, np.nan]),
        (Fp8e5m2OCPAct.let(saturating=False), [np.nan, np.inf, -np.inf, np.inf]),
    ],
)
def test_what_is_no_number_is_not_hidden(quant, expected):
    layer = QuantIdentity(quant, return_quant_tensor=True)
    tensor = layer(jnp.array([jnp.nan, jnp.inf, -jnp.inf, 1e6]))
    np.testing.assert_array_equal(tensor.value, expected)
    assert not tensor.is_valid
    np.testing.assert_array_equal(tensor.minifloat(), expected)
    np.testing.assert_array_equal(tensor.payload().astype(jnp.float32), expected)


@pytest.mark.heavy
def test_bfloat16_is_computed_in_float32():
    x = jax.random.normal(jax.random.key(0), (64,), jnp.bfloat16)
    layer = QuantIdentity(Fp6e3m2OCPActPerTensorFloat, return_quant_tensor=True)
    low = layer(x)
    wide = QuantIdentity(Fp6e3m2OCPActPerTensorFloat, return_quant_tensor=True)(x.astype(jnp.float32))
    assert (low.dtype, low.scale.dtype, low.is_valid) == (jnp.bfloat16, jnp.float32, True)
    np.testing.assert_array_equal(low.value, wide.value.astype(jnp.bfloat16))
    np.testing.assert_array_equal(low.codes(), wide.codes())


@pytest.mark.parametrize("shape", [(4, 3), (0, 3)])
def test_zeros_and_nothing_have_a_scale(shape):
    layer = QuantLinear(4, 3, use_bias=False, weight_quant=Fp8e4m3OCPWeightPerChannelFloat, rngs=nnx.Rngs(0))
    layer.weight = nnx.Param(jnp.zeros(shape))
    weight = layer.quant_weight()
    assert bool(jnp.all((weight.scale > 0) & jnp.isfinite(weight.scale)))
    np.testing.assert_array_equal(weight.value, jnp.zeros(shape))


@pytest.mark.heavy
def test_learned_widths_have_gradients_and_a_format_in_the_end():
    layer = QuantLinear(
        4,
        3,
        weight_quant=Fp8e4m3Weight,
        weight_exponent_bit_width_impl_type="parameter",
        weight_mantissa_bit_width_impl_type="parameter",
        weight_exponent_bias_impl=ComputeExponentBias,
        rngs=nnx.Rngs(0),
    )
    layer.weight = nnx.Param(jnp.full((4, 3), 600.3).at[0, 0].set(1.06))
    weight = layer.quant_weight()
    assert weight.format.is_learned
    assert weight.format.known() == FloatGrid(4, 3) and weight.bit_width == 8
    np.testing.assert_array_equal(weight.value, jnp.full((4, 3), 480.0).at[0, 0].set(1.0))
    gradients = nnx.grad(lambda layer: layer.quant_weight().value[1, 1])(layer)["weight_quant"][
        "tensor_quant"
    ]
    of_exponent = float(
        gradients["exponent_bias_impl"]["exponent_bit_width_impl"]["bit_width_offset"].get_value()
    )
    of_mantissa = float(gradients["mantissa_bit_width_impl"]["bit_width_offset"].get_value())
    # The largest number is (2 - 2**-m) * 2**(2**e - 1 - bias(e)), bias(e) = 2**(e - 1) - 1.
    log2 = np.log(2.0)
    np.testing.assert_allclose(of_exponent, 480 * log2 * (16 * log2 - 8 * log2), rtol=1e-5)
    np.testing.assert_allclose(of_mantissa, 256 * log2 / 8, rtol=1e-5)
    with pytest.raises(ValueError, match=r"learned widths has no known dtype while it is traced.*\n  cure:"):
        jax.jit(lambda w: w.payload())(weight)
    again = pickle.loads(pickle.dumps(weight))
    np.testing.assert_array_equal(again.payload(), weight.payload())


def test_the_way_into_integers_is_the_users():
    layer = QuantIdentity(Fp8e4m3OCPAct, float_to_int_impl_type="floor", return_quant_tensor=True)
    np.testing.assert_array_equal(layer(jnp.array([1.99, -1.01])).value, [1.875, -1.125])


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            {"weight_exponent_bit_width": 5},
            r"5 bits of exponent and 1 of mantissa has 7 bits, and bit_width = 4 is",
        ),
        ({"weight_exponent_bit_width": 0}, r"exponent_bit_width must be in 1 \.\. 8, got 0"),
        ({"weight_saturating": False}, r"neither inf nor nan that a number which is too large could become"),
        ({"weight_exponent_bit_width": 9, "weight_bit_width": 11}, r"exponent_bit_width must be in 1 \.\. 8"),
        ({"weight_nan_values": ("111",)}, r"the code '111' has 3 bits, the mantissa has 1"),
    ],
)
def test_formats_that_do_not_exist_are_refused_when_the_layer_is_built(overrides, text):
    with pytest.raises(ValueError, match=text):
        QuantLinear(4, 3, weight_quant=Fp4e2m1OCPWeightPerTensorFloat, **overrides, rngs=nnx.Rngs(0))


def test_a_sign_bit_may_be_unused():
    layer = QuantIdentity(Fp8e4m3OCPAct, signed=False, return_quant_tensor=True)
    tensor = layer(jnp.array([-3.0, 3.1]))
    np.testing.assert_array_equal(tensor.value, [0.0, 3.0])
    assert not tensor.signed and tensor.q_dtype == jnp.uint8


@pytest.mark.heavy
def test_a_learned_exponent_is_counted_once():
    width = BitWidthParameter(4)
    quant = FloatQuant(True, width, MantissaWidthConst(3), ComputeExponentBias(width), FloatClamp())
    assert len(nnx.to_flat_state(nnx.state(quant))) == 1
    assert float(quant(jnp.float32(1e9)).value) == 480.0
