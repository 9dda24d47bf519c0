"""The scale of least squared error, exactly: by a scan over the scales at which a number changes its place on the grid.

At a scale `s` the numbers `x` become `s q`, `q` being the levels of the grid nearest to `x / s`. As `s` falls from
infinity, each `q` moves outwards, a level at a time, where `|x| / s` passes halfway between two levels. Between two
such breakpoints all `q` stay, and the error is a parabola in `s`:

    E(s) = sum h (x - s q)^2 = R - 2 d C + d^2 B        d = s - t
    R = sum h r^2        C = sum h r q        B = sum h q^2        r = x - t q

for any fixed scale `t`. Its least value is `R - C^2 / B`, at `s = t + C / B`. Rounding again at that scale only
lessens it. So the best scale is where `R - C^2 / B` is least; the three are running sums over the sorted breakpoints.
They begin at `t`, the best of a few scales, and continue both ways, so that near `t` they are sums of errors alone, and
float32 is enough. Sums far from `t` lose digits where levels are many; such grids are searched from `t / 2` to `2 t`.
"""

import math
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.ops import Grid

#: Breakpoints that are sorted at a time; each takes some tens of bytes.
MOST_BREAKPOINTS = 2**22
#: Scales that are tried to begin with, and how many octaves below twofold the largest useful one they reach.
FEW, OCTAVES = 48, 8
#: Largest level over the least distance of two, up to which all those octaves are searched exactly.
COARSE = 16
#: Bits of the widest grid whose levels are listed.
MOST_BITS = 8


def levels_of(grid: Grid) -> tuple[float, ...]:
    """The finite numbers of a grid, ascending.

    Raises:
        ValueError: a learned width, or one of more than 8 bits.

    Example:
        >>> from jqinject.ops import FloatGrid, IntGrid
        >>> levels_of(IntGrid(2)), levels_of(FloatGrid(2, 1))[-3:]
        ((-2.0, -1.0, 0.0, 1.0), (3.0, 4.0, 6.0))
    """
    if grid.is_learned or grid.bit_width > MOST_BITS:
        width = "a learned width" if grid.is_learned else f"{grid.bit_width} bits"
        raise ValueError(
            f"the scale of least squared error is searched over every number of a grid, and this one has {width}; "
            f"expected at most {MOST_BITS} bits.\n  cure: mse_search_method = 'fibonacci', which tries some scales"
        )
    if grid.is_integer:
        low, high = grid.bounds
        return tuple(float(level) for level in range(low, high + 1))
    with jax.ensure_compile_time_eval():
        numbers = np.asarray(grid.decode(jnp.arange(2**grid.bit_width, dtype=jnp.uint8)), np.float32)
    return tuple(sorted({float(number) + 0.0 for number in numbers if np.isfinite(number)}))


@lru_cache
def _side(levels: tuple[float, ...], sign: int) -> tuple[np.ndarray, np.ndarray]:
    """Levels that numbers of one sign reach, and what lies halfway between them; both as magnitudes of that sign."""
    ascending = np.sort(sign * np.asarray(levels, np.float64))
    between = (ascending[1:] + ascending[:-1]) / 2
    return ascending[int((between <= 0).sum()) :], between[between > 0]


