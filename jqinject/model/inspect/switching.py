"""Finds the quantized layers of a model, runs them with their quantizers on or off, and records arrays."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core import BinaryQuant, ClampedBinaryQuant, TernaryQuant
from jqinject.model.frozen_weights import quantized_op
from jqinject.nn import QuantCheckpoint
from jqinject.nn.activations import QuantActLayer
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.ops.processes import from_holder, spans_processes
from jqinject.quant_tensor import (
    as_array,
)

Arrays = tuple[np.ndarray, ...]
ONE_STEP = (BinaryQuant, ClampedBinaryQuant, TernaryQuant)


class Recorder:
    """Arrays by layer and by kind, in call order."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], list[tuple[int, Arrays]]] = defaultdict(list)
        self._traced: Counter[tuple[str, str]] = Counter()

    def note(self, layer: str, what: str, *arrays: object) -> None:
        """Keep arrays whenever the traced program runs; in a loop those of every iteration."""
        key = (layer, what)
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
            # If a program spans several processes, only one is called back, with whole arrays.
            self._kept = defaultdict(list, from_holder(dict(self._kept), bool(self._kept)))

    def of(self, layer: str, what: str) -> list[Arrays]:
        """The kept arrays, float64, once the program has run."""
        records = sorted(self._kept[layer, what], key=lambda entry: entry[0])
        return [tuple(array.astype(np.float64) for array in arrays) for _, arrays in records]

    def calls(self, layer: str, what: str) -> int:
        """The number of records."""
        return len(self._kept[layer, what])

    def clear(self) -> None:
        """Drop all arrays: NNX's caches may keep the recorder alive."""
        self._kept.clear()


class Listener:
    """A proxy that records its inputs and outputs, and otherwise behaves like the proxy that it wraps."""

    def __init__(self, proxy: Any, recorder: Recorder, layer: str, part: str) -> None:
        self._proxy = proxy
        self._note = partial(recorder.note, layer, part)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._proxy, name)

    def __call__(self, x: Any, *more: Any) -> Any:
        """Call the proxy and record; weights that depend on the format of their input are called with it."""
        quantized = self._proxy(x, *more)
        if self._proxy.is_quant_enabled:
            self._note(*clipped_fields(self._proxy, as_array(x), quantized))
        return quantized


def clipped_fields(proxy: Any, x: jax.Array, quantized: Any) -> tuple[Any, ...]:
    """The fields of `Clipped`: a quantizer's input, its output and its range.

    Args:
        proxy: the quantizer's; None if it is gone.
        x: the input.
        quantized: the same quantized, a QuantTensor.
    """
    if proxy is not None and isinstance(proxy.tensor_quant, ONE_STEP):
        low, high = -1, 1
    else:
        grid = quantized.grid
        if grid.is_integer and proxy is not None and proxy.is_narrow_range:
            grid = replace(grid, narrow_range=True)
        low, high = grid.bounds
    return x, quantized.value, quantized.scale, quantized.zero_point, low, high


Call = Callable[[], Any]

# slot of a layer: the part of the layer that it quantizes
PARTS = {"weight_quant": "weight", "input_quant": "input", "output_quant": "output", "act_quant": "output"}
SLOTS = (*PARTS, "bias_quant", "grad_quant")
PLAIN_OPS = {
    "dot_general": jax.lax.dot_general,
    "einsum_op": jnp.einsum,
    "conv_general_dilated": jax.lax.conv_general_dilated,
}
_MISSING = object()


@dataclass(frozen=True, eq=False)
class QuantizedLayer:
    """Describes a layer whose quantizers can be switched; also valid for copies of the layer.

    Attributes:
        path: its path in the model.
        disabled: slot -> whether the user has switched its quantizer off.
        quantizes_input: whether it quantizes its input itself.
    """

    path: str
    disabled: Mapping[str, bool]
    quantizes_input: bool

    def quantized(self, layer: object, call: Call, *, alone: bool = False) -> Any:
        """Call a layer with its quantizers as the user has set them.

        Args:
            layer: the layer.
            call: calls it.
            alone: the input may be a float tensor that claims to be quantized, so contract it as floats.
        """
        changes = _proxies(layer, self.disabled)
        if alone and not self.quantizes_input and isinstance(layer, QuantWeightLayer):
            changes.append((vars(layer), "contraction", "float"))
        with changed(changes):
            return call()

    def floating(self, layer: object, call: Call, x: object) -> jax.Array:
        """Call a layer with its quantizers off.

        Args:
            layer: the layer.
            call: calls it on `x`.
            x: its input.
        """
        if isinstance(layer, QuantCheckpoint):  # it refuses to run without its quantizer
            return as_array(x)
        changes = _proxies(layer, dict.fromkeys(self.disabled, True))
        attributes = vars(layer)
        if isinstance(layer, QuantWeightLayer | QuantActLayer):
            changes.append((attributes, "return_quant_tensor", False))
        if isinstance(layer, QuantWeightLayer):
            changes.append((attributes, "contraction", "float"))
        op = quantized_op(layer)
        if op is not None:
            changes.append((attributes, op.name, PLAIN_OPS[op.name]))
        with changed(changes):
            return as_array(call())


def quantized_layers(model: nnx.Module) -> dict[str, Any]:
    """The layers of a model that quantize in the forward pass: path -> layer."""
    modules = ((".".join(map(str, path)), node) for path, node in nnx.iter_modules(model))
    return {path: node for path, node in modules if _quantizes(node)}


def switchable(path: str, layer: object) -> QuantizedLayer:
    """The description of a quantized layer in its current state."""
    attributes = vars(layer)
    disabled = {slot: attributes[slot].disable_quant for slot in SLOTS if attributes.get(slot) is not None}
    return QuantizedLayer(path, disabled, _enabled(attributes.get("input_quant")))


def _quantizes(node: object) -> bool:
    if quantized_op(node) is not None:
        return True
    if not isinstance(node, QuantWeightLayer | QuantActLayer | QuantCheckpoint):
        return False
    frozen = isinstance(node, QuantWeightLayer) and node.frozen is not None
    return frozen or any(_enabled(vars(node).get(slot)) for slot in SLOTS if slot != "grad_quant")


def _enabled(proxy: Any) -> bool:
    return proxy is not None and proxy.is_quant_enabled


def _proxies(layer: object, disabled: Mapping[str, bool]) -> list[tuple[dict[str, Any], str, Any]]:
    return [(vars(vars(layer)[slot]), "disable_quant", off) for slot, off in disabled.items()]


@contextmanager
def changed(changes: list[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """Change attributes within a `with` block.

    This bypasses NNX, which refuses changes to a layer reached through the closure of a transformation. The old values
    are back before NNX looks at the layer again.
    """
    before = [(attributes, name, attributes.get(name, _MISSING)) for attributes, name, _ in changes]
    try:
        for attributes, name, value in changes:
            attributes[name] = value
        yield
    finally:
        for attributes, name, value in reversed(before):
            if value is _MISSING:
                attributes.pop(name, None)
            else:
                attributes[name] = value
