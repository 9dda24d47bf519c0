"""Passes that descend on the error of the quantized model's outputs: `LearnedRotation` and `TweakNorms`."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jqinject.model.walk import ModelIndex
from jqinject.program import Call, SplitCall, dotted
from jqinject.recipes.passes import float_change
from jqinject.recipes.solvers.solver import Checked, Expected, at_least
from jqinject.recipes.stream.flat_program import Note
from jqinject.recipes.transforms.regions import RotatedRegion, is_gain
from jqinject.recipes.transforms.rotations import rotated_regions
from jqinject.recipes.work import Work

T = TypeVar("T")
Values = dict[str, jax.Array]
Arrays = Sequence[jax.Array]
Outputs = Callable[..., list[jax.Array]]
Distance = Callable[[list[jax.Array], list[jax.Array]], jax.Array]


def outputs_of(model: nnx.Module, call: Call) -> Outputs:
    """Return a model's float outputs, float32, as a function of some parameters by path and of a call's arrays.

    Args:
        model: an NNX module.
        call: a call of it; the function's arrays are of it, by default, or of another one with the same flags.
    """
    split = SplitCall(model, call)

    def outputs(values: Values, arrays: Arrays | None = None) -> list[jax.Array]:
        state = []
        for path, variable in nnx.to_flat_state(split.state):
            value = values.get(dotted(path[1:]))
            state.append((path, variable.replace(variable.get_value() if value is None else value)))
        merged, called = split.merged(nnx.from_flat_state(state), split.arrays if arrays is None else arrays)
        leaves = jax.tree.leaves(called(merged))
        return [x.astype(jnp.float32) for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]

    return outputs


def relative_squares(differences: Sequence[jax.Array], outputs: Sequence[jax.Array]) -> jax.Array:
    """`|d|^2 / |y|^2`: the squares of differences, relative to those of outputs.

    Args:
        differences: of outputs.
        outputs: the outputs.
    """
    total, size = (
        sum((jnp.square(x).sum() for x in arrays), jnp.float32(0)) for arrays in (differences, outputs)
    )
    return total / jnp.where(size > 0, size, 1.0)


def descend(
    work: Work,
    quantized: nnx.Module,
    values: Callable[[T], Values],
    distance: Distance,
    start: T,
    step: Callable[[int, T, T], T],
    steps: Iterable[int],
    parts: Iterable[str],
    measure: str,
) -> tuple[T, Note]:
    """Take steps, each by the gradient of the error of one batch, in turn; functions are compiled once for each frame.

    Args:
        work: with the float model and the data.
        quantized: the quantized model.
        values: from what is learned to parameters of the quantized model, by path as text.
        distance: from its outputs and the float model's to a number: the error.
        start: what is learned, at the start.
        step: from the number of a step, what is learned and its gradient to what is learned after it.
        steps: the numbers.
        parts, measure: for the record.

    Returns:
        What was learned with the least error over all batches, and the record.
    """

    frames: dict[object, Call] = {call.frame: call for call in work.calls}
    outputs = {frame: outputs_of(quantized, call) for frame, call in frames.items()}
    floats = {frame: jax.jit(partial(outputs_of(work.model, call), {})) for frame, call in frames.items()}

    @partial(jax.jit, static_argnums=0)
    def error_of(frame: object, learned: T, arrays: Arrays, expected: list[jax.Array]) -> jax.Array:
        return distance(outputs[frame](values(learned), arrays), expected)

    gradient_of = jax.jit(jax.grad(error_of, argnums=1), static_argnums=0)
    batches = [(call.frame, call.arrays, floats[call.frame](call.arrays)) for call in work.calls]

    def mean_error(learned: T) -> float:
        errors = [float(error_of(frame, learned, *arrays)) for frame, *arrays in batches]
        return sum(errors) / len(errors)

    learned = best = start
    before = least = mean_error(start)
    taken = 0
    for number in steps:
        frame, *arrays = batches[number % len(batches)]
        learned = step(number, learned, gradient_of(frame, learned, *arrays))
        error = mean_error(learned)
        if error < least:
            best, least, taken = learned, error, number + 1
    what = f"{measure} from {before:.3g} to {least:.3g}, after {taken} steps"
    return best, Note(", ".join(parts), "", what, {"before": before, "after": least, "steps": taken})


KINDS = ("R1", "R2")


@dataclass(frozen=True)
class LearnedRotation(Checked):
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

    kinds: Annotated[
        Sequence[str], Expected(f"some of {', '.join(KINDS)}", lambda x: bool(x) and {*x} <= {*KINDS})
    ] = KINDS
    steps: Annotated[int, at_least(1)] = 50
    learning_rate: Annotated[float, Expected("within 0 and 1", lambda x: 0 < x < 1)] = 0.05

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", tuple(self.kinds))
        super().__post_init__()

    def __call__(self, work: Work) -> list[Note]:
        """See `Pass`."""
        change = float_change.FloatChange(work, repr(self))
        regions = [
            region
            for _, region in rotated_regions(change.flat)
            if not isinstance(region, str) and region.kind in self.kinds and region.block > 1
        ]
        if not regions:
            why = "no residual stream and no values between two weights can be rotated"
            return [Note("the model", "", reason=why)]
        paths = tuple(dict.fromkeys(path for region in regions for path in region.parameters))
        floats = {path: change.values[path] for path in paths}
        take_step = jax.jit(cayley_step, static_argnums=3)

        def values(matrices: Matrices) -> Values:
            return {
                path: _rotated(regions, path, matrices, x.astype(jnp.float32)) for path, x in floats.items()
            }

        def step(number: int, matrices: Matrices, gradients: Matrices) -> Matrices:
            rate = jnp.float32(self.learning_rate * (1 - number / self.steps))
            pairs = zip(matrices, gradients, regions, strict=True)
            return tuple(
                take_step(matrix, gradient, rate, region.keeps_sums) for matrix, gradient, region in pairs
            )

        start: Matrices = tuple(jnp.eye(region.block, dtype=jnp.float32) for region in regions)
        parts = (f"{region.kind} of {region.block}" for region in regions)
        steps = work.bar(range(self.steps), "rotations")
        quantized = work.copied().quantized
        best, done = descend(
            work, quantized, values, _distance, start, step, steps, parts, "error of the outputs"
        )
        if done.facts["steps"]:
            first = next(iter(regions[0].sites)).name
            change.change(first, [(path, partial(_rotated, regions, path, best)) for path in paths])
        return [done, *change.finish()]


Matrices = tuple[jax.Array, ...]


def _rotated(regions: Sequence[RotatedRegion], path: str, matrices: Matrices, value: jax.Array) -> jax.Array:
    """Rotate a parameter by the matrices of regions."""
    with jax.default_matmul_precision("highest"):
        for matrix, region in zip(matrices, regions, strict=True):
            if path in region.parameters:
                value = region.mapped(path, lambda x, m=matrix: x @ m, value)
    return value


def _distance(outputs: list[jax.Array], floats: list[jax.Array]) -> jax.Array:
    return relative_squares([a - b for a, b in zip(outputs, floats, strict=True)], floats)


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
        >>> rotation = cayley_step(jnp.eye(2), jnp.array([[0.0, 1.0], [0.0, 0.0]]), jnp.float32(0.1), False)
        >>> bool(jnp.allclose(rotation.T @ rotation, jnp.eye(2), atol=1e-6)), bool(rotation[0, 1] < 0)
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
class TweakNorms(Checked):
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

    steps: Annotated[int, at_least(1)] = 50
    learning_rate: Annotated[float, Expected("above 0", lambda x: x > 0)] = 1e-3

    def __call__(self, work: Work) -> list[Note]:
        """See `Pass`."""
        variables = ModelIndex(work.quantized).by_name
        quantized = work.parameters()
        flat = work.stream(calls=work.calls[:1]).flat
        vectors = {path: slot for slot, path in flat.parameters.items() if len(flat.shapes[slot]) == 1}
        norms = [path for path, slot in vectors.items() if is_gain(flat, slot)]
        paths = tuple(path for path in norms if path in variables and path not in quantized)
        if not paths:
            return [Note("the model", "", reason="no gains")]
        start = {path: jnp.asarray(variables[path].get_value()) for path in paths}
        sizes = {path: jnp.maximum(jnp.abs(x.astype(jnp.float32)).max(), 1e-6) for path, x in start.items()}

        def gains(moved: Values) -> Values:
            return {
                path: (value.astype(jnp.float32) + sizes[path] * moved[path]).astype(value.dtype)
                for path, value in start.items()
            }

        origin = {path: jnp.zeros(value.shape, jnp.float32) for path, value in start.items()}
        optimizer = optax.adam(self.learning_rate)
        state = optimizer.init(origin)

        def step(number: int, moved: Values, gradients: Values) -> Values:
            nonlocal state
            with jax.numpy_dtype_promotion("standard"):  # optax raises floats to an integer power
                updates, state = optimizer.update(gradients, state)
            return jax.tree.map(jnp.add, moved, updates)

        steps = work.bar(range(self.steps), "norms")
        measure = "distance of the outputs' channels"
        best, done = descend(work, work.quantized, gains, _apart, origin, step, steps, paths, measure)
        for path, value in gains(best).items():
            variables[path].set_value(value)
        return [done]


def _moments(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean and variance of each channel."""
    rows = x.reshape(-1, x.shape[-1] if x.ndim else 1)
    return rows.mean(axis=0), rows.var(axis=0)


def _apart(outputs: list[jax.Array], floats: list[jax.Array]) -> jax.Array:
    """How far the moments of outputs are from each other."""
    pairs = (zip(_moments(x), _moments(y), strict=True) for x, y in zip(outputs, floats, strict=True))
    return sum((jnp.abs(a - b).mean() for pair in pairs for a, b in pair), jnp.float32(0))
