"""Refuses what a backward pass lacks, once there is one: random numbers, or blocks that fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

SIGNS = "a transform with random signs"


def missing_rngs(where: str, what: str = "stochastic rounding") -> ValueError:
    """The error for what draws random numbers where there are none."""
    op, signs = where.partition(":")[0], what == SIGNS
    other = "random_signs = False" if signs else "rounding to nearest (rng_type=None)"
    return ValueError(
        f"{where}: {what} needs a key, and there are no rngs.\n  cure: {op}(scheme, rngs=nnx.Rngs(...)), "
        f"key=jax.random.key(...) for a function, or {other}"
    )


@jax.tree_util.register_static
@dataclass(frozen=True)
class NoRandomNumbers:
    """Replaces a `BackwardQuantizer` without random numbers, which a forward pass does not need."""

    where: str
    what: str = "stochastic rounding"

    def __call__(self, *args: Any) -> Any:
        """Raise, as there is a backward pass."""
        raise missing_rngs(self.where, self.what)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Misfit:
    """Replaces a `BackwardQuantizer` whose transform does not fit, which a forward pass alone does not need.

    Attributes:
        where: the operand.
        size, length: of a block, and of the axis that is summed over.
    """

    where: str
    size: int
    length: int

    def __call__(self, *args: Any) -> Any:
        """Raise, as there is a backward pass, or will be."""
        raise ValueError(
            f"{self.where}: pre_transform turns blocks of {self.size}, which do not fill the {self.length} numbers "
            f"that the product sums over (rows of a batch).\n  cure: batches whose last axis before the features is a "
            f"multiple of {self.size}; model.eval() where there is no backward pass; or a scheme without the transform "
            "(hadamard=None)"
        )
