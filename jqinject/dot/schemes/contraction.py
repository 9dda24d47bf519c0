"""`Contraction`: a contraction by a scheme, with the quantizers of its six operands."""

from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.core.component import InnerModule
from jqinject.dot.geometry.dimensions import Labels
from jqinject.dot.schemes import product_transforms, scheme_fits
from jqinject.dot.schemes.quant_operand import (
    PARAMETERS,
    OperandAxes,
    QuantOperand,
    assembled,
    sampled,
)
from jqinject.dot.schemes.scheme import OPERANDS, SchemeSpec
from jqinject.dot.tensors.backward_quantizer import for_backward
from jqinject.dot.tensors.labelled_tensor import LabelledTensor, quantized_by
from jqinject.inject import Binding

Taken = tuple[Any, jax.Array | None]
NO_STATE_OF_FUNCTIONS = (
    "which a function cannot",
    "QDotGeneral(scheme), QEinsum(scheme) or QConvGeneralDilated(scheme), which are called alike",
)
NO_STATE_IN_SWITCHED = (
    "which a scheme that is switched does not",
    "a scheme without quant_delay_steps, or dynamic quantizers",
)


class Contraction(InnerModule):
    """The quantizers of a scheme's six operands.

    One without state is assembled once for all contractions with operands of the same shapes, and kept by none. One
    with state (a learned scale, running ranges, amaxes) is an attribute named like its operand, made with the module
    from the axes of the operand.

    Args:
        scheme: what the scheme says.
        where: the user's callable, for error messages.
        rngs: for quantizers that draw random numbers.
        stateless: why there can be no state and what to do, if the module is made for one call.

    Attributes:
        record: takes the names and the axes of the operands whose quantizers keep state, in an abstract call; None in
            any other.
    """

    record: Callable[[str, OperandAxes], None] | None = None
    stream: Any
    stateless: tuple[str, str] | None = None

    def __init__(
        self,
        scheme: SchemeSpec,
        where: str,
        rngs: nnx.Rngs | None = None,
        stateless: tuple[str, str] | None = None,
    ) -> None:
        self.scheme = scheme
        self.where = where
        if stateless is not None:
            self.stateless = stateless
        self.use_running_average = False
        self.deterministic = False
        # A fork, always named alike: names are part of the graph.
        key = None if rngs is None else rngs["stochastic_rounding"]()
        self.stream = nnx.data(None if key is None else nnx.RngStream(key, tag="stochastic_rounding"))
        for name in OPERANDS:
            setattr(self, name, nnx.data(None))

    def recording(self, axes: dict[str, OperandAxes]) -> Self:
        """A copy for an abstract call.

        Args:
            axes: gets those of the operands whose quantizers keep state.
        """
        twin = nnx.clone(self, graph=True)
        twin.record = axes.__setitem__
        twin.set_view(deterministic=True)  # no random numbers are needed to see shapes
        return twin

    def complete_by(self, call: Callable[[Self], object]) -> None:
        """Make the quantizers that keep state, for operands as a call meets them; nothing is computed.

        Args:
            call: calls a contraction, with arrays of the shapes in question.
        """
        axes: dict[str, OperandAxes] = {}
        samples = [sample for scheme in self.scheme.both for sample in sampled(scheme).values()]
        if any(sample is None or sample.keeps_state for sample in samples):
            jax.eval_shape(lambda: call(self.recording(axes)))
            self.complete(axes)

    def complete(self, operands: Mapping[str, OperandAxes]) -> None:
        """Make the quantizers that keep state, unless they are there.

        Args:
            operands: the axes of their operands.
        """
        for name, axes in operands.items():
            binding = self.scheme[name]
            if isinstance(binding, Binding) and vars(self)[name] is None:
                setattr(self, name, self._assembled_here(name, binding, axes))

    def quantized(
        self,
        name: str,
        x: LabelledTensor,
        summed: Labels,
        *,
        partner: object = None,
        in_rows: bool = True,
    ) -> tuple[Any, LabelledTensor]:
        """The quantizer of an operand, None without one, and the operand quantized.

        Args:
            name: of an operand that is quantized in the forward pass.
            x: the operand.
            summed: the axes that its product sums over.
            partner: the other operand, for a weight quantizer that depends on its input.
            in_rows: whether quantizers of activations see the summed axes as rows.

        Raises:
            MissingRngsError: it is rounded stochastically without random numbers.
        """
        binding = self.scheme[name]
        if not isinstance(binding, Binding):
            return None, x
        proxy = self._operand(name, binding, x, summed).quant
        if proxy.role in PARAMETERS:  # those of activations and gradients transform it themselves
            x = product_transforms.transformed(binding, x, summed)
        more = (partner,) if proxy.requires_quant_input and partner is not None else ()
        return proxy, quantized_by(proxy, x, summed, *more, in_rows=in_rows)

    def gradient(self, name: str, g: LabelledTensor, summed: Labels) -> Taken:
        """The quantizer of a gradient, split for the backward pass, and its slot.

        Args:
            name: of the operand.
            g: stand-in for the gradient: its shape.
            summed: the axes that its product sums over.

        Raises:
            MissingRngsError: it is rounded stochastically without random numbers.
        """
        binding = self.scheme[name]
        if not isinstance(binding, Binding):
            return None, None
        return for_backward(self._operand(name, binding, g, summed).quant)

    @property
    def trains(self) -> bool:
        """Whether a backward pass is expected: not of a function, which has no evaluation mode."""
        return self.stateless is not NO_STATE_OF_FUNCTIONS and not self.deterministic

    def signs(self, name: str, count: int) -> jax.Array:
        """The random signs that a backward product's operands are multiplied by; in evaluation mode all are 1.

        Args:
            name: of the operand beside the gradient.
            count: how many.

        Raises:
            MissingRngsError: there are no random numbers.
        """
        if self.deterministic:
            return jnp.ones(count, jnp.float32)
        if self.stream is None:
            raise scheme_fits.MissingRngsError(self._where(name), scheme_fits.RANDOM_SIGNS)
        return jax.random.rademacher(self.stream(), (count,), jnp.float32)

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

    @property
    def modes(self) -> tuple[bool, bool]:
        """The arguments of `set_view`."""
        return self.use_running_average, self.deterministic

    @property
    def proxies(self) -> list[Any]:
        """The quantizers that keep state."""
        operands = (vars(self)[name] for name in OPERANDS)
        return [operand.quant for operand in operands if operand is not None]

    def _where(self, name: str) -> str:
        return f"{self.where}: {self.scheme.name}.{name}"

    def _operand(self, name: str, binding: Binding, x: LabelledTensor, summed: Labels) -> QuantOperand:
        """The quantizer of an operand.

        Raises:
            MissingRngsError: it draws random numbers, and there are none.
            TypeError: it keeps state, which one call has no place for.
            ValueError: it keeps state, and was not made with the module, or for an operand of another shape.
        """
        axes, own = OperandAxes.of(x, summed), vars(self)[name]
        if own is not None:
            self._check_fits(name, own, axes)
        make = assembled if axes.sized else assembled.__wrapped__
        operand = make(name, binding, axes, self._where(name), self.modes) if own is None else own
        draws = operand.draws and not self.deterministic
        if draws and self.stream is None:
            raise scheme_fits.MissingRngsError(self._where(name))
        if own is not None or not operand.keeps_state:
            return operand.drawing_from(self.stream) if draws and own is None else operand
        if self.record is None:
            raise self._has_no_state(name, binding)
        self.record(name, axes if operand.quant.role in PARAMETERS else axes.without_rows(name))
        return self._assembled_here(name, binding, axes)

    def _assembled_here(self, name: str, binding: Binding, axes: OperandAxes) -> QuantOperand:
        """A quantizer of the module's own."""
        rngs: Any = None
        if self.stream is not None and not self.deterministic:
            rngs = nnx.Rngs()
            rngs.default = self.stream
        return QuantOperand(name, binding, axes, rngs, self._where(name), self.modes)

    def _has_no_state(self, name: str, binding: Binding) -> Exception:
        what = f"{self._where(name)} = {binding.base.__name__} keeps state"
        if self.stateless is not None:
            why, cure = self.stateless
            return TypeError(f"{what}, {why}.\n  cure: {cure}")
        return ValueError(
            f"{what}, which is made before the first call, so that optimizers and checkpoints have it.\n"
            f"  cure: {self.where}(scheme, lhs_shape=(1, 64), rhs_shape=(64, 32)) with the shapes of its operands; or "
            "once jqinject.initialize(model, *inputs), which finds them"
        )

    def _check_fits(self, name: str, operand: QuantOperand, axes: OperandAxes) -> None:
        if operand.quant.role in PARAMETERS and operand.axes != axes:
            raise ValueError(
                f"{self.where}: {self.scheme.name}.{name} keeps state for an operand of shape {operand.axes.shape}, "
                f"summed over axes {operand.axes.summed}, and was given one of shape {axes.shape}, summed over "
                f"{axes.summed}.\n"
                "  cure: a module of its own for every layer: dot_general_cls=lambda: QDotGeneral(...)"
            )
