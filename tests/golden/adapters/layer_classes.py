"""Builds the layer, or the small network, that a case of the area `layers` describes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

from jqinject.nn import (
    QuantConv,
    QuantConvTranspose,
    QuantEmbed,
    QuantIdentity,
    QuantLinear,
    QuantReLU,
    QuantScaleBias,
)
from jqinject.quant_tensor import max_pool
from tests.golden._config import CannotDrive, Settings, meaning, reading
from tests.golden.adapters.layouts import OVERRIDES, plain, quantizer

NETWORK = (
    "QuantIdentity(int8) -> QuantConv2d(2,4,3, per-channel, Int32Bias) -> QuantReLU(uint) -> max_pool2d(2) -> "
    "flatten(1) -> QuantLinear(16,3, Int32Bias)"
)
MODULE = "brevitas.nn."
SLOTS = ("weight_quant", "bias_quant", "input_quant", "output_quant")


class Net(nnx.Module):
    """The network `NETWORK`."""

    def __init__(self, config: Settings) -> None:
        config.choose("description", {NETWORK: None})
        collected = {"collect_stats_steps": config.take("collect_stats_steps")}
        rngs = nnx.Rngs(0)
        self.inp = QuantIdentity(quantizer("Int8ActPerTensorFloat", collected), return_quant_tensor=True)
        bits = {"bit_width": config.take("weight_bit_width_c1")}
        self.c1 = QuantConv(
            2,
            4,
            (3, 3),
            padding="VALID",
            weight_quant=quantizer("Int8WeightPerChannelFloat", bits),
            bias_quant=quantizer("Int32Bias"),
            return_quant_tensor=True,
            rngs=rngs,
        )
        bits = {"bit_width": config.take("bit_width_a1")}
        self.a1 = QuantReLU(quantizer("Uint8ActPerTensorFloat", collected | bits), return_quant_tensor=True)
        self.fc = QuantLinear(
            16,
            3,
            weight_quant=quantizer("Int8WeightPerTensorFloat"),
            bias_quant=quantizer("Int32Bias"),
            return_quant_tensor=True,
            rngs=rngs,
        )

    def __call__(self, x: Any) -> Any:
        y = max_pool(self.a1(self.c1(self.inp(x))), (2, 2), strides=(2, 2))
        return self.fc(y.transpose((0, 3, 1, 2)).reshape((y.shape[0], -1)))


def layer_of(config: Settings, kind: str) -> Any:
    """The layer or network of a case's config."""
    if "class" not in config:
        return meaning({"conv": Net}, kind, "a network")(config)
    make, positional = meaning(CLASSES, kind, "a layer")
    with reading(arguments_of(config, kind, positional), kind) as arguments:
        return make(arguments)


def arguments_of(config: Settings, kind: str, positional: tuple[str, ...]) -> dict[str, Any]:
    """The arguments of a layer by name, from a config with its class, its `args` and its `kwargs`."""
    if config.take("class") != MODULE + kind:
        raise CannotDrive(f"a case of {kind} describes {config.take('class')}")
    args = config.take("args")
    if len(args) > len(positional):
        raise CannotDrive(f"{kind} takes {positional}, got {args}")
    return dict(zip(positional, args, strict=False)) | plain(config.nested("kwargs"))


def quantizers_of(given: Settings, defaults: Mapping[str, str | None]) -> dict[str, Any]:
    """The quantizers of slots, with what `weight_bit_width` and the like override in them.

    `defaults` names what the reference puts into the slots `weight_quant`, ... that a case leaves out.
    """
    found: dict[str, Any] = {}
    for slot, default in defaults.items():
        name, prefix = given.take(slot, default), slot.removesuffix("quant")
        overrides = {o: given.take(prefix + o) for o in sorted(OVERRIDES) if prefix + o in given}
        found[slot] = name and quantizer(name, overrides)
    return found


