"""Drives the reference cases of IntQuantTensor: what an operation does to its fields."""

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
from tests.golden._config import CannotDrive, reading
from tests.golden.adapters.layouts import once

# The reference is (batch, channels, height, width), (out, in), (out, in, height, width).
TO_CHANNELS_LAST = (0, 2, 3, 1)
TO_CHANNELS_FIRST = (0, 3, 1, 2)


def _operand(x: Any, stated: dict[str, Any]) -> IntQuantTensor:
    with reading(stated, "an operand") as given:
        return IntQuantTensor(
            jnp.asarray(x),
            np.asarray(given.take("scale"), np.float32),
            np.asarray(given.take("zero_point"), np.float32),
            given.take("bit_width"),
            given.take("signed"),
            given.take("training"),
        )


def _channels_last(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: function(x.transpose(TO_CHANNELS_LAST)).transpose(TO_CHANNELS_FIRST)


def _max_pool() -> Callable[[Any], Any]:
    return _channels_last(lambda x: max_pool(x, (2, 2), strides=(2, 2)))


def _avg_pool(kernel: int) -> Callable[[Any], Any]:
    return _channels_last(lambda x: avg_pool(x, (kernel, kernel), strides=(kernel, kernel)))


def _adaptive_avg_pool(output: int) -> Callable[[Any], Any]:
    return _channels_last(lambda x: adaptive_avg_pool(x, (output, output)))


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


def _op(function: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
    return lambda: function


# Leading words of an id -> the number of operands, what reads the numbers named, and their names.
OPS: dict[str, tuple[int, Callable[..., Callable[..., Any]], tuple[str, ...]]] = {
    "add": (2, _op(lambda a, b: a + b), ()),
    "sub": (2, _op(lambda a, b: a - b), ()),
    "mul": (2, _op(lambda a, b: a * b), ()),
    "div": (2, _op(lambda a, b: a / b), ()),
    "cat": (2, _op(lambda a, b: concatenate([a, b])), ()),
    "linear": (2, _op(_linear), ()),
    "conv2d": (2, _op(_conv2d), ()),
    "neg": (1, _op(lambda x: -x), ()),
    "abs": (1, _op(abs), ()),
    "add_float_scalar": (1, _op(lambda x: x + 0.3), ()),
    "relu": (1, _op(relu), ()),
    "max_pool2d": (1, _max_pool, ()),
    "avg_pool2d": (1, _avg_pool, ("kernel",)),
    "adaptive_avg_pool2d": (1, _adaptive_avg_pool, ("output",)),
    "upsample_nearest": (1, _op(lambda x: repeat(repeat(x, 2, axis=2), 2, axis=3)), ()),
    "pad": (1, _op(lambda x: pad(x, ((0, 0), (0, 0), (0, 0), (1, 1)))), ()),
    "reshape": (1, _op(lambda x: x.reshape(2, 16)), ()),
    "flatten": (1, _op(lambda x: x.reshape(x.shape[0], -1)), ()),
    "transpose": (1, _op(lambda x: x.T), ()),
    "permute": (1, _op(lambda x: x.transpose(TO_CHANNELS_LAST)), ()),
    "sigmoid_decays": (1, _op(lambda x: jax.nn.sigmoid(jnp.asarray(x))), ()),
    "int_dtype": (1, _op(lambda x: x), ()),
    "invalid": (1, _op(lambda x: x), ()),
}


def _leading_op(case: dict[str, Any]) -> str:
    """The operation, which the reference set states in the id alone: `add_8s_4u`, `max_pool2d`."""
    words = case["id"].split("/")[-1].split("_")
    for count in range(len(words), 0, -1):
        if "_".join(words[:count]) in OPS:
            return "_".join(words[:count])
    raise CannotDrive(f"{case['id']}: begins with no operation; known are {sorted(OPS)}")


def build(case: dict[str, Any], inputs: dict[str, np.ndarray]) -> Callable[[], Any]:
    """What computes the result of a case."""
    op = _leading_op(case)
    count, make, numbers = OPS[op]
    with reading(case["config"], op) as config:
        stated = config.take("operands")
        function = make(*(config.take(name) for name in numbers))
        config.take("note", None)
    if len(stated) != count:
        raise CannotDrive(f"{case['id']}: {op} takes {count} operands, got {len(stated)}")
    with reading(inputs, op) as arrays:
        operands = [_operand(arrays.take(f"x{i}"), spec) for i, spec in enumerate(stated)]
    return lambda: function(*operands)


@once
def _result(case: dict[str, Any], inputs: dict[str, np.ndarray]) -> Any:
    return build(case, inputs)()


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
