"""The policy of the interpreter: which operations are quantized, with which quantizers, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from jqinject.dot.schemes.scheme import SchemeLike
from jqinject.dot.tensors.choice import ContractionKind
from jqinject.program.operations import Operation
from jqinject.program.tracked_value import Evaluate, Path, Tracked

#: The attribute of a model that holds the quantizers of its program.
HELD = "op_quant"


def dotted(path: Path) -> str:
    """A parameter's path as text, by which its quantizer is held."""
    return ".".join(map(str, path))


def listed(names: Sequence[str], count: int = 8) -> str:
    """Return the first of some names as text, and how many more there are.

    Example:
        >>> listed(["a", "b", "c"], 2)
        'a, b and 1 more'
    """
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")


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
    scheme: SchemeLike | None = None
    rounds_again: bool = False
    share: bool = False


@dataclass(frozen=True)
class Site:
    """One place where a tensor is quantized.

    Attributes:
        name: unique in the model: path of the module, operation, its number there, and which operand. That of a cache:
            the argument's name and the keys below it, `cache.layer_0.k`; or the path of a Variable of the model.
        quantizer: the injector.
        overrides: names that it redeclares here.
        is_weight: whether the tensor is a weight.
        shape: of the tensor; of a cache, of what is written into it.
        weight_path: a weight's path in the model.
        contraction: the primitive that a scheme contracts by, if the site is a whole contraction. `is_weight` then says
            whether one operand is a weight that comes quantized, and `weight_path` is that of the weight.
        cache_ndim: of the cache that the tensor is written into: with the leading axes over which a loop runs, which
            `shape` has not; 0 for any others.
        rows: the axes that a contraction sums over, which share one scale; empty for the quantizer's own axes.
        transform_axes: the axes that the transform before the quantizer takes; empty without one.
        is_transformed: whether the tensor has been through that transform already, as it comes from a cache that keeps
            it so.
        stack: the lengths of the loops over stacked layers around it; each step has a state of its own.
        is_stored: whether the tensor is written into a cache in low bits, which stores it as it is quantized.
        mesh_axes: the axes of the mesh over which the `shard_map`s around it map; its range is that of all devices.
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
    transform_axes: tuple[int, ...] = ()
    is_transformed: bool = False
    stack: tuple[int, ...] = ()
    is_stored: bool = False
    mesh_axes: tuple[str, ...] = ()
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


class Policy:
    """The questions that the interpreter asks; these answers leave everything as it is.

    Attributes:
        delayed: whether the operation that takes an output quantizes it, so that operations in between can be fused.
        follows_parameters: whether parameters are quantized in their own shape, and followed to where they are
            contracted.
        flattens_weights: whether weights with several output axes are contracted with one.
        constants_now: whether values that depend on no input are computed while a call is traced.
    """

    delayed = False
    follows_parameters = False
    flattens_weights = False
    constants_now = False

    def is_leaf(self, module: object) -> bool:
        """Whether a module is not looked into."""
        return False

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

    def cache_quantizer(self, path: str, cache: str) -> object:
        """The quantizer of what is written into a cache; None leaves it float.

        Args:
            path: of the module that writes.
            cache: the name of the array: `cache.layer_0.k` in the argument `cache`, or a Variable's path.
        """

    def arithmetic(self, name: str, operands: Sequence[Tracked], evaluate: Evaluate) -> jax.Array:
        """Return the result of an arithmetic operation, by `evaluate` unless it is written in another way."""
        (value,) = evaluate([x.array for x in operands])
        return value

    def unknown(self, path: str, name: str) -> None:
        """An operation that is not in the table changed an activation; raises if that is an error."""

    def not_an_activation(self, path: str, what: str) -> None:
        """A tensor was expected to depend on the model's inputs and does not; raises if that is an error."""

    def channel_axes(self, summed: tuple[int, ...], ndim: int, is_weight: bool) -> tuple[int, ...]:
        """The axes of a contraction's operand that have a range for each index."""
        return other_axes(summed, ndim) if is_weight else ()

    def model_input(self, x: Tracked) -> Tracked:
        """An input of the model."""
        return x

    def final_output(self, run: Any, x: Tracked, index: int) -> Tracked:
        """The model's output number `index`."""
        return x


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
        name: of the method's own.
        sources: for each operand of its equation, the names of the last such places that the operand comes from.
    """

    path: str
    operation: str
    read: Path
    name: str
    sources: tuple[frozenset[str], ...]


@dataclass
class FoundSites:
    """What a program, or a call of a model, quantizes.

    Attributes:
        sites: name -> site of a tensor.
        uses: where parameters are contracted or looked up.
        products: contractions of two activations.
        adapted: the path of a parameter and the name of a contraction that its adapter takes part in, or of a look-up
            whose rows are then contracted.
        same: name of a site of one method -> its name in the program of an earlier one, of which it is a part.
        occurrences: operations and layers, in order.
        own_rules: names of contractions whose backward pass a rule quantizes, inside a function with a derivative of
            its own, which takes its place.
    """

    sites: dict[str, Site] = field(default_factory=dict)
    uses: list[WeightUse] = field(default_factory=list)
    products: list[ActivationProduct] = field(default_factory=list)
    adapted: set[tuple[Path, str]] = field(default_factory=set)
    same: dict[str, str] = field(default_factory=dict)
    occurrences: list[Occurrence] = field(default_factory=list)
    own_rules: set[str] = field(default_factory=set)

    @property
    def same_names(self) -> tuple[tuple[str, str], ...]:
        """The items of `same`, in order."""
        return tuple(sorted(self.same.items()))

    @property
    def stacks(self) -> tuple[tuple[str, int], ...]:
        """Name of each tensor in a loop over stacked layers, and the number of leading axes of its state."""
        return tuple(sorted((name, len(site.stack)) for name, site in self.sites.items() if site.stack))

    def adopt(self, part: FoundSites) -> None:
        """Add those of a part, or of another call."""
        self.sites |= part.sites
        self.uses += part.uses
        self.products += part.products
        self.adapted |= part.adapted
        self.occurrences += part.occurrences
        self.own_rules |= part.own_rules
