"""Refuses what a backward pass lacks, once there is one: random numbers, or blocks that fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jqinject.dot.tensors.six_operands import BackwardProduct

SIGNS = "a transform with random signs"


class MissingRngsError(ValueError):
    """What draws random numbers has none.

    Args:
        where: who draws.
        what: what they are for.
    """

    def __init__(self, where: str, what: str = "stochastic rounding") -> None:
        alternative = "random_signs = False" if what == SIGNS else "rounding to nearest (rng_type=None)"
        super().__init__(
            f"{where}: {what} needs a key, and there are no rngs.\n  cure: {where.partition(':')[0]}(scheme, "
            f"rngs=nnx.Rngs(...)), key=jax.random.key(...) for a function, or {alternative}"
        )


@jax.tree_util.register_static
@dataclass(frozen=True)
class RefusedQuantizer:
    """Replaces the quantizer of a backward pass that cannot be: a forward pass alone does not need it.

    Attributes:
        why: the error.
    """

    why: str

    def __call__(self, *args: Any) -> Any:
        """Raise, as there is a backward pass."""
        raise ValueError(self.why)


def refused_backward(make: Callable[[], BackwardProduct]) -> BackwardProduct:
    """The operands of a backward product, or what refuses it because they lack random numbers.

    Args:
        make: makes the operands.
    """
    try:
        return make()
    except MissingRngsError as error:
        return BackwardProduct(RefusedQuantizer(str(error)))


def misfit(where: str, size: int, length: int) -> RefusedQuantizer:
    """Refuses a transform whose blocks do not fill the axis that is summed over.

    Args:
        where: the operand.
        size: of a block.
        length: of the axis.
    """
    return RefusedQuantizer(
        f"{where}: pre_transform turns blocks of {size}, which do not fill the {length} numbers that the product sums "
        "over (rows of a batch).\n  cure: batches whose last axis before the features is a multiple of "
        f"{size}; model.eval() where there is no backward pass; or a scheme without the transform (hadamard=None)"
    )
