"""What components say of themselves: the library's, and those of a user's own that follow the protocols."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject import ExtendedInjector
from jqinject.core import (
    AbsMax,
    ConstScaling,
    FloatRestrictValue,
    IntQuant,
    OverTensorView,
    PowerOfTwoRestrictValue,
    Quantized,
    RoundSte,
    StatsFromParameterScaling,
    ZeroZeroPoint,
)
from jqinject.core._protocols import has_zero_point, is_nearest, number_format, scale_dtype
from jqinject.model import WeightBitWidthWeightedBySize
from jqinject.nn import QuantIdentity, QuantLinear
from jqinject.ops import FloatGrid, IntGrid
from jqinject.quant import (
    Int8ActPerTensorFloat,
    Int8WeightPerTensorFloat,
    NF4WeightPerTensorFloat,
    NVFP4Weight,
    ShiftedUint8WeightPerTensorFloat,
)

POWERS = np.dtype(jnp.float8_e8m0fnu)


@dataclass(frozen=True)
class Fixed:
    """Signed 4 bits with a constant scale, which says what it is."""

    scale_dtype = POWERS
    format = None
    is_nearest = True
    has_zero_point = False

    def __call__(self, x):
        scale = jnp.float32(0.25)
        y = jnp.clip(jnp.round(x / scale), -8, 7) * scale
        return Quantized(y.astype(x.dtype), scale, None, IntGrid(4))


@dataclass(frozen=True)
class Silent:
    """The same, which says nothing."""

    def __call__(self, x):
        return Fixed()(x)


class Own(ExtendedInjector):
    tensor_quant = Fixed
    signed = True


class OwnSilent(Own):
    tensor_quant = Silent


def linear(weight_quant, **given):
    return QuantLinear(8, 4, weight_quant=weight_quant, **given, rngs=nnx.Rngs(0))


@pytest.mark.lengthy
def test_a_quantizer_of_the_users_own_is_believed():
    said, silent = linear(Own).weight_quant, linear(OwnSilent).weight_quant
    assert (said.has_zero_point, said.scale_dtype) == (False, POWERS)
    assert (silent.has_zero_point, silent.scale_dtype) == (True, None)
    assert is_nearest(said.tensor_quant) and not is_nearest(silent.tensor_quant)
    x = jax.random.normal(jax.random.key(0), (3, 8))
    widths = {}
    for name, quantizer in {"said": Own, "silent": OwnSilent}.items():
        layer = linear(quantizer, input_quant=Int8ActPerTensorFloat, return_quant_tensor=True)
        layer(x)
        layer.eval()
        expected = layer(x)
        widths[name] = expected.bit_width
        frozen = jqinject.freeze(nnx.clone(layer))
        assert (frozen.frozen.numbers.get("zero_point") is None) == (name == "said")
        np.testing.assert_allclose(frozen(x).value, expected.value, rtol=1e-5, atol=1e-5)
    # A zero point that may be anything costs the accumulator one bit of the weight.
    assert widths["said"] + 1 == widths["silent"]


def test_components_of_the_users_own_are_believed():
    @dataclass(frozen=True)
    class Half:
        has_zero_point = False
        is_nearest = True

        def __call__(self, x, *more):
            return jnp.zeros((), jnp.float32) if more else jnp.round(x)

    layer = linear(ShiftedUint8WeightPerTensorFloat, weight_zero_point_impl=Half)
    assert not layer.weight_quant.has_zero_point
    assert is_nearest(IntQuant(True, True, float_to_int_impl=Half()))
    assert not is_nearest(IntQuant(True, True, float_to_int_impl=lambda x: x))


@pytest.mark.parametrize(
    ("injector", "zero_point", "dtype", "form"),
    [
        (Int8WeightPerTensorFloat, False, None, type(None)),
        (ShiftedUint8WeightPerTensorFloat, True, None, type(None)),
        (NVFP4Weight, False, np.dtype(jnp.float8_e4m3fn), FloatGrid),
        (NF4WeightPerTensorFloat, False, None, object),
    ],
)
def test_ready_made_quantizers(injector, zero_point, dtype, form):
    proxy = QuantLinear(16, 4, weight_quant=injector, rngs=nnx.Rngs(0)).weight_quant
    quantizer = proxy.tensor_quant
    assert has_zero_point(quantizer) is proxy.has_zero_point is zero_point
    assert scale_dtype(quantizer) == proxy.scale_dtype == dtype
    assert isinstance(number_format(quantizer), form)


def test_what_is_not_said_is_unknown():
    assert has_zero_point(None) and scale_dtype(None) is None and number_format(None) is None
    assert not is_nearest(None) and is_nearest(RoundSte()) and not has_zero_point(ZeroZeroPoint())
    assert QuantIdentity(None).act_quant is None


@pytest.mark.heavy
def test_a_bit_width_of_the_users_own_that_is_learned_is_penalized():
    class Learned(nnx.Module):
        is_learned = True

        def __init__(self, bit_width):
            self.bits = nnx.Param(jnp.float32(bit_width))

        def __call__(self):
            return self.bits[...]

    layer = linear(Int8WeightPerTensorFloat, weight_bit_width_impl=Learned, weight_bit_width=5)
    loss = WeightBitWidthWeightedBySize()
    assert float(loss(layer)) == 5.0
    gradient = nnx.grad(loss)(layer)["weight_quant"]["tensor_quant"]["bit_width_impl"]["bits"]
    assert float(gradient[...]) == 1.0


def test_a_restriction_of_the_users_own_that_keeps_the_sign():
    @dataclass(frozen=True)
    class Own:
        keeps_sign = True

        def restrict_init_float(self, x):
            return x

        def restrict_init_tensor(self, x):
            return x

        def __call__(self, x):
            return x

    assert float(ConstScaling(-0.5, Own())(jnp.ones(2))) == -0.5
    with pytest.raises(ValueError, match="scaling_init"):
        ConstScaling(-0.5, FloatRestrictValue())


def test_the_dtype_of_scales_follows_their_restrictions():
    powers, floats = PowerOfTwoRestrictValue(), FloatRestrictValue()
    assert scale_dtype(ConstScaling(0.5, powers)) == POWERS
    assert scale_dtype(ConstScaling(0.5, powers, restrict_threshold_impl=floats)) is None
    assert scale_dtype(ConstScaling(0.5, floats, restrict_scale_threshold_impl=powers)) is None


class Up(RoundSte):
    """What `RoundSte` says of its own `__call__` does not hold for this one."""

    def __call__(self, x):
        return jnp.ceil(x)


class Doubled(FloatRestrictValue):
    """Likewise."""

    def __call__(self, x):
        return 2 * x


def test_a_subclass_with_a_call_of_its_own_is_called():
    quant = IntQuant(narrow_range=True, signed=True, float_to_int_impl=Up())
    assert float(quant(jnp.float32(1), jnp.float32(0), 4, jnp.float32(0.2))) == 1.0
    assert float(ConstScaling(0.5, Doubled())(jnp.ones(3))) == 1.0
    assert (
        float(
            StatsFromParameterScaling(AbsMax(), OverTensorView(), restrict_scaling_impl=Doubled())(
                jnp.ones(3)
            )
        )
        == 2.0
    )
