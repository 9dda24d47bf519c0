"""Bytes of a training step: parameters, optimizer states, and what each site saves for the backward pass."""

import itertools
import math
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jqinject.core import LostStateWarning
from jqinject.dot import FrozenParam
from jqinject.dot.schemes.quantized_op import QuantizedOp
from jqinject.model.inspect.observed_runs import ObservedRuns, Observer
from jqinject.model.walk import ModelIndex, bytes_of
from jqinject.optim import LowBitMoment
from jqinject.program import Call, OpQuantizers, dotted, mark_modules, name_in_scope, path_in, weight_in
from jqinject.program.jaxpr import LAYOUT, Body, Equation

# An array that one of these makes is stored nowhere if what it was made of is.
VIEWS = LAYOUT | {"copy", "name"}


@dataclass(frozen=True, eq=False)
class _Source:
    """The array that an array is a view of, unless that is a constant of the program.

    Attributes:
        size: bytes.
        variable: if it is a variable of the model, whether that is a weight.
    """

    size: int
    variable: bool | None = None


def _reads(forward: Body, backward: Body, variables: Sequence[bool]) -> Iterator[tuple[str, bool, int]]:
    """What each site reads of the forward pass: the site, whether the array is a weight in its place, and its bytes.

    Args:
        forward: a program that returns the residuals.
        backward: a program whose first inputs they are.
        variables: for each of the first inputs of the forward program, which are the model's variables, whether it is
            a weight.
    """
    readers = _readers(backward.used())
    types = itertools.zip_longest(forward.inputs, variables)
    sources = forward.run(
        [_Source(bytes_of(x), variable) for x, variable in types], _viewed, lambda value: None
    )
    counted: set[_Source] = set()
    for place, source in enumerate(sources):
        if source is not None and source not in counted and place in readers:
            counted.add(source)
            if source.variable is not False:
                yield readers[place], source.variable is True, source.size


def _viewed(eqn: Equation, inputs: list[_Source | None]) -> list[_Source | None]:
    """The outputs of an operation: new arrays, unless it is a view, or a call that returns an input."""
    operands = [inputs[place] for place in eqn.variables]
    if not operands:
        return [None] * len(eqn.outputs)
    if eqn.name in VIEWS:
        return [operands[0]] * len(eqn.outputs)
    arrays: list[_Source | None] = [_Source(bytes_of(x)) for x in eqn.outputs]
    if eqn.call is None or eqn.name == "remat2":
        return arrays
    inside = eqn.call.run(inputs, _viewed, lambda value: None)
    return [x if x is None or x in inputs else new for x, new in zip(inside, arrays, strict=True)]


def _readers(body: Body) -> dict[int, str]:
    """The inputs of a program that it reads -> the innermost site of the first operation that does."""
    sites: dict[int, str] = {}

    def read(eqn: Equation, inputs: list[int | None]) -> list[int | None]:
        inside: dict[int, str] = {}  # by operand
        for part in eqn.bodies:
            # Operands that the part does not have come first, or others that it has.
            ahead = len(inputs) - len(part.inputs)
            inside = {place + ahead: site for place, site in _readers(part).items() if site} | inside
        own = weight_in(eqn.scopes) or path_in(eqn.scopes) or ""
        for operand, place in enumerate(inputs):
            if place is not None:
                sites[place] = sites.get(place) or inside.get(operand, own)
        return [None] * len(eqn.outputs)

    returned = body.run(range(len(body.inputs)), read, lambda value: None)
    return dict.fromkeys((place for place in returned if place is not None), "") | sites


FLOAT32 = 4
State = nnx.State[Any, Any]
Optimizer = nnx.Optimizer[Any] | optax.GradientTransformation
LEAVES = (OpQuantizers, QuantizedOp)


@dataclass(frozen=True)
class SiteResiduals:
    """What one site keeps from the forward pass for the backward pass, in bytes.

    Attributes:
        site: path of the innermost module, or of the parameter that the model contracts by itself, that reads it in the
            backward pass; an array that several read counts at the first. "" for the model itself.
        kept: arrays that exist for the backward pass alone; of a quantized contraction payloads and scales.
        in_place: variables of the model (a float weight) that the backward pass reads where they are.
        float_kept: `kept` with every quantizer off; None if weights are frozen, whose float values are gone.
        float_in_place: `in_place` with every quantizer off; None likewise.
    """

    site: str
    kept: int
    in_place: int
    float_kept: int | None = None
    float_in_place: int | None = None

    @property
    def ratio(self) -> float | None:
        """`(kept + in_place) / (float_kept + float_in_place)`: of operands in 8 bits about 0.25 of float32's."""
        if self.float_kept is None or self.float_in_place is None:
            return None
        count, in_float = self.kept + self.in_place, self.float_kept + self.float_in_place
        return count / in_float if in_float else math.inf if count else 1.0

    def __str__(self) -> str:
        if self.float_kept is None:
            return f"{self.kept:,}"
        return f"{self.kept:,} ({self.float_kept:,} in float; {self.ratio:.3f} of what float reads)"


