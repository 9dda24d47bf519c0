"""Runs of a model that are observed: at each layer and contraction floats and quantized numbers, recorded or selected.

One `Observer` says what is done at an entry of the site table, be it a layer or a contraction of the model's own
program: run it as it is, in floats, or by choice. Next: `measured_report`.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject import program
from jqinject.model.frozen_weights import op_slot, quantized_op
from jqinject.model.inspect.layer_numbers import clipped_fields
from jqinject.model.status import Change, changed
from jqinject.model.walk import modules_of
from jqinject.nn import QuantCheckpoint, activations
from jqinject.nn.base.slots import is_on
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.ops.processes import from_holder, on_host, spans_processes
from jqinject.ops.sharding import place_over
from jqinject.proxy import QuantProxyFromInjector
from jqinject.quant_tensor import as_array, is_quantized

# slot of a layer: the part of the layer that it quantizes
PARTS = {"weight_quant": "weight", "input_quant": "input", "output_quant": "output", "act_quant": "output"}
PLAIN_OPS = {
    "dot_general": jax.lax.dot_general,
    "einsum_op": jnp.einsum,
    "conv_general_dilated": jax.lax.conv_general_dilated,
}
#: The entry of all quantizers that run outside of the others.
OTHERS = "(others)"
#: (entry, what) -> the arrays of each call.
Records = Mapping[tuple[str, str], list[tuple[np.ndarray, ...]]]


class Observer:
    """What a run does at each entry: numbers as they are, floats, or a choice of both.

    Args:
        runs: whose entries these are; those that are layers are observed where they are called.
        on: True for all as it is, False for all in floats; or entry -> a traced bool.
        records: whether it records, for each call, as "float" the float output and the quantized output for the same
            input; or, of all as it is, as "quantized" the output, and what the quantizer of each part did.

    Attributes:
        slots: entry -> name of each of its quantizers in `op_quant` -> the slot that it would have in a layer.
        running: the entry that is running, and the module that holds its quantizers; None between entries.
    """

    def __init__(self, runs: ObservedRuns, on: bool | Mapping[str, jax.Array], records: bool = False) -> None:
        self.sites, self.layers, self.on, self._records = runs.sites, runs.nodes, on, records
        self.slots: dict[str, dict[str, str]] = defaultdict(dict)
        self.running: tuple[str, object] | None = None
        self._calls: dict[tuple[str, str], list[list[tuple[np.ndarray, ...]]]] = defaultdict(list)

    def within(self, entry: str, holder: object) -> AbstractContextManager[None]:
        """While an entry runs, whose quantizers a module holds."""
        return changed([(vars(self), "running", (entry, holder))])

    def entry_of(self, call: program.WeightCall) -> str | None:
        """The entry that a contraction of the program belongs to; None if it is not observed there."""
        entry = self.sites.get(call.name)
        return None if entry is not None and entry in self.layers and call.module == entry else entry

    def output(self, entry: str, quantized: object, floats: Callable[[], jax.Array]) -> Any:
        """The output of an entry that flows on."""
        if self.on is True:
            self._note(entry, "quantized", as_array(quantized))
            return quantized
        y = floats()
        if self.on is False:
            self._note(entry, "float", y, as_array(quantized))
        return self.chosen(entry, quantized, y)

    def chosen(self, entry: str, quantized: Any, floats: jax.Array) -> Any:
        """The quantized numbers or the floats; a QuantTensor keeps its scale."""
        if self.on is True:
            return quantized
        value = floats.astype(quantized.dtype)
        value = value if self.on is False else jnp.where(self.on[entry], as_array(quantized), value)
        return quantized.set(value=value) if is_quantized(quantized) else value

    def quantizer(
        self, entry: str, part: str, proxy: QuantProxyFromInjector | None, x: object, quantized: object
    ) -> None:
        """Record what the quantizer of a part did."""
        if self.on is True and is_quantized(quantized):
            self._note(entry, part, *clipped_fields(proxy, as_array(x), quantized))

    def _note(self, entry: str, what: str, *arrays: object) -> None:
        """Record arrays whenever the traced program runs; in a loop those of every iteration."""
        if self._records:
            # In the order of the trace: a compiled program may call back in another order.
            calls: list[tuple[np.ndarray, ...]] = []
            self._calls[entry, what].append(calls)
            # And those of the devices of a `shard_map` in the order of these.
            device = place_over(tuple(jax.sharding.get_abstract_mesh().manual_axes))
            jax.debug.callback(
                lambda *arrays: calls.append(tuple(map(np.asarray, arrays))),
                device,
                *map(jnp.asarray, arrays),
            )

    def finish(self, *arguments: object) -> Records:
        """The records, on every process, once the started programs have run.

        Args:
            arguments: pytrees of the programs' arguments.
        """
        jax.effects_barrier()
        records = {
            key: [row[1:] for own in calls for row in sorted(own, key=operator.itemgetter(0))]
            for key, calls in self._calls.items()
            if any(calls)
        }
        for calls in itertools.chain(*self._calls.values()):
            calls.clear()  # NNX's caches may keep the observer alive, and JAX's the program
        # If a program spans several processes, only one is called back, with unsharded arrays.
        return from_holder(records, bool(records)) if spans_processes(arguments) else records


def _at_layer(
    path: str,
    observer: Observer,
    layer: nnx.Module,
    call: Callable[..., Any],
    *args: object,
    **kwargs: object,
) -> Any:
    """A call of a layer, observed: see `intercept`.

    Args:
        path: of the layer.
        observer: says what is done.
        layer, call, args, kwargs: as for an interceptor.
    """
    run, x = partial(call, *args, **kwargs), args[0] if args else next(iter(kwargs.values()))
    # An input that the layer does not quantize may be a float tensor that claims to be quantized.
    as_floats = observer.on is not True and not is_on(vars(layer).get("input_quant"))
    with observer.within(path, layer):
        with changed([(vars(layer), "contraction", "float")] if as_floats else []):
            quantized = run()
        return observer.output(path, quantized, lambda: _floating(layer, run, x))


def _floating(layer: nnx.Module, run: Callable[[], Any], x: object) -> jax.Array:
    """The output of a layer with its quantizers off, for the input `x`."""
    if isinstance(layer, QuantCheckpoint):  # it refuses to run without its quantizer
        return as_array(x)
    own, name = vars(layer), op_slot(layer)
    changes: list[Change] = [(vars(x), "disable_quant", True) for x in own.values() if is_on(x)]
    changes += [(own, "contraction", "float"), (own, "return_quant_tensor", False)]
    if name is not None and quantized_op(layer) is not None:
        changes.append((own, name, PLAIN_OPS[name]))
    with changed(changes):
        return as_array(run())


def _quantizes(node: object) -> bool:
    """Whether a module is a layer that quantizes in the forward pass."""
    if quantized_op(node) is not None:
        return True
    if not isinstance(node, QuantWeightLayer | activations.QuantActLayer | QuantCheckpoint):
        return False
    frozen = isinstance(node, QuantWeightLayer) and node.frozen is not None
    return frozen or any(is_on(proxy) for slot, proxy in vars(node).items() if slot != "grad_quant")


def _at_quantizer(
    observer: Observer, proxy: QuantProxyFromInjector, call: Callable[..., Any], x: object, *more: object
) -> object:
    """A call of a quantizer, observed: of the layer that is running, or of none; see `intercept`."""
    quantized = call(x, *more)
    if observer.running is None:
        return observer.chosen(OTHERS, quantized, as_array(x))
    entry, holder = observer.running
    part = next((part for slot, part in PARTS.items() if vars(holder).get(slot) is proxy), "")
    if part and proxy.is_quant_enabled:
        observer.quantizer(entry, part, proxy, x, quantized)
    return quantized


@final
class ObservedQuantizers(program.HeldQuantizers):
    """The quantizers of a program whose contractions are observed.

    Args:
        quantizers: the quantizers.
        observer: says what is done at a contraction.
    """

    def __init__(self, quantizers: program.HeldQuantizers, observer: Observer) -> None:
        vars(self).update(vars(quantizers))
        self._observer = observer

    @property
    def mode(self) -> bool:
        """Whether an observed contraction is running: its quantizers are on where others are off."""
        return self._observer.running is not None

    def run(self, call: program.WeightCall) -> program.Tracked:
        """See `Quantizers`."""
        observer = self._observer
        entry = observer.entry_of(call)
        if entry is None:
            return call.quantized()
        with observer.within(entry, self):
            out = call.quantized()
            value = observer.output(entry, out.array, call.floating)
        # Contracted as floats next, if these are other numbers: the scale is not theirs.
        return out if observer.on is True else out.with_value(value)

    def record(self, site: program.Site, x: jax.Array, quantized: object) -> None:
        """See `Quantizers`."""
        entry, holder = self._observer.running or ("", None)
        if entry and holder is self:
            part = "output" if site.name.endswith("_output") else "weight" if site.is_weight else "input"
            self._observer.slots[entry][site.name] = f"{part}_quant"
            self._observer.quantizer(entry, part, self.proxy_at(site.name), x, quantized)

    def chosen(self, name: str) -> Callable[[jax.Array, jax.Array], jax.Array] | None:
        """See `Quantizers`."""
        entry = self._observer.sites.get(name)
        return None if entry is None else partial(self._observer.chosen, entry)

    def quantize(self, site: program.Site, x: jax.Array, token: jax.Array | None = None) -> Any:
        """See `Quantizers`."""
        observer, running = self._observer, self._observer.running
        weight = observer.sites.get(site.name) if site.is_weight else None
        is_other = weight is None and running is None
        if is_other and observer.on is False:
            return self.transformed(site, x)
        with observer.within("", self):
            quantized = super().quantize(site, x, token)
        if weight is not None and weight not in observer.layers:
            observer.slots[weight][site.name] = "weight_quant"
            observer.quantizer(weight, "weight", self.proxy_at(site.name), x, quantized)
        elif weight is None and running is not None and site.name.endswith("_grad"):
            observer.slots[running[0]][site.name] = "grad_quant"
        if is_other and observer.on is not True:
            return observer.chosen(OTHERS, as_array(quantized), self.transformed(site, x))
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
        sites: see above.
        nodes: path -> quantized layer.
        entries: layers, and whatever else is switched; the last is `OTHERS`.
        state, arrays: of the model and its call, as `SplitCall` has them.
    """

    def __init__(self, model: nnx.Module, call: program.Call, sites: Mapping[str, str]) -> None:
        self._split, self.sites = program.SplitCall(model, call), sites
        self.state, self.arrays = self._split.state, self._split.arrays
        self.nodes = {path: node for path, node in modules_of(model).items() if _quantizes(node)}
        self.entries = tuple(dict.fromkeys((*self.nodes, *sites.values(), OTHERS)))

        def mixed(state: object, arrays: list[jax.Array], on: jax.Array) -> list[jax.Array]:
            return self.outputs(state, arrays, Observer(self, dict(zip(self.entries, on, strict=True))))

        self._mixed = jax.jit(mixed)

    def recorded(self, on: bool) -> tuple[Observer, Records, list[np.ndarray]]:
        """Run the model as it is, or with every quantizer off; its records, and the model's outputs, float64."""
        observer = Observer(self, on, records=True)
        run = jax.jit(partial(self.outputs, observer=observer))
        outputs = _numbers(run(self.state, self.arrays))
        return observer, observer.finish(self.state, self.arrays), outputs

    def mixed(self, quantized: Collection[str]) -> list[np.ndarray]:
        """Run with some entries quantized, compiled once for all choices: the model's outputs, float64."""
        on = np.array([entry in quantized for entry in self.entries])
        return _numbers(self._mixed(self.state, self.arrays, on))

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
        modules = modules_of(copy)
        layers = [node for name, node in modules.items() if name in self.nodes]
        of_layers = {id(node) for layer in layers for _, node in nnx.iter_modules(layer, graph=True)}
        of_program: set[int] = set()
        if isinstance(copy, program.QuantizedProgram):
            of_program = {id(node) for _, node in nnx.iter_modules(copy.op_quant, graph=True)}
            program.intercept(copy, lambda _, call: ObservedQuantizers(call(), observer), "quantizers")
        for name, node in modules.items():
            if name in self.nodes:
                program.intercept(node, partial(_at_layer, name, observer), *program.METHODS)
            if isinstance(node, QuantProxyFromInjector) and id(node) not in of_program:
                program.intercept(node, partial(_at_quantizer, observer))
                node.disable_quant |= observer.on is False and id(node) not in of_layers


def _numbers(outputs: list[jax.Array]) -> list[np.ndarray]:
    return [on_host(leaf).astype(np.float64) for leaf in outputs]
