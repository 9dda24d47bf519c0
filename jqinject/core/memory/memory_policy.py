"""How a memory makes one number of those of many batches: the policy, and the arithmetic that all memories share.

Here are also the numbers that memories return, the domain in which they are learned, and affine maps of statistics.

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

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.custom_derivatives import SymbolicZero

from jqinject.core import check, component, state
from jqinject.ops import processes, reductions, ste
from jqinject.ops.lean import all_finite, choose, no_change


class Number(NamedTuple):
    """What a memory returns.

    Attributes:
        statistic: a statistic; None if absent.
        stored: a number in the domain in which it is learned; None if absent.
        collecting: a bool scalar, if there are both: whether the statistic is used.
    """

    statistic: Any = None
    stored: Any = None
    collecting: Any = None


@dataclass(frozen=True)
class _Distance:
    """Distances in floats, learned directly: zero points. See `ScaleRule`."""

    least = None
    stores_statistic = True

    def clamped(self, stat: jax.Array) -> jax.Array:
        """The statistic itself."""
        return stat

    to_stored = from_stored = clamped


DISTANCE = _Distance()


class AffineRescaling(component.InnerModule):
    """`weight * x + bias`, both learned; without `bias` unless it has an initial value.

    Args:
        shape: shape of the parameters.
        weight_init: initial `affine_weight`.
        bias_init: initial `affine_bias`, or None if absent.
    """

    affine_bias: state.QuantParam | None = None

    def __init__(self, shape: tuple[int, ...], weight_init: float, bias_init: float | None = None) -> None:
        self.affine_weight = state.QuantParam(state.float_array(weight_init, shape))
        if bias_init is not None:
            self.affine_bias = state.QuantParam(state.float_array(bias_init, shape))

    def __call__(self, x: jax.Array) -> jax.Array:
        """The mapped number."""
        y = x * self.affine_weight.get_value()
        return y if self.affine_bias is None else y + self.affine_bias.get_value()


def initial_number(init: Any, shape: object, where: str, names: tuple[str, str]) -> Any:
    """An initial value of a given shape, float32: a NumPy array, or a traced one while its layer is traced.

    Args:
        init: a number or an array.
        shape: None for its own.
        where, names: for errors: the component, and the names of value and shape.

    Raises:
        ValueError: the shapes disagree, or the value is not finite.
    """
    traced, sizes = processes.is_traced(init), check.optional(check.shape)(shape, where, names[1])
    value = init.astype(jnp.float32) if traced else np.array(init, dtype=np.float32)
    if not (traced or np.all(np.isfinite(value))):
        raise ValueError(f"{where}: {names[0]} must be finite, got {init!r}.")
    if sizes is None or value.shape == sizes:
        return value
    if value.shape != ():
        raise ValueError(
            f"{where}: {names[0]} has shape {value.shape}, {names[1]} is {sizes}. Give a number, or an array of "
            f"exactly that shape: {names[0]}.reshape({sizes})."
        )
    return (jnp if traced else np).full(sizes, value)


def kept_parameters(
    tracked: list[Any], force_parameter: bool, where: str
) -> nnx.List[nnx.Variable[Any]] | None:
    """The Variables that several layers share a quantizer of, which it reads at every call; None for a single one."""
    if force_parameter and not tracked:
        raise ValueError(
            f"{where}: force_parameter=True needs a parameter in tracked_parameter_list, got none."
        )
    if len(tracked) < 2 and not force_parameter:
        return None
    return nnx.List([p if isinstance(p, nnx.Variable) else state.QuantStat(jnp.asarray(p)) for p in tracked])


Broadcastable = Callable[[jax.Array, tuple[int, ...]], jax.Array]


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
        self, averages: Numbers, numbers: Numbers, count: jax.Array, active: jax.Array | None = None
    ) -> tuple[Numbers, jax.Array, jax.Array]:
        """Return what is held after one more batch, the counter, and whether the batch entered.

        A batch enters unless a number, or what would be held, is not finite. The policy `mean` holds sums, as Qwix
        does; with a momentum, averages times the count.

        Args:
            averages: the averages or sums.
            numbers: of the batch.
            count: how many batches have entered.
            active: whether the memory still takes batches; None for always.
        """
        pairs = zip(averages, numbers, strict=True)
        grown = tuple([self._grown(old, number, count) for old, number in pairs])
        # One number for each counter, or several that enter together. Ends on both sides of 0 have a finite sum if both
        # are finite, and it cannot overflow.
        total = grown[0] if len(grown) == 1 else jax.lax.add(*grown)
        enters = jnp.isfinite(total) if total.shape == count.shape else all_finite(total)
        enters = enters if active is None else enters & active
        counted = choose(enters, jnp.ones_like(count) if self.restart else count + 1, count)
        if self.kind == "mean" and self.momentum is None and not self.restart:
            enters = counted > count  # a float32 counter stays at 2^24, and the sums with it
        chosen = tuple([choose(enters, new, old) for new, old in zip(grown, averages, strict=True)])
        return chosen, counted, enters

    def _grown(self, old: jax.Array, number: jax.Array, count: jax.Array) -> jax.Array:
        if self.restart:
            return number
        if self.kind != "mean":
            return reductions.running_mean(old, number, count, self.weight)
        if self.momentum is None:
            return old + number
        average = choose(count > 0, old / jnp.maximum(count, 1.0), number)
        return ((1 - self.momentum) * average + self.momentum * number) * (count + 1)


def mean(numbers: Numbers, count: jax.Array, sums: Numbers) -> Numbers:
    """Return the mean of all batches; without any, the given numbers."""
    divisor, some = jnp.maximum(count, 1), count > 0
    return tuple(choose(some, total / divisor, number) for total, number in zip(sums, numbers, strict=True))


@ste.custom_jvp(0)
def mean_after(
    policy: MemoryPolicy, numbers: Numbers, count: jax.Array, sums: Numbers
) -> tuple[Numbers, jax.Array, Numbers, jax.Array]:
    """Return the mean, counter and sums after one more batch, and whether it entered.

    The mean is differentiable in the numbers of the batch. Before the first that enters, it is nan.
    """
    totals, counted, entered = policy.after(sums, numbers, count)
    return tuple([total / counted for total in totals]), counted, totals, entered


def _mean_after_jvp(policy: MemoryPolicy, primals: ste.Primals, tangents: ste.Tangents) -> tuple[Any, Any]:
    (numbers, count, sums), (dnumbers, _, _) = primals, tangents
    totals, counted, entered = policy.after(sums, numbers, count)
    means = tuple([total / counted for total in totals])
    divisor = choose(entered, counted, np.inf)  # a batch that stays out changes nothing
    changes = tuple([d if isinstance(d, SymbolicZero) else d / divisor for d in dnumbers])
    if policy.momentum is not None and not policy.restart:
        weight = choose(count > 0, policy.momentum, jnp.ones_like(count)) * counted
        changes = tuple([d if isinstance(d, SymbolicZero) else d * weight for d in changes])
    still = jax.tree.map(no_change, (counted, totals, entered))
    return (means, counted, totals, entered), (changes, *still)


mean_after.defjvp(_mean_after_jvp, symbolic_zeros=True)


@ste.custom_jvp(0, 1)
@processes.one_program("policy", "least")
def collected_after(
    policy: MemoryPolicy,
    least: float | None,
    stat: jax.Array,
    collecting: jax.Array,
    learned: jax.Array,
    buffer: jax.Array,
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
        buffer: the buffer.
        stored: the buffer in the domain of the parameter; None if that is the same.
        count: the counter.
    """
    handing_over = count == policy.limit
    stat = stat if least is None else jnp.maximum(stat, least)
    (moved,), counted, _ = policy.after((buffer,), (stat,), count, collecting)
    if stored is not None:
        moved = choose(handing_over, stored, moved)
    counted = choose(collecting, counted, jnp.float32(policy.limit + 1))
    return choose(handing_over, buffer if stored is None else stored, learned), moved, counted


