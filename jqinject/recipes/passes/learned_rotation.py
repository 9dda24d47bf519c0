"""`LearnedRotation`: rotations that a descent finds, folded into the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jqinject.model.calibration import with_progress
from jqinject.program import dotted
from jqinject.recipes.passes.float_change import Change, FloatChange
from jqinject.recipes.passes.rotate import turned
from jqinject.recipes.sensitivities import BatchErrors
from jqinject.recipes.stream.site import Path
from jqinject.recipes.transforms.turning import TurnedRegion
from jqinject.recipes.work import Work

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
        if self.steps < 1 or not 0 < self.learning_rate < 1:
            raise ValueError(
                f"LearnedRotation: steps is {self.steps} and learning_rate {self.learning_rate}.\n"
                "  cure: at least one step; a rate within 0 and 1"
            )

    def __call__(self, work: Work) -> list[Any]:
        """See `Pass`."""
        change = FloatChange(work, repr(self))
        change.run()
        regions = self._regions(change)
        if not regions:
            return [NothingToRotate()]
        descent = _Descent(work, change, [region for _, region in regions])
        before = descent.error(descent.matrices)
        best, least, taken = descent.matrices, before, 0
        for step in with_progress(range(self.steps), "rotations", shown=work.progress):
            descent.step(step, jnp.float32(self.learning_rate * (1 - step / self.steps)))
            found = descent.error(descent.matrices)
            if found < least:
                best, least, taken = descent.matrices, found, step + 1
        if taken:
            change.change(regions[0][1].first, descent.changes(best))
        kinds, sizes = zip(*((kind, region.block) for kind, region in regions), strict=True)
        return [Learned(kinds, sizes, before, least, taken), *change.finish()]

    def _regions(self, change: FloatChange) -> list[tuple[str, _Region]]:
        found: list[tuple[str, _Region]] = []
        for site, region in change.turning():
            if isinstance(region, str):
                continue
            kind = "R1" if region.normalized else "R2"
            if kind in self.kinds and region.block > 1:
                found.append((kind, _Region.of(region, site.name)))
        return found


@dataclass(frozen=True)
class _Region:
    """What one matrix turns."""

    block: int
    axes: tuple[tuple[Path, int], ...]
    keeps_sums: bool
    first: str

    @staticmethod
    def of(region: TurnedRegion, first: str) -> _Region:
        return _Region(region.block, tuple(region.parameters.items()), region.keeps_sums, first)


@dataclass
class _Descent:
    """Matrices, and the error of the quantized model with the weights that they turn."""

    work: Work
    change: FloatChange
    regions: list[_Region]
    matrices: tuple[jax.Array, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.matrices = tuple(jnp.eye(region.block, dtype=jnp.float32) for region in self.regions)
        quantized = self.work.copied().quantized
        names = {path: dotted(path) for region in self.regions for path, _ in region.axes}
        held = {path: self.change.values[path] for path in names}

        def values(matrices: tuple[jax.Array, ...]) -> dict[str, jax.Array]:
            return {names[path]: value for path, value in self._turned(held, matrices).items()}

        self._errors = BatchErrors[tuple[jax.Array, ...]](self.work, quantized, values, _distance)
        self._step = jax.jit(cayley_step, static_argnums=3)

    def error(self, matrices: tuple[jax.Array, ...]) -> float:
        """The mean over all batches."""
        return self._errors.error(matrices)

    def step(self, index: int, rate: jax.Array) -> None:
        """Turn the matrices by one batch."""
        gradients = self._errors.gradient(index, self.matrices)
        self.matrices = tuple(
            self._step(matrix, gradient, rate, region.keeps_sums)
            for matrix, gradient, region in zip(self.matrices, gradients, self.regions, strict=True)
        )

    def changes(self, matrices: tuple[jax.Array, ...]) -> dict[Path, Change]:
        """What the matrices do to each parameter."""
        paths = dict.fromkeys(path for region in self.regions for path, _ in region.axes)
        return {path: partial(self._one, path, matrices) for path in paths}

    def _turned(self, held: dict[Path, Any], matrices: tuple[jax.Array, ...]) -> dict[Path, jax.Array]:
        return {path: self._one(path, matrices, value.astype(jnp.float32)) for path, value in held.items()}

    def _one(self, path: Path, matrices: tuple[jax.Array, ...], value: jax.Array) -> jax.Array:
        with jax.default_matmul_precision("highest"):
            for matrix, region in zip(matrices, self.regions, strict=True):
                for each, axis in region.axes:
                    if each == path:
                        value = turned(value, transform=_Times(matrix), axis=axis, block=region.block)  # pyright: ignore
        return value


def _distance(found: list[jax.Array], wanted: list[jax.Array]) -> jax.Array:
    """The squared difference of outputs, relative to their squares."""
    off = sum((jnp.square(a - b).sum() for a, b in zip(found, wanted, strict=True)), jnp.float32(0))
    whole = sum((jnp.square(b).sum() for b in wanted), jnp.float32(0))
    return off / jnp.where(whole > 0, whole, 1.0)


@dataclass(frozen=True)
class _Times:
    """An `Orthogonal` whose matrix may be traced."""

    matrix: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.matrix


HIGHEST = "highest"


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
    with jax.default_matmul_precision(HIGHEST):
        skew = gradient @ matrix.T
        skew = skew - skew.T
        if keeps_sums:
            skew = skew - skew.mean(axis=0, keepdims=True)
            skew = skew - skew.mean(axis=1, keepdims=True)
        size = jnp.abs(skew).sum(axis=1).max()
        skew = skew * (rate / 2 / jnp.where(size > 0, size, 1.0))
        one = jnp.eye(matrix.shape[0], dtype=matrix.dtype)
        moved = jnp.linalg.solve(one + skew, (one - skew) @ matrix)
        # Rounding is taken back: one step of Newton's towards the nearest orthogonal matrix.
        return moved @ (1.5 * one - 0.5 * (moved.T @ moved))
