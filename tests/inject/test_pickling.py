"""Injectors survive pickling and copying."""

import copy
import pickle

import pytest

from jqinject.inject import Binding, ExtendedInjector, this
from jqinject.inject.binding import injector_key


class Component:
    def __init__(self, bit_width):
        self.bit_width = bit_width


class Q(ExtendedInjector):
    bit_width = 8
    component = Component

    class Inside(ExtendedInjector):
        up = (this << 1).bit_width


class Other(ExtendedInjector):
    signed = True


class Holder:
    class Held(ExtendedInjector):
        a = 1


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_class_statement_is_pickled_by_reference(protocol):
    for cls in (Q, Holder.Held, ExtendedInjector):
        if protocol >= 4 or cls is not Holder.Held:
            assert pickle.loads(pickle.dumps(cls, protocol)) is cls
    inside = Q.__dependencies__["Inside"].declared
    assert pickle.loads(pickle.dumps(inside, protocol)) is inside


def test_made_injectors_are_made_again():
    made = (Q.let(bit_width=4) & Other).let(signed=False, extra=this.bit_width)
    again = pickle.loads(pickle.dumps(made))
    assert (again.bit_width, again.signed, again.extra, again.component.bit_width) == (4, False, 4, 4)
    assert issubclass(again, Q)
    assert injector_key(again) == injector_key(made)


def test_a_nested_injector_keeps_its_way_out():
    again = pickle.loads(pickle.dumps(Q.let(bit_width=3).Inside))
    assert again.up == 3


def test_local_injectors_can_not_be_pickled():
    class Local(ExtendedInjector):
        pass

    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(Local)


def test_copies_are_the_class_itself():
    made = Q.let(bit_width=4)
    for cls in (Q, made):
        assert copy.deepcopy(cls) is cls
        assert copy.copy(cls) is cls
        assert copy.deepcopy({"a": [cls]})["a"][0] is cls


def test_bindings():
    binding = Binding(Q, {"bit_width": 4, "shape": [1, 2]})
    again = pickle.loads(pickle.dumps(binding))
    assert again == binding
    assert hash(again) == hash(binding)
    assert copy.deepcopy(binding) is binding
    assert copy.copy(binding) is binding
