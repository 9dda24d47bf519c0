"""`this`, nested injectors, and links between them."""

import copy
import pickle
import re

import dependencies
import pytest

from jqinject.inject import DependencyError, ExtendedInjector, resolve, this, value


def shown(given):
    """A test id that is the same in every process: no addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(given))


class Leaf:
    def __init__(self, bit_width):
        self.bit_width = bit_width


class Pair:
    def __init__(self, first, second):
        self.first = first
        self.second = second


class Inner(ExtendedInjector):
    bit_width = (this << 1).bit_width
    leaf = Leaf
    outer_leaf = (this << 1).leaf
    own = 3


class Outer(ExtendedInjector):
    bit_width = 8
    leaf = Leaf
    sub = Inner
    table = {"k": {"x": 5}}
    listed = (10, 20)


@pytest.mark.parametrize(
    "link, expected",
    [
        (this.bit_width, 8),
        (this["bit_width"], 8),
        (this.leaf.bit_width, 8),
        (this.table["k"]["x"], 5),
        (this.listed[1], 20),
        (this.sub.own, 3),
        (this.sub.bit_width, 8),
        (this.sub.leaf.bit_width, 8),
        (dependencies.this.sub.own, 3),
        (dependencies.this.table["k"]["x"], 5),
    ],
    ids=shown,
)
def test_links(link, expected):
    assert Outer.let(a=link).a == expected
    assert Outer.let(a=value(lambda: link)).a == expected
    assert resolve(Outer, "a", a=link) == expected


def test_a_link_to_a_link_into_a_nested_injector():
    q = Outer.let(alias=this.sub, a=this.alias.bit_width, b=this.alias.outer_leaf.bit_width)
    assert (q.a, q.b, q.let(bit_width=2).a) == (8, 8, 2)


def test_two_levels():
    class Deepest(ExtendedInjector):
        x = (this << 2).bit_width
        y = (this << 1).own

    q = Outer.let(sub=Inner.let(deeper=Deepest), a=this.sub.deeper.x, b=this.sub.deeper.y)
    assert (q.a, q.b) == (8, 3)
    assert (q.sub.deeper.x, q.sub.deeper.y) == (8, 3)


def test_reading_a_nested_injector_keeps_the_way_out():
    assert Outer.sub.bit_width == 8
    assert Outer.let(bit_width=2).sub.bit_width == 2
    assert issubclass(Outer.sub, Inner)
    assert resolve(Outer, "sub", bit_width=5).bit_width == 5


def test_a_nested_injector_inside_the_body():
    class Q(ExtendedInjector):
        a = 1

        class Sub(ExtendedInjector):
            b = (this << 1).a

        c = this.Sub.b

    assert Q.c == 1


def test_an_injector_whose_name_ends_in_class_is_nested_too():
    q = ExtendedInjector.let(sub_class=Inner, bit_width=6, a=this.sub_class.bit_width)
    assert (q.sub_class.bit_width, q.a) == (6, 6)


def test_one_access_shares_across_nested_injectors():
    q = Outer.let(pair=Pair, first=this.leaf, second=this.sub.outer_leaf)
    pair = q.pair
    assert pair.first is pair.second
    q = Outer.let(pair=Pair, first=this.sub.leaf, second=this.sub.leaf)
    pair = q.pair
    assert pair.first is pair.second


def test_a_component_may_ask_for_the_nested_injector_itself():
    class Reader:
        def __init__(self, sub):
            self.got = sub.bit_width

    assert Outer.let(reader=Reader).reader.got == 8


def test_climbing_too_far():
    with pytest.raises(
        DependencyError, match=r"`this << n` climbs out of 'Inner', which is not nested"
    ) as error:
        _ = Inner.bit_width
    assert "needed by: bit_width (= (this << 1).bit_width)" in str(error.value)


def test_a_miss_in_a_nested_injector_names_both():
    with pytest.raises(DependencyError) as error:
        _ = Outer.let(a=this.sub.owl).a
    assert str(error.value).splitlines() == [
        "'Inner' (nested in 'Outer' as 'sub') has no name 'owl'",
        "  needed by: a (= this.sub.owl) -> owl",
        "  did you mean 'own'?",
        "  cure: declare it, as in Inner.let(owl=...)",
    ]


def test_a_broken_item_keeps_its_type_and_gets_the_path():
    with pytest.raises(KeyError) as error:
        _ = Outer.let(a=this.table["z"]).a
    assert error.value.__notes__ == ["while following a (= this.table['z']) in the injector 'Outer'"]


def test_circles_of_links():
    with pytest.raises(
        DependencyError, match=r"has a circular dependency: a \(= this.b\) -> b \(= this.a\) -> a"
    ):
        _ = ExtendedInjector.let(a=this.b, b=this.a).a
    with pytest.raises(DependencyError, match="circular dependency"):
        _ = ExtendedInjector.let(a=this.b.x, b=this.a.x).a
    nested = ExtendedInjector.let(sub=ExtendedInjector.let(x=(this << 1).a), a=this.sub.x)
    with pytest.raises(DependencyError, match="circular dependency"):
        _ = nested.a


def test_links_are_values():
    link = (this << 1).a["k"].b
    assert repr(link) == "(this << 1).a['k'].b"
    for same in (
        pickle.loads(pickle.dumps(link)),
        copy.copy(link),
        copy.deepcopy(link),
        (this << 1).a["k"].b,
    ):
        assert same == link
        assert hash(same) == hash(link)
    assert link != this.a["k"].b
    assert not hasattr(this, "__len__")


@pytest.mark.parametrize("levels", [0, -1, 1.0, True, "1"])
def test_climbing_takes_a_positive_int(levels):
    with pytest.raises(ValueError, match="n is a positive int"):
        this << levels


def test_climb_first_then_read():
    with pytest.raises(ValueError, match=r"write \(this << 1\)\.name, got this\.a << 1"):
        this.a << 1


def test_an_item_is_a_name_first():
    with pytest.raises(DependencyError, match="the first step of a link is a name"):
        ExtendedInjector.let(a=this[3])
    with pytest.raises(TypeError, match="is a link, not a sequence"):
        list(this.a)
