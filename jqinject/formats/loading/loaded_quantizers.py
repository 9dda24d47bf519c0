"""The quantizers of a loaded layer: its weight's, which gives way to the stored numbers, and its input's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jqinject.core.memory.memory import Memory
from jqinject.core.scaling.of_memory import ConstScaling
from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.stored_matrix import InputFormat
from jqinject.quant import (
    Fp8e4m3OCPActPerTensorFloat,
    Fp8e4m3OCPDynamicActPerGroupFloat,
    Fp8e4m3OCPDynamicActPerRowFloat,
    Fp8e4m3OCPDynamicActPerTensorFloat,
    Int8ActPerTensorFloat,
    Int8DynamicActPerGroupFloat,
    Int8DynamicActPerRowAbsMax,
    Int8DynamicActPerTensorAbsMax,
    NVFP4Act,
    ShiftedUint8ActPerTensorFloat,
    ShiftedUint8DynamicActPerRowFloat,
    ShiftedUint8DynamicActPerTensorFloat,
)
from jqinject.quant.minifloat.blocks import Fp8e4m3Scales
from jqinject.quant_tensor import on_integers, on_minifloats

LARGEST = 448.0
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BELOW_ZERO = 128  # a signed zero point, counted from the lowest integer


def input_quantizer(given: InputFormat | None, name: str) -> Any:
    """The injector of a layer's input; None for float inputs.

    Args:
        given: what the checkpoint says.
        name: of the matrix, for errors.

    Raises:
        CheckpointError: there is no such quantizer.
    """
    if given is None:
        return None
    made = _dynamic(given) if given.dynamic else _static(given)
    if made is None:
        raise CheckpointError(f"{name}: there is no quantizer for its input, {given}")
    return made


def _dynamic(given: InputFormat) -> Any:
    if given.kind == "float" and given.bits == 4:
        return NVFP4Act if given.global_scale is None else _nvfp4(float(given.global_scale[0]))
    if given.bits != 8:
        return None
    if given.strategy == "group":
        size = given.group_size
        base = {"int": Int8DynamicActPerGroupFloat, "float": Fp8e4m3OCPDynamicActPerGroupFloat}[given.kind]
        return base.let(group_size=size) if given.symmetric else None
    if given.kind == "float":
        return {"token": Fp8e4m3OCPDynamicActPerRowFloat, "tensor": Fp8e4m3OCPDynamicActPerTensorFloat}.get(
            given.strategy
        )
    symmetric = {"token": Int8DynamicActPerRowAbsMax, "tensor": Int8DynamicActPerTensorAbsMax}
    shifted = {"token": ShiftedUint8DynamicActPerRowFloat, "tensor": ShiftedUint8DynamicActPerTensorFloat}
    return (symmetric if given.symmetric else shifted).get(given.strategy)


def _static(given: InputFormat) -> Any:
    if given.scale is None or given.bits != 8 or given.strategy != "tensor":
        return None
    largest, distance = _range(given)
    if distance is not None:
        return ShiftedUint8ActPerTensorFloat.let(
            signed=not given.unsigned, collected_range=largest, collected_zero_point=distance
        )
    base = {"int": Int8ActPerTensorFloat, "float": Fp8e4m3OCPActPerTensorFloat}[given.kind]
    return base.let(collected_range=largest)


def _range(given: InputFormat) -> tuple[float, float | None]:
    """The range of a static input as its quantizer collects it; and how far below 0 it begins, with a zero point."""
    assert given.scale is not None, "static"
    scale = np.float32(given.scale[0])
    if given.kind == "float":
        return _times(scale, LARGEST), None
    if given.zero_point is None:
        return _times(scale, BELOW_ZERO), None
    steps = 2 * BELOW_ZERO - 1 if given.unsigned else BELOW_ZERO
    return _times(scale, steps), (float(given.zero_point[0]) + BELOW_ZERO) * float(scale)


def _times(scale: np.float32, steps: float) -> float:
    """Return the float32 range whose quotient by `steps` is the scale to the bit; the nearest one if there is none."""
    product = scale * np.float32(steps)
    nearby = (product, *(np.nextafter(product, np.float32(end)) for end in (0, np.inf)))
    return float(next((x for x in nearby if x / np.float32(steps) == scale), product))


def put_ranges(proxy: Any, given: Sequence[InputFormat], depth: tuple[int, ...]) -> None:
    """Give each layer of a stack the static range of its own input.

    Args:
        proxy: of the input, whose Variables have the axes of the stack in front.
        given: static formats, one for each layer.
        depth: sizes of the stack.
    """
    ranges, distances = zip(*map(_range, given), strict=True)
    parts = (
        (vars(proxy.tensor_quant).get("scaling_impl"), ranges),
        (vars(proxy.tensor_quant).get("zero_point_impl"), distances),
    )
    for part, numbers in parts:
        if isinstance(part, Memory) and part.kind == "collected" and None not in numbers:
            assert part.value is not None
            held = part.value.get_value()
            each = np.asarray(numbers, np.float32).reshape((*depth, *(1,) * (held.ndim - len(depth))))
            part.commit(jnp.broadcast_to(jnp.asarray(each), held.shape))


def static_format(proxy: Any) -> InputFormat | None:
    """A static range with one scale, of 8 bits, as a file says it; None for any others.

    Args:
        proxy: of activations, whose scale does not depend on them.
    """
    known = proxy.sample()
    if np.size(known.scale) != 1 or np.size(known.zero_point) > 1:
        return None
    scale = np.asarray(known.scale, np.float32).reshape(1)
    zero = np.asarray(known.zero_point, np.float32).reshape(-1)
    if on_minifloats(known):
        is_e4m3 = np.dtype(known.q_dtype) == E4M3
        return InputFormat("float", 8, dynamic=False, scale=scale) if is_e4m3 else None
    if not on_integers(known) or int(known.bit_width) != 8:
        return None
    if not known.signed:
        zero = zero - BELOW_ZERO
    if np.any(zero != np.round(zero)):
        return None
    if known.signed and not proxy.has_zero_point:
        return InputFormat("int", 8, dynamic=False, scale=scale)
    return InputFormat(
        "int", 8, False, dynamic=False, scale=scale, zero_point=zero, unsigned=not known.signed
    )


def _nvfp4(whole: float) -> Any:
    """Inputs whose scales of groups have a given factor, `1 / whole`."""
    scales = Fp8e4m3Scales.let(scaling_impl=ConstScaling, scaling_init=LARGEST / whole)
    return NVFP4Act.let(scale_quant=scales)
