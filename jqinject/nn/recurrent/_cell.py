"""What quantized recurrent cells share: their quantizers by prefix, and one step on quantized numbers."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import jax
from flax import nnx

from jqinject.nn.base.quant_layer import QuantLayer
from jqinject.nn.base.slots import BIAS, WEIGHT, Slot, make_proxy, slots_of, split_overrides
from jqinject.nn.base.weight_axes import check_features
from jqinject.nn.base.weight_layer import ParameterView
from jqinject.nn.linear.linear import QuantLinear
from jqinject.program import change_class
from jqinject.proxy import ActQuantProxyFromInjector, BiasQuantProxyFromInjector
from jqinject.quant import QuantizerLike
from jqinject.quant_tensor import as_array, on_integers

IO, GATE_ACC, SIGMOID, TANH, CELL_STATE = (
    Slot(f"{name}_quant", f"{name}_", ActQuantProxyFromInjector, "activations")
    for name in ("io", "gate_acc", "sigmoid", "tanh", "cell_state")
)
ORTHOGONAL = nnx.initializers.orthogonal()
Quantizers = Mapping[str, Any]
Parameters = Mapping[str, tuple[jax.Array, jax.Array | None]]


class CellOutput(NamedTuple):
    """What a step makes.

    Attributes:
        carry: the carry of the next step, arrays.
        output: the hidden state, a QuantTensor where it is quantized.
        memory: the cell state likewise; None of cells without one.
    """

    carry: Any
    output: Any
    memory: Any = None


@dataclass(frozen=True)
class CellArguments:
    """What the user gave for the quantizers of a cell.

    Attributes:
        quantizers: argument, as `io_quant` -> an injector, a proxy to share, or None.
        overrides: the user's further keywords.
        shares_accumulators: whether the gates share one quantizer of their sums.
        shares_weights: whether all gates share one weight quantizer.
        input_layers: layer of the cell -> the layer of another cell that is taken instead.
    """

    quantizers: Mapping[str, Any]
    overrides: Mapping[str, Any]
    shares_accumulators: bool = False
    shares_weights: bool = False
    input_layers: Mapping[str, Any] = field(default_factory=dict)


class QuantRecurrentCell(QuantLayer[jax.Array]):
    """Abstract: a recurrent cell of Flax with quantizers.

    A class says in `gates` which layers make each gate's sum, and by its slots where activations are quantized.

    Attributes:
        gates: layer of the input -> layer of the hidden state, in the order in which they share weight quantizers.
    """

    gates: ClassVar[Mapping[str, str]]
    io_quant: Any = IO
    in_features: int
    hidden_features: int

    @classmethod
    def override_slots(cls) -> tuple[Slot, ...]:
        """Those of weights and biases, which the layers of the cell hold, and its own."""
        return (WEIGHT, BIAS, *slots_of(cls))

    @property
    def act_quantizers(self) -> Mapping[str, Slot]:
        """Where activations are quantized: attribute -> its slot, which says which argument it is made from."""
        return {slot.name: slot for slot in slots_of(type(self))}

    def _init_quantizers(self, arguments: CellArguments, rngs: nnx.Rngs) -> None:
        """Make the quantizers, once the layers are there."""
        slots = (WEIGHT, BIAS, *self.act_quantizers.values())
        by_slot = split_overrides(self, slots, arguments.overrides)
        self._quantize_layers(arguments, by_slot, rngs)
        of_sums: Any = None
        for name, slot in self._held_quantizers().items():
            quantizer, declared = arguments.quantizers[slot.argument], by_slot[slot.argument]
            is_sum = slot.argument == GATE_ACC.name and arguments.shares_accumulators
            if is_sum and of_sums is not None:
                proxy = of_sums
            else:
                shape = self._channel_shape(slot)
                proxy = make_proxy(self, slot, quantizer, declared, rngs, channel_shape=shape)
            of_sums = proxy if is_sum else of_sums
            if proxy is not None:
                setattr(self, name, proxy)
                if proxy is quantizer:  # another layer's
                    proxy.add_tracked_module(self)

    def _channel_shape(self, slot: Slot) -> tuple[int, ...] | None:
        """Of a scale for each channel: there are as many as hidden features, in the input too or it is not known."""
        known = slot != IO or self.in_features == self.hidden_features
        return (self.hidden_features,) if known else None

    def _held_quantizers(self) -> Mapping[str, Slot]:
        """Those of `act_quantizers` that this cell has."""
        return self.act_quantizers

    def _quantize_layers(
        self, arguments: CellArguments, overrides: Mapping[str, dict[str, Any]], rngs: nnx.Rngs
    ) -> None:
        """Let the layers of Flax be ours; both layers of a gate share one weight quantizer."""
        quantizer, declared = arguments.quantizers["weight_quant"], overrides["weight_quant"]
        self._refuse_bias_overrides(overrides["bias_quant"])
        for of_input, of_hidden in self.gates.items():
            if of_input not in vars(self):
                continue
            taken = arguments.input_layers.get(of_input)
            if taken is None:
                self._quantize_layer(of_input, quantizer, declared, arguments, overrides, rngs)
            else:
                setattr(self, of_input, taken)
            own = getattr(self, of_input).weight_quant
            self._quantize_layer(of_hidden, own, {}, arguments, overrides, rngs)
            if arguments.shares_weights:
                quantizer, declared = own, {}

    def _refuse_bias_overrides(self, overrides: Mapping[str, Any]) -> None:
        names = [name for gate in self.gates.items() for name in gate if name in vars(self)]
        if overrides and all(getattr(self, name).bias is None for name in names):
            shown = ", ".join(f"bias_{name}" for name in overrides)
            raise TypeError(f"{type(self).__name__}: {shown} would have no effect: there is no bias")

    def _quantize_layer(
        self,
        name: str,
        weight_quant: QuantizerLike,
        weight_overrides: Mapping[str, Any],
        arguments: CellArguments,
        overrides: Mapping[str, dict[str, Any]],
        rngs: nnx.Rngs,
    ) -> None:
        layer = getattr(self, name)
        bias = {} if layer.bias is None else overrides["bias_quant"]
        prefixed = {f"weight_{k}": v for k, v in weight_overrides.items()} | {
            f"bias_{k}": v for k, v in bias.items()
        }
        quantizers = {
            "weight_quant": weight_quant,
            "bias_quant": None if layer.bias is None else arguments.quantizers["bias_quant"],
        }
        change_class(layer, QuantLinear)
        layer._init_quantizers(quantizers, prefixed, False, rngs)

    # --- one step, in parts: what does not depend on the hidden state is made once for a whole sequence

    def _quantizers(self) -> Quantizers:
        """The quantizers of activations, by attribute; those that there are not are missing."""
        held = {name: getattr(self, name) for name in self.act_quantizers}
        return {name: proxy for name, proxy in held.items() if proxy is not None}

    def _quant_input(self, inputs: Any) -> Any:
        """The input, quantized by `io_quant`.

        Args:
            inputs: float array or QuantTensor.
        """
        return inputs if self.io_quant is None else self.io_quant(inputs)

    def _quant_parameters(self, x: Any) -> Parameters:
        """Layer -> its quantized kernel and bias, dequantized.

        Args:
            x: the quantized input, from whose scale and the scale of its kernel a bias takes its own.

        Raises:
            ValueError: a bias takes its scale from an input that is not quantized.
        """
        found: dict[str, tuple[jax.Array, jax.Array | None]] = {}
        for of_input, of_hidden in self.gates.items():
            if of_input not in vars(self):
                continue
            layers = {name: getattr(self, name) for name in (of_input, of_hidden)}
            weights = {name: layer._quantized_weight(None) for name, layer in layers.items()}
            for name, layer in layers.items():
                self._check_bias_scale(layer, x)
                bias = layer._quantized_bias(x, weights[of_input])
                found[name] = (as_array(weights[name]), None if bias is None else as_array(bias))
        return found

    def _check_bias_scale(self, layer: Any, x: Any) -> None:
        proxy = layer.bias_quant
        if layer.bias is None or proxy is None or not proxy.is_quant_enabled or on_integers(x):
            return
        if isinstance(proxy, BiasQuantProxyFromInjector) and proxy.requires_input_scale:
            raise ValueError(
                f"{type(self).__name__}: {proxy.binding.base.__name__} takes its scale from input and weight, and the "
                "input is not quantized.\n  cure: io_quant=..., an input that is an IntQuantTensor, or a bias "
                "quantizer with a scale of its own (Int8BiasPerTensorFloatInternalScaling); bias_quant=None for none"
            )

    def _affine(self, name: str, parameters: Parameters, x: jax.Array) -> jax.Array:
        """x @ kernel + bias of one layer, computed as Flax does."""
        kernel, bias = parameters[name]
        parameter_view: Any = ParameterView(getattr(self, name), {"kernel": kernel, "bias": bias})
        return QuantLinear._flax_forward(parameter_view, x)

    def _projected(self, parameters: Parameters, x: jax.Array) -> Mapping[str, jax.Array]:
        """The part of every gate's sum that comes from the input.

        Args:
            parameters: those of `_quant_parameters`.
            x: the quantized input, of one step or of many.
        """
        return {name: self._affine(name, parameters, x) for name in self.gates if name in parameters}

    @abstractmethod
    def _step(
        self,
        quantizers: Quantizers,
        parameters: Parameters,
        carry: Any,
        projected: Mapping[str, jax.Array],
    ) -> CellOutput:
        """One step.

        Args:
            quantizers: those of `_quantizers()`, or copies of them.
            parameters: those of `_quant_parameters`.
            carry: that of the step before.
            projected: that of the step's input.
        """

    def __call__(self, carry: Any, inputs: Any) -> tuple[Any, jax.Array]:
        """One step, as `nnx.RNN` makes it.

        Args:
            carry: that of the step before, or of `initialize_carry`; it is not quantized again.
            inputs: float array or QuantTensor, (..., in_features).

        Returns:
            The new carry, and the hidden state.

        Raises:
            ValueError: input or carry have other features than the cell; a bias takes its scale from an input that is
                not quantized.
        """
        check_features(self, inputs, {-1: self.in_features})
        for state in carry if isinstance(carry, tuple) else (carry,):
            check_features(
                self, state, {-1: self.hidden_features}, argument="hidden_features", what="a carry"
            )
        x = self._quant_input(inputs)
        parameters = self._quant_parameters(x)
        result = self._step(self._quantizers(), parameters, carry, self._projected(parameters, as_array(x)))
        return result.carry, as_array(result.output)


def quantized(quantizers: Quantizers, name: str, x: jax.Array) -> Any:
    """What a quantizer makes of an array: a QuantTensor, or the array where there is none."""
    return quantizers[name](x) if name in quantizers else x


def value_of(quantizers: Quantizers, name: str, x: jax.Array) -> jax.Array:
    """The value of `quantized`."""
    return as_array(quantized(quantizers, name, x))


def set_bias(layer: nnx.Linear, bias: nnx.Param[jax.Array] | None) -> None:
    """Give a layer of Flax that was just made another bias, or take it away."""
    layer.bias = nnx.data(bias)
    layer.use_bias = bias is not None


def sigmoid(x: jax.Array) -> jax.Array:
    """`nnx.sigmoid` by a name that can be pickled."""
    return nnx.sigmoid(x)


def tanh(x: jax.Array) -> jax.Array:
    """`nnx.tanh` by a name that can be pickled."""
    return nnx.tanh(x)


def relu(x: jax.Array) -> jax.Array:
    """`nnx.relu` by a name that can be pickled."""
    return nnx.relu(x)


Activation = Callable[[jax.Array], jax.Array]
