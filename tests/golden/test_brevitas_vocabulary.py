"""Every key and value of Brevitas's vocabulary is understood by the adapters, or named in out_of_scope.toml.

A value that a case of the reference set states is understood if that case is (test_brevitas.py). Of any other value a
case is made here, from the one that resembles it most, and built.
"""

import copy
import difflib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.golden import _driver
from tests.golden._config import CannotDrive, settings_of

PEER = "brevitas"
VOCABULARY = json.loads((_driver.HERE / PEER / "VOCABULARY.json").read_text())
CASES = [case for case in _driver.load_cases(PEER) if case["_folder"] == str(_driver.HERE / PEER)]
LEFT_OUT = "..."  # the vocabulary ends long lists so


def _settings(case: dict[str, Any]) -> dict[str, str]:
    """Everything a case states, under the vocabulary's names."""
    found = dict(settings_of(case["config"])) | dict(settings_of(case["overrides"], "overrides."))
    return found | ({"quantizer": case["quantizer"]} if case.get("quantizer") else {})


SETTINGS = [(case, _settings(case)) for case in CASES]


def _unused() -> Iterator[tuple[str, str, str]]:
    """(area, key, value) of what no case of the reference set states."""
    for area, keys in VOCABULARY.items():
        stated = {(k, v) for case, settings in SETTINGS if case["area"] == area for k, v in settings.items()}
        for key, values in keys.items():
            yield from (
                (area, key, value) for value in values if (key, value) not in stated | {(key, LEFT_OUT)}
            )


def _set(case: dict[str, Any], key: str, text: str) -> None:
    """State a value, which the vocabulary has as text, in a case."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = text
    if key == "quantizer":
        case[key] = value
        return
    *outer, last = key.split(".")
    place = case if outer[:1] == ["overrides"] else case["config"]
    for name in outer:
        place = place[name]
    place[last] = value


def _made_up(area: str, key: str, value: str) -> Iterator[dict[str, Any]]:
    """Cases that state the value, otherwise those of the reference set, the most similar one first."""
    known = [
        (case, settings)
        for case, settings in SETTINGS
        if case["area"] == area and _driver.reason_to_skip(case, PEER) is None
    ]
    known.sort(key=lambda x: -difflib.SequenceMatcher(None, x[1].get(key, ""), value).ratio())
    outer = key.rpartition(".")[0]
    for case, settings in known:
        if key in settings or outer == "overrides" or isinstance(case["config"].get(outer), dict):
            made_up = copy.deepcopy(case)
            _set(made_up, key, value)
            _agree_on_bits(made_up["overrides"], key.rpartition(".")[2])
            yield made_up


def _agree_on_bits(overrides: dict[str, Any], changed: str) -> None:
    """The bits of a minifloat are those of its sign, its exponent and its mantissa."""
    exponent, mantissa = (overrides.get(f"{part}_bit_width") for part in ("exponent", "mantissa"))
    if exponent is None or mantissa is None:
        return
    if changed == "bit_width":
        overrides["exponent_bit_width"] = overrides["bit_width"] - 1 - mantissa
    else:
        overrides["bit_width"] = 1 + exponent + mantissa


@pytest.mark.parametrize(("area", "key", "value"), list(_unused()))
def test_the_adapters_understand(area: str, key: str, value: str) -> None:
    errors = []
    for case in _made_up(area, key, value):
        if _driver.reason_to_skip(case, PEER) is not None:
            return
        try:
            _driver.adapter(case["kind"]).build(case, _driver.arrays_of(case, "inputs"))
        except (CannotDrive, *_driver.USER_ERRORS) as error:
            errors.append(f"{case['id']}: {error}")
        else:
            return
    pytest.fail(f"no case of {area} can state {key} = {value}\n" + "\n".join(errors[:3]))


FIRST_OF_KIND = {case["kind"]: case for case in reversed(CASES)}


@pytest.mark.parametrize("kind", FIRST_OF_KIND)
@pytest.mark.parametrize("place", ["config", "layer", "overrides", "inputs", "kwargs", "operands"])
def test_the_adapters_refuse_what_they_do_not_know(kind: str, place: str) -> None:
    case = copy.deepcopy(FIRST_OF_KIND[kind])
    inputs = _driver.arrays_of(case, "inputs")
    places = {
        "config": case["config"],
        "layer": case["layer"],
        "overrides": case["overrides"] if case.get("quantizer") else None,
        "inputs": None if kind == "core" else inputs,
        "kwargs": case["config"].get("kwargs"),
        "operands": case["config"].get("operands", [None])[0],
    }
    if places[place] is not None:
        places[place]["unheard_of"] = 1
        with pytest.raises(CannotDrive, match="unheard_of"):
            _driver.adapter(kind).build(case, inputs)
