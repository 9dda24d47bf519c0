"""From the reference's layout to ours, and layers that hold a weight of any kind."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

import jqinject.quant
from jqinject.nn import QuantConv, QuantLinear
from jqinject.nn._weight_layer import QuantWeightLayer
from jqinject.quant_tensor import FloatQuantTensor, GroupwiseFloatQuantTensor, GroupwiseQuantTensor


class Carrier(QuantWeightLayer):
    """A weight with its quantizers and no forward of its own, for layers that the library does not have."""

    weight_name = "kernel"

    def __init__(
        self, shape: tuple[int, ...], channel_axis: int, given: Mapping[str, Any], overrides: Any
    ) -> None:
        self.kernel = nnx.Param(jnp.zeros(shape))
        self.bias = nnx.Param(jnp.zeros(shape[channel_axis]))
        self.channel_axis = channel_axis
        self._init_quantizers(given, overrides, False, nnx.Rngs(0))

    @property
    def weight_ndim(self) -> int:
        return len(self.kernel.shape)

    @property
    def output_channel_dim(self) -> int:
        return self.channel_axis

    def _parent_forward(self, stand_in: Any, inputs: Any, out_sharding: Any) -> Any:
        raise AssertionError("a carrier has no forward")

    def _free_input_axes(self, ndim: int) -> tuple[int, ...]:
        return ()


@dataclass(frozen=True)
class Layout:
    """How arrays of one kind of layer turn into ours and back.

    Attributes:
        weight: axes of the reference's weight in our order.
        data: likewise for activations of the given rank; None leaves them.
        make: builds the layer for a weight in our layout.
    """

    weight: Callable[[int], tuple[int, ...]]
    data: Callable[[int], tuple[int, ...]]
    make: Callable[..., Any]


def same(ndim: int) -> tuple[int, ...]:
    return tuple(range(ndim))


def kernel_last(ndim: int) -> tuple[int, ...]:
    """(out, in, *window) -> (*window, in, out)."""
    return (*range(2, ndim), 1, 0)


def channels_last(ndim: int) -> tuple[int, ...]:
    return (0, *range(2, ndim), 1)


def make_linear(shape: tuple[int, ...], **arguments: Any) -> QuantLinear:
    return QuantLinear(*shape, rngs=nnx.Rngs(0), **arguments)


def make_conv(shape: tuple[int, ...], groups: int = 1, **arguments: Any) -> QuantConv:
    *window, inner, outer = shape
    return QuantConv(
        inner * groups, outer, tuple(window), feature_group_count=groups, rngs=nnx.Rngs(0), **arguments
    )


def make_depthwise(shape: tuple[int, ...], **arguments: Any) -> QuantConv:
    return make_conv(shape, groups=shape[-1] // shape[-2], **arguments)


def make_carrier(channel_axis: int) -> Callable[..., Any]:
    def make(shape: tuple[int, ...], **arguments: Any) -> Carrier:
        given = {name: arguments.pop(name) for name in ("weight_quant", "bias_quant") if name in arguments}
        quant = given.get("weight_quant", {})
        if channel_axis == 1 and "group_dim" in quant and "group_dim" not in vars(quant)["__declared__"]:
            given["weight_quant"] = declaring(
                quant, {"group_dim": 0}
            )  # the inputs of a transposed convolution
        return Carrier(shape, channel_axis, given, arguments)

    return make


CONV = Layout(kernel_last, channels_last, make_conv)
DEPTHWISE = Layout(kernel_last, channels_last, make_depthwise)
TRANSPOSED = Layout(same, same, make_carrier(1))
LAYOUTS = {
    "linear": Layout(kernel_last, same, make_linear),
    **{f"conv{rank}d": CONV for rank in (1, 2, 3)},
    **{f"conv{rank}d_dw": DEPTHWISE for rank in (1, 2, 3)},
    **{f"convtranspose{rank}d": TRANSPOSED for rank in (1, 2, 3)},
    "embedding": Layout(same, same, make_carrier(0)),
}


def moved(array: Any, axes: tuple[int, ...]) -> np.ndarray:
    """The array with its axes in another order; scalars and vectors stay."""
    array = np.asarray(array)
    return np.transpose(array, axes) if array.ndim == len(axes) else array


def back(array: Any, axes: tuple[int, ...], group_dim: int | None = None) -> np.ndarray:
    """The inverse of `moved`; of an array whose axis `group_dim` (ours) is cut into groups, with both axes of it."""
    if group_dim is not None and np.ndim(array) == len(axes) + 1:
        cut = axes[group_dim]
        axes = tuple(a for x in axes for a in ((x, x + 1) if x == cut else (x + (x > cut),)))
    return moved(array, tuple(np.argsort(axes)))


def quantizer(name: str) -> Any:
    """A ready-made quantizer by its name."""
    return getattr(jqinject.quant, name)


def compiled(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step as it is, or under `nnx.jit` where the environment variable JQINJECT_GOLDEN_JIT is set."""
    return nnx.jit(step) if os.environ.get("JQINJECT_GOLDEN_JIT") else step


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a case and its inputs that is not run again for the facts of the case it has just run for."""
    last: list[Any] = [None, None]

    @functools.wraps(function)
    def remembering(case: dict[str, Any], inputs: dict[str, np.ndarray]) -> Any:
        if last[0] is not inputs:
            last[:] = None, None
            last[:] = inputs, function(case, inputs)
        return last[1]

    return remembering


def plain(overrides: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Overrides as a user writes them: sequences as tuples, with the layer's prefix."""
    return {prefix + name: tuple(v) if isinstance(v, list) else v for name, v in overrides.items()}


