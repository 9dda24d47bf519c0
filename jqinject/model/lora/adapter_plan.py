"""Which parameters of a model get an adapter, along which axes, and what `lora` refuses before it changes anything."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.dot import FrozenParam
from jqinject.dot.frozen.frozen_form import PER_AXIS
from jqinject.inject.errors import did_you_mean
from jqinject.model.quantizing import parameter_sites, rule_policy
from jqinject.model.quantizing.rules import Rule, matches_path
from jqinject.model.walk import ModelIndex, place_name
from jqinject.nn.base.parameter_site import PlannedParameter
from jqinject.program import Adapter, QuantizedProgram, WeightUse, dotted, listed, tracked_value
from jqinject.proxy import QuantProxyFromInjector

Rank = int | Mapping[str, int]
#: Regular expression for the path of a parameter, or of the module that holds it -> rank.
Ranks = Mapping[str, int]
Parameter = nnx.Variable[jax.Array]
T = TypeVar("T")


@dataclass(frozen=True)
class PlannedAdapter:
    """An adapter to be made.

    Attributes:
        path: of the parameter.
        uses: its contractions.
        lookups: the names of its look-ups.
        rank: of the update.
    """

    path: tracked_value.Path
    uses: tuple[WeightUse, ...]
    lookups: tuple[str, ...]
    rank: int

    @property
    def axes(self) -> tuple[tuple[int, ...], ...]:
        """Three kinds of axes: batch ones; those that the first contraction sums over; those that it leaves.

        A batch axis is one of experts or layers of a stack, which the contraction's other operand or a loop has too.
        """
        roles = _roles(self.uses[0])
        return tuple(
            tuple(axis for axis, own in enumerate(roles) if own == role)
            for role in ("batch", "contracted", "free")
        )

    def factor(self, alpha: float | None) -> float:
        """What the product of A and B is multiplied with."""
        return (self.rank if alpha is None else alpha) / self.rank

    def within(self, shape: tuple[int, ...]) -> PlannedAdapter:
        """The plan with at most the rank of a parameter's matrices.

        Args:
            shape: of the parameter.
        """
        sides = (math.prod(shape[axis] for axis in axes) for axes in self.axes[1:])
        return replace(self, rank=min(self.rank, *sides))


def _roles(use: WeightUse) -> list[str]:
    """What each axis of a parameter is in a contraction: contracted, free or batch.

    Of an axis of size 1 the program does not tell; it is what the axis before it is, or the one after it.
    """
    roles = ["" if size == 1 and axis >= use.stacked else "batch" for axis, size in enumerate(use.shape)]
    for axis in range(len(roles)):
        if (axis in use.shared) != (axis in use.free):
            roles[axis] = "contracted" if axis in use.shared else "free"
    if "" in roles and "contracted" not in roles:
        roles[roles.index("")] = "contracted"
    if "" in roles and "free" not in roles:
        roles[len(roles) - 1 - roles[::-1].index("")] = "free"
    for axis, role in enumerate(roles):
        if not role:
            before = roles[axis - 1] if axis else ""
            roles[axis] = before or next((role for role in roles if role), "contracted")
    return roles


def plan_adapters(plan: rule_policy.QuantizationPlan, ranks: Ranks) -> tuple[PlannedAdapter, ...]:
    """The adapters of the parameters that rules take; the first pattern of ranks that matches counts.

    Raises:
        ValueError: a pattern of ranks matches nothing that is contracted and taken by a rule.
    """
    planned, candidates, matched = [], [], set()
    taken = {(path, operation) for path, operation, *_ in plan.taken}
    for path, uses in parameter_sites.uses_by_path(plan.outside.uses).items():
        contractions = tuple(use for use in uses if use.operation != "take")
        if not any((path, use.operation) in taken for use in contractions):
            continue
        candidates.append(dotted(path))
        places = (dotted(path), dotted(path[:-1]))
        pattern = next((p for p in ranks if any(matches_path(p, place) for place in places)), None)
        if pattern is not None:
            matched.add(pattern)
            lookups = tuple(use.name for use in uses if use.operation == "take")
            planned.append(PlannedAdapter(path, contractions, lookups, ranks[pattern]))
    idle = [pattern for pattern in ranks if pattern not in matched]
    if idle:
        raise ValueError(_nothing(idle, candidates))
    return tuple(planned)


def _nothing(idle: Sequence[str], candidates: Sequence[str]) -> str:
    if not candidates:
        return (
            "lora: the rules take no parameter that the model contracts, so there is nothing to adapt.\n"
            "  cure: mend the rules; jqinject.rules_report(model, rules, inputs=...) shows the plan"
        )
    hints = [
        f"{pattern!r}{'; ' + hint if (hint := did_you_mean(pattern, candidates)) else ''}" for pattern in idle
    ]
    return (
        f"lora: no parameter that is contracted and taken by a rule matches the ranks' {', '.join(hints)}.\n"
        f"  parameters here: {listed(tuple(candidates))}\n"
        "  cure: mend the pattern, a regular expression for the whole path"
    )


def checked_ranks(rank: Rank) -> Ranks:
    """Ranks by pattern; a single one is that of all parameters.

    Raises:
        TypeError: not an integer, nor a dict of such.
        ValueError: below 1, or no pattern.
    """
    if rank == {}:
        raise ValueError("lora: rank={} names no parameter.\n  cure: rank=8, or rank={'.*attn.*': 8}")
    ranks = dict(rank) if isinstance(rank, Mapping) else {".*": rank}
    for pattern, value in ranks.items():
        name = f"rank[{pattern!r}]" if isinstance(rank, Mapping) else "rank"
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"lora: {name} is an integer, got {type(value).__name__} {value!r:.40}")
        if value < 1:
            raise ValueError(f"lora: {name} must be at least 1, got {value}.\n  cure: rank=8")
    return ranks


def new_adapter(
    plan: PlannedAdapter,
    variable: Parameter,
    alpha: float | None,
    dropout: float,
    base: PlannedParameter | None,
    rngs: nnx.Rngs,
    factors: tuple[jax.Array, jax.Array] | None = None,
) -> Adapter:
    """An adapter, whose update is zero unless its factors are given.

    Args:
        plan: the plan.
        variable: the float parameter.
        alpha: the update's factor times the rank; None for the rank.
        dropout: of the input.
        base: how the parameter is quantized.
        rngs: for A, and for dropout.
        factors: A and B.
    """
    a, b = (factor.astype(variable.dtype) for factor in factors or _zero_update(plan, variable, rngs))
    batch, contracted, free = plan.axes
    layer = None if dropout == 0 else nnx.Dropout(dropout, rngs=rngs)
    return Adapter(
        _placed(a, variable, (*batch, *contracted, None)),
        _placed(b, variable, (*batch, None, *free)),
        plan.path,
        contracted,
        free,
        plan.factor(alpha),
        base,
        dropout=layer,
    )


def _zero_update(plan: PlannedAdapter, variable: Parameter, rngs: nnx.Rngs) -> tuple[jax.Array, jax.Array]:
    """He's uniform numbers, and zeros."""
    shape, rank = tuple(variable.shape), plan.rank
    batch, contracted, free = plan.axes
    stack, rows, columns = ([shape[axis] for axis in axes] for axes in (batch, contracted, free))
    inputs = range(len(stack), len(stack) + len(rows))
    draw = nnx.initializers.he_uniform(in_axis=inputs, batch_axis=range(len(stack)))
    a = draw(rngs.params(), (*stack, *rows, rank), variable.dtype)
    return a, jnp.zeros((*stack, rank, *columns), variable.dtype)


