"""Assemble quantizers, for stacked layers too, and write their state into the Variables of those in use."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core import Quantized, QuantStat, component
from jqinject.core._protocols import ServedLayer, grid_of, has_zero_point
from jqinject.core.state import RecordPart, flat_parts
from jqinject.ops.processes import placed_as
from jqinject.quant_tensor import is_concrete

ARRAYS = (jax.Array, np.ndarray)
Variables = dict[tuple[Any, ...], nnx.Variable[jax.Array] | RecordPart]


class Committed(component.InnerModule):
    """A quantizer and the scale that it has now, as an assembly makes them; a proxy holds both.

    Args:
        quantizer: the quantizer.
        record: its scale and zero point.
    """

    def __init__(self, quantizer: object, record: QuantStat) -> None:
        self.quantizer = nnx.data(quantizer) if isinstance(quantizer, nnx.Module) else nnx.static(quantizer)
        self.record = record

    @classmethod
    def of(cls, quantizer: Any, x: jax.Array) -> "Committed":
        """With the scale and the zero point, float32, that a quantizer has for a weight.

        Raises:
            TypeError: the quantizer does not round to nearest on a grid that it knows.
        """
        if grid_of(quantizer) is None:
            raise TypeError(
                f"{type(quantizer).__name__} does not round to nearest on a grid that it knows, so what was chosen for "
                "it cannot be kept.\n  cure: float_to_int_impl_type = 'round'; a quantizer of your own states its "
                "`grid` and `by_scale` (jqinject.core._protocols)"
            )
        result = quantizer(x)
        numbers = {"scale": jnp.asarray(result.scale, jnp.float32)}
        if has_zero_point(quantizer):
            numbers["zero_point"] = jnp.asarray(result.zero_point, jnp.float32)
        return cls(quantizer, QuantStat(numbers))


def by_record(quantizer: Any, record: QuantStat, x: jax.Array, keep: bool = False) -> Quantized:
    """A tensor quantized by a scale and zero point that do not follow it; no gradient reaches these.

    Numbers that are on the grid stay as they are, to the bit of their codes: loading, cloning, freezing and training
    start from what was chosen. The gradient goes straight through to `x` as in the quantizer itself.

    Args:
        quantizer: whose grid it is.
        record: of the proxy.
        x: the tensor.
        keep: whether the result has the payload.
    """
    numbers = record[...]
    scale = jax.lax.stop_gradient(numbers["scale"])
    return quantizer.by_scale(x, scale, numbers.get("zero_point"), keep)


def beside_weights(layers: tuple[ServedLayer, ...]) -> tuple[ServedLayer, ...]:
    """Layers as an assembly needs them: each holds its weight, or makes a module `beside_weight()` that does."""
    return tuple(cast(Any, n).beside_weight() if hasattr(type(n), "beside_weight") else n for n in layers)


class QuantizerReplacedWarning(UserWarning):
    """Re-assembly gave a quantizer other learned parameters than it had: an optimizer made before no longer fits."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"re-assembly replaced the quantizer of {name} by one with other parameters. Make the optimizer again "
            "(nnx.Optimizer(model, ...)), and nnx.view and nnx.cached_partial objects too; optimizer.update would fail."
        )


def stack_of(layers: Sequence[ServedLayer]) -> tuple[int, ...]:
    """The sizes of the leading axes that the layers' weights have beyond those of one (built under `nnx.vmap`)."""
    depths: set[int] = set()
    for layer in layers:
        shape, ndim = layer.weight_shape, layer.weight_ndim
        if len(shape) < ndim:
            raise ValueError(
                f"the weight of a {type(layer).__name__} has {ndim} axes (more in a stack of layers), "
                f"got shape {tuple(shape)}"
            )
        depths.add(len(shape) - ndim)
    if len(depths) > 1:
        raise ValueError(f"layers stacked {sorted(depths)} times deep cannot share one quantizer")
    return layers[0].weight_shape[: depths.pop()] if depths else ()


