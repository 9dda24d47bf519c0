"""The driver itself: it must not let a disagreement pass."""

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.golden import _driver

STRICT = {"default": {"rtol": 1e-5, "atol": 1e-6}, "grad": {"rtol": 1e-4, "atol": 1e-5}}
EXPECTED = {
    "value": np.array([0.5, 1.0, 1.5]),
    "int": np.array([1, 2, 3]),
    "grad.x": np.array([1.0, 0.0, 1.0]),
}


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """Check a case whose reference is EXPECTED against an adapter that returns `outputs` and `facts`."""
    np.savez(tmp_path / "made_up.npz", **{f"c|output|{name}": array for name, array in EXPECTED.items()})
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "made_up.py").touch()
    monkeypatch.setattr(_driver, "HERE", tmp_path)

    def run(outputs: Any, found: dict[str, Any] | None = None, /, **case: Any) -> None:
        module = ModuleType("made_up")
        module.run = lambda case, inputs: outputs() if callable(outputs) else EXPECTED | outputs
        module.facts = lambda case, inputs: found or {}
        monkeypatch.setitem(sys.modules, "tests.golden.adapters.made_up", module)
        specs = {name: {"key": f"c|output|{name}"} for name in EXPECTED}
        base = {"id": "made_up/c", "area": "made_up", "kind": "made_up", "file": "made_up.npz", "inputs": {}}
        _driver.check(base | {"outputs": specs, "tolerance": STRICT, "_folder": str(tmp_path)} | case)

    return run


def test_agreement_passes(check):
    check({})
    check({"value": np.array([0.5, 1.0, 1.5 + 1e-6])})


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ({"value": np.array([0.5, 1.1, 1.5])}, r"value: 1 of 3 elements differ, first at \(1,\)"),
        ({"value": np.array([0.5, np.nan, 1.5])}, "value: 1 of 3"),
        ({"value": np.ones((1, 3))}, r"value: shape \(1, 3\), expected \(3,\)"),
        ({"int": np.array([1, 2, 4])}, "int: 1 of 3"),
        ({"int": np.array([1.0, 2.0, 3.0])}, "int: dtype float64, expected integers"),
        ({"grad.x": np.zeros(3)}, "grad.x: 2 of 3"),
    ],
)
def test_disagreement_fails(check, outputs, message):
    with pytest.raises(AssertionError, match=message):
        check(outputs)


def test_an_output_that_is_not_returned_fails(check):
    with pytest.raises(AssertionError, match=r"grad.x: not returned"):
        check(lambda: {"value": EXPECTED["value"], "int": EXPECTED["int"]})


def test_as_many_elements_as_allowed_may_be_one_step_off(check):
    outputs = {"int": np.array([1, 2, 4]), "value": np.array([0.5, 1.0, 2.0]), "scale": np.array(0.5)}
    tolerance = STRICT | {"default": STRICT["default"] | {"int_off_by_one_allowed": 1}}
    check(outputs, tolerance=tolerance)
    with pytest.raises(AssertionError, match="int: 2 of 3"):
        check(outputs | {"int": np.array([1, 3, 4])}, tolerance=tolerance)
    with pytest.raises(AssertionError, match="int: 1 of 3"):
        check(outputs | {"int": np.array([1, 2, 5])}, tolerance=tolerance)


def test_any_element_may_be_as_many_steps_off_as_allowed(check):
    tolerance = STRICT | {"default": STRICT["default"] | {"int_steps": 1}}
    check({"int": np.array([2, 3, 4])}, tolerance=tolerance)
    with pytest.raises(AssertionError, match="int: 1 of 3"):
        check({"int": np.array([3, 3, 4])}, tolerance=tolerance)


def test_facts_are_compared(check):
    check({}, {"type": "Tensor", "more": 1}, facts={"type": "Tensor", "state_dict_keys": ["a"]})
    with pytest.raises(AssertionError, match=r"facts.type: 'Tensor', expected 'IntQuantTensor'"):
        check({}, {"type": "Tensor"}, facts={"type": "IntQuantTensor"})
    with pytest.raises(AssertionError, match=r"facts.signed: not returned, expected True"):
        check({}, {}, facts={"signed": True})


def test_facts_of_steps_are_one_dict_where_they_are_the_same(check):
    steps = {
        "schedule": ["train", "eval"],
        "facts": {"steps": {"is_valid": True}, "counters": [{"c": 1}, {"c": 2}]},
    }
    check({}, {"steps": [{"is_valid": True}] * 2, "counters": [{"c": 1}, {"c": 2}]}, **steps)
    check({}, {"steps": {"is_valid": True}, "counters": [{"c": 1}, {"c": 2}]}, **steps)
    with pytest.raises(AssertionError, match=r"facts.steps\[1\].is_valid: False"):
        check(
            {},
            {"steps": [{"is_valid": True}, {"is_valid": False}], "counters": [{"c": 1}, {"c": 2}]},
            **steps,
        )
    with pytest.raises(AssertionError, match=r"facts.counters: 0 entries, expected 2"):
        check({}, {"steps": {"is_valid": True}}, **steps)


def test_an_expected_error_has_to_come(check):
    def refuse() -> None:
        raise ValueError("different scales")

    error = {"type": "RuntimeError", "message": "Scaling factors are different"}
    check(refuse, expect_error=error)
    with pytest.raises(AssertionError, match="expected RuntimeError: Scaling factors are different"):
        check({}, expect_error=error)


def test_a_kind_without_adapter_fails_even_if_an_error_is_expected(check):
    for error in (None, {"type": "RuntimeError", "message": ""}):
        with pytest.raises(_driver.CannotDrive, match=r"no adapter for cases of kind 'unheard'.*unheard\.py"):
            check({}, kind="unheard", expect_error=error)


def test_patterns_name_ids_areas_quantizers_and_layers():
    case = {
        "id": "layers/25_QuantLinear",
        "area": "layers",
        "layer": {"kind": "QuantLinear"},
        "config": {"kwargs": {"input_quant": "Fp8e4m3OCPActPerTensorFloat"}},
    }
    for pattern in ("layers", "layers/2?_*", "layer/QuantLinear", "quantizer/*Fp8*"):
        assert _driver.matches(case, pattern)
    assert not _driver.matches(case, "layers/3*")
