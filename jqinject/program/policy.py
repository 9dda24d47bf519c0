"""The policy of the interpreter: which operations are quantized, with which quantizers, and when."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, Protocol

from jqinject.program.operations import Operation
from jqinject.program.tracked_value import Tracked


@dataclass(frozen=True)
class Choice:
    """The quantizers of one operation: injectors, or None.

    Attributes:
        weight: of an operand that is a weight.
        inputs: of operands that depend on the model's inputs.
        output: of the output.
        dynamic: whether `inputs` takes its range from the tensor itself, only for contractions with a weight.
    """

    weight: Any = None
    inputs: Any = None
    output: Any = None
    dynamic: bool = False


@dataclass(frozen=True)
class Site:
    """One place where a tensor is quantized.

    Attributes:
        name: unique in the model: path of the module, operation, its number there, and which operand.
        quantizer: the injector.
        overrides: names that it redeclares here.
        is_weight: whether the tensor is a weight.
        shape: of the tensor.
        weight_path: a weight's path in the model.
    """

    name: str
    quantizer: Any
    overrides: dict[str, Any] = field(default_factory=dict, compare=False)
    is_weight: bool = False
    shape: tuple[int, ...] = ()
    weight_path: tuple[Any, ...] = ()


class Policy(Protocol):
    """The questions that the interpreter asks."""

    @property
    @abstractmethod
    def delayed(self) -> bool:
        """Whether the operation that takes an output quantizes it, so that operations in between can be fused."""

    @property
    @abstractmethod
    def leaf_modules(self) -> tuple[type, ...]:
        """Classes of modules that are not looked into."""

    @property
    @abstractmethod
    def flattens_weights(self) -> bool:
        """Whether weights with several output axes are contracted with one."""

    @abstractmethod
    def choose(self, path: str, operation: Operation) -> Choice | None:
        """The quantizers of an operation in the module at `path`; None leaves it alone."""

    @abstractmethod
    def unknown(self, path: str, name: str) -> None:
        """An operation that is not in the table changed an activation; raises if that is an error."""

    @abstractmethod
    def not_an_activation(self, path: str, what: str) -> None:
        """A tensor was expected to depend on the model's inputs and does not; raises if that is an error."""

    @abstractmethod
    def channel_axes(self, summed: tuple[int, ...], ndim: int, is_weight: bool, /) -> tuple[int, ...]:
        """The axes of a contraction's operand that have a range for each index."""

    @abstractmethod
    def model_input(self, x: Tracked) -> Tracked:
        """An input of the model."""

    @abstractmethod
    def final_output(self, run: Any, x: Tracked, index: int) -> Tracked:
        """The model's output number `index`."""


def other_axes(axes: tuple[int, ...], ndim: int) -> tuple[int, ...]:
    """The axes that are not among `axes`."""
    return tuple(axis for axis in range(ndim) if axis not in axes)


def site_of(x: Tracked, name: str, quantizer: Any, overrides: dict[str, Any], shape: tuple[int, ...]) -> Site:
    """The site where `x` is quantized."""
    return Site(name, quantizer, overrides, x.is_weight, shape, x.weight_path)
