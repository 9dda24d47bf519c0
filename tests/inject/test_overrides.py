"""Overrides that the wiring does not read are refused, with what it takes for them to be read."""

import enum

import pytest

from jqinject.inject import (
    Binding,
    ExtendedInjector,
    check_overrides,
    reach_of,
    resolve,
    this,
    value,
)


class Kind(enum.StrEnum):
    SMALL = enum.auto()
    LARGE = enum.auto()
    NAMED = enum.auto()


class Small:
    def __init__(self, size=1): ...


class Large:
    def __init__(self, size=1, margin=0): ...


class Inner(ExtendedInjector):
    depth = (this << 1).inner_depth
    kind = 1


class Lazy:
    def __init__(self, inner):
        self.inner = inner

    def __call__(self):
        return self.inner.depth


class Q(ExtendedInjector):
    kind = Kind.SMALL
    exact = False
    table = {"a": 1}
    inner = Inner
    inner_depth = 3

    @value
    def tensor_quant(kind, exact):
        if exact:
            return this.lazy
        return {"small": Small, "large": Large, "named": Named}[kind]

    lazy = Lazy


class Named:
    def __init__(self, title): ...


def refusal(injector, **overrides):
    trace: set[str] = set()
    changed = injector.let(**overrides)
    resolve(changed, "tensor_quant", trace=trace)
    with pytest.raises(TypeError) as error:
        check_overrides(
            changed, overrides, read=trace | {"tensor_quant"}, prefix="weight_", where="Layer(weight_...)"
        )
    return str(error.value).splitlines()


def test_a_name_that_nobody_knows():
    assert refusal(Q, margin=2) == [
        "Layer(weight_...): 'weight_margin' would have no effect: nothing in 'Q' declares or asks for 'margin'"
    ]


def test_a_choice_under_which_a_name_is_read():
    class Declared(Q):
        margin = 0
        title = "none"

    assert refusal(Declared, margin=2)[1:] == [
        "  'margin' is read when kind = 'large'",
        "  cure: give weight_kind='large', or leave weight_margin out",
    ]
    assert refusal(Declared, kind="large", title="mine")[1:] == [
        "  'title' is read when kind = 'named'",
        "  cure: give weight_kind='named', or leave weight_title out",
    ]


def test_two_choices_at_once_and_what_else_is_needed():
    class Both(ExtendedInjector):
        kind = Kind.SMALL
        exact = False
        unused = 1

        @value
        def part(exact):
            return this.unused if exact else 2

        @value
        def tensor_quant(kind):
            return this.part if kind == "large" else this.beside if kind == "named" else this.kind

        @value
        def beside(lost):
            return lost

    assert refusal(Both, unused=5)[1:] == [
        "  'unused' is read when kind = 'large' and exact = True",
        "  cure: give weight_kind='large', weight_exact=True, or leave weight_unused out",
    ]


def test_who_asks_is_said_where_no_choice_leads_there():
    class Fixed(ExtendedInjector):
        tensor_quant = Small
        other = Large

    assert refusal(Fixed, margin=2)[1:] == [
        "  'margin' is asked for by Large as 'other', not used here",
        "  cure: leave weight_margin out",
    ]


def test_what_an_injector_that_is_handed_out_points_to_counts_as_read():
    trace: set[str] = set()
    lazy = resolve(Q.let(exact=True), "tensor_quant", trace=trace)
    assert lazy() == 3
    assert "inner_depth" in trace
    check_overrides(Q, {"inner_depth": 2}, read=trace)


def test_what_is_overridden():
    class Mine(Q.let(kind="large")):
        exact = True

    assert Binding(Mine).overridden == {}
    assert Binding(Mine.let(exact=False).let(kind="small")).overridden == {"exact": False, "kind": "small"}
    assert Binding(Inner.let(kind=2) & Q.let(kind=3, exact=True)).overridden == {"kind": 2, "exact": True}
    assert Binding(Mine & Q.let(kind="large")).overridden == {"kind": "large"}
    assert Binding(Q.let(exact=True), {"kind": "large"}).overridden == {"exact": True, "kind": "large"}


def test_reach():
    reach = reach_of(Q)
    assert reach.works and not reach.missing
    assert {"tensor_quant", "kind", "exact"} <= reach.names
    assert "inner_depth" not in reach.names
    lacking = reach_of(Q.let(kind="named"))
    assert lacking.works and lacking.missing == ("title",)
