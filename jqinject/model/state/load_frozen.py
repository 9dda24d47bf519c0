"""`load_frozen`: a float checkpoint straight into a frozen model, one array at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.inject.errors import did_you_mean
from jqinject.model.freezing import check_finite, freeze
from jqinject.model.site_freezing import freeze_parameter, parameter_sites
from jqinject.model.state.checkpoint_entries import problem_of
from jqinject.model.state.loading import proxies_beside
from jqinject.model.state.low_bits import LowBits, put_low_bits
from jqinject.model.state.reassembly import reassemble_held
from jqinject.model.walk import Holders, ModelIndex, Path, VariableEntry, dotted
from jqinject.nn.base.parameter_site import ParameterSite
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.nn.frozen.freeze_layer import freeze_layer

Model = TypeVar("Model", bound=nnx.Module)


def load_frozen(
    make: Callable[[], Model], arrays: Iterable[tuple[Any, Any]], *, allow_uncalibrated: bool = False
) -> Model:
    """A frozen model with the numbers of a float checkpoint, each of which is frozen as soon as it is read.

    The float model never exists as a whole: at most the frozen model and one float array are in memory, and what the
    compiled quantizer needs for this one. An array of 4 MiB or more on one device is quantized in slices, for which a
    float32 array needs about a seventh of its bytes on a CPU. Groups, stacks of layers, codebooks and `CalibratedQuant`
    are quantized whole, which takes about 2.5 times its bytes; searched scales and bfloat16 need more than a seventh,
    too. An array of NumPy's that is not aligned is copied, and both are there meanwhile. Weights of layers that share
    a quantizer wait for one another. The numbers are those of `freeze(model)` after `load_state`.

    Args:
        make: builds and quantizes the model, as in `lambda: quantize(Model(nnx.Rngs(0)), rules, inputs=x)`. It is
            traced, so its weights are never computed. Under a mesh, arrays are put where its Variables say.
        arrays: the float checkpoint, path and array, in any order: a generator that reads one array after the other.
            A path is a tuple, or text with dots. Instead of a float array, `LowBits` are stored as they are.
        allow_uncalibrated: go on even if static ranges of activations never saw data.

    Returns:
        The model, as `freeze` returns it.

    Raises:
        ValueError: a path that the model does not have, or that was given twice; a wrong shape or dtype; nan or inf;
            Variables that no array was given for; whatever `freeze` raises.

    Example:
        >>> from jqinject import Rule, quantize
        >>> from jqinject.quant import Int8WeightPerChannelFloat
        >>> floats = nnx.Sequential(nnx.Linear(8, 4, rngs=nnx.Rngs(0)))
        >>> rule = Rule(weight_quant=Int8WeightPerChannelFloat)
        >>> checkpoint = ((path, x.get_value()) for path, x in nnx.to_flat_state(nnx.state(floats)))
        >>> model = load_frozen(lambda: quantize(nnx.clone(floats), rule), checkpoint)
        >>> model.layers[0].frozen.value.dtype
        dtype('int8')
    """
    model = nnx.eval_shape(make)
    _fill_quantizers(model, make)
    loading = _Loading(model)
    for path, array in arrays:
        if isinstance(array, LowBits):
            loading.take_low_bits(_path_of(path), array)
            continue
        array = loading.placed(_path_of(path), array)  # lets go of what was read
        loading.take(_path_of(path), array)
        del array
    loading.check_complete()
    return freeze(model, allow_uncalibrated=allow_uncalibrated)


class _Loading:
    """A model whose weights arrive one by one."""

    def __init__(self, model: Any) -> None:
        self.index = ModelIndex(model)
        # Freezing replaces Variables: what is looked up later is noted now.
        self.by_path = self.index.by_path
        self.proxies = {
            path: proxies_beside(self.index, [found.variable]) for path, found in self.by_path.items()
        }
        self.taken: set[int] = set()
        self.sites = {
            id(site): (node.op_quant.weights, name) for _, node, name, site in parameter_sites(self.index)
        }
        made = _made_from_weights(self.index)
        self.made = {id(found) for found in self.index.variables if _is_within(found, made)}

    def _variable(self, path: Path) -> VariableEntry:
        """The Variable at a path, which nothing was given for."""
        found = self.by_path.get(path)
        if found is None:
            hint = did_you_mean(dotted(path), [dotted(known) for known in self.by_path])
            raise ValueError(f"load_frozen: the model has no {dotted(path)}{'; ' + hint if hint else '.'}")
        if id(found) in self.taken:
            raise ValueError(f"load_frozen: {dotted(path)} was given before (as {dotted(found.path)})")
        return found

    def take_low_bits(self, path: Path, low: LowBits) -> None:
        """Store numbers in the place of an array."""
        found = self._variable(path)
        held = found.variable.get_value()
        layers = [
            layer
            for holders in self.proxies[path]
            for layer in holders.layers
            if _weight_quant(layer) is holders.proxy and layer.weight is found.variable
        ]
        if low.shape != held.shape or not layers:
            why = (
                "no weight quantizer takes it"
                if not layers
                else f"has the shape {held.shape}, got {low.shape}"
            )
            raise ValueError(f"load_frozen: {dotted(path)}: numbers in low bits, but {why}")
        self.taken.add(id(found))
        for layer in layers:
            site = self.sites.get(id(layer))
            jax.block_until_ready(put_low_bits(self.index, layer, low))
            if site is not None:
                del site[0][site[1]]

    def placed(self, path: Path, array: Any) -> jax.Array:
        """An array that was read, as the Variable holds it."""
        found = self._variable(path)
        held = found.variable.get_value()
        if problem := problem_of(array, held):
            raise ValueError(f"load_frozen: {dotted(path)}: {problem}")
        if id(found) in self.made:
            raise ValueError(
                f"load_frozen: {dotted(path)} belongs to a quantizer that is made from the weights that are loaded.\n"
                "  cure: a checkpoint without it; with it, load_state(model, checkpoint) and freeze(model)"
            )
        self.taken.add(id(found))
        return _placed(array, held.dtype, found.variable, self._is_frozen(path))

    def take(self, path: Path, array: jax.Array) -> None:
        """Write one array, and freeze what is complete with it."""
        self.by_path[path].variable.set_value(array)
        del array
        for proxy in self.proxies[path]:
            if all(_is_there(layer) for layer in proxy.layers):
                self._freeze(proxy)

    def _is_frozen(self, path: Path) -> bool:
        """Whether a Variable gives way to low-bit numbers."""
        variable = self.by_path[path].variable
        return any(
            _weight_quant(layer) is held.proxy and layer.weight is variable
            for held in self.proxies[path]
            for layer in held.layers
        )

    def _freeze(self, held: Holders) -> None:
        if held.proxy.depends_on_layers():
            reassemble_held([held])
        layers = [layer for layer in held.layers if _weight_quant(layer) is held.proxy]
        check_finite(self.index, layers, "load_frozen")
        for layer in layers:
            variable, floats = layer.weight, layer.weight.get_value()
            if isinstance(layer, ParameterSite):
                weights, name = self.sites[id(layer)]
                frozen = freeze_parameter(self.index, layer)
                del weights[name]
                jax.block_until_ready(frozen.get_raw_value())
            else:
                freeze_layer(layer)
                jax.block_until_ready(layer.frozen.numbers)
            # The index still holds the Variable, which lets go of its numbers.
            variable.set_value(jax.ShapeDtypeStruct(floats.shape, floats.dtype))

    def check_complete(self) -> None:
        """Raise if the model has Variables that nothing was given for."""
        missing = [
            dotted(found.path)
            for found in self.index.variables
            if id(found) not in self.taken
            and id(found) not in self.made
            and isinstance(found.variable.get_value(), jax.ShapeDtypeStruct)
        ]
        if missing:
            raise ValueError(
                f"load_frozen: no array was given for {', '.join(missing)}.\n  cure: a checkpoint that has them"
            )


def _weight_quant(layer: Any) -> Any:
    is_layer = isinstance(layer, QuantWeightLayer | ParameterSite)
    return vars(layer).get("weight_quant") if is_layer else None


def _is_there(layer: Any) -> bool:
    """Whether a layer's own Variables have numbers."""
    own = [layer.weight] if isinstance(layer, ParameterSite) else vars(layer).values()
    return not any(
        isinstance(leaf, jax.ShapeDtypeStruct)
        for variable in own
        if isinstance(variable, nnx.Variable)
        for leaf in jax.tree.leaves(variable.get_raw_value())
    )


