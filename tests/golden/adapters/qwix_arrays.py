"""Drives Qwix's quantization of arrays: ranges, scales, integers, and the average of ranges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core import (
    AbsMaxRange,
    CalibratedQuant,
    CeilSte,
    ClippingRange,
    CodebookQuant,
    FixedRange,
    MinMaxRange,
    PowerOfTwoRestrictValue,
    QuantRestrictValue,
    RMSRange,
    SimpleMovingAverage,
)
from jqinject.nn import QuantIdentity
from jqinject.ops import NF4
from jqinject.quant import Fp8e4m3OCPAct, MXFloat8e4m3Act
from jqinject.quant_tensor import FloatQuantTensor, GroupwiseIntQuantTensor, IntQuantTensor

Case = dict[str, Any]
Arrays = dict[str, np.ndarray]
EDGE = 1e-4  # in steps: as close as this to a tie either neighbour is right


def driver(case: Case) -> Callable[..., dict[str, Any]]:
    """The function that drives a case."""
    name = case["id"].split("/")[1]
    if name == "simple-moving-average":
        return averaged
    if name == "reshape":
        return reshaped
    if name == "views":
        return viewed
    return clipped if name.startswith("clip-") else arrays


def method_of(text: str) -> Any:
    """The calibration that Qwix writes as a text."""
    name, *numbers = text.split(",")
    values = [float(number) for number in numbers]
    if name == "fixed":
        return FixedRange(*(values if len(values) != 1 else (-values[0], values[0])))
    kinds: dict[str, Any] = {"absmax": AbsMaxRange, "minmax": MinMaxRange, "rms": RMSRange}
    return kinds[name](*values)


@dataclass(frozen=True)
class LargestOver:
    """A scale: the largest magnitude for each index of the axes, per number of steps."""

    axes: tuple[int, ...]

    def __call__(self, x: jax.Array, threshold: Any = None) -> jax.Array:
        shared = tuple(axis for axis in range(x.ndim) if axis not in self.axes)
        largest = jnp.max(jnp.abs(x), shared, keepdims=True)
        return jnp.where(largest == 0, 1.0, largest) / threshold


def quantizer_of(config: dict[str, Any], axes: tuple[int, ...]) -> Any:
    qtype = config["qtype"]
    if qtype == "nf4":
        return CodebookQuant(LargestOver(axes), NF4)
    return CalibratedQuant(
        method_of(config.get("calibration_method", "absmax")), channelwise_axes=axes, **form_of(qtype)
    )


def in_tiles(x: jax.Array, config: dict[str, Any]) -> tuple[jax.Array, tuple[int, ...]]:
    """The array with each tiled axis cut in two, and the axes that have a scale for each index."""
    tiles = {int(axis): size for axis, size in (config.get("tiled_axes") or {}).items()}
    shape: list[int] = []
    axes: list[int] = []
    for axis, length in enumerate(x.shape):
        if axis in config["channelwise_axes"] or axis in tiles:
            axes.append(len(shape))
        if axis in tiles:
            size = _tile(tiles[axis], length)
            shape += [length // size, size]
        else:
            shape.append(length)
    return x.reshape(shape), tuple(axes)


def _tile(size: float, length: int) -> int:
    """A tile's size, where a float says which part of the axis it is."""
    return round(length * size) if isinstance(size, float) else size


def form_of(qtype: str) -> dict[str, Any]:
    """The numbers of a type of Qwix's, and for microscaled ones which values a scale may take."""
    if not is_microscaled(qtype):
        return {"bit_width": int(qtype[3:])} if qtype.startswith("int") else {"q_dtype": qtype}
    if qtype == "nvfp4":
        return {
            "q_dtype": "float4_e2m1fn",
            "restrict_scaling_impl": QuantRestrictValue(Fp8e4m3OCPAct.tensor_quant),
        }
    dtype = {"mxfp8": "float8_e4m3fn", "mxfp4": "float4_e2m1fn"}[qtype]
    return {"q_dtype": dtype, "restrict_scaling_impl": PowerOfTwoRestrictValue(CeilSte())}


def is_microscaled(qtype: str) -> bool:
    return qtype.startswith(("mx", "nv"))


def in_groups(x: jax.Array, config: dict[str, Any]) -> Any:
    """The array quantized in groups along its one tiled axis."""
    ((axis, size),) = config["tiled_axes"].items()
    quantizer = CalibratedQuant(
        method_of(config.get("calibration_method", "absmax")),
        channelwise_axes=tuple(config["channelwise_axes"]),
        group_size=_tile(size, x.shape[int(axis)]),
        group_dim=int(axis),
        **form_of(config["qtype"]),
    )
    return quantizer(x)


