"""Resolution: sharing, errors with their path, threads, traces and speed."""

import gc
import threading
import timeit
import weakref

import pytest

from jqinject.inject import DependencyError, ExtendedInjector, resolve, this, value
from jqinject.inject.errors import MissingNameError


class Stats:
    def __init__(self, reduce_dim=None):
        self.reduce_dim = reduce_dim


class Scaling:
    def __init__(self, stats_impl, scaling_min_val, threshold=1.0):
        self.stats_impl = stats_impl
        self.scaling_min_val = scaling_min_val
        self.threshold = threshold


class Quant:
    def __init__(self, scaling_impl, stats_impl, *, signed=True):
        self.scaling_impl = scaling_impl
        self.stats_impl = stats_impl
        self.signed = signed


class W(ExtendedInjector):
    tensor_quant = Quant
    scaling_impl = Scaling
    stats_impl = Stats
    scaling_min_val = 1e-10


class Broken(ExtendedInjector):
    tensor_quant = Quant
    scaling_impl = Scaling
    stats_impl = Stats
    scaling_min_value = 1e-10


def test_components_are_new_in_each_access_and_shared_within_one():
    first, second = W.tensor_quant, W.tensor_quant
    assert first is not second
    assert first.stats_impl is not second.stats_impl
    assert first.stats_impl is first.scaling_impl.stats_impl


def test_defaults_and_declared_names():
    assert W.tensor_quant.scaling_impl.threshold == 1.0
    assert W.let(threshold=2.0, signed=False).tensor_quant.scaling_impl.threshold == 2.0
    assert W.let(signed=False).tensor_quant.signed is False


def test_a_declared_name_that_fails_does_not_fall_back_to_the_default():
    with pytest.raises(DependencyError, match="has no name 'nowhere'"):
        _ = W.let(threshold=this.nowhere).tensor_quant


def test_a_miss_names_the_chain_and_the_nearest():
    with pytest.raises(DependencyError) as error:
        _ = Broken.tensor_quant
    assert str(error.value).splitlines() == [
        "'Broken' has no name 'scaling_min_val'",
        "  needed by: tensor_quant (Quant) -> scaling_impl (Scaling) -> scaling_min_val",
        "  did you mean 'scaling_min_value'?",
        "  cure: declare it, as in Broken.let(scaling_min_val=...), or give it for one access: "
        "resolve(Broken, 'tensor_quant', scaling_min_val=...)",
    ]
    assert not isinstance(error.value, AttributeError)


def test_a_direct_miss_is_an_attribute_error_too():
    with pytest.raises(MissingNameError) as error:
        _ = W.tensor_qant
    assert str(error.value) == "'W' has no name 'tensor_qant'\n  did you mean 'tensor_quant'?"
    assert isinstance(error.value, AttributeError)


class Own:
    def __init__(self, own): ...


class One:
    def __init__(self, two): ...


class Two:
    def __init__(self, three): ...


def test_a_circle_is_printed_as_a_circle():
    with pytest.raises(DependencyError) as error:
        _ = ExtendedInjector.let(own=Own).own
    assert (
        str(error.value).splitlines()[0] == "'ExtendedInjector' has a circular dependency: own (Own) -> own"
    )
    q = ExtendedInjector.let(top=One, two=Two, three=value(lambda four: four), four=this.two)
    with pytest.raises(DependencyError) as error:
        _ = q.top
    assert str(error.value).splitlines() == [
        "'ExtendedInjector' has a circular dependency: two (Two) -> three (@value) -> four (= this.two) -> two",
        "  met while building top (One) -> two (Two) -> three (@value) -> four (= this.two)",
        "  cure: one of these names has to be a plain value, or to ask for another name",
    ]


def test_a_component_that_raises_keeps_its_type_with_the_path_added():
    class Bad:
        def __init__(self, reduce_dim):
            raise KeyError("mine")

    with pytest.raises(KeyError) as error:
        _ = W.let(stats_impl=Bad, reduce_dim=0).tensor_quant
    assert error.value.args == ("mine",)
    assert error.value.__notes__ == [
        "while building tensor_quant (Quant) -> scaling_impl (Scaling) -> stats_impl (Bad) "
        "in the injector 'W'"
    ]


def test_failures_leave_no_trace():
    for _ in range(5):
        with pytest.raises(DependencyError):
            _ = Broken.tensor_quant
    assert Broken.let(scaling_min_val=1.0).tensor_quant.scaling_impl.scaling_min_val == 1.0


