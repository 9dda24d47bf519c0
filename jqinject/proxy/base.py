"""The base of proxies, modules between an injector and the layers that they serve.

A proxy holds a quantizer, assembles it again, calls it, and says what its numbers are.
Of a layer with a weight it asks:

| attribute            | meaning                                                                             |
|----------------------|-------------------------------------------------------------------------------------|
| `weight`, `bias`     | the Variables, whatever the layer calls them; `bias` may be None                    |
| `output_channel_dim` | the axis (or axes) of the weight with the output channels, counted without stacking |
| `weight_shape`       | its shape, frozen or not                                                            |
| `weight_ndim`        | the axes of one weight; a weight with more of them is a stack of layers             |
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, TypeAlias

import jax
import jax.core
import numpy as np
from flax import nnx

from jqinject.core import AmaxScaling, CommittedQuant, Quantized
from jqinject.core._protocols import amax_history, has_zero_point, is_dynamic, number_format, scale_dtype
from jqinject.core.component import Component, InnerModule, set_view
from jqinject.inject import Binding, DependencyError, ExtendedInjector
from jqinject.ops import FloatGrid
from jqinject.proxy.assembly import (
    build_stacked,
    copy_mode,
    replace_by_difference,
    same_parameters,
    stack_of,
)
from jqinject.proxy.binding import (
    DeclaredInjector,
    QuantMetadata,
    asks_for_layers,
    checked_quantizer,
    note_quantizer,
    packable,
    quant_metadata_of,
)
from jqinject.proxy.links import known_layers, link, linked_layers, ranges_in, relink
from jqinject.quant_tensor import as_array


class DistantWeight(InnerModule):
    """Abstract: holds the proxy of a weight that another module holds, so that the weight keeps its one path."""

    @property
    @abstractmethod
    def weight(self) -> nnx.Variable[Any]:
        """The weight."""

    @abstractmethod
    def beside_weight(self) -> Any:
        """A module with the same facts that holds the weight, for as long as an assembly takes."""


def beside_weights(layers: tuple[Any, ...]) -> tuple[Any, ...]:
    """Layers as an assembly needs them: each holds its weight."""
    return tuple(layer.beside_weight() if isinstance(layer, DistantWeight) else layer for layer in layers)


class QuantizerReplacedWarning(UserWarning):
    """Re-assembly gave a quantizer other learned parameters than it had: an optimizer made before no longer fits."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"re-assembly replaced the quantizer of {name} by one with other parameters. Make the optimizer again "
            "(nnx.Optimizer(model, ...)), and nnx.view and nnx.cached_partial objects too; optimizer.update would fail."
        )


