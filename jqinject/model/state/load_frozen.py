"""`load_frozen`: a float checkpoint straight into a frozen model, one array at a time."""

import ctypes
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.dot import FrozenParam
from jqinject.dot.frozen.frozen_form import FrozenForm
from jqinject.inject.errors import did_you_mean
from jqinject.model import freezing, frozen_weights, walk
from jqinject.model.state.checkpoint_entries import problem_of
from jqinject.model.state.loading import children_of, proxies_beside, reassemble_held
from jqinject.nn.freeze_layer import frozen_param, numbers_from_host
from jqinject.proxy import stack_of

STEP = 2**20  # bytes


def hand_back_memory() -> None:
    """Hand freed memory back to the system.

    The C library keeps freed memory for later, in holes between what lives on, such as that of a float array beside the
    integers made from it. glibc hands it back when it is asked to; others are left alone.
    """
    c_library = ctypes.CDLL(None) if sys.platform == "linux" else None
    getattr(c_library, "malloc_trim", int)(0)


@dataclass(frozen=True)
class LowBits:
    """Numbers that `load_frozen` stores as they are, in the place of a float array.

    Attributes:
        shape: of the parameter.
        make: from the axes that the parameter's contraction sums over, those along which it needs sums of the payload
            (None for no sums), and the number of axes in front along which it is a stack, to what is stored and its
            form.
    """

    shape: tuple[int, ...]
    make: Callable[[tuple[int, ...], tuple[int, ...] | None, int], tuple[Mapping[str, jax.Array], FrozenForm]]

    def frozen(self, layer: frozen_weights.WeightHolder) -> FrozenParam:
        """What is stored in the weight's place of a layer or a site."""
        numbers, form = self.make(layer.summed_axes, layer.axes_of_sums(), len(stack_of((layer,))))
        return FrozenParam.holding(numbers, form, layer.weight.get_metadata())


Model = TypeVar("Model", bound=nnx.Module)


def load_frozen(
    make: Callable[[], Model], arrays: Iterable[tuple[Any, object]], *, allow_uncalibrated: bool = False
) -> Model:
    """A frozen model with the numbers of a float checkpoint, each of which is frozen as soon as it is read.

    The float model never exists as a whole: at most the frozen model and one float array are in memory, and what the
    compiled quantizer needs for this one. An array of 1 MiB or more on one device is quantized in slices, and a stack
    of layers one after the other, for which a float32 array needs about a seventh of its bytes on a CPU, a table's
    codes up to as many as the array has. Searched scales need the whole array, several times. An array of NumPy's that
    is not aligned to 64 bytes is copied, and both are there meanwhile, but one of 4 MiB or more whose scales are those
    of its smallest and largest numbers, without groups: its slices are quantized one by one. Freed memory is handed
    back to the system. Weights of layers that share a quantizer wait for one another. The numbers are those of
    `freeze(model)` after `load_state`.

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
        >>> model.layers[0].kernel.numbers["value"].dtype
        dtype('int8')
    """
    model = nnx.eval_shape(make)
    loading, freed = _Loading(model), 0
    loading.fill_quantizers(make)
    for name, array in arrays:
        path = tuple(name.split(".")) if isinstance(name, str) else tuple(map(str, name))
        freed += getattr(array, "nbytes", 0)
        loading.check(path, array)
        if isinstance(array, LowBits):
            loading.take_low_bits(path, array)
        elif not loading.take_from_host(path, array):
            array = loading.placed(path, array)  # lets go of what was read
            loading.take(path, array)
        del array
        if freed >= STEP:
            freed = 0
            hand_back_memory()
    loading.check_complete()
    return freezing.freeze(model, allow_uncalibrated=allow_uncalibrated)


