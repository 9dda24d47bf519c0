"""Merging a batch normalization into the layer before it."""

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core._protocols import groups_of
from jqinject.core.state import RecordPart
from jqinject.nn.base import layer_geometry, slots
from jqinject.ops.processes import on_host
from jqinject.program import kept_state
from jqinject.proxy import QuantProxyFromInjector, assembly, write

FLOAT_LAYERS = (nnx.Linear, nnx.Conv, nnx.ConvTranspose)


def factors_of(norm: nnx.BatchNorm) -> tuple[jax.Array, jax.Array]:
    """The factor and the summand of each channel that a batch normalization applies in evaluation mode, float32.

    factor = scale / sqrt(var + epsilon), summand = bias - mean * factor.

    Args:
        norm: `nnx.BatchNorm`, or `QuantBatchNorm`.

    Raises:
        TypeError: `norm` is not a batch normalization.
    """
    if not isinstance(norm, nnx.BatchNorm):
        raise TypeError(f"expected an nnx.BatchNorm or a QuantBatchNorm, got {type(norm).__name__}")
    mean, var = (v.get_value().astype(jnp.float32) for v in (norm.mean, norm.var))
    factor = 1.0 / jnp.sqrt(var + norm.epsilon)
    if norm.scale is not None:
        factor = factor * norm.scale.get_value().astype(jnp.float32)
    summand = -mean * factor
    if norm.bias is not None:
        summand = summand + norm.bias.get_value().astype(jnp.float32)
    return factor, summand


def merge_bn(layer: Any, norm: nnx.BatchNorm) -> None:
    """Put a batch normalization that follows a layer into the layer's weight and bias.

    weight = weight * factor and bias = bias * factor + summand, by channel, with the factor and the summand that the
    normalization applies in evaluation mode. Quantizers of weight and bias are assembled again from the new values.
    What the weight's quantizer learned or committed follows: scales times |factor|, the same bit widths. The
    normalization itself is unchanged: what calls the two has to leave it out from then on (`jqinject.merge_batch_norm`
    sees to that).

    Args:
        layer: one of ours that contracts its input with a weight of one channel axis (`QuantLinear`, `QuantConv`,
            `QuantConvTranspose`, `QuantLinearGeneral`, `QuantScaleBias`), or Flax's `Linear`, `Conv`, `ConvTranspose`.
        norm: `nnx.BatchNorm` or `QuantBatchNorm` over the layer's channels.

    Raises:
        TypeError: a layer or a normalization of another kind.
        ValueError: their channels differ; the layer is frozen, quantizes its output, or shares a quantizer with layers
            that are not known; a quantizer learned something that cannot follow the weight (a scale that channels of
            different factors share, rounding). Nothing is changed then.

    Source: Brevitas's `merge_bn`. Differs from Brevitas: what does not fit is refused before anything is changed.

    Example:
        >>> from jqinject.nn import QuantLinear
        >>> layer = QuantLinear(3, 2, weight_quant=None, rngs=nnx.Rngs(0))
        >>> norm = nnx.BatchNorm(2, use_running_average=True, rngs=nnx.Rngs(0))
        >>> norm.var[...] = jnp.array([4.0, 0.25])
        >>> expected = norm(layer(jnp.ones((1, 3))))
        >>> merge_bn(layer, norm)
        >>> jnp.allclose(layer(jnp.ones((1, 3))), expected)
        Array(True, dtype=bool)
    """
    learned = check_merges(layer, norm)
    factor, summand = factors_of(norm)
    weight, channel = _weight_of(layer)
    old = weight.get_value()
    by_channel = factor.reshape(_sizes(weight, channel))
    weight.set_value((old.astype(jnp.float32) * by_channel).astype(old.dtype))
    if layer.bias is None:
        bias = nnx.Param(summand.astype(old.dtype))
        layer.bias = nnx.data(bias)
        if not _is_ours(layer) or "use_bias" in vars(layer):
            layer.use_bias = True
    else:
        bias = layer.bias.get_value()
        merged = bias.astype(jnp.float32) * factor.reshape(bias.shape) + summand.reshape(bias.shape)
        layer.bias.set_value(merged.astype(bias.dtype))
    if _is_ours(layer):
        for proxy in (layer.weight_quant, layer.bias_quant):
            if proxy is not None:
                proxy.init_tensor_quant()
        for variable, value in learned:
            write(variable, value)