def _with_quantizers(given: Settings, *slots: str) -> dict[str, Any]:
    """The keywords that every layer has: weights have a quantizer unless told otherwise."""
    defaults = {slot: "Int8WeightPerTensorFloat" if slot == "weight_quant" else None for slot in slots}
    return_quant_tensor = given.take("return_quant_tensor", False)
    return {"return_quant_tensor": return_quant_tensor, **quantizers_of(given, defaults)}


def _linear(given: Settings) -> QuantLinear:
    return QuantLinear(
        given.take("in_features"),
        given.take("out_features"),
        use_bias=given.take("bias", True),
        rngs=nnx.Rngs(0),
        **_with_quantizers(given, *SLOTS),
    )


def _embedding(given: Settings) -> QuantEmbed:
    sizes = given.take("num_embeddings"), given.take("embedding_dim")
    return QuantEmbed(*sizes, rngs=nnx.Rngs(0), **_with_quantizers(given, "weight_quant"))


def _scale_bias(given: Settings) -> QuantScaleBias:
    given.take("runtime_shape", None)  # channels are the last axis here, whatever the rank
    return QuantScaleBias(
        given.take("num_features"),
        use_bias=given.take("bias"),
        **_with_quantizers(given, *SLOTS),
    )


def _conv(rank: int) -> Callable[[Settings], QuantConv]:
    def make(given: Settings) -> QuantConv:
        return QuantConv(
            given.take("in_channels"),
            given.take("out_channels"),
            _each(given.take("kernel_size"), rank),
            strides=_each(given.take("stride", 1), rank),
            padding=[(p, p) for p in _each(given.take("padding", 0), rank)],
            kernel_dilation=_each(given.take("dilation", 1), rank),
            feature_group_count=given.take("groups", 1),
            use_bias=given.take("bias", True),
            rngs=nnx.Rngs(0),
            **_with_quantizers(given, *SLOTS),
        )

    return make


def _conv_transpose(rank: int) -> Callable[[Settings], QuantConvTranspose]:
    """The reference pads what the strided window leaves: less of the border, and more at the end, as it is told."""

    def make(given: Settings) -> QuantConvTranspose:
        window, dilation = _each(given.take("kernel_size"), rank), _each(given.take("dilation", 1), rank)
        padding, more = _each(given.take("padding", 0), rank), _each(given.take("output_padding", 0), rank)
        reach = [d * (k - 1) for d, k in zip(dilation, window, strict=True)]
        if given.take("groups", 1) != 1:
            raise CannotDrive("Flax's transposed convolutions have no groups")
        return QuantConvTranspose(
            given.take("in_channels"),
            given.take("out_channels"),
            window,
            strides=_each(given.take("stride", 1), rank),
            padding=[(r - p, r - p + m) for r, p, m in zip(reach, padding, more, strict=True)],
            kernel_dilation=dilation,
            transpose_kernel=True,
            use_bias=given.take("bias", True),
            rngs=nnx.Rngs(0),
            **_with_quantizers(given, *SLOTS),
        )

    return make


def _each(given: int | tuple[int, ...], rank: int) -> tuple[int, ...]:
    """One number for each axis of the window."""
    return (given,) * rank if isinstance(given, int) else given


_OF_CONVOLUTIONS = ("in_channels", "out_channels", "kernel_size", "stride", "padding")
# The reference's layer -> what builds ours, and the reference's positional arguments.
CLASSES: dict[str, tuple[Callable[[Settings], Any], tuple[str, ...]]] = {
    "QuantLinear": (_linear, ("in_features", "out_features", "bias")),
    "QuantEmbedding": (_embedding, ("num_embeddings", "embedding_dim")),
    "QuantScaleBias": (_scale_bias, ("num_features", "bias", "runtime_shape")),
    **{f"QuantConv{rank}d": (_conv(rank), _OF_CONVOLUTIONS) for rank in (1, 2, 3)},
    **{f"QuantConvTranspose{rank}d": (_conv_transpose(rank), _OF_CONVOLUTIONS) for rank in (1, 2, 3)},
}