def build_stacked(
    build: Callable[[tuple[ServedLayer, ...], nnx.Rngs | None], object],
    layers: tuple[ServedLayer, ...],
    sizes: tuple[int, ...],
    rngs: nnx.Rngs | None = None,
) -> Any:
    """`build(layers, rngs)` for every layer of a stack, its Variables stacked alike (along the leading axes).

    Args:
        build: makes a quantizer from unstacked layers.
        layers: the stacked layers.
        sizes: of the leading axes that they are stacked along.
        rngs: for quantizers that draw random numbers; every layer gets streams of its own.
    """
    parts: dict[str, Any] = {}

    def one(unstacked: tuple[ServedLayer, ...], own_streams: nnx.Rngs | None) -> Any:
        quantizer = build(unstacked, own_streams)
        if not isinstance(quantizer, nnx.Module):
            parts["plain"] = quantizer
            return ()
        parts["foreign"] = borrowed_paths(quantizer, unstacked)
        parts["graphdef"], inner = nnx.split(quantizer, graph=True)
        return inner

    stacked = map_stack(one, layers, sizes, rngs)
    if "plain" in parts:
        return parts["plain"]
    # Merged, the quantizer holds these Variables themselves.
    borrowed = {path: vars(layers[index])[name] for path, (index, name) in parts["foreign"].items()}
    return nnx.merge(parts["graphdef"], nnx.from_flat_state({**dict(nnx.to_flat_state(stacked)), **borrowed}))


def map_stack(
    function: Callable[[tuple[ServedLayer, ...], nnx.Rngs | None], object],
    layers: tuple[ServedLayer, ...],
    sizes: tuple[int, ...],
    rngs: nnx.Rngs | None = None,
    one_by_one: bool = False,
) -> Any:
    """`function(layers, rngs)` for every layer of a stack; the arrays of its results are stacked alike.

    A stack is built layer by layer (`nnx.vmap`, `nnx.split_rngs`), and so are its quantizers (`build_stacked`): all
    their Variables have its leading axes.

    Args:
        function: of unstacked layers; returns a pytree.
        layers: the stacked layers.
        sizes: of the leading axes that they are stacked along.
        rngs: for what draws random numbers; every layer gets streams of its own.
        one_by_one: one layer after the other, which takes the memory of one.
    """
    streams = None if rngs is None else rngs.split(sizes)
    graphdef, state = nnx.split((layers, streams), graph=True)

    def of_one(state: nnx.State[object, object]) -> Any:
        return function(*nnx.merge(graphdef, state))

    mapped: Callable[[Any], Any] = of_one
    for size in reversed(sizes):
        mapped = partial(jax.lax.map, mapped) if one_by_one else jax.vmap(mapped, axis_size=size)
    return mapped(state)


def borrowed_paths(
    quantizer: nnx.Module, layers: tuple[ServedLayer, ...]
) -> dict[tuple[Any, ...], tuple[int, str]]:
    """Where the quantizer holds a layer's own Variable (a tracked weight): its path -> (which layer, attribute)."""
    owned: dict[int, tuple[int, str]] = {}
    for index, layer in enumerate(layers):
        for name, child in vars(layer).items():
            if isinstance(child, nnx.Variable):
                owned.setdefault(id(child), (index, name))
    return {path: owned[id(leaf)] for path, leaf in variables_of(quantizer).items() if id(leaf) in owned}


def replace_by_difference(old: object, new: object, layers: tuple[ServedLayer, ...]) -> tuple[Any, bool]:
    """The quantizer to go on with: the old one holding the new values where the two are alike, else the new one.

    Two quantizers are alike if they have the same structure and their Variables and arrays have the same shapes and
    dtypes; a stack takes the values of one. Then no compiled function retraces, and optimizers keep their place.
    Random streams go on where they were.

    Returns:
        (quantizer, whether it is another object than before).
    """
    if not (isinstance(old, nnx.Module) and isinstance(new, nnx.Module)):
        return new, old is not new and old != new
    before, after = _leaves(old), _leaves(new)
    borrowed = set(borrowed_paths(new, layers))
    # A reference to a weight that has been replaced by another Variable must not survive.
    if nnx.graphdef(old) != nnx.graphdef(new) or not all(
        before[path] is leaf if path in borrowed else _fits(before[path], leaf)
        for path, leaf in after.items()
    ):
        for path, fresh in after.items():  # random streams go on where those of the old one were
            if isinstance(fresh, nnx.RngState) and isinstance(before.get(path), nnx.RngState):
                fresh.set_value(before[path].get_value())
        return new, True
    for path, leaf in after.items():
        if path in borrowed or isinstance(leaf, nnx.RngState):
            continue
        value = jnp.broadcast_to(_value(leaf), _value(before[path]).shape)
        if isinstance(leaf, ARRAYS):
            nnx.update(old, nnx.from_flat_state({path: value}))
        else:
            write(before[path], value)
    return old, False


