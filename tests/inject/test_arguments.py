"""Reading what a constructor asks for."""

from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import pytest

from jqinject.inject import DependencyError, ExtendedInjector
from jqinject.inject.specs import arguments_of_class

T = TypeVar("T")


class Meta(type):
    def __call__(cls, *args, **kwargs):
        return super().__call__(*args, **kwargs)


class Module(metaclass=Meta):
    def __init__(self, a, *, b=2):
        self.got = (a, b)


class Sub(Module):
    pass


class Empty(metaclass=Meta):
    pass


@dataclass
class Data:
    a: int
    b: int = 2

    @property
    def got(self):
        return self.a, self.b


class Named(NamedTuple):
    a: int
    b: int = 2

    @property
    def got(self):
        return self.a, self.b


class New:
    def __new__(cls, a, b=2):
        self = super().__new__(cls)
        self.got = (a, b)
        return self


class Shape(Protocol):
    got: tuple


class Implemented(Shape, Generic[T]):
    got = (1, 2)


class PositionalOnly:
    def __init__(self, a, b=2, /):
        self.got = (a, b)


@pytest.mark.parametrize("cls", [Module, Sub, Data, Named, New, Implemented, PositionalOnly])
def test_kinds_of_classes(cls):
    q = ExtendedInjector.let(a=1, made=cls)
    assert q.made.got == (1, 2)
    if cls is not Implemented:
        assert q.let(b=5).made.got == (1, 5)


def test_a_class_without_arguments():
    assert arguments_of_class(Empty).named == ()
    assert type(ExtendedInjector.let(made=Empty).made) is Empty


def test_read_once():
    assert arguments_of_class(Module) is arguments_of_class(Module)


class Star:
    def __init__(self, a, *args): ...


class DoubleStar:
    def __init__(self, a, **kwargs): ...


@pytest.mark.parametrize("cls", [Star, DoubleStar])
def test_arbitrary_arguments_are_refused_where_they_need_wiring(cls):
    class Top:
        def __init__(self, bad): ...

    q = ExtendedInjector.let(top=Top, bad=cls, bad_class=cls, instance=cls(1), a=1)
    assert q.bad_class is cls
    assert type(q.instance) is cls
    with pytest.raises(DependencyError) as error:
        _ = q.top
    first, second = str(error.value).splitlines()
    assert first.startswith(
        f"component {cls.__name__} cannot be wired: {cls.__name__}.__init__ takes *args or **kwargs"
    )
    assert second == f"  needed by: top (Top) -> bad ({cls.__name__})"


def test_a_constructor_that_hides_its_arguments():
    import array

    with pytest.raises(DependencyError, match=r"array\.__new__ does not tell its arguments|\*args"):
        _ = ExtendedInjector.let(a=array.array).a
