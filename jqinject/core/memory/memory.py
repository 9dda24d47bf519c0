"""Remember the number that a scale, a zero point or a range is made from: one state machine with a policy.

A memory measures the given tensor (or the parameters that share a quantizer), and returns a statistic, a stored number,
or both while a statistic is still collected. `memory_policy.py` lists what a memory may do with the numbers of batches,
and has the arithmetic; this file has the states: training and evaluation, calibration, and partial checkpoints.
"""

from collections.abc import Callable
from dataclasses import field, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core import _protocols, check, clamping
from jqinject.core.component import Component, component, set_view
from jqinject.core.memory import memory_policy
from jqinject.core.memory.memory_policy import Number
from jqinject.core.scaling.rule import ONE, RESTRICTIONS, SCALE_FLOOR, ScaleRule
from jqinject.core.state import Part, QuantParam, QuantStat, all_counted, float_array
from jqinject.core.statistics.search import Task
from jqinject.core.statistics.statistic import in_place, statistic_of
from jqinject.core.views import cut_of
from jqinject.ops import clamps, fake_quant, lean, power, processes, sharding, ste

#: The name in the record of what a policy averages.
AVERAGED: dict[memory_policy.Kind, str] = {"running": "running_stats", "collected": "buffer"}
#: Constructor's arguments that stay attributes of the same name.
OWN = (
    *("block_scale_impl", "exponent_impl", "group_dim", "group_size", "int_quant"),
    *("quantize_zero_point", "scaling_gradient_scale", "shared_per_row"),
)