def test_given_names_hold_for_one_access():
    q = W.let(channels=value(lambda module: module.n))

    class Layer:
        n = 3

    assert resolve(q, "channels", module=Layer()) == 3
    assert "module" not in q
    with pytest.raises(DependencyError, match="has no name 'module'"):
        _ = q.channels
    assert resolve(q, "tensor_quant", scaling_min_val=0.5).scaling_impl.scaling_min_val == 0.5
    assert resolve(q, "name", name="n", injector="i") == "n"


def test_given_objects_are_not_kept_alive():
    class Layer:
        pass

    layer = Layer()
    seen = weakref.ref(layer)
    resolve(W, "tensor_quant", module=layer)
    del layer
    gc.collect()
    assert seen() is None


def test_the_trace_holds_what_was_asked_with_a_default_or_without():
    class Hidden:
        def __init__(self, deep, optional=3): ...

    q = W.let(stats_impl=value(lambda kind: Hidden), kind=1, deep=2)
    trace: set[str] = set()
    resolve(q, "tensor_quant", trace=trace)
    assert trace == {
        "tensor_quant",
        "scaling_impl",
        "stats_impl",
        "scaling_min_val",
        "threshold",
        "signed",
        "kind",
        "deep",
        "optional",
    }


def test_the_trace_holds_what_nested_injectors_ask_of_the_outer_one():
    class Sub(ExtendedInjector):
        inner = (this << 1).wanted
        hidden = 3

    trace: set[str] = set()
    resolve(ExtendedInjector.let(sub=Sub, wanted=1, a=this.sub.inner), "a", trace=trace)
    assert trace == {"a", "sub", "wanted"}


def test_only_injectors_are_resolved():
    with pytest.raises(TypeError, match="a class that derives from ExtendedInjector, got 3"):
        resolve(3, "a")


def test_many_threads_get_the_same_answers():
    at_once = threading.Barrier(32)
    inside = threading.Barrier(32, timeout=20)

    class Meeting:
        """Can only be built if all threads are building at the same time: no lock is held."""

        def __init__(self, scaling_impl):
            inside.wait()
            self.scaling_impl = scaling_impl

    class Fresh(ExtendedInjector):
        kind = "stats"
        meeting = Meeting
        scaling_impl = Scaling
        scaling_min_val = 0.5

        @value
        def stats_impl(kind):
            return Stats if kind == "stats" else this.nowhere

    answers: list[object] = []

    def work():
        at_once.wait()
        for _ in range(50):
            with pytest.raises(DependencyError) as error:
                _ = Fresh.let(kind="other").scaling_impl
            answers.append(str(error.value))
            answers.append(type(Fresh.scaling_impl.stats_impl))
        answers.append(type(Fresh.meeting.scaling_impl))

    threads = [threading.Thread(target=work) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 32 * 101
    assert len(set(answers)) == 3
    assert set(answers) >= {Stats, Scaling}


def test_long_chains():
    names = {f"n{i}": getattr(this, f"n{i + 1}") for i in range(100)}
    assert ExtendedInjector.let(**names, n100="end").n0 == "end"


def _toy():
    def component(i):
        names = [f"v{i}", f"v{(i + 1) % 25}", *([f"c{i + 1}"] if i < 14 else [])]
        scope: dict = {}
        exec(f"class C{i}:\n    def __init__(self, {', '.join(names)}, opt=1, *, k{i}=2): pass", scope)
        return scope[f"C{i}"]

    def function(arguments, result):
        return value(eval(f"lambda {arguments}: result", {"result": result}))

    declared: dict = {f"p{i}": i for i in range(25)}
    for i in range(25):
        declared[f"v{i}"] = function(f"p{i}, {f'v{i + 1}' if i < 24 else 'p0'}, optional=3", i)
    for i in range(15):
        cls = component(i)
        declared[f"c{i}"] = cls if i % 2 else function(f"v{i}", cls)
    return ExtendedInjector.let(**declared)


def test_wiring_a_quantizer_takes_well_under_a_millisecond():
    toy = _toy()
    best = min(timeit.repeat(lambda: resolve(toy, "c0", module=1), number=20, repeat=10)) / 20
    assert best < 0.5e-3  # about 0.08 ms on an idle core