def check_merges(layer: object, norm: nnx.BatchNorm) -> "RescaledState":
    """Raise where `merge_bn` would.

    Returns:
        What the quantizers of the layer learned, as it is once the norm is merged.
    """
    factor, _ = factors_of(norm)
    weight, channel = _weight_of(layer)
    _check_fits(layer, weight, channel, norm)
    if not _is_ours(layer):
        return []
    learned: RescaledState = []
    by_channel = on_host(factor).reshape(_sizes(weight, channel))
    for slot, factors in (("weight_quant", by_channel), ("bias_quant", None)):
        proxy = getattr(layer, slot)
        try:
            learned += [] if proxy is None else rescaled_state(proxy, factors)
        except ValueError as error:
            raise ValueError(f"{slot}.{error}") from None
    return learned


def _sizes(weight: nnx.Variable[jax.Array], channel: int) -> list[int]:
    """The shape in which numbers of output channels are broadcast to a weight."""
    return [
        size if axis == channel else 1
        for axis, size in enumerate(weight.get_value().shape, -weight.get_value().ndim)
    ]


def _is_ours(layer: object) -> bool:
    return isinstance(layer, layer_geometry.DeclaresGeometry)


def _weight_of(layer: Any) -> tuple[nnx.Variable[Any], int]:
    """The weight of a layer and the axis of its output channels."""
    ours = _is_ours(layer)
    is_float = issubclass(type(layer), FLOAT_LAYERS) and not issubclass(type(layer), nnx.LoRALinear)
    if not (layer.takes_batch_norm if ours else is_float):
        raise TypeError(
            f"a batch norm can be merged into a layer that contracts its input with a weight (QuantLinear, QuantConv, "
            f"QuantConvTranspose, ...), not into a {type(layer).__name__}"
        )
    if not ours:
        transposed = isinstance(layer, nnx.ConvTranspose) and layer.transpose_kernel
        return layer.kernel, -2 if transposed else -1
    if layer.frozen is not None:
        raise ValueError(
            f"the weight of this {type(layer).__name__} is frozen.\n  cure: merge batch norms before jqinject.freeze"
        )
    channel = layer.output_channel_dim
    if not isinstance(channel, int):
        raise ValueError(
            f"the weight of this {type(layer).__name__} has output channels along the axes {channel}, and a batch norm "
            "along one"
        )
    return layer.weight, channel - layer.weight_ndim


def _check_fits(layer: Any, weight: nnx.Variable[jax.Array], channel: int, norm: nnx.BatchNorm) -> None:
    name = type(layer).__name__
    own, its = weight.get_value().shape[channel], norm.num_features
    rank = layer.weight_ndim if _is_ours(layer) else weight.get_value().ndim
    if weight.get_value().ndim != rank:
        raise ValueError(f"a stack of {name}s cannot take a batch norm: merge before stacking")
    if own != its or norm.axis not in (-1, getattr(layer, "axis", -1)):
        raise ValueError(
            f"this {name} has {own} output channels along its last axis, and the batch norm {its} along axis "
            f"{norm.axis}"
        )
    if not _is_ours(layer):
        return
    if slots.is_on(layer.output_quant):
        raise ValueError(
            f"this {name} quantizes its output before the batch norm, which would come after it once merged.\n"
            "  cure: give the output quantizer to the batch norm: QuantBatchNorm(..., output_quant=...)"
        )
    if getattr(norm, "input_quant", None) is not None:
        raise ValueError(
            "this batch norm quantizes its input, which is the output of the layer that it is to be merged into.\n"
            "  cure: a batch norm without input_quant"
        )
    for proxy in (layer.weight_quant, layer.bias_quant):
        if proxy is not None:
            proxy.check_layers_known(layer)


