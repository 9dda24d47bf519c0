"""Every case of the reference set made with Qwix: contractions, arrays, rules for whole models, ODML."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from tests.golden import _driver
from tests.golden.adapters import qwix, qwix_arrays, qwix_errors, qwix_odml, qwix_rules

PEER = "qwix"
CASES = _driver.load_cases(PEER)
Drive = Callable[[dict[str, Any], dict[str, Any]], Iterator[dict[str, Any]]]


def drive(case: dict[str, Any], inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What a case gives: once, or for every way in which values that lie on a tie may be rounded."""
    group = case["id"].split("/")[0]
    if group == "nnx_qat":
        yield from qwix_rules.training(case, inputs)
    elif group == "ptq":
        yield from qwix_rules.post_training(case, inputs)
    elif group in ("odml_qat", "odml_conv", "odml_nnx"):
        yield from qwix_odml.driven(case, inputs)
    elif group == "qarray":
        yield qwix_arrays.driver(case)(case, inputs)
    elif group == "odml_errors":
        yield qwix_errors.run(case)
    else:
        yield qwix.driver(case)(case, inputs)


def test_a_reference_set_was_found() -> None:
    assert CASES, f"no manifest of {PEER} under {_driver.folder()} (JQINJECT_GOLDEN names the folder)"


@pytest.mark.heavy
@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_case(case: dict[str, Any]) -> None:
    reason = _driver.reason_to_skip({**case, "area": case["feature"]}, PEER)
    if reason is not None:
        pytest.skip(f"out of scope: {reason}")
    inputs = _driver.arrays_of(case, "inputs")
    # Linen's average pooling divides a float by an integer.
    promotion = "standard" if case["config"].get("model") == "LCnn" else "strict"
    with jax.numpy_dtype_promotion(promotion):
        _check(case, inputs)


def _check(case: dict[str, Any], inputs: dict[str, Any]) -> None:
    if case.get("expect_error"):
        with pytest.raises(_driver.USER_ERRORS):
            next(drive(case, inputs))
        return
    first: AssertionError | None = None
    for found in drive(case, inputs):
        try:
            _compare(case, found)
            return
        except AssertionError as error:
            first = first or error
    assert first is None, first


def _compare(case: dict[str, Any], found: dict[str, Any]) -> None:
    allowed = found.get("allowed", {})
    for name, expected in _driver.arrays_of(case, "outputs").items():
        got = np.asarray(found[name]).astype(np.float64)
        assert got.shape == expected.shape, f"{name}: shape {got.shape}, expected {expected.shape}"
        reach = np.asarray(allowed.get(name, 0.0)).astype(np.float64)
        nearest = np.clip(expected.astype(np.float64), got - reach, got + reach)
        np.testing.assert_allclose(nearest, expected, **case["tolerance"], err_msg=name)
    if "composites" in case.get("json_outputs", {}):
        _compare_markers(found["composites"], case["json_outputs"]["composites"])


def _compare_markers(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected)
    for got, wanted in zip(found, expected, strict=True):
        assert (got["name"], got["result_shape"]) == (wanted["name"], wanted["result_shape"])
        attributes = {name: entry["value"] for name, entry in wanted["attributes"].items()}
        assert got["attributes"].keys() == attributes.keys()
        for name, value in attributes.items():
            if isinstance(value, str):
                assert got["attributes"][name] == value
            else:
                np.testing.assert_allclose(got["attributes"][name], value, rtol=1e-5, err_msg=name)
