"""From the reference's layout to ours, and layers that hold a weight of any kind."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import nnx

import jqinject.quant
from jqinject.core.state import flat_parts
from jqinject.nn import QuantConv, QuantConvTranspose, QuantEmbed, QuantLinear
from jqinject.quant_tensor import FloatQuantTensor, GroupwiseFloatQuantTensor, GroupwiseQuantTensor
from tests.golden._config import CannotDrive


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


def make_transposed(shape: tuple[int, ...], **arguments: Any) -> QuantConvTranspose:
    *window, outer, inner = shape
    return QuantConvTranspose(
        inner, outer, tuple(window), transpose_kernel=True, rngs=nnx.Rngs(0), **arguments
    )


def make_embed(shape: tuple[int, ...], **arguments: Any) -> QuantEmbed:
    return QuantEmbed(*shape, rngs=nnx.Rngs(0), **arguments)


CONV = Layout(kernel_last, channels_last, make_conv)
DEPTHWISE = Layout(kernel_last, channels_last, make_depthwise)
TRANSPOSED = Layout(kernel_last, channels_last, make_transposed)
LAYOUTS = {
    "linear": Layout(kernel_last, same, make_linear),
    **{f"conv{rank}d": CONV for rank in (1, 2, 3)},
    **{f"conv{rank}d_dw": DEPTHWISE for rank in (1, 2, 3)},
    **{f"convtranspose{rank}d": TRANSPOSED for rank in (1, 2, 3)},
    "embedding": Layout(same, same, make_embed),
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


# What the cases override in a quantizer.
OVERRIDES = {
    "accumulator_bit_width",
    "bit_width",
    "bit_width_impl_type",
    "collect_stats_steps",
    "exponent_bit_width",
    "float_to_int_impl_type",
    "group_dim",
    "group_size",
    "high_percentile_q",
    "learned_round_impl_type",
    "low_percentile_q",
    "mantissa_bit_width",
    "max_val",
    "min_val",
    "narrow_range",
    "per_channel_broadcastable_shape",
    "quant_delay_steps",
    "quant_type",
    "quantize_zero_point",
    "restrict_scaling_type",
    "saturating",
    "scaling_affine_rescaling_init",
    "scaling_const",
    "scaling_impl_type",
    "scaling_min_val",
    "scaling_per_output_channel",
    "scaling_per_output_type",
    "scaling_stats_momentum",
    "scaling_stats_op",
    "scaling_stats_permute_dims",
    "sigma",
    "signed",
    "threshold",
}


def quantizer(name: str, overrides: Mapping[str, Any] | None = None) -> Any:
    """A ready-made quantizer by its name, or one derived from it that declares the overrides.

    Declared, not given as keywords: one that the quantizer does not read as it is wired is then no error, as in the
    reference.
    """
    if name not in vars(jqinject.quant):
        raise CannotDrive(f"jqinject.quant has no {name}")
    base = getattr(jqinject.quant, name)
    unknown = sorted(set(overrides or {}) - OVERRIDES)
    if unknown:
        raise CannotDrive(f"{name}: no adapter knows the overrides {unknown}")
    if not overrides:
        return base
    return type(base)(name, (base,), {"__module__": __name__, **plain(overrides)})


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


def plain(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides as a user writes them: sequences as tuples."""
    return {name: tuple(v) if isinstance(v, list) else v for name, v in overrides.items()}


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


def kept_by(module: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """What a module keeps, by path; the arrays of a record as if they were Variables of their own."""
    state = nnx.state(module)
    return [(tuple(name for name in path if name != "record"), part) for path, part in flat_parts(state)]


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
