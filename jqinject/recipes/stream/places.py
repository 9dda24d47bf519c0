"""Where the numbers of an operand stand in the parameter that they come from."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, eq=False)
class Places:
    """For each number of an operand, its place in the flattened parameter.

    Most operands are a parameter, or a slice of a stack, in the parameter's own order: then a place to start at says it
    all, and nothing is gathered.

    Attributes:
        shape: of the operand.
        start: of a run of numbers in the parameter's order; None if they stand otherwise.
        each: then the place of each number, in the shape of the operand.

    Example:
        >>> stack = jnp.arange(12.0).reshape(2, 2, 3)
        >>> second = Places.of(lambda where: where[1], (2, 2, 3))
        >>> second.start, second.taken(stack).tolist()
        (6, [[6.0, 7.0, 8.0], [9.0, 10.0, 11.0]])
        >>> second.put(stack, jnp.zeros((2, 3))).sum() == stack[0].sum()
        Array(True, dtype=bool)
    """

    shape: tuple[int, ...]
    start: int | None
    each: np.ndarray | None = None

    @classmethod
    def of(cls, moved: Callable[[jax.Array], Any], shape: tuple[int, ...]) -> Places | None:
        """The places of what is moved out of a parameter; None if one of its numbers stands in several of them.

        Args:
            moved: from the parameter to the operand, by moves alone.
            shape: of the parameter.
        """
        where = np.asarray(moved(jnp.arange(math.prod(shape), dtype=jnp.int32).reshape(shape)))
        flat = where.reshape(-1)
        if flat.size and np.array_equal(flat, np.arange(flat[0], flat[0] + flat.size, dtype=flat.dtype)):
            return cls(where.shape, int(flat[0]))
        if np.bincount(flat, minlength=1).max(initial=0) > 1:
            return None
        return cls(where.shape, None, where)

    @property
    def size(self) -> int:
        """How many numbers the operand has."""
        return math.prod(self.shape)

    def taken(self, parameter: Any) -> Any:
        """The operand.

        Args:
            parameter: whose numbers it has.
        """
        if self.start is None:
            return parameter.reshape(-1)[self.each]
        if self.size == parameter.size:
            return parameter.reshape(self.shape)
        return parameter.reshape(-1)[self.start : self.start + self.size].reshape(self.shape)

    def put(self, parameter: Any, operand: Any) -> Any:
        """A parameter with the operand's numbers in these places.

        Args:
            parameter: with other numbers there.
            operand: in its shape.
        """
        if self.start is None:
            return parameter.reshape(-1).at[self.each].set(operand).reshape(parameter.shape)
        if self.size == parameter.size:
            return operand.astype(parameter.dtype).reshape(parameter.shape)
        flat = operand.astype(parameter.dtype).reshape(-1)
        return (
            parameter.reshape(-1).at[self.start : self.start + self.size].set(flat).reshape(parameter.shape)
        )

    def mark(self, taken: np.ndarray) -> None:
        """Set the places of a flat array of flags.

        Args:
            taken: one flag for each number of the parameter; it is changed.
        """
        if self.start is None:
            taken[self.each] = True
        else:
            taken[self.start : self.start + self.size] = True

    def all_in(self, taken: np.ndarray) -> bool:
        """Whether the flags of all places are set."""
        if self.start is None:
            return bool(taken[self.each].all())
        return bool(taken[self.start : self.start + self.size].all())
