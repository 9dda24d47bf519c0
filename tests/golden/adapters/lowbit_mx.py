"""Drives the microscaling formats: torchao's `to_mx`, by users' quantizers of activations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

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


def quantized(quantizer: Any, x: np.ndarray, dtype: Any) -> tuple[Any, np.ndarray]:
    """The QuantTensor that a quantizer of activations makes in a compiled program, and its payload."""
    act = QuantIdentity(act_quant=quantizer, return_quant_tensor=True)

    @nnx.jit
    def made(act: QuantIdentity, x: jax.Array) -> tuple[Any, jax.Array]:
        tensor = act(x)
        return tensor, tensor.payload()

    tensor, payload = made(act, jnp.asarray(x, dtype))
    return tensor, np.asarray(payload)


# The codes that torch has for a nan: canonical ones of 8 bits, and what its conversion to fewer bits leaves.
NAN = {
    "float8_e4m3fn": 0x7F,
    "float8_e5m2": 0x7F,
    "float6_e2m3fn": 12,
    "float6_e3m2fn": 14,
    "float4_e2m1fn": 3,
}
# What its division in bfloat16 makes of a nan in a block whose scale is another number.
NAN_OF_BFLOAT16 = {
    "float8_e4m3fn": 0xFF,
    "float8_e5m2": 0xFF,
    "float6_e2m3fn": 48,
    "float6_e3m2fn": 48,
    "float4_e2m1fn": 12,
}


def bits_of(tensor: Any, payload: np.ndarray, x: np.ndarray | None = None, whole: bool = False) -> np.ndarray:
    """The codes of minifloats, one a byte, as torch has them: those of -0 have a sign, and there is one for nan.

    Args:
        tensor: the minifloats.
        payload: theirs.
        x: what they were made of; None if nothing of it is nan.
        whole: whether all numbers of a block with a nan are nan.
    """
    value = np.asarray(tensor.value, np.float32)
    lost = np.zeros(value.shape, bool) if x is None else np.isnan(value if whole else x)
    if payload.dtype != np.uint8:
        bits = payload.view(np.uint8) & np.uint8(2 ** jnp.finfo(payload.dtype).bits - 1)
        lost |= np.isnan(payload.astype(np.float32))
    else:
        negative = np.signbit(value if x is None else x) & (payload == 0)
        bits = np.where(negative, np.uint8(1 << (tensor.format.bit_width - 1)), payload)
    of_nan = NAN_OF_BFLOAT16 if tensor.value.dtype == jnp.bfloat16 and not whole else NAN
    return np.where(lost, np.uint8(of_nan[str(tensor.format)]), bits)


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
    quantizer, dtype = mx_of(case["config"])
    tensor, payload = quantized(quantizer, inputs["x"], dtype)
    return {
        "codes": bits_of(tensor, payload, inputs["x"], case["config"]["scale_mode"] == "RCEIL"),
        "dequantized": np.asarray(tensor.value, np.float32),
        "scale_e8m0": exponents_of(tensor.scale_[..., 0]),
    }
