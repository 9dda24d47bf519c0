"""Runs a model with some of its layers and parameters quantized and others in float."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.model.inspect.observed_sites import (
    FloatingSites,
    MixedSites,
    Observing,
    QuantizedSites,
    SiteRun,
    Sites,
)
from jqinject.model.inspect.switching import PARTS, Listener, QuantizedLayer, Recorder, changed
from jqinject.model.walk import ModelIndex
from jqinject.nn import QuantEmbed
from jqinject.ops.processes import on_host
from jqinject.program import Around, Call, QuantizedProgram, SplitCall, in_scope, intercept
from jqinject.proxy import QuantProxyFromInjector
from jqinject.quant_tensor import as_array, is_quantized


class SensitivityRuns:
    """Makes the same call of a copy of a model repeatedly, with entries switched. The model is not changed.

    Args:
        model: in evaluation mode.
        call: of it, with arrays.
        layers: path -> quantized layer.
        sites: what the model's program contracts by itself: path of a parameter, or name of a contraction of two
            activations -> its entry, which may be that of a layer.

    Attributes:
        entries: layers, and whatever else is switched.
        state, arrays: of the model and its call, as `SplitCall` has them.
        slots: after `quantized`: entry -> name of each of its quantizers in `op_quant` -> the slot in a layer.
    """

    def __init__(
        self,
        model: nnx.Module,
        call: Call,
        layers: Mapping[str, QuantizedLayer],
        sites: Mapping[str, str],
    ) -> None:
        self._split = SplitCall(model, call)
        self.state, self.arrays = self._split.state, self._split.arrays
        self._layers, self._sites = layers, Sites(sites, layers)
        self.entries = tuple(dict.fromkeys((*layers, *sites.values())))
        self.slots: Mapping[str, Mapping[str, str]] = {}
        self._has_others = _has_others(model, layers)
        self._mixed: dict[bool, Any] = {}

    def floating(self, recorder: Recorder) -> list[np.ndarray]:
        """Run with every quantizer off.

        Args:
            recorder: records as "float", for each call, the layer's float output and its quantized output for the same
                input.

        Returns:
            The model's outputs, float64.
        """
        sites = FloatingSites(self._sites, recorder)
        return self._recorded(recorder, sites, around=lambda layer: _Floating(layer, recorder))

    def quantized(self, recorder: Recorder) -> list[np.ndarray]:
        """Run the model as it is.

        Args:
            recorder: records as "quantized", for each call, the layer's output, and what the quantizer of each part
                did.

        Returns:
            The model's outputs, float64.
        """
        sites = QuantizedSites(self._sites, recorder)
        outputs = self._recorded(recorder, sites, around=lambda layer: _Quantized(layer, recorder))
        self.slots = sites.slots
        self._has_others = self._has_others or sites.has_others
        return outputs

    def mixed(self, on: Mapping[str, bool], *, others: bool) -> list[np.ndarray]:
        """Run with some entries quantized; after `quantized`.

        Args:
            on: entry -> whether it is quantized; compiled once for all choices.
            others: whether quantizers that belong to no entry are on.

        Returns:
            The model's outputs, float64.
        """
        others = others or not self._has_others
        if others not in self._mixed:
            self._mixed[others] = self._compiled(others)
        chosen = np.array([on[entry] for entry in self.entries])
        return _numbers(self._mixed[others](self.state, self.arrays, chosen))

    def as_it_is(self, state: object, arrays: list[Any]) -> list[Any]:
        """The model's floating-point outputs, for a caller that traces.

        Args:
            state: of the structure of the attribute.
            arrays: likewise.
        """
        copy, call = self._split.merged(state, arrays)
        return _arrays(call(copy))

    def in_floats(self, state: object, arrays: list[Any]) -> list[Any]:
        """As `as_it_is`, with every quantizer off.

        Args:
            state, arrays: see `as_it_is`.
        """
        recorder = _Silent()
        arounds = {path: _Floating(layer, recorder) for path, layer in self._layers.items()}
        return self._call(state, arrays, arounds, FloatingSites(self._sites, recorder))

    def _recorded(
        self, recorder: Recorder, sites: SiteRun, around: Callable[[QuantizedLayer], Around]
    ) -> list[np.ndarray]:
        arounds = {path: around(layer) for path, layer in self._layers.items()}
        run = jax.jit(lambda state, arrays: self._call(state, arrays, arounds, sites))
        outputs = _numbers(run(self.state, self.arrays))
        recorder.finish(self.state, self.arrays)
        return outputs

    def _compiled(self, others: bool) -> Callable[[Any, Any, np.ndarray], Any]:
        def run(state: Any, arrays: Any, chosen: jax.Array) -> Any:
            on = {entry: chosen[i] for i, entry in enumerate(self.entries)}
            arounds = {path: _Mixed(layer, on[path]) for path, layer in self._layers.items()}
            return self._call(state, arrays, arounds, MixedSites(self._sites, on, others))

        return jax.jit(run)

    def _call(
        self, state: object, arrays: list[Any], arounds: Mapping[str, Around], sites: SiteRun
    ) -> list[Any]:
        copy, call = self._split.merged(state, arrays)
        root: Any = copy
        observed = _observed(copy)
        for path, node in list(nnx.iter_modules(copy)):
            around = arounds.get(".".join(map(str, path)))
            if around is not None:
                intercept(node, around)
                if isinstance(node, QuantEmbed):
                    intercept(node, around, "attend")
                    intercept(node, _Within(".".join(map(str, path))), "attend")
            if isinstance(node, QuantProxyFromInjector) and not sites.others and id(node) not in observed:
                node.disable_quant = True
        if isinstance(copy, QuantizedProgram):
            intercept(root, Observing(sites), "quantizers")
        return _arrays(call(copy))


@final
class _Silent(Recorder):
    """Records nothing."""

    def note(self, layer: str, what: str, *arrays: object) -> None:
        """See `Recorder`."""


def _observed(model: object) -> set[int]:
    """The quantizers of the model's own program: these are switched where it runs."""
    if not isinstance(model, QuantizedProgram):
        return set()
    tied = {id(proxy) for proxy in model.tied_quantizers().values()}
    return tied | {id(node) for _, node in nnx.iter_modules(model.op_quant, graph=True)}


