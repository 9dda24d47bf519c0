"""What a declared name is."""

import enum
import functools

import numpy as np
import pytest

from jqinject.inject import DependencyError, ExtendedInjector, resolve, this, value
from jqinject.inject.dependencies_library import Injector, Operation, Package


class Component:
    pass


class Mode(enum.Enum):
    FAST = 1


class Named:
    """An ordinary component whose class happens to have a dtype."""

    dtype = np.dtype("float32")


def function():
    raise AssertionError("a plain function is never called")


PlainOfTheLibrary = type(Injector)("PlainOfTheLibrary", (Injector,), {"foo": 1})


@pytest.mark.parametrize(
    "plain",
    [
        3,
        2.5,
        True,
        None,
        "int",
        (1, 2),
        [1],
        {"k": 1},
        Mode.FAST,
        Mode,
        np.float32,
        np.dtype("int8"),
        np.dtype,
        np.generic,
        float,
        int,
        bool,
        dict,
        function,
        functools.partial(Component),
        len,
        Component(),
        slice(1),
        PlainOfTheLibrary,
    ],
)
def test_plain_values_are_handed_on_as_they_are(plain):
    class Q(ExtendedInjector):
        a = plain
        b = value(lambda: plain)

    assert Q.a is plain
    assert Q.b is plain
    assert resolve(ExtendedInjector, "x", x=plain) is plain


def test_arrays_are_plain_values():
    array = np.arange(3)

    class Q(ExtendedInjector):
        a = array

    assert Q.a is array


def test_ml_dtypes_are_plain_values():
    ml_dtypes = pytest.importorskip("ml_dtypes")

    class Q(ExtendedInjector):
        dtype = ml_dtypes.float8_e4m3fn

    assert Q.dtype is ml_dtypes.float8_e4m3fn


@pytest.mark.parametrize("cls", [Component, Named])
def test_a_class_is_built_anew_at_every_access(cls):
    class Q(ExtendedInjector):
        a = cls
        a_class = cls

    assert type(Q.a) is cls
    assert Q.a is not Q.a
    assert Q.a_class is cls


def test_operations_and_packages_of_the_library_are_refused():
    with pytest.raises(DependencyError, match="'a' is a `Operation` of the dependencies library"):
        ExtendedInjector.let(a=Operation(function))
    with pytest.raises(DependencyError, match="'a' is a `Package`"):
        ExtendedInjector.let(a=Package("os"))


@pytest.mark.parametrize("link", [this, this << 1, this << 2])
def test_a_link_names_something(link):
    with pytest.raises(DependencyError, match="points to no name"):
        ExtendedInjector.let(a=link)
