"""`ParameterSite`: holds the weight quantizer of a parameter that belongs to no quantized layer."""

import copy
from dataclasses import dataclass
from typing import Self

import jax
from flax import nnx

from jqinject.core.component import InnerModule
from jqinject.dot.schemes.quant_operand import OperandAxes
from jqinject.nn.base.slots import WEIGHT
from jqinject.quant_tensor.array_methods import attribute


@dataclass(frozen=True)
class PlannedParameter:
    """A parameter that gets a quantizer.

    Attributes:
        path: of the parameter.
        quantizer: the injector.
        stacked: its leading axes over which a loop runs.
        shared: its axes, in one weight, along which all numbers need one scale.
        free: its axes, in one weight, that the outputs have and no other operands.
        summed: its axes, in one weight, that every contraction sums over and that may be stored last; none if one is no
            contraction of rows and columns.
        rounded_again: whether a scheme takes another version of it backward.
    """

    path: tuple[str | int, ...]
    quantizer: object
    stacked: int
    shared: tuple[int, ...]
    free: tuple[int, ...] = ()
    summed: tuple[int, ...] = ()
    rounded_again: bool = False


class BoundParameter:
    """Mixin: the Variable that a walk of the model has bound. NNX neither sees nor copies it: a copy has none."""

    __slots__ = ("_bound",)
    _bound: nnx.Variable[jax.Array]


del BoundParameter.__slots__  # NNX refuses classes that have the name; the slot stays


class ParameterSite(BoundParameter, InnerModule):
    """Holds the quantizer of a parameter that a model contracts by itself, in `model.op_quant.weights`.

    The parameter stays where it is; the site knows its path, and the Variable once a walk of the model has bound it.

    Attributes:
        weight_quant: the proxy; None once the parameter is frozen.
        weight_path: the parameter's path in the model.
        shape: its shape, with the axes of a stack.
        parameter: the parameter, in a copy for an assembly.
        master: the float parameter, if it was kept when its low-bit numbers took its place.
        stacked, shared, free, summed, rounded_again: as planned.

    Args:
        variable: the parameter.
        planned: what is known of its contractions.
    """

    weight_quant = WEIGHT
    weight_name = "parameter"
    parameter: nnx.Variable[jax.Array] | None = None
    bias = None
    input_quant = None
    master: nnx.Variable[jax.Array] | None = None

    def __init__(self, variable: nnx.Variable[jax.Array], planned: PlannedParameter) -> None:
        self.weight_path, self.shape = planned.path, tuple(variable.shape)
        self.stacked, self.shared, self.free = planned.stacked, planned.shared, planned.free
        self.summed, self.rounded_again = planned.summed, planned.rounded_again
        self.weight_ndim = len(self.shape) - planned.stacked
        self.bind(variable)

    def bind(self, variable: nnx.Variable[jax.Array]) -> None:
        """Note which Variable the parameter is."""
        object.__setattr__(self, "_bound", variable)

    @property
    def weight(self) -> nnx.Variable[jax.Array]:
        """The parameter.

        Raises:
            ValueError: no walk of this copy of the model has found it yet.
        """
        variable = getattr(self, "_bound", None) if self.parameter is None else self.parameter
        if variable is None:
            raise ValueError(
                f"the site of {'.'.join(map(str, self.weight_path))} belongs to a copy of a model and does not know "
                "the copy's parameter yet.\n  cure: jqinject.reassemble(model), which finds it by walking the model"
            )
        return variable

    def input_format(self) -> None:
        """Not known: several contractions may read the parameter."""

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Of the parameter, with the axes of a stack; within `vmap` over the stack without them."""
        return self.shape if self.parameter is None else tuple(self.parameter.shape)

    @property
    def axes(self) -> OperandAxes:
        """The axes of one weight, as a scheme's quantizers of operands ask for them."""
        shape = self.weight_shape
        return OperandAxes(shape[len(shape) - self.weight_ndim :], self.shared, self.free)

    output_channel_dim: int | tuple[int, ...] = attribute(
        "axes.channel_dim", "What no contraction sums over."
    )
    summed_axes: tuple[int, ...] = attribute("summed", "What every contraction sums over is stored last.")

    def axes_of_sums(self) -> None:
        """No sums are stored."""

    def beside_weight(self) -> Self:
        """A copy that holds the weight, for as long as an assembly takes."""
        twin = copy.copy(self)
        twin.parameter = self.weight
        return twin
