"""Drives Qwix's quantization of arrays: ranges, scales, integers, and the average of ranges."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core import (
    AbsMaxRange,
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
from jqinject.quant_tensor import FloatQuantTensor, IntQuantTensor
from jqinject.quant_tensor import in_groups as groupwise
from tests.golden._config import meaning, reading
from tests.ranges import in_range

Case = dict[str, Any]
Arrays = dict[str, np.ndarray]
EDGE = 1e-4  # in steps: as close as this to a tie either neighbour is right


def driver(case: Case) -> Callable[..., dict[str, Any]]:
    """The function that drives a case, by what it has: `g` is a gradient, other views have names of their own."""
    given = case["config"]
    if "bootstrap_steps" in given:
        return averaged
    if "source_shape" in given:
        return reshaped
    if any(name.endswith("/qvalue") for name in case["outputs"]):
        return viewed
    return clipped if "g" in case["inputs"] else arrays


RANGES: dict[str, Any] = {"absmax": AbsMaxRange, "minmax": MinMaxRange, "rms": RMSRange, "fixed": FixedRange}


def range_of(text: str, factor: float = 1.0) -> Any:
    """The range that Qwix writes as a text; where it is found in the data, a little off by a factor."""
    name, *numbers = text.split(",")
    kind, values = meaning(RANGES, name, "a calibration method"), [float(number) for number in numbers]
    if kind is FixedRange:
        return FixedRange(*(values if len(values) != 1 else (-values[0], values[0])))
    if kind is RMSRange and not values:
        return RMSRange()
    return kind(factor * (values[0] if values else 1.0))


def path_of(pattern: str) -> str:
    """A pattern of Qwix's for the path of a module, whose parts it joins by slashes."""
    return pattern.replace("/", r"\.")


class ArraySpec(NamedTuple):
    """What a case of group `qarray` says.

    Attributes:
        qtype: the numbers.
        method: the range.
        axes: that have a scale for each index.
        tiles: axis -> length of its tiles, or which part of the axis they are.
        dtype: of the array.
        shape: to be reshaped from.
    """

    qtype: str
    method: str
    axes: tuple[int, ...]
    tiles: dict[int, float]
    dtype: Any
    shape: list[int] | None


def array_of(config: Mapping[str, Any]) -> ArraySpec:
    with reading(config, "a quantized array") as given:
        given.choose("scale_dtype", {None: None}, None)
        found = ArraySpec(
            qtype=given.take("qtype"),
            method=given.take("calibration_method", "absmax"),
            axes=tuple(given.take("channelwise_axes", ())),
            tiles={int(axis): size for axis, size in given.nested("tiled_axes").items()},
            dtype=jnp.dtype(given.take("array_dtype", "float32")),
            shape=given.take("source_shape", None),
        )
    range_of(found.method)
    form_of(found.qtype)
    return found


@dataclass(frozen=True)
class ScaleOver:
    """A scale of a table: the end of the range for each index of the axes, per number of steps."""

    method: str
    axes: tuple[int, ...]

    def __call__(self, x: jax.Array, threshold: Any = None) -> jax.Array:
        shared = tuple(axis for axis in range(x.ndim) if axis not in self.axes)
        high = range_of(self.method)(x, shared).high
        return jnp.where(high == 0, 1.0, high) / threshold


def quantizer_of(spec: ArraySpec, axes: tuple[int, ...]) -> Any:
    if spec.qtype == "nf4":
        return CodebookQuant(ScaleOver(spec.method, axes), NF4)
    return in_range(range_of(spec.method), channelwise_axes=axes, **form_of(spec.qtype))


