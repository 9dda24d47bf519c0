"""Cases of the reference set of algorithms after training that rescale or rotate channels."""

from typing import Any

import pytest

from tests.golden import _driver
from tests.golden.adapters import ptq_awq, ptq_scaling
from tests.golden.test_ptq import PEER, compare

# By how ids begin. What is not here, no pass does yet: scales kept beside a quantizer, biases that count as weights.
DRIVERS = {
    "llmc_smoothquant/0": ptq_scaling.compressor_smooth,
    "llmc_smoothquant/1": ptq_scaling.compressor_smooth,
    "llmc_awq/": ptq_awq.compressor,
    "qwix_awq/": ptq_awq.qwix,
    "qwix_smoothquant/": ptq_scaling.qwix_smooth,
    "modelopt/": ptq_awq.optimum,
    "brevitas_equalize/cross_layer_2": ptq_scaling.cross_layer,
    "hadamard/": ptq_scaling.matrices,
}
CASES = [
    (case, drive)
    for case in _driver.load_cases(PEER)
    for prefix, drive in DRIVERS.items()
    if case["id"].startswith(prefix)
]


@pytest.mark.parametrize(("case", "drive"), CASES, ids=[case["id"] for case, _ in CASES])
def test_case(case: dict[str, Any], drive: Any) -> None:
    inputs = _driver.arrays_of(case, "inputs")
    if case.get("expect_error"):
        with pytest.raises(_driver.USER_ERRORS):
            drive(case, inputs)
        return
    compare(case, drive(case, inputs))
