"""Bytes of a training step: parameters, optimizer states, and what each site saves for the backward pass."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jqinject.core import LostStateWarning
from jqinject.dot import FrozenParam
from jqinject.dot.schemes.quantized_op import QuantizedOp
from jqinject.model.frozen_weights import quantized_op
from jqinject.model.inspect.observed_runs import ObservedRuns
from jqinject.model.walk import ModelIndex
from jqinject.nn import QuantCheckpoint
from jqinject.nn.activations import QuantActLayer
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.optim import LowBitMoment
from jqinject.program import Call, OpQuantizers, mark_modules, name_in_scope, path_in, weight_in
from jqinject.program.jaxpr import Body, Equation

# An array that one of these makes is stored nowhere if what it was made of is.
VIEWS = frozenset(
    ("reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim", "copy", "stop_gradient", "name")
)


class Residual(NamedTuple):
    """Bytes that one site keeps, and reads in place."""

    kept: int
    in_place: int


@dataclass(frozen=True, eq=False)
class _Source:
    """The array that an array is a view of.

    Attributes:
        size: bytes.
        variable: if it is a variable of the model, whether that is a weight.
        stored: whether it is anything but a constant of the program.
    """

    size: int
    variable: bool | None = None
    stored: bool = True


def by_site(forward: Body, backward: Body, variables: Sequence[bool]) -> dict[str, Residual]:
    """What each site reads of the forward pass.

    Args:
        forward: a program that returns the residuals.
        backward: a program whose first inputs they are.
        variables: for each of the first inputs of the forward program, which are the model's variables, whether it is
            a weight.
    """
    readers = _readers(backward)
    types = itertools.zip_longest(forward.inputs, variables)
    sources = forward.run([_Source(size_of(x), variable) for x, variable in types], _viewed, _constant)
    counted: set[_Source] = set()
    residuals: dict[str, Residual] = {}
    for place, source in enumerate(sources):
        if source is None or place not in readers or source in counted or not source.stored:
            continue
        counted.add(source)
        before = residuals.get(readers[place], Residual(0, 0))
        if source.variable is None:
            residuals[readers[place]] = before._replace(kept=before.kept + source.size)
        elif source.variable:
            residuals[readers[place]] = before._replace(in_place=before.in_place + source.size)
    return residuals


def _constant(value: Any) -> _Source | None:
    """Nothing for numbers, of which arrays are made when they are needed."""
    return _Source(size_of(value), stored=False) if np.ndim(value) else None


def _viewed(eqn: Equation, inputs: list[_Source | None]) -> list[_Source | None]:
    """The outputs of an operation: new arrays, unless it is a view, or a call that returns an input."""
    operands = [inputs[place] for place in eqn.variables]
    if not operands:
        return [None] * len(eqn.outputs)
    if eqn.name in VIEWS:
        return [operands[0]] * len(eqn.outputs)
    arrays: list[_Source | None] = [_Source(size_of(x)) for x in eqn.outputs]
    if eqn.call is None or eqn.name == "remat2":
        return arrays
    inside = eqn.call.run(inputs, _viewed, _constant)
    return [x if x is None or x in inputs else new for x, new in zip(inside, arrays, strict=True)]


def _readers(backward: Body) -> dict[int, str]:
    """Inputs of a backward pass that its outputs depend on -> the site of the first operation that reads them."""
    sites: dict[int, str] = {}

    def read(eqn: Equation, inputs: list[int | None]) -> list[int | None]:
        for place in inputs:
            if place is not None:
                sites[place] = sites.get(place) or _site(eqn, [x == place for x in inputs])
        return [None] * len(eqn.outputs)

    returned = backward.used().run(range(len(backward.inputs)), read, lambda value: None)
    return {**{place: "" for place in returned if place is not None}, **sites}


def _site(eqn: Equation, reads: list[bool]) -> str:
    """The innermost site of an operation that reads an array, also in the programs within it.

    Args:
        eqn: the operation.
        reads: which of its operands are the array.
    """
    for body in eqn.bodies:
        sites: list[str] = []

        def read(inner: Equation, inputs: list[bool], sites: list[str] = sites) -> list[bool]:
            if any(inputs):
                sites.append(_site(inner, inputs))
            return [False] * len(inner.outputs)

        ahead = len(reads) - len(
            body.inputs
        )  # operands that the body does not have, or others that it has first
        body.run([False] * -ahead + reads[max(ahead, 0) :], read, lambda value: False)
        if any(sites):
            return next(filter(None, sites))
    return weight_in(eqn.scopes) or path_in(eqn.scopes) or ""


def size_of(x: Any) -> int:
    """Bytes of an array, or of a number."""
    return math.prod(x.shape) * (x.dtype.itemsize if hasattr(x, "dtype") else np.dtype(type(x)).itemsize)


FLOAT32 = 4
LEAVES = (QuantWeightLayer, QuantActLayer, QuantCheckpoint, OpQuantizers, QuantizedOp)


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
        return _ratio(self.kept + self.in_place, self.float_kept + self.float_in_place)


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
    def kept(self) -> int:
        """Of all sites."""
        return sum(row.kept for row in self.residuals)

    @property
    def float_kept(self) -> int | None:
        """Of all sites; None if weights are frozen."""
        counts = [row.float_kept for row in self.residuals if row.float_kept is not None]
        return sum(counts) if len(counts) == len(self.residuals) else None

    @property
    def ratio(self) -> float | None:
        """See `SiteResiduals.ratio`, of all sites."""
        if any(row.ratio is None for row in self.residuals):
            return None
        read = sum(row.kept + row.in_place for row in self.residuals)
        return _ratio(read, sum((row.float_kept or 0) + (row.float_in_place or 0) for row in self.residuals))

    @property
    def lines(self) -> tuple[str, ...]:
        """The bytes as text: a line of totals, and one for each site."""
        return (
            f"training: parameters {self.parameters:,} bytes, other variables {self.others:,}, optimizer "
            f"{self.optimizer:,} ({self.float_optimizer:,} in float), kept for the backward pass "
            f"{_beside(self.kept, self.float_kept, self.ratio)}",
            *(
                f"kept by {row.site or 'the model itself'}: {_beside(row.kept, row.float_kept, row.ratio)}"
                for row in self.residuals
            ),
        )


def _ratio(part: int, total: int) -> float:
    return part / total if total else math.inf if part else 1.0


def _beside(count: int, in_float: int | None, ratio: float | None) -> str:
    if in_float is None:
        return f"{count:,}"
    return f"{count:,} ({in_float:,} in float; {ratio:.3f} of what float reads)"


def checked_optimizer(optimizer: object) -> None:
    """Refuse what is no optimizer.

    Raises:
        TypeError: neither an `nnx.Optimizer` nor an optax transformation.
    """
    if isinstance(optimizer, type) or not isinstance(optimizer, nnx.Optimizer | optax.GradientTransformation):
        what = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
        raise TypeError(
            f"report takes optimizer=nnx.Optimizer(model, tx, wrt=nnx.Param), or an optax transformation; got {what}.\n"
            "  cure: optimizer=optax.adam(1e-3)"
        )


def training_bytes(
    model: nnx.Module, call: Call, optimizer: object, sites: Mapping[str, str]
) -> TrainingBytes:
    """Trace a training step, and count its bytes.

    Args:
        model: an NNX module; it is not changed.
        call: the forward pass, whose floating-point outputs are differentiated.
        optimizer: an `nnx.Optimizer`, or an optax transformation.
        sites: see `ObservedRuns`.

    Raises:
        ValueError: there is nothing to train, or no output to differentiate.
    """
    wrt = _trained(model, optimizer)
    trained, others = nnx.state(model, wrt, ..., graph=True)
    if not jax.tree.leaves(trained):
        raise ValueError(
            "report(optimizer=...) counts the bytes of training, and the model has no variable that is trained "
            f"({_name(wrt)}).\n  cure: report(model, ...) without optimizer; or train before freeze(model)"
        )
    states, in_float = _states(optimizer, trained)
    steps = _Steps(model, call, wrt, sites)
    quantized = steps.residuals(ObservedRuns.outputs)
    floating = steps.residuals(ObservedRuns.in_floats) if steps.have_floats else None
    rows = tuple(_row(site, quantized, floating) for site in dict.fromkeys((*quantized, *(floating or ()))))
    return TrainingBytes(_bytes(trained), _bytes(others), states, in_float, rows)


def _row(
    site: str, quantized: Mapping[str, Residual], floating: Mapping[str, Residual] | None
) -> SiteResiduals:
    residual = quantized.get(site, Residual(0, 0))
    if floating is None:
        return SiteResiduals(site, *residual)
    return SiteResiduals(site, *residual, *floating.get(site, Residual(0, 0)))


def _trained(model: nnx.Module, optimizer: object) -> Any:
    """The filter of what is trained: the optimizer's; without it adapters where there are some."""
    if isinstance(optimizer, nnx.Optimizer):
        return optimizer.wrt
    return nnx.LoRAParam if jax.tree.leaves(nnx.state(model, nnx.LoRAParam)) else nnx.Param


