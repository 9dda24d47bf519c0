"""A scheme's quantizers at run time: assembled for the given operands, and kept if stateful."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.core.component import InnerModule
from jqinject.core.state import QuantParam
from jqinject.dot.geometry.labels import Labels
from jqinject.dot.kernels.integer import has_integers
from jqinject.dot.schemes.held_operand import HeldOperand, OperandAxes
from jqinject.dot.schemes.operand import without_state
from jqinject.dot.schemes.product_transforms import random_signs, transform_of, transformed
from jqinject.dot.schemes.random_numbers import NoRandomNumbers, missing_rngs
from jqinject.dot.schemes.scheme import GRADIENTS, OPERANDS, Kept, SchemeSpec
from jqinject.dot.tensors.backward_quantizer import for_backward, why_not_backward
from jqinject.dot.tensors.freezer import QuantizedOperand
from jqinject.dot.tensors.labelled_tensor import LabelledTensor, in_order, quantized_by
from jqinject.inject import Binding
from jqinject.quant_tensor import on_integers, on_minifloats

PARAMETERS = ("weight", "parameter")
ROTATED = ("activation", "gradient")
Taken = tuple[Any, jax.Array | None]


class SchemeQuantizers(InnerModule):
    """The six quantizers of a scheme.

    A stateless quantizer is assembled at every call (under `jit`, once per trace; that of an `OperandInjector` once for
    all) and not kept; so is one that only draws random numbers, with a new key. A stateful one (a learned scale,
    running ranges, amaxes) is assembled at the first call and kept as an attribute named like its operand: make
    optimizers and load checkpoints after that.

    Args:
        scheme: what the scheme says.
        rngs: for quantizers that draw random numbers.
        where: the user's callable, for error messages.
        once: whether they are made for one call, as by a function, which has no evaluation mode: what only a backward
            pass needs is then asked for by that.
    """

    def __init__(self, scheme: SchemeSpec, rngs: nnx.Rngs | None, where: str, *, once: bool = False) -> None:
        self.scheme = scheme
        self.where = where
        self.once = once
        self.use_running_average = False
        self.deterministic = False
        # A fork, always named alike: names are part of the graph.
        key = None if rngs is None else rngs["stochastic_rounding"]()
        self.stream = nnx.data(None if key is None else nnx.RngStream(key, tag="stochastic_rounding"))
        for name in OPERANDS:
            setattr(self, name, nnx.data(None))

    def operand(
        self,
        name: str,
        x: LabelledTensor,
        summed: Labels,
        *,
        beside: Any = None,
        in_rows: bool = True,
        found_in: Any = None,
    ) -> LabelledTensor:
        """An operand, quantized.

        Args:
            name: of an operand that is quantized in the forward pass.
            x: the operand.
            summed: the axes that its product sums over.
            beside: the other operand, for a weight quantizer that depends on its input.
            in_rows: whether quantizers of activations see the summed axes as rows.
            found_in: finds the range instead of the operand's `calibration`, if given.

        Raises:
            ValueError: it is rounded stochastically without random numbers.
        """
        binding = self.scheme[name]
        if not isinstance(binding, Binding):
            return x
        proxy = self._held(name, binding, x, summed, found_in).quant
        if self._lacks_rngs(proxy):
            raise missing_rngs(self._where(name))
        if proxy.role in PARAMETERS:  # those of activations and gradients transform it themselves
            x = transformed(binding, x, summed)
        more = (beside,) if proxy.requires_quant_input and beside is not None else ()
        return quantized_by(proxy, x, summed, *more, in_rows=in_rows)

    def stored(self, name: str, x: LabelledTensor, summed: Labels) -> QuantizedOperand:
        """An operand of the forward product in its stored form.

        Args:
            name: "fprop_lhs" or "fprop_rhs".
            x: the operand.
            summed: the axes that are summed over.

        Raises:
            ValueError: it is not quantized, or in a form that cannot be stored.
        """
        binding = self.scheme[name]
        self.check_freezes()
        if not isinstance(binding, Binding):
            return QuantizedOperand(x.tensor, None)
        found = in_order(self.operand(name, x, summed), x.labels)
        if on_minifloats(found) and found.is_contractible:
            return QuantizedOperand(found.payload(), found.scale)
        shifted = self._held(name, binding, x, summed).quant.has_zero_point
        shifted = shifted and (not on_integers(found) or found.has_zero_point)
        if not shifted and has_integers(found):
            narrow = jnp.int4 if found.bit_width == 4 and found.signed else None
            return QuantizedOperand(
                found.int() if narrow is None else found.int().astype(narrow), found.scale
            )
        raise ValueError(
            f"{self.where}: {self.scheme.name}.{name} = {binding.base.__name__} is not stored for serving: only "
            "integers of at most 8 bits without a zero point and 8-bit floats are, without groups or tiles.\n  cure: a "
            "layer of jqinject.nn (QuantLinear) with that weight_quant and jqinject.freeze"
        )

    def check_freezes(self) -> None:
        """Raise if an operand cannot be stored for serving.

        Raises:
            ValueError: the forward contraction is tiled, so scales are not those of the whole operand.
        """
        if self.scheme.fprop.tiles is not None:
            raise ValueError(
                "an operand of a forward contraction that is cut into pieces (tile_size=) can't be stored for serving: "
                "its pieces have scales of their own.\n  cure: a forward contraction without tile_size, or a weight "
                "in groups, in a layer of jqinject.nn"
            )

    def proxy(self, name: str, x: LabelledTensor, summed: Labels) -> Any:
        """The quantizer of an operand; None if it is float or takes what the forward product took."""
        binding = self.scheme[name]
        return self._held(name, binding, x, summed).quant if isinstance(binding, Binding) else None

    def gradient(self, name: str, g: LabelledTensor, summed: Labels) -> Taken:
        """The quantizer of a gradient, split for the backward pass, and its slot.

        Args:
            name: of the operand.
            g: stand-in for the gradient: its shape.
            summed: the axes that its product sums over.
        """
        binding = self.scheme[name]
        if not isinstance(binding, Binding):
            return None, None
        proxy = self._held(name, binding, g, summed).quant
        return (NoRandomNumbers(self._where(name)), None) if self._lacks_rngs(proxy) else for_backward(proxy)

    @property
    def trains(self) -> bool:
        """Whether a backward pass is expected."""
        return not self.once and not self.deterministic

    def one_key(self) -> jax.Array | None:
        """A key for all random numbers of one call; None in evaluation mode, and without random numbers."""
        return None if self.stream is None or self.deterministic else self.stream()

    def signs(self, product: str, count: int) -> jax.Array | None:
        """The random signs that a backward product's operands are multiplied by; None if the scheme has none.

        In evaluation mode, and without random numbers, which a backward pass refuses, all are 1.

        Args:
            product: "dgrad" or "wgrad".
            count: how many.
        """
        if f"{product}_random_signs" not in self.scheme.flags:
            return None
        if self.deterministic or self.stream is None:
            return jnp.ones(count, jnp.float32)
        return random_signs(self.stream(), count)

    def lacks_signs(self, product: str) -> bool:
        """Whether a backward product draws signs without random numbers."""
        drawn = f"{product}_random_signs" in self.scheme.flags and not self.deterministic
        return drawn and self.stream is None

    def draws_in_vain(self, name: str, x: LabelledTensor, summed: Labels) -> bool:
        """Whether an operand is rounded stochastically without random numbers."""
        binding = self.scheme[name]
        if self.stream is not None or not isinstance(binding, Binding):
            return False
        return self._lacks_rngs(self._held(name, binding, x, summed).quant)

    def _lacks_rngs(self, proxy: Any) -> bool:
        if self.stream is not None or self.deterministic:
            return False
        return any(isinstance(node, nnx.RngStream) for _, node in nnx.iter_graph(proxy, graph=True))

    def _rngs(self) -> nnx.Rngs | None:
        """Random numbers for new quantizers: takes a key from the stream only when needed."""
        if self.stream is None or self.deterministic:
            return None
        rngs: Any = nnx.Rngs()
        rngs.default = self.stream
        return rngs

    def _where(self, name: str) -> str:
        return f"{self.where}: {self.scheme.name}.{name}"

    def stateless(
        self,
        y: jax.Array,
        why: str = "which a function cannot",
        cure: str = "QDotGeneral(scheme), QEinsum(scheme) or QConvGeneralDilated(scheme), which are called alike",
    ) -> jax.Array:
        """The result of what cannot keep state.

        Args:
            y: the result.
            why: who cannot, and what to do, for the error.
            cure: see `why`.

        Raises:
            TypeError: a quantizer is stateful.
        """
        kept = [name for name in OPERANDS if getattr(self, name) is not None]
        if kept:
            binding = self.scheme[kept[0]]
            assert isinstance(binding, Binding)
            raise TypeError(
                f"{self._where(kept[0])} = {binding.base.__name__} keeps state, {why}.\n  cure: {cure}"
            )
        return y

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
        """Restart the collection of ranges."""
        for held in self._kept():
            if held.quant.has_range() is not None:
                held.quant.begin_calibration()

    def end_calibration(self) -> None:
        """Use what was collected as the ranges."""
        for held in self._kept():
            if held.quant.has_range() is not None:
                held.quant.end_calibration()

    def _kept(self) -> list[HeldOperand]:
        """The operands whose quantizers keep state, if already assembled."""
        return [held for held in (getattr(self, name) for name in OPERANDS) if held is not None]

    def set_view(self, use_running_average: bool | None = None, deterministic: bool | None = None) -> None:
        """Switch between training and evaluation.

        Args:
          use_running_average: evaluation mode: use statistics without updating them.
          deterministic: round to nearest instead of stochastically.
        """
        if use_running_average is not None:
            self.use_running_average = use_running_average
        if deterministic is not None:
            self.deterministic = deterministic

    def _held(
        self, name: str, binding: Binding, x: LabelledTensor, summed: Labels, found_in: Any = None
    ) -> HeldOperand:
        over = tuple(x.axis(label) for label in x.labels if label in summed)
        alone = [label for label in x.labels if label not in summed and label[0] not in ("batch", "tile")]
        axes = OperandAxes(tuple(x.tensor.shape), over, tuple(map(x.axis, alone)))
        held = getattr(self, name)
        if held is not None:
            self._check_fits(name, held, axes)
            return held
        where = self._where(name)
        modes = (self.use_running_average, self.deterministic)
        rngs = self._rngs()
        sized = all(isinstance(size, int) for size in axes.shape)  # not in an export for any size
        if rngs is None and found_in is None and sized:
            known = without_state(binding, axes, where, modes)
            if known is not None:
                self._check(name, known, where)
                return known
        offered = {} if found_in is None else {"calibration": found_in}
        made = HeldOperand(binding, axes, rngs, (where, ""), offered)
        self._check(name, made, where)
        made.set_modes(*modes)
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
        if transform_of(self.scheme[name]) is not None and proxy.role not in (*PARAMETERS, *ROTATED):
            why = f"it quantizes {proxy.role}s, which go through no pre_transform"
        elif proxy.role in ("bias", "accumulator"):
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


def contract_once(
    quantizers: SchemeQuantizers,
    scheme: SchemeSpec,
    key: jax.Array | None,
    contract: Callable[[SchemeQuantizers], jax.Array],
) -> jax.Array:
    """A contraction by a scheme that keeps no state, with quantizers made for it.

    Args:
        quantizers: of the op, for its modes.
        scheme: the scheme.
        key: for its random numbers.
        contract: the contraction.

    Raises:
        TypeError: a quantizer is stateful.
    """
    made = SchemeQuantizers(scheme, None if key is None else nnx.Rngs(key), quantizers.where)
    made.set_view(quantizers.use_running_average, quantizers.deterministic)
    y = contract(made)
    return made.stateless(
        y,
        "which a scheme that is switched does not",
        "a scheme without quant_delay_steps, or dynamic quantizers",
    )


def _cure(name: str) -> str:
    if name in GRADIENTS:
        return (
            "a ...Grad... quantizer of jqinject.quant (Int8DynamicGradPerRowFloat, Fp8e5m2GradPerTensorDelayed), or a "
            "dynamic one of activations"
        )
    if name in ("fprop_lhs", "fprop_rhs"):
        return "a quantizer of weights or activations"
    return f"{Kept.FPROP}, what the forward product took; or a quantizer whose scale follows from the tensor"