@dataclass(frozen=True)
class TrainingBytes:
    """Bytes that a training step holds between its forward and its backward pass.

    Sizes are those of the traced program: nothing is run, and what a compiler merges or computes again is not known.

    Attributes:
        parameters: the variables that are trained; their gradients take as much.
        others: all other variables: frozen weights, statistics.
        optimizer: the optimizer's states.
        float_optimizer: these with moments in float32 instead of low bits.
        residuals: an entry for each site that keeps something, in the order of the backward pass.

    Example:
        >>> import optax
        >>> from jqinject import report
        >>> from jqinject.nn import QuantLinear
        >>> from jqinject.quant import Fp8CurrentTraining
        >>> layer = QuantLinear(64, 64, use_bias=False, scheme=Fp8CurrentTraining, rngs=nnx.Rngs(0))
        >>> found = report(layer, jnp.ones((32, 64)), optimizer=optax.adam(1e-3)).training
        >>> found.parameters, found.optimizer
        (16384, 32772)
        >>> found.kept, found.float_kept, round(found.ratio, 2)  # x, of which 8 bits are a byte a number; and its scale
        (2052, 8192, 0.25)
    """

    parameters: int
    others: int
    optimizer: int
    float_optimizer: int
    residuals: tuple[SiteResiduals, ...]

    @property
    def total(self) -> SiteResiduals:
        """The sums over all sites."""
        rows = [(0, 0, 0, 0), *(astuple(row)[1:] for row in self.residuals)]
        sums: list[Any] = [None if None in column else sum(column) for column in zip(*rows, strict=True)]
        return SiteResiduals("", *sums)

    @property
    def kept(self) -> int:
        """Of all sites."""
        return self.total.kept

    @property
    def float_kept(self) -> int | None:
        """Of all sites; None if weights are frozen."""
        return self.total.float_kept

    @property
    def ratio(self) -> float | None:
        """See `SiteResiduals.ratio`, of all sites."""
        return self.total.ratio

    @property
    def lines(self) -> tuple[str, ...]:
        """The bytes as text: a line of totals, and one for each site."""
        return (
            f"training: parameters {self.parameters:,} bytes, other variables {self.others:,}, optimizer "
            f"{self.optimizer:,} ({self.float_optimizer:,} in float), kept for the backward pass {self.total}",
            *(f"kept by {row.site or 'the model itself'}: {row}" for row in self.residuals),
        )


