"""Bit widths: what each costs, and the assignment with the least total error that fits a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jqinject.inject.errors import did_you_mean
from jqinject.recipes.stream.flat_program import FlatProgram
from jqinject.recipes.stream.site import ContractionSite


def cheapest_errors(errors: np.ndarray, costs: np.ndarray, budget: float) -> list[int]:
    """One choice for each item, so that the sum of errors is least and the sum of costs fits: exact.

    Dynamic programming over the items: of all assignments of the first `n`, those are kept that no other one beats in
    both error and cost.

    Args:
        errors: of every choice of every item, `(items, choices)`.
        costs: likewise, not negative.
        budget: the largest sum of costs.

    Returns:
        The index of the choice of each item; of equally good assignments, one with the least cost.

    Raises:
        ValueError: no assignment fits; or something is not finite.

    Example:
        >>> cheapest_errors(np.array([[9.0, 1.0], [4.0, 3.0]]), np.array([[1, 2], [1, 2]]), 3)
        [1, 0]
    """
    errors, costs = np.asarray(errors, np.float64), np.asarray(costs, np.float64)
    if not (np.isfinite(errors).all() and np.isfinite(costs).all() and (costs >= 0).all()):
        raise ValueError("errors and costs must be finite, and costs not negative")
    least = costs.min(axis=1)
    if least.sum() > budget:
        raise ValueError(
            f"no assignment fits the budget: the cheapest choices cost {least.sum():g}, the budget is {budget:g}.\n"
            "  cure: a larger budget, or smaller bit widths among the choices"
        )
    # What the items that are still to come cost at least.
    rest = np.append(np.cumsum(least[::-1])[::-1][1:], 0.0)
    spent, lost = np.zeros(1), np.zeros(1)
    ways: list[tuple[np.ndarray, np.ndarray]] = []
    for error, cost, later in zip(errors, costs, rest, strict=True):
        spent, lost, before, choice = _extended(spent, lost, error, cost, budget - later)
        ways.append((before, choice))
    return _traced_back(ways, int(np.argmin(lost)))


def _extended(
    spent: np.ndarray, lost: np.ndarray, error: np.ndarray, cost: np.ndarray, limit: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Every assignment with every choice of one more item, without those that another one beats."""
    costs, errors = (spent[:, None] + cost).ravel(), (lost[:, None] + error).ravel()
    order = np.lexsort((errors, costs))
    order = order[costs[order] <= limit]
    sorted_errors = errors[order]
    best_before = np.concatenate([[np.inf], np.minimum.accumulate(sorted_errors)[:-1]])
    kept = order[sorted_errors < best_before]
    before, choice = np.divmod(kept, len(cost))
    return costs[kept], errors[kept], before, choice


def _traced_back(ways: Sequence[tuple[np.ndarray, np.ndarray]], place: int) -> list[int]:
    found: list[int] = []
    for before, choice in reversed(ways):
        found.append(int(choice[place]))
        place = int(before[place])
    return found[::-1]


Seconds = Mapping[str, Sequence[float]] | Callable[[str, int], float]
"""Measured times: path of a parameter -> seconds with each width, in their order; or a function of both."""


@dataclass(frozen=True)
class Budget:
    """What each choice costs, and the most that may be spent.

    Attributes:
        name: of the argument that set it.
        unit: of the costs.
        costs: of each parameter with each width, `(parameters, widths)`.
        most: the largest sum of costs.
        shown: what a cost is divided by to be what the argument says.
    """

    name: str
    unit: str
    costs: np.ndarray
    most: float
    shown: float = 1.0

    @property
    def least(self) -> float:
        """The smallest value of the argument that an assignment fits."""
        return float(self.costs.min(axis=1).sum()) / self.shown

    def check(self) -> None:
        """Refuse a budget that nothing fits.

        Raises:
            ValueError: with the smallest that something fits.
        """
        if self.costs.min(axis=1).sum() > self.most:
            given, least = self.most / self.shown, self.least
            raise ValueError(
                f"AllocateBits: no assignment fits the budget {self.name}={given:g}: the cheapest widths take "
                f"{least:g} {self.unit}.\n  cure: {self.name}={_above(least)}, or smaller widths among bits="
            )


def _above(least: float) -> str:
    """A number as text, no smaller when it is read."""
    return repr(math.ceil(least)) if least > 1000 else repr(least)


def multiply_adds(flat: FlatProgram, site: ContractionSite) -> int:
    """The multiply-adds of a site in one call.

    Args:
        flat: the program.
        site: one of its sites.
    """
    operand = jax.ShapeDtypeStruct(site.places.shape, np.float32)
    columns = jax.eval_shape(site.matrices.weight.matrices, operand).shape[-1]
    return math.prod(flat.steps[site.step].contraction.outputs[0].shape) * columns


def float_bits(flat: FlatProgram, site: ContractionSite) -> int:
    """The bits of a number of a site's input that is not quantized."""
    return 8 * np.dtype(flat.steps[site.step].contraction.inputs[1 - site.place].dtype).itemsize


def seconds_of(seconds: Seconds, paths: Sequence[str], bits: Sequence[int]) -> np.ndarray:
    """Measured times as a table, `(parameters, widths)`.

    Args:
        seconds: a table or a function.
        paths: of the parameters.
        bits: the widths.

    Raises:
        ValueError: a parameter has no times, or not one for each width; a time is negative or not finite.
    """
    rows = []
    for path in paths:
        if callable(seconds):
            row = [float(seconds(path, each)) for each in bits]
        elif path not in seconds:
            hint = did_you_mean(path, list(seconds))
            raise ValueError(
                f"AllocateBits: seconds has no times for {path}{'; ' + hint if hint else '.'}\n"
                f"  cure: seconds={{{path!r}: ({', '.join(f'<with {each} bits>' for each in bits)}), ...}}"
            )
        else:
            row = [float(each) for each in seconds[path]]
        if len(row) != len(bits) or not all(0 <= each < math.inf for each in row):
            raise ValueError(
                f"AllocateBits: the seconds of {path} must be {len(bits)} numbers of at least 0, one for each of bits="
                f"{tuple(bits)}, got {tuple(row)}"
            )
        rows.append(row)
    return np.array(rows, np.float64).reshape(len(paths), len(bits))
