"""Marks in a traced program: each shows a quantized value and its grid.

A model is traced with its quantizers' results marked. Once the program's constants are folded, the exporter decides
whether a marked value is a stored integer, a quantizer with a known scale, or a computation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.interpreters import batching

from jqinject.core._protocols import is_nearest
from jqinject.core.quantizers.delay import DelayWrapper
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.program import Around, intercept
from jqinject.program.jaxpr import Primitive
from jqinject.proxy import QuantProxyFromInjector
from jqinject.quant_tensor import as_array, on_integers, on_minifloats

MARK = Primitive("jqinject_quantized")
"""Operands: what was quantized, its quantized value, scale; of integers zero point and bit width. Result: the value.

Parameters: `format` of minifloats, None of integers; `signed`; `narrow_range`; `nearest`, whether the value is
`clamp(round(x / scale + zero_point))` and back.
"""

MARK.def_abstract_eval(lambda x, value, *grid, **facts: value)
# Under vmap the grid has its own batch axis, so the value is an ordinary computation.
batching.primitive_batchers[MARK] = lambda operands, axes, **facts: (operands[1], axes[1])


def mark_quantizers(model: Any) -> None:
    """Let every quantizer and frozen weight of a model mark its results, and every layer contract floats.

    This changes the model in place, including the classes of its modules: pass a private copy.
    """
    call, weight = _MarkedCall(), _MarkedWeight()
    for _, node in nnx.iter_modules(model):
        if isinstance(node, QuantProxyFromInjector) and not _is_delayed(node):
            intercept(node, call)
        elif isinstance(node, QuantWeightLayer):
            node.contraction = "float"
            if node.frozen is not None:
                intercept(node, weight, "_quantized_weight")


class _MarkedCall(Around):
    """Marks a proxy's result."""

    def __call__(self, layer: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See `Around`."""
        result = call(*args, **kwargs)
        return _marked(args[0], result, bool(layer.is_narrow_range), is_nearest(layer.tensor_quant))


class _MarkedWeight(Around):
    """Marks a frozen weight, which lies on its grid."""

    def __call__(self, layer: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See `Around`."""
        weight = call(*args, **kwargs)
        return _marked(weight, weight, False, False)


def _marked(x: Any, result: Any, narrow_range: bool, nearest: bool) -> Any:
    facts: dict[str, Any] = {"signed": True, "narrow_range": narrow_range, "nearest": nearest, "format": None}
    if on_integers(result):
        grid = (result.scale, result.zero_point, jnp.asarray(result.bit_width, jnp.float32))
        facts["signed"] = result.signed
    elif on_minifloats(result) and not result.format.is_learned:
        grid = (result.scale,)
        facts["format"] = result.format
    else:
        return result
    return result.set(value=MARK.bind(as_array(x), result.value, *grid, **facts))


def _is_delayed(proxy: Any) -> bool:
    """Whether the quantizer still passes its first calls through unquantized: no grid is valid then."""
    nodes = (node for _, node in nnx.iter_modules(proxy))
    waiting = (n.countdown for n in nodes if isinstance(n, DelayWrapper) and n.countdown is not None)
    return any(bool(jnp.any(countdown[...] > 0)) for countdown in waiting)
