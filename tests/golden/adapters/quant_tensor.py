"""Drives the reference cases of IntQuantTensor: what an operation does to its fields."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.dot import contraction_output
from jqinject.quant_tensor import (
    IntQuantTensor,
    adaptive_avg_pool,
    as_array,
    avg_pool,
    concatenate,
    max_pool,
    pad,
    relu,
    repeat,
)
from tests.golden._driver import CannotDrive

# The reference is (batch, channels, height, width), (out, in), (out, in, height, width).
TO_CHANNELS_LAST = (0, 2, 3, 1)
TO_CHANNELS_FIRST = (0, 3, 1, 2)


def _operands(case: dict[str, Any], inputs: dict[str, np.ndarray]) -> list[IntQuantTensor]:
    return [
        IntQuantTensor(
            jnp.asarray(inputs[f"x{i}"]),
            np.asarray(spec["scale"], np.float32),
            np.asarray(spec["zero_point"], np.float32),
            spec["bit_width"],
            spec["signed"],
            spec["training"],
        )
        for i, spec in enumerate(case["config"]["operands"])
    ]


def _channels_last(function: Callable[[Any], Any]) -> Callable[[Any, dict[str, Any]], Any]:
    def run(x: IntQuantTensor, config: dict[str, Any]) -> Any:
        return function(x.transpose(TO_CHANNELS_LAST)).transpose(TO_CHANNELS_FIRST)

    return run


def _avg_pool(x: IntQuantTensor, config: dict[str, Any]) -> Any:
    window = (config["kernel"],) * 2
    return avg_pool(x.transpose(TO_CHANNELS_LAST), window, strides=window).transpose(TO_CHANNELS_FIRST)


def _adaptive_avg_pool(x: IntQuantTensor, config: dict[str, Any]) -> Any:
    pooled = adaptive_avg_pool(x.transpose(TO_CHANNELS_LAST), (config["output"],) * 2)
    return pooled.transpose(TO_CHANNELS_FIRST)


def _linear(x: IntQuantTensor, weight: IntQuantTensor) -> Any:
    kernel = weight.T
    return contraction_output(x.value @ kernel.value, x, kernel, terms=kernel.shape[0])


def _conv2d(x: IntQuantTensor, weight: IntQuantTensor) -> Any:
    x, kernel = x.transpose(TO_CHANNELS_LAST), weight.transpose(2, 3, 1, 0)
    dimensions = ("NHWC", "HWIO", "NHWC")
    value = jax.lax.conv_general_dilated(x.value, kernel.value, (1, 1), "VALID", dimension_numbers=dimensions)
    out = contraction_output(value, x, kernel, terms=int(np.prod(kernel.shape[:3])))
    # The axes of the scale move with those of the value; a zero point of shape (1,) has none to move.
    moved = out.transpose(TO_CHANNELS_FIRST)
    return moved if isinstance(out, jax.Array) else moved.set(zero_point=out.zero_point)


BINARY: dict[str, Callable[[Any, Any], Any]] = {
    r"add_.*": lambda a, b: a + b,
    r"sub_.*": lambda a, b: a - b,
    r"mul_.*": lambda a, b: a * b,
    r"div.*": lambda a, b: a / b,
    r"cat_.*": lambda a, b: concatenate([a, b]),
    r"linear_.*": _linear,
    r"conv2d_.*": _conv2d,
}
UNARY: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    r"neg_.*": lambda x, _: -x,
    r"abs_.*": lambda x, _: abs(x),
    r"add_float_scalar": lambda x, _: x + 0.3,
    r"relu": lambda x, _: relu(x),
    r"max_pool2d": _channels_last(lambda x: max_pool(x, (2, 2), strides=(2, 2))),
    r"avg_pool2d": _avg_pool,
    r"adaptive_avg_pool2d": _adaptive_avg_pool,
    r"upsample_nearest": lambda x, _: repeat(repeat(x, 2, axis=2), 2, axis=3),
    r"pad": lambda x, _: pad(x, ((0, 0), (0, 0), (0, 0), (1, 1))),
    r"reshape": lambda x, _: x.reshape(2, 16),
    r"flatten": lambda x, _: x.reshape(x.shape[0], -1),
    r"transpose.*": lambda x, _: x.T,
    r"permute": lambda x, _: x.transpose(TO_CHANNELS_LAST),
    r"sigmoid_decays": lambda x, _: jax.nn.sigmoid(jnp.asarray(x)),
    r"int_dtype_.*": lambda x, _: x,
    r"invalid": lambda x, _: x,
}


def _result(case: dict[str, Any], inputs: dict[str, np.ndarray]) -> Any:
    name = case["id"].split("/")[-1]
    operands = _operands(case, inputs)
    table = UNARY if len(operands) == 1 else BINARY
    for pattern, function in table.items():
        if re.fullmatch(pattern, name):
            return function(*operands) if len(operands) == 2 else function(operands[0], case["config"])
    raise CannotDrive(f"{case['id']}: no operation of this name with {len(operands)} operands")


def run(case: dict[str, Any], inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The result's value and, for an IntQuantTensor, its metadata; the integers where the case has them."""
    result = _result(case, inputs)
    outputs = {"value": np.asarray(as_array(result))}
    if isinstance(result, IntQuantTensor):
        fields = {"scale": result.scale, "zero_point": result.zero_point, "bit_width": result.bit_width}
        outputs |= {field: np.asarray(array, np.float32) for field, array in fields.items()}
        if "int" in case["outputs"] or case.get("expect_error"):
            outputs["int"] = np.asarray(result.int())
    return outputs


def facts(case: dict[str, Any], inputs: dict[str, np.ndarray]) -> dict[str, Any]:
    """Type, validity, sign, mode and integer dtype of the result."""
    result = _result(case, inputs)
    if not isinstance(result, IntQuantTensor):
        return {"type": "Tensor"}
    found = {
        "type": "IntQuantTensor",
        "is_valid": result.is_valid,
        "signed": result.signed,
        "training": result.training,
    }
    return found | ({"int_dtype": result.int().dtype.name} if result.is_valid else {})
