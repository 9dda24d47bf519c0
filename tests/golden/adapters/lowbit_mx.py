"""Drives the microscaling formats: torchao's `to_mx`, by users' quantizers of activations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core import FloatSaturate
from jqinject.nn import QuantIdentity
from jqinject.quant import (
    MXFloat4e2m1Act,
    MXFloat6e2m3Act,
    MXFloat6e3m2Act,
    MXFloat8e4m3Act,
    MXFloat8e5m2Act,
)
from tests.golden._config import reading

Arrays = dict[str, np.ndarray]
ELEMENTS = {
    "e4m3": MXFloat8e4m3Act,
    "e5m2": MXFloat8e5m2Act,
    "fp6_e2m3": MXFloat6e2m3Act,
    "fp6_e3m2": MXFloat6e3m2Act,
    "fp4": MXFloat4e2m1Act,
}
ROUNDINGS = {name: name.lower() for name in ("FLOOR", "CEIL", "EVEN", "RCEIL")}
DATA = ("grid", "huge", "normal", "outlier", "rows", "special", "tiny", "zero_block", "zeros")
DTYPES = {name: getattr(jnp, name) for name in ("float32", "bfloat16", "float16")}


def quantized(quantizer: Any, x: np.ndarray, dtype: Any) -> Any:
    """The QuantTensor that a quantizer of activations makes."""
    act = QuantIdentity(act_quant=quantizer, return_quant_tensor=True)
    return jax.jit(lambda x: act(x))(jnp.asarray(x, dtype))


def bits_of(tensor: Any) -> np.ndarray:
    """The codes of minifloats, one a byte; those of -0 have a sign."""
    payload = np.asarray(tensor.payload())
    if payload.dtype != np.uint8:
        return payload.view(np.uint8) & np.uint8(2 ** jnp.finfo(payload.dtype).bits - 1)
    negative = np.signbit(np.asarray(tensor.value, np.float32)) & (payload == 0)
    return np.where(negative, np.uint8(1 << (tensor.format.bit_width - 1)), payload)


def exponents_of(scale: Any) -> np.ndarray:
    """Powers of two as the bytes of e8m0."""
    return np.asarray(jnp.asarray(scale).astype(jnp.float8_e8m0fnu)).view(np.uint8)


def mx_of(config: dict[str, Any]) -> tuple[Any, Any]:
    """The quantizer of a case, and the dtype of its input."""
    with reading(config, "mx") as given:
        given.choose("data", dict.fromkeys(DATA))
        dtype = given.choose("input_dtype", DTYPES)
        quantizer = given.choose("element", ELEMENTS)
        rounding = given.choose("scale_mode", ROUNDINGS)
        size = given.take("block")

    class Quantizer(quantizer):
        group_size = size
        scale_rounding = rounding
        float_clamp_impl = FloatSaturate
        straight_through = True

    return Quantizer, dtype


def mx(case: dict[str, Any], inputs: Arrays) -> dict[str, Any]:
    """Codes, exponents and numbers."""
    tensor = quantized(*_with(mx_of(case["config"]), inputs["x"]))
    return {
        "codes": bits_of(tensor),
        "dequantized": np.asarray(tensor.value, np.float32),
        "scale_e8m0": exponents_of(tensor.scale_[..., 0]),
    }


def _with(read: tuple[Any, Any], x: np.ndarray) -> tuple[Any, np.ndarray, Any]:
    return read[0], x, read[1]
