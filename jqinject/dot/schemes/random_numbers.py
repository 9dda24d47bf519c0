"""Refuses stochastic rounding without random numbers; for a backward pass, only once there is one."""

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