class _Loading:
    """A model whose weights arrive one by one."""

    def __init__(self, model: object) -> None:
        self.index = walk.ModelIndex(model)
        # Freezing replaces Variables: what is looked up later is noted now.
        self.by_path = self.index.by_path
        self.proxies = {
            path: proxies_beside(self.index, [entry.variable]) for path, entry in self.by_path.items()
        }
        self.taken: set[int] = set()
        self.frozen: set[int] = set()  # proxies
        self.from_weights = _made_from_weights(self.index)

    def fill_quantizers(self, make: Callable[[], object]) -> None:
        """Give quantizers that depend on no weight, and random streams, the numbers that they begin with."""
        entries = [
            entry
            for entry in self.index.variables
            if (entry.in_quantizer and id(entry) not in self.from_weights)
            or isinstance(entry.variable, nnx.RngState)
        ]

        @jax.jit
        def numbers() -> list[object]:
            by_path = walk.ModelIndex(make()).by_path
            return [by_path[entry.path].variable.get_value() for entry in entries]

        for entry, value in zip(entries, numbers(), strict=True):
            entry.variable.set_value(value)

    def check(self, path: walk.Path, array: object) -> None:
        """Raise unless what was read fits the model, which then expects it no more."""
        entry, name = self.by_path.get(path), walk.place_name(path)
        if entry is None:
            hint = did_you_mean(name, [walk.place_name(candidate) for candidate in self.by_path])
            raise ValueError(f"load_frozen: the model has no {name}{'; ' + hint if hint else '.'}")
        if id(entry) in self.taken:
            raise ValueError(f"load_frozen: {name} was given before (as {walk.place_name(entry.path)})")
        target = entry.variable.get_value()
        if not isinstance(array, LowBits):
            problem = problem_of(array, target)
        elif array.shape != target.shape:
            problem = f"the numbers have the shape {array.shape}, expected {target.shape}"
        else:
            why = "the numbers are in low bits, but no weight quantizer takes them"
            problem = None if self._layers_of(path) else why
        if problem:
            raise ValueError(f"load_frozen: {name}: {problem}")
        if id(entry) in self.from_weights:
            raise ValueError(
                f"load_frozen: {name} belongs to a quantizer that is made from the loaded weights.\n"
                "  cure: a checkpoint without it; with it, load_state(model, checkpoint) and freeze(model)"
            )
        self.taken.add(id(entry))

    def _layers_of(self, path: walk.Path) -> list[frozen_weights.WeightHolder]:
        """The layers and sites whose quantized weight a Variable is."""
        variable = self.by_path[path].variable
        layers = (layer for holders in self.proxies[path] for layer in _quantized_by(holders))
        return [layer for layer in layers if layer.weight is variable]

    def take_low_bits(self, path: walk.Path, low: LowBits) -> None:
        """Store numbers in the place of an array."""
        for layer in self._layers_of(path):
            self._put(layer, low.frozen(layer))

    def placed(self, path: walk.Path, array: Any) -> jax.Array:
        """An array with a Variable's dtype, where the Variable says; JAX's own stay where they are."""
        variable = self.by_path[path].variable
        dtype = variable.get_value().dtype
        if isinstance(array, jax.Array):
            return array.astype(dtype)
        names = variable.get_metadata().get("out_sharding") if isinstance(variable, nnx.Variable) else None
        mesh = jax.sharding.get_mesh()
        if names and not mesh.empty:
            spec = jax.sharding.PartitionSpec(*names)
            return jax.device_put(np.asarray(array, dtype), jax.sharding.NamedSharding(mesh, spec))
        # Memory of NumPy's need not be copied where nothing keeps it.
        return jnp.asarray(array, dtype) if self._layers_of(path) else jnp.array(array, dtype)

    def take_from_host(self, path: walk.Path, array: object) -> bool:
        """Freeze a large array slice by slice, never the whole on a device; False if it cannot be."""
        layers = [layer for holders in self.proxies[path] for layer in _quantized_by(holders)]
        if len(layers) != 1 or layers != self._layers_of(path):
            return False
        numbers = numbers_from_host(layers[0], array)
        if numbers is None or not numbers[1]:
            return False
        self._put(layers[0], frozen_param(layers[0], numbers))
        return True

    def take(self, path: walk.Path, array: jax.Array) -> None:
        """Write one array, and freeze what is complete with it."""
        self.by_path[path].variable.set_value(array)
        del array
        for holders in self.proxies[path]:
            awaited = (walk.any_abstract(children_of(layer)) for layer in holders.layers)
            if id(holders.proxy) not in self.frozen and not any(awaited):
                self._freeze(holders)

    def _freeze(self, holders: walk.Holders) -> None:
        if holders.proxy.depends_on_layers():
            reassemble_held([holders])
        layers = _quantized_by(holders)
        freezing.check_finite(self.index, layers, "load_frozen")
        for layer in layers:
            variable: nnx.Variable[Any] = layer.weight
            floats = layer.weight.get_value()
            self._put(layer, frozen_param(layer))
            # The index still holds the Variable, which lets go of its numbers.
            variable.set_value(jax.ShapeDtypeStruct(floats.shape, floats.dtype))

    def _put(self, layer: frozen_weights.WeightHolder, frozen: FrozenParam) -> None:
        """Put low-bit numbers in the weight's place, and wait for them."""
        self.frozen.add(id(layer.weight_quant))
        frozen_weights.freeze_weight(self.index, layer, frozen)
        jax.block_until_ready(frozen.numbers)

    def check_complete(self) -> None:
        """Raise if the model has Variables that nothing was given for."""
        missing = [
            walk.place_name(entry.path)
            for entry in self.index.variables
            if id(entry) not in self.taken | self.from_weights
            and isinstance(entry.variable.get_value(), jax.ShapeDtypeStruct)
        ]
        if missing:
            raise ValueError(
                f"load_frozen: no array was given for {', '.join(missing)}.\n  cure: a checkpoint that has them"
            )


def _quantized_by(holders: walk.Holders) -> list[frozen_weights.WeightHolder]:
    """The layers and sites whose weight a proxy quantizes."""
    return [
        layer
        for layer in holders.layers
        if isinstance(layer, frozen_weights.WeightHolder) and vars(layer).get("weight_quant") is holders.proxy
    ]


def _made_from_weights(index: walk.ModelIndex) -> set[int]:
    """The ids of the Variables of quantizers that are made from weights."""
    proxies = {
        path for holders in index.proxies if holders.proxy.depends_on_layers() for path in holders.paths
    }
    return {
        id(entry)
        for entry in index.variables
        if any(path[:end] in proxies for path in entry.paths for end in range(len(path)))
    }
