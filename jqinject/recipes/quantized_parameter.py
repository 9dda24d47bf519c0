"""A parameter of a quantized model, with the quantizer that a rule gave it, whole and as a site contracts it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core import RangeScaling
from jqinject.core._protocols import grid_of
from jqinject.model.walk import ModelIndex
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.ops import Grid
from jqinject.ops.groups import fitting_size, split_groups, spread_groups
from jqinject.program import Adapter, OpQuantizers, quantized_stack
from jqinject.proxy import WeightQuantProxyFromInjector
from jqinject.quant_tensor import as_array
from jqinject.recipes.solvers.solver import MatrixGrid
from jqinject.recipes.stream.flat_program import ContractionSite
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
        grid = grid_of(self.proxy.tensor_quant)
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

    def quantized(self, value: jax.Array) -> Any:
        """A parameter as the quantizer would quantize it now: a QuantTensor. Nothing moves."""
        return quantized_stack(nnx.clone(self.proxy, graph=True), value, self.depth)

    def nearest(self, value: jax.Array) -> jax.Array:
        """A parameter as the quantizer would round it now, float32."""
        return jnp.asarray(as_array(self.quantized(value)), jnp.float32)

    def measure(self, value: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Scale and zero point of each number, float32, in the shape of the parameter.

        Args:
            value: the parameter, or another one in its place.
        """
        return measured(nnx.clone(self.proxy, graph=True), value, self.depth)

    def owners(self) -> np.ndarray:
        """For each number, in the shape of the parameter, which scale it has."""
        shape = self.value.shape
        groups = self.proxy.quant_metadata
        if groups.group_size is not None and groups.group_dim is not None:
            axis = self.depth + groups.group_dim % (len(shape) - self.depth)
            places = list(np.indices(shape))
            places[axis] = places[axis] // fitting_size(groups.group_size, shape[axis])
            return np.asarray(np.ravel_multi_index(tuple(places), shape))
        scale = jax.eval_shape(self.quantized, self.value).scale
        return np.broadcast_to(np.arange(scale.size).reshape(scale.shape), shape)

    def largest_of_groups(self, value: jax.Array) -> jax.Array:
        """For each number the largest magnitude in its group, in the shape of the parameter; the quantizer has groups.

        Args:
            value: the parameter, or another one in its place.
        """
        groups = self.proxy.quant_metadata
        assert groups.group_size is not None and groups.group_dim is not None, "a quantizer in groups"

        def largest(value: jax.Array) -> jax.Array:
            axis = groups.group_dim % value.ndim  # pyright: ignore
            length = value.shape[axis]
            size = fitting_size(groups.group_size, length)  # pyright: ignore
            grouped = split_groups(jnp.abs(value), size, axis)
            return spread_groups(grouped.max(axis=axis + 1, keepdims=True), size, axis, length)

        for _ in range(self.depth):
            largest = jax.vmap(largest)
        return largest(value)

    def put(self, values: jax.Array, scale: jax.Array, zero_point: jax.Array) -> None:
        """Keep what a solver chose: the numbers, and the scales that they are on.

        Args:
            values: in the shape of the parameter, on the grid.
            scale, zero_point: of each number.

        Raises:
            ValueError: numbers that share a scale are given several.
        """
        self.proxy.commit(self.holder)
        record, full = self.proxy.record, {"scale": scale, "zero_point": zero_point}
        assert record is not None, "made by commit"
        record.set_value({name: self._reduced(full[name], stored) for name, stored in record[...].items()})
        self.holder.weight.set_value(values.astype(self.value.dtype))
        for stored, chosen in zip(self.measure(values), (scale, zero_point), strict=True):
            if not bool(jnp.allclose(stored, chosen, rtol=1e-6, atol=0)):
                raise ValueError(
                    f"{self.name}: numbers that share one scale were given several, by sites that are solved one after "
                    "the other.\n  cure: scales='original' in the solver; or a quantizer with a scale for each channel"
                )

    def _reduced(self, full: jax.Array, stored: jax.Array) -> jax.Array:
        """Scales of each number as the quantizer stores them: one for those that share it."""

        def reduced(full: jax.Array, stored: jax.Array) -> jax.Array:
            groups = self.proxy.quant_metadata
            if groups.group_size is not None and groups.group_dim is not None:
                axis = groups.group_dim % full.ndim
                full = split_groups(full, fitting_size(groups.group_size, full.shape[axis]), axis)
            if stored.ndim == 0:
                return full.reshape(-1)[0]
            shape = (1,) * (full.ndim - stored.ndim) + stored.shape
            first = full[tuple(slice(0, 1) if size == 1 else slice(None) for size in shape)]
            return first.reshape(stored.shape)

        for _ in range(self.depth):
            reduced = jax.vmap(reduced)
        return reduced(full, stored)


