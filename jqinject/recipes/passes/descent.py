"""Passes that descend on the error of the quantized model's outputs: `LearnedRotation` and `TweakNorms`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jqinject.model.walk import ModelIndex
from jqinject.recipes.passes.float_change import FloatChange
from jqinject.recipes.passes.rotate import turned
from jqinject.recipes.passes.sensitivities import outputs_of
from jqinject.recipes.solvers.solver import at_least, check_arguments
from jqinject.recipes.stream.flat_program import LeftOut
from jqinject.recipes.transforms.regions import is_gain
from jqinject.recipes.transforms.turning import TurnedRegion, turned_regions
from jqinject.recipes.work import Work

T = TypeVar("T")
Distance = Callable[[list[jax.Array], list[jax.Array]], jax.Array]


class _Batch(NamedTuple):
    """One batch: its arrays, what the float model makes of them, and the compiled error and gradient."""

    error: Callable[..., jax.Array]
    gradient: Callable[..., Any]
    arrays: Sequence[jax.Array]
    floats: list[jax.Array]


class BestOfDescent(NamedTuple, Generic[T]):
    """The end of a descent.

    Attributes:
        best: with the least error over all batches.
        before, after: the error at the start, and of the best.
        steps: how many were taken until the best.
    """

    best: T
    before: float
    after: float
    steps: int


class BatchErrors(Generic[T]):
    """How far the outputs of a quantized model are from the float model's; compiled once for calls of one kind.

    Args:
        work: with the float model and the data.
        quantized: the quantized model.
        values: from what is learned to parameters of the quantized model, by path as text.
        distance: from its outputs and the float model's to a number.
    """

    def __init__(
        self,
        work: Work,
        quantized: nnx.Module,
        values: Callable[[T], Mapping[str, jax.Array]],
        distance: Distance,
    ) -> None:
        compiled: dict[Hashable, tuple[Any, Any, Any]] = {}
        self._batches: list[_Batch] = []
        for call in work.calls:
            if call.frame not in compiled:
                outputs, floats = (outputs_of(model, call) for model in (quantized, work.model))
                error = partial(_error, outputs, values, distance)
                compiled[call.frame] = jax.jit(error), jax.jit(jax.grad(error)), jax.jit(partial(floats, {}))
            error_of, gradient_of, floats_of = compiled[call.frame]
            self._batches.append(_Batch(error_of, gradient_of, call.arrays, floats_of(call.arrays)))

    def error(self, learned: T) -> float:
        """The mean over all batches."""
        errors = [float(batch.error(learned, batch.arrays, batch.floats)) for batch in self._batches]
        return sum(errors) / len(errors)

    def descend(self, start: T, step: Callable[[int, T, T], T], steps: Iterable[int]) -> BestOfDescent[T]:
        """Take steps, each by the gradient of the error of one batch: they come in turn.

        Args:
            start: where it begins.
            step: from the number of a step, what is learned and its gradient to what is learned after it.
            steps: the numbers.
        """
        learned = best = start
        before = least = self.error(start)
        taken = 0
        for number in steps:
            batch = self._batches[number % len(self._batches)]
            learned = step(number, learned, batch.gradient(learned, batch.arrays, batch.floats))
            error = self.error(learned)
            if error < least:
                best, least, taken = learned, error, number + 1
        return BestOfDescent(best, before, least, taken)


def _error(
    outputs: Callable[..., list[jax.Array]],
    values: Callable[[T], Mapping[str, jax.Array]],
    distance: Distance,
    learned: T,
    arrays: Sequence[jax.Array],
    floats: list[jax.Array],
) -> jax.Array:
    return distance(outputs(values(learned), arrays), floats)


KINDS = ("R1", "R2")


@dataclass(frozen=True)
class Learned:
    """Rotations that were learned, and what they changed.

    Attributes:
        kinds: of each.
        sizes: of each: how many channels it mixes.
        before, after: the relative squared error of the quantized model's outputs.
        steps: how many were taken until the best.
    """

    kinds: tuple[str, ...]
    sizes: tuple[int, ...]
    before: float
    after: float
    steps: int

    def __str__(self) -> str:
        shown = ", ".join(f"{kind} of {size}" for kind, size in zip(self.kinds, self.sizes, strict=True))
        return f"{shown}: error of the outputs from {self.before:.3g} to {self.after:.3g}, after {self.steps} steps"


@dataclass(frozen=True)
class NothingToRotate:
    """No rotation was found in the program."""

    def __str__(self) -> str:
        return "no residual stream and no values between two weights can be rotated"


@dataclass(frozen=True)
class LearnedRotation:
    """Turns channels so that the quantized model's outputs are nearest to the float model's.

    What turns together is found as by `Rotate`: R1 the residual stream, R2 values between two weights. Each has an
    orthogonal matrix, which begins with the identity: with `Rotate` before, with its rotation. A step goes against the
    gradient of `|y_q - y|^2 / |y|^2` along the orthogonal matrices (Cayley's transform), straight through the rounding.
    The best matrices by that error over all batches are folded into the weights. The float model's function stays, and
    is checked.

    Args:
        kinds: which rotations are learned.
        steps: of the descent; a batch each, in turn.
        learning_rate: radians by which no direction turns further in a step; it falls to 0 linearly.

    Raises:
        ValueError: an unknown kind, or numbers that make no sense; or, when applied, the float model's outputs move.

    Source: Liu et al., "SpinQuant: LLM Quantization with Learned Rotations", 2024.

    Differs from SpinQuant: the error of the outputs is least, not the loss of the next token, so no labels are needed;
    a step is as long as `learning_rate` says, whatever the gradient's size.

    Example:
        >>> LearnedRotation(steps=10)
        LearnedRotation(kinds=('R1', 'R2'), steps=10, learning_rate=0.05)
    """

    kinds: Sequence[str] = KINDS
    steps: int = 50
    learning_rate: float = 0.05

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", tuple(self.kinds))
        unknown = [kind for kind in self.kinds if kind not in KINDS]
        if unknown or not self.kinds:
            raise ValueError(f"LearnedRotation: kinds are {self.kinds!r}.\n  cure: of {', '.join(KINDS)}")
        rate = (0 < self.learning_rate < 1, "within 0 and 1", 0.05)
        check_arguments(self, steps=at_least(self.steps, 1, 50), learning_rate=rate)

    def __call__(self, work: Work) -> list[Learned | NothingToRotate | LeftOut]:
        """See `Pass`."""
        change = FloatChange(work, repr(self))
        change.run()
        regions = [
            (site.name, region)
            for site, region in turned_regions(change.flat)
            if not isinstance(region, str) and region.kind in self.kinds and region.block > 1
        ]
        if not regions:
            return [NothingToRotate()]
        rotations = _Rotations([region for _, region in regions])
        values = {path: change.values[path] for path in rotations.paths}
        errors = BatchErrors[Matrices](
            work, work.copied().quantized, partial(rotations.values, values), _distance
        )
        turn = jax.jit(cayley_step, static_argnums=3)

        def step(number: int, matrices: Matrices, gradients: Matrices) -> Matrices:
            rate = jnp.float32(self.learning_rate * (1 - number / self.steps))
            pairs = zip(matrices, gradients, rotations.regions, strict=True)
            return tuple(
                turn(matrix, gradient, rate, region.keeps_sums) for matrix, gradient, region in pairs
            )

        steps = work.bar(range(self.steps), "rotations")
        best, before, after, taken = errors.descend(rotations.start, step, steps)
        if taken:
            changes = {path: partial(rotations.turned, path, best) for path in rotations.paths}
            change.change(regions[0][0], changes)
        kinds, sizes = zip(*((region.kind, region.block) for _, region in regions), strict=True)
        return [Learned(kinds, sizes, before, after, taken), *change.finish()]


Matrices = tuple[jax.Array, ...]


class _Rotations:
    """What some matrices do to the parameters of a model.

    Args:
        regions: what each matrix turns.

    Attributes:
        paths: of the parameters.
        start: the identity.
    """

    def __init__(self, regions: Sequence[TurnedRegion]) -> None:
        self.regions = regions
        self.paths = tuple(dict.fromkeys(path for region in regions for path in region.parameters))
        self.start: Matrices = tuple(jnp.eye(region.block, dtype=jnp.float32) for region in regions)

    def values(self, values: Mapping[str, jax.Array], matrices: Matrices) -> dict[str, jax.Array]:
        """Parameters turned by matrices, float32, by path as text."""
        return {
            path: self.turned(path, matrices, value.astype(jnp.float32)) for path, value in values.items()
        }

    def turned(self, path: str, matrices: Matrices, value: jax.Array) -> jax.Array:
        """One parameter turned by matrices."""
        with jax.default_matmul_precision("highest"):
            for matrix, region in zip(matrices, self.regions, strict=True):
                if path in region.parameters:
                    axis = region.parameters[path]
                    value = turned(value, transform=lambda x, m=matrix: x @ m, axis=axis, block=region.block)
        return value


def _distance(outputs: list[jax.Array], floats: list[jax.Array]) -> jax.Array:
    """The squared difference of outputs, relative to their squares."""
    pairs = zip(outputs, floats, strict=True)
    difference = sum((jnp.square(a - b).sum() for a, b in pairs), jnp.float32(0))
    size = sum((jnp.square(b).sum() for b in floats), jnp.float32(0))
    return difference / jnp.where(size > 0, size, 1.0)


def cayley_step(matrix: jax.Array, gradient: jax.Array, rate: jax.Array, keeps_sums: bool) -> jax.Array:
    """An orthogonal matrix after a step against a gradient: `(1 + W)^-1 (1 - W) R`, with `W` skew.

    `W = rate / 2 * A / |A|`, `A = G R^T - R G^T`, and `|A|` the largest of the sums of its rows' magnitudes, which no
    eigenvalue exceeds; so no direction turns by more than `rate`, in radians.

    Args:
        matrix: `R`, float32.
        gradient: `G`, of its shape.
        rate: see above.
        keeps_sums: leave the vector of equal numbers where it is.

    Example:
        >>> turned = cayley_step(jnp.eye(2), jnp.array([[0.0, 1.0], [0.0, 0.0]]), jnp.float32(0.1), False)
        >>> bool(jnp.allclose(turned.T @ turned, jnp.eye(2), atol=1e-6)), bool(turned[0, 1] < 0)
        (True, True)
    """
    with jax.default_matmul_precision("highest"):
        skew = gradient @ matrix.T
        skew = skew - skew.T
        if keeps_sums:
            skew = skew - skew.mean(axis=0, keepdims=True)
            skew = skew - skew.mean(axis=1, keepdims=True)
        size = jnp.abs(skew).sum(axis=1).max()
        skew = skew * (rate / 2 / jnp.where(size > 0, size, 1.0))
        eye = jnp.eye(matrix.shape[0], dtype=matrix.dtype)
        moved = jnp.linalg.solve(eye + skew, (eye - skew) @ matrix)
        # Rounding is taken back: one step of Newton's towards the nearest orthogonal matrix.
        return moved @ (1.5 * eye - 0.5 * (moved.T @ moved))


@dataclass(frozen=True)
class Tweaked:
    """Gains that were adjusted.

    Attributes:
        paths: of the gains.
        before, after: how far the channels of the outputs were from the float model's.
        steps: how many were taken until the best.
    """

    paths: tuple[str, ...]
    before: float
    after: float
    steps: int

    def __str__(self) -> str:
        moved = f"distance of the outputs' channels from {self.before:.3g} to {self.after:.3g}"
        return f"{', '.join(self.paths) or 'no gains'}: {moved}, after {self.steps} steps"


@dataclass(frozen=True)
class TweakNorms:
    """Adjusts the gains of norms in the quantized model until the channels of its outputs have their distribution back.

    The distance is `mean |m_q - m| + mean |v_q - v|`, by the mean `m` and the variance `v` of each channel (the last
    axis of an output) over a batch. Steps are Adam's, a batch each in turn; the gains with the least distance over all
    batches are kept. Gains are found from the program: parameters of one axis, without a quantizer, that values are
    multiplied by. It belongs at the end of a recipe: passes after it run the data through the gains as they were.

    Args:
        steps: of the descent.
        learning_rate: of Adam, relative to the largest magnitude of each gain.

    Raises:
        ValueError: numbers that make no sense.

    Source: Li et al., "Norm Tweaking: High-performance Low-bit Quantization of Large Language Models", 2023.

    Differs from the paper: the outputs of the model are compared, not those of each block; all gains are adjusted
    together.

    Example:
        >>> TweakNorms(steps=10)
        TweakNorms(steps=10, learning_rate=0.001)
    """

    steps: int = 50
    learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        rate = (self.learning_rate > 0, "above 0", 0.001)
        check_arguments(self, steps=at_least(self.steps, 1, 50), learning_rate=rate)

    def __call__(self, work: Work) -> list[Tweaked]:
        """See `Pass`."""
        variables = ModelIndex(work.quantized).by_name
        quantized = work.parameters()
        paths = tuple(path for path in gains_of(work) if path in variables and path not in quantized)
        if not paths:
            return [Tweaked((), 0.0, 0.0, 0)]
        start = {path: jnp.asarray(variables[path].get_value()) for path in paths}
        sizes = {path: jnp.maximum(jnp.abs(x.astype(jnp.float32)).max(), 1e-6) for path, x in start.items()}

        def gains(moved: Gains) -> Gains:
            return {
                path: (value.astype(jnp.float32) + sizes[path] * moved[path]).astype(value.dtype)
                for path, value in start.items()
            }

        errors = BatchErrors[Gains](work, work.quantized, gains, _apart)
        origin = {path: jnp.zeros(value.shape, jnp.float32) for path, value in start.items()}
        optimizer = optax.adam(self.learning_rate)
        state = optimizer.init(origin)

        def step(number: int, moved: Gains, gradients: Gains) -> Gains:
            nonlocal state
            with jax.numpy_dtype_promotion("standard"):  # optax raises floats to an integer power
                updates, state = optimizer.update(gradients, state)
            return jax.tree.map(jnp.add, moved, updates)

        steps = work.bar(range(self.steps), "norms")
        best, before, after, taken = errors.descend(origin, step, steps)
        for path, value in gains(best).items():
            variables[path].set_value(value)
        return [Tweaked(paths, before, after, taken)]


Gains = dict[str, jax.Array]


def gains_of(work: Work) -> list[str]:
    """The paths of parameters of one axis that values of the float model's program are multiplied by."""
    flat = work.float_stream(work.calls[:1]).flat
    vectors = {slot: path for slot, path in flat.parameters.items() if len(flat.shapes[slot]) == 1}
    return [path for slot, path in vectors.items() if is_gain(flat, slot)]


def _moments(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean and variance of each channel."""
    rows = x.reshape(-1, x.shape[-1] if x.ndim else 1)
    return rows.mean(axis=0), rows.var(axis=0)


def _apart(outputs: list[jax.Array], floats: list[jax.Array]) -> jax.Array:
    """How far the moments of outputs are from each other."""
    pairs = (zip(_moments(x), _moments(y), strict=True) for x, y in zip(outputs, floats, strict=True))
    return sum((jnp.abs(a - b).mean() for pair in pairs for a, b in pair), jnp.float32(0))
