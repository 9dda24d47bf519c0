"""Quantizers of a range, for tests."""

from typing import Any

from jqinject.quant.fragments import InRange


def in_range(calibration_impl: Any = None, averaging_impl: Any = None, **names: Any) -> Any:
    """The quantizer that ready-made ones declare, with a range of its own and other names redeclared."""
    if calibration_impl is not None:
        names["calibration_impl"] = calibration_impl
    return InRange.let(averaging_impl=averaging_impl, **names).tensor_quant
