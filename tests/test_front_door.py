"""What `import jqinject` offers."""

import ast
import inspect
import pydoc
import subprocess
import sys

import pytest

import jqinject
from jqinject import Rule
from jqinject.quant import Int8WeightPerChannelFloat
from jqinject.quant.aqt import config_v4


def test_help_shows_the_functions():
    shown = pydoc.plaintext.document(jqinject)
    missing = [
        name for name in jqinject.__all__ if f"\n    {name}" not in shown and f"class {name}" not in shown
    ]
    assert not missing


def test_every_public_name_is_in_all():
    found = {name: getattr(jqinject, name) for name in dir(jqinject) if not name.startswith("_")}
    names = {name for name, thing in found.items() if not _is_room(thing)}
    assert names - {*jqinject.__all__} == {"ExtendedInjector"}


def _is_room(thing: object) -> bool:
    return (
        isinstance(thing, type(jqinject)) and thing.__name__.removeprefix("jqinject.") not in jqinject.__all__
    )


def test_type_checkers_and_programs_find_the_same_names():
    tree = ast.parse(inspect.getsource(jqinject))
    checked = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {name.name: str(line.module) for line in checked.body for name in line.names}  # type: ignore[attr-defined]
    rooms = {name for name, place in seen.items() if place == "jqinject"}
    assert rooms <= jqinject._ROOMS
    assert {name: place for name, place in seen.items() if name not in rooms} == jqinject._PLACES
    assert all(getattr(jqinject, room).__name__ == f"jqinject.{room}" for room in jqinject._ROOMS)


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match=r"module 'jqinject' has no attribute 'quantise'.*'quantize'"):
        _ = jqinject.quantise


def test_importing_it_imports_no_jax():
    program = (
        "import sys, jqinject; print([name for name in ('jax', 'flax', 'orbax') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"


def test_a_scheme_is_a_word_of_its_own_in_a_rule():
    scheme = config_v4()
    rule = Rule("fc", scheme=scheme)
    assert rule.scheme is scheme and rule.contraction == "auto"


@pytest.mark.parametrize("given", [{"weight_quant": Int8WeightPerChannelFloat}, {"contraction": "int"}])
def test_beside_a_scheme_nothing_else_quantizes(given):
    with pytest.raises(ValueError, match="a scheme quantizes weights, inputs and gradients by itself"):
        Rule(scheme=config_v4(), **given)


def test_completion_shows_what_is_meant_to_be_used():
    shown = {name for name in dir(jqinject) if not name.startswith("__")}
    rooms = {"checkpoint_policies", "core", "dot", "export", "nn", "odml", "quant", "quant_tensor"}
    assert shown == {*jqinject.__all__, *rooms, "ExtendedInjector"}
    for room in (jqinject.nn, jqinject.quant):
        found = {name: getattr(room, name) for name in dir(room)}
        assert not [name for name, thing in found.items() if inspect.ismodule(thing)]
        assert not [
            name for name in found if name.startswith("_") and name not in ("__all__", "__doc__", "__name__")
        ]
    assert {"QuantLinear", "merge_bn"} <= {*dir(jqinject.nn)} and {*jqinject.nn.__all__} <= {
        *dir(jqinject.nn)
    }
    assert "Int8WeightPerTensorFloat" in dir(jqinject.quant) and "bit_width" in dir(Int8WeightPerChannelFloat)


def test_help_shows_the_layers_with_their_arguments():
    shown = pydoc.plaintext.document(jqinject.nn)
    described = shown.split("class QuantLinear(")[1]
    arguments = "".join(described.replace("|", " ").split()).partition("QuantLinear(")[2]
    assert arguments.startswith("in_features:int,out_features:int,*,use_bias:'bool'=True,"), arguments[:200]
    assert all(name in shown for name in jqinject.nn.__all__)
