"""Builds the layer, or the small network, that a case of the area `layers` describes."""

from __future__ import annotations

from collections.abc import Callable
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
from tests.golden.adapters.layouts import OVERRIDES, quantizer

NETWORK = (
    "QuantIdentity(int8) -> QuantConv2d(2,4,3, per-channel, Int32Bias) -> QuantReLU(uint) -> max_pool2d(2) -> "
    "flatten(1) -> QuantLinear(16,3, Int32Bias)"
)
MODULE = "brevitas.nn."


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
        meaning({"conv": Net}, kind, "a network")
        return Net(config)
    if config.take("class") != MODULE + kind:
        raise CannotDrive(f"a case of {kind} describes {config.take('class')}")
    make, positional = meaning(CLASSES, kind, "a layer")
    args, kwargs = config.take("args"), config.nested("kwargs")
    given = dict(zip(positional, args, strict=False)) | kwargs
    if len(args) > len(positional):
        raise CannotDrive(f"{kind} takes {positional}, got {args}")
    with reading(given, kind) as arguments:
        return make(arguments)


def _quantizers(given: Settings, *slots: str) -> dict[str, Any]:
    """The quantizers of the slots with their overrides; as in the reference, weights have one unless told otherwise."""
    found: dict[str, Any] = {"return_quant_tensor": given.take("return_quant_tensor", False)}
    for slot in slots:
        name = given.take(f"{slot}_quant", "Int8WeightPerTensorFloat" if slot == "weight" else None)
        overrides = {o: given.take(f"{slot}_{o}") for o in sorted(OVERRIDES) if f"{slot}_{o}" in given}
        found[f"{slot}_quant"] = name and quantizer(name, overrides)
    return found


def _linear(given: Settings) -> QuantLinear:
    return QuantLinear(
        given.take("in_features"),
        given.take("out_features"),
        use_bias=given.take("bias", True),
        rngs=nnx.Rngs(0),
        **_quantizers(given, "weight", "bias", "input", "output"),
    )


def _embedding(given: Settings) -> QuantEmbed:
    sizes = given.take("num_embeddings"), given.take("embedding_dim")
    return QuantEmbed(*sizes, rngs=nnx.Rngs(0), **_quantizers(given, "weight"))


def _scale_bias(given: Settings) -> QuantScaleBias:
    given.take("runtime_shape", None)  # channels are the last axis here, whatever the rank
    return QuantScaleBias(
        given.take("num_features"),
        use_bias=given.take("bias"),
        **_quantizers(given, "weight", "bias", "input", "output"),
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
            **_quantizers(given, "weight", "bias", "input", "output"),
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
            **_quantizers(given, "weight", "bias", "input", "output"),
        )

    return make


def _each(given: int | list[int], rank: int) -> tuple[int, ...]:
    """One number for each axis of the window."""
    return (given,) * rank if isinstance(given, int) else tuple(given)


_OF_CONVOLUTIONS = ("in_channels", "out_channels", "kernel_size", "stride", "padding")
# The reference's layer -> what builds ours, and the reference's positional arguments.
CLASSES: dict[str, tuple[Callable[[Settings], Any], tuple[str, ...]]] = {
    "QuantLinear": (_linear, ("in_features", "out_features", "bias")),
    "QuantEmbedding": (_embedding, ("num_embeddings", "embedding_dim")),
    "QuantScaleBias": (_scale_bias, ("num_features", "bias", "runtime_shape")),
    **{f"QuantConv{rank}d": (_conv(rank), _OF_CONVOLUTIONS) for rank in (1, 2, 3)},
    **{f"QuantConvTranspose{rank}d": (_conv_transpose(rank), _OF_CONVOLUTIONS) for rank in (1, 2, 3)},
}