def _arrays(outputs: object) -> list[Any]:
    """The floating-point arrays that a model returns; all its arrays if none is."""
    leaves = jax.tree.leaves(outputs, is_leaf=lambda leaf: is_quantized(leaf))
    arrays = [jnp.asarray(as_array(leaf)) for leaf in leaves]
    floats = [array for array in arrays if jnp.issubdtype(array.dtype, jnp.floating)]
    return floats or arrays


@final
class _Within(Around):
    """Marks what a method of a layer contracts as the layer's."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, layer: object, call: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        return in_scope(self.path, None, call, args, kwargs)


@final
class _Floating(Around):
    """Runs the layer in float, and records its quantized output for the same input."""

    def __init__(self, layer: QuantizedLayer, recorder: Recorder) -> None:
        self.layer, self.recorder = layer, recorder

    def __call__(self, layer: object, call: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        y, quantized = _both(self.layer, layer, call, args, kwargs)
        self.recorder.note(self.layer.path, "float", y, as_array(quantized))
        return _dressed(y, quantized)


@final
class _Quantized(Around):
    """Runs the layer as it is, and records its quantizers."""

    def __init__(self, layer: QuantizedLayer, recorder: Recorder) -> None:
        self.layer, self.recorder = layer, recorder

    def __call__(self, layer: object, call: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        y = self.layer.quantized(layer, lambda: self._heard(layer, lambda: call(*args, **kwargs)))
        self.recorder.note(self.layer.path, "quantized", as_array(y))
        return y

    def _heard(self, layer: object, call: Callable[[], Any]) -> Any:
        attributes, path = vars(layer), self.layer.path
        proxies = ((slot, part, attributes.get(slot)) for slot, part in PARTS.items())
        listeners = [
            (attributes, slot, Listener(proxy, self.recorder, path, part))
            for slot, part, proxy in proxies
            if proxy is not None
        ]
        with changed(listeners):
            return call()


@final
class _Mixed(Around):
    """Runs the layer quantized or in float, selected by a traced bool."""

    def __init__(self, layer: QuantizedLayer, on: jax.Array) -> None:
        self.layer, self.on = layer, on

    def __call__(self, layer: object, call: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        y, quantized = _both(self.layer, layer, call, args, kwargs)
        value = as_array(quantized)
        return _dressed(jnp.where(self.on, value, y.astype(value.dtype)), quantized)


def _has_others(model: nnx.Module, layers: Mapping[str, QuantizedLayer]) -> bool:
    """Whether there are quantizers outside the given quantized layers."""
    layer_ids = {id(node) for path, node in nnx.iter_modules(model) if ".".join(map(str, path)) in layers}
    observed = _observed(model)
    inside = {
        id(h.proxy) for h in ModelIndex(model).proxies if all(id(layer) in layer_ids for layer in h.layers)
    }
    proxies = (node for _, node in nnx.iter_modules(model) if isinstance(node, QuantProxyFromInjector))
    return any(id(proxy) not in inside | observed for proxy in proxies)


def _both(
    switched: QuantizedLayer,
    layer: object,
    call: Callable[..., Any],
    args: tuple[object, ...],
    kwargs: dict[str, Any],
) -> tuple[jax.Array, Any]:
    """The layer's output in float, and quantized."""

    def run() -> Any:
        return call(*args, **kwargs)

    x = args[0] if args else next(iter(kwargs.values()))
    return switched.floating(layer, run, x), switched.quantized(layer, run, alone=True)


def _dressed(value: jax.Array, quantized: object) -> Any:
    """A value in the type that the quantized layer returns: a QuantTensor keeps its scale."""
    return quantized.set(value=value) if is_quantized(quantized) else value


def _numbers(outputs: list[Any]) -> list[np.ndarray]:
    return [on_host(leaf).astype(np.float64) for leaf in outputs]
