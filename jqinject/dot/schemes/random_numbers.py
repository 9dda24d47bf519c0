"""Refuses what a backward pass lacks, once there is one: random numbers, or blocks that fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax


def missing_rngs(where: str) -> ValueError:
    """The error for stochastic rounding without random numbers."""
    op = where.partition(":")[0]
    return ValueError(
        f"{where}: stochastic rounding needs a key, and there are no rngs.\n  cure: {op}(scheme, rngs=nnx.Rngs(...)), "
        "key=jax.random.key(...) for a function, or rounding to nearest (rng_type=None)"
    )


@jax.tree_util.register_static
@dataclass(frozen=True)
class NoRandomNumbers:
    """Replaces a `BackwardQuantizer` without random numbers, which a forward pass does not need."""

    where: str

    def __call__(self, *args: Any) -> Any:
        """Raise, as there is a backward pass."""
        raise missing_rngs(self.where)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Misfit:
    """Replaces a `BackwardQuantizer` whose transform does not fit, which a forward pass does not need.

    Attributes:
        where: the operand.
        size, length: of a block, and of the axis that is summed over.
    """

    where: str
    size: int
    length: int

    def __call__(self, *args: Any) -> Any:
        """Raise, as there is a backward pass."""
        raise ValueError(
            f"{self.where}: pre_transform turns blocks of {self.size}, which do not fill the {self.length} numbers "
            f"that the product sums over (rows of a batch).\n  cure: batches whose last axis before the features is a "
            f"multiple of {self.size}; or a scheme without the transform (hadamard=None)"
        )