def measured(proxy: object, value: jax.Array, depth: int) -> tuple[jax.Array, jax.Array]:
    """Scale and zero point of each number of a parameter, float32, in its shape.

    Args:
        proxy: of its quantizer; statistics may move.
        value: the parameter.
        depth: leading axes along which it is a stack of weights.
    """
    quantized = quantized_stack(proxy, value, depth)
    scale, zero_point = quantized.scale, quantized.zero_point
    return jnp.broadcast_to(scale, value.shape), jnp.broadcast_to(zero_point, value.shape)


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
        elif isinstance(node, QuantWeightLayer) and isinstance(
            node.weight_quant, WeightQuantProxyFromInjector
        ):
            name = ".".join((*path, node.weight_name))
            shared = any(node is parameter.holder for parameter in parameters.values())
            if node.weight_quant.is_quant_enabled and not shared:
                parameters[name] = QuantizedParameter(name, node)
    return parameters


def adapters_of(model: nnx.Module) -> dict[str, Adapter]:
    """The low-rank updates of a model, by the paths of their parameters as text.

    Args:
        model: a quantized NNX module.
    """
    nodes = [node for _, node in ModelIndex(model).places if isinstance(node, OpQuantizers)]
    return {name: adapter for node in nodes for name, adapter in node.adapters_by_path().items()}


@dataclass(frozen=True)
class _Layout:
    """What is the same for equal sites of equal parameters.

    Attributes:
        quantizer: the graph of the proxy.
        depth: leading axes along which the parameter is a stack.
        grid: at scale 1.
        by_reciprocal: see `MatrixGrid`.
        weight: how the operand is a stack of matrices.
        shape, start: of the operand's places in the parameter.
    """

    quantizer: Any
    depth: int
    grid: Grid
    by_reciprocal: bool
    weight: Moved
    shape: tuple[int, ...]
    start: int | None


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, eq=False)
class SiteMeasure:
    """See `jqinject.recipes.solvers.solver.Measure`: a pytree, so that equal sites share compiled functions.

    Attributes:
        layout: static.
        state: the arrays of the quantizer.
        values: the parameter, whose other numbers may share scales with the site's.
        scattered: see `Places`.
        measured: the site's matrices as they are, and their grid; None within such a function.
    """

    layout: _Layout
    state: Any
    values: jax.Array
    scattered: np.ndarray | None = None
    measured: tuple[jax.Array, MatrixGrid] | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls,
        parameter: QuantizedParameter,
        site: ContractionSite,
        values: jax.Array,
        measured: tuple[jax.Array, MatrixGrid],
    ) -> SiteMeasure:
        """That of a site.

        Args:
            parameter: of the quantized model.
            site: that contracts it.
            values: the parameter as it is now.
            measured: the site's matrices, and their grid.
        """
        quantizer, state = nnx.split(parameter.proxy, graph=True)
        places, weight = site.places, site.matrices.weight
        numbers = (parameter.grid, parameter.by_reciprocal)
        layout = _Layout(quantizer, parameter.depth, *numbers, weight, places.shape, places.start)
        return cls(layout, state, values, places.scattered, measured)

    def __call__(self, matrices: jax.Array) -> MatrixGrid:
        """The grid of matrices `(stack, rows, columns)` in the place of the site's."""
        if self.measured is not None and matrices is self.measured[0]:
            return self.measured[1]
        layout = self.layout
        places = Places(layout.shape, layout.start, self.scattered)
        value = places.put(self.values, layout.weight.array(matrices))
        scale, zero_point = measured(nnx.merge(layout.quantizer, self.state), value, layout.depth)
        scale, zero_point = (layout.weight.matrices(places.taken(x)) for x in (scale, zero_point))
        return MatrixGrid(scale, zero_point, layout.grid, layout.by_reciprocal)

    def tree_flatten(self) -> tuple[tuple[Any, ...], _Layout]:
        """Arrays, and what is static."""
        return (self.state, self.values, self.scattered), self.layout

    @classmethod
    def tree_unflatten(cls, layout: _Layout, arrays: tuple[Any, ...]) -> SiteMeasure:
        """The reverse."""
        return cls(layout, *arrays)
