"""The wiring tree."""

import dataclasses

import numpy as np
import pytest

from jqinject.inject import Binding, ExtendedInjector, explain, this, value


class Stats:
    built = 0

    def __init__(self, reduce_dim=None):
        Stats.built += 1
        self.reduce_dim = reduce_dim


class Scaling:
    def __init__(self, stats_impl, scaling_min_val, threshold=1.0): ...


class Quant:
    def __init__(self, scaling_impl, stats_impl, signed): ...


class Solver(ExtendedInjector):
    tensor_quant = Quant
    kind = "stats"

    @value
    def stats_impl(kind):
        return Stats if kind == "stats" else this.nowhere

    @value
    def channels(module):
        return len(module)


class Base(Solver):
    scaling_impl = Scaling
    scaling_min_val = 1e-10
    signed = True


class W4(Base):
    signed = False


TREE = """
tensor_quant: Quant  <- Solver
├── scaling_impl: Scaling  <- Base
│   ├── stats_impl: Stats  <- Solver
│   │   ├── reduce_dim = None  <- default
│   │   └── @value kind = 'stats'  <- Solver
│   ├── scaling_min_val = 0.5  <- override by let
│   └── threshold = 1.0  <- default
├── stats_impl: Stats  <- Solver  (shared, see above)
└── signed = False  <- W4
"""


def test_the_tree_as_text():
    assert str(explain(W4.let(scaling_min_val=0.5))) == TREE.strip()


def test_the_tree_for_programs():
    tree = explain(W4.let(scaling_min_val=0.5))
    assert (tree.name, tree.kind, tree.value, tree.origin, tree.error) == (
        "tensor_quant",
        "component",
        Quant,
        Solver,
        "",
    )
    assert [node.name for node in tree.children] == ["scaling_impl", "stats_impl", "signed"]
    assert tree["scaling_min_val"].origin == "override by let"
    assert tree["threshold"].kind == "default"
    assert tree["signed"].origin is W4
    assert [node.name for node in tree["stats_impl"].via] == ["kind"]
    assert "reduce_dim" in tree
    assert tree.errors() == []
    names = [node.name for node in tree.walk()]
    assert len(names) == len(set(names)) == 8
    with pytest.raises(KeyError, match="did you mean 'threshold'"):
        tree["treshold"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        tree.name = "x"


def test_components_are_not_built():
    before = Stats.built
    explain(W4)
    assert Stats.built == before


def test_given_names_and_the_module():
    tree = explain(W4, [1, 2, 3], "channels")
    assert (tree.kind, tree.value, tree.origin) == ("computed", 3, Solver)
    assert tree["module"].origin == "given"
    assert explain(W4, name="signed", signed=7).value == 7


def test_what_is_missing_is_shown():
    tree = explain(Solver.let(scaling_impl=Scaling, scaling_min_value=1))
    assert [node.name for node in tree.errors()] == ["signed", "scaling_min_val"]
    missing = tree["scaling_min_val"]
    assert missing.kind == "missing"
    assert missing.error.splitlines() == [
        "'Solver' has no name 'scaling_min_val'",
        "  needed by: tensor_quant -> scaling_impl -> scaling_min_val",
        "  did you mean 'scaling_min_value'?",
    ]
    assert "scaling_min_val: MISSING: 'Solver' has no name" in str(tree)
    assert explain(Solver, name="nothing").kind == "missing"


def test_what_can_not_be_computed_is_shown():
    tree = explain(W4, name="channels")
    assert tree.error == "not computed, as it needs module"
    assert tree["module"].kind == "missing"
    tree = explain(W4, 5, "channels")
    assert tree.error == "TypeError: object of type 'int' has no len()"
    assert "ERROR: TypeError" in str(tree)
    tree = explain(W4.let(kind="other"))
    assert tree["stats_impl"].kind == "link"
    assert tree["nowhere"].kind == "missing"


def test_circles_are_shown():
    class One:
        def __init__(self, two): ...

    class Two:
        def __init__(self, one): ...

    tree = explain(ExtendedInjector.let(one=One, two=Two), name="one")
    assert [node.error for node in tree.errors()] == ["one -> two -> one"]
    assert "one: CIRCLE: one -> two -> one" in str(tree)


def test_a_component_that_can_not_be_wired_is_shown():
    class Star:
        def __init__(self, *args): ...

    assert "takes *args" in explain(ExtendedInjector.let(a=Star), name="a").error


def test_links_and_nested_injectors():
    class Sub(ExtendedInjector):
        inner = (this << 1).signed
        stats = Stats
        beyond = (this << 2).a

    q = W4.let(
        sub=Sub,
        a=this.sub.inner,
        b=this.sub.stats.reduce_dim,
        c=this.sub,
        d=this.sub.beyond,
        e=this.table["k"],
        table={},
    )
    tree = explain(q, name="a")
    assert (tree.kind, tree.value) == ("link", False)
    assert [node.name for node in tree.walk()] == ["a", "inner", "signed"]
    assert tree["inner"].origin is Sub
    assert explain(q, name="b").value is None
    assert explain(q, name="c").value is Sub
    assert explain(q, name="sub").kind == "injector"
    assert "climbs out of" in explain(q, name="d").errors()[-1].error
    assert explain(q, name="e").error == "KeyError: 'k'"
    assert explain(Sub, name="inner").error.startswith("(this << 1).signed climbs out of 'Sub'")


def test_a_function_that_reads_a_component():
    q = W4.let(read=value(lambda stats_impl: stats_impl.reduce_dim), reduce_dim=3)
    assert explain(q, name="read").value == 3


def test_values_are_shown_in_brief():
    class Layer:
        def __repr__(self):
            raise AssertionError("never asked for")

    q = ExtendedInjector.let(a=np.ones((64, 32), np.float32), b=Layer(), c=tuple(range(99)), f=Layer.__repr__)
    assert str(explain(q, name="a")) == "a = float32[64,32]  <- override by let"
    assert str(explain(q, name="b")) == "b = <Layer>  <- override by let"
    assert len(str(explain(q, name="c"))) < 100


class Proxy:
    def __init__(self, binding):
        self.binding = binding


def test_bindings_and_proxies():
    binding = Binding(W4, {"signed": 5})
    assert explain(binding)["signed"].value == 5
    assert explain(Proxy(binding))["signed"].value == 5
    for bad in (3, Proxy(4), object()):
        with pytest.raises(TypeError, match="explain takes an injector class, a binding or a proxy"):
            explain(bad)
