"""Known names, and the check of overrides."""

import pytest

from jqinject.inject import (
    ExtendedInjector,
    check_declarations,
    check_overrides,
    declared_names,
    requested_names,
    resolve,
    this,
    value,
)


class Hidden:
    def __init__(self, margin=0): ...


class Scaling:
    def __init__(self, scaling_init, threshold=1.0): ...


class Sub(ExtendedInjector):
    inner = (this << 1).wanted
    own = this.sibling
    component = Scaling


class Int8Weight(ExtendedInjector):
    bit_width = 8
    scaling_impl = Scaling
    sub = Sub
    alias = this.target.attribute

    @value
    def hidden(kind="x"):
        return Hidden


def test_declared_names():
    assert declared_names(Int8Weight) == {"bit_width", "scaling_impl", "sub", "alias", "hidden"}


def test_requested_names():
    asked = requested_names(Int8Weight) - declared_names(Int8Weight)
    assert asked == {"scaling_init", "threshold", "wanted", "target", "kind"}


@pytest.mark.parametrize("name", ["bit_width", "threshold", "kind", "wanted"])
def test_what_is_declared_or_asked_for_is_accepted(name):
    check_overrides(Int8Weight, {name: 1})


def test_a_misspelt_override_is_refused_with_the_nearest_name():
    with pytest.raises(TypeError) as error:
        check_overrides(
            Int8Weight, {"bitwidth": 3, "bit_width": 4}, where="QuantLinear(weight_...)", prefix="weight_"
        )
    assert str(error.value).splitlines() == [
        "QuantLinear(weight_...): 'weight_bitwidth' would have no effect: nothing in 'Int8Weight' declares "
        "or asks for 'bitwidth'",
        "  did you mean 'weight_bit_width'?",
    ]


def test_all_unknown_overrides_are_named():
    with pytest.raises(TypeError, match=r"(?s)'zzz'.*'treshold'.*did you mean 'threshold'"):
        check_overrides(Int8Weight, ["zzz", "treshold"])


def test_what_a_trace_found_counts_as_known():
    with pytest.raises(TypeError, match="'margin' would have no effect"):
        check_overrides(Int8Weight, ["margin"])
    trace: set[str] = set()
    resolve(Int8Weight, "hidden", trace=trace)
    check_overrides(Int8Weight, ["margin"], also_read=trace)


def test_a_misspelt_declaration_is_refused_with_the_nearest_name():
    class W4(Int8Weight):
        bit_widht = 4
        scalinginit = 0.5

    with pytest.raises(TypeError) as error:
        check_declarations(W4)
    assert str(error.value).splitlines() == [
        "W4 declares 'bit_widht', which would have no effect: nothing asks for it",
        "  did you mean 'bit_width'?",
        "W4 declares 'scalinginit', which would have no effect: nothing asks for it",
        "  did you mean 'scaling_init'?",
    ]
    with pytest.raises(TypeError, match=r"W4 declares 'scalinginit'"):
        check_declarations(W4.let(bit_width=2), also_requested={"bit_widht"})
    with pytest.raises(TypeError, match=r"Int8Weight declares 'tresholds'.*\n.*did you mean 'threshold'"):
        check_declarations(Int8Weight.let(tresholds=1.0))


def test_declarations_that_are_asked_for_or_resemble_none_pass():
    class Shared(ExtendedInjector):
        act_bit_width = 8  # of another quantizer
        weight_bit_width = 4
        purpose = "a note"

    class W4(Shared, Int8Weight):
        bit_width = this.weight_bit_width
        threshold = 2.0
        bit_widht = 3

        @value
        def scaling_init(bit_widht):
            return 1.0 / bit_widht

    check_declarations(W4)
