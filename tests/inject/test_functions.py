"""`@value` and `@choices`."""

import dependencies
import pytest

from jqinject.inject import DependencyError, ExtendedInjector, choices, requested_names, this, value


class A:
    def __init__(self, only_a):
        self.got = only_a


class B:
    def __init__(self, only_b=2):
        self.got = only_b


class Q(ExtendedInjector):
    kind = "b"

    @value
    def impl(kind):
        """Which one."""
        return A if kind == "a" else B

    @value
    def impl_class(kind):
        return A if kind == "a" else B

    @value
    def linked(kind):
        return this.nowhere if kind == "a" else this.impl.got

    @value
    def shape(kind, module=None, extra=(1,)):
        return (kind, module, extra)


def test_a_returned_class_is_wired_and_the_other_branch_is_not_needed():
    assert type(Q.impl) is B
    assert Q.impl is not Q.impl
    assert Q.let(kind="a", only_a=7).impl.got == 7
    with pytest.raises(DependencyError, match=r"impl \(A\) -> only_a"):
        _ = Q.let(kind="a").impl


def test_a_failed_branch_leaves_nothing_behind():
    bad = Q.let(kind="a")
    for _ in range(3):
        with pytest.raises(DependencyError):
            _ = bad.impl
    assert type(bad.let(kind="b").impl) is B
    assert type(Q.impl) is B
    assert bad.let(only_a=1).impl.got == 1


def test_under_a_class_name_the_class_is_the_value():
    assert Q.impl_class is B


def test_a_returned_injector_is_not_wired():
    assert ExtendedInjector.let(a=value(lambda: Q)).a is Q


def test_a_returned_link_is_followed():
    assert Q.linked == 2


def test_defaults_are_honoured_and_a_declared_name_wins():
    assert Q.shape == ("b", None, (1,))
    assert Q.let(module="m", extra=3).shape == ("b", "m", 3)


def test_a_function_runs_once_in_one_access():
    calls = []

    def counted():
        calls.append(1)
        return 3

    class Pair:
        def __init__(self, a, b, n):
            self.sum = a + b + n

    q = ExtendedInjector.let(n=value(counted), a=this.n, b=value(lambda n: n), pair=Pair)
    assert q.pair.sum == 9
    assert len(calls) == 1


def test_the_librarys_own_decorator_is_understood():
    assert ExtendedInjector.let(a=dependencies.value(lambda n: n + 1), n=1).a == 2


def test_keyword_only_and_positional_only_arguments():
    def mixed(a, b=5, /, c=6, *, d, e=7):
        return a, b, c, d, e

    q = ExtendedInjector.let(a=1, d=4, f=value(mixed))
    assert q.f == (1, 5, 6, 4, 7)
    assert q.let(b=0, e=0).f == (1, 0, 6, 4, 0)

    def gap(a=1, b=2, /):
        return a, b

    assert ExtendedInjector.let(b=9, f=value(gap)).f == (1, 9)
    assert ExtendedInjector.let(f=value(gap)).f == (1, 2)


def test_the_decorator_keeps_name_and_documentation():
    def levels(bit_width):
        """How many."""

    made = value(levels)
    assert (made.__name__, made.__doc__) == ("levels", "How many.")
    assert repr(made).startswith("<@value ")
    assert made == value(levels)
    assert hash(made) == hash(value(levels))


def test_a_static_method_is_the_function_in_it():
    class Static(ExtendedInjector):
        bit_width = 4

        @value
        @staticmethod
        def levels(bit_width):
            return 2**bit_width

    assert Static.levels == 16


def test_an_exception_keeps_its_type_and_gets_the_path():
    class Needs:
        def __init__(self, broken): ...

    def broken(kind):
        raise ZeroDivisionError(kind)

    with pytest.raises(ZeroDivisionError) as error:
        _ = Q.let(top=Needs, broken=value(broken)).top
    assert error.value.__notes__ == ["while building top (Needs) -> broken (@value) in the injector 'Q'"]


@pytest.mark.parametrize(
    "bad, message",
    [
        (A, "@value decorates a function"),
        (3, "@value decorates a function, got 3"),
        (lambda self: 1, "the 'value' decorator cannot be used on methods"),
        (lambda *args: 1, r"takes \*args or \*\*kwargs"),
        (lambda **kwargs: 1, r"takes \*args or \*\*kwargs"),
    ],
)
def test_what_value_refuses(bad, message):
    with pytest.raises(DependencyError, match=message):
        value(bad)


def test_choices_make_the_names_of_both_branches_known():
    @choices(A, B)
    def impl(kind):
        return A

    assert {"only_a", "only_b", "kind"} <= requested_names(ExtendedInjector.let(impl=impl))
    assert choices(A)(value(lambda: A)).choices == (A,)
    with pytest.raises(DependencyError, match="@choices lists the classes"):
        choices(3)
