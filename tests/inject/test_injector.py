"""Declaring, inheriting, combining and overriding injectors."""

import subprocess
import sys

import dependencies
import pytest

import jqinject
from jqinject.inject import DependencyError, ExtendedInjector, declared_names, explain, this, value


class Scaling:
    def __init__(self, bit_width, signed=True):
        self.bit_width = bit_width
        self.signed = signed


class Base(ExtendedInjector):
    """Documented."""

    bit_width: int = 8
    scaling = Scaling
    annotated_only: float


class Left(Base):
    pass


class Right(Base):
    bit_width = 4


def test_it_is_an_injector_of_the_library():
    assert issubclass(Base, dependencies.Injector)
    assert isinstance(Base, type(dependencies.Injector))
    assert Base.__doc__ == "Documented."


def test_annotations_and_bookkeeping_are_no_declarations():
    assert declared_names(Base) == {"bit_width", "scaling"}
    assert Base.__name__ == "Base"
    assert Base.__module__ == __name__


def test_an_empty_subclass():
    assert Left.bit_width == 8
    assert Left.scaling.bit_width == 8


def test_diamonds_follow_the_real_mro():
    class Both(Left, Right):
        pass

    assert Both.bit_width == 4  # Left only inherits the name, Right redefines it
    assert (Left & Right).bit_width == 4


def test_the_left_base_wins():
    class One(ExtendedInjector):
        a = 1
        b = this.a

    class Two(ExtendedInjector):
        a = 2
        c = this.a

    both = One & Two
    assert (both.a, both.b, both.c) == (1, 1, 1)
    assert (Two & One).a == 2
    assert both.__name__ == "One"
    assert declared_names(both) == {"a", "b", "c"}
    assert "c" not in One


def test_combining_with_a_relative():
    assert (Right & Base).bit_width == 4
    assert (Base & Base).bit_width == 8
    with pytest.raises(DependencyError, match="cure: Right alone has the names of both"):
        Base & Right
    with pytest.raises(TypeError):
        Base & 3


def test_combining_opposite_orders():
    class AB(Left, Right):
        pass

    class BA(Right, Left):
        pass

    with pytest.raises(DependencyError, match="AB & BA: their bases stand in opposite orders"):
        AB & BA


def test_let_makes_a_new_subclass():
    four = Base.let(bit_width=4, extra="x")
    assert issubclass(four, Base)
    assert (four.bit_width, four.extra, four.scaling.bit_width) == (4, "x", 4)
    assert Base.bit_width == 8
    assert "extra" not in Base
    assert four.__name__ == "Base"
    assert four.__qualname__ == Base.__qualname__
    assert four.let(bit_width=2).bit_width == 2
    assert repr(four).endswith("test_injector.Base'>.let(bit_width=..., extra=...)")
    assert Base.let(cls=3, self=4).cls == 3


def test_let_results_can_be_inherited():
    class Sub(Base.let(bit_width=3)):
        signed = False

    assert (Sub.scaling.bit_width, Sub.scaling.signed) == (3, False)


def test_membership_and_dir():
    assert "bit_width" in Base
    assert "annotated_only" not in Base
    assert "let" not in Base
    assert {"bit_width", "scaling", "let"} <= set(dir(Base))
    assert not {"__dependencies__", "__declared__"} & set(dir(Base))


def test_hasattr_and_getattr_of_a_name_that_is_not_there():
    assert not hasattr(Base, "nothing")
    assert getattr(Base, "nothing", 5) == 5
    assert not hasattr(Base, "__array__")


def test_never_instantiated():
    with pytest.raises(
        DependencyError, match=r"'Base' is a declaration and is never instantiated.*Base\.tensor_quant"
    ):
        Base()


def test_never_modified():
    with pytest.raises(DependencyError, match=r"Make a new one: Base\.let\(bit_width=\.\.\.\)"):
        Base.bit_width = 3
    with pytest.raises(DependencyError, match="would change an injector"):
        del Base.bit_width
    assert Base.bit_width == 8


def test_let_can_not_be_redefined():
    with pytest.raises(DependencyError, match="'let' redefinition is not allowed"):
        type(Base)("Bad", (Base,), {"let": 3})
    with pytest.raises(DependencyError, match="'let' redefinition is not allowed"):
        Base.let(let=3)


@pytest.mark.parametrize("name", ["__init__", "__call__", "__slots__", "__custom__"])
def test_magic_names_are_refused(name):
    with pytest.raises(DependencyError, match=f"'Bad' declares '{name}': magic methods are not allowed"):
        type(Base)("Bad", (Base,), {name: ()})
    with pytest.raises(DependencyError, match="magic methods are not allowed"):
        Base.let(**{name: ()})


def test_only_injectors_are_bases():
    with pytest.raises(DependencyError, match="can only inherit from other injectors"):

        class Bad(Base, Scaling):
            pass


@pytest.mark.parametrize(
    "namespace",
    [
        {"__firstlineno__": 3, "__static_attributes__": ()},
        {"__annotations__": {"a": int}},
        {"__annotate_func__": None, "__conditional_annotations__": set()},
        {"__annotate__": None, "__classdictcell__": None},
        {"__type_params__": ()},
    ],
    ids=lambda namespace: next(iter(namespace)),
)
def test_what_any_python_writes_into_a_class_body_is_accepted(namespace):
    if "__classdictcell__" in namespace:
        namespace = {"__annotate__": None}
    made = type(Base)("Made", (Base,), {"__module__": __name__, "__qualname__": "Made", **namespace, "a": 1})
    assert declared_names(made) == {"a", "bit_width", "scaling"}


def test_a_function_of_the_body_may_use_the_class_cell():
    class Q(Base):
        @value
        def name():
            return __class__.__name__

    assert Q.name == "Q"


def test_defaults_give_way_to_every_other_class_wherever_they_stand():
    class Defaults(ExtendedInjector, defaults=True):
        bit_width, signed, narrow_range = 8, True, False

    class MoreDefaults(Defaults, defaults=True):
        signed = False

    class Four(ExtendedInjector):
        bit_width = 4

    for bases in ((Defaults, Four), (Four, Defaults)):

        class Q(*bases):
            narrow_range = True

        assert (Q.bit_width, Q.signed, Q.narrow_range) == (4, True, True)
        assert (explain(Q, name="bit_width").origin, explain(Q, name="signed").origin) == (Four, Defaults)
    assert (MoreDefaults & Four).bit_width == 4
    assert (MoreDefaults.signed, MoreDefaults.bit_width) == (False, 8)
    assert MoreDefaults.let(bit_width=2).bit_width == 2


ALONE = """
import sys, types
package = types.ModuleType("jqinject")  # without the package's own __init__
package.__path__ = sys.argv[1:]
sys.modules["jqinject"] = package
import jqinject.inject
print(sorted({name.split(".")[0] for name in sys.modules} & {"jax", "jaxlib", "flax", "ml_dtypes"}))
"""


def test_the_room_imports_no_array_library_but_numpy():
    command = [sys.executable, "-c", ALONE, *jqinject.__path__]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
