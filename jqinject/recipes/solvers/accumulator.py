"""Codes so small that no sum of products overflows its accumulator (AXE)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jqinject.ops.accumulator_bounds import integer_budget
from jqinject.recipes.solvers.solver import Checked, Expected, MatrixGrid, Problem, at_least

Bits = Annotated[int | None, Expected("within 2 and 32", lambda x: 2 <= x <= 32, 16)]
TileSize = Annotated[int | None, at_least(1, 64)]


def l1_threshold(magnitudes: jax.Array, radius: jax.Array | float) -> jax.Array:
    """What each magnitude is made smaller by in the nearest point with a 1-norm of `radius`, `(...)`.

    Of use where the 1-norm is larger; negative otherwise.

    Args:
        magnitudes: `(..., n)`, at least 0.
        radius: of the ball.

    Example:
        >>> l1_threshold(jnp.array([3.0, 1.0]), 1.0).tolist()
        2.0
    """
    falling = -jnp.sort(-magnitudes, axis=-1)
    sums = jnp.cumsum(falling, axis=-1) - radius
    counts = jnp.arange(1, magnitudes.shape[-1] + 1, dtype=magnitudes.dtype)
    support = (falling - sums / counts > 0).sum(axis=-1, keepdims=True)
    excess = jnp.take_along_axis(sums, jnp.maximum(support - 1, 0), axis=-1)
    return (excess / jnp.maximum(support, 1).astype(magnitudes.dtype))[..., 0]


def onto_ball(rows: jax.Array) -> jax.Array:
    """Each row's nearest point in the unit ball of the 1-norm.

    Example:
        >>> onto_ball(jnp.array([[3.0, 1.0], [0.25, 0.5]])).tolist()
        [[1.0, 0.0], [0.25, 0.5]]
    """
    magnitudes = jnp.abs(rows)
    threshold = l1_threshold(magnitudes, 1.0)[..., None]
    inside = magnitudes.sum(axis=-1, keepdims=True) <= 1
    return jnp.where(inside, rows, jnp.sign(rows) * jnp.maximum(magnitudes - threshold, 0.0))


class Bounded(Checked):
    """A solver whose codes are so small that no sum of products overflows its accumulator.

    Attributes:
        accumulator_bits: of a signed accumulator; None for no bound.
        tile_size: columns that are summed in it; the sums of tiles are added in a wider one. None for all columns that
            share a scale.
    """

    spreads_errors: ClassVar[bool] = True
    accumulator_bits: Bits
    tile_size: TileSize

    def __post_init__(self) -> None:
        """Refuse what is no accumulator.

        Raises:
            ValueError: a tile without an accumulator, or scales that are measured on the way.
        """
        super().__post_init__()
        name, bits, tile_size = type(self).__name__, self.accumulator_bits, self.tile_size
        scales = vars(self).get("scales", "original")
        if bits is None and tile_size is not None:
            raise ValueError(
                f"{name}: tile_size={tile_size!r} says what an accumulator sums, and accumulator_bits is None.\n"
                f"  cure: {name}(accumulator_bits=16, tile_size={tile_size!r})"
            )
        if bits is not None and scales != "original":
            raise ValueError(
                f"{name}: with accumulator_bits codes must stay as they are chosen, and scales={scales!r} measures "
                f"scales later.\n  cure: {name}(scales='original', accumulator_bits={bits})"
            )


def room_of(solver: Bounded, problem: Problem, weights: jax.Array, order: jax.Array) -> Room | None:
    """The room of all rows and tiles before the first column is rounded; None without a bound.

    A product sum over the columns of a tile is at most `2^(bits - 1) - 1` in magnitude, whatever integers of their
    format the inputs are: the positive codes of a row within a tile, and the negative ones, each sum to at most
    `integer_budget(bits, input bits, ...)`. While columns are rounded, a code that would go beyond is cut, and the cut
    counts as an error that later columns make up for. Before, magnitudes are made smaller by what it takes for the
    weights as they are to fit (the threshold of the nearest point in the ball of the 1-norm), so that no column is left
    without room by those before it.

    Args:
        solver: with the accumulator.
        problem: to be solved.
        weights: that are to be rounded, `(stack, rows, columns)`.
        order: in which columns are rounded, `(stack, columns)`.

    Raises:
        ValueError: the weights or the inputs are no integers, the weights have zero points, or the accumulator is
            too narrow for a single product.

    Source: Colbert et al., "Accumulator-Aware Post-Training Quantization", 2024.

    Differs from Brevitas: positive and negative codes have thresholds of their own.
    """
    if solver.accumulator_bits is None:
        return None
    grid = problem.measure(problem.weights).spread(weights.shape)
    budget = _budget(type(solver).__name__, solver.accumulator_bits, problem.input_integers, grid)
    places = _tiles(problem.sharing.places(weights.shape)[0, 0], solver.tile_size)
    table = _table(places)
    steps = jnp.where(table >= 0, (weights / grid.scale)[..., table], 0.0)
    sides = jnp.stack([jnp.maximum(steps, 0.0), jnp.maximum(-steps, 0.0)], axis=-2)
    threshold = jnp.maximum(l1_threshold(sides, float(budget)), 0.0)
    threshold = jnp.where(sides.sum(-1) > budget, threshold, 0.0)
    tiles = jnp.take_along_axis(jnp.broadcast_to(jnp.asarray(places), order.shape), order, axis=1)
    return Room(tiles, jnp.full(threshold.shape, budget, jnp.int32), threshold)


def _budget(solver: str, accumulator: int, inputs: tuple[int, bool] | None, grid: MatrixGrid) -> int:
    """What the codes of one sign may sum to."""
    where = f"{solver}(accumulator_bits={accumulator})"
    if not grid.grid.is_integer or bool(jnp.any(grid.zero_point != 0)):
        kind = "with zero points" if grid.grid.is_integer else type(grid.grid).__name__
        raise ValueError(
            f"{where} bounds sums of integers, and the weight's numbers are another grid: {kind}.\n"
            "  cure: symmetric integers, such as Int8WeightPerChannelFloat; or leave accumulator_bits out"
        )
    if inputs is None:
        raise ValueError(
            f"{where} needs the integers that the weights are multiplied with, and no rule makes its inputs "
            "integers.\n  cure: input_quant=Int8ActPerTensorFloat in the rule, or any integer quantizer"
        )
    budget = int(integer_budget(accumulator, *inputs, True))
    if budget < 1:
        raise ValueError(
            f"{where}: its inputs have {inputs[0]} bits, so an accumulator of {accumulator} bits holds no product with "
            f"any weight but 0.\n  cure: accumulator_bits={inputs[0] + 2} or more, or inputs of fewer bits"
        )
    return budget


def _tiles(owners: np.ndarray, tile_size: int | None) -> np.ndarray:
    """The tile of each column, numbered from 0: columns with one scale, cut into tiles."""
    _, scales = np.unique(owners, return_inverse=True)
    rank = np.array([np.count_nonzero(scales[:place] == own) for place, own in enumerate(scales)])
    size = tile_size or len(owners)
    _, tiles = np.unique(np.stack([scales, rank // size]), axis=1, return_inverse=True)
    return tiles.reshape(-1).astype(np.int32)


def _table(tiles: np.ndarray) -> np.ndarray:
    """The columns of each tile, filled up with -1."""
    members = [np.flatnonzero(tiles == tile) for tile in range(tiles.max() + 1)]
    longest = max(map(len, members))
    return np.stack([np.pad(own, (0, longest - len(own)), constant_values=-1) for own in members])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Room:
    """What the accumulators of all rows still hold.

    Attributes:
        tiles: the tile of each column, in the order in which they are rounded, `(stack, columns)`.
        left: how much positive and negative codes may still sum to, int32 `(stack, rows, tiles, 2)`.
        threshold: what magnitudes are made smaller by before they are rounded, in steps, likewise.
    """

    tiles: jax.Array
    left: jax.Array = field(repr=False)
    threshold: jax.Array = field(repr=False)


def rounded(
    x: jax.Array, grid: MatrixGrid, place: ArrayLike, room: Room | None
) -> tuple[jax.Array, Room | None]:
    """A column rounded to nearest, within the room that is left if there is a bound; and the room after it.

    Args:
        x: `(stack, rows, 1)`.
        grid: of the column.
        place: of the column.
        room: None for no bound.
    """
    if room is None:
        return grid.nearest(x), None
    own = jax.lax.dynamic_slice_in_dim(room.tiles, place, 1, -1)[:, None, :, None]
    left, threshold = (jnp.take_along_axis(x, own, axis=2)[:, :, 0] for x in (room.left, room.threshold))
    cut = jnp.where(x > 0, threshold[..., :1], threshold[..., 1:]) * grid.scale
    smaller = jnp.where(cut > 0, jnp.sign(x) * jnp.maximum(jnp.abs(x) - cut, 0.0), x)
    codes = jnp.round(grid.nearest(smaller) / grid.scale).astype(jnp.int32)
    codes = jnp.clip(codes, -left[..., 1:], left[..., :1])
    used = jnp.concatenate([jnp.maximum(codes, 0), jnp.maximum(-codes, 0)], axis=-1)
    in_tile = jnp.arange(room.left.shape[2])[None, None, :, None] == own
    spent = jnp.where(in_tile, used[:, :, None], 0)
    return codes.astype(jnp.float32) * grid.scale, replace(room, left=room.left - spent)