class QuantProxyFromInjector(InnerModule):
    """Assembles the quantizer of one injector, for one layer or for several that share it.

    A proxy keeps what it was declared with (`binding`, static and equal by value) and the assembled quantizer
    (`tensor_quant`). It keeps no layer: the layers it serves are those that hold it. Assigning the same proxy object to
    a second layer (`weight_quant=first.weight_quant`) shares it, and assembles it again for both.

    Attributes:
        binding: the injector and the overrides.
        tensor_quant: the quantizer; None if the injector says so (no quantization).
        disable_quant: set it to let the tensor through as it is.
        observing: set it to collect statistics only: the QuantTensor has the scale, and the tensor's own value.
        committed: whether scales are those of the weight at the time of `commit`, and do not follow it.
        role: what it quantizes: "weight", "bias", "activation", "gradient", "accumulator", or "parameter" if unset.
        made_from_parameters: whether the quantizer is assembled from the weights or biases of its layers.
        quantizes_activations: whether it is used on what flows, so that its range can be collected (it then answers the
            protocol of `core.StaticRange` for the components that the quantizer holds).
        reads: the names of the injector that a class of proxies reads itself, so that they may be overridden although
            the quantizer does not ask for them.
        use_running_average: eval mode, in NNX's word; `model.train()` and `model.eval()` set it.

    Args:
        injector: an `ExtendedInjector`, or a binding of one.
        layer: the layer that holds (or is about to hold) the proxy.
        overrides: names declared anew.
        offered: names that the layer declares for a quantizer that asks for them, and has not been given them.
        rngs: for quantizers that draw random numbers.
        where: what the user called and the prefix of the overrides, for error texts.
        stack: sizes of the leading axes along which the layer is stacked, if it is a stack of layers.

    Raises:
        TypeError: an override, also one by `let`, that nothing declares, asks for or reads.
        DependencyError: the injector cannot be resolved.
        ValueError: the injector does not say whether its integers are `signed`.
    """

    # Class attributes until set, so that what few proxies need costs the others nothing.
    binding: Binding
    quant_metadata: QuantMetadata
    use_running_average: bool
    tensor_quant: Any
    disable_quant: bool = False
    observing: bool = False
    committed: bool = False
    served_layers: int = 1
    role: ClassVar[str] = "parameter"
    measured: ClassVar[tuple[str, str, str]] = (
        "",
        "",
        "",
    )  # words for errors about scales of the tensor at hand
    made_from_parameters: ClassVar[bool] = True
    quantizes_activations: ClassVar[bool] = False
    reads: ClassVar[frozenset[str]] = frozenset({"tensor_quant", "proxy_class", "signed"})

    def __init__(
        self,
        injector: type[ExtendedInjector] | Binding,
        layer: Any,
        *,
        overrides: Mapping[str, Any] | None = None,
        offered: Mapping[str, Any] | None = None,
        rngs: nnx.Rngs | None = None,
        where: tuple[str, str] = ("", ""),
        stack: tuple[int, ...] = (),
    ) -> None:
        declared = DeclaredInjector.of(injector, overrides, offered, where)
        # NNX registers attributes when `__init__` returns; one by one it takes 25 microseconds each.
        attributes = vars(self)
        attributes.update(binding=declared.binding, use_running_average=False)
        trace: set[str] = set()
        layers = (layer.beside_weight() if isinstance(layer, DistantWeight) else layer,)
        try:
            # First what is said of it: a flag that is not one is reported by the quantizer's name.
            said = quant_metadata_of(self.binding, layers)
            quantizer = self._build(layers, rngs, trace, stack)
        except DependencyError:
            # A misspelt override is the likelier cause than the name that is missing because of it.
            declared.check_known(trace)
            raise
        handed = self._handed(layers, rngs)
        self._declare(layer, stack, trace, handed)
        declared.check_read(self, quantizer, trace, handed)
        attributes["quant_metadata"] = self._read_metadata(said, layers, quantizer)
        if isinstance(quantizer, nnx.Module):
            attributes["tensor_quant"] = quantizer
        else:
            self._hold(quantizer)
        link(self, layer)

    def _declare(
        self, layer: Any, stack: tuple[int, ...], trace: set[str], handed: Mapping[str, Any]
    ) -> None:
        """Make what an injector declares beside its quantizer."""

    @property
    def is_quant_enabled(self) -> bool:
        """Whether a tensor is quantized on its way through."""
        return self.tensor_quant is not None and not self.disable_quant

    def has_range(self) -> bool | None:
        """Whether data were seen; None if nothing is collected: of weights, constant and dynamic ranges, and while
        quantization is off."""
        used = self.is_quant_enabled and self.quantizes_activations
        held = ranges_in(self.tensor_quant) if used else []
        return all(component.has_range() for component in held) if held else None

    def begin_calibration(self) -> None:
        """Switch to training mode and start to collect anew."""
        self.set_attributes(use_running_average=False, raise_if_not_found=False)
        for component in ranges_in(self.tensor_quant):
            component.begin_calibration()

    def end_calibration(self) -> None:
        """Take what was collected as the range."""
        for component in ranges_in(self.tensor_quant):
            component.end_calibration()

    @property
    def is_signed(self) -> bool | None:
        """Whether the integers have a sign."""
        return self.quant_metadata.signed

    @property
    def is_narrow_range(self) -> bool | None:
        """Whether one integer is left out, so that the range is symmetric."""
        return self.quant_metadata.narrow_range

    @property
    def rounding_mode(self) -> str | None:
        """The name of the rounding, in capitals; None if the injector gives a component instead of a name."""
        return self.quant_metadata.rounding_mode

    @property
    def training(self) -> bool:
        """Whether the proxy is in training mode (read only: use `model.train()` and `model.eval()`)."""
        return not self.use_running_average

    @property
    def tracked_modules(self) -> tuple[Any, ...]:
        """The layers known to hold this proxy, first to last."""
        return linked_layers(self)

    @property
    def amax_history(self) -> AmaxScaling | None:
        """The scaling that records amaxes (`.newest`, `.amax_history`); None if the scale does not come from them."""
        return amax_history(self.tensor_quant)

    @property
    def group_size(self) -> int | None:
        """Elements that share a scale, as declared (along a shorter axis all of them do); None without groups."""
        return self.quant_metadata.group_size

    @property
    def group_dim(self) -> int | None:
        """The axis that is cut into groups; None without groups."""
        return self.quant_metadata.group_dim

    @property
    def has_zero_point(self) -> bool:
        """Whether its numbers may have a zero point other than 0."""
        return has_zero_point(self.tensor_quant)

    @property
    def is_dynamic(self) -> bool:
        """Whether the scale is that of the tensor at hand."""
        return is_dynamic(self.tensor_quant)

    @property
    def requires_quant_input(self) -> bool:
        """Whether the quantizer has to know the format of the layer's input."""
        return self.quant_metadata.requires_quant_input

    @property
    def scale_dtype(self) -> np.dtype | None:
        """The 8-bit dtype that is known to hold every scale (times one for all, unless they are powers of two)."""
        return scale_dtype(self.tensor_quant)

    @property
    def has_whole_zero_points(self) -> bool:
        """Whether zero points are integers: they are unless the injector says `quantize_zero_point = False`, or
        declares a `scale_shift_zero_point_impl`."""
        return self.quant_metadata.whole_zero_points

    def depends_on_layers(self) -> bool:
        """Whether the quantizer has to be made again when the weights of its layers change."""
        return self.made_from_parameters or asks_for_layers(self.binding)

    set_view = set_view

    def init_tensor_quant(self, *layers: Any) -> bool:
        """Assemble the quantizer again from its layers as they are now.

        Its values are written into the present Variables if structure, shapes and dtypes are those of the present
        quantizer, else it is replaced.

        Args:
            layers: the layers that hold this proxy; those it is known by, and which still hold it, are added.

        Returns:
            Whether `tensor_quant` was replaced; then optimizers, `nnx.view`s and `nnx.cached_partial`s made before have
            to be made again.

        Raises:
            ValueError: not all the layers that share the proxy are known.
        """
        before = self.tensor_quant
        replaced, known = self._assembled_again(*layers)
        if replaced and not same_parameters(before, self.tensor_quant, known):
            warnings.warn(QuantizerReplacedWarning(self.binding.base.__name__), stacklevel=2)
        return replaced

    def _assembled_again(self, *layers: Any) -> tuple[bool, tuple[Any, ...]]:
        """See `init_tensor_quant`, without a warning; and all layers that share the proxy."""
        if layers and self.served_layers != (count := len(relink(self, layers))):
            self.served_layers = count  # set needlessly it would be another graph, and a retrace
        known = beside_weights(known_layers(self))
        return self._assemble_for(known), known

    def add_tracked_module(self, layer: Any) -> None:
        """Let one more layer share this proxy, and assemble it again for all of them.

        If the quantizer cannot serve all of them, nothing is changed.

        Args:
            layer: a layer that holds the proxy, or is about to.

        Raises:
            TypeError: `layer` is None.
            ValueError: NNX is in tree mode, which knows no shared objects.
        """
        if layer is None:
            raise TypeError("add_tracked_module takes a layer, got None")
        known = known_layers(self)
        if any(layer is other for other in known):
            return
        if not nnx.set_graph_mode.current_value():
            raise ValueError(
                "two layers cannot share one quantizer in NNX's tree mode, which has no shared objects.\n"
                "  cure: leave tree mode (nnx.set_graph_mode(True)), or give each layer a quantizer of its own: "
                "weight_quant=MyQuantizer instead of weight_quant=other.weight_quant"
            )
        self._assemble_for(beside_weights((*known, layer)))
        link(self, layer)
        self.served_layers = len(known) + 1

    def _assemble_for(self, layers: tuple[Any, ...]) -> bool:
        """Assemble again; everything that can fail comes before the first change."""
        new = self._build(layers, None, None, self._stack(layers))
        metadata = self._read_metadata(quant_metadata_of(self.binding, layers), layers, new)
        copy_mode(self.tensor_quant, new, use_running_average=self.use_running_average)
        quantizer, replaced = replace_by_difference(self.tensor_quant, new, layers)
        self.quant_metadata = metadata
        if replaced:
            self._hold(quantizer)
        return replaced

    def _build(
        self,
        layers: tuple[Any, ...],
        rngs: nnx.Rngs | None,
        trace: set[str] | None,
        stack: tuple[int, ...],
    ) -> Any:
        if stack:
            return build_stacked(lambda one, rngs: self._build(one, rngs, trace, ()), layers, stack, rngs)
        quantizer = self.binding.resolve("tensor_quant", trace=trace, **self._handed(layers, rngs))
        checked_quantizer(quantizer, self.binding.base.__name__)
        return CommittedQuant(quantizer, layers[0].weight.get_value()) if self.committed else quantizer

    def _handed(self, layers: tuple[Any, ...], rngs: nnx.Rngs | None) -> dict[str, Any]:
        """What an assembly is handed beside what the injector declares."""
        handed: dict[str, Any] = {"module": layers[0] if len(layers) == 1 else layers}
        handed["tracked_parameter_list"] = self._tracked_parameters(layers)
        return handed if rngs is None else {**handed, "rngs": rngs}

    def assembled_anew(self) -> tuple[tuple[Any, ...], Any]:
        """Return the layers, and a quantizer assembled from them as they are, which the proxy does not hold."""
        layers = beside_weights(known_layers(self))
        return layers, self._build(layers, None, None, self._stack(layers))

    def check_layers_known(self, layer: Any) -> None:
        """Raise a ValueError if not all the layers that share the proxy are known, `layer` being one of them."""
        link(self, layer)
        known_layers(self)

    def _read_metadata(self, said: QuantMetadata, layers: tuple[Any, ...], quantizer: Any) -> QuantMetadata:
        """What is said of a quantizer, and what it says of itself."""
        return said.with_facts(quantizer, self.binding, layers)

    def _tracked_parameters(self, layers: tuple[Any, ...]) -> list[Any]:
        """The parameters of the layers that are quantized: Variables."""
        return []

    def _stack(self, layers: tuple[Any, ...]) -> tuple[int, ...]:
        """The sizes of the leading axes that the layers are stacked along, as far as an assembly has to know them."""
        # Values that are not made from parameters are broadcast into the stack.
        return stack_of(layers) if self.made_from_parameters else ()

    def _hold(self, quantizer: Any) -> None:
        stateful = quantizer is None or isinstance(quantizer, nnx.Module)
        self.tensor_quant = nnx.data(quantizer) if stateful else nnx.static(quantizer)

    def _pack(self, result: Any) -> Any:
        """The quantizer's result as the QuantTensor of its kind; four values of a user's own make an integer one."""
        signed = self.quant_metadata.signed
        assert signed is not None, "checked when the quantizer is assembled"
        found = result if isinstance(result, Quantized) else packable(result, self.tensor_quant, signed)
        return found.quant_tensor(training=not self.use_running_average)

    def _quantized(self, x: Any, *more: Any) -> Any:
        """A tensor through the quantizer, as a QuantTensor; while the proxy only observes, itself with its scale."""
        quantizer, found = self.tensor_quant, None
        try:
            if self.use_running_average and not more:
                # Serving may contract what was rounded; training contracts floats.
                found = traced_once(quantizer, x) if isinstance(x, jax.core.Tracer) else None
                quantizer = getattr(quantizer, "keeping_payload", quantizer)
            made = self._pack(quantizer(x, *more) if found is None else found)
            plain = not self.observing and self.quant_metadata.group_size is None and made.ndim == np.ndim(x)
            return made if plain else self._seen(made, x)
        except Exception as error:
            note_quantizer(error, self)
            raise

    def quantize(self, x: Any, /, *more: Any) -> Any:
        """Quantize as a call does: a QuantTensor, whose `payload()` or `int()` are the low-bit numbers and whose
        `value` the dequantized ones; `x` itself if quantization is off."""
        return self(x, *more)

    def quantize_gradient(self, g: Any) -> Any:
        """A gradient on its way back, as a QuantTensor; the array if quantization is off."""
        return self._quantized(g) if self.is_quant_enabled else g

    def _seen(self, packed: Any, x: Any) -> Any:
        """A quantized tensor, its groups joined; while the proxy only observes, the tensor itself with its scale."""
        if self.quant_metadata.group_size is not None or packed.ndim != np.ndim(x):
            packed = self.quant_metadata.joined(packed, np.shape(as_array(x)), self)
        return packed.set(value=as_array(x)) if self.observing else packed

    # The numbers. Each answer is None if quantization is off.

    def sample(self, force_eval: bool = True) -> Any:
        """Return a QuantTensor of the quantizer that shows what its numbers are; None if it makes none by itself.

        Args:
            force_eval: as eval mode would, also in training mode.
        """
        return None

    def scale(self, force_eval: bool = True) -> jax.Array | None:
        """Return the float per integer step, float32.

        Args:
            force_eval: the scale that eval mode would use, also in training mode.

        Raises:
            RuntimeError: it is made from the tensor at hand.
        """
        return self._asked("scale", force_eval)

    def zero_point(self, force_eval: bool = True) -> jax.Array | None:
        """Return the integer that stands for 0, float32.

        Args:
            force_eval: the zero point that eval mode would use, also in training mode.

        Raises:
            RuntimeError: it is made from the tensor at hand.
        """
        return self._asked("zero_point", force_eval)

    def bit_width(self, force_eval: bool = True) -> int | jax.Array | None:
        """Return the bits of one number.

        Args:
            force_eval: the bit width that eval mode would use, also in training mode.
        """
        return self._asked("bit_width", force_eval)

    def _asked(self, name: str, *how: Any) -> Any:
        if not self.is_quant_enabled:
            return None
        if name != "bit_width" and self._is_measured():
            what, which, call = self.measured
            raise RuntimeError(
                f"the {name.replace('_', ' ')} of {self.binding.base.__name__} depends on the {what}: it is made from "
                f"{which} at hand.\n  cure: {call}.{name}"
            )
        return getattr(self.sample(*how), name, None)

    def _is_measured(self) -> bool:
        """Whether scale and zero point are those of the tensor at hand."""
        return False

    # Minifloats; an AttributeError where the numbers are others. A format does not depend on the mode.

    def exponent_bit_width(self, force_eval: bool = True) -> Any:
        """Bits of the exponent of a minifloat: an int, or an array if learned."""
        return self._of_minifloat("exponent_bit_width")

    def mantissa_bit_width(self, force_eval: bool = True) -> Any:
        """Bits of the mantissa of a minifloat, without the implicit 1: an int, or an array if learned."""
        return self._of_minifloat("mantissa_bit_width")

    def exponent_bias(self, force_eval: bool = True) -> Any:
        """What is subtracted from the exponent field of a minifloat."""
        return self._of_minifloat("exponent_bias")

    def is_saturating(self, force_eval: bool = True) -> Any:
        """Whether what is too large becomes the largest minifloat."""
        return self._of_minifloat("saturating")

    def inf_values(self, force_eval: bool = True) -> Any:
        """Mantissas that mean inf together with the largest exponent; None if there are none."""
        return self._of_minifloat("inf_values")

    def nan_values(self, force_eval: bool = True) -> Any:
        """Mantissas that mean nan together with the largest exponent; None if there are none."""
        return self._of_minifloat("nan_values")

    @property
    def is_ocp(self) -> bool:
        """Whether it is one of OCP's 8-bit formats, e4m3 or e5m2."""
        form = self._minifloat()
        return isinstance(form, FloatGrid) and form.is_ocp

    @property
    def is_fnuz(self) -> bool:
        """Whether it is one of the 8-bit formats without inf and negative 0, e4m3 or e5m2."""
        form = self._minifloat()
        return isinstance(form, FloatGrid) and form.is_fnuz

    def _minifloat(self) -> Any:
        if not self.is_quant_enabled:
            return None
        said = number_format(self.tensor_quant)
        form = getattr(self.sample(), "format", None) if said is None else said
        return form if isinstance(form, FloatGrid) else None

    def _of_minifloat(self, name: str) -> Any:
        form = self._minifloat()
        if form is None and self.is_quant_enabled:
            raise AttributeError(
                f"{self.binding.base.__name__} makes no minifloats: it has no exponent, mantissa, or codes for inf and "
                "nan.\n  cure: proxy.bit_width(), proxy.scale() and proxy.zero_point() describe integers"
            )
        return None if form is None else getattr(form, name)


# What layers take for a quantizer: an injector (or a binding of one), a proxy to share, None for no quantization.
QuantizerLike: TypeAlias = type[ExtendedInjector] | Binding | QuantProxyFromInjector | None


def traced_once(quantizer: Any, x: Any) -> Quantized | None:
    """What a quantizer, which keeps payloads if it can, returns for a tensor of a program that is being traced.

    None if it has state, the tensor is concrete, or the result has numbers that are known before the program runs. A
    model traces its quantizers hundreds of times, each about a millisecond; the equations are the same, and JAX
    inlines them.

    Args:
        quantizer: the quantizer.
        x: a float array.
    """
    is_value = isinstance(quantizer, Component) and not isinstance(quantizer, nnx.Pytree)
    return _traced(quantizer, x) if is_value and isinstance(x, jax.core.Tracer) else None


@partial(jax.jit, static_argnums=0, inline=True)
def _traced(quantizer: Any, x: jax.Array) -> Quantized | None:
    result = getattr(quantizer, "keeping_payload", quantizer)(x)
    traced = isinstance(result, Quantized) and all(
        isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(result)
    )
    return result if traced else None
