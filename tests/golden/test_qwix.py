"""Every case of the reference set made with Qwix that is about contractions."""

from typing import Any

import numpy as np
import pytest

from tests.golden import _driver
from tests.golden.adapters import qwix

PEER = "qwix"
CASES = _driver.load_cases(PEER)


def test_a_reference_set_was_found() -> None:
    assert CASES, f"no manifest of {PEER} under {_driver.folder()} (JQINJECT_GOLDEN names the folder)"


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_case(case: dict[str, Any]) -> None:
    reason = _driver.reason_to_skip({**case, "area": case["feature"]}, PEER)
    if reason is not None:
        pytest.skip(f"out of scope: {reason}")
    inputs = _driver.arrays_of(case, "inputs")
    found = qwix.driver(case)(case, inputs)
    allowed = found.get("allowed", {})
    for name, expected in _driver.arrays_of(case, "outputs").items():
        got = np.asarray(found[name]).astype(np.float64)
        reach = np.asarray(allowed.get(name, 0.0)).astype(np.float64)
        nearest = np.clip(expected.astype(np.float64), got - reach, got + reach)
        np.testing.assert_allclose(nearest, expected, **case["tolerance"], err_msg=name)
