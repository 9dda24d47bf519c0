"""How a layer contracts its input with its weight: a `lax.dot_general` with its axes, or a window that moves."""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax.typing import Dtype, PromoteDtypeFn

from jqinject.core.flax_internals import ParameterView
from jqinject.dot import Affine, FrozenParam, affine_of, contraction_output, integer_conv
from jqinject.dot.geometry.dimensions import Dimensions, scale_in_output
from jqinject.dot.kernels import convolution, integer
from jqinject.dot.tensors.choice import ChosenKernel, ContractionKind, choose, describe
from jqinject.dot.tensors.contract import contract_as
from jqinject.nn.base.layer_geometry import LayerGeometry
from jqinject.ops.sharding import asked, before_transpose, with_sharding
from jqinject.proxy import GradQuantProxyFromInjector
from jqinject.quant_tensor import (
    IntQuantTensor,
    Operand,
    QuantTensor,
    as_array,
    is_quantized,
    on_integers,
    quantized,
)

#: Input, weight and bias of a call; None for no bias.
LayerArrays: TypeAlias = tuple[Any, Any, jax.Array | None]


class ContractingLayer(Protocol):
    """What a placement reads of its layer."""

    dtype: Dtype | None
    preferred_element_type: Dtype | None
    promote_dtype: PromoteDtypeFn
    contraction_name: ClassVar[str]

    def _parent_forward(
        self, parameter_view: object, inputs: jax.Array, out_sharding: object, /
    ) -> jax.Array: ...


class LayerProduct(NamedTuple):
    """A product of payloads that a layer asks for.

    Attributes:
        layer: the layer.
        choice: the kernel of the table, and the operands.
        arrays: input and weight, which receive the gradients, and the bias or None.
        grad_quant: quantizer of the output's gradient, or None.
        out_sharding: as for the layer of Flax.
    """

    layer: ContractingLayer
    choice: ChosenKernel
    arrays: LayerArrays
    grad_quant: GradQuantProxyFromInjector | None
    out_sharding: Any


class Summed(NamedTuple):
    """What the sums of an output are made of.

    Attributes:
        x, weight: the operands.
        bias: an array or a QuantTensor; None for no bias.
        bias_on_grid, zero_points: as for `contraction_output`.
    """

    x: QuantTensor
    weight: QuantTensor
    bias: Any
    bias_on_grid: bool | jax.Array | None
    zero_points: tuple[bool | None, bool | None]