class Memory(Component):
    """Abstract: remembers numbers by a policy.

    A statistic of parameters is that of the weight that is quantized, or of all weights that share the quantizer. A
    single tracked parameter is not kept: every call passes its value, and a second reference to a layer's kernel would
    tie the two. Several are kept as the layers' own Variables, so that their shared gradient reaches every layer.

    The policy `collected`, for N steps:

    | training call | number                  | state                                                        |
    |---------------|-------------------------|--------------------------------------------------------------|
    | 1 .. N        | the batch's statistic   | `buffer` follows it; `counter` + 1                           |
    | N + 1         | `value`                 | `value` is filled from `buffer`, which holds the same number |
    | later         | `value`                 | nothing moves; `value` is learned                            |

    In evaluation it is made from `buffer` until `value` is filled. The statistic is computed only while collecting.

    The policy `filled` fills `value` at the first call in training mode, and uses it at once. Before that, evaluation
    computes the same number and stores nothing.

    Attributes:
        policy: what is remembered, and how.
        value: the parameter, if any.
        record: `counter` and what is averaged, if something is.
        stats, view: the statistic, if any, and its view.
        shape: of the statistic.
        rule: from the number to a scale; that of distances for zero points and ranges.
        searches: whether the statistic is searched.
        concat_dim: the axis along which views of several tracked parameters are joined.
        broadcastable, in_groups: how a statistic of the given tensor gets a shape that broadcasts with it: by a
            function of the statistic and the tensor's shape, or as groups.
    """

    of: ClassVar[str] = "scaling"
    kind: ClassVar[memory_policy.Kind] = "now"
    default_view: ClassVar[Any] = clamping.Identity()
    #: The initial value of a parameter or average that is not filled.
    empty: ClassVar[float] = 1.0

    policy: memory_policy.MemoryPolicy
    value: QuantParam = None  # type: ignore[assignment]
    record: QuantStat = None  # type: ignore[assignment]
    counter, buffer, running_stats = Part(), Part(), Part()
    stats: Any = None
    view: Any = None
    shape: tuple[int, ...] = ()
    rule: Any = memory_policy.DISTANCE
    searches: bool = False
    concat_dim: int = 0
    broadcastable: memory_policy.Broadcastable | None = None
    in_groups: bool = False
    affine_rescaling: memory_policy.AffineRescaling | None = None
    tracked_parameters: nnx.List[nnx.Variable[Any]] | None = None
    constant: tuple[bytes, tuple[int, ...]]  # of the policy `constant`: float32, static
    use_running_average: bool

    # Construction

    def __post_init__(self) -> None:
        arguments = dict(vars(self))
        vars(self).clear()
        vars(self).update({name: arguments[name] for name in OWN if name in arguments})
        self.begin(arguments)

    def begin(self, arguments: dict[str, Any], stored: Any = None) -> None:
        """Set what the constructor's arguments describe.

        Args:
            arguments: by name.
            stored: the initial number of the policies `constant` and `learned`, in the domain of the rule.

        Raises:
            ValueError: a shape or a momentum is none; a shift without a factor; `force_parameter` without a parameter.
        """
        of, kind, where = self.of, self.kind, type(self).__name__
        if kind in ("constant", "learned"):
            state = {"value": QuantParam(jnp.asarray(stored))}
            if kind == "constant":
                state = {"constant": (stored.tobytes(), stored.shape)}
            vars(self).update(policy=memory_policy.MemoryPolicy(kind), **state)
            return
        stats = arguments[f"{of}_stats_impl"]
        in_groups = "input_view_impl" in arguments
        view = arguments["input_view_impl" if in_groups else f"{of}_stats_input_view_shape_impl"]
        momentum = arguments.get(f"{of}_stats_momentum")
        policy = memory_policy.MemoryPolicy(
            kind,
            check.momentum(momentum, where, f"{of}_stats_momentum"),
            arguments.get("collect_stats_steps", 0),
            named=not isinstance(momentum, memory_policy.DefaultMomentum),
        )
        shape = check.shape(arguments.get(f"{of}_shape", ()), where, f"{of}_shape")
        factor, shift = (arguments.get(f"{of}_affine_{part}_init") for part in ("rescaling", "shifting"))
        if factor is None and shift is not None:
            raise ValueError(
                f"{where}: {of}_affine_shifting_init={shift} needs a factor as well: give "
                f"{of}_affine_rescaling_init=1.0."
            )
        tracked = list(arguments.get("tracked_parameter_list", ()))
        forced = arguments.get("force_parameter", False)
        vars(self).update(
            stats=stats,
            view=self.default_view if view is None else view,
            shape=shape,
            searches=_protocols.searches(stats),
            concat_dim=arguments.get(f"{of}_stats_input_concat_dim", 0),
            broadcastable=arguments.get("dynamic_scaling_broadcastable_fn"),
            in_groups=in_groups,
            tracked_parameters=memory_policy.kept_parameters(tracked, forced, where),
            affine_rescaling=None if factor is None else memory_policy.AffineRescaling(shape, factor, shift),
        )
        self.remember(policy, {AVERAGED[kind]: self.empty} if kind in AVERAGED else {})
        if kind in ("filled", "collected"):
            vars(self).update(value=QuantParam(float_array(self.empty, shape)))
        collected = arguments.get("collected_range", arguments.get("collected_zero_point"))
        if collected is not None:
            self.commit(self.rule.to_stored(float_array(collected, shape)))

    def remember(self, policy: memory_policy.MemoryPolicy, numbers: dict[str, float]) -> None:
        """Make the record of a policy.

        Args:
            policy: what is remembered.
            numbers: the names of what is averaged, with initial numbers.
        """
        vars(self).update(policy=policy)
        if policy.kind != "now":
            arrays = {name: float_array(number, self.shape) for name, number in numbers.items()}
            record = QuantStat({"counter": float_array(0.0), **arrays})
            vars(self).update(record=record, use_running_average=False)

    # What it is

    set_view = set_view

    @property
    def scale_dtype(self) -> np.dtype | None:
        """The `scale_dtype` of the rule."""
        return _protocols.scale_dtype(self.rule)

    @property
    def scale_factor(self) -> jax.Array | None:
        """The `scale_factor` of the rule."""
        return _protocols.scale_factor(self.rule)

    def has_range(self) -> bool | None:
        """Whether a batch has entered; None if nothing is collected. See `StaticRange`."""
        return all_counted(self.counter.get_value()) if self._averages else None

    @property
    def _averages(self) -> bool:
        return self.policy.kind in ("running", "mean", "collected")

    # Calls

    def number(
        self, x: Any, task: Task = None, transform: Callable[[jax.Array], jax.Array] | None = None
    ) -> Number:
        """The number for `x`; remembers it in training mode.

        Args:
            x: the tensor.
            task: for a statistic that is searched.
            transform: what is remembered, as a function of the statistic; None for the statistic itself.
        """
        kind = self.policy.kind
        if kind == "learned":
            return Number(stored=self.value.get_value())
        if kind == "constant":
            data, shape = self.constant
            return Number(stored=jnp.asarray(np.frombuffer(data, np.float32).reshape(shape)))
        if kind == "filled":
            return self._filled(x, task, transform)
        if kind == "now":
            stat = self.statistic(x, task)
            return Number(stat) if self.affine_rescaling is None else self._mapped(stat)
        if not (self.use_running_average or x.size == 0):  # evaluation changes no state
            return self._running(x, task) if kind == "running" else self._collecting(x, task, transform)
        record, rule = self.record.get_raw_value(), self.rule
        if kind == "running":
            return self._mapped(record["running_stats"])
        collected = record["buffer"] if rule.stores_statistic else rule.to_stored(record["buffer"])
        still_collecting = record["counter"] <= self.policy.limit
        return Number(stored=jnp.where(still_collecting, collected, self.value.get_value()))

    def statistic(self, x: Any, task: Task = None, active: jax.Array | None = None) -> jax.Array:
        """The statistic of `x`, or of the tracked parameters; zeros where it is not `active`."""
        tracked, view = self.tracked_parameters, self.view
        if tracked is not None and (len(tracked) > 1 or x is None):
            x = tuple(variable.get_value().astype(jnp.float32) for variable in reversed(tracked))
            if not self.searches:
                self._check_joint(tracked, [jax.eval_shape(view, part) for part in x])
        elif x is None:
            raise TypeError(
                f"{type(self).__name__} needs a tensor: call it with the weight, or build it with force_parameter=True."
            )
        else:
            x = x.astype(jnp.float32)
        if self.searches:
            stat = self.stats(x, task, active)
        else:
            of_parameter = self.policy.kind in ("now", "filled")
            stat = statistic_of(self.stats, view, x, self.concat_dim, of_parameter, active)
        if stat.shape == self.shape:
            return stat
        return check.statistic_shape(stat, self.shape, type(self).__name__, f"{self.of}_shape")

    def _mapped(self, stat: jax.Array) -> Number:
        if self.affine_rescaling is None:
            return Number(stat)
        return Number(stored=self.affine_rescaling(self.to_stored(stat)))

    def to_stored(self, stat: jax.Array) -> jax.Array:
        """A statistic, bounded, in the domain of the rule."""
        domain = self.rule
        return domain.to_stored(domain.clamped(stat))

    def _filled(self, x: object, task: Task, transform: Any) -> Number:
        """The parameter, or what will fill it; with the gradient of the parameter."""
        learned, done = self.value.get_value(), self.counter.get_value() > 0

        def first() -> jax.Array:
            stat = self.statistic(x, task)
            number = self._mapped(stat if transform is None else transform(stat))
            stored = self.to_stored(number.statistic) if number.stored is None else number.stored
            return sharding.sharded_as(stored, learned)

        if not processes.is_traced(done):
            fresh = learned if bool(done) else first()
        else:
            fresh = jax.lax.cond(done, lambda: jnp.ones_like(learned), first)
        current = jax.lax.stop_gradient(jnp.where(done, learned, fresh))
        if not self.use_running_average:
            keep = jnp.logical_or(done, lean.all_finite(current))
            # A shared quantizer is called once per weight: the gradient of every call goes to the parameter.
            filled = jnp.where(keep, current, jax.lax.stop_gradient(learned))
            self.value.set_value(ste.with_gradient_of(learned, filled))
            self.counter.set_value(keep.astype(jnp.float32))
        return Number(stored=ste.with_gradient_of(learned, current))

    def _running(self, x: jax.Array, task: Task) -> Number:
        """The batch's statistic, which enters the running one."""
        stat, arrays = self.statistic(x, task), self.record.get_raw_value()
        number = jax.lax.stop_gradient(stat)
        (averaged,), count, _ = self.policy.after((arrays["running_stats"],), (number,), arrays["counter"])
        self.record.set_value({"counter": count, "running_stats": averaged})
        return self._mapped(stat)

    def _collecting(self, x: jax.Array, task: Task, transform: Any) -> Number:
        """Statistic and parameter, one of which is used; collects and hands over."""
        policy, domain, record = self.policy, self.rule, self.record.get_raw_value()
        count, buffer = record["counter"], record["buffer"]
        collecting = count < policy.limit
        stat = self.statistic(x, task, collecting)
        stat = stat if transform is None else transform(stat)
        stat = stat if domain.least is not None else domain.clamped(stat)
        stored = None if domain.stores_statistic else domain.to_stored(buffer)
        learned, buffer, count = memory_policy.collected_after(
            policy, domain.least, stat, collecting, self.value.get_value(), buffer, stored, count
        )
        self.record.set_value({"counter": count, "buffer": buffer})
        self.value.set_value(learned)
        return Number(stat, learned, collecting)

    # State

    def begin_calibration(self) -> None:
        """Restart the average, for any number of batches."""
        if self._averages:
            arrays, mean = self.record.get_raw_value(), self.policy.kind == "mean"
            fresh = arrays if mean else ("counter",)
            self.record.set_value({**arrays, **{name: jnp.zeros_like(arrays[name]) for name in fresh}})
            if not mean:
                self.policy = replace(self.policy, calibrates=True)
            self.use_running_average = False

    def end_calibration(self) -> None:
        """Use what was collected: as the parameter, learned from the next call on; else, go on as in training."""
        if self.policy.kind == "collected":
            count = self.counter.get_value()
            self._fill((count > 0) & (count <= self.policy.limit))
        if self.policy.calibrates:
            self.policy = replace(self.policy, calibrates=False)

    def _fill(self, due: jax.Array) -> None:
        """Move the buffer into the parameter, for each layer (of a stack) where that is due."""
        value, buffer, count = self.value.get_value(), self.buffer.get_value(), self.counter.get_value()
        fills = due.reshape(*due.shape, *(1,) * (value.ndim - due.ndim))
        collected = jax.lax.stop_gradient(self.rule.to_stored(buffer))
        self.value.set_value(jnp.where(fills, collected, jax.lax.stop_gradient(value)))
        count = jnp.where(due, jnp.float32(self.policy.steps + 1), count)
        self.record.set_value({"counter": count, "buffer": jnp.where(fills, collected, buffer)})

    def commit(self, stored: jax.Array) -> None:
        """Take a number as collected: it is learned at once.

        Args:
            stored: in the domain of the rule, of the shape of `value`.
        """
        self.value.set_value(stored)
        over = jnp.full_like(self.counter.get_value(), self.policy.steps + 1)
        self.record.set_value({"counter": over, "buffer": stored})

    def rescaled(self, factors: _protocols.Factors) -> dict[str, jax.Array]:
        """See `Factors`."""
        if self._averages:
            raise ValueError(f"{type(self).__name__} does not know how")
        if self.value is None:
            return {}
        if self.rule is memory_policy.DISTANCE:
            factors.check_signs()  # a range that reaches below zero would reach above it
        value = self.rule.from_stored(self.value.get_value())
        return {"value": self.rule.to_stored(factors.times(value))}

    def complete_state(self, entries: dict[str, Any]) -> dict[str, Any]:
        """Translate a checkpoint's entries for this component.

        | entries                        | meaning                                                                  |
        |--------------------------------|--------------------------------------------------------------------------|
        | `running_stats`, no `counter`  | it counts as collected                                                   |
        | `running_stats`, for a `value` | statistics of a run without parameter: they become the `value` of a scale |
        | `value`, no `counter`          | the parameter is filled                                                  |
        | `value`, no `buffer`           | the buffer is what the value says                                        |
        | `buffer`, no `value`           | collection goes on; `value` is not filled yet                            |

        Args:
            entries: variable name -> array, as found in the checkpoint; names of the record with or without `record.`.

        Returns:
            The entries to load.
        """
        return memory_policy.completed_entries(self, entries)

    def _check_joint(self, tracked: Any, views: list[Any]) -> None:
        """Refuse views that cannot be joined along an axis."""
        dim = self.concat_dim
        if len({v.shape[:dim] + v.shape[dim:][1:] for v in views}) > 1:
            shapes = [tuple(variable.get_value().shape) for variable in tracked]
            raise ValueError(
                f"{type(self).__name__}: parameters of shapes {shapes} share one quantizer, but their views "
                f"{[v.shape for v in reversed(views)]} cannot be joined along axis {dim}. Layers that share a scale "
                "per channel need the same number of output channels; use a scale per tensor, or two quantizers."
            )


