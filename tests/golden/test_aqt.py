"""Every case of the reference set made with AQT v2: quantizers, contractions with gradients, freezing."""

import json
from typing import Any

import numpy as np
import pytest

from tests.golden import _driver
from tests.golden.adapters import aqt

PEER = "aqt"
CASES = _driver.load_cases(PEER)


def test_a_reference_set_was_found() -> None:
    assert CASES, f"no manifest of {PEER} under {_driver.folder()} (JQINJECT_GOLDEN names the folder)"


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_case(case: dict[str, Any]) -> None:
    labelled = {**case, "area": case["feature"]}
    reason = _driver.reason_to_skip(labelled, PEER)
    if reason is not None:
        pytest.skip(f"out of scope: {reason}")
    inputs = _driver.arrays_of(case, "inputs")
    run = aqt.driver(case)
    if case.get("expect_error"):
        with pytest.raises(_driver.USER_ERRORS):
            run(case, inputs)
        return
    actual = run(case, inputs)
    for name, expected in _driver.arrays_of(case, "outputs").items():
        assert name in actual, f"{name} was not returned, but {sorted(actual)}"
        got = np.asarray(actual[name]).astype(expected.dtype)
        np.testing.assert_allclose(got, expected, **case["tolerance"], err_msg=name)
    for name, expected in (case.get("json_outputs") or {}).items():
        assert json.loads(json.dumps(actual[name], default=str)) == expected, name