@dataclass(frozen=True)
class PlacedContraction:
    """A contraction of input and weight.

    Attributes:
        axes: of input, weight and the layer's output.
        terms: number of products that one element of the output sums; None for the sizes of the summed axes.
    """

    axes: Dimensions
    terms: int | None = field(default=None, kw_only=True)

    @cached_property
    def dims(self) -> Any:
        """Where scales may vary: the axes, with the output in the order of `lax.dot_general`."""
        return self.axes.plain

    @lru_cache(maxsize=1024)  # noqa: B019 (compared by value and small)
    def shape_of_bias(self, output: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in which a bias is added: the output's, with 1 along the axes that the weight does not have."""
        sizes = zip(self.axes.out, output, strict=True)
        return tuple(size if label in self.axes.rhs else 1 for label, size in sizes)

    def contract(self, product: LayerProduct) -> tuple[jax.Array, jax.Array | None]:
        """Contract payloads by a kernel of the table, and add the bias.

        Returns:
            (the output, the token for the gradient's scale, or None).
        """
        layer, choice, arrays, grad_quant, out_sharding = product
        x, weight, bias = layer.promote_dtype(arrays, dtype=layer.dtype)
        axes, sharding = self.axes, out_sharding
        if not axes.is_ordered:
            sharding = before_transpose(asked(out_sharding, x, weight), axes.order)
        dtype = layer.preferred_element_type or x.dtype
        gradient = None
        if grad_quant is not None:
            shape = axes.out_shape(x.shape, choice.rhs.shape)
            gradient = grad_quant.gradient_format(jax.ShapeDtypeStruct(shape, dtype))
            if gradient is not None and (not axes.is_ordered or integer.are_sharded(x, weight)):
                gradient = gradient.in_one()
        y, token = contract_as(
            choice, self.dims, dtype, (x, weight), gradient=gradient, out_sharding=sharding
        )
        if not axes.is_ordered:
            y = with_sharding(axes.ordered(y), out_sharding)
        if bias is not None:
            y += jnp.reshape(bias, self.shape_of_bias(y.shape))
        return y, token

    def scales_on_weight(
        self, x: IntQuantTensor, weight: IntQuantTensor
    ) -> tuple[IntQuantTensor, IntQuantTensor]:
        """Move scales along a batch axis, where each index of the weight has one input scale, to the weight."""
        if x.scale.size == 1:
            return x, weight
        batch = [label if label in self.axes.out else None for label in self.axes.lhs]
        scale = scale_in_output(x.scale, batch, self.axes.rhs)
        if scale is None:
            return x, weight
        return x.set(scale=jnp.ones(())), weight.set(scale=weight.scale * scale)

    def bias_scale(self, x: IntQuantTensor, weight: IntQuantTensor) -> jax.Array | None:
        """Return the weight's scale in the shape in which a bias is added; None if it varies along summed axes."""
        axes, sizes = self.axes, dict(zip(self.axes.rhs, weight.shape, strict=True))
        channels = [label for label in axes.out if label in axes.rhs]
        scale = scale_in_output(weight.scale, axes.rhs, channels)
        return None if scale is None else jnp.broadcast_to(scale, [sizes[label] for label in channels])

    def output(self, y: jax.Array, summed: Summed) -> IntQuantTensor | jax.Array:
        """Return the output with the scale of its sums; the array if they have none."""
        x, weight, bias, bias_on_grid, zero_points = summed
        if bias is not None:
            addend = bias if on_integers(bias) else as_array(bias)
            bias = addend.reshape(self.shape_of_bias(y.shape))
        return contraction_output(
            y,
            x,
            weight,
            terms=math.prod(x.shape[axis] for axis in self.axes.lhs_contract)
            if self.terms is None
            else self.terms,
            axes=self.axes,
            bias=bias,
            bias_on_grid=bias_on_grid,
            zero_points=zero_points,
        )


@dataclass
class IntegerConvolution:
    """In the place of `lax.conv_general_dilated`: convolves integers.

    Attributes:
        choice: the row of the table for input and kernel.
        grad_quant: quantizer of the output's gradient, or None.
        token: of the last call: its cotangent is the scale of the gradient; None for a gradient of floats.
    """

    choice: ChosenKernel
    grad_quant: GradQuantProxyFromInjector | None = None
    token: jax.Array | None = None

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        window_strides: Any,
        padding: Any,
        *,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
        **options: Any,
    ) -> jax.Array:
        """The convolution; gradients go to the arrays."""
        dtype = preferred_element_type or lhs.dtype
        options["out_sharding"] = asked(out_sharding, lhs, rhs)
        convolve = convolution.Convolution.of(
            lhs.shape, rhs.shape, window_strides, padding, dtype=dtype, **options
        )
        left, right = self.choice.operands((lhs, rhs))
        left = replace(left, integers=self._integers(left.integers, lhs))
        gradient = None
        if self.grad_quant is not None and self.grad_quant.makes_integers:
            out = jax.eval_shape(convolve, lhs, jnp.zeros(rhs.shape, lhs.dtype))
            form = self.grad_quant.gradient_format(out)
            gradient = None if form is None else form.in_one()
        y, self.token = integer_conv(convolve, left, right, gradient)
        return with_sharding(y, out_sharding)

    def _integers(self, integers: Any, lhs: jax.Array) -> Affine:
        """The input's integers, in the shape that the layer gave it: other batch axes, or a border added."""
        x = self.choice.lhs
        scale, zero = x.scale.reshape(()), x.zero_point.reshape(())
        if lhs.size == x.size:
            no_zero = integers.zero_point is None
            return Affine(integers.payload.reshape(lhs.shape), scale, None if no_zero else zero)
        return affine_of(x.set(value=lhs, scale=scale, zero_point=zero))


