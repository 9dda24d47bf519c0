"""How a memory makes one number of those of many batches: the policy, and the arithmetic that all memories share.

| policy        | number                                                    | state                                   |
|---------------|-----------------------------------------------------------|-----------------------------------------|
| `constant`    | the constant                                              | none                                    |
| `learned`     | the parameter                                             | `value`                                 |
| `now`         | the statistic of the given tensor                         | none                                    |
| `filled`      | a parameter that starts at the first statistic            | `value`, `counter`                      |
| `running`     | the batch's statistic; in evaluation, the running one     | `counter`, `running_stats`              |
| `mean`        | the mean of all batches, the present one included         | `counter` and a sum for each number     |
| `collected`   | the batch's statistic for some steps, then a parameter    | `value`, `counter`, `buffer`            |

Delayed scaling remembers the statistics of several steps: `AmaxScaling`.

A batch enters only if its numbers are finite. An empty batch is treated as in evaluation, and evaluation changes no
state. The record of a memory (`counter` and what is averaged) is one Variable.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jqinject.core import check
from jqinject.ops.clamp import all_finite, choose, no_change
from jqinject.ops.processes import one_program
from jqinject.ops.reductions import running_mean

Kind = Literal["constant", "learned", "now", "filled", "running", "mean", "collected"]
Numbers = tuple[jax.Array, ...]

EVERY_STEP = 2**25  # no counter reaches it


class DefaultMomentum(float):
    """A default momentum, which calibration replaces by the mean."""


DEFAULT_MOMENTUM = DefaultMomentum(0.1)


@dataclass(frozen=True)
class MemoryPolicy:
    """What a memory does with the numbers of batches: static, compared by value.

    Attributes:
        kind: see the table of this module.
        momentum: the weight of the newest number, in (0, 1]; None weighs all batches alike.
        steps: training calls with a finite statistic before the parameter takes over.
        named: whether the user chose the momentum; otherwise calibration weighs all batches alike.
        restart: start afresh at every batch.
        calibrates: whether this is a calibration: as many steps as batches.
    """

    kind: Kind
    momentum: float | None = None
    steps: int = 0
    named: bool = True
    restart: bool = False
    calibrates: bool = False

    @cached_property
    def limit(self) -> int:
        """The current number of steps."""
        return EVERY_STEP if self.calibrates else self.steps

    @cached_property
    def weight(self) -> float | None:
        """The current weight of the newest number; None for the cumulative mean."""
        return self.momentum if self.named or not self.calibrates else None

    def after(
        self, held: Numbers, numbers: Numbers, count: jax.Array, active: jax.Array | None = None
    ) -> tuple[Numbers, jax.Array, jax.Array]:
        """Return what is held after one more batch, the counter, and whether the batch entered.

        A batch enters unless a number, or what would be held, is not finite. The policy `mean` holds sums, as Qwix
        does; with a momentum, averages times the count.

        Args:
            held: the averages or sums.
            numbers: of the batch.
            count: how many batches have entered.
            active: whether the memory still takes batches; None for always.
        """
        grown = tuple([self._grown(old, number, count) for old, number in zip(held, numbers, strict=True)])
        # One number for each counter, or several that enter together. Ends on both sides of 0 have a finite sum if both
        # are finite, and it cannot overflow.
        whole = grown[0] if len(grown) == 1 else jax.lax.add(*grown)
        enters = jnp.isfinite(whole) if whole.shape == count.shape else all_finite(whole)
        if self.kind == "mean" and self.momentum is None and not self.restart:
            active = count <= check.MOST_STEPS  # after that the counter stays
        enters = enters if active is None else enters & active
        more = jnp.ones_like(count) if self.restart else count + 1
        kept = tuple([choose(enters, new, old) for new, old in zip(grown, held, strict=True)])
        return kept, choose(enters, more, count), enters

    def _grown(self, old: jax.Array, number: jax.Array, count: jax.Array) -> jax.Array:
        if self.restart:
            return number
        if self.kind != "mean":
            return running_mean(old, number, count, self.weight)
        if self.momentum is None:
            return old + number
        average = choose(count > 0, old / jnp.maximum(count, 1.0), number)
        return ((1 - self.momentum) * average + self.momentum * number) * (count + 1)


def mean(numbers: Numbers, count: jax.Array, sums: Numbers) -> Numbers:
    """Return the mean of all batches; without any, the numbers at hand."""
    divisor, some = jnp.maximum(count, 1), count > 0
    return tuple(choose(some, total / divisor, number) for total, number in zip(sums, numbers, strict=True))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def mean_after(
    policy: MemoryPolicy, numbers: Numbers, count: jax.Array, sums: Numbers
) -> tuple[Numbers, jax.Array, Numbers, jax.Array]:
    """Return the mean, counter and sums after one more batch, and whether it entered.

    The mean is differentiable in the numbers of the batch. Before the first that enters, it is nan.
    """
    kept, counted, entered = policy.after(sums, numbers, count)
    return tuple([total / counted for total in kept]), counted, kept, entered


def _mean_after_jvp(policy: MemoryPolicy, primals: Any, tangents: Any) -> tuple[Any, Any]:
    (_, count, _), (dnumbers, _, _) = primals, tangents
    means, counted, kept, entered = mean_after(policy, *primals)
    share = entered.astype(jnp.float32)
    if policy.momentum is not None and not policy.restart:
        share = choose(count > 0, share * policy.momentum, share) * counted
    divisor = jnp.maximum(counted, 1)
    changes = tuple(d if isinstance(d, SymbolicZero) else d / divisor * share for d in dnumbers)
    still = jax.tree.map(no_change, (counted, kept, entered))
    return (means, counted, kept, entered), (changes, *still)


mean_after.defjvp(_mean_after_jvp, symbolic_zeros=True)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
@one_program("policy", "least")
def collected_after(
    policy: MemoryPolicy,
    least: float | None,
    stat: jax.Array,
    collecting: jax.Array,
    learned: jax.Array,
    held: jax.Array,
    stored: jax.Array | None,
    count: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return parameter, buffer and counter after a call.

    Args:
        policy: with the number of steps.
        least: what a statistic is at least; None if there is nothing to bound.
        stat: the statistic, any finite number if it is not `collecting`.
        collecting: whether the statistic is collected.
        learned: the parameter.
        held: the buffer.
        stored: the buffer in the domain of the parameter; None if that is the same.
        count: the counter.
    """
    handing_over = count == policy.limit
    stat = stat if least is None else jnp.maximum(stat, least)
    (moved,), counted, _ = policy.after((held,), (stat,), count, collecting)
    if stored is not None:
        moved = choose(handing_over, stored, moved)
    counted = choose(collecting, counted, jnp.float32(policy.limit + 1))
    return choose(handing_over, held if stored is None else stored, learned), moved, counted


def _collected_after_jvp(
    policy: MemoryPolicy, least: float | None, primals: Any, tangents: Any
) -> tuple[Any, Any]:
    after = collected_after(policy, least, *primals)
    # A quantizer may be called several times in a forward pass: the gradient of every call goes to the parameter.
    return after, (tangents[2], *(no_change(part) for part in after[1:]))


collected_after.defjvp(_collected_after_jvp, symbolic_zeros=True)