def write(variable: Any, value: Any) -> None:
    """Give a Variable (or what reads and writes as one) another value of its shape; dtype, sharding, metadata stay."""
    current = variable.get_value()
    if isinstance(current, np.ndarray):
        variable.set_value(np.array(value, current.dtype))
        return
    same = isinstance(value, jax.Array) and value.dtype == current.dtype  # random keys cannot be cast
    # A copy: on CPU `jnp.asarray` may look at the caller's own NumPy memory, which the caller may write to later.
    array = value if same else jnp.array(value, dtype=current.dtype)
    placed = isinstance(current, jax.Array) and is_concrete(current) and is_concrete(array)
    if placed and array.sharding != current.sharding:
        array = placed_as(array, current)
    variable.set_value(array)


def variables_of(module: nnx.Module) -> Variables:
    """The readable and writable items of a module, by path; parts of records count."""
    return {path: part for path, part in _leaves(module).items() if not isinstance(part, ARRAYS)}


def _leaves(module: nnx.Module) -> dict[tuple[Any, ...], Any]:
    """The items of `variables_of`, and the arrays that a module holds without a Variable around them."""
    return dict(flat_parts(nnx.state(module, graph=True)))


def _value(leaf: Any) -> Any:
    return leaf if isinstance(leaf, ARRAYS) else leaf.get_value()


def _fits(mine: object, fresh: object) -> bool:
    """Whether a leaf can take another's values: the same shape, or that of one in a stack; random streams go on."""
    a, b = _value(mine), _value(fresh)
    if not isinstance(a, (*ARRAYS, jax.ShapeDtypeStruct)) or not isinstance(b, ARRAYS):
        return False
    same = a.dtype == b.dtype and a.shape[max(a.ndim - b.ndim, 0) :] == b.shape
    return isinstance(mine, nnx.RngState) or same


def set_mode(quantizer: object, **mode: bool) -> None:
    """Set the mode of every module of a quantizer that has one: `use_running_average`, `deterministic`."""
    if isinstance(quantizer, nnx.Module):
        quantizer.set_attributes(raise_if_not_found=False, graph=True, **mode)


def copy_mode(old: object, new: object, *, use_running_average: bool) -> None:
    """Put a new quantizer into the mode of the old one.

    Args:
        old: the quantizer in use.
        new: the one just built, in training mode.
        use_running_average: whether the proxy is in eval mode.
    """
    deterministic = use_running_average
    if isinstance(old, nnx.Module):
        modules = (vars(module) for _, module in nnx.iter_modules(old, graph=True))
        modes = (attributes["deterministic"] for attributes in modules if "deterministic" in attributes)
        deterministic = next(modes, use_running_average)
    if use_running_average or deterministic:
        set_mode(new, use_running_average=use_running_average, deterministic=deterministic)


def same_parameters(old: object, new: object, layers: tuple[ServedLayer, ...]) -> bool:
    """Whether two quantizers have the same learned parameters of their own, by path and shape.

    Args:
        old: the quantizer before; it may hold a weight that has been replaced since.
        new: the quantizer after.
        layers: the layers it serves; their own weights do not count.
    """
    borrowed = borrowed_paths(new, layers) if isinstance(new, nnx.Module) else {}

    def own(quantizer: object) -> dict[tuple[Any, ...], tuple[int, ...]]:
        variables = variables_of(quantizer) if isinstance(quantizer, nnx.Module) else {}
        learned = (path for path, v in variables.items() if isinstance(v, nnx.Param) and path not in borrowed)
        return {path: variables[path].get_value().shape for path in learned}

    return own(old) == own(new)
