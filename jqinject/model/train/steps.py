"""Training steps for amax statistics: all calls of a step count as one, by maximum."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen import fp8_ops

from jqinject.core import GradSlot, _protocols
from jqinject.model.walk import place_name, walk
from jqinject.ops.lean import known_zeros
from jqinject.proxy import GradQuantProxyFromInjector

# Flax's float32 whose sum is the maximum, made for the same purpose.
MAXIMUM_ADDING = fp8_ops.fm32


def begin_step(*models: object) -> None:
    """Open a training step: until `end_step`, amax statistics collect by maximum and the scales stay as they are.

    For steps of several calls, and for `nnx.vjp`. Gradient accumulation over several calls of
    `jqinject.value_and_grad` (which opens and ends a step itself if none is open):

        jqinject.begin_step(model)
        for batch in micro_batches:
            loss, gradients = jqinject.value_and_grad(loss_fn)(model, batch)
            ...
        jqinject.end_step(model)

    The histories are then those of one big batch.

    Args:
        models: modules, or containers of them.

    Raises:
        ValueError: a step is already open, or statistics are missing. Nothing is changed then.

    Example:
        >>> from jqinject.nn import QuantIdentity
        >>> from jqinject.quant import Fp8e4m3ActPerTensorDelayed
        >>> identity = QuantIdentity(Fp8e4m3ActPerTensorDelayed, amax_history_length=2)
        >>> begin_step(identity)
        >>> _ = identity(jnp.array([3.0])), identity(jnp.array([2.0]))
        >>> end_step(identity)
        >>> identity.act_quant.amax_history.amax_history.get_value()
        Array([3., 0.], dtype=float32)
    """
    scalings = amax_scalings(models)
    if any(scaling.in_step for scaling in scalings):
        raise ValueError(
            "begin_step: a step is open already.\n  cure: end it with jqinject.end_step(model); value_and_grad "
            "opens and ends steps by itself"
        )
    for scaling in scalings:
        scaling.begin_step()
    set_slots(scalings, adding=True)


def end_step(*models: object, gradients: object = None) -> Any:
    """End a training step: every amax history that has seen data in it rolls once.

    Args:
        models: as for `begin_step`.
        gradients: the model's cotangents from the function that `nnx.vjp` returns, if the backward pass was run by
            hand; those of the gradient quantizers' slots are read from it.

    Returns:
        The gradients of the parameters alone, an `nnx.State`; None without `gradients`.

    Raises:
        ValueError: no step is open, or `gradients` are given for several models, or hold no slots.

    Example:
        >>> from jqinject.nn import QuantIdentity
        >>> from jqinject.quant import Fp8e5m2GradPerTensorCurrent
        >>> identity = QuantIdentity(None, grad_quant=Fp8e5m2GradPerTensorCurrent)
        >>> begin_step(identity)
        >>> y, pull_back = nnx.vjp(lambda m, x: m(x), identity, jnp.ones(2), graph=False)
        >>> of_model, of_x = pull_back(jnp.array([1.0, -4.0]))
        >>> _ = end_step(identity, gradients=of_model)
        >>> float(identity.grad_quant.amax_history.newest)
        4.0
    """
    scalings = amax_scalings(models)
    if not all(scaling.in_step for scaling in scalings):
        raise ValueError("end_step: no step is open.\n  cure: jqinject.begin_step(model) before the step")
    rest = None
    if gradients is not None:
        if len(models) != 1:
            raise ValueError(f"end_step: gradients belong to one model, got {len(models)}")
        deliver(models, [gradients])
        is_state = isinstance(gradients, nnx.State)
        rest = without_slots(gradients) if is_state else nnx.state(gradients, nnx.Param)
    close_steps(scalings)
    return rest


# --- the parts of value_and_grad


def amax_scalings(roots: object) -> list[_protocols.StepStatistic]:
    """Every amax-based scale below the roots, each once.

    Raises:
        ValueError: one lacks its statistics.
    """
    scalings: dict[int, _protocols.StepStatistic] = {}
    for path, module in walk(roots):
        node: Any = module
        if isinstance(module, GradQuantProxyFromInjector) and node.is_quant_enabled:
            _check_complete(path, getattr(node.tensor_quant, "scaling_impl", None), gradient=True)
        if _protocols.collects_in_steps(node):
            _check_complete(path, node, gradient=False)
            scalings[id(node)] = node
    return list(scalings.values())


def _check_complete(path: tuple[str, ...], scaling: object, gradient: bool) -> None:
    if not _protocols.collects_in_steps(scaling):
        return
    needed = {"record"} | ({"slot"} if gradient else set())
    missing = sorted(needed - set(vars(scaling)))
    if missing:
        raise ValueError(
            f"the statistics of {place_name(path)} were filtered away: {', '.join(missing)} missing.\n  cure: keep the "
            "variables of types jqinject.core.QuantStat, GradStat and GradSlot when splitting or filtering the model's "
            "state"
        )


def close_steps(scalings: Iterable[_protocols.StepStatistic]) -> None:
    """Enter the collected amaxes into the histories."""
    listed = list(scalings)
    set_slots(listed, adding=False)
    for scaling in listed:
        scaling.end_step()


def set_slots(scalings: Iterable[_protocols.StepStatistic], *, adding: bool) -> None:
    """Empty the slots, and make them add by maximum or be plain float32."""
    for scaling in scalings:
        if scaling.slot is not None:
            zeros = known_zeros(scaling.slot.get_value(), jnp.float32)
            scaling.slot.set_value(adding_by_maximum(zeros) if adding else zeros)


def adding_by_maximum(zeros: jax.Array) -> jax.Array:
    """Zeros whose cotangents add by maximum."""
    return jax.lax.convert_element_type(zeros, MAXIMUM_ADDING)


def deliver(models: Sequence[object], gradients: Sequence[object]) -> None:
    """Give every gradient scale the cotangent that the backward pass left in its slot.

    Args:
        models: the differentiated modules, or containers of them.
        gradients: the gradients of each: an `nnx.State`, a module of gradients, or a container of these.

    Raises:
        ValueError: a slot is not among the gradients.
    """
    left = _left_in_slots(models, gradients)
    listening = [scaling for scaling in amax_scalings(models) if scaling.slot is not None]
    if any(id(scaling.slot) not in left for scaling in listening):
        raise ValueError(
            "the gradients hold nothing for a gradient quantizer's slot: slots (jqinject.core.GradSlot) have to be "
            "differentiated too.\n  cure: jqinject.value_and_grad does it; by hand, "
            "nnx.DiffState(0, nnx.Any(nnx.Param, GradSlot))"
        )
    for scaling in listening:
        scaling.collect(jax.lax.convert_element_type(left[id(scaling.slot)], jnp.float32))


def _left_in_slots(models: object, gradients: object) -> dict[int, jax.Array]:
    """Identity of a slot -> its cotangent. NNX lists shared Variables under their first path only."""
    modules, of_modules = (jax.tree.leaves(tree, is_leaf=_is_module) for tree in (models, gradients))
    left: dict[int, jax.Array] = {}
    for module, of_module in zip(modules, of_modules, strict=True):
        if isinstance(module, nnx.Pytree):
            state = of_module if isinstance(of_module, nnx.State) else nnx.state(of_module, GradSlot)
            cotangents = {path: leaf for path, leaf in nnx.to_flat_state(state) if isinstance(leaf, GradSlot)}
            slots = nnx.to_flat_state(nnx.state(module, GradSlot))
            left |= {id(slot): cotangents[path].get_value() for path, slot in slots if path in cotangents}
    return left


def _is_module(node: object) -> bool:
    return isinstance(node, nnx.Pytree | nnx.State)


def without_slots(gradients: object) -> Any:
    """The gradients of everything but slots: of a State, or a container of States."""
    others = nnx.Not(nnx.OfType(GradSlot))
    return jax.tree.map(
        lambda of: nnx.filter_state(of, others) if isinstance(of, nnx.State) else of,
        gradients,
        is_leaf=_is_module,
    )
