"""Every case of NVFP4 in the reference set of training in low bits."""

from typing import Any

import numpy as np
import pytest

from tests.golden import _driver
from tests.golden.adapters import lowbit_nvfp4

PEER = "lowbit_training"
FEATURES = {
    "nvfp4_quantize": lowbit_nvfp4.te_nvfp4_of,
    "mxfp4_pow2": lowbit_nvfp4.te_nvfp4_of,
    "nvfp4_gemms": lowbit_nvfp4.gemm_of,
    "rht": lowbit_nvfp4.rotation_of,
    "nvfp4": lowbit_nvfp4.te_jax_of,
    "nvfp4_stochastic_rounding": lowbit_nvfp4.stochastic_of,
    "torchao_nvfp4": lowbit_nvfp4.torchao_of,
}
CASES = [case for case in _driver.load_cases(PEER) if case["feature"] in FEATURES]


GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def corrected(case: dict[str, Any], outputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The reference's outputs; the neighbours of a number between 1 and 2 with 1.5 among them, which the peer omits."""
    if case["feature"] != "nvfp4_stochastic_rounding":
        return outputs
    unit = outputs["unit"]
    steps = np.abs(_driver.arrays_of(case, "inputs")["x"].astype(np.float64) / unit)
    at = np.clip(np.searchsorted(GRID, steps, side="right") - 1, 0, 6)
    near, far = GRID[at] * unit, GRID[at + 1] * unit
    below_zero = outputs["low"] < 0
    passes_over = (np.round(np.abs(outputs["low"] + outputs["high"]) / unit, 3) == 3) & (steps < 2)
    low, high = (np.where(below_zero, -a, b) for a, b in ((far, near), (near, far)))
    return outputs | {
        "low": np.where(passes_over, low, outputs["low"]),
        "high": np.where(passes_over, high, outputs["high"]),
    }


def test_a_reference_set_was_found() -> None:
    assert CASES, f"no manifest of {PEER} under {_driver.folder()} (JQINJECT_GOLDEN names the folder)"


@pytest.mark.heavy
@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_case(case: dict[str, Any]) -> None:
    found = FEATURES[case["feature"]](case["config"])(_driver.arrays_of(case, "inputs"))
    for name, expected in corrected(case, _driver.arrays_of(case, "outputs")).items():
        bound = (case.get("tolerances") or {}).get(name, case["tolerance"])
        assert name in found, f"{name}: not returned; the adapter returned {sorted(found)}"
        np.testing.assert_allclose(
            np.asarray(found[name], np.float64),
            expected,
            rtol=bound["rtol"],
            atol=bound["atol"],
            err_msg=name,
        )
