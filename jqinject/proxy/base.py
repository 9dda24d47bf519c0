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
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, TypeAlias

import jax
import jax.core
import numpy as np
from flax import nnx

from jqinject.core import Quantized, QuantStat
from jqinject.core._protocols import groups_of, needs_input_format
from jqinject.core.component import Component, InnerModule, set_view
from jqinject.inject import (
    Binding,
    DependencyError,
    ExtendedInjector,
    check_declarations,
    reach_of,
    requested_names,
)
from jqinject.proxy.answers import Answers
from jqinject.proxy.assembly import (
    Committed,
    build_stacked,
    by_record,
    copy_mode,
    replace_by_difference,
    same_parameters,
    stack_of,
)
from jqinject.proxy.binding import (
    METADATA,
    QuantMetadata,
    check_names,
    declared,
    is_ours,
    note_quantizer,
    packable,
    quant_metadata_of,
    read_by,
)
from jqinject.proxy.links import LINKS, PRE_TRANSFORM, Links, known_layers, linked_layers, relink
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


class QuantProxyFromInjector(Answers):
    """Assembles the quantizer of one injector, for one layer or for several that share it.

    A proxy keeps what it was declared with (`binding`, static and equal by value) and the assembled quantizer
    (`tensor_quant`). It keeps no layer: the layers it serves are those that hold it. Assigning the same proxy object to
    a second layer (`weight_quant=first.weight_quant`) shares it, and assembles it again for both.

    Attributes (see `Answers` too):
        observing: set it to collect statistics only: the QuantTensor has the scale, and the tensor's own value.
        record: scale and zero point of the weight at the time of `commit`; None if not committed.
        served_layers: how many layers share it.
        role: what it quantizes: "weight", "bias", "activation", "gradient", "accumulator", or "parameter" if unset.
        parameter: the attribute of its layers, "weight" or "bias", that the quantizer is assembled from; empty if none.
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
    use_running_average: bool
    observing: bool = False
    record: QuantStat | None = None
    served_layers: int = 1
    role: ClassVar[str] = "parameter"
    parameter: ClassVar[str] = ""
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
        binding = injector if isinstance(injector, Binding) else Binding(injector)
        binding = binding.let(**overrides) if overrides else binding
        names = binding.overridden
        if offered:
            asked = requested_names(binding.injector) - names.keys()
            binding = binding.let(**{name: value for name, value in offered.items() if name in asked})
        # NNX registers attributes when `__init__` returns; one by one it takes 25 microseconds each.
        attributes = vars(self)
        attributes.update(binding=binding, use_running_average=False)
        trace: set[str] = set()
        layers = (layer.beside_weight() if isinstance(layer, DistantWeight) else layer,)
        try:
            # First what is said of it: a flag that is not one is reported by the quantizer's name.
            said = quant_metadata_of(binding, layers)
            quantizer = self._build(layers, rngs, trace, stack, committed=False)
        except DependencyError:
            # A misspelt override is the likelier cause than the name that is missing because of it.
            check_names(binding, names, overrides, where, known=self.reads | METADATA | trace)
            raise
        handed = self._handed(layers, rngs)
        if PRE_TRANSFORM in self.reads and binding.declares(PRE_TRANSFORM):
            self._declare_transform(layer, stack, trace, handed)
        if names:
            check_names(binding, names, overrides, where, read=read_by(self, quantizer, trace), handed=handed)
        check_declarations(binding.injector, known=self.reads | METADATA | trace)
        attributes["quant_metadata"] = self._read_metadata(said, layers, quantizer)
        if isinstance(quantizer, nnx.Module):
            attributes["tensor_quant"] = quantizer
        else:
            self._hold(quantizer)
        LINKS[self] = Links(layer)

    def _declare_transform(
        self, layer: Any, stack: tuple[int, ...], trace: set[str], handed: Mapping[str, Any]
    ) -> None:
        """Make the transform that an injector declares beside its quantizer."""

    @property
    def training(self) -> bool:
        """Whether the proxy is in training mode (read only: use `model.train()` and `model.eval()`)."""
        return not self.use_running_average

    @property
    def committed(self) -> bool:
        """Whether scales are those of the weight at the time of `commit`, and do not follow it."""
        return self.record is not None

    @property
    def tracked_modules(self) -> tuple[Any, ...]:
        """The layers known to hold this proxy, first to last."""
        return linked_layers(self)

    def depends_on_layers(self) -> bool:
        """Whether the quantizer has to be made again when the weights of its layers change."""
        if self.parameter:
            return True
        read = reach_of(self.binding.injector, module=(), tracked_parameter_list=()).names
        return not read.isdisjoint(("module", "tracked_parameter_list"))

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
        before, known = self.tensor_quant, self._known(layers)
        replaced = self._assemble_for(known, self.committed)
        if replaced and not same_parameters(before, self.tensor_quant, known):
            warnings.warn(QuantizerReplacedWarning(self.binding.base.__name__), stacklevel=2)
        return replaced

    def _known(self, layers: tuple[Any, ...]) -> tuple[Any, ...]:
        """All layers that share the proxy, these among them, as an assembly needs them."""
        if layers and self.served_layers != (count := len(relink(self, layers))):
            self.served_layers = count  # set needlessly it would be another graph, and a retrace
        return beside_weights(known_layers(self))

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
        self._assemble_for(beside_weights((*known, layer)), self.committed)
        relink(self, (layer,))
        self.served_layers = len(known) + 1

    def _assemble_for(self, layers: tuple[Any, ...], committed: bool) -> bool:
        """Assemble again; everything that can fail comes before the first change."""
        new = self._build(layers, None, None, self._stack(layers), committed)
        metadata = self._read_metadata(
            quant_metadata_of(self.binding, layers), layers, new.quantizer if committed else new
        )
        copy_mode(self.tensor_quant, new, use_running_average=self.use_running_average)
        before = self.tensor_quant if self.record is None else Committed(self.tensor_quant, self.record)
        quantizer, replaced = replace_by_difference(before, new, layers)
        self.quant_metadata = metadata
        if replaced:
            if self.record is not None:
                del self.record
            self._hold(quantizer)
        return replaced

    def _build(
        self,
        layers: tuple[Any, ...],
        rngs: nnx.Rngs | None,
        trace: set[str] | None,
        stack: tuple[int, ...],
        committed: bool,
    ) -> Any:
        """A quantizer for layers; with its record if `committed`."""
        if stack:
            return build_stacked(
                partial(self._build, trace=trace, stack=(), committed=committed), layers, stack, rngs
            )
        quantizer = self.binding.resolve("tensor_quant", trace=trace, **self._handed(layers, rngs))
        if quantizer is not None and (isinstance(quantizer, type) or not callable(quantizer)):
            shown = f"the class {quantizer.__name__}" if isinstance(quantizer, type) else f"{quantizer!r:.80}"
            raise TypeError(
                f"{self.binding.base.__name__}: tensor_quant must be a component that quantizes, or None for no "
                f"quantization, got {shown}.\n  cure: leave it to the quantizer, and override what it is made of "
                "(bit_width, scaling_impl, ...); or declare a class of your own whose instances return a Quantized"
            )
        return Committed.of(quantizer, layers[0].weight.get_value()) if committed else quantizer

    def _handed(self, layers: tuple[Any, ...], rngs: nnx.Rngs | None) -> dict[str, Any]:
        """What an assembly is handed beside what the injector declares."""
        tracked: list[Any] = []
        for layer in layers if self.parameter else ():
            parameter = getattr(layer, self.parameter)
            tracked += [] if parameter is None else [parameter]
        module = layers[0] if len(layers) == 1 else layers
        handed = {"module": module, "tracked_parameter_list": tracked}
        return handed if rngs is None else {**handed, "rngs": rngs}

    def assembled_anew(self) -> tuple[tuple[Any, ...], Any]:
        """Return the layers, and a quantizer assembled from them as they are, which the proxy does not hold."""
        layers = beside_weights(known_layers(self))
        return layers, self._build(layers, None, None, self._stack(layers), committed=False)

    def check_layers_known(self, layer: Any) -> None:
        """Raise a ValueError if not all the layers that share the proxy are known, `layer` being one of them."""
        relink(self, (layer,))
        known_layers(self)

    def _read_metadata(self, said: QuantMetadata, layers: tuple[Any, ...], quantizer: Any) -> QuantMetadata:
        """What is said of a quantizer, and what it says of itself; for the groups of a user's own quantizer that does
        not state them, the injector's declaration counts.

        Raises:
            ValueError: it is not declared whether the integers have a sign.
        """
        groups = groups_of(quantizer)
        if groups is None and self.binding.declares("group_size") and not is_ours(type(quantizer)):
            size = declared(self.binding, "group_size", layers)
            groups = None if size is None else (size, declared(self.binding, "group_dim", layers))
        if quantizer is not None and said.signed is None:
            raise ValueError(
                f"{self.binding.base.__name__} does not say whether its integers have a sign.\n"
                "  cure: declare `signed = True` (weights, most activations) or `signed = False` (after a ReLU)"
            )
        size, dim = (None, None) if groups is None else groups
        return replace(
            said, group_size=size, group_dim=dim, requires_quant_input=needs_input_format(quantizer)
        )

    def _stack(self, layers: tuple[Any, ...]) -> tuple[int, ...]:
        """The sizes of the leading axes that the layers are stacked along, as far as an assembly has to know them."""
        # Values that are not made from parameters are broadcast into the stack.
        return stack_of(layers) if self.parameter else ()

    def _hold(self, quantizer: Any) -> None:
        if isinstance(quantizer, Committed):
            quantizer, self.record = quantizer.quantizer, quantizer.record
        stateful = quantizer is None or isinstance(quantizer, nnx.Module)
        self.tensor_quant = nnx.data(quantizer) if stateful else nnx.static(quantizer)

    def _pack(self, result: Any) -> Any:
        """The quantizer's result as the QuantTensor of its kind; four values of a user's own make an integer one."""
        signed = self.quant_metadata.signed
        assert signed is not None, "checked when the quantizer is assembled"
        found = result if isinstance(result, Quantized) else packable(result, self.tensor_quant, signed)
        return found.quant_tensor(training=not self.use_running_average)

    def __call__(self, x: Any, quant_input: Any = None) -> Any:
        """Quantize a parameter.

        Args:
            x: a weight, for instance; float, any shape.
            quant_input: for a quantizer of weights that goes by it, the `IntQuantTensor` that the weight is contracted
                with, or its `InputFormat`.

        Returns:
            A QuantTensor of the shape and dtype of `x`, or `x` itself if quantization is off.

        Raises:
            TypeError: the quantizer goes by the input, and this is not quantized to integers.
            ValueError: it goes by the input, whose format is not known, or too wide for the accumulator.
        """
        if self.tensor_quant is None or self.disable_quant:
            return x
        return self._quantized(x, *(() if quant_input is None else self._more(quant_input)))

    def _more(self, quant_input: Any) -> tuple[Any, ...]:
        """What the quantizer is called with beside the parameter."""
        return ()

    def _quantized(self, x: Any, *more: Any) -> Any:
        """A tensor through the quantizer, as a QuantTensor; while the proxy only observes, itself with its scale."""
        quantizer, found = self.tensor_quant, None
        try:
            if self.record is not None:
                found = by_record(quantizer, self.record, x, self.use_running_average)
            elif self.use_running_average and not more:
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
