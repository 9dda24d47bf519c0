"""Every case of the reference set of algorithms after training that solvers are for: codes, scales, statistics."""

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import pytest

from tests.golden import _driver
from tests.golden.adapters import (
    ptq_autoround,
    ptq_corrections,
    ptq_layerwise,
    ptq_matrices,
    ptq_smooth,
)

PEER = "ptq"
Drive = Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]


def driven(read: Callable[[dict[str, Any]], Callable[[dict[str, Any]], dict[str, Any]]]) -> Drive:
    """What drives a case, from what reads its config."""
    return lambda case, inputs: read(case["config"])(inputs)


GROUPS: dict[str, Drive] = {
    "brevitas_gptq": ptq_layerwise.run,
    "brevitas_gpfq": ptq_layerwise.run,
    "brevitas_qronos": ptq_layerwise.run,
    "brevitas_magr": ptq_matrices.magr,
    "brevitas_corrections": driven(ptq_corrections.correction_of),
    "llmc_smoothquant": driven(ptq_smooth.compressor_smooth_of),
    "qwix_smoothquant": driven(ptq_smooth.qwix_smooth_of),
    "llmc_gptq": ptq_matrices.compressor,
    "qwix_gptq": ptq_matrices.qwix_gptq,
    "qwix_qep": ptq_matrices.qep,
    "autoround": ptq_autoround.run,
    "bit_allocation": ptq_matrices.allocation,
}
# What a descent ends with: compared by its loss.
FINAL = ("best_value", "quant", "scale", "zero_point")
CASES = [case for case in _driver.load_cases(PEER) if case["id"].split("/")[0] in GROUPS]


def test_a_reference_set_was_found() -> None:
    assert CASES, f"no manifest of {PEER} under {_driver.folder()} (JQINJECT_GOLDEN names the folder)"


@pytest.mark.heavy
@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_case(case: dict[str, Any]) -> None:
    reason = _driver.reason_to_skip({**case, "area": case["feature"]}, PEER)
    if reason is not None:
        pytest.skip(f"out of scope: {reason}")
    drive = GROUPS[case["id"].split("/")[0]]
    inputs = _driver.arrays_of(case, "inputs")
    if case.get("expect_error"):
        with pytest.raises(_driver.USER_ERRORS):
            drive(case, inputs)
        return
    compare(case, drive(case, inputs))


def compare(case: dict[str, Any], found: dict[str, Any]) -> None:
    reached = (case.get("tolerances") or {}).get("final")
    if reached is not None:
        assert found["best_loss"] <= case["json_outputs"]["best_loss"] * (1 + reached["loss_rtol"])
    for name, expected in _driver.arrays_of(case, "outputs").items():
        if reached is not None and name in FINAL:
            continue
        assert name in found, f"{name}: the adapter returned {sorted(found)}"
        got = np.asarray(found[name])
        assert got.shape == expected.shape, f"{name}: shape {got.shape}, expected {expected.shape}"
        allowed = tolerance_of(case, name)
        if "off_by_one_elements" in allowed:
            steps = np.abs(got.astype(np.int64) - expected.astype(np.int64))
            assert steps.max() <= 1 and steps.sum() <= allowed["off_by_one_elements"], (
                f"{name}: {steps.sum()}"
            )
        else:
            limits = {**case["tolerance"], **{k: v for k, v in allowed.items() if k in ("rtol", "atol")}}
            wrong = ~np.isclose(got, expected, limits["rtol"], limits["atol"])
            may_differ = allowed.get("elements_may_differ", 0)
            assert wrong.sum() <= may_differ, (
                f"{name}: {np.argwhere(wrong)[:4]} {got[wrong][:4]} {expected[wrong][:4]}"
            )


def tolerance_of(case: dict[str, Any], name: str) -> dict[str, Any]:
    """What a case allows for an output: by its name, or by the last part of it."""
    tolerances = case.get("tolerances") or {}
    for pattern, allowed in tolerances.items():
        if fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[2], pattern):
            return allowed
    return {}