def _placed(factor: jax.Array, variable: Parameter, axes: Iterable[int | None]) -> nnx.LoRAParam[jax.Array]:
    """A factor as a Variable, sharded as the axes of the parameter that it has.

    Args:
        factor: the array.
        variable: the parameter.
        axes: the parameter's axis of each of its axes; None for the rank.
    """
    axes = tuple(axes)
    array = variable.get_raw_value()
    sharding = getattr(array, "sharding", None)
    if isinstance(sharding, jax.sharding.NamedSharding) and isinstance(factor, jax.Array):
        spec = jax.sharding.PartitionSpec(*_along(tuple(sharding.spec), axes))
        factor = jax.device_put(factor, sharding.update(spec=spec))
    metadata = variable.get_metadata()
    named = {name: _along(metadata[name], axes) for name in PER_AXIS if metadata.get(name) is not None}
    on_mesh = {"mesh": metadata["mesh"]} if named and metadata.get("mesh") is not None else {}
    return nnx.LoRAParam(factor, **named, **on_mesh)


def _along(names: Iterable[T], axes: Sequence[int | None]) -> tuple[T | None, ...]:
    entries = tuple(names)
    return tuple(entries[axis] if axis is not None and axis < len(entries) else None for axis in axes)


def nearest_factors(
    dense: jax.Array, plan: PlannedAdapter, scale: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """A and B whose update is nearest to an array, in the sum of squares of each matrix: by singular values.

    A rank above that of the matrix is filled up with zeros.

    Args:
        dense: in the shape of the parameter.
        plan: the axes, and the rank.
        scale: the factor of the update.

    Returns:
        A (*batch, *contracted, rank) and B (*batch, rank, *free), float32.
    """
    batch, contracted, free = plan.axes
    shape = dense.shape
    stack, rows, columns = ([shape[axis] for axis in axes] for axes in (batch, contracted, free))
    moved = jnp.transpose(dense.astype(jnp.float32), (*batch, *contracted, *free))
    matrices = moved.reshape(*stack, math.prod(rows), math.prod(columns))
    left, values, right = jnp.linalg.svd(matrices / scale, full_matrices=False)
    root = jnp.sqrt(values)
    rank = plan.rank
    a = _cut(left * root[..., None, :], rank, -1)
    b = _cut(root[..., None] * right, rank, -2)
    return a.reshape(*stack, *rows, rank), b.reshape(*stack, rank, *columns)


def _cut(factor: jax.Array, rank: int, axis: int) -> jax.Array:
    """The first `rank` along an axis, zeros where there are fewer."""
    padding = [(0, rank if place == axis % factor.ndim else 0) for place in range(factor.ndim)]
    return jax.lax.slice_in_dim(jnp.pad(factor, padding), 0, rank, axis=axis)


def dense_update(adapter: Adapter, shape: tuple[int, ...]) -> jax.Array:
    """The update of an adapter as an array in the shape of its parameter, float32."""
    product = adapter.low_rank()
    update = product.scale * (product.a.astype(jnp.float32) * product.b.astype(jnp.float32)).sum(-1)
    return jnp.broadcast_to(update, shape)


Start = Literal["zeros", "error"]
Update = Literal["beside", "inside"]


def refuse_bias_quantizers(rules: Iterable[Rule], caller: str) -> None:
    """Refuse rules that quantize biases."""
    biased = [str(rule) for rule in rules if rule.quantizer("bias_quant") is not None]
    if biased:
        raise ValueError(
            f"{caller} runs layers as parts of the model's program, where biases have no quantizer: {biased[0]}.\n"
            "  cure: a rule without bias_quant"
        )


def check_arguments(alpha: object, dropout: float, rngs: object, start: object, update: object) -> None:
    """Refuse arguments of `lora` that have no meaning, by themselves or together."""
    if alpha is not None and not (isinstance(alpha, int | float) and math.isfinite(alpha) and alpha != 0):
        raise ValueError(f"lora: alpha is a finite number other than 0, got {alpha!r:.40}")
    if not (isinstance(dropout, int | float) and 0 <= dropout < 1):
        raise ValueError(f"lora: dropout is a share from 0 to below 1, got {dropout!r:.40}")
    if not isinstance(rngs, nnx.Rngs):
        raise TypeError(f"lora: rngs is an nnx.Rngs, got {type(rngs).__name__}.\n  cure: rngs=nnx.Rngs(0)")
    if start not in get_args(Start):
        raise ValueError(f"lora: start is 'zeros' or 'error', got {start!r:.40}")
    if update not in get_args(Update):
        raise ValueError(f"lora: update is 'beside' or 'inside', got {update!r:.40}")
    if update == "inside" and dropout:
        raise ValueError(
            f"lora: dropout is of an adapter's input, and an update inside the quantizer has none; got {dropout}.\n"
            "  cure: dropout=0; or update='beside'"
        )
    if update == "inside" and start == "error":
        raise ValueError(
            "lora: start='error' makes up for the rounding of a stored weight, and inside the quantizer the update is "
            "rounded too.\n  cure: start='zeros'; or update='beside'"
        )


def refuse_adapted(index: ModelIndex) -> None:
    """Refuse a model that has adapters, or that is quantized already."""
    adapted = tuple(dotted(path) for path, node in index.places if isinstance(node, nnx.LoRAParam))
    if adapted:
        raise ValueError(
            f"lora: the model has adapters already: {listed(adapted)}.\n"
            "  cure: jqinject.merge_lora(model) puts them into the weights; or adapt the model without them"
        )
    quantized = tuple(
        place_name(path)
        for path, node in index.places
        if isinstance(node, (*rule_policy.OURS, QuantizedProgram, FrozenParam))
    )
    if quantized:
        raise ValueError(
            f"lora: the model is quantized already, in {listed(quantized)}.\n"
            "  cure: lora(float_model, rules, ...), whose rules quantize the base"
        )


def check_bases(plan: rule_policy.QuantizationPlan) -> None:
    """Refuse quantizers that are proxies."""
    bases = plan.parameters.items()
    shared = tuple(name for name, base in bases if isinstance(base.quantizer, QuantProxyFromInjector))
    if shared:
        raise TypeError(
            f"lora: the weight quantizer of {listed(shared)} is a proxy, and frozen weights have none to share.\n"
            "  cure: its injector, such as NF4WeightPerGroupFloat"
        )
