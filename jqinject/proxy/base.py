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

import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, TypeAlias

import jax
import jax.core
import numpy as np
from flax import nnx

from jqinject import inject
from jqinject.core import Quantized, Quantizer, QuantStat
from jqinject.core._protocols import ServedLayer, groups_of, needs_input_format
from jqinject.core.component import Component, set_view
from jqinject.ops.cut import cut_in_place
from jqinject.ops.groups import fitting_size
from jqinject.proxy import answers, assembly, metadata
from jqinject.quant_tensor import Operand, QuantTensor, as_array, in_groups


class QuantProxyFromInjector(answers.Answers):
    """Assembles the quantizer of one injector, for one layer or for several that share it.

    A proxy keeps what it was declared with (`binding`, static and equal by value) and the assembled quantizer
    (`tensor_quant`). It keeps no layer: the layers it serves are those that hold it. Assigning the same proxy object to
    a second layer (`weight_quant=first.weight_quant`) shares it, and assembles it again for both.

    See `Answers` for what it can be asked.

    Attributes:
        record: scale and zero point of the weight at the time of `commit`; None if not committed.
        keeps_payload: whether training contracts the payload; else it contracts floats.
        parameter: the attribute of its layers, "weight" or "bias", that the quantizer is assembled from; empty if none.
        reads: the names of the injector that a class of proxies reads itself, so that they may be overridden although
            the quantizer does not ask for them.

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

    keeps_payload: bool = False
    record: QuantStat | None = None
    parameter: ClassVar[str] = ""
    reads: ClassVar[frozenset[str]] = frozenset({"tensor_quant", "proxy_class", "signed"})

    def __init__(
        self,
        injector: type[inject.ExtendedInjector] | inject.Binding,
        layer: ServedLayer,
        *,
        overrides: Mapping[str, object] | None = None,
        offered: Mapping[str, object] | None = None,
        rngs: nnx.Rngs | None = None,
        where: tuple[str, str] = ("", ""),
        stack: tuple[int, ...] = (),
    ) -> None:
        binding = injector if isinstance(injector, inject.Binding) else inject.Binding.of(injector)
        binding = binding.let(**overrides) if overrides else binding
        names = binding.overridden
        if offered:
            requested = binding.once(inject.requested_names) - names.keys()
            binding = binding.let(**{name: value for name, value in offered.items() if name in requested})
        # NNX registers attributes when `__init__` returns; one by one it takes 25 microseconds each.
        attributes = vars(self)
        attributes.update(binding=binding, use_running_average=False)
        trace: set[str] = set()
        layers = assembly.beside_weights((layer,))
        handed = self._handed(layers, rngs)
        check = partial(metadata.check_names, binding, names, overrides or {}, where)
        try:
            # First what is said of it: a flag that is not one is reported by the quantizer's name.
            said = metadata.quant_metadata_of(binding, handed)
            quantizer = self._build(layers, rngs, trace, stack)
        except inject.DependencyError:
            # A misspelt override is the likelier cause than the name that is missing because of it.
            check(also_read=self.reads | metadata.METADATA | trace)
            raise
        if answers.PRE_TRANSFORM in self.reads and binding.declares(answers.PRE_TRANSFORM):
            answers.declare_transform(self, layer, stack, trace, handed)
        if names and not names.keys() <= (read := self._names_read(quantizer, trace)):
            check(read=read, passed=handed)
        if not binding.once(inject.unasked_names) <= (requested := self.reads | metadata.METADATA | trace):
            inject.check_declarations(binding.injector, also_requested=requested)
        attributes["quant_metadata"] = self._read_metadata(said, handed, quantizer)
        self._hold(quantizer)
        answers.remember(self, answers.LINKS, answers.Links(layer))

    @property
    def training(self) -> bool:
        """Whether the proxy is in training mode (read only: use `model.train()` and `model.eval()`)."""
        return not self.use_running_average

    @property
    def committed(self) -> bool:
        """Whether scales are those of the weight at the time of `commit`, and do not follow it."""
        return self.record is not None

    tracked_modules = property(
        answers.linked_layers, doc="The layers known to hold this proxy, first to last."
    )

    def depends_on_layers(self) -> bool:
        """Whether the quantizer has to be made again when the weights of its layers change."""
        if self.parameter:
            return True
        read = inject.reach_of(self.binding.injector, module=(), tracked_parameter_list=()).names
        return not read.isdisjoint(("module", "tracked_parameter_list"))

    set_view = set_view

    def init_tensor_quant(self, *layers: ServedLayer) -> bool:
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
        before, holders = self.tensor_quant, self._known(layers)
        replaced = self._assemble_for(holders, self.committed)
        if replaced and not assembly.same_parameters(before, self.tensor_quant, holders):
            warnings.warn(assembly.QuantizerReplacedWarning(self.binding.base.__name__), stacklevel=2)
        return replaced

    def _known(self, layers: tuple[ServedLayer, ...]) -> tuple[ServedLayer, ...]:
        """All layers that share the proxy, these among them, as an assembly needs them."""
        if layers and self.served_layers != (count := len(answers.relink(self, layers))):
            self.served_layers = count  # set needlessly it would be another graph, and a retrace
        return assembly.beside_weights(answers.known_layers(self))

    def add_tracked_module(self, layer: ServedLayer) -> None:
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
        holders = answers.known_layers(self)
        if any(layer is holder for holder in holders):
            return
        if not nnx.set_graph_mode.current_value():
            raise ValueError(
                "two layers cannot share one quantizer in NNX's tree mode, which has no shared objects.\n"
                "  cure: leave tree mode (nnx.set_graph_mode(True)), or give each layer a quantizer of its own: "
                "weight_quant=MyQuantizer instead of weight_quant=other.weight_quant"
            )
        self._assemble_for(assembly.beside_weights((*holders, layer)), self.committed)
        answers.relink(self, (layer,))
        self.served_layers = len(holders) + 1

    def _assemble_for(self, layers: tuple[ServedLayer, ...], committed: bool) -> bool:
        """Assemble again; everything that can fail comes before the first change."""
        new, handed = self._build(layers, committed=committed), self._handed(layers)
        quantizer = new.quantizer if committed else new
        said = self._read_metadata(metadata.quant_metadata_of(self.binding, handed), handed, quantizer)
        old, record = self.tensor_quant, self.record
        assembly.copy_mode(old, new, use_running_average=self.use_running_average)
        old = old if record is None else assembly.Committed(old, record)
        chosen, replaced = assembly.replace_by_difference(old, new, layers)
        self.quant_metadata = said
        if replaced:
            if record is not None:
                del self.record
            self._hold(chosen)
        return replaced

    def _build(
        self,
        layers: tuple[ServedLayer, ...],
        rngs: nnx.Rngs | None = None,
        trace: set[str] | None = None,
        stack: tuple[int, ...] | None = None,
        committed: bool = False,
    ) -> Any:
        """A quantizer for layers, with its record if `committed`; for a stack of them if there are `stack`ed axes, by
        default those of the parameter: what is not made from parameters is broadcast into the stack."""
        if stack is None:
            stack = assembly.stack_of(layers) if self.parameter else ()
        if stack:
            build = partial(self._build, trace=trace, stack=(), committed=committed)
            return assembly.build_stacked(build, layers, stack, rngs)
        quantizer = self.binding.resolve("tensor_quant", trace=trace, **self._handed(layers, rngs))
        if quantizer is not None and (isinstance(quantizer, type) or not callable(quantizer)):
            shown = f"the class {quantizer.__name__}" if isinstance(quantizer, type) else f"{quantizer!r:.80}"
            raise TypeError(
                f"{self.binding.base.__name__}: tensor_quant must be a component that quantizes, or None for no "
                f"quantization, got {shown}.\n  cure: leave it to the quantizer, and override what it is made of "
                "(bit_width, scaling_impl, ...); or declare a class of your own whose instances return a Quantized"
            )
        return assembly.Committed.of(quantizer, layers[0].weight.get_value()) if committed else quantizer

    def _handed(self, layers: tuple[ServedLayer, ...], rngs: nnx.Rngs | None = None) -> dict[str, object]:
        """What an assembly is handed beside what the injector declares."""
        tracked: list[object] = []
        for layer in layers if self.parameter else ():
            if (parameter := getattr(layer, self.parameter)) is not None:
                tracked.append(parameter)
        handed = {"module": layers[0] if len(layers) == 1 else layers, "tracked_parameter_list": tracked}
        return handed if rngs is None else {**handed, "rngs": rngs}

    def _names_read(self, quantizer: object, traced: set[str]) -> set[str]:
        """The names that the proxy and its quantizer read, as it is wired.

        Args:
            quantizer: what was assembled.
            traced: the names that were asked for meanwhile.
        """
        read, binding = traced | self.reads, self.binding
        if binding.declares("proxy_class"):
            binding.resolve("proxy_class", trace=read)
        if quantizer is not None and not metadata.is_ours(type(quantizer)):
            read |= metadata.METADATA | {"group_size", "group_dim"}
        if not metadata.is_ours(type(self)) and "reads" not in vars(type(self)):
            read |= inject.declared_names(binding.base)  # any of which it may read when it is called
        return read

    def assembled_anew(self) -> tuple[tuple[ServedLayer, ...], Any]:
        """Return the layers, and a quantizer assembled from them as they are, which the proxy does not hold."""
        layers = assembly.beside_weights(answers.known_layers(self))
        return layers, self._build(layers)

    def check_layers_known(self, layer: ServedLayer) -> None:
        """Raise a ValueError if not all the layers that share the proxy are known, `layer` being one of them."""
        answers.relink(self, (layer,))
        answers.known_layers(self)

    def _read_metadata(
        self, said: metadata.QuantMetadata, handed: Mapping[str, Any], quantizer: object
    ) -> metadata.QuantMetadata:
        """What is said of a quantizer, and what it says of itself; for the groups of a user's own quantizer that does
        not state them, the injector's declaration counts.

        Raises:
            ValueError: it is not declared whether the integers have a sign.
        """
        size, dim = groups_of(quantizer) or (None, None)
        if size is None and self.binding.declares("group_size") and not metadata.is_ours(type(quantizer)):
            size = self.binding.resolve("group_size", **handed)
            sized = size is not None and self.binding.declares("group_dim")
            dim = self.binding.resolve("group_dim", **handed) if sized else None
        if quantizer is not None and said.signed is None:
            raise ValueError(
                f"{self.binding.base.__name__} does not say whether its integers have a sign.\n"
                "  cure: declare `signed = True` (weights, most activations) or `signed = False` (after a ReLU)"
            )
        by_input = needs_input_format(quantizer)
        if size is None and not by_input:
            return said
        return replace(said, group_size=size, group_dim=dim, requires_quant_input=by_input)

    def _hold(self, quantizer: object) -> None:
        if isinstance(quantizer, assembly.Committed):
            quantizer, self.record = quantizer.quantizer, quantizer.record
        stateful = quantizer is None or isinstance(quantizer, nnx.Module)
        self.tensor_quant = nnx.data(quantizer) if stateful else nnx.static(quantizer)

    def _pack(self, result: object) -> Any:
        """The quantizer's result as the QuantTensor of its kind; four values of a user's own make an integer one."""
        result = metadata.packable(result, self.tensor_quant, self.quant_metadata.signed)
        return result.quant_tensor(training=not (self.use_running_average or self.keeps_payload))

    def _parameter_quantized(self: Any, x: jax.Array, quant_input: object = None) -> Operand:
        """Quantize a parameter: the call of a proxy of weights.

        Args:
            x: a weight, for instance; float, any shape.
            quant_input: for a quantizer of weights that depends on it, the `IntQuantTensor` that the weight is
                contracted with, or its `IntegerFormat`.

        Returns:
            A QuantTensor of the shape and dtype of `x`, or `x` itself if quantization is off.

        Raises:
            TypeError: the quantizer depends on the input, and this is not quantized to integers.
            ValueError: it depends on the input, whose format is not known, or too wide for the accumulator.
        """
        if self.tensor_quant is None or self.disable_quant:
            return x
        return self._quantized(x, *(() if quant_input is None else self._more(quant_input)))

    def _activation_quantized(self: Any, x: jax.Array | QuantTensor) -> jax.Array | QuantTensor:
        """Quantize an activation: the call of a proxy of activations.

        Args:
            x: float array, or a QuantTensor, whose value is then quantized anew.

        Returns:
            A QuantTensor of the shape and dtype of `x`, or `x` itself if quantization is off; of the transformed `x` if
            there is a `pre_transform`; an array if this is undone.
        """
        if self.pre_transform is not None:
            if self.undo_transform:
                return self._undone(x)
            x = answers.transformed(self, as_array(x))
        if self.tensor_quant is None or self.disable_quant:
            return x
        array = x.value if isinstance(x, QuantTensor) else x
        if self.use_running_average and not hasattr(self, answers.CHECKED):
            answers.check_range(self, array)
        return self._quantized(array)

    def _quantized(self, x: jax.Array, *more: object) -> Any:
        """A tensor through the quantizer, as a QuantTensor; while the proxy only observes, itself with its scale."""
        quantizer, result = self.tensor_quant, None
        try:
            if self.record is not None:
                result = assembly.by_record(quantizer, self.record, x, self.use_running_average)
            elif (self.use_running_average or self.keeps_payload) and not more:
                is_value = isinstance(quantizer, Component) and not isinstance(quantizer, nnx.Pytree)
                if is_value and isinstance(x, jax.core.Tracer):
                    result = traced_once(quantizer, x)
                if result is None and isinstance(quantizer, Quantizer):
                    result = quantizer(x, keep=True)
            result = quantizer(x, *more) if result is None else result
            if not isinstance(result, Quantized):
                result = metadata.packable(result, quantizer, self.quant_metadata.signed)
            tensor = result.quant_tensor(training=not (self.use_running_average or self.keeps_payload))
            plain = not self.observing and self.quant_metadata.group_size is None
            return tensor if plain and tensor.ndim == np.ndim(x) else self._seen(tensor, x)
        except Exception as error:
            metadata.note_quantizer(error, answers.name_of(self), self.tensor_quant)
            raise

    def quantize(self, x: jax.Array, /, *more: object) -> Any:
        """Quantize as a call does: a QuantTensor, whose `payload()` or `int()` are the low-bit numbers and whose
        `value` the dequantized ones; `x` itself if quantization is off."""
        return self(x, *more)

    def _seen(self, packed: QuantTensor, x: Operand) -> Any:
        """A quantized tensor, its groups joined; while the proxy only observes, the tensor itself with its scale."""
        size, dim, shape = self.group_size, self.group_dim, np.shape(as_array(x))
        if size is not None and dim is not None:
            # Groups lie along two axes, or cross explicit shards.
            fitting = fitting_size(size, shape[dim])
            cut = cut_in_place(packed.value, fitting, dim % len(shape)) if packed.ndim == len(shape) else None
            packed = in_groups(packed, fitting, dim, shape[dim], None if cut is None else cut.piece)
        elif size is not None or packed.ndim != len(shape):
            raise ValueError(
                f"{self.binding.base.__name__} made an array of shape {packed.shape} of one of shape {shape}, "
                f"and its {type(self.tensor_quant).__name__} does not say that it cuts the array into groups.\n"
                "  cure: scaling_per_output_type = 'tensor' or 'channel'; or of your own quantizer a property `groups` "
                "that returns (group_size, group_dim)"
            )
        return packed.set(value=as_array(x)) if self.observing else packed


# What layers take for a quantizer: an injector (or a binding of one), a proxy to share, None for no quantization.
QuantizerLike: TypeAlias = type[inject.ExtendedInjector] | inject.Binding | QuantProxyFromInjector | None


@partial(jax.jit, static_argnums=0, inline=True)
def traced_once(quantizer: Any, x: jax.Array) -> Quantized | None:
    """What a quantizer without state, which keeps payloads if it can, returns for a tensor of a program being traced.

    None if the result has numbers that are known before the program runs. A model traces its quantizers hundreds of
    times, each about a millisecond; the equations are the same, and JAX inlines them.

    Args:
        quantizer: the quantizer, a value.
        x: a float array.
    """
    result = quantizer(x, keep=True) if isinstance(quantizer, Quantizer) else quantizer(x)
    leaves = jax.tree.leaves(result) if isinstance(result, Quantized) else [None]
    return result if all(isinstance(leaf, jax.core.Tracer) for leaf in leaves) else None
