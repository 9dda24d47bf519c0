"""The keywords that type checkers know are those of the ready-made quantizers."""

import typing

import numpy as np
import pytest

from jqinject.catalogue.entries import ready_made
from jqinject.inject import ExtendedInjector
from jqinject.proxy import QuantProxyFromInjector
from jqinject.quant import enums
from jqinject.quant.override_names import NAMES, PASSED
from typed_keywords import STUB, names_by_kind, stub

TYPES = {
    "Any": object,
    "Component": object,
    "DType": object,
    "Array": float | np.ndarray,
    "AxisName": str | tuple | None,
    "Injector": type(ExtendedInjector),
    "type[QuantProxyFromInjector]": type(QuantProxyFromInjector),
    'Literal["max", "most_recent"]': str,
    'Literal["grid", "fibonacci", "exact"]': str,
}


def _type(text):
    parts = [part.strip() for part in text.split(" | ")]
    plain = {"int": int, "float": float | int, "bool": bool, "None": type(None)}
    found = TYPES.get(text)
    if found is not None:
        return found
    each = [
        plain.get(p) or (tuple if p.startswith("tuple[") else getattr(enums, p, None) or TYPES[p])
        for p in parts
    ]
    return typing.Union[tuple(each)]  # noqa: UP007


def test_the_stub_is_what_the_quantizers_make_of_it():
    assert STUB.read_text(encoding="utf-8") == stub(), "python tools/typed_keywords.py"


def test_every_name_is_explained():
    known = frozenset().union(*names_by_kind().values())
    assert known - PASSED == NAMES.keys(), "jqinject/quant/override_names.toml"


@pytest.mark.parametrize("name", ready_made())
def test_declared_values_are_of_the_stated_types(name):
    for declared, spec in ready_made()[name].__dependencies__.items():
        if spec.kind == "PLAIN" and declared not in ("scaling_stats_momentum",):
            annotation, _ = NAMES[declared]
            assert isinstance(spec.target, _type(annotation)), (declared, spec.target)


def test_components_are_told_apart():
    for name, (annotation, _) in NAMES.items():
        ends = name.endswith(("_impl", "_quant"))
        if ends and name not in ("scale_quant",):
            assert annotation == "Component", name
