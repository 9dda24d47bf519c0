"""The assignment of bit widths with the least total error that fits a budget."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


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
