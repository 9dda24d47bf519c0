"""Finds the quantized layers of a model, and runs them with their quantizers on or off. Next: `observed_runs`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.model.frozen_weights import quantized_op
from jqinject.nn import QuantCheckpoint
from jqinject.nn.activations import QuantActLayer
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.proxy import QuantProxyFromInjector
from jqinject.quant_tensor import as_array

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

    @classmethod
    def of(cls, path: str, layer: object) -> QuantizedLayer:
        """The description of a quantized layer in its current state."""
        slots = vars(layer)
        disabled = {slot: slots[slot].disable_quant for slot in SLOTS if slots.get(slot) is not None}
        return cls(path, disabled, _enabled(slots.get("input_quant")))

    def quantized(self, layer: object, call: Callable[[], Any], *, alone: bool = False) -> Any:
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

    def floating(self, layer: object, call: Callable[[], Any], x: object) -> jax.Array:
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


def quantized_layers(model: nnx.Module) -> dict[str, nnx.Module]:
    """The layers of a model that quantize in the forward pass: path -> layer."""
    modules = ((".".join(map(str, path)), node) for path, node in nnx.iter_modules(model))
    return {path: node for path, node in modules if _quantizes(node)}


def _quantizes(node: object) -> bool:
    if quantized_op(node) is not None:
        return True
    if not isinstance(node, QuantWeightLayer | QuantActLayer | QuantCheckpoint):
        return False
    frozen = isinstance(node, QuantWeightLayer) and node.frozen is not None
    return frozen or any(_enabled(vars(node).get(slot)) for slot in SLOTS if slot != "grad_quant")


def _enabled(proxy: QuantProxyFromInjector | None) -> bool:
    return proxy is not None and proxy.is_quant_enabled


Change = tuple[dict[str, Any], str, Any]


def _proxies(layer: object, disabled: Mapping[str, bool]) -> list[Change]:
    return [(vars(vars(layer)[slot]), "disable_quant", off) for slot, off in disabled.items()]


@contextmanager
def changed(changes: list[Change]) -> Generator[None]:
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
