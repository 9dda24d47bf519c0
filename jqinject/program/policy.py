"""The policy of the interpreter: which operations are quantized, with which quantizers, and when."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from jqinject.dot.tensors.choice import ContractionKind
from jqinject.program.jaxpr import Equation
from jqinject.program.operations import Operation
from jqinject.program.tracked_value import Path, Tracked


def dotted(path: Path) -> str:
    """A parameter's path as text, by which its quantizer is held."""
    return ".".join(map(str, path))


@dataclass(frozen=True)
class Choice:
    """The quantizers of one operation: injectors, or None.

    Attributes:
        weight: of an operand that is a weight, at this operation.
        inputs: of operands that depend on the model's inputs.
        output: of the output.
        dynamic: whether `inputs` takes its range from the tensor itself, only for contractions with a weight.
        parameter: of an operand that is a weight, in the parameter's own shape, for all operations that read it.
        lhs, rhs: of the two operands of a contraction of activations; None for `inputs`.
        grad: of the output's gradient.
        contraction: in which numbers a contraction is done, as for a layer.
        scheme: of a contraction, which then quantizes all operands, forward and backward; with `parameter`, all but
            the weight in the forward product.
        rounds_again: whether the scheme takes another version of the weight backward.
        share: whether two operands go through `inputs` together.
    """

    weight: object = None
    inputs: object = None
    output: object = None
    dynamic: bool = False
    parameter: object = None
    lhs: object = None
    rhs: object = None
    grad: object = None
    contraction: ContractionKind = "auto"
    scheme: object = None
    rounds_again: bool = False
    share: bool = False


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
        contraction: the primitive that a scheme contracts by, if the site is a whole contraction. `is_weight` then says
            whether one operand is a weight that comes quantized, and `weight_path` is that of the weight.
        cache_ndim: of the cache that the tensor is written into; 0 for any others.
        rows: the axes that a contraction sums over, which share one scale; empty for the quantizer's own axes.
        transformed: the axes that the transform before the quantizer takes; empty without one.
        turned: whether the tensor has been through that transform already: it comes from a cache that keeps it so.
        stack: the lengths of the loops over stacked layers around it; each step has a state of its own.
        equation: of a contraction by a scheme.
        weight: which of its operands is the weight; None if neither is.
    """

    name: str
    quantizer: Any
    overrides: dict[str, Any] = field(default_factory=dict, compare=False)
    is_weight: bool = False
    shape: tuple[int, ...] = ()
    weight_path: Path = ()
    contraction: str = ""
    cache_ndim: int = 0
    rows: tuple[int, ...] = ()
    transformed: tuple[int, ...] = ()
    turned: bool = False
    stack: tuple[int, ...] = ()
    equation: Any = field(default=None, compare=False, repr=False)
    weight: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class WeightUse:
    """One place where a parameter is contracted, or where rows of it are looked up.

    Attributes:
        weight_path: the parameter's path in the model.
        name: the operation's, unique in the model.
        operation: "einsum", "dot_general", "take", ...
        shape: of the parameter.
        shared: its axes along which all numbers need one scale here.
        stacked: its leading axes that a loop runs over.
        quantizer: the injector; None if no rule takes the parameter here.
        beside: name of the site that quantizes the other operand, or of the contraction by a scheme; "quantized" if it
            comes quantized from elsewhere; "" if it is float.
        equation: of the program.
        free: its axes that are axes of the contraction's output and of no other operand.
        rounds_again: whether a scheme takes another version of it backward here.
    """

    weight_path: Path
    name: str
    operation: str
    shape: tuple[int, ...]
    shared: frozenset[int]
    stacked: int
    quantizer: object = None
    beside: str = ""
    equation: Any = field(default=None, compare=False, repr=False)
    free: frozenset[int] = frozenset()
    rounds_again: bool = False


@dataclass(frozen=True)
class ActivationProduct:
    """A contraction of two activations.

    Attributes:
        name: the operation's, unique in the model.
        operation: what kind it is.
        lhs, rhs: what quantizes each operand, as `WeightUse.beside`.
        equation: of the program.
    """

    name: str
    operation: str
    lhs: str
    rhs: str
    equation: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class CacheSite:
    """A cache that a model writes, and for which a rule has a quantizer.

    Attributes:
        name: the parameter's name and the keys below it, `cache.layer_0.k`; or the path of a Variable of the model. Its
            quantizer is `op_quant.held[name]`.
        shape: of what is written there.
        stacked: its leading axes over which a loop runs, and which `shape` has not.
    """

    name: str
    shape: tuple[int, ...]
    stacked: int = 0


class Policy(Protocol):
    """The questions that the interpreter asks."""

    @property
    @abstractmethod
    def delayed(self) -> bool:
        """Whether the operation that takes an output quantizes it, so that operations in between can be fused."""

    @abstractmethod
    def is_leaf(self, module: object) -> bool:
        """Whether a module is not looked into."""

    @property
    @abstractmethod
    def follows_parameters(self) -> bool:
        """Whether parameters are quantized in their own shape, and followed to where they are contracted."""

    @property
    @abstractmethod
    def flattens_weights(self) -> bool:
        """Whether weights with several output axes are contracted with one."""

    @abstractmethod
    def choose(
        self, path: str, operation: Operation, weight_path: Path = (), name: str = ""
    ) -> Choice | None:
        """The quantizers of an operation; None leaves it alone.

        Args:
            path: of the module that it is in.
            operation: its row of the table.
            weight_path: of the parameter that it contracts or looks up; empty without one.
            name: of the operation in its method, `blocks.0.einsum1`.
        """

    @abstractmethod
    def cache_quantizer(self, path: str, cache: str) -> object:
        """The quantizer of what is written into a cache; None leaves it float.

        Args:
            path: of the module that writes.
            cache: the name of the array: `cache.layer_0.k` in the argument `cache`, or a Variable's path.
        """

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
    def final_output(self, run: object, x: Tracked, index: int) -> Tracked:
        """The model's output number `index`."""


class SummedAxes(NamedTuple):
    """What a quantizer has to know of the axes that a contraction sums over; see `Site`."""

    rows: tuple[int, ...] = ()
    transformed: tuple[int, ...] = ()
    turned: bool = False


NO_AXES = SummedAxes()


def other_axes(axes: tuple[int, ...], ndim: int) -> tuple[int, ...]:
    """The axes that are not among `axes`."""
    return tuple(axis for axis in range(ndim) if axis not in axes)


@dataclass(frozen=True)
class SiteNames:
    """The names of sites in a model, of a program of one of its methods.

    Attributes:
        prefix: what the method's own names begin with.
        same: its own name -> that of the same place in the program of an earlier method.
    """

    prefix: str = ""
    same: Mapping[str, str] = field(default_factory=dict)

    def full(self, name: str) -> str:
        """The name in the model."""
        own = self.prefix + name
        return self.same.get(own, own)


PLAIN = SiteNames()


class Occurrence(NamedTuple):
    """An operation in a program, or a call of a layer.

    Attributes:
        path: of the module.
        operation: its name; "layer" for the call of a layer.
        read: what it reads that no other place does: a parameter's path, or the layer's; empty if nothing.
        equation: of the program.
        name: of the method's own.
    """

    path: str
    operation: str
    read: Path
    equation: Equation
    name: str
