"""The base of layers whose forward pass is one `lax.dot_general`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from jqinject.dot import contraction_output
from jqinject.dot.geometry.dimensions import Dimensions, scale_in_output
from jqinject.dot.kernels.integer import are_sharded
from jqinject.dot.tensors.choice import ChosenKernel
from jqinject.dot.tensors.contract import contract_as
from jqinject.nn.base.layer_geometry import LayerGeometry
from jqinject.nn.base.quant_layer import Out
from jqinject.nn.base.weight_layer import LayerArrays, QuantWeightLayer
from jqinject.ops.sharding import asked, before_transpose, with_sharding
from jqinject.proxy import GradQuantProxyFromInjector
from jqinject.quant_tensor import (
    IntQuantTensor,
    QuantTensor,
    as_array,
    on_integers,
)


@dataclass(frozen=True)
class PlacedContraction:
    """A contraction of input and weight, and the place of its axes in the layer's output.

    Attributes:
        dims: of the contraction.
        order: its result's axes in the order of the output; None if unchanged.
    """

    dims: Dimensions
    order: tuple[int, ...] | None = None

    @cached_property
    def of_input(self) -> dict[int, int]:
        """Axis of the input -> axis of the output."""
        return {axis: self._place(place) for axis, place in self.dims.lhs_places.items()}

    @cached_property
    def of_weight(self) -> dict[int, int]:
        """Axis of the weight -> axis of the output."""
        return {axis: self._place(place) for axis, place in self.dims.rhs_places.items()}

    def _place(self, place: int) -> int:
        return place if self.order is None else self.order.index(place)

    def weight_scale(self, weight: IntQuantTensor) -> jax.Array | None:
        """The weight's scale laid out to multiply the output; None if it varies along summed axes."""
        return scale_in_output(weight.scale, weight.ndim, self.of_weight, self.dims.out_ndim)

    def out_shape(self, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the output of operands of these shapes."""
        shape = self.dims.out_shape(lhs, rhs)
        return shape if self.order is None else tuple(shape[axis] for axis in self.order)

    @lru_cache(maxsize=1024)  # noqa: B019 (compared by value and small)
    def shape_of_bias(self, output: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in which a bias is added: the output's, with 1 along the axes that the weight does not have."""
        places = self.of_weight.values()
        return tuple(size if place in places else 1 for place, size in enumerate(output))


@lru_cache(maxsize=1024)
def _lies_as_bias(placed: PlacedContraction, scale: tuple[int, ...], weight: tuple[int, ...]) -> bool:
    """Whether scales of a weight, of these shapes, are one for each element of a bias and in the same order."""
    if len(scale) != len(weight):
        return False
    channels = [axis for axis, size in enumerate(weight) if axis in placed.of_weight and size != 1]
    places = [placed.of_weight[axis] for axis in channels]
    varying = [axis for axis, size in enumerate(scale) if size != 1]
    return varying == channels and places == sorted(places)


@lru_cache(maxsize=1024)
def _placed(geometry: LayerGeometry, ndim: int) -> PlacedContraction:
    """The contraction that a geometry declares, of an input of `ndim` axes."""
    # Flax contracts axes in the order in which they lie, not in that of its arguments.
    axes, batch = (
        tuple(sorted(axis % ndim for axis in axes)) for axes in (geometry.input_axes, geometry.batch_axes)
    )
    numbers = (axes, geometry.summed), (batch, tuple(range(len(batch))))
    return PlacedContraction(Dimensions.of(ndim, geometry.ndim, numbers))


@lru_cache(maxsize=1024)
def of_matrix(in_features: int, out_features: int) -> LayerGeometry:
    """Return the geometry of a matrix (in, out) that is contracted with the last axis of the input."""
    return LayerGeometry(
        2,
        summed=(0,),
        features=(in_features,),
        input_channels=(in_features,),
        output_channels=(out_features,),
    )


class QuantDotLayer(QuantWeightLayer[Out]):
    """Abstract: a layer that contracts its input with its weight, and can do so in integers and 8-bit floats.

    By default for a weight (in, out) and the last axis of the input.
    """

    out_features: Any

    @property
    def geometry(self) -> LayerGeometry:
        """Those of a matrix (in, out) and the last axis of the input."""
        return of_matrix(self.in_features, self.out_features)

    contraction_needs = {
        "int": "an input and a weight in integers of at most 8 bits, known before the program runs",
        "fp8": "an input and a weight in 8-bit floats, with scales that do not vary along the input features",
    }

    def _placed(self, shape: tuple[int, ...]) -> PlacedContraction | None:
        """The contraction with an input of this shape; None if it is not a single `dot_general`."""
        return _placed(self.geometry, len(shape)) if shape else None

    def _contract(
        self,
        choice: ChosenKernel,
        arrays: LayerArrays,
        grad_quant: GradQuantProxyFromInjector | None,
        out_sharding: Any,
    ) -> tuple[jax.Array, jax.Array | None]:
        x, weight, bias = self.promote_dtype(arrays, dtype=self.dtype)
        placed = self._placed(x.shape)
        assert placed is not None, "asked for by the table"
        dims, order, sharding = placed.dims, placed.order, out_sharding
        if order is not None:
            sharding = before_transpose(asked(out_sharding, x, weight), order)
        dtype = self.preferred_element_type or x.dtype
        gradient = None
        if grad_quant is not None:
            shape = placed.out_shape(x.shape, choice.rhs.shape)
            gradient = grad_quant.gradient_format(jax.ShapeDtypeStruct(shape, dtype))
            if gradient is not None and (order is not None or are_sharded(x, weight)):
                gradient = gradient.in_one()
        y, token = contract_as(choice, dims, dtype, (x, weight), gradient=gradient, out_sharding=sharding)
        if order is not None:
            y = with_sharding(y.transpose(order), out_sharding)
        if bias is not None:
            y += jnp.reshape(bias, placed.shape_of_bias(y.shape))
        return y, token

    # --- scales of bias and output

    def _scales_on_weight(self, quant_input: Any, quant_weight: Any) -> tuple[Any, Any]:
        # Along a batch axis of both operands, each index of the weight has one input scale.
        x, weight = quant_input, quant_weight
        if not (on_integers(x) and on_integers(weight)) or x.scale.size == 1:
            return x, weight
        placed = self._placed(x.shape)
        if placed is None:
            return x, weight
        partners = dict(zip(placed.dims.lhs_batch, placed.dims.rhs_batch, strict=True))
        scale = scale_in_output(x.scale, x.ndim, partners, weight.ndim)
        if scale is None:
            return x, weight
        return x.set(scale=jnp.ones(())), weight.set(scale=weight.scale * scale)

    def _beside_bias(self, quant_input: Any, quant_weight: Any) -> tuple[Any, Any, jax.Array | None]:
        x, weight = quant_input, quant_weight
        if not (on_integers(x) and on_integers(weight)):
            return x, weight, None
        if x.scale.size != 1:
            x, weight = self._scales_on_weight(x, weight)
        scale = weight.scale
        if scale.size == 1:
            return x, weight, None
        placed = self._placed(x.shape)
        if placed is not None and _lies_as_bias(placed, scale.shape, weight.shape):
            return x, weight, scale.reshape(self.bias.shape)
        expanded = None if placed is None else placed.weight_scale(weight)
        if placed is None or expanded is None:
            raise ValueError(
                f"{type(self).__name__}: the bias takes its scale from the weight, whose scales of shape {scale.shape} "
                "are not those of the output.\n  cure: one scale for the weight, or a bias quantizer with a scale of "
                "its own (Int8BiasPerTensorFloatInternalScaling)"
            )
        of_bias = jnp.broadcast_to(expanded, placed.shape_of_bias(placed.out_shape(x.shape, weight.shape)))
        return x, weight, of_bias.reshape(self.bias.shape)

    def _accumulator(self, y: jax.Array, x: QuantTensor, weight: QuantTensor, bias: Any) -> Any:
        placed = self._placed(x.shape)
        if placed is None:
            return y
        if bias is not None:
            whole = bias if on_integers(bias) else as_array(bias)
            bias = whole.reshape(placed.shape_of_bias(y.shape))
        return contraction_output(
            y,
            x,
            weight,
            terms=math.prod(x.shape[axis] for axis in placed.dims.lhs_contract),
            lhs_places=placed.of_input,
            rhs_places=placed.of_weight,
            bias=bias,
            bias_on_grid=self._bias_on_grid(bias, weight),
            zero_points=self._zero_points(),
        )
