"""From the matrices of a site to the grid that the parameter's quantizer chooses for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
from flax import nnx

from jqinject.ops import Grid
from jqinject.recipes.grid import MatrixGrid
from jqinject.recipes.quantized_parameter import QuantizedParameter, measured
from jqinject.recipes.stream.matrices import Moved
from jqinject.recipes.stream.places import Places
from jqinject.recipes.stream.site import ContractionSite


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
    """See `jqinject.recipes.grid.Measure`: a pytree, so that equal sites share compiled functions.

    Attributes:
        layout: static.
        state: the arrays of the quantizer.
        values: the parameter, whose other numbers may share scales with the site's.
        each: see `Places`.
        known: the site's matrices as they are, and their grid, which is measured already; None within such a function.
    """

    layout: _Layout
    state: Any
    values: jax.Array
    each: Any = None
    known: tuple[jax.Array, MatrixGrid] | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls,
        parameter: QuantizedParameter,
        site: ContractionSite,
        values: jax.Array,
        known: tuple[jax.Array, MatrixGrid],
    ) -> SiteMeasure:
        """That of a site.

        Args:
            parameter: of the quantized model.
            site: that contracts it.
            values: the parameter as it is now.
            known: the site's matrices, and their grid.
        """
        quantizer, state = nnx.split(parameter.proxy, graph=True)
        places, weight = site.places, site.matrices.weight
        numbers = (parameter.grid, parameter.by_reciprocal)
        layout = _Layout(quantizer, parameter.depth, *numbers, weight, places.shape, places.start)
        return cls(layout, state, values, places.each, known)

    def __call__(self, matrices: jax.Array) -> MatrixGrid:
        """The grid of matrices `(stack, rows, columns)` in the place of the site's."""
        if self.known is not None and matrices is self.known[0]:
            return self.known[1]
        layout = self.layout
        places = Places(layout.shape, layout.start, self.each)
        value = places.put(self.values, layout.weight.array(matrices))
        scale, zero_point = measured(nnx.merge(layout.quantizer, self.state), value, layout.depth)
        scale, zero_point = (layout.weight.matrices(places.taken(x)) for x in (scale, zero_point))
        return MatrixGrid(scale, zero_point, layout.grid, layout.by_reciprocal)

    def tree_flatten(self) -> tuple[tuple[Any, ...], _Layout]:
        """Arrays, and what is static."""
        return (self.state, self.values, self.each), self.layout

    @classmethod
    def tree_unflatten(cls, layout: _Layout, arrays: tuple[Any, ...]) -> SiteMeasure:
        """The reverse."""
        return cls(layout, *arrays)
