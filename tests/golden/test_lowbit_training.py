"""Every case of the reference set of training in low bits: codes, scales, products, steps of optimizers."""

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import pytest

from tests.golden import _driver, test_lowbit_nvfp4
from tests.golden.adapters import lowbit_fp8, lowbit_mx

PEER = "lowbit_training"
Drive = Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]

# What drives a case, by the case's feature.
FEATURES: dict[str, Drive] = {
    "ocp_mx": lowbit_mx.mx,
    "fp8_current_gemms": lowbit_fp8.te_current_gemm,
    "fp8_current_scaling": lambda case, inputs: (
        lowbit_fp8.te_jax(case, inputs) if "mode" in case["config"] else lowbit_fp8.te_current(case, inputs)
    ),
    "fp8_delayed_scaling": lowbit_fp8.delayed,
    "mxfp8": lowbit_fp8.te_jax,
    "gemms": lowbit_fp8.te_jax_gemm,
    "float8_dynamic_scaling": lowbit_fp8.torchao_float8,
    "int8_rowwise": lowbit_fp8.torchao_int8,
}
CASES = [case for case in _driver.load_cases(PEER) if case["feature"] in FEATURES]


def test_a_reference_set_was_found() -> None:
    assert CASES, f"no manifest of {PEER} under {_driver.folder()} (JQINJECT_GOLDEN names the folder)"


def test_every_case_of_the_set_is_driven() -> None:
    """By this file, by that of NVFP4, of optimizers or of QuEST; or named in `out_of_scope.toml`."""
    driven = {*FEATURES, *test_lowbit_nvfp4.FEATURES}
    left = [
        case["id"]
        for case in _driver.load_cases(PEER)
        if case["feature"] not in driven
        and not case["id"].startswith(("optim/", "quest/"))
        and _driver.reason_to_skip(case, PEER) is None
    ]
    assert not left


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_case(case: dict[str, Any]) -> None:
    reason = _driver.reason_to_skip({**case, "area": case["feature"]}, PEER)
    if reason is not None:
        pytest.skip(f"out of scope: {reason}")
    compare(case, FEATURES[case["feature"]](case, _driver.arrays_of(case, "inputs")))


def compare(case: dict[str, Any], found: dict[str, Any]) -> None:
    """Every output within its tolerance; a share of the elements may be off by more where a case says so."""
    for name, expected in _driver.arrays_of(case, "outputs").items():
        assert name in found, f"{name}: the adapter returned {sorted(found)}"
        got = np.asarray(found[name])
        assert got.shape == expected.shape, f"{name}: shape {got.shape}, expected {expected.shape}"
        allowed = {**case["tolerance"], **tolerance_of(case, name)}
        if np.issubdtype(expected.dtype, np.integer):
            assert np.issubdtype(got.dtype, np.integer), f"{name}: {got.dtype}, expected integers"
            got, expected = got.astype(np.int64), expected.astype(np.int64)
        atol = allowed["atol"] if "fraction_off" not in allowed else 0
        wrong = ~np.isclose(got, expected, allowed["rtol"], atol, equal_nan=True)
        if "fraction_off" in allowed:
            far = ~np.isclose(got, expected, allowed["rtol"], allowed["atol"], equal_nan=True)
            assert not far.any() and wrong.mean() <= allowed["fraction_off"], f"{name}: {wrong.mean()} off"
            continue
        assert wrong.mean() <= allowed.get("fraction_beyond", 0), (
            f"{name}: {wrong.sum()} of {wrong.size}, {np.argwhere(wrong)[:4]} {got[wrong][:4]} {expected[wrong][:4]}"
        )


def tolerance_of(case: dict[str, Any], name: str) -> dict[str, Any]:
    """What a case allows for an output: by its name, or by the last part of it."""
    for pattern, allowed in (case.get("tolerances") or {}).items():
        if fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[2], pattern):
            return allowed
    return {}