@dataclass(frozen=True)
class PlacedFilters(PlacedContraction):
    """How a window moves over an input, channels last.

    Attributes:
        is_contracted: whether integers are convolved; else floats alone.
        filters: number of output channels of each input channel in a depthwise convolution; else 0.
    """

    is_contracted: bool = True
    filters: int = 0

    @classmethod
    @lru_cache(maxsize=1024)
    def of(
        cls, geometry: LayerGeometry, ndim: int, terms: int, is_contracted: bool, filters: int = 0
    ) -> "PlacedFilters":
        """Place the window that a geometry declares on an input of `ndim` axes."""
        channel, examples = geometry.channels[0], ndim - (geometry.ndim - 1)
        shared = ((ndim - 1,), (channel,)) if filters else ((), ())
        dims = Dimensions.of(ndim, geometry.ndim, (((), ()), shared))
        places = (("out", axis) for axis in range(examples, ndim - 1))
        axes = replace(dims, out=(*dims.lhs[:examples], *places, dims.rhs[channel]))
        return cls(axes, is_contracted, filters, terms=terms)

    @cached_property
    def dims(self) -> convolution.Filters | None:
        """Where scales may vary; None where floats alone are convolved."""
        channel = self.axes.rhs.index(self.axes.out[-1])
        return convolution.Filters(None, channel, shifted=False) if self.is_contracted else None

    def contract(self, product: LayerProduct) -> tuple[jax.Array, jax.Array | None]:
        """Convolve payloads by the forward of Flax; see `PlacedContraction`."""
        layer, choice, (x, kernel, bias), grad_quant, out_sharding = product
        if isinstance(choice.rhs, FrozenParam):
            kernel = unallocated(choice.rhs.shape, choice.rhs.dtype)
        convolve = IntegerConvolution(choice, grad_quant)
        functions = {
            "promote_dtype": partial(promoted, layer.promote_dtype),
            layer.contraction_name: convolve,
        }
        view = ParameterView(layer, {"kernel": kernel, "bias": bias, **functions})
        return layer._parent_forward(view, x, out_sharding), convolve.token

    def scales_on_weight(
        self, x: IntQuantTensor, weight: IntQuantTensor
    ) -> tuple[IntQuantTensor, IntQuantTensor]:
        """Move the scales of input channels that have filters of their own to these."""
        size = x.scale.size
        if size == 1 or not self.filters or not size == x.scale.shape[-1] == x.shape[-1]:
            return x, weight
        scales = jnp.repeat(x.scale.reshape(-1), self.filters)
        return x.set(scale=jnp.ones(())), weight.set(scale=weight.scale * scales)

    def output(self, y: jax.Array, summed: Summed) -> IntQuantTensor | jax.Array:
        """Return the output with the scale of its sums; see `PlacedContraction`."""
        if summed.bias_on_grid and summed.weight.scale.size != 1:
            # Where channels differ in scale the quantized bias becomes the output's zero point, so that the integers
            # are those of the accumulator before the bias: Brevitas's convention for convolutions. The value is the
            # same either way.
            scale = summed.bias.scale
            summed = summed._replace(bias_on_grid=jnp.allclose(scale, scale.reshape(-1)[0]))
        return super().output(y, summed)


@lru_cache(maxsize=1024)
def placed_by(geometry: LayerGeometry, ndim: int) -> PlacedContraction:
    """Return the contraction that a geometry declares, of an input of `ndim` axes."""
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


