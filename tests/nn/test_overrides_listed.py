"""`overrides()`: what a layer's keywords can declare anew, as data."""

import pytest
from flax import nnx

from jqinject import value
from jqinject.nn import QuantConv, QuantIdentity, QuantLinear, QuantLSTM, QuantMultiHeadAttention, QuantReLU
from jqinject.quant import Int8ActPerTensorFloat, Int8WeightPerChannelFloat, Int8WeightPerTensorFloat


class Own(Int8WeightPerTensorFloat):
    bit_width = 5
    my_limit = 3
    scaling_min_val = value(lambda my_limit: 10.0**-my_limit)


def test_rows():
    found = QuantLinear.overrides(weight_quant=Own)
    row = found["weight_bit_width"]
    assert (row.keyword, row.name, row.type, row.default, row.read) == (
        "weight_bit_width",
        "bit_width",
        "int",
        "5",
        True,
    )
    assert row.meaning
    assert found["weight_scaling_min_val"].default == "0.001"
    own = found["weight_my_limit"]
    assert own.type == "" and "your own" in own.meaning
    assert found["weight_scaling_impl"].default == "StatsFromParameterScaling"
    assert not found["weight_scaling_const"].read
    assert len(found) == len([*found]) and found[0].read and not found[-1].read and len(found[:2]) == 2


@pytest.mark.heavy
def test_what_is_read_can_be_overridden_and_changes_the_layer():
    for row in QuantLinear.overrides(weight_quant=Int8WeightPerChannelFloat):
        if row.type == "int" and row.read and row.name == "bit_width":
            layer = QuantLinear(
                4, 2, weight_quant=Int8WeightPerChannelFloat, rngs=nnx.Rngs(0), **{row.keyword: 3}
            )
            assert layer.quant_weight().bit_width == 3


def test_every_name_that_is_not_known_is_not_listed():
    listed = {row.keyword for row in QuantLinear.overrides(input_quant=Int8ActPerTensorFloat)}
    assert {"weight_bit_width", "input_bit_width"} <= listed
    assert not any(name.startswith(("bias_", "output_", "grad_")) for name in listed)
    assert listed.isdisjoint(("weight_module", "weight_tracked_parameter_list", "input_rngs"))


def test_defaults_proxies_and_none():
    assert len(QuantLinear.overrides()) > 0
    assert len(QuantLinear.overrides(weight_quant=None)) == 0
    layer = QuantLinear(4, 2, weight_quant=Own, weight_bit_width=3, rngs=nnx.Rngs(0))
    assert layer.overrides(weight_quant=layer.weight_quant)["weight_bit_width"].default == "3"


def test_prefixes_of_other_layers():
    assert QuantReLU.overrides()["bit_width"].default == "8"
    assert QuantLSTM.overrides(io_quant=Int8ActPerTensorFloat)["io_bit_width"].type == "int"
    attention = QuantMultiHeadAttention.overrides(in_proj_weight_quant=Own, v_quant=Int8ActPerTensorFloat)
    assert attention["in_proj_weight_bit_width"].default == "5" and "v_bit_width" in {
        r.keyword for r in attention
    }


def test_text_and_html():
    found = QuantConv.overrides(weight_quant=Own)
    head, first, *_, last = str(found).splitlines()
    assert head.split() == ["keyword", "type", "now", "meaning"]
    assert first.startswith("weight_") and "read=False" in last
    page = found._repr_html_()
    assert page.count("<tr>") == 1 + sum(row.read for row in found)
    assert "float | None" in page and "<th>keyword</th>" in page


def test_errors():
    with pytest.raises(TypeError, match=r"QuantLinear.overrides\(\) takes weight_quant.*\n.*'weight_quant'"):
        QuantLinear.overrides(wieght_quant=Own)
    with pytest.raises(TypeError, match=r"overrides\(weight_quant=...\) takes an injector"):
        QuantLinear.overrides(weight_quant=3)
    with pytest.raises(KeyError, match="weight_bit_width"):
        QuantLinear.overrides()["weight_bitwidth"]
    with pytest.raises(TypeError, match="takes act_quant"):
        QuantIdentity.overrides(weight_quant=Own)