class Dynamic(Memory):
    """Abstract: the statistic of the given tensor, in training and evaluation. No state."""

    is_dynamic = True

    def statistic(self, x: jax.Array, task: Task = None, active: jax.Array | None = None) -> jax.Array:
        """The statistic, in a shape that broadcasts with the tensor; of groups, with 1 along a group's elements."""
        stats, view, x = self.stats, self.view, x.astype(jnp.float32)
        if self.in_groups and not self.searches:
            stats, viewed = in_place(stats, view, x)
            cut = cut_of(view, x) if viewed.ndim == x.ndim else None
            return stats(viewed) if cut is None else jnp.expand_dims(stats(viewed), cut.axis + 1)
        stat = stats(view(x), task) if self.searches else stats(view(x))
        if self.broadcastable is not None:
            return self.broadcastable(stat, x.shape)
        # Rows of a matrix have one number each.
        broadcasts = self.in_groups or stat.ndim in (0, x.ndim)
        return stat if broadcasts else stat.reshape((*x.shape[:-1], 1))


@component
class MemoryScaling(Memory):
    """Abstract: a scale by a rule from the number of a memory.

    A subclass is a dataclass of its constructor's arguments, and states the kind of policy.

    Args:
        scaling_min_val: the minimum before the division; never less than 2**-64.

    Raises:
        ValueError: `scaling_min_val` is negative or not finite.
    """

    scaling_min_val: check.Minimum | None = field(default=None, kw_only=True)

    def begin(self, arguments: dict[str, Any], stored: object = None) -> None:
        """Set the rule, and what the base sets."""
        restrictions = {name: arguments[name] for name in RESTRICTIONS if arguments.get(name) is not None}
        floor, of = max(arguments["scaling_min_val"] or 0.0, SCALE_FLOOR), arguments.get("scaling_stats_impl")
        self.rule = ScaleRule(**restrictions, floor=floor, of_magnitude=_protocols.never_negative(of))
        super().begin(arguments, stored)

    def __call__(
        self,
        x: jax.Array | None = None,
        threshold: Any = None,
        task: Task = None,
        number: Number | None = None,
    ) -> jax.Array:
        """The scale of `x`, float32.

        Args:
            x: the tensor.
            threshold: the number of integer steps; None means 1.
            task: for a statistic that is searched.
            number: instead of the memory's own for `x`.
        """
        rule, steps = self.rule, threshold
        stat, stored, collecting = self.number(x, task) if number is None else number
        after = rule.restrict_scale_threshold_impl
        if threshold is not None and not (
            rule.keeps_threshold and isinstance(threshold, int | float) and threshold > 0
        ):
            steps = rule.steps(threshold)
        if collecting is not None:
            if not (rule.stores_statistic and rule.keeps_threshold and after is None):
                clamped = rule.clamped(stat)
                unrestricted = clamped if threshold is None else power.divide(clamped, threshold)
                learned = MemoryScaling.__call__(self, None, threshold, number=Number(stored=stored))
                return lean.choose(collecting, unrestricted, learned)
            stored = lean.choose(collecting, stat, stored)
        elif stored is None and not rule.stores_statistic:
            stored = rule.to_stored(rule.clamped(stat))
        if stored is not None and not rule.keeps_stored:
            value = clamps.signed_clamp_min_ste(rule.from_stored(stored), rule.floor)
            scale = value if steps is None else power.divide(value, steps)
        else:
            constant, divisor = (None, steps) if isinstance(steps, jax.Array) else (float(steps or 1), ONE)
            value = stat if stored is None else stored
            scale = fake_quant.to_scale(rule.floor, stored is not None, constant, value, divisor)
        return scale if after is None else after(scale)


@component
class DividedScaling(MemoryScaling):
    """Abstract: a scale whose number is divided by the threshold.

    Args:
        restrict_threshold_impl: which values of the threshold are allowed; None means `restrict_scaling_impl`.
        restrict_scale_threshold_impl: applied to the quotient; None means nothing.
    """

    restrict_threshold_impl: _protocols.Restrict | None = field(default=None, kw_only=True)
    restrict_scale_threshold_impl: _protocols.Restrict | None = field(default=None, kw_only=True)
