"""The quantizers of a scheme at work: put together for the operands that come, kept where they keep something."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.core.state.variables import QuantParam
from jqinject.dot.geometry.labels import Labels
from jqinject.dot.schemes.held_operand import HeldOperand, OperandAxes
from jqinject.dot.schemes.operand import QuantizedOperand
from jqinject.dot.schemes.scheme import GRADIENTS, OPERANDS, Kept, SchemeSpec
from jqinject.dot.tensors.backward_quantizer import BackwardQuantizer, for_backward, why_not_backward
from jqinject.dot.tensors.labelled_tensor import LabelledTensor, in_order, quantized_along
from jqinject.dot.tensors.tensor_dot import has_integers
from jqinject.inject import Binding
from jqinject.quant_tensor import FloatQuantTensor, IntQuantTensor, QuantTensor

PARAMETERS = ("weight", "parameter")
Taken = tuple[BackwardQuantizer | None, jax.Array | None]


class SchemeQuantizers(nnx.Module):
    """The six quantizers of a scheme.

    A quantizer without state is put together at every call (under `jit`, once a trace) and not kept. One with state
    (a learned scale, running ranges, amaxes, random streams) is put together at the first call and kept, as an
    attribute named as its operand: make optimizers and load checkpoints after a first call.

    Args:
        scheme: what the scheme says.
        rngs: for quantizers that draw random numbers.
        where: what the user called, for error texts.
    """

    def __init__(self, scheme: SchemeSpec, rngs: nnx.Rngs | None, where: str) -> None:
        self.scheme = scheme
        self.where = where
        self.use_running_average = False
        self.deterministic = False
        self.key = nnx.data(None if rngs is None else nnx.RngKey(rngs["scheme"](), tag="scheme"))
        for name in OPERANDS:
            setattr(self, name, nnx.data(None))

    def operand(self, name: str, x: LabelledTensor, summed: Labels, *, beside: Any = None) -> LabelledTensor:
        """An operand as its quantizer makes it.

        Args:
            name: of the operand, one that is quantized in the forward pass.
            x: the operand.
            summed: the axes that its product sums over.
            beside: the other operand, for a weight quantizer that goes by its input.
        """
        binding = self.scheme[name]
        if not isinstance(binding, Binding):
            return x
        held = self._held(name, binding, x, summed)
        proxy = held.quant
        if proxy.role in PARAMETERS:
            more = (beside,) if proxy.requires_quant_input and beside is not None else ()
            return LabelledTensor(proxy(x.tensor, *more), x.labels)
        quantize = proxy.quantize_gradient if proxy.role == "gradient" else proxy
        return quantized_along(quantize, x, summed, merges=proxy.quant_metadata.group_size is None)

    def stored(self, rhs: LabelledTensor, summed: Labels) -> QuantizedOperand:
        """The right operand of the forward product as it is stored for serving.

        Args:
            rhs: the operand.
            summed: the axes that are summed over.

        Raises:
            ValueError: it is not quantized, or in a form that is not stored here.
        """
        binding = self.scheme["fprop_rhs"]
        if not isinstance(binding, Binding):
            return QuantizedOperand(rhs.tensor, None)
        found = in_order(self.operand("fprop_rhs", rhs, summed), rhs.labels)
        tiled = self.scheme.fprop.tile_size is not None
        if not tiled and isinstance(found, FloatQuantTensor) and found.is_contractible:
            return QuantizedOperand(found.payload(), found.scale)
        shifted = self._held("fprop_rhs", binding, rhs, summed).quant.has_zero_point
        if not tiled and not shifted and isinstance(found, IntQuantTensor) and has_integers(found):
            return QuantizedOperand(found.int(), found.scale)
        raise ValueError(
            f"{self.where}: {self.scheme.name}.fprop_rhs = {binding.base.__name__} is not stored for serving: only "
            "integers of at most 8 bits without a zero point and 8-bit floats are, without groups or tiles.\n  cure: a "
            "layer of jqinject.nn (QuantLinear) with that weight_quant and jqinject.freeze"
        )

    def gradient(self, name: str, g: LabelledTensor, summed: Labels) -> Taken:
        """The quantizer of a gradient, taken apart for the backward pass, and its slot.

        Args:
            name: of the operand.
            g: what stands for the gradient: its shape.
            summed: the axes that its product sums over.
        """
        binding = self.scheme[name]
        if not isinstance(binding, Binding):
            return None, None
        return for_backward(self._held(name, binding, g, summed).quant)

    @property
    def quantizes(self) -> tuple[bool, bool]:
        """Whether the operands of the forward product have quantizers."""
        left, right = (isinstance(self.scheme[name], Binding) for name in ("fprop_lhs", "fprop_rhs"))
        return left, right

    def has_range(self) -> bool | None:
        """Whether every quantizer that collects a range saw data; None if none does."""
        found = [held.quant.has_range() for held in self._kept()]
        known = [saw for saw in found if saw is not None]
        return all(known) if known else None

    def begin_calibration(self) -> None:
        """From now on collect ranges anew."""
        for held in self._kept():
            if held.quant.has_range() is not None:
                held.quant.begin_calibration()

    def end_calibration(self) -> None:
        """Take what was collected as the ranges."""
        for held in self._kept():
            if held.quant.has_range() is not None:
                held.quant.end_calibration()

    def _kept(self) -> list[HeldOperand]:
        """The operands whose quantizers keep state, as far as they were put together."""
        return [held for held in (getattr(self, name) for name in OPERANDS) if held is not None]

    def set_view(self, use_running_average: bool | None = None, deterministic: bool | None = None) -> None:
        """Switch between training and evaluation.

        Args:
            use_running_average: evaluation mode: statistics are used and not moved.
            deterministic: round to nearest instead of stochastically.
        """
        if use_running_average is not None:
            self.use_running_average = use_running_average
        if deterministic is not None:
            self.deterministic = deterministic

    def _held(self, name: str, binding: Binding, x: LabelledTensor, summed: Labels) -> HeldOperand:
        axes = OperandAxes(
            tuple(x.tensor.shape), tuple(x.axis(label) for label in x.labels if label in summed)
        )
        held = getattr(self, name)
        if held is not None:
            self._check_fits(name, held, axes)
            return held
        where = f"{self.where}: {self.scheme.name}.{name}"
        # A key of its own for each operand, without a count: what is put together at every call draws nothing.
        number = OPERANDS.index(name)
        rngs = None if self.key is None else nnx.Rngs(jax.random.fold_in(self.key.get_value(), number))
        made = HeldOperand(binding, axes, rngs, (where, ""))
        self._check(name, made, where)
        made.set_attributes(
            use_running_average=self.use_running_average,
            deterministic=self.deterministic,
            raise_if_not_found=False,
            graph=True,
        )
        if made.keeps_state:
            setattr(self, name, made)
        return made

    def _check_fits(self, name: str, held: HeldOperand, axes: OperandAxes) -> None:
        if held.quant.role in PARAMETERS and held.axes != axes:
            raise ValueError(
                f"{self.where}: {self.scheme.name}.{name} keeps state for an operand of shape {held.axes.shape}, "
                f"summed over axes {held.axes.summed}, and was given one of shape {axes.shape}, summed over "
                f"{axes.summed}.\n"
                "  cure: a module of its own for every layer: dot_general_cls=lambda: QDotGeneral(...)"
            )

    def _check(self, name: str, made: HeldOperand, where: str) -> None:
        proxy = made.quant
        why = ""
        if proxy.role in ("bias", "accumulator"):
            why = f"it quantizes {proxy.role}s, and none is an operand"
        elif name in GRADIENTS and proxy.role in PARAMETERS:
            why = "it quantizes weights, and this operand is a gradient"
        elif name in GRADIENTS:
            why = why_not_backward(proxy)
        elif isinstance(self.scheme[name], Binding) and name not in ("fprop_lhs", "fprop_rhs"):
            learns = any(isinstance(node, QuantParam) for _, node in nnx.iter_graph(proxy, graph=True))
            why = (
                "it learns a parameter, which no derivative reaches from a backward product" if learns else ""
            )
        if why:
            raise TypeError(
                f"{where}: {proxy.binding.base.__name__} does not go here: {why}.\n  cure: {_cure(name)}"
            )
        draws = any(isinstance(node, nnx.RngStream) for _, node in nnx.iter_graph(proxy, graph=True))
        if draws and self.key is None:
            raise ValueError(
                f"{where}: {proxy.binding.base.__name__} draws random numbers, and there are no rngs.\n  cure: "
                f"{self.where}(scheme, rngs=nnx.Rngs(...)), or a quantizer that rounds to nearest"
            )


def _cure(name: str) -> str:
    if name in GRADIENTS:
        return (
            "a ...Grad... quantizer of jqinject.quant (Int8GradPerRowDynamic, Fp8e5m2GradPerTensorDelayed), or a "
            "dynamic one of activations"
        )
    if name in ("fprop_lhs", "fprop_rhs"):
        return "a quantizer of weights or activations"
    return f"{Kept.FPROP}, what the forward product took; or a quantizer whose scale follows from the tensor"


def served(stored: QuantizedOperand) -> QuantTensor:
    """A stored operand as a tensor that is contracted."""
    assert stored.scale is not None, "the Freezer stores nothing else"
    if jnp.issubdtype(stored.payload.dtype, jnp.integer):
        signed = jnp.issubdtype(stored.payload.dtype, jnp.signedinteger)
        return IntQuantTensor.from_int(stored.payload, stored.scale, signed=signed)
    return FloatQuantTensor.from_payload(stored.payload, stored.scale)