def _name(wrt: object) -> str:
    return wrt.__name__ if isinstance(wrt, type) else str(wrt)


def _states(optimizer: Any, trained: Any) -> tuple[int, int]:
    """Bytes of an optimizer's states, and with all moments in float32."""
    if isinstance(optimizer, nnx.Optimizer):
        states = nnx.as_pure(optimizer.opt_state)
    else:
        states = jax.eval_shape(optimizer.init, nnx.as_pure(trained))
    sizes = [leaf.size for leaf in jax.tree.leaves(trained)]
    low, moments = 0, 0
    for moment in jax.tree.leaves(states, is_leaf=_is_moment):
        if _is_moment(moment):
            low += _bytes(moment)
            moments += 1
    plain = _bytes(states) - low
    return low + plain, plain + FLOAT32 * sum(sizes) * moments


def _is_moment(x: object) -> bool:
    return isinstance(x, LowBitMoment)


def _bytes(tree: object) -> int:
    return sum(size_of(leaf) for leaf in jax.tree.leaves(tree))


class _Steps:
    """Forward and backward passes of a model, traced.

    Args:
        model: it is not changed.
        call: of it.
        wrt: filter of what is trained.
        sites: see `ObservedRuns`.

    Attributes:
        have_floats: whether the float model can be had.
    """

    def __init__(self, model: nnx.Module, call: Call, wrt: Any, sites: Mapping[str, str]) -> None:
        copy = nnx.clone(model, graph=True)
        copy.train()
        self.have_floats = not ModelIndex(copy).frozen_parameters
        leaves = (path for path, node in nnx.iter_modules(copy, graph=True) if _is_leaf(node))
        self._leaves = [".".join(map(str, path)) for path in sorted(leaves, key=len)]
        self._names = {name_in_scope(place): site for place, site in sites.items()}
        mark_modules(copy)
        self._runs = ObservedRuns(copy, call, sites)
        chosen = nnx.filterlib.to_predicate(wrt)
        self._trained, self._rest = nnx.split_state(
            self._runs.state, lambda path, x: path[0] == 0 and chosen(path[1:], x), ...
        )

    def residuals(self, run: Callable[..., list[Any]]) -> dict[str, Residual]:
        """What each site keeps.

        Args:
            run: a method of `ObservedRuns` that returns the outputs.
        """
        traces: list[Any] = []

        def forward(trained: Any, rest: Any, arrays: Any) -> Any:
            def outputs(trained: Any) -> Any:
                # Variables of the trace that differentiates, which the model may write to.
                state = nnx.merge_state(trained, jax.tree.map(lambda x: x, rest))
                return [x for x in run(self._runs, state, arrays) if jnp.issubdtype(x.dtype, jnp.floating)]

            y, pull = jax.vjp(outputs, trained)
            kept, tree = jax.tree.flatten(pull)
            traces.append((tree, y))
            return kept

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LostStateWarning)  # a traced step updates nothing
            program = Body.of(jax.make_jaxpr(forward)(self._trained, self._rest, self._runs.arrays))
            tree, y = traces[-1]
            if not y:
                raise ValueError(
                    "report(optimizer=...) differentiates the model's outputs, and none is floating-point.\n"
                    "  cure: method=lambda model, x, wanted: loss(model(x), wanted)"
                )
            count = len(program.outputs)
            backward = jax.make_jaxpr(
                lambda *arrays: jax.tree.unflatten(tree, arrays[:count])(list(arrays[count:]))
            )(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*program.outputs, *y)))
        residuals: dict[str, Residual] = {}
        for place, kept in by_site(program, Body.of(backward), self._variables()).items():
            site = self._site(self._names.get(place, place))
            before = residuals.get(site, Residual(0, 0))
            residuals[site] = Residual(before.kept + kept.kept, before.in_place + kept.in_place)
        return residuals

    def _site(self, path: str) -> str:
        """The outermost leaf that a module is, or is in; its own path outside of leaves."""
        return next((leaf for leaf in self._leaves if not leaf or f"{path}.".startswith(f"{leaf}.")), path)

    def _variables(self) -> list[bool]:
        """For each array of the model's variables, in the order of a program's inputs, whether it is a weight."""
        variables = jax.tree.leaves(
            (self._trained, self._rest), is_leaf=lambda x: isinstance(x, nnx.Variable)
        )
        return [
            isinstance(variable, nnx.Param | FrozenParam)
            for variable in variables
            for _ in jax.tree.leaves(variable)
        ]


def _is_leaf(node: object) -> bool:
    """Whether what a module holds is no site of its own: quantizers, their parts, the op of a layer."""
    return isinstance(node, LEAVES) or quantized_op(node) is not None
