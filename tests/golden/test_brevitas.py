"""Every case of the Brevitas reference set, one test each; out_of_scope.toml names what is not run."""

from typing import Any

import pytest

from tests.golden import _driver

PEER = "brevitas"
CASES = _driver.load_cases(PEER)


def test_a_reference_set_was_found() -> None:
    assert CASES, f"no manifest of {PEER!r} under {_driver.folder()} (JQINJECT_GOLDEN names the folder)"


# Cases ask what evaluation does before any data, and what Brevitas does without a warning.
@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore::jqinject.UncalibratedWarning")
@pytest.mark.filterwarnings("ignore::jqinject.quant_tensor.DifferentScalesWarning")
@pytest.mark.filterwarnings("ignore::jqinject.core.ZeroWeightsWarning")
@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_case(case: dict[str, Any]) -> None:
    reason = _driver.reason_to_skip(case, PEER)
    if reason is not None:
        pytest.skip(f"out of scope: {reason}")
    _driver.check(case)


@pytest.mark.skipif(_driver.folder() != _driver.HERE, reason="another reference set need not use every line")
@pytest.mark.parametrize("pattern", _driver.out_of_scope(PEER))
def test_every_line_of_out_of_scope_is_used(pattern: str) -> None:
    used = [case["id"] for case in CASES if _driver.matches(case, pattern)]
    assert used, f"{pattern!r} in out_of_scope.toml names no case: remove the line or correct the pattern"
