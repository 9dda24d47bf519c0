"""Stand-in for the layer of an operand's quantizer: the operand's axes, and their role in a product."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.core.component import InnerModule
from jqinject.inject import Binding


@dataclass(frozen=True)
class OperandAxes:
    """The axes of an operand.

    Attributes:
        shape: its shape.
        summed: the axes that its product sums over.
        free: its free axes.
    """

    shape: tuple[int, ...]
    summed: tuple[int, ...]
    free: tuple[int, ...]

    @property
    def channels(self) -> tuple[int, ...]:
        """The axes that the product keeps."""
        return tuple(axis for axis in range(len(self.shape)) if axis not in self.summed)

    @property
    def features(self) -> tuple[int, ...]:
        """The shape of a per-feature scale: the last summed axis comes last."""
        return (self.shape[self.summed[-1]],) if self.summed else self.shape[-1:]


class HeldOperand(InnerModule):
    """The quantizer of one operand, and the stand-in for its layer.

    Attributes:
        quant: the proxy.
        axes: axes of its operand.
    """

    bias = None
    rotates_both_operands = True

    def __init__(
        self,
        binding: Binding,
        axes: OperandAxes,
        rngs: nnx.Rngs | None,
        where: tuple[str, str],
        offered: Mapping[str, Any],
    ) -> None:
        self.axes = axes
        if not binding.declares("proxy_class"):
            raise TypeError(
                f"{where[0]}: {binding.base.__name__} does not say what it quantizes.\n  cure: derive it from a "
                "quantizer of jqinject.quant, or declare proxy_class = jqinject.proxy.ActQuantProxyFromInjector"
            )
        proxy_class = binding.resolve("proxy_class", module=self)
        names = {"activation_channel_shape": axes.features, **offered}
        self.quant = proxy_class(binding, self, offered=names, rngs=rngs, where=where)

    def set_modes(self, use_running_average: bool, deterministic: bool) -> None:
        """Switch the quantizer between training and evaluation.

        Args:
            use_running_average: evaluation mode.
            deterministic: round to nearest instead of stochastically.
        """
        self.set_attributes(
            use_running_average=use_running_average,
            deterministic=deterministic,
            raise_if_not_found=False,
            graph=True,
        )

    @property
    def weight(self) -> Any:
        """The operand as known before a call: its shape."""
        return jax.ShapeDtypeStruct(self.axes.shape, jnp.float32)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.axes.shape

    @property
    def weight_ndim(self) -> int:
        """How many axes it has."""
        return len(self.axes.shape)

    @property
    def output_channel_dim(self) -> int | tuple[int, ...]:
        """The axes that its product keeps."""
        channels = self.axes.channels
        return channels[0] if len(channels) == 1 else channels

    @property
    def keeps_state(self) -> bool:
        """Whether the quantizer has Variables other than random streams, so must be kept."""
        return bool(jax.tree.leaves(nnx.state(self.quant, nnx.Not(nnx.RngState), graph=True)))
