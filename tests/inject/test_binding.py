"""Bindings are values."""

import functools
import re
from dataclasses import dataclass

import numpy as np
import pytest

from jqinject.inject import Binding, ExtendedInjector, this, value
from jqinject.quant.enums import QuantType, RestrictValueType


def shown(given):
    """A test id that is the same in every process: no addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(given))


class Scaling:
    def __init__(self, bit_width, module=None):
        self.got = (bit_width, module)


class Q(ExtendedInjector):
    bit_width = 8
    tensor_quant = Scaling


class R(ExtendedInjector):
    bit_width = 8


@dataclass(frozen=True)
class Frozen:
    x: object


@dataclass
class Thawed:
    x: object


def function():
    pass


def _value():
    return 1


SAME = [
    lambda: 4,
    lambda: 4.5,
    lambda: float("nan"),
    lambda: "a",
    lambda: None,
    lambda: True,
    lambda: [1, [2, {"a": 3}]],
    lambda: {"a": 1, "b": [2]},
    lambda: {1, 2},
    lambda: frozenset((1, 2)),
    lambda: (1, 2.0),
    lambda: np.arange(6.0).reshape(2, 3),
    lambda: np.float32(3),
    lambda: np.array(["a", None], dtype=object),
    lambda: np.dtype("int8"),
    lambda: np.int8,
    lambda: QuantType.INT,
    lambda: function,
    lambda: Scaling,
    lambda: functools.partial(function, 1, a=[2]),
    lambda: Frozen([1]),
    lambda: Q.let(bit_width=2),
    lambda: this.a["k"],
    lambda: value(_value),
    lambda: slice(1, 2),
    lambda: range(3),
    lambda: 1 + 2j,
]


@pytest.mark.parametrize("make", SAME)
def test_equal_by_value(make):
    one, two = Binding(Q, {"a": make()}), Binding(Q, {"a": make()})
    assert one == two
    assert hash(one) == hash(two)
    assert len({one, two}) == 1


DIFFERENT = [
    (1, 1.0),
    (1, True),
    (0.0, -0.0),
    (1, "1"),
    ([1], (1,)),
    ([1], [True]),
    ({1}, frozenset((1,))),
    ({"a": 1}, {"a": 1.0}),
    (np.zeros(2, np.float32), np.zeros(2, np.float64)),
    (np.zeros((2, 1)), np.zeros((1, 2))),
    (np.zeros(2), np.array([0.0, 1.0])),
    (np.zeros(2), [0.0, 0.0]),
    (np.float32(1), 1.0),
    (np.int8, np.dtype("int8")),
    (QuantType.INT, "int"),
    (QuantType.FP, RestrictValueType.FP),
    (Frozen(1), Frozen(1.0)),
    (Thawed(1), Thawed(1)),
    (Scaling(1), Scaling(1)),
    (lambda: 1, lambda: 1),
    (Q, R),
    (Q.let(a=1), Q.let(a=True)),
    (this.a, this.b),
    (functools.partial(function, 1), functools.partial(function, 1.0)),
]


@pytest.mark.parametrize("left, right", DIFFERENT, ids=shown)
def test_different(left, right):
    assert Binding(Q, {"a": left}) != Binding(Q, {"a": right})


def test_the_injector_counts():
    assert Binding(Q) == Binding(Q)
    assert Binding(Q) != Binding(R)
    assert Binding(Q) != Q
    assert Binding(Q & R) == Binding(Q & R) != Binding(R & Q)
    assert Binding(Q.let(a=1)) == Binding(Q, {"a": 1}) == Binding(Q.let(a=0), {"a": 1})
    assert Binding(Q.let(a=1).let(b=2)) == Binding(Q.let(b=2, a=1))
    assert Binding(Q.let()) == Binding(Q)
    assert Binding(Q, {"bit_width": 8}) != Binding(Q, {"bit_width": 4})


def test_later_writes_do_not_reach_a_binding():
    array, listed, nested = np.zeros(3), [1], {"a": [np.zeros(2)]}
    binding = Binding(Q, {"array": array, "listed": listed, "nested": nested})
    array[0], listed[0] = 5, 5
    nested["a"][0][0] = 5
    assert binding.resolve("array")[0] == 0
    assert binding.resolve("listed") == [1]
    assert binding.overrides["nested"]["a"][0][0] == 0
    with pytest.raises(ValueError, match="read-only"):
        binding.resolve("array")[0] = 1


def test_use():
    binding = Binding(Q, {"bit_width": 4})
    assert binding.base is Q
    assert dict(binding.overrides) == {"bit_width": 4}
    assert binding.injector.bit_width == 4
    assert issubclass(binding.injector, Q)
    assert Binding(Q).injector is Q
    assert binding.resolve("tensor_quant", module="m").got == (4, "m")
    trace: set[str] = set()
    binding.resolve("tensor_quant", trace=trace)
    assert trace == {"tensor_quant", "bit_width", "module"}
    assert binding.declares("bit_width")
    assert not binding.declares("module")
    assert binding.let(bit_width=2, extra=1) == Binding(Q, {"bit_width": 2, "extra": 1})
    assert repr(binding) == "Binding(Q, bit_width=4)"


def test_frozen():
    binding = Binding(Q, {"bit_width": 4})
    with pytest.raises(AttributeError, match="a binding is frozen"):
        binding.base = R
    with pytest.raises(AttributeError, match="a binding is frozen"):
        del binding.base
    with pytest.raises(TypeError):
        binding.overrides["bit_width"] = 3


def test_it_takes_an_injector():
    with pytest.raises(TypeError, match=r"a binding takes an injector .* got Scaling"):
        Binding(Scaling)