def in_tiles(x: jax.Array, spec: ArraySpec) -> tuple[jax.Array, tuple[int, ...]]:
    """The array with each tiled axis cut in two, and the axes that have a scale for each index."""
    shape: list[int] = []
    axes: list[int] = []
    for axis, length in enumerate(x.shape):
        if axis in spec.axes or axis in spec.tiles:
            axes.append(len(shape))
        if axis in spec.tiles:
            size = _tile(spec.tiles[axis], length)
            shape += [length // size, size]
        else:
            shape.append(length)
    return x.reshape(shape), tuple(axes)


def _tile(size: float, length: int) -> int:
    """A tile's size, where a float says which part of the axis it is."""
    return round(length * size) if isinstance(size, float) else size


def form_of(qtype: str) -> dict[str, Any]:
    """The numbers of a type of Qwix's, and for microscaled ones which values a scale may take."""
    if qtype == "nf4":
        return {}
    if qtype.startswith("int"):
        return {"bit_width": int(qtype[3:])}
    if not is_microscaled(qtype):
        return {"q_dtype": qtype}
    if qtype == "nvfp4":
        return {
            "q_dtype": "float4_e2m1fn",
            "restrict_scaling_impl": QuantRestrictValue(Fp8e4m3OCPAct.tensor_quant),
        }
    dtype = meaning(MICROSCALED, qtype, "a type")
    return {"q_dtype": dtype, "restrict_scaling_impl": PowerOfTwoRestrictValue(CeilSte())}


MICROSCALED = {"mxfp8": "float8_e4m3fn", "mxfp4": "float4_e2m1fn"}


def is_microscaled(qtype: str) -> bool:
    return qtype.startswith(("mx", "nv"))


def in_groups(x: jax.Array, spec: ArraySpec) -> Any:
    """The array quantized in groups along its one tiled axis."""
    ((axis, size),) = spec.tiles.items()
    quantizer = in_range(
        range_of(spec.method),
        channelwise_axes=spec.axes,
        group_size=_tile(size, x.shape[axis]),
        group_dim=axis,
        **form_of(spec.qtype),
    )
    return quantizer(x)


def arrays(case: Case, inputs: Arrays) -> dict[str, Any]:
    spec = array_of(case["config"])
    x = jnp.asarray(inputs.get("x", np.zeros((8, 16))), spec.dtype)
    if is_microscaled(spec.qtype) and not spec.tiles:
        return {"": QuantIdentity(MXFloat8e4m3Act, group_size=None)(x)}
    tiled, axes = in_tiles(x, spec)
    one_axis = len(spec.tiles) == 1 and spec.qtype != "nf4"
    made = in_groups(x, spec) if one_axis else quantizer_of(spec, axes)(tiled)
    tensor = made.quant_tensor(training=False)
    # One scale a tile, whose own axis is gone.
    kept = [s for s, long in zip(tensor.scale.shape, _kept(x, spec), strict=True) if long]
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


def _kept(x: jax.Array, spec: ArraySpec) -> list[bool]:
    """For every axis in tiles, whether the reference's scale has it: not for what is within a tile."""
    kept: list[bool] = []
    for axis in range(x.ndim):
        kept += [True, False] if axis in spec.tiles else [True]
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
    "item1": lambda x: x[1],
    "slice": lambda x: x[:, 2:4],
    "swapaxes01": lambda x: x.swapaxes(0, 1),
    "transpose102": lambda x: x.transpose(1, 0, 2),
}


def viewed(case: Case, inputs: Arrays) -> dict[str, Any]:
    """A tensor in groups, its other axes moved and indexed."""
    spec = array_of(case["config"])
    ((axis, size),) = spec.tiles.items()
    x = jnp.asarray(inputs["x"])
    grouped = in_groups(x, spec).quant_tensor(training=False)
    whole = groupwise(grouped, _tile(size, x.shape[axis]), axis)
    found: dict[str, Any] = {}
    for output in case["outputs"]:
        name = output.rpartition("/")[0]
        prefix, x = name and f"{name}/", meaning(VIEWS, name, "a view")(whole)
        found[prefix + "scale"] = jnp.squeeze(x.scale_, x.groups.dim)
        found |= {prefix + "qvalue": x.int(), prefix + "dequantized": x.value}
    return found


def reshaped(case: Case, inputs: Arrays) -> dict[str, Any]:
    """A tensor with a scale for each channel, its axes split."""
    spec = array_of(case["config"])
    assert list(inputs["x"].shape) == spec.shape
    tensor = quantizer_of(spec, spec.axes)(jnp.asarray(inputs["x"])).quant_tensor(training=False)
    found: dict[str, Any] = {}
    for name, output in case["outputs"].items():
        prefix, _, what = name.partition("/")
        if what == "qvalue":
            other = tensor.reshape(output["shape"])
            found |= {name: other.int(), f"{prefix}/scale": other.scale, f"{prefix}/dequantized": other.value}
    return found


def clipped(case: Case, inputs: Arrays) -> dict[str, Any]:
    """The range, the array clipped to it, and the gradient that passes."""
    spec = array_of(case["config"])
    x, g = jnp.asarray(inputs["x"]), jnp.asarray(inputs["g"])
    form = form_of(spec.qtype)
    quantizer = in_range(range_of(spec.method), channelwise_axes=spec.axes, scale_stop_grad=True, **form)
    found = quantizer.scaling_impl.clipping_range(x)
    _, pull = jax.vjp(lambda x: quantizer(x).value, x)
    ends = {"calibration/absmax": found.high, "calibration/max": found.high, "calibration/min": found.lowest}
    return ends | {"clipped": jnp.clip(x, found.lowest, found.high), "masked_grad": pull(g)[0]}


def average_of(config: Mapping[str, Any]) -> SimpleMovingAverage:
    with reading(config, "an average of ranges") as given:
        return given.choose("bootstrap_steps", {0: SimpleMovingAverage})()


def averaged(case: Case, inputs: Arrays) -> dict[str, Any]:
    average = average_of(case["config"])
    found: dict[str, Any] = {}
    for step in range(sum(name.endswith("/max") for name in inputs)):
        prefix = f"step{step}/"
        high, low = jnp.asarray(inputs[prefix + "max"]), jnp.asarray(inputs[prefix + "min"])
        mean = average(ClippingRange(high, low), update=True)
        found |= {prefix + "avg/max": mean.high, prefix + "avg/min": mean.low}
        found |= {prefix + "stat/count": average.counter[...].astype(jnp.int32)}
        found[prefix + "stat/sum_of_max"] = average.sum_of_max[...].reshape(high.shape)
        found[prefix + "stat/sum_of_min"] = average.sum_of_min[...].reshape(low.shape)
    return found
