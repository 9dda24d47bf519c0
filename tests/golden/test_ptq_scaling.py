"""Cases of the reference set of algorithms after training that rescale or rotate channels."""

from typing import Any

import pytest

from tests.golden import _driver
from tests.golden.adapters import ptq_awq, ptq_equalize, ptq_scaling
from tests.golden.test_ptq import PEER, compare, driven

# By how ids begin.
DRIVERS = {
    "brevitas_equalize/": driven(ptq_equalize.equalization_of),
    "llmc_awq/": ptq_awq.compressor,
    "qwix_awq/": ptq_awq.qwix,
    "modelopt/": ptq_awq.optimum,
    "hadamard/": ptq_scaling.matrices,
    "qwix_hadamard/": ptq_scaling.qwix_rotation,
}
CASES = [
    (case, drive)
    for case in _driver.load_cases(PEER)
    for prefix, drive in DRIVERS.items()
    if case["id"].startswith(prefix)
]


@pytest.mark.heavy
@pytest.mark.parametrize(("case", "drive"), CASES, ids=[case["id"] for case, _ in CASES])
def test_case(case: dict[str, Any], drive: Any) -> None:
    inputs = _driver.arrays_of(case, "inputs")
    if case.get("expect_error"):
        with pytest.raises(_driver.USER_ERRORS):
            drive(case, inputs)
        return
    compare(case, drive(case, inputs))