def _made_from_weights(index: ModelIndex) -> set[Path]:
    """The paths of quantizers that are made from weights."""
    return {path for held in index.proxies if held.proxy.depends_on_layers() for path in held.paths}


def _is_within(found: VariableEntry, places: set[Path]) -> bool:
    return any(path[:end] in places for path in found.paths for end in range(len(path)))


def _placed(array: Any, dtype: Any, variable: Any, is_read_once: bool) -> jax.Array:
    """An array with a Variable's dtype, where the Variable says; JAX's own stay where they are.

    Args:
        array: the array.
        dtype: the Variable's.
        variable: the Variable; its sharding names axes of the mesh in use.
        is_read_once: whether memory of NumPy's need not be copied, as nothing keeps it.
    """
    if isinstance(array, jax.Array):
        return array.astype(dtype)
    names = variable.get_metadata().get("out_sharding") if isinstance(variable, nnx.Variable) else None
    mesh = jax.sharding.get_mesh()
    if names and not mesh.empty:
        spec = jax.sharding.PartitionSpec(*names)
        return jax.device_put(np.asarray(array, dtype), jax.sharding.NamedSharding(mesh, spec))
    return jnp.asarray(array, dtype) if is_read_once else jnp.array(array, dtype)


def _fill_quantizers(model: Any, make: Callable[[], Any]) -> None:
    """Give quantizers that depend on no weight, and random streams, the numbers that they begin with."""
    index = ModelIndex(model)
    made = _made_from_weights(index)
    wanted = [
        found
        for found in index.variables
        if (found.in_quantizer and not _is_within(found, made)) or isinstance(found.variable, nnx.RngState)
    ]

    @jax.jit
    def numbers() -> list[Any]:
        by_path = ModelIndex(make()).by_path
        return [by_path[found.path].variable.get_value() for found in wanted]

    for found, value in zip(wanted, numbers(), strict=True):
        found.variable.set_value(value)


def _path_of(path: Any) -> Path:
    return tuple(path.split(".")) if isinstance(path, str) else tuple(map(str, path))
