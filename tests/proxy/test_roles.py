"""One class of proxies for each role: the format is what the quantizer and its result say."""

import pickle
from dataclasses import dataclass

import jax.numpy as jnp
import pytest
from flax import nnx

from jqinject.core import Quantized
from jqinject.nn import QuantIdentity, QuantLinear
from jqinject.ops import IntGrid, split_groups
from jqinject.proxy import ActQuantProxyFromInjector, GradQuantProxyFromInjector, WeightQuantProxyFromInjector
from jqinject.quant import (
    Int8ActPerTensorFloat,
    Int8DynamicActPerRowFloat,
    Int8DynamicActPerTensorAbsMax,
    Int8WeightPerTensorFloat,
    MXFloat8e5m2Act,
    MXInt8Weight,
    SignedBinaryActPerTensorConst,
)

ROLES = (WeightQuantProxyFromInjector, ActQuantProxyFromInjector, GradQuantProxyFromInjector)


def linear(quantizer, **given):
    return QuantLinear(64, 4, weight_quant=quantizer, rngs=nnx.Rngs(0), **given)


def test_groups_survive_pickling():
    again = pickle.loads(pickle.dumps(linear(MXInt8Weight)))
    assert (again.weight_quant.group_size, again.weight_quant.group_dim) == (32, 0)


def test_a_role_answers_for_every_format():
    integers = linear(Int8WeightPerTensorFloat).weight_quant
    assert (integers.group_size, integers.is_ocp, integers.requires_quant_input) == (None, False, False)
    with pytest.raises(AttributeError, match=r"Int8WeightPerTensorFloat makes no minifloats"):
        integers.exponent_bit_width()
    minifloats = QuantIdentity(MXFloat8e5m2Act).act_quant
    assert (minifloats.group_size, minifloats.exponent_bit_width(), minifloats.nan_values()) == (
        32,
        5,
        ("01", "11", "10"),
    )
    minifloats.disable_quant = True
    assert (minifloats.exponent_bit_width(), minifloats.is_ocp, minifloats.bit_width()) == (None, False, None)


@pytest.mark.parametrize("quantizer", [Int8DynamicActPerRowFloat, Int8DynamicActPerTensorAbsMax])
def test_what_is_made_from_the_tensor_at_hand_is_not_known_before(quantizer):
    proxy = QuantIdentity(quantizer).act_quant
    assert proxy.bit_width() == 8
    with pytest.raises(RuntimeError, match=r"scale of \w+ depends on the input"):
        proxy.scale()
    assert float(QuantIdentity(Int8ActPerTensorFloat).act_quant.scale()) > 0


@dataclass(frozen=True)
class Quarters:
    """A user's own quantizer, which cuts rows into groups of 4."""

    def __call__(self, x):
        grouped = split_groups(x, 4, -1)
        scale = jnp.abs(grouped).max(axis=-1, keepdims=True) / 7
        return Quantized(jnp.round(grouped / scale) * scale, scale, None, IntGrid(4))


@dataclass(frozen=True)
class SayingQuarters(Quarters):
    groups = (4, -1)


class Declared(Int8ActPerTensorFloat):
    tensor_quant = Quarters
    group_size = 4


class Silent(Int8ActPerTensorFloat):
    tensor_quant = Quarters


class Saying(Silent):
    tensor_quant = SayingQuarters


def test_groups_of_a_quantizer_of_ones_own():
    x = jnp.arange(1.0, 17.0).reshape(2, 8)
    for quantizer in (Saying, Declared):
        y = QuantIdentity(quantizer, return_quant_tensor=True)(x)
        assert (y.shape, y.scale_.shape) == ((2, 8), (2, 2, 1))
    with pytest.raises(
        ValueError, match=r"(?s)Quarters does not say that it cuts the array into groups.*`groups`"
    ):
        QuantIdentity(Silent)(x)
    assert QuantIdentity(SignedBinaryActPerTensorConst)(x).shape == x.shape
