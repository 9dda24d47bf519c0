"""What quantized recurrent cells share: their quantizers by prefix, and one step on quantized numbers."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
from flax import nnx

from jqinject.core.flax_internals import ParameterView, change_class
from jqinject.nn import base, linear
from jqinject.proxy import BiasQuantProxyFromInjector
from jqinject.quant import QuantizerLike
from jqinject.quant_tensor import as_array, on_integers

IO, GATE_ACC, SIGMOID, TANH, CELL_STATE = (
    base.act_slot(prefix) for prefix in ("io_", "gate_acc_", "sigmoid_", "tanh_", "cell_state_")
)
Activation = Callable[[jax.Array], jax.Array]
Quantizers = Mapping[str, Callable[[jax.Array], object]]
Parameters = Mapping[str, tuple[jax.Array, jax.Array | None]]


class CellParts(NamedTuple):
    """What a step computes with.

    Attributes:
        quantizers: those of activations, by attribute; those that there are not are missing.
        parameters: layer -> its quantized kernel and bias, dequantized.
    """

    quantizers: Quantizers
    parameters: Parameters

    def quantized(self, name: str, x: jax.Array) -> Any:
        """What a quantizer makes of an array: a QuantTensor, or the array without one."""
        return base.through(self.quantizers.get(name), x)

    def value_of(self, name: str, x: jax.Array) -> jax.Array:
        """The value of `quantized`."""
        return as_array(self.quantized(name, x))


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


class QuantRecurrentCell(base.QuantLayer[jax.Array]):
    """Abstract: a recurrent cell of Flax with quantizers.

    A class says in `gates` which layers make each gate's sum, and by its slots where activations are quantized.

    Attributes:
        gates: layer of the input -> layer of the hidden state, in the order in which they share weight quantizers.
    """

    options = ()
    gates: ClassVar[Mapping[str, str]]
    io_quant = IO
    in_features: int
    hidden_features: int
    gate_fn: Activation

    @classmethod
    def override_slots(cls) -> tuple[base.Slot, ...]:
        """Those of weights and biases, which the layers of the cell hold, and its own."""
        return (base.WEIGHT, base.BIAS, *base.slots_of(cls))

    def _held_slots(self) -> tuple[base.Slot, ...]:
        """Its own places for quantizers that this cell fills."""
        return base.slots_of(type(self))

    def _held_gates(self) -> list[tuple[str, str]]:
        """The pairs of layers that this cell has."""
        return [(of_input, of_hidden) for of_input, of_hidden in self.gates.items() if of_input in vars(self)]

    def _init_quantizers(
        self, arguments: base.Arguments, overrides: base.Arguments, rngs: nnx.Rngs | None
    ) -> None:
        """Make the quantizers, once the layers are there.

        Args:
            arguments: the `locals()` of `__init__`: quantizers, and which of them are shared.
            overrides: the user's further keywords.
            rngs: for quantizers that draw random numbers.
        """
        base.split_overrides(
            self, self.override_slots(), overrides
        )  # refuses unknown ones before anything is made
        for name in {"gate_fn", "activation_fn"} & vars(self).keys():
            setattr(self, name, PICKLABLE.get(vars(self)[name], vars(self)[name]))
        self._quantize_layers(arguments, overrides, rngs)
        slots, of_layers = self._held_slots(), (base.WEIGHT.prefix, base.BIAS.prefix)
        quantizers = {slot.argument: arguments[slot.argument] for slot in slots}
        own = {name: override for name, override in overrides.items() if not name.startswith(of_layers)}
        shares_sums = arguments.get("shared_intra_layer_gate_acc_quant", False)
        first, *others = [slot for slot in slots if slot.argument == GATE_ACC.name]
        shared = others if shares_sums else []
        base.hold_proxies(self, quantizers, own, rngs, slots=[slot for slot in slots if slot not in shared])
        proxy = first.__get__(self)
        for slot in shared if proxy is not None else []:
            setattr(self, slot.name, proxy)

    def _facts(self) -> base.LayerFacts:
        # There are as many channels as hidden features, in the input too or it is not known.
        hidden = [s for s in base.slots_of(type(self)) if s != IO or self.in_features == self.hidden_features]
        return base.LayerFacts(channel_shapes={slot.name: (self.hidden_features,) for slot in hidden})

    def _quantize_layers(
        self, arguments: Mapping[str, Any], overrides: Mapping[str, object], rngs: nnx.Rngs | None
    ) -> None:
        """Let the layers of Flax be ours; both layers of a gate share one weight quantizer."""
        of_weights, of_biases = (
            {name: override for name, override in overrides.items() if name.startswith(slot.prefix)}
            for slot in (base.WEIGHT, base.BIAS)
        )
        gates, quantizer = self._held_gates(), arguments["weight_quant"]
        if of_biases and all(vars(self)[name].bias is None for gate in gates for name in gate):
            raise TypeError(
                f"{type(self).__name__}: {', '.join(of_biases)} would have no effect: there is no bias"
            )

        def quantize(name: str, weight_quant: QuantizerLike, declared: Mapping[str, Any]) -> None:
            layer: Any = vars(self)[name]
            quantizers = {"weight_quant": weight_quant}
            if layer.bias is not None:
                quantizers["bias_quant"] = arguments["bias_quant"]
                declared = {**declared, **of_biases}
            change_class(layer, linear.QuantLinear)
            layer._init_quantizers(quantizers, declared, rngs)

        taken = arguments.get("input_layers", {})
        for of_input, of_hidden in gates:
            if of_input in taken:
                setattr(self, of_input, taken[of_input])
            else:
                quantize(of_input, quantizer, of_weights)
            shared = vars(self)[of_input].weight_quant
            quantize(of_hidden, shared, {})
            if arguments.get("shared_intra_layer_weight_quant", False):
                quantizer, of_weights = shared, {}

    # --- one step, in parts: what does not depend on the hidden state is made once for a whole sequence

    def _quantizers(self) -> Quantizers:
        """The quantizers of activations, by attribute; those that there are not are missing."""
        proxies = {slot.name: slot.__get__(self) for slot in base.slots_of(type(self))}
        return {name: proxy for name, proxy in proxies.items() if proxy is not None}

    def _quant_parameters(self, x: object) -> Parameters:
        """Layer -> its quantized kernel and bias, dequantized.

        Args:
            x: the quantized input, from whose scale and the scale of its kernel a bias takes its own.

        Raises:
            ValueError: a bias takes its scale from an input that is not quantized.
        """
        parameters: dict[str, tuple[jax.Array, jax.Array | None]] = {}
        for gate in self._held_gates():
            layers = [vars(self)[name] for name in gate]
            weights = [layer._quantized_weight(None) for layer in layers]
            for name, layer, weight in zip(gate, layers, weights, strict=True):
                self._check_bias_scale(layer, x)
                bias = layer._quantized_bias(x, weights[0])
                parameters[name] = (as_array(weight), None if bias is None else as_array(bias))
        return parameters

    def _check_bias_scale(self, layer: Any, x: object) -> None:
        proxy = layer.bias_quant
        if layer.bias is None or proxy is None or not proxy.is_quant_enabled or on_integers(x):
            return
        if isinstance(proxy, BiasQuantProxyFromInjector) and proxy.requires_input_scale:
            raise ValueError(
                f"{type(self).__name__}: {proxy.binding.base.__name__} takes its scale from input and weight, and the "
                "input is not quantized.\n  cure: io_quant=..., an input that is an IntQuantTensor, or a bias "
                "quantizer with a scale of its own (Int8BiasPerTensorFloatInternalScaling); bias_quant=None for floats"
            )

    def _affine(self, name: str, parameters: Parameters, x: jax.Array) -> jax.Array:
        """x @ kernel + bias of one layer, computed as Flax does."""
        kernel, bias = parameters[name]
        parameter_view: Any = ParameterView(vars(self)[name], {"kernel": kernel, "bias": bias})
        return linear.QuantLinear._flax_forward(parameter_view, x)

    def _projected(self, parameters: Parameters, x: jax.Array) -> Mapping[str, jax.Array]:
        """The part of every gate's sum that comes from the input.

        Args:
            parameters: those of `_quant_parameters`.
            x: the quantized input, of one step or of many.
        """
        return {name: self._affine(name, parameters, x) for name in self.gates if name in parameters}

    def _gate(self, parts: CellParts, gate: str, x: jax.Array) -> jax.Array:
        """A gate from its sum."""
        return parts.value_of(f"{gate}_sigmoid_quant", self.gate_fn(parts.value_of(f"{gate}_acc_quant", x)))

    @abstractmethod
    def _step(self, parts: CellParts, carry: Any, projected: Mapping[str, jax.Array]) -> CellOutput:
        """One step.

        Args:
            parts: those of `_quantizers()`, or copies of them, and of `_quant_parameters`.
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
        base.check_features(self, inputs, {-1: self.in_features})
        for state in carry if isinstance(carry, tuple) else (carry,):
            base.check_features(
                self, state, {-1: self.hidden_features}, argument="hidden_features", what="a carry"
            )
        x = base.through(self.io_quant, inputs)
        parts = CellParts(self._quantizers(), self._quant_parameters(x))
        result = self._step(parts, carry, self._projected(parts.parameters, as_array(x)))
        return result.carry, as_array(result.output)


def set_bias(layer: nnx.Linear, bias: nnx.Param[jax.Array] | None) -> None:
    """Give a layer of Flax that was just made another bias, or take it away."""
    layer.bias = nnx.data(bias)
    layer.use_bias = bias is not None


def _sigmoid(x: jax.Array) -> jax.Array:
    return nnx.sigmoid(x)


def _tanh(x: jax.Array) -> jax.Array:
    return nnx.tanh(x)


def _relu(x: jax.Array) -> jax.Array:
    return nnx.relu(x)


# Flax's functions by names that can be pickled.
PICKLABLE: Mapping[object, Activation] = {nnx.sigmoid: _sigmoid, nnx.tanh: _tanh, nnx.relu: _relu}