def _sides(levels: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The levels of positive and of negative numbers, `(2, K + 1)`, and halfways, `(2, K)`; the shorter side padded."""
    sides = [_side(levels, sign) for sign in (1, -1)]
    size = max(len(between) for _, between in sides)
    reached = [np.pad(side, (0, size + 1 - len(side)), mode="edge") for side, _ in sides]
    between = [np.pad(halfway, (0, size - len(halfway)), constant_values=math.inf) for _, halfway in sides]
    return np.stack(reached).astype(np.float32), np.stack(between).astype(np.float32)


@partial(jax.jit, static_argnums=1)
def least_squares_scales(
    x: jax.Array,
    levels: tuple[float, ...],
    importance: jax.Array | None = None,
    zero_point: jax.Array | None = None,
) -> jax.Array:
    """The positive scale `s` of each row with the least `sum_j h_j (x_j - s q(x_j / s))^2`.

    Let `S` be the least scale at which nothing is clamped. For grids of few levels (integers of up to 5 bits, e2m1,
    NF4) this is the least of all scales from `S / 128` to `2 S`; of integers none above is better, as the half of a
    scale without clamping is no worse. For other grids it is the least within a factor of two of the best of 48 scales
    from that range. A row of `n` numbers on a grid of `L` levels takes `O(n L log(n L))` steps. A breakpoint and its
    index share 32 bits, so that near ones may be taken in another order where `n L` is in the millions; the squared
    error was then less than 1e-4 above the least.

    Args:
        x: float32, `(rows, n)`.
        levels: the numbers of the grid, ascending; `q` rounds to the nearest.
        importance: `h`, at least 0, `(rows, n)`; None for 1.
        zero_point: an integer `z`, for levels that are all integers of a range: `q` is then one of them less `z`,
            `(rows,)`; None for 0.

    Returns:
        float32, `(rows,)`; 0 for rows of zeros, or without a number that counts.

    Raises:
        ValueError: `x` has other than two axes, or there are fewer than two levels in ascending order.

    Source: Sakr et al., "Optimal Clipping and Magnitude-aware Differentiation for Improved Quantization-aware
    Training", 2022 (OCTAV), which approximates the error of rounding by its mean; here it is that of these numbers.

    Example:
        >>> least_squares_scales(jnp.array([[1.0, -1.0, 0.9, 1.1, -2.0]]), (-1.0, 0.0, 1.0))
        Array([1.2], dtype=float32)
    """
    if x.ndim != 2 or len(levels) < 2 or tuple(sorted(set(levels))) != levels:
        raise ValueError(
            f"least_squares_scales: x of the shape {x.shape}, levels {levels!r:.80}; expected rows of numbers, and at "
            "least two levels in ascending order.\n  cure: x.reshape(1, -1) for one scale of all"
        )
    rows, count = x.shape
    weights = jnp.ones_like(x) if importance is None else importance.astype(jnp.float32)
    zeros = jnp.zeros((rows,), jnp.float32) if zero_point is None else zero_point.astype(jnp.float32)
    ends = jnp.stack([levels[-1] - zeros, zeros - levels[0]], 1)
    if zero_point is not None:  # from which any integer of the range's length may be reached, up to its ends
        span = int(levels[-1] - levels[0])
        levels = tuple(map(float, range(-span, span + 1)))
    if not count:
        return jnp.zeros((rows,), jnp.float32)
    best = partial(_best_scale, levels=levels)
    arguments = x.astype(jnp.float32), weights, ends
    batch = max(1, MOST_BREAKPOINTS // max(1, count * len(levels)))
    if rows <= batch:
        return jax.vmap(lambda *row: best(row))(*arguments)
    return jax.lax.map(best, arguments, batch_size=batch)


def _best_scale(row: tuple[jax.Array, jax.Array, jax.Array], levels: tuple[float, ...]) -> jax.Array:
    """The scale of a row: its numbers, their importance, and how far levels reach upwards and downwards."""
    x, h, ends = row
    start = _best_of_few(x, h, ends, levels)
    reached, halfway = _sides(levels)
    side, size = jnp.where(x < 0, 1, 0), jnp.abs(x)
    q, between = jnp.asarray(reached)[side], jnp.asarray(halfway)[side]
    lower, step = q[:, :-1], jnp.where(q[:, 1:] <= ends[side][:, None], q[:, 1:] - q[:, :-1], 0.0)
    # Places of breakpoints, in octaves below the largest scale that is searched.
    index_bits = max(1, (between.size - 1).bit_length())
    places = 2 ** (32 - index_bits) - 1
    highest, octaves = (2 * _unclamped(x, h, ends), OCTAVES) if _is_coarse(levels) else (2 * start, 2)
    below = jnp.log2(jnp.where(highest > 0, highest, 1.0)) - jnp.log2(size[:, None] / between)
    place = (jnp.clip(below / octaves, 0, 1) * places).astype(jnp.uint32)
    place = jnp.minimum(place, jnp.uint32(places))
    passed = size[:, None] / between >= start
    at_start = q[:, 0] + jnp.where(passed, step, 0.0).sum(1)
    rest = size - start * at_start
    sums = (h * jnp.square(rest)).sum(), (h * rest * at_start).sum(), (h * jnp.square(at_start)).sum()
    unit, both = h[:, None] * step, 2 * lower + step
    changes = (
        unit * start * (start * both - 2 * size[:, None]),
        unit * (size[:, None] - start * both),
        unit * both,
    )
    # Sorting one array of integers takes a tenth of the time of sorting four arrays by one of them.
    indices = jnp.arange(place.size, dtype=jnp.uint32)
    in_order = jnp.sort((place.reshape(-1) << index_bits) | indices) & jnp.uint32(2**index_bits - 1)
    passed = passed.reshape(-1)[in_order]
    residual, slope, squares = (
        _running(total, change.reshape(-1)[in_order], passed)
        for total, change in zip(sums, changes, strict=True)
    )
    shift = slope / jnp.where(squares > 0, squares, 1.0)
    near = (start + shift <= highest) & (start + shift >= highest * 2.0**-octaves) & (squares > 0)
    best = jnp.argmin(jnp.where(near, residual - slope * shift, jnp.inf))
    return jnp.where(near[best], start + shift[best], start)


def _running(start: jax.Array, changes: jax.Array, passed: jax.Array) -> jax.Array:
    """A sum before the first breakpoint and after each, from its value where the first `passed` of them lie behind."""
    behind, ahead = jnp.where(passed, changes, 0.0), jnp.where(passed, 0.0, changes)
    undone = jax.lax.cumsum(behind, reverse=True)
    undone = jnp.concatenate([undone, jnp.zeros((1,), undone.dtype)])
    return start - undone + jnp.concatenate([jnp.zeros((1,), ahead.dtype), jnp.cumsum(ahead)])


def _is_coarse(levels: tuple[float, ...]) -> bool:
    """Whether float32 sums are exact enough at all scales."""
    return max(map(abs, levels)) <= COARSE * min(np.diff(levels))


def _unclamped(x: jax.Array, h: jax.Array, ends: jax.Array) -> jax.Array:
    """The least scale at which no number that counts is clamped, but for those of a side without levels."""
    sides = jnp.stack([jnp.max(jnp.where(h > 0, sign * x, 0.0)) for sign in (1, -1)])
    return jnp.max(jnp.where(ends > 0, sides / jnp.where(ends > 0, ends, 1.0), 0.0))


def _best_of_few(x: jax.Array, h: jax.Array, ends: jax.Array, levels: tuple[float, ...]) -> jax.Array:
    """The best of some scales."""
    largest, table = _unclamped(x, h, ends), jnp.asarray(levels, jnp.float32)
    borders = (table[1:] + table[:-1]) / 2

    def error(fraction: jax.Array) -> jax.Array:
        scale = largest * fraction
        places = jnp.searchsorted(borders, x / jnp.where(scale > 0, scale, 1.0), method="scan_unrolled")
        return (h * jnp.square(x - scale * jnp.clip(table[places], -ends[1], ends[0]))).sum()

    fractions = jnp.geomspace(2.0, 2.0 ** (1 - OCTAVES), FEW, dtype=jnp.float32)
    return largest * fractions[jnp.argmin(jax.lax.map(error, fractions))]
