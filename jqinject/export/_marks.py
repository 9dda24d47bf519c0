"""Quantized numbers and pools of a traced program in ONNX's form; and the evaluator that puts them there.

A model is traced with its quantizers' results marked: each mark shows a quantized value and its grid. Once the
program's constants are folded, a marked value is a stored integer or 8-bit float, a quantizer with a known scale, or a
computation.

QuantizeLinear: q = saturate(round(x / scale) + zero_point)        DequantizeLinear: y = (q - zero_point) * scale

jax2onnx writes a window reduction with a window along every axis, including batch and channels; runtimes have pools of
one to three spatial axes, in ONNX's layout, with the channels before these.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.interpreters import batching

from jqinject.core._protocols import is_nearest
from jqinject.core.quantizers.delay import DelayWrapper
from jqinject.dot import FrozenParam
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.ops import FloatGrid, IntGrid, float8_cast, max_int, min_int
from jqinject.ops.processes import ONE_DEVICE
from jqinject.program import intercept
from jqinject.program.jaxpr import Body, Equation, Primitive
from jqinject.proxy import QuantProxyFromInjector
from jqinject.quant_tensor import QuantTensor, as_array, is_concrete, on_integers, on_minifloats

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
# Hints for XLA that do not change any number.
AS_IT_IS = frozenset({"layout_constraint", "optimization_barrier"})

#: Of a primitive.
Parameters: TypeAlias = Mapping[str, Any]
Rule: TypeAlias = Callable[[Sequence[jax.Array], Parameters], Sequence[jax.Array] | None]


def evaluate(
    body: Body, inputs: Sequence[jax.Array], rules: Mapping[str, Rule], computes: bool = True
) -> list[jax.Array]:
    """Run a program on tracers: values that depend on none of them are computed now, the rest is traced.

    Calls are inlined; the bodies of loops are kept, with their own calls inlined.

    Args:
        body: the program.
        inputs: tracers or arrays.
        rules: name of a primitive -> its replacement, from operands and parameters to results; None where there is no
            replacement.
        computes: whether known values are computed now.

    Returns:
        The outputs.
    """

    def run(equation: Equation, operands: list[jax.Array]) -> Sequence[jax.Array]:
        results = rules[equation.name](operands, equation.params) if equation.name in rules else None
        if results is not None:
            return results
        if equation.name in AS_IT_IS:
            return operands
        inlined = equation.bodies[0] if equation.name == ONE_DEVICE.name else equation.call
        if inlined is not None:
            return evaluate(inlined, operands, rules, computes)
        if equation.branches and is_concrete(operands[0]):
            number = int(np.clip(operands[0], 0, len(equation.branches) - 1))
            return evaluate(equation.branches[number], operands[1:], rules, computes)
        sizes = (size for result in equation.outputs for size in result.shape)
        if computes and is_concrete(*operands) and all(isinstance(size, int) for size in sizes):
            with jax.ensure_compile_time_eval():
                return equation.bind(operands)
        equation = equation.with_bodies(lambda part, values: evaluate(part, values, rules, computes=False))
        scan = equation.scan
        if scan is None or not scan.options["reverse"]:
            return equation.bind(operands)
        # ONNX only has forward scans: a reversed one is a forward scan between two reversals.
        constants, carry, slices = scan.split(operands)
        flipped = [jnp.flip(x, 0) for x in slices]
        results = equation.replaced(reverse=False).bind([*constants, *carry, *flipped])
        return [*results[: scan.carries], *(jnp.flip(stacked, 0) for stacked in results[scan.carries :])]

    return body.used().run(inputs, run, lambda value: value)


#: An operator of ONNX. Parameters: `operator`, its name; `shape` and `dtype`, of the result; `attributes`, pairs.
OPERATOR = Primitive("jqinject_onnx_operator")

OPERATOR.def_abstract_eval(
    lambda x, *operands, operator, shape, dtype, attributes: x.update(shape=shape, dtype=dtype)
)


# Earlier opsets have both operations only for bytes (and 32-bit integers to dequantize).
OPSET_OF_16_BITS = 21
# The allowed distance of a stored value from an integer, in steps, due to float rounding.
OFF_GRID = 0.01


@dataclass(frozen=True)
class _Grid:
    """Scale and zero point of an array: scalars, or vectors along `axis`."""

    scale: np.ndarray
    zero_point: np.ndarray
    axis: int | None

    def linear(self, operator: str, x: jax.Array, dtype: np.dtype) -> jax.Array:
        """QuantizeLinear of floats, or DequantizeLinear of what is stored.

        Args:
            operator: its name.
            x: the array.
            dtype: of what is stored; 32-bit integers and floats have no zero point.
        """
        operands = [jnp.asarray(self.scale, jnp.float32)]
        if dtype.kind in "iu" and dtype != np.int32:
            operands.append(jnp.asarray(self.zero_point.astype(dtype)))
        attributes = () if self.axis is None else (("axis", self.axis),)
        result = dtype if operator == QUANTIZE else np.dtype(np.float32)
        return OPERATOR.bind(
            x, *operands, operator=operator, shape=x.shape, dtype=result, attributes=attributes
        )

    def fits(self, dtype: np.dtype) -> bool:
        """Whether a dtype can hold the zero point."""
        if dtype == np.int32:
            return not self.zero_point.any()
        return _holds(dtype, self.zero_point) and bool(np.all(self.zero_point == np.rint(self.zero_point)))


def container(bits: int, signed: bool, opset: int) -> np.dtype | None:
    """The dtype that holds integers of this bit width; None if the opset has none."""
    if bits <= 8 or (bits <= 16 and opset >= OPSET_OF_16_BITS):
        return IntGrid(bits, signed).storage
    return np.dtype(np.int32) if bits <= 32 else None


def grid_of(scale: np.ndarray, zero_point: np.ndarray, ndim: int) -> _Grid | None:
    """The grid; None if scale or zero point vary along several axes, which the two operations do not support."""
    shape = np.broadcast_shapes((1,) * ndim, scale.shape, zero_point.shape)
    axes = [axis for axis, size in enumerate(shape) if size > 1]
    if len(axes) > 1:
        return None
    flat = [np.broadcast_to(part, shape).reshape(-1 if axes else ()) for part in (scale, zero_point)]
    return _Grid(flat[0], flat[1], axes[0] if axes else None)


def _holds(dtype: np.dtype, numbers: np.ndarray) -> bool:
    info = np.iinfo(dtype)
    exact = numbers.astype(np.float64)  # float32 cannot represent 2147483647
    return bool(np.all((exact >= info.min) & (exact <= info.max)))


# Ranks of an operand with the batch first and the channels last: one to three spatial axes.
RANKS = (3, 4, 5)


def pool(primitive: Primitive, operator: str) -> Rule:
    """The rule of a reduction over windows.

    Args:
        primitive: the reduction.
        operator: "MaxPool" or "AveragePool".
    """

    def write(operands: Sequence[jax.Array], params: Parameters) -> Sequence[jax.Array]:
        (x,) = operands
        window, strides, padding = (params[n] for n in ("window_dimensions", "window_strides", "padding"))
        dilated = set(params["base_dilation"]) | set(params["window_dilation"]) != {1}
        inner = slice(1, -1)
        spatial = all(window[axis] == strides[axis] == 1 and not any(padding[axis]) for axis in (0, -1))
        if x.ndim not in RANKS or dilated or not spatial:
            return [primitive.bind(x, **params)]
        last = x.ndim - 1
        channels_first = jax.lax.transpose(x, (0, last, *range(1, last)))
        sizes = jax.eval_shape(lambda x: primitive.bind(x, **params), x).shape
        before, after = zip(*padding[inner], strict=True)
        attributes = {"kernel_shape": window[inner], "strides": strides[inner], "pads": (*before, *after)}
        if operator == "AveragePool":
            attributes["count_include_pad"] = 1
        shape, pairs = (sizes[0], sizes[last], *sizes[inner]), tuple(attributes.items())
        y = OPERATOR.bind(
            channels_first, operator=operator, shape=shape, dtype=np.dtype(x.dtype), attributes=pairs
        )
        y = jax.lax.transpose(y, (0, *range(2, last + 1), 1))
        # The reduction is a sum: the mean times the number of elements.
        return [y * np.asarray(math.prod(window), y.dtype) if operator == "AveragePool" else y]

    return write


POOLS = {
    "reduce_window_max": pool(jax.lax.reduce_window_max_p, "MaxPool"),
    "reduce_window_sum": pool(jax.lax.reduce_window_sum_p, "AveragePool"),
}


# --- marks of what quantizers made

Marked: TypeAlias = jax.Array | QuantTensor

#: Operands: what was quantized, its quantized value, scale; of integers zero point and bit width. Result: the value.
#: Parameters: `format` of minifloats, None of integers; `signed`; `narrow_range`; `nearest`, whether the value is
#: `clamp(round(x / scale + zero_point))` and back.
MARK = Primitive("jqinject_quantized")

MARK.def_abstract_eval(lambda x, value, *grid, **facts: value)
# Under vmap the grid has its own batch axis, so the value is an ordinary computation.
batching.primitive_batchers[MARK] = lambda operands, axes, **facts: (operands[1], axes[1])


def mark_quantizers(
    model: nnx.Module, is_stored: Callable[[FrozenParam], bool] = lambda weight: False
) -> None:
    """Let every quantizer and frozen weight of a model mark its results, and every layer contract floats.

    This changes the model in place, including the classes of its modules: pass a private copy.

    Args:
        model: the copy.
        is_stored: whether floats are contracted with a frozen weight as it is stored, instead of its marked values.
    """
    for _, node in nnx.iter_modules(model):
        if isinstance(node, QuantProxyFromInjector) and not _is_delayed(node):
            intercept(node, _marked_call)
        elif isinstance(node, QuantWeightLayer):
            node.contraction = "float"
            if node.frozen is not None:
                intercept(node, _marked_call, "_quantized_weight")
                if is_stored(node.frozen):
                    node.contraction = "auto"
                    intercept(node, _on_floats, "_contracted")


def _marked_call(layer: Any, call: Callable[..., Marked], *args: Any, **kwargs: Any) -> Marked:
    """The result of a proxy, or the frozen weight of a layer, which lies on its grid, marked; see `intercept`."""
    result = call(*args, **kwargs)
    if isinstance(layer, QuantWeightLayer):
        return _marked(result, result, False, False)
    return _marked(args[0], result, bool(layer.is_narrow_range), is_nearest(layer.tensor_quant))


def _on_floats(layer: object, call: Callable[..., object], x: Marked, *args: object) -> object:
    """The contraction of a layer, of the value of a quantized input; see `intercept`."""
    return call(as_array(x), *args)


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
    """A quantized value as stored integers or through both operations; the computation if they cannot express it."""
    x, value, *parts = operands
    if not is_concrete(*parts):
        return value
    scale, zero_point, bits = (np.asarray(part, np.float32) for part in parts)
    dtype = container(int(bits), facts["signed"], opset)
    grid = grid_of(scale, zero_point, x.ndim)
    if is_concrete(value):
        steps = np.asarray(value, np.float32) / scale + zero_point
        integers = np.rint(steps)
        off_grid = not np.all(np.abs(steps - integers) <= OFF_GRID)
        if off_grid or dtype is None or not _holds(dtype, integers):
            return value
        stored = jnp.asarray(integers.astype(dtype))
        if grid is not None and grid.fits(dtype):
            return grid.linear(DEQUANTIZE, stored, dtype).astype(value.dtype)
        unit = _Grid(np.ones((), np.float32), np.zeros((), np.float32), None)
        return ((unit.linear(DEQUANTIZE, stored, dtype) - zero_point) * scale).astype(value.dtype)
    if grid is None or dtype is None or dtype == np.int32 or not grid.fits(dtype):
        return value
    y = value.astype(jnp.float32)  # if not rounded to nearest, it is already on its grid, within its bounds
    if facts["nearest"]:  # QuantizeLinear clamps to the range of the dtype
        y, span = x.astype(jnp.float32), (facts["signed"], facts["narrow_range"], int(bits))
        if min_int(*span) > np.iinfo(dtype).min:
            y = jnp.maximum(y, (np.float32(min_int(*span)) - zero_point) * scale)
        if max_int(*span) < np.iinfo(dtype).max:
            y = jnp.minimum(y, (np.float32(max_int(*span)) - zero_point) * scale)
    return grid.linear(DEQUANTIZE, grid.linear(QUANTIZE, y, dtype), dtype).astype(value.dtype)


# Earlier opsets have no 8-bit floats.
OPSET_OF_FLOAT8 = 19


def _minifloats(operands: Sequence[jax.Array], facts: Parameters, opset: int) -> jax.Array:
    """A known value as stored 8-bit floats and DequantizeLinear, if ONNX has such floats; any other, computed."""
    x, value, scale = operands
    form, dtype = facts["format"], facts["format"].dtype
    if not is_concrete(value, scale):
        return rounded(x.astype(jnp.float32), scale, form).astype(value.dtype) if facts["nearest"] else value
    stated, scale = np.asarray(value), np.asarray(scale, np.float32)
    grid = grid_of(scale, np.zeros((), np.float32), value.ndim)
    if dtype is None or dtype not in float8_cast.FLOAT8_DTYPES or opset < OPSET_OF_FLOAT8 or grid is None:
        return jnp.asarray(stated)
    payload = (stated.astype(np.float32) / scale).astype(dtype)
    if not np.array_equal((payload.astype(np.float32) * scale).astype(value.dtype), stated, equal_nan=True):
        return jnp.asarray(stated)
    return grid.linear(DEQUANTIZE, jnp.asarray(payload), dtype).astype(value.dtype)


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
