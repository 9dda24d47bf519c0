"""Names of ready-made quantizers: one spelling, one order of words, and help for who guesses another."""

import re

import pytest

import jqinject.quant
from jqinject.catalogue import entry_of
from jqinject.catalogue.entries import ready_made

GUESSES = {
    "FP8e4m3OCPDynamicActPerRowFloat": "Fp8e4m3OCPDynamicActPerRowFloat",
    "Int8ActDynamicPerRow": "Int8DynamicActPerRowAbsMax",
    "Int8ActDynamicPerTensor": "Int8DynamicActPerTensorAbsMax",
    "Int8ActDynamicPerRowFloat": "Int8DynamicActPerRowFloat",
    "Int8GradPerTensorDynamic": "Int8DynamicGradPerTensorFloat",
    "Int8GradPerRowStochastic": "Int8DynamicGradPerRowFloatStochastic",
    "Fp8e5m2OCPGradPerTensorDynamic": "Fp8e5m2OCPDynamicGradPerTensorFloat",
    "Int8PerChannelWeightFloat": "Int8WeightPerChannelFloat",
    "Int8WeightPerChanelFloat": "Int8WeightPerChannelFloat",
    "UInt8ActPerTensorFloat": "Uint8ActPerTensorFloat",
}


def test_minifloats_are_spelt_in_one_way():
    assert [name for name in vars(jqinject.quant) if re.match(r"FP\d", name)] == []


def test_what_is_dynamic_is_said_before_the_role():
    assert [name for name in ready_made() if re.search(r"(Weight|Act|Grad).*Dynamic", name)] == []


@pytest.mark.parametrize("guess", GUESSES)
def test_a_wrong_guess_is_answered_with_the_right_name(guess):
    for asked in (lambda: getattr(jqinject.quant, guess), lambda: entry_of(guess)):
        with pytest.raises((AttributeError, ValueError), match=f"did you mean .*'{GUESSES[guess]}'"):
            asked()


def test_a_name_unlike_any_other_gets_no_hint():
    with pytest.raises(AttributeError, match=r"has no attribute 'Zzz'$"):
        _ = jqinject.quant.Zzz