RescaledState: TypeAlias = list[tuple[nnx.Variable[Any] | RecordPart, jax.Array]]


class ChannelFactors:
    """The factors of a tensor's channels; see `jqinject.core._protocols.Factors`.

    Args:
        factors: broadcast to the tensor.
        groups: size and axis of the tensor's groups; None without groups.
    """

    def __init__(self, factors: np.ndarray, groups: tuple[int, int] | None) -> None:
        if groups is not None:
            factors = np.expand_dims(factors, groups[1] % factors.ndim + 1)
        self.factors = factors

    def times(self, x: jax.Array) -> jax.Array:
        """Multiply numbers, one per channel, by the magnitudes; a channel of zeros keeps its number."""
        factors = np.where(self.factors == 0, 1, np.abs(self.factors)).astype(np.float32)
        if np.ptp(factors) == 0:
            return x * factors.flat[0]
        if x.ndim != factors.ndim or np.broadcast_shapes(x.shape, factors.shape) != x.shape:
            raise ValueError(f"its numbers, of shape {x.shape}, are not one per channel")
        return x * factors

    def check_signs(self) -> None:
        """Raise if a factor is negative."""
        if np.any(self.factors < 0):
            raise ValueError(
                "a channel is multiplied by a negative number, which mirrors the range of a zero point"
            )


def rescaled_state(proxy: QuantProxyFromInjector, factors: np.ndarray | None) -> RescaledState:
    """Return a quantizer's learned Variables with the values that they have once its channels are multiplied.

    To be written after the quantizer is assembled again from the new tensor.

    Args:
        proxy: of the quantizer.
        factors: of the channels, broadcast to the tensor; None if nothing that is learned can follow.

    Raises:
        ValueError: a component learned something that cannot follow; the text begins with its path.
    """
    quantizer, record = proxy.tensor_quant, proxy.record
    layers, fresh = proxy.assembled_anew()  # what differs from it was learned
    if record is None and not isinstance(quantizer, nnx.Module):
        return []
    factors = factors if len(layers) == 1 else None
    channels = None if factors is None else ChannelFactors(factors, groups_of(quantizer))
    if record is not None:  # what the quantizer itself learned does not count until it is released
        return [(RecordPart(record, "scale"), _changes(proxy, channels, "record")["scale"])]
    borrowed, untrained = assembly.borrowed_paths(quantizer, layers), assembly.variables_of(fresh)
    variables = {path: v for path, v in assembly.variables_of(quantizer).items() if path not in borrowed}
    owners = {path: path[: -2 if isinstance(v, RecordPart) else -1] for path, v in variables.items()}
    learned = {owners[path] for path, v in variables.items() if not _is_equal(v, untrained.get(path))}
    state: RescaledState = []
    for path in sorted(learned, key=str):
        changes = _changes(
            kept_state.node_at(quantizer, path), channels, ".".join(("tensor_quant", *map(str, path)))
        )
        own = ((below[-1], v) for below, v in variables.items() if owners[below] == path)
        state += [(v, changes.get(name, v.get_value())) for name, v in own]
    return state


def _changes(component: object, channels: ChannelFactors | None, name: str) -> dict[str, jax.Array]:
    """The Variables of a component that change, by name."""
    if getattr(component, "is_scale_free", False):
        return {}
    try:
        if channels is None:
            raise ValueError("its tensor is not only multiplied, or several layers share it")
        rescaled = getattr(component, "rescaled", None)
        if rescaled is None:
            raise ValueError(f"{type(component).__name__} does not know how")
        return rescaled(channels)
    except ValueError as error:
        raise ValueError(
            f"{name}: what it learned or collected cannot follow the weight: {error}.\n  cure: fold the batch norm "
            "before training and calibration, or take one scale per output channel; jqinject.reassemble(model) "
            "discards what quantizers learned"
        ) from None


def _is_equal(variable: Any, untrained: Any) -> bool:
    if untrained is None:
        return False
    if isinstance(untrained, nnx.RngState):
        return True
    return bool(jnp.array_equal(variable.get_value(), untrained.get_value(), equal_nan=True))
