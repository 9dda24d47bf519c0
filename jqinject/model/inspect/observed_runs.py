"""Runs of a model that are observed: at each layer and contraction floats and quantized numbers, recorded or selected.

One `Observer` says what is done at an entry of the site table, be it a layer or a contraction of the model's own
program: run it as it is, in floats, or by choice. Next: `measured_report`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.model.frozen_weights import quantized_op
from jqinject.model.inspect.layer_numbers import clipped_fields
from jqinject.model.status import Change, changed
from jqinject.model.walk import ModelIndex
from jqinject.nn import QuantCheckpoint, QuantEmbed
from jqinject.nn.activations import QuantActLayer
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.ops.processes import from_holder, on_host, spans_processes
from jqinject.program import (
    Around,
    Call,
    HeldQuantizers,
    QuantizedProgram,
    Site,
    SplitCall,
    Tracked,
    WeightCall,
    intercept,
)
from jqinject.proxy import QuantProxyFromInjector
from jqinject.quant_tensor import as_array, is_quantized

# slot of a layer: the part of the layer that it quantizes
PARTS = {"weight_quant": "weight", "input_quant": "input", "output_quant": "output", "act_quant": "output"}
SLOTS = (*PARTS, "bias_quant", "grad_quant")
PLAIN_OPS = {
    "dot_general": jax.lax.dot_general,
    "einsum_op": jnp.einsum,
    "conv_general_dilated": jax.lax.conv_general_dilated,
}
Arrays = tuple[np.ndarray, ...]


class Observer:
    """What a run does at each entry: numbers as they are, floats, or a choice of both.

    Args:
        sites: what the program contracts by itself: path of a parameter, or name of a contraction of two activations ->
            its entry.
        layers: the paths of the entries that are layers, which are observed where they are called.
        on: True for all as it is, False for all in floats; or entry -> a traced bool.
        others: whether quantizers that belong to no entry are on.
        records: whether it records, for each call, as "float" the float output and the quantized output for the same
            input; or, of all as it is, as "quantized" the output, and what the quantizer of each part did.

    Attributes:
        slots: entry -> name of each of its quantizers in `op_quant` -> the slot that it would have in a layer.
        has_others: whether quantizers of the program belong to no entry.
    """

    def __init__(
        self,
        sites: Mapping[str, str],
        layers: Collection[str],
        on: bool | Mapping[str, jax.Array],
        *,
        others: bool,
        records: bool = False,
    ) -> None:
        self.sites, self.layers, self.on, self.others, self._records = sites, layers, on, others, records
        self.slots: dict[str, dict[str, str]] = defaultdict(dict)
        self.has_others = False
        self._kept: dict[tuple[str, str], list[tuple[int, Arrays]]] = defaultdict(list)
        self._traced: Counter[tuple[str, str]] = Counter()

    def entry_of(self, call: WeightCall) -> str | None:
        """The entry that a contraction of the program belongs to; None if it is not observed there."""
        entry = self.sites.get(call.name)
        return None if entry is not None and entry in self.layers and call.module == entry else entry

    def output(self, entry: str, quantized: jax.Array, floats: Callable[[], jax.Array]) -> jax.Array:
        """The output of an entry that flows on."""
        if self.on is True:
            self._note(entry, "quantized", quantized)
            return quantized
        y = floats()
        if self.on is False:
            self._note(entry, "float", y, quantized)
        return self.chosen(entry, quantized, y)

    def chosen(self, entry: str, quantized: jax.Array, floats: jax.Array) -> jax.Array:
        """What an operation that does not contract a parameter reads of it."""
        if self.on is True:
            return quantized
        y = floats.astype(quantized.dtype)
        return y if self.on is False else jnp.where(self.on[entry], quantized, y)

    def quantizer(
        self, entry: str, part: str, proxy: QuantProxyFromInjector | None, x: object, quantized: object
    ) -> None:
        """Record what the quantizer of a part did."""
        if self.on is True and is_quantized(quantized):
            self._note(entry, part, *clipped_fields(proxy, as_array(x), quantized))

    def _note(self, entry: str, what: str, *arrays: object) -> None:
        """Record arrays whenever the traced program runs; in a loop those of every iteration."""
        if self._records:
            key = (entry, what)
            # Keep the order of the trace: a compiled program may call back in another order.
            order = self._traced[key]
            self._traced[key] += 1
            jax.debug.callback(partial(self._keep, key, order), *map(jnp.asarray, arrays))

    def _keep(self, key: tuple[str, str], order: int, *arrays: object) -> None:
        self._kept[key].append((order, tuple(map(np.asarray, arrays))))

    def finish(self, *arguments: object) -> None:
        """Wait for the started programs; afterwards every process holds all their records.

        Args:
            arguments: pytrees of the programs' arguments.
        """
        jax.effects_barrier()
        if spans_processes(arguments):
            # If a program spans several processes, only one is called back, with unsharded arrays.
            self._kept = defaultdict(list, from_holder(dict(self._kept), bool(self._kept)))

    @property
    def recorded(self) -> set[str]:
        """The entries of which there are records."""
        return {entry for entry, _ in self._kept}

    def of(self, entry: str, what: str) -> list[Arrays]:
        """The recorded arrays, float64, once the program has run."""
        records = sorted(self._kept.get((entry, what), ()), key=lambda record: record[0])
        return [tuple(array.astype(np.float64) for array in arrays) for _, arrays in records]

    def clear(self) -> None:
        """Drop all arrays: NNX's caches may keep the observer alive."""
        self._kept.clear()