def declaring(base: Any, overrides: Mapping[str, Any]) -> Any:
    """A quantizer with a case's overrides as class attributes: the reference ignores those that are not read."""
    return type(base)(base.__name__, (base,), plain(overrides)) if overrides else base


def facts_of(tensor: Any) -> dict[str, Any]:
    """What the reference records of a quantized tensor."""
    found: dict[str, Any] = {"type": type(tensor).__name__ if is_quantized(tensor) else "Tensor"}
    if is_quantized(tensor):
        valid = bool(tensor.is_valid)
        found |= {"is_valid": valid, "signed": tensor.signed, "training": tensor.training}
        if isinstance(tensor, FloatQuantTensor | GroupwiseFloatQuantTensor):
            found["saturating"] = tensor.saturating
            for name in ("inf_values", "nan_values"):
                codes = getattr(tensor, name)
                found[name] = None if codes is None else list(codes)
        elif valid:
            found["int_dtype"] = str(tensor.int().dtype)
    return found


def is_quantized(tensor: Any) -> bool:
    """Whether it is a quantized tensor."""
    return isinstance(tensor, jqinject.IntQuantTensor | FloatQuantTensor | GroupwiseQuantTensor)


def fields_of(tensor: Any) -> dict[str, np.ndarray]:
    """The outputs the reference names, of a quantized tensor or a plain one."""
    if not is_quantized(tensor):
        return {"value": np.asarray(tensor)}
    found = {name: np.asarray(getattr(tensor, name)) for name in ("value", "scale", "zero_point")}
    if isinstance(tensor, GroupwiseQuantTensor):
        found |= {
            f"group_{n}": np.asarray(getattr(tensor, n + "_")) for n in ("value", "scale", "zero_point")
        }
    if isinstance(tensor, FloatQuantTensor | GroupwiseFloatQuantTensor):
        for name in ("exponent_bit_width", "mantissa_bit_width", "exponent_bias"):
            found[name] = np.asarray(getattr(tensor, name), np.float32)
        return found | ({"minifloat": np.asarray(tensor.minifloat())} if bool(tensor.is_valid) else {})
    found["bit_width"] = np.asarray(tensor.bit_width, np.float32)
    if bool(tensor.is_valid):
        found["int"] = np.asarray(tensor.int())
    return found


def our_path(path: str) -> tuple[str, ...]:
    """Where a Variable is under a proxy that the reference calls `[fused_...].tensor_quant.a.b`."""
    names = path.split("tensor_quant.", 1)[-1].split(".")
    return ("tensor_quant", *(RENAMED.get(name, name) for name in names if name not in UNNESTED))


def dotted(path: tuple[Any, ...]) -> str:
    return ".".join(str(name) for name in path)


def in_the_words_of(case: dict[str, Any], outputs: dict[str, Any]) -> dict[str, Any]:
    """Our outputs under the names of the case: paths of Variables differ, and a scale of shape (1,) is ours of ()."""
    found = {}
    for name, spec in case["outputs"].items():
        kind, _, path = name.partition(".")
        first, _, rest = path.partition(".") if kind.startswith(("call2", "step")) else ("", "", "")
        prefix, inner = (
            (f"{kind}.{first}.", rest) if first in ("grad", "state", "param") else (f"{kind}.", path)
        )
        ours = name if name in outputs or not inner else prefix + dotted(our_path(inner))
        if ours in outputs:
            found[name] = shaped(outputs[ours], spec["shape"])
    return found


def shaped(array: Any, shape: Sequence[int]) -> np.ndarray:
    """The array, a single number in the shape (1,) that the reference gives a scale made without a threshold."""
    array = np.asarray(array)
    return array.reshape(shape) if array.size == 1 and list(shape) == [1] else array


# Modules of the reference that have no counterpart of their own here.
UNNESTED = frozenset({"runtime_stats", "stats_scaling_impl", "fused_activation_quant_proxy"})
RENAMED = {"msb_clamp_bit_width_impl": "bit_width_impl"}
