"""Every case of optimizers with low-bit states: parameters, codes and scales, tables, and stochastic rounding."""

from typing import Any

import numpy as np
import pytest

from tests.golden import _driver
from tests.golden._config import CannotDrive
from tests.golden.adapters import lowbit_optim

CASES = [case for case in _driver.load_cases("lowbit_training") if case["id"].startswith("optim/")]
CODES = ("codes", "state1", "state2")
BITSANDBYTES_LEAST = 20
"""The search of the peer on CPU is wrong among the smallest unsigned numbers: it stores 7 for all that are smaller."""


def test_a_reference_set_was_found() -> None:
    assert CASES, f"no manifest under {_driver.folder()} (JQINJECT_GOLDEN names the folder)"


@pytest.mark.heavy
@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_case(case: dict[str, Any]) -> None:
    inputs, expected = (_driver.arrays_of(case, side) for side in ("inputs", "outputs"))
    found = lowbit_optim.optimizer_of(case["config"])(inputs)
    for name, value in expected.items():
        assert name in found, f"{name}: the adapter returned {sorted(found)}"
        got = np.asarray(found[name])
        assert got.shape == value.shape, f"{name}: shape {got.shape}, expected {value.shape}"
        check(case, name, got, value)


def check(case: dict[str, Any], name: str, got: np.ndarray, value: np.ndarray) -> None:
    limits = {**case["tolerance"], **(case.get("tolerances") or {}).get(name, {})}
    last = name.rpartition(".")[2]
    if last in CODES and value.dtype == np.uint8:
        share = case["tolerances"]["codes"]["fraction_off"]
        compared = value.astype(int) > (BITSANDBYTES_LEAST if last == "state2" else -1)
        assert (got != value)[compared].mean() <= share, f"{name}: {(got != value).mean()}"
        return
    wrong = ~np.isclose(got, value, limits["rtol"], limits["atol"])
    if name == "dequantized":  # follows the codes, of which a share may be off
        limits["fraction_beyond"] = case["tolerances"]["codes"]["fraction_off"]
    assert wrong.mean() <= limits.get("fraction_beyond", 0), f"{name}: {got[wrong][:4]} {value[wrong][:4]}"


@pytest.mark.parametrize(
    "config",
    [
        {"optimizer": "torchao.optim.Adam", "steps": 4, "middle_step": 3},
        {"optimizer": "torchao.optim.Adam8bit", "steps": 4, "middle_step": 3, "options": {"amsgrad": True}},
        {"draws": 8, "runs": 4},
    ],
)
def test_a_config_without_a_meaning_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(CannotDrive):
        lowbit_optim.optimizer_of(config)
