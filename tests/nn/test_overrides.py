"""Overrides given where a quantizer is used: those that its wiring does not read are refused."""

import math

import pytest
from flax import nnx

import jqinject
from jqinject import Rule
from jqinject.catalogue.catalogue_command import main
from jqinject.inject import Binding
from jqinject.nn import QuantHardTanh, QuantIdentity, QuantLinear
from jqinject.proxy import WeightQuantProxyFromInjector
from jqinject.quant import (
    Fp8e4m3WeightPerTensorDelayed,
    Int8ActPerTensorFloat,
    Int8Bias,
    Int8WeightPerChannelFloat,
    MXInt8Weight,
)


class Spoken(Int8WeightPerChannelFloat):
    """Names that go unread in a class body are declarations, as of the ready-made quantizers."""

    scaling_const = 0.1
    remark = None


class Reading(WeightQuantProxyFromInjector):
    """A user's proxy, which reads a name when it is called."""

    def note(self):
        return self.binding.resolve("scaling_const")


def linear(quantizer=Int8WeightPerChannelFloat, **given):
    return QuantLinear(8, 4, weight_quant=quantizer, rngs=nnx.Rngs(0), **given)


UNREAD = {
    "constant": (lambda: linear(weight_scaling_const=0.1), "scaling_impl_type = 'const' or 'parameter'"),
    "groups": (lambda: linear(weight_group_size=16), "scaling_per_output_type = 'group'"),
    "percentile": (lambda: linear(weight_high_percentile_q="x"), "scaling_stats_op = 'percentile'"),
    "init": (lambda: linear(weight_scaling_init=math.nan), "weight_scaling_impl_type="),
    "declared, but not read": (lambda: linear(Spoken, weight_remark="batch"), "'remark'"),
    "no quantization": (lambda: linear(weight_quant_type="fp", weight_bit_width=4), "quant_type = 'int'"),
    "rounding of a cast": (
        lambda: linear(Fp8e4m3WeightPerTensorDelayed, weight_float_to_int_impl_type="floor"),
        "weight_float_to_int_impl_type",
    ),
    "let": (lambda: linear(Int8WeightPerChannelFloat.let(scaling_const=0.1)), "leave scaling_const out"),
    "let, twice": (
        lambda: linear(Int8WeightPerChannelFloat.let(bit_width=4).let(sigma=2.0), weight_narrow_range=True),
        "scaling_stats_op = 'mean_sigma_std' or 'mean_learn_sigma_std'",
    ),
    "misspelt in let": (
        lambda: linear(Int8WeightPerChannelFloat.let(bit_widht=4)),
        "did you mean 'bit_width'?",
    ),
    "a binding": (
        lambda: linear(Binding(Int8WeightPerChannelFloat, {"group_size": 4})),
        "scaling_per_output_type = 'group'",
    ),
    "input": (
        lambda: linear(input_quant=Int8ActPerTensorFloat, input_min_val=-1.0),
        "input_scaling_impl_type='const', input_max_val=...",
    ),
    "bias": (
        lambda: linear(bias_quant=Int8Bias, bias_scaling_min_val=0.1),
        "'bias_scaling_min_val' would have no effect",
    ),
    "activation": (lambda: QuantIdentity(Int8ActPerTensorFloat, low_percentile_q=1.0), "percentile_interval"),
    "bounds of a layer": (lambda: QuantHardTanh(Int8ActPerTensorFloat, min_val=-1.0), "'min_val'"),
    "rule": (
        lambda: jqinject.quantize(
            nnx.Linear(8, 4, rngs=nnx.Rngs(0)),
            Rule(weight_quant=Int8WeightPerChannelFloat, weight_scaling_const=0.1),
        ),
        "scaling_impl_type = 'const' or 'parameter'",
    ),
}


@pytest.mark.parametrize(("build", "text"), UNREAD.values(), ids=UNREAD.keys())
def test_an_override_that_is_not_read_is_refused(build, text):
    with pytest.raises(TypeError, match="would have no effect") as error:
        build()
    assert text in str(error.value)


def test_the_command_line_refuses_them_too(capsys):
    assert main(["explain", "Int8WeightPerChannelFloat", "scaling_const=0.1"]) == 2
    assert "'scaling_const' is read when scaling_impl_type = 'const'" in capsys.readouterr().err


def test_what_is_read_in_any_way_passes():
    linear(Spoken)
    linear(Spoken.let(bit_width=4), weight_scaling_impl_type="const", weight_scaling_const=0.1)
    linear(Fp8e4m3WeightPerTensorDelayed.let(signed=True))
    linear(bias_quant=Int8Bias, bias_requires_input_scale=True)
    linear(MXInt8Weight, weight_group_size=4, weight_group_dim=0)
    linear(weight_tensor_quant=None)
    linear(weight_proxy_class=WeightQuantProxyFromInjector)
    QuantHardTanh(Int8ActPerTensorFloat)


def test_what_a_users_proxy_may_read_later_passes():
    layer = linear(Spoken.let(proxy_class=Reading), weight_scaling_const=0.25)
    assert layer.weight_quant.note() == 0.25