def arrays(case: Case, inputs: Arrays) -> dict[str, Any]:
    config = {"channelwise_axes": (), **case["config"]}
    dtype = config.get("array_dtype") or "float32"
    x = jnp.asarray(inputs.get("x", np.zeros((8, 16))), dtype)
    if is_microscaled(config["qtype"]) and not config["tiled_axes"]:
        return {"": QuantIdentity(MXFloat8e4m3Act, group_size=None)(x)}
    tiled, axes = in_tiles(x, config)
    one_axis = len(config.get("tiled_axes") or {}) == 1 and config["qtype"] != "nf4"
    made = in_groups(x, config) if one_axis else quantizer_of(config, axes)(tiled)
    tensor = made.quant_tensor(signed=True, training=False)
    # One scale a tile, whose own axis is gone.
    kept = [s for s, long in zip(tensor.scale.shape, _kept(x, config), strict=True) if long]
    minifloats = isinstance(tensor, FloatQuantTensor)
    low_bit = tensor.minifloat() if minifloats else _integers_or_payload(tensor)
    found: dict[str, Any] = {
        "scale": tensor.scale.reshape(kept),
        "qvalue": low_bit.reshape(x.shape).astype(jnp.float32),
        "dequantized": jnp.asarray(tensor.value).reshape(x.shape).astype(jnp.float32),
    }
    if "zero_point" in case["outputs"]:
        found["zero_point"] = tensor.zero_point.reshape(kept)
    return found | {"allowed": _ties(tiled, tensor, x.shape)}


def _integers_or_payload(tensor: Any) -> jax.Array:
    return tensor.int() if isinstance(tensor, IntQuantTensor) else tensor.payload()


def _kept(x: jax.Array, config: dict[str, Any]) -> list[bool]:
    """For every axis in tiles, whether the reference's scale has it: not for what is within a tile."""
    kept: list[bool] = []
    for axis in range(x.ndim):
        kept += [True, False] if str(axis) in (config.get("tiled_axes") or {}) else [True]
    return kept


def _ties(x: jax.Array, tensor: Any, shape: tuple[int, ...]) -> dict[str, Any]:
    if not isinstance(tensor, IntQuantTensor):
        return {}
    steps = x.astype(jnp.float32) / tensor.scale
    near = jnp.abs(jnp.abs(steps - jnp.floor(steps)) - 0.5) < EDGE
    reach = jnp.where(near, 1.0, 0.0)
    return {"qvalue": reach.reshape(shape), "dequantized": (reach * tensor.scale).reshape(shape)}


VIEWS: dict[str, Callable[[Any], Any]] = {
    "": lambda x: x,
    "item1/": lambda x: x[1],
    "slice/": lambda x: x[:, 2:4],
    "swapaxes01/": lambda x: x.swapaxes(0, 1),
    "transpose102/": lambda x: x.transpose(1, 0, 2),
}


def viewed(case: Case, inputs: Arrays) -> dict[str, Any]:
    """A tensor in groups, its other axes moved and indexed."""
    config = case["config"]
    ((axis, size),) = config["tiled_axes"].items()
    grouped = in_groups(jnp.asarray(inputs["x"]), config).quant_tensor(signed=True, training=False)
    whole = GroupwiseIntQuantTensor.of(grouped, size, int(axis))
    found: dict[str, Any] = {}
    for prefix, view in VIEWS.items():
        x = view(whole)
        found[prefix + "scale"] = jnp.squeeze(x.scale_, x.groups.dim)
        found |= {prefix + "qvalue": x.int(), prefix + "dequantized": x.value}
    return found


def reshaped(case: Case, inputs: Arrays) -> dict[str, Any]:
    """A tensor with a scale for each channel, its axes split."""
    config = case["config"]
    quantizer = quantizer_of(config, tuple(config["channelwise_axes"]))
    tensor = quantizer(jnp.asarray(inputs["x"])).quant_tensor(signed=True, training=False)
    found: dict[str, Any] = {}
    for name, spec in case["outputs"].items():
        prefix, _, what = name.partition("/")
        if what == "qvalue":
            other = tensor.reshape(spec["shape"])
            found |= {name: other.int(), f"{prefix}/scale": other.scale, f"{prefix}/dequantized": other.value}
    return found


def clipped(case: Case, inputs: Arrays) -> dict[str, Any]:
    """The range, the array clipped to it, and the gradient that passes."""
    config = case["config"]
    x, g = jnp.asarray(inputs["x"]), jnp.asarray(inputs["g"])
    quantizer = quantizer_of(config, tuple(config["channelwise_axes"]))
    quantizer.scale_stop_grad = True
    found = quantizer.clipping_range(x)
    _, pull = jax.vjp(lambda x: quantizer(x).value, x)
    ends = {"calibration/absmax": found.high, "calibration/max": found.high, "calibration/min": found.lowest}
    return ends | {"clipped": jnp.clip(x, found.lowest, found.high), "masked_grad": pull(g)[0]}


def averaged(case: Case, inputs: Arrays) -> dict[str, Any]:
    average = SimpleMovingAverage()
    found: dict[str, Any] = {}
    for step in range(sum(name.endswith("/max") for name in inputs)):
        prefix = f"step{step}/"
        high, low = jnp.asarray(inputs[prefix + "max"]), jnp.asarray(inputs[prefix + "min"])
        mean = average(ClippingRange(high, low), update=True)
        found |= {prefix + "avg/max": mean.high, prefix + "avg/min": mean.low}
        found |= {prefix + "stat/count": average.count[...]}
        found[prefix + "stat/sum_of_max"] = average.sum_of_max[...].reshape(high.shape)
        found[prefix + "stat/sum_of_min"] = average.sum_of_min[...].reshape(low.shape)
    return found