def _collected_after_jvp(
    policy: MemoryPolicy, least: float | None, primals: ste.Primals, tangents: ste.Tangents
) -> tuple[Any, Any]:
    after = collected_after(policy, least, *primals)
    # A quantizer may be called several times in a forward pass: the gradient of every call goes to the parameter.
    return after, (tangents[2], *(no_change(part) for part in after[1:]))


collected_after.defjvp(_collected_after_jvp, symbolic_zeros=True)


#: What checkpoints of some policies hold, and others have no use for.
OTHERS = ("affine_rescaling", "buffer", "counter", "running_stats")


def completed_entries(memory: Any, entries: dict[str, Any]) -> dict[str, Any]:
    """See `Memory.complete_state`."""
    kind, rule = memory.policy.kind, memory.rule
    own = () if memory.record is None else memory.record.get_raw_value()
    named = {
        name.removeprefix("record.").removeprefix("runtime_stats."): entry for name, entry in entries.items()
    }
    if kind in ("learned", "collected"):
        running = named.get("running_stats")
        named = {n: x for n, x in named.items() if n in own or n.partition(".")[0] not in OTHERS}
        if running is not None and "value" not in named and rule is not DISTANCE:
            stored = memory.to_stored(jnp.abs(jnp.asarray(running).astype(jnp.float32)))
            named["value"] = stored.reshape(memory.value.get_value().shape) if kind == "learned" else stored
            named.pop("counter", None)
    if "value" in named and "counter" in own:
        named.setdefault("counter", state.float_array(memory.policy.steps + 1))
    elif "running_stats" in named:
        named.setdefault("counter", state.float_array(1.0))
    if "value" in named and "buffer" in own and "buffer" not in named:
        # A learned scale may be negative, a statistic is not.
        stat = rule.from_stored(jnp.asarray(named["value"]).astype(jnp.float32))
        named["buffer"] = jnp.where(named["counter"] > memory.policy.steps, memory.to_stored(stat), stat)
    elif "buffer" in named:
        named.setdefault("value", state.float_array(memory.empty, memory.shape))
    return {f"record.{name}" if name in own else name: entry for name, entry in named.items()}