def training_bytes(
    model: nnx.Module, call: Call, optimizer: Optimizer, sites: Mapping[str, str]
) -> TrainingBytes:
    """Trace a training step, and count its bytes.

    Args:
        model: an NNX module; it is not changed.
        call: the forward pass, whose floating-point outputs are differentiated.
        optimizer: an `nnx.Optimizer`, or an optax transformation.
        sites: see `ObservedRuns`.

    Raises:
        TypeError: `optimizer` is neither.
        ValueError: there is nothing to train, or no output to differentiate.
    """
    if isinstance(optimizer, type) or not isinstance(optimizer, nnx.Optimizer | optax.GradientTransformation):
        what = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
        raise TypeError(
            f"report takes optimizer=nnx.Optimizer(model, tx, wrt=nnx.Param), or an optax transformation; got {what}.\n"
            "  cure: optimizer=optax.adam(1e-3)"
        )
    # Without an nnx.Optimizer adapters are trained, where there are some.
    wrt = nnx.LoRAParam if jax.tree.leaves(nnx.state(model, nnx.LoRAParam)) else nnx.Param
    wrt = optimizer.wrt if isinstance(optimizer, nnx.Optimizer) else wrt
    trained, others = nnx.state(model, wrt, ..., graph=True)
    if not jax.tree.leaves(trained):
        kind = wrt.__name__ if isinstance(wrt, type) else wrt
        raise ValueError(
            "report(optimizer=...) counts the bytes of training, and the model has no variable that is trained "
            f"({kind}).\n  cure: report(model, ...) without optimizer; or train before freeze(model)"
        )
    copy = nnx.clone(model, graph=True)
    copy.train()
    have_floats = not ModelIndex(copy).frozen_parameters
    modules = {dotted(path): node for path, node in nnx.iter_modules(copy, graph=True)}
    mark_modules(copy)
    runs = ObservedRuns(copy, call, sites)
    # What these hold is no site of its own: quantizers, their parts, the op of a layer.
    leaves = [path for path, node in modules.items() if path in runs.nodes or isinstance(node, LEAVES)]
    names = {name_in_scope(place): site for place, site in sites.items()}

    def site_of(place: str) -> str:
        """The outermost leaf that a module is, or is in; its own path outside of leaves."""
        path = names.get(place, place)
        return min(
            (leaf for leaf in leaves if not leaf or f"{path}.".startswith(f"{leaf}.")), default=path, key=len
        )

    counted: list[Counter[tuple[str, bool]]] = []
    for observer in (None, Observer(runs, False)) if have_floats else (None,):
        counted.append(Counter())
        for place, in_place, size in _residuals(runs, observer, wrt):
            counted[-1][site_of(place), in_place] += size
    keeping = dict.fromkeys(site for counts in counted for site, _ in counts)
    rows = (
        SiteResiduals(site, *(counts[site, in_place] for counts in counted for in_place in (False, True)))
        for site in keeping
    )
    return TrainingBytes(bytes_of(trained), bytes_of(others), *_states(optimizer, trained), tuple(rows))


def _residuals(
    runs: ObservedRuns, observer: Observer | None, wrt: nnx.filterlib.Filter
) -> Iterator[tuple[str, bool, int]]:
    """What places read of the forward pass in the backward pass; see `_reads`.

    Args:
        runs: of a marked model in training mode.
        observer: of the run; None for the model as it is.
        wrt: filter of what is trained.
    """
    chosen = nnx.filterlib.to_predicate(wrt)
    states = nnx.split_state(runs.state, lambda path, x: path[0] == 0 and chosen(path[1:], x), ...)
    outputs: list[jax.Array] = []
    trees: list[Any] = []

    def forward(trained: State, rest: State, arrays: list[jax.Array]) -> list[jax.Array]:
        def differentiated(trained: State) -> list[jax.Array]:
            # Variables of the trace that differentiates, which the model may write to.
            state = nnx.merge_state(trained, jax.tree.map(lambda x: x, rest))
            outputs = runs.outputs(state, arrays, observer)
            return [x for x in outputs if jnp.issubdtype(x.dtype, jnp.floating)]

        y, pull = jax.vjp(differentiated, trained)
        leaves, tree = jax.tree.flatten(pull)
        outputs[:], trees[:] = y, [tree]
        return leaves

    def backward(residuals: list[jax.Array], y: list[jax.Array]) -> Any:
        return jax.tree.unflatten(trees[0], residuals)(y)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LostStateWarning)  # a traced step updates nothing
        traced, residuals = jax.make_jaxpr(forward, return_shape=True)(*states, runs.arrays)
        if not outputs:
            raise ValueError(
                "report(optimizer=...) differentiates the model's outputs, and none is floating-point.\n"
                "  cure: method=lambda model, x, wanted: loss(model(x), wanted)"
            )
        types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs]
        pulled = jax.make_jaxpr(backward)(residuals, types)
    variables = [
        isinstance(variable, nnx.Param | FrozenParam)
        for variable in jax.tree.leaves(states, is_leaf=lambda x: isinstance(x, nnx.Variable))
        for _ in jax.tree.leaves(variable)
    ]
    return _reads(Body.of(traced), Body.of(pulled), variables)


def _states(optimizer: Optimizer, trained: State) -> tuple[int, int]:
    """Bytes of an optimizer's states, and with all moments in float32."""
    if isinstance(optimizer, nnx.Optimizer):
        states = nnx.as_pure(optimizer.opt_state)
    else:
        states = jax.eval_shape(optimizer.init, nnx.as_pure(trained))
    leaves = jax.tree.leaves(states, is_leaf=lambda x: isinstance(x, LowBitMoment))
    moments, total = [leaf for leaf in leaves if isinstance(leaf, LowBitMoment)], bytes_of(states)
    count = sum(leaf.size for leaf in jax.tree.leaves(trained))
    return total, total - bytes_of(moments) + FLOAT32 * count * len(moments)
