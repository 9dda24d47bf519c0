"""A parameter of a quantized model, with the quantizer that a rule gave it, whole and as a site contracts it."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core import RangeScaling, _protocols
from jqinject.model.walk import ModelIndex
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.ops import Grid
from jqinject.ops.groups import fitting_size
from jqinject.program import Adapter, OpQuantizers, quantized_stack
from jqinject.proxy import WeightQuantProxyFromInjector
from jqinject.quant_tensor import QuantTensor, as_array
from jqinject.recipes.solvers.solver import MatrixGrid
from jqinject.recipes.stream.matrices import Moved, Places


class QuantizedParameter:
    """A parameter and its quantizer.

    Args:
        name: its path, as text.
        holder: the layer or the site that holds the quantizer.

    Attributes:
        proxy: the quantizer's proxy.
    """

    def __init__(self, name: str, holder: Any) -> None:
        self.name, self.holder = name, holder
        self.proxy: WeightQuantProxyFromInjector = holder.weight_quant

    @property
    def depth(self) -> int:
        """The leading axes along which the parameter is a stack of weights."""
        return len(self.holder.weight_shape) - self.holder.weight_ndim

    @property
    def value(self) -> jax.Array:
        """The parameter."""
        return self.holder.weight.get_value()

    @property
    def grid(self) -> Grid:
        """The quantizer's grid.

        Raises:
            TypeError: it states none.
        """
        grid = _protocols.grid_of(self.proxy.tensor_quant)
        if grid is None:
            raise TypeError(
                f"{self.name}: {self.proxy.binding.base.__name__} has no grid of its own to round to nearest on, so no "
                "solver can choose its numbers.\n  cure: float_to_int_impl_type = 'round'; or a rule with another "
                "weight quantizer for this parameter"
            )
        return grid

    @property
    def by_reciprocal(self) -> bool:
        """Whether the quantizer multiplies by the reciprocal of its scale: with a symmetric range (`RangeScaling`)."""
        ranged = isinstance(getattr(self.proxy.tensor_quant, "scaling_impl", None), RangeScaling)
        return ranged and not self.proxy.has_zero_point and self.grid.is_integer

    @property
    def group_size(self) -> int | None:
        """Consecutive numbers along one axis that share a scale; None without groups."""
        return self.proxy.quant_metadata.group_size

    @property
    def _group(self) -> tuple[int, int] | None:
        """The axis of the parameter along which groups lie, and how many numbers each has; None without groups."""
        groups, shape = self.proxy.quant_metadata, self.value.shape
        if groups.group_size is None or groups.group_dim is None:
            return None
        axis = self.depth + groups.group_dim % (len(shape) - self.depth)
        return axis, fitting_size(groups.group_size, shape[axis])

    def quantized(self, value: jax.Array) -> QuantTensor:
        """A parameter as the quantizer would quantize it now: a QuantTensor. Nothing moves."""
        return _quantized(*nnx.split(self.proxy, graph=True), value, self.depth)

    def nearest(self, value: jax.Array) -> jax.Array:
        """A parameter as the quantizer would round it now, float32."""
        return jnp.asarray(as_array(self.quantized(value)), jnp.float32)

    def measure(self, value: jax.Array) -> MatrixGrid:
        """The grid, with a scale and a zero point for each number, in the shape of the parameter.

        Args:
            value: the parameter, or another one in its place.
        """
        quantized = self.quantized(value)
        grid = MatrixGrid(quantized.scale, quantized.zero_point, self.grid, self.by_reciprocal)
        return grid.spread(value.shape)

    def owners(self) -> np.ndarray:
        """For each number, in the shape of the parameter, which scale it has."""
        shape = self.value.shape
        if self._group is not None:
            axis, size = self._group
            first = np.arange(shape[axis]) // size * size
            return np.arange(self.value.size).reshape(shape).take(first, axis)
        scale = jax.eval_shape(self.quantized, self.value).scale
        return np.broadcast_to(np.arange(scale.size).reshape(scale.shape), shape)

    def largest_of_groups(self, value: jax.Array) -> jax.Array:
        """For each number the largest magnitude of those that share its scale, in the shape of the parameter.

        Args:
            value: the parameter, or another one in its place.
        """
        owners = self.owners().reshape(-1)
        largest = jax.ops.segment_max(jnp.abs(value).reshape(-1), owners, value.size)
        return largest[owners].reshape(value.shape)

    def put(self, values: jax.Array, grid: MatrixGrid) -> None:
        """Keep what a solver chose: the numbers, and the scales that they are on.

        Args:
            values: in the shape of the parameter, on the grid.
            grid: with a scale and a zero point for each number.

        Raises:
            ValueError: numbers that share a scale are given several.
        """
        self.proxy.commit(self.holder)
        record = self.proxy.record
        assert record is not None, "made by commit"
        record.set_value({name: self._reduced(vars(grid)[name], x) for name, x in record[...].items()})
        self.holder.weight.set_value(values.astype(self.value.dtype))
        if not bool(_agree(self.measure(values), grid)):
            raise ValueError(
                f"{self.name}: numbers that share one scale were given several, by sites that are solved one after "
                "the other.\n  cure: scales='original' in the solver; or a quantizer with a scale for each channel"
            )

    def _reduced(self, full: jax.Array, stored: jax.Array) -> jax.Array:
        """Scales of each number as the quantizer stores them: one for those that share it."""
        if self._group is not None:
            axis, size = self._group
            full = jax.lax.slice_in_dim(full, 0, full.shape[axis], size, axis)
            if full.size == stored.size:
                return full.reshape(stored.shape)
        inner = stored.shape[self.depth :]
        shape = (*full.shape[: self.depth], *(1,) * (full.ndim - self.depth - len(inner)), *inner)
        first = full[tuple(slice(0, 1) if size == 1 else slice(None) for size in shape)]
        return first.reshape(stored.shape)


@jax.jit
def _agree(stored: MatrixGrid, chosen: MatrixGrid) -> jax.Array:
    names = ("scale", "zero_point")
    pairs = ((vars(stored)[name], vars(chosen)[name]) for name in names)
    return jnp.array([jnp.allclose(*pair, rtol=1e-6, atol=0) for pair in pairs]).all()


@partial(jax.jit, static_argnums=(0, 3))
def _quantized(
    quantizer: nnx.GraphDef[WeightQuantProxyFromInjector],
    state: nnx.State[str, object],
    value: jax.Array,
    depth: int,
) -> QuantTensor:
    """See `QuantizedParameter.quantized`: one program, where each operation would be compiled singly."""
    return quantized_stack(nnx.merge(quantizer, state), value, depth)


def quantized_parameters(model: nnx.Module) -> dict[str, QuantizedParameter]:
    """The parameters of a model that have a quantizer, by their paths as text.

    Args:
        model: a quantized NNX module.
    """
    parameters: dict[str, QuantizedParameter] = {}
    for path, node in ModelIndex(model).places:
        if isinstance(node, OpQuantizers):
            sites = node.weight_sites().items()
            parameters |= {
                name: QuantizedParameter(name, x) for name, x in sites if x.weight_quant is not None
            }
        elif isinstance(node, QuantWeightLayer):
            name, proxy = ".".join((*path, node.weight_name)), node.weight_quant
            is_on = isinstance(proxy, WeightQuantProxyFromInjector) and proxy.is_quant_enabled
            if is_on and not any(node is parameter.holder for parameter in parameters.values()):
                parameters[name] = QuantizedParameter(name, node)
    return parameters


def adapters_of(model: nnx.Module) -> dict[str, Adapter]:
    """The low-rank updates of a model, by the paths of their parameters as text.

    Args:
        model: a quantized NNX module.
    """
    nodes = [node for _, node in ModelIndex(model).places if isinstance(node, OpQuantizers)]
    return {name: adapter for node in nodes for name, adapter in node.adapters_by_path().items()}


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["state", "values", "places"],
    meta_fields=["quantizer", "depth", "grid", "by_reciprocal", "weight"],
    drop_fields=["measured"],
)
@dataclass(frozen=True, eq=False)
class SiteMeasure:
    """See `jqinject.recipes.solvers.solver.Measure`: a pytree, so that equal sites share compiled functions.

    Attributes:
        quantizer: the graph of the proxy.
        depth: leading axes along which the parameter is a stack.
        grid: at scale 1.
        by_reciprocal: see `MatrixGrid`.
        weight: how the operand is a stack of matrices.
        places: of the operand's numbers in the parameter.
        state: the arrays of the quantizer.
        values: the parameter, whose other numbers may share scales with the site's.
        measured: the site's matrices as they are, and their grid; None within such a function.
    """

    quantizer: Any
    depth: int
    grid: Grid
    by_reciprocal: bool
    weight: Moved
    places: Places
    state: Any
    values: jax.Array
    measured: tuple[jax.Array, MatrixGrid] | None = field(default=None, repr=False)

    def __call__(self, matrices: jax.Array) -> MatrixGrid:
        """The grid of matrices `(stack, rows, columns)` in the place of the site's."""
        if self.measured is not None and matrices is self.measured[0]:
            return self.measured[1]
        value = self.places.put(self.values, self.weight.array(matrices))
        quantized = quantized_stack(nnx.merge(self.quantizer, self.state), value, self.depth)
        grid = MatrixGrid(quantized.scale, quantized.zero_point, self.grid, self.by_reciprocal)
        return jax.tree.map(lambda x: self.weight.matrices(self.places.taken(x)), grid.spread(value.shape))