@final
class _AtLayer(Around):
    """Observes the calls of a layer.

    Args:
        path: of the layer.
        original: the layer of the observed model, whose quantizers are as the user has switched them.
        observer: says what is done.
    """

    def __init__(self, path: str, original: nnx.Module, observer: Observer) -> None:
        self.path, self.observer = path, observer
        slots = vars(original)
        self.disabled = {slot: slots[slot].disable_quant for slot in SLOTS if slots.get(slot) is not None}
        self.quantizes_input = _is_on(slots.get("input_quant"))

    def __call__(self, layer: nnx.Module, call: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        """See `Around`."""
        run = partial(call, *args, **kwargs)
        with changed(self._changes_quantized(layer)):
            quantized = run()
        x = args[0] if args else next(iter(kwargs.values()))
        value = self.observer.output(self.path, as_array(quantized), lambda: self._floating(layer, run, x))
        if self.observer.on is True:
            return quantized
        # A QuantTensor keeps its scale.
        return quantized.set(value=value) if is_quantized(quantized) else value

    def _changes_quantized(self, layer: nnx.Module) -> list[Change]:
        """What lets a layer run with its quantizers as the user has switched them."""
        attributes, observer = vars(layer), self.observer
        if observer.on is True:
            return [
                (attributes, slot, Listener(attributes[slot], partial(observer.quantizer, self.path, part)))
                for slot, part in PARTS.items()
                if attributes.get(slot) is not None
            ]
        changes = _switched(layer, self.disabled)
        if not self.quantizes_input and isinstance(layer, QuantWeightLayer):
            # The input may be a float tensor that claims to be quantized.
            changes.append((attributes, "contraction", "float"))
        return changes

    def _floating(self, layer: nnx.Module, run: Callable[[], Any], x: object) -> jax.Array:
        """The output of a layer with its quantizers off, for the input `x`."""
        if isinstance(layer, QuantCheckpoint):  # it refuses to run without its quantizer
            return as_array(x)
        changes, attributes = _switched(layer, dict.fromkeys(self.disabled, True)), vars(layer)
        if isinstance(layer, QuantWeightLayer | QuantActLayer):
            changes.append((attributes, "return_quant_tensor", False))
        if isinstance(layer, QuantWeightLayer):
            changes.append((attributes, "contraction", "float"))
        op = quantized_op(layer)
        if op is not None:
            changes.append((attributes, op.name, PLAIN_OPS[op.name]))
        with changed(changes):
            return as_array(run())


def _switched(layer: nnx.Module, disabled: Mapping[str, bool]) -> list[Change]:
    return [(vars(vars(layer)[slot]), "disable_quant", off) for slot, off in disabled.items()]


def _is_on(proxy: QuantProxyFromInjector | None) -> bool:
    return proxy is not None and proxy.is_quant_enabled


def _quantizes(node: object) -> bool:
    """Whether a module is a layer that quantizes in the forward pass."""
    if quantized_op(node) is not None:
        return True
    if not isinstance(node, QuantWeightLayer | QuantActLayer | QuantCheckpoint):
        return False
    frozen = isinstance(node, QuantWeightLayer) and node.frozen is not None
    return frozen or any(_is_on(vars(node).get(slot)) for slot in SLOTS if slot != "grad_quant")


class Listener:
    """A proxy that reports its inputs and outputs, and otherwise behaves like the proxy that it wraps.

    Args:
        proxy: the proxy.
        heard: takes the proxy, its input and its output.
    """

    def __init__(
        self, proxy: QuantProxyFromInjector, heard: Callable[[QuantProxyFromInjector, object, object], None]
    ) -> None:
        self._proxy, self._heard = proxy, heard

    def __getattr__(self, name: str) -> object:
        return getattr(self._proxy, name)

    def __call__(self, x: Any, *more: Any) -> object:
        """Call the proxy and report; weights that depend on the format of their input are called with it."""
        quantized = self._proxy(x, *more)
        if self._proxy.is_quant_enabled:
            self._heard(self._proxy, x, quantized)
        return quantized


@final
class _AtProgram(Around):
    """Goes around `QuantizedProgram.quantizers`, so that a call of the program is observed."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def __call__(
        self, layer: nnx.Module, call: Callable[..., Any], *args: object, **kwargs: object
    ) -> ObservedQuantizers:
        """See `Around`."""
        return ObservedQuantizers(call(*args, **kwargs), self._observer)


@final
class ObservedQuantizers(HeldQuantizers):
    """The quantizers of a program whose contractions are observed.

    Args:
        quantizers: the quantizers.
        observer: says what is done at a contraction.
    """

    def __init__(self, quantizers: HeldQuantizers, observer: Observer) -> None:
        vars(self).update(vars(quantizers))
        self._observer = observer
        self._entry = ""  # of the contraction that is running

    @property
    def mode(self) -> bool:
        """Whether an observed contraction is running: its quantizers are on where others are off."""
        return bool(self._entry)

    def run(self, call: WeightCall) -> Tracked:
        """See `Quantizers`."""
        entry = self._observer.entry_of(call)
        if entry is None:
            return call.quantized()
        before, self._entry = self._entry, entry
        try:
            out = call.quantized()
            value = self._observer.output(entry, out.array, call.floating)
        finally:
            self._entry = before
        # Contracted as floats next, if these are other numbers: the scale is not theirs.
        return out if self._observer.on is True else out.with_value(value)

    def record(self, site: Site, x: jax.Array, quantized: object) -> None:
        """See `Quantizers`."""
        if self._entry:
            part = "output" if site.name.endswith("_output") else "weight" if site.is_weight else "input"
            self._observer.slots[self._entry][site.name] = f"{part}_quant"
            self._observer.quantizer(self._entry, part, self.proxy_at(site.name), x, quantized)

    def chosen(self, name: str) -> Callable[[jax.Array, jax.Array], jax.Array] | None:
        """See `Quantizers`."""
        entry = self._observer.sites.get(name)
        return None if entry is None else partial(self._observer.chosen, entry)

    def quantize(self, site: Site, x: jax.Array, token: jax.Array | None = None) -> Any:
        """See `Quantizers`."""
        observer = self._observer
        weight = observer.sites.get(site.name) if site.is_weight else None
        if weight is None and not self._entry:
            if not observer.others:
                return self.transformed(site, x)
            observer.has_others = True
        quantized = super().quantize(site, x, token)
        if weight is not None and weight not in observer.layers:
            observer.slots[weight][site.name] = "weight_quant"
            observer.quantizer(weight, "weight", self.proxy_at(site.name), x, quantized)
        elif weight is None and self._entry and site.name.endswith("_grad"):
            observer.slots[self._entry][site.name] = "grad_quant"
        return quantized

    def has_state(self) -> bool:
        """Yes: of what is observed."""
        return True


# --- runs


class ObservedRuns:
    """Makes the same call of a copy of a model repeatedly, with entries switched. The model is not changed.

    Args:
        model: its modes are those of the runs.
        call: of it, with arrays.
        sites: what the model's program contracts by itself: path of a parameter, or name of a contraction of two
            activations -> its entry, which may be that of a layer.

    Attributes:
        nodes: path -> quantized layer.
        entries: layers, and whatever else is switched.
        state, arrays: of the model and its call, as `SplitCall` has them.
    """

    def __init__(self, model: nnx.Module, call: Call, sites: Mapping[str, str]) -> None:
        self._split = SplitCall(model, call)
        self.state, self.arrays = self._split.state, self._split.arrays
        self.nodes = {
            ".".join(map(str, path)): node for path, node in nnx.iter_modules(model) if _quantizes(node)
        }
        self.entries = tuple(dict.fromkeys((*self.nodes, *sites.values())))
        self._observer = partial(Observer, sites, self.nodes)
        self._has_others = _has_others(model, self.nodes)
        self._mixed: dict[bool, Callable[..., list[jax.Array]]] = {}

    def recorded(self, on: bool) -> tuple[Observer, list[np.ndarray]]:
        """Run the model as it is, or with every quantizer off; its records, and the model's outputs, float64."""
        observer = self._observer(on, others=on, records=True)
        run = jax.jit(partial(self.outputs, observer=observer))
        outputs = _numbers(run(self.state, self.arrays))
        observer.finish(self.state, self.arrays)
        self._has_others = self._has_others or observer.has_others
        return observer, outputs

    def mixed(self, on: Mapping[str, bool], *, others: bool) -> list[np.ndarray]:
        """Run with some entries quantized; after the model has run as it is.

        Args:
            on: entry -> whether it is quantized; compiled once for all choices.
            others: whether quantizers that belong to no entry are on.

        Returns:
            The model's outputs, float64.
        """
        others = others or not self._has_others

        def run(state: object, arrays: list[jax.Array], chosen: jax.Array) -> list[jax.Array]:
            switches = {entry: chosen[place] for place, entry in enumerate(self.entries)}
            return self.outputs(state, arrays, self._observer(switches, others=others))

        compiled = self._mixed.setdefault(others, jax.jit(run))
        return _numbers(compiled(self.state, self.arrays, np.array([on[entry] for entry in self.entries])))

    def in_floats(self, state: object, arrays: list[jax.Array]) -> list[jax.Array]:
        """The model's floating-point outputs with every quantizer off, for a caller that traces.

        Args:
            state, arrays: of the structure of the attributes.
        """
        return self.outputs(state, arrays, self._observer(False, others=False))

    def outputs(
        self, state: object, arrays: list[jax.Array], observer: Observer | None = None
    ) -> list[jax.Array]:
        """The model's floating-point outputs, for a caller that traces; all its arrays if none is.

        Args:
            state, arrays: of the structure of the attributes.
            observer: None to run the model as it is.
        """
        copy, call = self._split.merged(state, arrays)
        if observer is not None:
            self._observe(copy, observer)
        leaves = jax.tree.leaves(call(copy), is_leaf=lambda leaf: is_quantized(leaf))
        values = [jnp.asarray(as_array(leaf)) for leaf in leaves]
        floats = [value for value in values if jnp.issubdtype(value.dtype, jnp.floating)]
        return floats or values

    def _observe(self, copy: nnx.Module, observer: Observer) -> None:
        """Let an observer see what a copy of the model runs."""
        of_program = _of_program(copy)
        for path, node in list(nnx.iter_modules(copy)):
            name = ".".join(map(str, path))
            if name in self.nodes:
                around = _AtLayer(name, self.nodes[name], observer)
                for method in ("__call__", "attend") if isinstance(node, QuantEmbed) else ("__call__",):
                    intercept(node, around, method)
            is_proxy = isinstance(node, QuantProxyFromInjector)
            if is_proxy and not observer.others and id(node) not in of_program:
                node.disable_quant = True
        if isinstance(copy, QuantizedProgram):
            intercept(copy, _AtProgram(observer), "quantizers")


def _of_program(model: object) -> set[int]:
    """The quantizers of the model's own program: these are switched where it runs."""
    if not isinstance(model, QuantizedProgram):
        return set()
    tied = {id(proxy) for proxy in model.tied_quantizers().values()}
    return tied | {id(node) for _, node in nnx.iter_modules(model.op_quant, graph=True)}


def _has_others(model: nnx.Module, nodes: Mapping[str, nnx.Module]) -> bool:
    """Whether there are quantizers outside of these layers, and of the program."""
    layers = {id(node) for node in nodes.values()}
    inside = {
        id(holders.proxy)
        for holders in ModelIndex(model).proxies
        if all(id(layer) in layers for layer in holders.layers)
    }
    proxies = (node for _, node in nnx.iter_modules(model) if isinstance(node, QuantProxyFromInjector))
    return any(id(proxy) not in inside | _of_program(model) for proxy in proxies)


def _numbers(outputs: list[jax.Array]) -> list[np.ndarray]:
    return [on_host(leaf).astype(np.float64) for leaf in outputs]
