"""What `import jqinject` offers."""

import pydoc

import pytest

import jqinject
from jqinject import Rule
from jqinject.dot import config_v4
from jqinject.quant import Int8WeightPerChannelFloat


def test_help_shows_the_functions():
    shown = pydoc.plaintext.document(jqinject)
    missing = [
        name for name in jqinject.__all__ if f"\n    {name}" not in shown and f"class {name}" not in shown
    ]
    assert not missing


def test_every_public_name_is_in_all():
    names = {
        name for name, thing in vars(jqinject).items() if not name.startswith("_") and not _is_room(thing)
    }
    assert names - {*jqinject.__all__} == {"ExtendedInjector"}


def _is_room(thing: object) -> bool:
    return (
        isinstance(thing, type(jqinject)) and thing.__name__.removeprefix("jqinject.") not in jqinject.__all__
    )


def test_a_scheme_is_a_word_of_its_own_in_a_rule():
    scheme = config_v4()
    rule = Rule("fc", scheme=scheme)
    assert rule.scheme is scheme and rule.contraction == "auto"
    assert rule == Rule("fc", contraction=scheme), "the older spelling"


@pytest.mark.parametrize("given", [{"weight_quant": Int8WeightPerChannelFloat}, {"contraction": "int"}])
def test_beside_a_scheme_nothing_else_quantizes(given):
    with pytest.raises(ValueError, match="a scheme quantizes weights, inputs and gradients by itself"):
        Rule(scheme=config_v4(), **given)
