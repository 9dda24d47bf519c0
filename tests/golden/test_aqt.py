"""Every case of the reference set made with AQT v2: quantizers, contractions with gradients, freezing."""

import json
from typing import Any

import numpy as np
import pytest

from tests.golden import _driver
from tests.golden.adapters import aqt, aqt_config

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


def test_a_constant_bound_is_served_with_a_scale_for_each_channel() -> None:
    scale = "aqt/d/AqtDotGeneral_0/qrhs/frozen/scale/0"
    random = np.random.default_rng(0)
    shapes = {"params/d/kernel": (8, 5), "params/d/bias": (5,), "x": (4, 8), "x2": (4, 8)}
    inputs = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    case = {
        "id": "flax/static",
        "config": {"config": "v4-static", "kind": "dense", "use_legacy_freezer": False},
        "outputs": {scale: {"shape": [1, 5]}},
        "json_outputs": {"frozen": {scale: None}},
    }
    actual = aqt.driver(case)(case, inputs)
    np.testing.assert_allclose(actual[scale], np.full((1, 5), 1 / 127.5), rtol=1e-6)
    assert actual["serve_equals_train"]


def test_pieces_are_told_by_the_fields_that_a_case_asks_for() -> None:
    pieces = {
        "contraction_axis_shard_count": 2,
        "contraction_axis_shard_size": None,
        "tile_largest_shape": False,
    }
    short = {name.removeprefix("contraction_axis_"): str(value) for name, value in pieces.items()}
    for asked in (pieces, short, {"shard_count": 2}):
        case = {
            "config": {"factory": "v4-local"},
            "json_outputs": {
                "fwd": {"local_aqt": None},
                "dlhs": {"local_aqt": None},
                "drhs": {"local_aqt": asked},
            },
        }
        assert aqt_config.config(case, {})["drhs"]["local_aqt"] == asked
    case["json_outputs"]["drhs"]["local_aqt"] = {"tile_count": 2}
    with pytest.raises(_driver.CannotDrive, match="'tile_count' is no field of LocalAqt"):
        aqt_config.config(case, {})
