"""`jax.shard_map` in a program: quantizers reach into the function that each device runs on its shards.

A parameter is quantized as a whole before it is divided: its payload is divided as the parameter is, and its scales
along the axes that they vary along. A range of activations is that of the shards of all devices.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jqinject.core import GradSlot, QuantStat
from jqinject.program.cache_writes import opened
from jqinject.program.jaxpr import Equation
from jqinject.program.moves import METADATA, arrays_of, with_arrays
from jqinject.program.nested import Inside, State, Step, Values, carried, settled_output, with_ranges
from jqinject.program.parameters import parameter
from jqinject.program.run import Run
from jqinject.program.tracked_value import Tracked, shape_of
from jqinject.quant_tensor import QuantTensor, is_grouped, is_quantized, shaping

V = TypeVar("V")
Names = tuple[object, ...]
Arrays = Mapping[str, jax.Array]


class Shards(NamedTuple):
    """An input of a mapped function.

    Attributes:
        arrays: what is divided.
        specs: how each is.
        inside: from the shards of one device to the input that it sees.
    """

    arrays: list[jax.Array]
    specs: list[P]
    inside: Callable[[list[jax.Array]], Tracked]


def mapped_over_devices(run: Run, eqn: Equation, inputs: list[Tracked], path: str) -> list[Tracked] | None:
    """Run a function that is mapped over shards; None for policies that quantize parameters where they are contracted.

    Raises:
        ValueError: a quantizer inside records gradients, and JAX does not keep track of what varies between devices.
    """
    if not run.policy.follows_parameters:
        return None
    params, axes, part, (body, *_) = (
        eqn.params,
        eqn.manual_axes,
        run.numbered_part(path, "shard_map"),
        eqn.bodies,
    )
    mesh, out_specs, checks = params["mesh"], list(params["out_specs"]), params["check_vma"]
    rows = zip(inputs, params["in_specs"], strict=True)
    shards = [_divided(parameter(run, x), spec, mesh) for x, spec in rows]
    specs, same = [own.specs for own in shards], P()

    def entered(values: list[list[jax.Array]]) -> list[Tracked]:
        return [own.inside(arrays) for own, arrays in zip(shards, values, strict=True)]

    def on_device(run: Run, entered: list[Tracked]) -> list[Tracked]:
        run.part, run.mesh_axes = part, (*run.mesh_axes, *axes)
        outputs = enumerate(run.run(body, entered, path))
        return [settled_output(run, out, run.placed(path, f"output{i}")) for i, out in outputs]

    def mapped(function: Callable[..., V], in_specs: object, out_specs: object) -> Callable[..., V]:
        return jax.shard_map(
            function,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(axes),
            check_vma=checks,
        )

    def wrap(steps: Sequence[Step]) -> Step:
        (step,) = steps

        def of_device(state: State, values: list[object]) -> tuple[list[object], list[object], State]:
            outputs, (after, left) = step(state, values)
            if not checks:
                after = tuple(_of_all_devices(*both, axes) for both in zip(state[0], after, strict=True))
            return outputs[: len(out_specs)], outputs[len(out_specs) :], (after, left)

        def on_devices(state: State, values: list[object]) -> tuple[list[object], object]:
            _check_gradients(state[0], checks, path)
            outputs, more, state = mapped(of_device, (same, specs), (out_specs, same, same))(state, values)
            return [*outputs, *more], state

        return on_devices

    def look(function: Callable[[Values], Values], values: Values) -> object:
        return jax.eval_shape(lambda: mapped(function, (specs,), out_specs)(values))

    values = [own.arrays for own in shards]
    return carried(run, [on_device], inputs, wrap, Inside(values, values, entered, look=look))


def _check_gradients(states: State, checks: bool, path: str) -> None:
    """Refuse quantizers that record gradients where the shards' records would be added up."""
    variables = jax.tree.leaves(states, is_leaf=lambda x: isinstance(x, GradSlot))
    if not checks and any(isinstance(x, GradSlot) for x in variables):
        raise ValueError(
            f"{path or 'the model'}: a quantizer inside jax.shard_map records gradients, and with check_vma=False JAX "
            "adds up what the devices record.\n  cure: jax.shard_map(..., check_vma=True); or a quantizer of gradients "
            "without a history"
        )


