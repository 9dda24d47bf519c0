"""What layers with a weight share: quantizers for weight, bias, input and output around their parent's own forward."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from flax import nnx
from flax.typing import Dtype, PromoteDtypeFn

from jqinject.core.flax_internals import ParameterView, promote_dtype
from jqinject.dot import FrozenParam
from jqinject.dot.tensors.choice import OF_KINDS, ChosenKernel
from jqinject.dot.tensors.choice import ContractionKind as ContractionKind
from jqinject.nn.base import batch_norm_folding, layer_geometry, layer_schemes, slots
from jqinject.nn.base.placed_contraction import (
    LayerProduct,
    PlacedContraction,
    StaticContraction,
    Summed,
    arrays_of,
    contracted_at_once,
    placed_by,
)
from jqinject.nn.base.quant_layer import Arguments, Out, QuantLayer
from jqinject.nn.base.slots import input_format
from jqinject.ops.processes import is_traced
from jqinject.proxy import GradQuantProxyFromInjector, IntegerFormat, stack_of
from jqinject.quant_tensor import AnyQuantTensor, Operand, QuantTensor, as_array, is_quantized, on_integers
from jqinject.quant_tensor.quantized import split_payload

CONTRACTION = slots.Option("contraction", "ContractionKind", "auto")
WITH_SCHEME = (slots.RETURN, slots.ACT_INPUT, CONTRACTION, slots.Option("scheme", "SchemeLike"))


def contracted(parameter_view: Any, inputs: jax.Array, *, out_sharding: Any = None) -> jax.Array:
    """Contract floats as the geometry of a layer declares it: the forward of a layer that derives from none of Flax.

    Args:
        parameter_view: the layer, with `weight_name` and `bias` to read.
        inputs: the input.
        out_sharding: of the output.
    """
    parameters = inputs, vars(parameter_view)[parameter_view.weight_name], parameter_view.bias
    x, weight, bias = parameter_view.promote_dtype(parameters, dtype=parameter_view.dtype)
    placed = placed_by(parameter_view.geometry, x.ndim)
    options = {"preferred_element_type": parameter_view.preferred_element_type, "out_sharding": out_sharding}
    y = jax.lax.dot_general(x, weight, placed.dims.numbers, **options)
    return y if bias is None else y + bias.reshape(placed.shape_of_bias(y.shape))


class QuantWeightLayer(QuantLayer[Out], layer_geometry.DeclaresGeometry):
    """Abstract: a Flax layer whose weight, bias, input, output and output gradient may each have a quantizer.

    The parent's forward pass runs unchanged on the quantized numbers, so that with no quantizer the output is the
    parent's to the bit.

    Attributes:
        weight_quant, bias_quant, input_quant, output_quant, grad_quant: proxies, or None.
        weight_name: what NNX calls the weight.
        master: the float weight, where low-bit numbers have its place and it was kept.
        takes_batch_norm: whether a batch normalization that follows can be folded into weight and bias.
        return_quant_tensor: whether the output is a QuantTensor.
        contraction: in which numbers input and weight are contracted.
        contraction_name: the attribute that holds the function that contracts.
        contracts_at_once: whether a product of payloads needs nothing else of the layer, so that it is one program
            outside of a trace.
    """

    weight_quant = slots.WEIGHT.by_default(layer_schemes.DEFAULT_WEIGHT)
    bias_quant = slots.BIAS
    input_quant = slots.INPUT
    output_quant = slots.OUTPUT
    grad_quant = slots.GRAD
    options = (slots.RETURN, slots.ACT_INPUT, CONTRACTION)
    weight_name: ClassVar[str] = "kernel"
    master: nnx.Variable[Any] | None = None
    takes_batch_norm: ClassVar[bool] = True
    contraction: ContractionKind = "auto"
    in_features: Any
    bias: Any = None
    dtype: Dtype | None = None
    preferred_element_type: Dtype | None = None
    promote_dtype: PromoteDtypeFn = staticmethod(promote_dtype)
    _flax_forward: ClassVar[Callable[..., Any]] = staticmethod(contracted)
    _flax_contraction: ClassVar[Any] = staticmethod(jax.lax.dot_general)
    contraction_name: ClassVar[str] = "dot_general"
    contraction_needs: ClassVar[Mapping[str, str]] = {
        "int": "an input and a weight in integers of at most 8 bits, known before the program runs",
        "fp8": "an input and a weight in 8-bit floats, with scales that do not vary along the input features",
    }
    returns_accumulator: ClassVar[bool] = True
    contracts_at_once: ClassVar[bool] = True

    def _init_quantizers(self, arguments: Arguments, overrides: Arguments, rngs: nnx.Rngs | None) -> None:
        if arguments.get("scheme") is not None:
            arguments = layer_schemes.by_scheme(self, arguments["scheme"], arguments, rngs)
        contraction = arguments.get("contraction", "auto")
        super()._init_quantizers(arguments, overrides, rngs)
        if contraction != "auto":
            self.contraction = OF_KINDS(contraction, type(self).__name__, "contraction")
            self._check_function(contraction)
        slots.check_input_for_weight(self)

    def _facts(self) -> slots.LayerFacts:
        return slots.LayerFacts(stack_of((self,)), self.geometry.channel_shapes)

    def _check_scale_to_return(self) -> None:
        if slots.is_on(self.output_quant) or (self.returns_accumulator and slots.is_on(self.weight_quant)):
            return
        needed, cure = "output_quant", "output_quant=..."
        if self.returns_accumulator:
            needed = f"a quantized input and weight, or {needed},"
            cure = f"weight_quant=... and input_quant=..., or {cure}"
        raise self._no_scale_to_return(needed, cure)

    def input_format(self) -> IntegerFormat | None:
        """Of the quantized input, as far as the layer knows it beforehand: that of its `input_quant`."""
        return input_format(self)

    def _parent_forward(self, parameter_view: object, inputs: jax.Array, out_sharding: object) -> jax.Array:
        """The forward of the Flax layer this one derives from, on other parameters; else the product it declares."""
        return self._flax_forward(parameter_view, inputs, out_sharding=out_sharding)

    def merge_bn_in(self, norm: nnx.BatchNorm) -> None:
        """Put a batch normalization that follows this layer into its weight and bias: `jqinject.nn.merge_bn`.

        Args:
            norm: `nnx.BatchNorm` or `QuantBatchNorm` over the layer's channels; unchanged.

        Raises:
            TypeError: no batch normalization, or a layer that can take none.
            ValueError: channels differ, or the layer is frozen or quantizes its output. Nothing is changed then.
        """
        batch_norm_folding.merge_bn(self, norm)

    # --- weight and bias

    def __setattr__(self, name: str, value: object) -> None:
        name = self.weight_name if name == "weight" else name
        before = vars(self).get(name)
        if isinstance(before, FrozenParam) and isinstance(value, jax.Array | np.ndarray):
            raise before.refusal(value)
        replaced = (
            isinstance(before, nnx.Variable)
            and isinstance(value, nnx.Variable)
            and value is not before
            # Its quantizer made the low-bit numbers, or made them of the weight that comes back.
            and not isinstance(before, FrozenParam)
            and not isinstance(value, FrozenParam)
        )
        if replaced:
            self._check_known_to_quantizers()
        super().__setattr__(name, value)
        if replaced and name in (self.weight_name, "bias"):
            try:
                for proxy in (self.weight_quant, self.bias_quant):
                    if proxy is not None:
                        proxy.init_tensor_quant()
            except Exception:
                super().__setattr__(name, before)
                raise

    def _check_known_to_quantizers(self) -> None:
        """Refuse to replace a parameter before anything is changed where it could not be assembled again."""
        for proxy in (vars(self).get("weight_quant"), vars(self).get("bias_quant")):
            if proxy is not None:
                proxy.check_layers_known(self)

    @property
    def weight(self) -> nnx.Variable[Any]:
        """The weight Variable, which the quantizer quantizes; a `FrozenParam` where the float one was not kept."""
        return getattr(self, self.weight_name) if self.master is None else self.master

    @property
    def frozen(self) -> FrozenParam | None:
        """The low-bit numbers in the weight's place; None where it is float."""
        weight = vars(self).get(self.weight_name)
        return weight if isinstance(weight, FrozenParam) else None

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the weight, frozen or not, with the axes of a stack."""
        return tuple(getattr(self, self.weight_name).shape)

    def quant_weight(
        self, quant_input: object = None, subtensor_slice_list: Sequence[tuple[int, int] | None] | None = None
    ) -> AnyQuantTensor:
        """The weight as the layer contracts it.

        Args:
            quant_input: the quantized input, for a weight quantizer that reads its format; None for what is known.
            subtensor_slice_list: for a part of the weight, (start, stop) along every axis, None for all of an axis; the
                scales are those of the whole weight.

        Returns:
            A QuantTensor, or the array if the weight is not quantized.

        Raises:
            TypeError: the weight quantizer reads the input's format, and that is not quantized to integers.
            ValueError: nothing is known of the input, or it is too wide for the accumulator.
        """
        weight = self._quantized_weight(quant_input)
        if subtensor_slice_list is None:
            return weight
        return weight[tuple(slice(None) if part is None else slice(*part) for part in subtensor_slice_list)]

    def _quantized_weight(self, quant_input: object) -> Any:
        stored = vars(self)[self.weight_name]
        if isinstance(stored, FrozenParam):
            return stored.quant_tensor()
        weight, proxy = stored[...], vars(self).get("weight_quant")
        if proxy is None:
            return weight
        if not proxy.quant_metadata.requires_quant_input:
            return proxy(weight)
        return proxy(weight, input_format(self) if quant_input is None else quant_input)

    def quant_bias(
        self, quant_input: object = None, quant_weight: object = None
    ) -> AnyQuantTensor | jax.Array | None:
        """The bias as the layer adds it.

        Args:
            quant_input: the quantized input, if the scale of the bias comes from it.
            quant_weight: the quantized weight; None quantizes it now.

        Returns:
            An `IntQuantTensor`, the array if it is not quantized, None if there is no bias.

        Raises:
            ValueError: the bias takes its scale from an input that is not quantized.
        """
        return self._quantized_bias(quant_input, quant_weight)

    def _quantized_bias(self, quant_input: object, quant_weight: object) -> Operand | None:
        # Layers call this one: Flax's `tabulate` prints the arguments of public methods, and quantized tensors fail it.
        if self.bias is None:
            return None
        bias, proxy = self.bias[...], self.bias_quant
        if proxy is None:
            return bias
        weight = self._quantized_weight(quant_input) if quant_weight is None else quant_weight
        x, weight = self._scales_on_weight(quant_input, weight)
        return proxy(bias, x, weight, self._bias_scale(x, weight))

    def _bias_scale(self, x: object, weight: object) -> jax.Array | None:
        """The weight's scale in the shape of the bias; None if both have channels along one axis only."""
        if not (on_integers(x) and on_integers(weight)) or weight.scale.size == 1:
            return None
        placed = self._placed(x.shape)
        scale = None if placed is None else placed.bias_scale(x, weight)
        if scale is None and self.geometry.summed:
            raise ValueError(
                f"{type(self).__name__}: the bias takes its scale from the weight, whose scales of shape "
                f"{weight.scale.shape} are not those of the output.\n  cure: one scale for the weight, or a bias "
                "quantizer with a scale of its own (Int8BiasPerTensorFloatInternalScaling)"
            )
        return None if scale is None else scale.reshape(self.bias.shape)

    def _check_features(self, inputs: Operand) -> None:
        """Refuse an input of other features than the layer's, in the layer's own words."""
        shape = np.shape(inputs) if isinstance(inputs, list | tuple | int | float) else inputs.shape
        if shape[-1:] != (self.in_features,):
            geometry = self.geometry
            expected = geometry.expected_features(len(shape))
            layer_geometry.check_features(self, inputs, expected, channels_last=geometry.channels_last)

    def __call__(self, inputs: Any, out_sharding: Any = None) -> Out:
        """The parent's forward on quantized input, weight and bias, then the output quantizer.

        Args:
            inputs: float array or QuantTensor, shaped as for the parent.
            out_sharding: as for the parent.

        Returns:
            An array, or a QuantTensor with `return_quant_tensor`.

        Raises:
            ValueError: the input has other features than the layer; a QuantTensor is to be returned, and input or
                weight are not quantized.
        """
        attributes = vars(self)
        features = attributes.get("in_features")
        if features is None or getattr(inputs, "shape", ())[-1:] != (features,):
            self._check_features(inputs)
        input_quant, grad_quant, output_quant = map(
            attributes.get, ("input_quant", "grad_quant", "output_quant")
        )
        x = inputs if input_quant is None else input_quant(inputs)
        weight: Any = attributes[self.weight_name]
        stored = isinstance(weight, FrozenParam)
        weight = weight if stored else self._quantized_weight(x)
        bias = self.bias
        if bias is not None:
            by_weight = attributes.get("bias_quant") is not None
            bias = self._quantized_bias(x, None if stored else weight) if by_weight else bias[...]
        y: Any
        y, token = self._contracted(x, weight, bias, grad_quant, out_sharding)
        if stored and self.return_quant_tensor:
            weight = self._quantized_weight(x)
        if grad_quant is not None:
            y = grad_quant(y, token)
        if output_quant is not None and output_quant.is_quant_enabled:
            y = output_quant(y)
            return y if self.return_quant_tensor else as_array(y)
        return self._with_metadata(y, x, weight, bias) if self.return_quant_tensor else y

    def _contracted(
        self,
        x: Any,
        weight: Any,
        bias: Any,
        grad_quant: GradQuantProxyFromInjector | None,
        out_sharding: object,
    ) -> tuple[jax.Array, jax.Array | None]:
        """The product by a kernel of the table or, of floats, by the parent's forward; and the gradient's token."""
        integer_gradient = grad_quant is not None and grad_quant.makes_integers
        quantized, choice = isinstance(weight, QuantTensor), None
        # A shortcut past the table, whose rows for payloads need one that is kept.
        floats = not integer_gradient and not isinstance(weight, FrozenParam)
        floats = floats and (not quantized or (weight.kept_payload is None and weight.grid.is_integer))
        if not (floats and self.contraction == "auto"):
            if grad_quant is None and self.contracts_at_once:
                y = self._contracted_at_once(x, weight, bias, out_sharding)
                if y is not None:
                    return y, None
            choice = self._choice(x, weight, integer_gradient)
        if choice is not None and choice.kernel != "floats":
            placed = self._placed(np.shape(x))
            assert placed is not None, "the table has no kernel for a layer without a contraction"
            arrays = arrays_of(choice, x, weight, bias)
            return placed.contract(LayerProduct(self, choice, arrays, grad_quant, out_sharding))
        weight = self._quantized_weight(x) if isinstance(weight, FrozenParam) else weight
        x, weight, bias = map(_array_of, (x, weight, bias))
        parameters = ParameterView(self, {self.weight_name: weight, "bias": bias})
        return self._parent_forward(parameters, x, out_sharding), None

    def _contracted_at_once(
        self, x: Operand, weight: Any, bias: Operand | None, out_sharding: object
    ) -> jax.Array | None:
        """The product of payloads as one program; None in a trace, or where floats are contracted."""
        static = self._static_contraction(np.shape(x), weight)
        (lhs, lhs_static), (rhs, rhs_static) = split_payload(x), split_payload(weight)
        if static is None or is_traced((lhs, rhs, bias)):
            return None
        static = static._replace(out_sharding=out_sharding, operands=(lhs_static, rhs_static))
        return contracted_at_once(static, lhs, rhs, bias)

    def _choice(self, x: Any, weight: Any, integer_gradient: bool) -> ChosenKernel | None:
        """The row of the table for input and weight; None where the parent's function contracts floats in any case.

        Args:
            x, weight: the operands.
            integer_gradient: whether the gradient of the output arrives as integers.

        Raises:
            ValueError: `contraction` is "int" or "fp8", which the layer or its operands do not support.
        """
        static = self._static_contraction(np.shape(x), weight)
        return None if static is None else static.choice(x, weight, integer_gradient)

    def _static_contraction(self, shape: tuple[int, ...], weight: object) -> StaticContraction | None:
        """What is static in the contraction of an input of this shape; None where floats are contracted in any case."""
        requested = self.contraction
        if requested == "float":
            return None
        if not self._contracts_as_flax():
            self._check_function(requested)
            return None
        attributes, stored = vars(self), isinstance(weight, FrozenParam)
        proxy = attributes.get("weight_quant")
        # A zero point between integers cannot be subtracted from their sum.
        are_whole = proxy is None or stored or proxy.quant_metadata.whole_zero_points
        options = attributes.get("dtype"), attributes.get("preferred_element_type"), self.promote_dtype
        layer, needs = type(self).__name__, self.contraction_needs.get(requested, "")
        return StaticContraction(layer, requested, needs, self._placed(shape), are_whole, *options)

    def _placed(self, shape: tuple[int, ...]) -> PlacedContraction | None:
        """How inputs of this shape are contracted; None for a layer, or an input, without a contraction."""
        geometry = self.geometry
        return placed_by(geometry, len(shape)) if shape and geometry.summed else None

    def _check_function(self, contraction: ContractionKind) -> None:
        if contraction in ("int", "fp8") and not self._contracts_as_flax():
            raise ValueError(
                f"{type(self).__name__}(contraction={contraction!r}) contracts payloads itself, and would never call "
                f"{self.contraction_name}={vars(self)[self.contraction_name]!r}.\n"
                f"  cure: contraction='auto' or 'float', which call it; or leave {self.contraction_name} out"
            )

    def _contracts_as_flax(self) -> bool:
        """Whether the function that contracts is Flax's default, not the user's."""
        return vars(self).get(self.contraction_name, self._flax_contraction) is self._flax_contraction

    # --- the scale of the output

    def _scales_on_weight(self, x: Any, weight: Any) -> tuple[Any, Any]:
        """Operands with the same products, whose scales lie on the weight if the input has one for each output."""
        placed = self._placed(x.shape) if on_integers(x) and on_integers(weight) else None
        return (x, weight) if placed is None else placed.scales_on_weight(x, weight)

    def _bias_on_grid(self, bias: object) -> bool | None:
        """Whether the bias counts in steps of the accumulator, as far as the layer knows beforehand."""
        on_grid = is_quantized(bias) and self.bias_quant.requires_input_scale
        return True if on_grid else None

    def _with_metadata(self, y: jax.Array, x: object, weight: object, bias: object) -> Any:
        if not (is_quantized(x) and is_quantized(weight)):
            missing = "weight" if is_quantized(x) else "input"
            raise ValueError(
                f"{type(self).__name__}(return_quant_tensor=True): the {missing} is not quantized, so the output has "
                f"no scale.\n  cure: give the layer {missing}_quant=..."
                + (", or feed it a QuantTensor" if missing == "input" else "")
            )
        if not self._has_whole_zero_points():
            return y
        return self._accumulator(y, *self._scales_on_weight(x, weight), bias)

    def _has_whole_zero_points(self) -> bool:
        """Whether products of the quantized numbers are whole, as far as the layer's quantizers say it."""
        if slots.is_on(self.input_quant) and not self.input_quant.has_whole_zero_points:
            return False
        if self.frozen is not None:
            return self.frozen.form.whole_zero_point
        return not slots.is_on(self.weight_quant) or self.weight_quant.has_whole_zero_points

    def _accumulator(self, y: jax.Array, x: QuantTensor, weight: QuantTensor, bias: object) -> Any:
        """The output with the scale of the sums; the array if they have none."""
        placed = self._placed(x.shape)
        if placed is None:
            return y
        return placed.output(y, Summed(x, weight, bias, self._bias_on_grid(bias), self._zero_points()))

    def _zero_points(self) -> tuple[bool | None, bool | None]:
        """Whether zero points of input and weight may differ from 0, as far as the layer's quantizers say it."""
        of_input = self.input_quant.has_zero_point if slots.is_on(self.input_quant) else None
        if self.frozen is not None:
            return of_input, "zero_point" in self.frozen.form.names
        return of_input, self.weight_quant.has_zero_point if slots.is_on(self.weight_quant) else None


def _array_of(operand: Operand | None) -> Any:
    """The floats of an operand; without a bias, None."""
    return operand.value if isinstance(operand, QuantTensor) else operand
