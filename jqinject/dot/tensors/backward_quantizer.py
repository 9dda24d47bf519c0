"""A quantizer as a function in the backward pass: its state goes in as arrays, its report comes out as a cotangent.

A backward pass cannot write to a module, so the forward pass splits a gradient's quantizer, and the backward pass
merges it. What it records (the amax of a delayed scale) is the cotangent of its slot, which adds by maximum; random
streams advance in the forward pass, once per call.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core import GradSlot, StaticRange
from jqinject.core._protocols import collects_in_steps
from jqinject.core.quantizers.delay import DelayWrapper
from jqinject.core.state import QuantParam, warn_of_lost_amax
from jqinject.dot.kernels.integer import has_integers
from jqinject.inject import Binding
from jqinject.ops import FloatGrid, IntGrid, float8_cast, lean, observe, ste
from jqinject.quant_tensor import (
    FloatQuantTensor,
    Groups,
    IntQuantTensor,
    QuantTensor,
    as_array,
    in_groups,
    is_grouped,
)

Quantize = Callable[[Any, jax.Array], object]


@dataclass(frozen=True)
class GradientFormat:
    """The numbers of a gradient that arrives quantized, once for all that it flows into.

    The gradient is dequantized on its way; the cotangent of a token carries the scale, so that a contraction recovers
    the numbers.

    Attributes:
        grid: integers of at most 8 bits, or 8-bit floats.
        scale_shape: of the scale, with two axes for one that is cut into groups.
        groups: how an axis of the gradient is cut into groups; None without groups.
    """

    grid: IntGrid | FloatGrid
    scale_shape: tuple[int, ...] = ()
    groups: Groups | None = None

    @classmethod
    def of_integers(cls, x: QuantTensor | jax.ShapeDtypeStruct) -> "GradientFormat | None":
        """The format of a quantized gradient; None unless it is one of integers that backends contract.

        Args:
            x: the gradient as a QuantTensor, or its abstract value.
        """
        if not isinstance(x, QuantTensor) or not has_integers(x, in_groups=True) or x.has_zero_point:
            return None
        grouped = x.grouped if is_grouped(x) else x
        return cls(
            IntGrid(x.bit_width, x.signed), tuple(grouped.scale.shape), x.groups if is_grouped(x) else None
        )

    @property
    def is_integer(self) -> bool:
        """Whether the numbers are integers."""
        return self.grid.is_integer

    def in_one(self) -> "GradientFormat | None":
        """The format of one scale; None of several."""
        return self if math.prod(self.scale_shape) == 1 and self.groups is None else None

    def token(self) -> jax.Array:
        """Zeros whose cotangent is the scale."""
        zeros = np.zeros(self.scale_shape, np.float32) if self.scale_shape else np.float32(0)
        return jnp.asarray(zeros)

    def tensor(self, g: jax.Array, scale: jax.Array) -> QuantTensor:
        """The numbers of a gradient that was dequantized.

        Args:
            g: the gradient.
            scale: the cotangent of the token.
        """
        grid = self.grid
        if isinstance(grid, FloatGrid):
            payload = float8_cast.to_float8_again(g, scale, grid.dtype)
            return FloatQuantTensor.stored(payload, scale, None, grid, g.dtype)
        x = g if self.groups is None else self.groups.split(g)
        payload = ste.nearest(x.astype(jnp.float32) / scale).astype(grid.storage)
        tensor = IntQuantTensor(x, scale, None, grid.bit_width, grid.signed, training=False).keeping(payload)
        if self.groups is None:
            return tensor
        return in_groups(tensor, self.groups.size, self.groups.dim, self.groups.length)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BackwardQuantizer:
    """A split quantizer; a pytree. Made by `for_backward`.

    Attributes:
        state: the values of its Variables.
        graphdef: the rest of it.
    """

    state: Any
    graphdef: Any = field(metadata={"static": True})

    def __call__(
        self, g: jax.Array, slot: jax.Array | None, quantize: Quantize
    ) -> tuple[Any, jax.Array | None]:
        """A quantized gradient, and the cotangent of the slot.

        Args:
            g: the gradient.
            slot: where the quantizer reports, if it does. One that does not add by maximum is discarded, with a
                warning.
            quantize: function of the merged quantizer and the gradient.
        """
        quantizer = nnx.merge(self.graphdef, *self.state)
        scaling = reporting(quantizer)
        if scaling is None or slot is None:
            return quantize(quantizer, g), None
        if not scaling.use_running_average and slot.dtype == jnp.float32:
            warn_of_lost_amax(_name(quantizer))
        scaling.use_running_average = False
        scaling.begin_step()
        quantized = quantize(quantizer, g)
        return quantized, jax.lax.convert_element_type(scaling.report(), slot.dtype)


def _name(quantizer: object) -> str:
    binding = vars(quantizer).get("binding")
    return binding.base.__name__ if isinstance(binding, Binding) else type(quantizer).__name__


def reporting(quantizer: object) -> Any:
    """The scale of a quantizer that reports from backward passes, if any."""
    if not isinstance(quantizer, nnx.Module):
        return None
    nodes: list[Any] = [node for _, node in nnx.iter_modules(quantizer, graph=True)]
    return next((node for node in nodes if collects_in_steps(node) and node.slot is not None), None)


def for_backward(quantizer: nnx.Module) -> tuple[BackwardQuantizer, jax.Array | None]:
    """A quantizer split in its present state, and its slot for this use; its random streams advance.

    Args:
        quantizer: a proxy or any other quantizer that `why_not_backward` accepts.
    """
    scaling = reporting(quantizer)
    graphdef, slots, rest = nnx.split(quantizer, GradSlot, ..., graph=True)
    # The live slot's value adds by maximum and is not read here.
    zeros = jax.tree.map(lambda x: lean.known_zeros(x, jnp.float32), slots)
    taken = BackwardQuantizer((zeros, rest), graphdef)
    _advance(quantizer)
    if scaling is None:
        return taken, None
    if scaling.use_running_average:  # evaluation: nothing is recorded
        return taken, jnp.zeros((*scaling.scale.get_value().shape, observe.SLOT_SIZE), jnp.float32)
    return taken, scaling.claim_slot()


_NEXT_KEY = nnx.RngStream.__call__  # read once: `nnx.tabulate` replaces it for streams of the model


def _advance(quantizer: nnx.Module) -> None:
    """Advance the random streams of nondeterministic modules."""
    for _, module in nnx.iter_modules(quantizer, graph=True):
        if vars(module).get("deterministic") is not True:
            for child in vars(module).values():
                if isinstance(child, nnx.RngStream):
                    _NEXT_KEY(child)


def why_not_backward(quantizer: object) -> str:
    """Why a quantizer cannot quantize a gradient; empty if it can."""
    if not isinstance(quantizer, nnx.Module):
        return ""
    for _, node in nnx.iter_graph(quantizer, graph=True):
        if isinstance(node, QuantParam):
            return "it learns a parameter, which no derivative reaches from a backward pass"
        if isinstance(node, DelayWrapper) and node.countdown is not None:
            return "it counts calls (quant_delay_steps), and a backward pass counts none"
        keeps = isinstance(node, StaticRange) and node.has_range() is not None
        if keeps and not (collects_in_steps(node) and vars(node).get("slot") is not None):
            return f"its {type(node).__name__} keeps a statistic that forward passes move"
    return ""


def quantize_gradient_by(
    y: jax.Array, quantizer: nnx.Module, quantize: Quantize, token: jax.Array | None = None
) -> jax.Array:
    """`y` unchanged; its gradient is quantized in the backward pass.

    Args:
        y: float array.
        quantizer: of the gradient.
        quantize: function of the quantizer and a gradient that returns a QuantTensor or an array; hashable.
        token: its cotangent becomes the scale, for a contraction that uses the payload.
    """
    taken, slot = for_backward(quantizer)
    with ste.backward_only("a gradient quantizer"):
        return _unchanged(quantize, y, token, slot, taken)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _unchanged(
    quantize: Quantize,
    y: jax.Array,
    token: jax.Array | None,
    slot: jax.Array | None,
    taken: BackwardQuantizer,
) -> jax.Array:
    return y


def _fwd(
    quantize: Quantize,
    y: jax.Array,
    token: jax.Array | None,
    slot: jax.Array | None,
    taken: BackwardQuantizer,
) -> Any:
    return y if slot is None else observe.mapped_beside(y, slot), (token, slot, taken)


def _bwd(quantize: Quantize, residuals: tuple[Any, Any, BackwardQuantizer], g: jax.Array) -> Any:
    token, slot, taken = residuals
    quantized, report = taken(g, slot, quantize)
    scale = None
    if token is not None:
        scale = (quantized.grouped if is_grouped(quantized) else quantized).scale
        scale = scale if scale.shape == token.shape else scale.reshape(token.shape)
    return as_array(quantized).astype(g.dtype), scale, report, None


_unchanged.defvjp(_fwd, _bwd)