def _of_all_devices(before: State, after: State, axes: tuple[str, ...]) -> State:
    """A state with the largest ranges of all devices, where JAX does not check that they are the same."""

    def largest(x: jax.Array) -> jax.Array:
        return jax.lax.pmax(jax.lax.stop_gradient(x), axes)

    return with_ranges(lambda name, old, new: jax.tree.map(largest, new), before, after, QuantStat)


def _divided(x: Tracked, spec: P, mesh: Mesh | AbstractMesh) -> Shards:
    """An input with what is behind its value, divided."""
    names: Names = (*spec, *(None,) * (len(shape_of(x)) - len(spec)))
    tensor = x.value
    layout = _layout(tensor, names, mesh) if x.is_weight and is_quantized(tensor) and shape_of(x) else None
    if layout is None:
        state = x.state if x.state is not None and x.state.places is None and not any(names) else None
        array = opened(replace(x, chosen=None, twins={})).array
        arrays, specs, of_arrays = {"": array}, {"": spec}, lambda arrays: arrays[""]
    else:
        state, (arrays, specs, of_arrays) = None, layout
    parts = arrays, x.unrounded, x.low_rank
    updates = (
        None
        if x.low_rank is None
        else jax.tree.map(lambda a: _spec(a, (*names, None), shape_of(x)), x.low_rank)
    )
    leaves, tree = jax.tree.flatten(parts)
    all_specs = jax.tree.leaves((specs, None if x.unrounded is None else spec, updates), is_leaf=_is_spec)

    def inside(leaves: list[jax.Array]) -> Tracked:
        own, unrounded, low_rank = jax.tree.unflatten(tree, leaves)
        facts = {"unrounded": unrounded, "low_rank": low_rank, "chosen": x.chosen, "state": state}
        return replace(x.with_value(of_arrays(own)), **facts)

    placed = [_placed(array, own, mesh) for array, own in zip(leaves, all_specs, strict=True)]
    return Shards(placed, all_specs, inside)


Layout = tuple[Arrays, Mapping[str, P], Callable[[Arrays], QuantTensor]]


def _layout(tensor: QuantTensor, names: Names, mesh: Mesh | AbstractMesh) -> Layout | None:
    """The arrays of a quantized parameter, how each is divided, and the parameter of their shards.

    None if shards would cut groups; then the dequantized parameter is divided.
    """
    inner, of_inner = tensor, lambda inner: inner
    if is_grouped(tensor):
        along = tensor.groups.dim % tensor.ndim
        shards = math.prod(mesh.shape[name] for name in jax.tree.leaves(names[along]))
        length, left = divmod(tensor.groups.length, shards)
        if left or (shards > 1 and length % tensor.groups.size):
            return None
        groups, lies = replace(tensor.groups, length=length), tensor.as_it_lies
        inner, of_inner = tensor.grouped if lies is None else lies, lambda inner: tensor.moved(inner, groups)
        names = names if lies is not None else (*names[: along + 1], None, *names[along + 1 :])
    shape, arrays = inner.shape, arrays_of(inner)
    arrays |= {name: shaping.full_rank(arrays[name], inner.ndim) for name in METADATA if name in arrays}
    specs = {name: _spec(array, names, shape) for name, array in arrays.items()}
    return arrays, specs, lambda arrays: of_inner(with_arrays(inner, arrays))


def _spec(array: jax.Array, names: Names, shape: tuple[int, ...]) -> P:
    """How an array is divided that has size 1 where it does not vary along a parameter's axes."""
    sizes = (*shape, *array.shape[len(shape) :])
    return P(
        *(name if own == size else None for name, own, size in zip(names, array.shape, sizes, strict=True))
    )


def _is_spec(x: object) -> bool:
    return isinstance(x, P)


def _placed(array: jax.Array, spec: P, mesh: Mesh | AbstractMesh) -> jax.Array:
    """An array whose type says how it is divided, where the axes of the mesh are explicit."""
    explicit = all(kind == AxisType.Explicit for kind in mesh.axis_types)
    return jax.sharding.reshard(array, NamedSharding(mesh, spec)) if explicit else array