class StaticContraction(NamedTuple):
    """What is static in a layer's contraction, compared by value.

    Attributes:
        layer: the name of its class.
        contraction: the numbers that were asked for.
        needs: what these need of the operands, for the error text.
        placed: how the input is contracted; None without a contraction.
        whole_zero_points: whether those of the weight are integers.
        dtype, preferred_element_type, promote_dtype, out_sharding: as for the layer of Flax.
        operands: what is static in input and weight, as `split_payload` returns it.
    """

    layer: str
    contraction: ContractionKind
    needs: str
    placed: Any
    whole_zero_points: bool
    dtype: Dtype | None
    preferred_element_type: Dtype | None
    promote_dtype: PromoteDtypeFn
    out_sharding: Any = None
    operands: tuple[Any, Any] = (None, None)

    def choice(self, x: Operand, weight: Any, integer_gradient: bool = False) -> ChosenKernel:
        """Choose the row of the table for input and weight.

        Args:
            x, weight: the operands.
            integer_gradient: whether the gradient of the output arrives as integers.

        Raises:
            ValueError: the operands do not have the numbers that were asked for.
        """
        operand = weight if self.whole_zero_points else as_array(weight)
        dims = None if self.placed is None else self.placed.dims
        choice = choose(x, operand, dims, self.contraction, rounded=False, gradient=integer_gradient)
        if self.contraction not in ("auto", choice.numbers):
            weight = weight.quant_tensor() if isinstance(weight, FrozenParam) else weight
            raise ValueError(
                f"{self.layer}(contraction={self.contraction!r}) needs {self.needs}; got {_described(x)} and "
                f"{_described(weight)}.\n  cure: quantizers of that kind for input and weight, or contraction='auto'"
            )
        return choice


@partial(jax.jit, static_argnums=0)
def contracted_at_once(static: StaticContraction, lhs: object, rhs: object, bias: object) -> jax.Array | None:
    """The product of a layer outside of a trace, as one program; None where floats are contracted.

    Args:
        static: the layer's contraction.
        lhs, rhs: arrays of input and weight, as `split_payload` returns them.
        bias: an array or a QuantTensor; None for no bias.
    """
    x, weight = map(quantized.joined_payload, (lhs, rhs), static.operands)
    choice = static.choice(x, weight)
    if choice.kernel == "floats" or static.placed is None:
        return None
    arrays = arrays_of(choice, x, weight, bias)
    # Windows, which read more of a layer, are not contracted at once.
    product = LayerProduct(static, choice, arrays, None, static.out_sharding)  # pyright: ignore[reportArgumentType]
    return static.placed.contract(product)[0]


def arrays_of(choice: ChosenKernel, x: object, weight: object, bias: object) -> LayerArrays:
    """The arrays that receive the gradients of a contraction of payloads, and the bias.

    Args:
        choice: the row of the table.
        x, weight: the operands.
        bias: an array or a QuantTensor; None for no bias.
    """
    # Where 8-bit floats are contracted, the arrays only receive the gradients.
    array_of = attrgetter("carrier" if choice.kernel == "float8" else "value")
    if isinstance(weight, FrozenParam):
        kernel = np.zeros(0, weight.dtype)  # only the dtype is read
    else:
        kernel = array_of(weight) if isinstance(weight, QuantTensor) else weight
    x = array_of(x) if isinstance(x, QuantTensor) else x
    return x, kernel, None if bias is None else as_array(bias)


def unallocated(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Zeros in the memory of one number."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def promoted(promote_dtype: PromoteDtypeFn, arrays: Any, /, **options: Any) -> Any:
    """What a layer's `promote_dtype` returns; an unallocated kernel stays so."""
    inputs, kernel, bias = arrays
    if not isinstance(kernel, np.ndarray):  # traced
        return promote_dtype(arrays, **options)
    inputs, small, bias = promote_dtype((inputs, np.zeros(0, kernel.dtype), bias), **options)
    return inputs, unallocated(kernel.shape, small.dtype), bias


def _described(operand: Operand) -> str:
    """An operand in an error text."""
    if on_integers(operand):
        zero = np.shape(operand.zero_point)
        return f"{operand.bit_width}-bit integers with scales of shape {operand.scale.shape}, zero points of {zero}"
    return describe(operand) if is_quantized(operand) else f"{operand.dtype} numbers without a quantizer"
