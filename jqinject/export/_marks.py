"""Marks in a traced program: each shows a quantized value and its grid; and what ONNX has in their places.

A model is traced with its quantizers' results marked. Once the program's constants are folded, a marked value is a
stored integer or 8-bit float, a quantizer with a known scale, or a computation.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.interpreters import batching

from jqinject.core._protocols import is_nearest
from jqinject.core.quantizers.delay import DelayWrapper
from jqinject.export._operations import (
    DEQUANTIZE,
    Parameters,
    Rule,
    container,
    grid_of,
    is_known,
    linear,
    requantized,
    stored_integers,
)
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.ops import FloatGrid, float8_cast, max_int, min_int
from jqinject.program import Around, intercept, jaxpr
from jqinject.proxy import QuantProxyFromInjector
from jqinject.quant_tensor import QuantTensor, as_array, on_integers, on_minifloats

Marked: TypeAlias = jax.Array | QuantTensor

MARK = jaxpr.Primitive("jqinject_quantized")
"""Operands: what was quantized, its quantized value, scale; of integers zero point and bit width. Result: the value.

Parameters: `format` of minifloats, None of integers; `signed`; `narrow_range`; `nearest`, whether the value is
`clamp(round(x / scale + zero_point))` and back.
"""

MARK.def_abstract_eval(lambda x, value, *grid, **facts: value)
# Under vmap the grid has its own batch axis, so the value is an ordinary computation.
batching.primitive_batchers[MARK] = lambda operands, axes, **facts: (operands[1], axes[1])


def mark_quantizers(model: nnx.Module) -> None:
    """Let every quantizer and frozen weight of a model mark its results, and every layer contract floats.

    This changes the model in place, including the classes of its modules: pass a private copy.
    """
    for _, node in nnx.iter_modules(model):
        if isinstance(node, QuantProxyFromInjector) and not _is_delayed(node):
            intercept(node, _MarkedCall())
        elif isinstance(node, QuantWeightLayer):
            node.contraction = "float"
            if node.frozen is not None:
                intercept(node, _MarkedCall(), "_quantized_weight")


class _MarkedCall(Around):
    """Marks the result of a proxy, or the frozen weight of a layer, which lies on its grid."""

    def __call__(self, layer: Any, call: Callable[..., Marked], *args: Any, **kwargs: Any) -> Marked:
        """See `Around`."""
        result = call(*args, **kwargs)
        if isinstance(layer, QuantWeightLayer):
            return _marked(result, result, False, False)
        return _marked(args[0], result, bool(layer.is_narrow_range), is_nearest(layer.tensor_quant))


def _marked(x: Marked, result: Marked, narrow_range: bool, nearest: bool) -> Marked:
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


def _is_delayed(proxy: nnx.Module) -> bool:
    """Whether the quantizer still passes its first calls through unquantized: no grid is valid then."""
    nodes = (node for _, node in nnx.iter_modules(proxy))
    waiting = (n.countdown for n in nodes if isinstance(n, DelayWrapper) and n.countdown is not None)
    return any(bool(jnp.any(countdown[...] > 0)) for countdown in waiting)


def rules(opset: int) -> dict[str, Rule]:
    """The rules by which `evaluate` replaces marks."""

    def unmark(operands: Sequence[jax.Array], facts: Parameters) -> Sequence[jax.Array]:
        kind = _integers if facts["format"] is None else _minifloats
        return [kind(operands, facts, opset)]

    return {MARK.name: unmark}


def _integers(operands: Sequence[jax.Array], facts: Parameters, opset: int) -> jax.Array:
    x, value, *grid = operands
    if not is_known(*grid):
        return value
    scale, zero_point, bits = (np.asarray(part, np.float32) for part in grid)
    dtype = container(int(bits), facts["signed"], opset)
    if is_known(value):
        return stored_integers(np.asarray(value), scale, zero_point, dtype).astype(value.dtype)
    if not facts["nearest"]:  # the value is already on its grid, within its bounds
        return requantized(value, scale, zero_point, dtype, None, value)
    span = (facts["signed"], facts["narrow_range"], int(bits))
    return requantized(x, scale, zero_point, dtype, (min_int(*span), max_int(*span)), value)


def _minifloats(operands: Sequence[jax.Array], facts: Parameters, opset: int) -> jax.Array:
    x, value, scale, *_ = operands
    if is_known(value, scale):
        return stored_float8(np.asarray(value), np.asarray(scale, np.float32), facts["format"], opset)
    return (
        rounded(x.astype(jnp.float32), scale, facts["format"]).astype(value.dtype)
        if facts["nearest"]
        else value
    )


# Earlier opsets have no 8-bit floats.
OPSET_OF_FLOAT8 = 19


def stored_float8(value: np.ndarray, scale: np.ndarray, form: FloatGrid, opset: int) -> jax.Array:
    """A known value as stored 8-bit floats and DequantizeLinear; unchanged if ONNX has no such floats.

    Args:
        value: the dequantized numbers.
        scale: float32, broadcasts with them.
        form: their format.
        opset: version of ONNX's operators.
    """
    grid = grid_of(scale, np.zeros((), np.float32), value.ndim)
    dtype = form.dtype
    if dtype is None or dtype not in float8_cast.FLOAT8_DTYPES or opset < OPSET_OF_FLOAT8 or grid is None:
        return jnp.asarray(value)
    payload = (value.astype(np.float32) / scale).astype(dtype)
    if not np.array_equal((payload.astype(np.float32) * scale).astype(value.dtype), value, equal_nan=True):
        return jnp.asarray(value)
    operands = [jnp.asarray(grid.scale, jnp.float32)]
    restored = linear(DEQUANTIZE, jnp.asarray(payload), operands, np.float32, grid.axis)
    return restored.astype(value.dtype)


def rounded(x: jax.Array, scale: jax.Array, form: FloatGrid) -> jax.Array:
    """The nearest numbers of a saturating format, by comparisons: ONNX cannot read float bits before opset 26.

    Args:
        x: float32.
        scale: broadcasts with it.
        form: the format.
    """
    steps = jnp.clip(x / scale, *form.bounds)
    exponents = np.arange(2 - form.exponent_bias, np.floor(np.log2(form.largest)) + 1)
    starts = jnp.asarray(2.0**exponents, jnp.float32)  # of the binades above the subnormal numbers
    binade = jnp.sum((jnp.abs(steps)[..., None] >= starts).astype(jnp.int32), axis=-1)
    apart = jnp.asarray(form.smallest_subnormal * 2.0 ** np.arange(len(starts) + 1), jnp.float32)[binade]
    y = jnp.clip(jnp.round(steps / apart) * apart, *form.bounds) * scale
    return jnp.where(jnp.isinf(x), x if form.inf_values is not None else jnp.nan, y)
