"""Drives Qwix's contractions: of quantized arrays, and with quantized gradients.

An operand's largest magnitude lies on a tie (127.5 steps), which goes either way by the last bit of the scale, and in
the reference differs from channel to channel. The manifest accepts one step there: every driver also returns, as
`allowed`, how much an output changes if all the ties go the other way.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jqinject.dot as d
from jqinject.core import CalibratedQuant, CodebookQuant
from jqinject.dot.dimensions import Dimensions
from jqinject.ops import NF4
from jqinject.quant_tensor import FloatQuantTensor, IntQuantTensor
from tests.golden.adapters.qwix_arrays import LargestOver, form_of, is_microscaled, method_of

Case = dict[str, Any]
Arrays = dict[str, np.ndarray]
PLAIN = [[[1], [0]], [[], []]]
BELOW, ABOVE = 1 - 1e-6, 1 + 1e-6


@dataclass(frozen=True)
class Int:
    """Qwix's integers: -2^(bits-1) is one of them."""

    bits: int
    clip_gradient: bool = False

    @property
    def bound(self) -> float:
        return 2.0 ** (self.bits - 1) - 0.5

    def encode(self, steps: jax.Array, noise: Any = None) -> jax.Array:
        clipped = jnp.clip(jnp.round(steps), -self.bound - 0.5, self.bound - 0.5)
        return clipped.astype(jnp.int4 if self.bits == 4 else jnp.int8)

    def passes_gradient(self, steps: jax.Array) -> jax.Array | None:
        return jnp.abs(steps) <= self.bound if self.clip_gradient else None


@dataclass(frozen=True)
class Nudged:
    """A calibration whose scale is a little off."""

    calibration: Any
    factor: float

    def scale(self, x: jax.Array, axes: Any, numerics: Any) -> jax.Array:
        return self.calibration.scale(x, axes, numerics) * self.factor


def driver(case: Case) -> Callable[..., dict[str, Any]]:
    """The function that drives a case."""
    group, name = case["id"].split("/")
    if group == "qt_core":
        return noise if name.startswith("sr-noise") else with_gradients
    kinds = {"conv": conv, "eins": einsum, "subc": subchannel}
    return kinds.get(name[:4], dot)


def numerics_of(qtype: str | None, clip_gradient: bool = False) -> Any:
    if qtype is None:
        return None
    if qtype.startswith("int"):
        return Int(int(qtype.removeprefix("int")), clip_gradient)
    return d.Float8Numerics(jnp.dtype(qtype), clip_gradient)


def quantized(x: jax.Array, qtype: str | None, axes: list[int], nudge: float, method: str = "absmax") -> Any:
    """A QuantTensor with one scale for each index of `axes`, by Qwix's rules; the array itself for no type."""
    if qtype is None:
        return x
    shared = [axis for axis in range(x.ndim) if axis not in axes]
    if is_microscaled(qtype):
        made = CalibratedQuant(method_of(method), channelwise_axes=axes, **form_of(qtype))(x)
        return made.quant_tensor(signed=True, training=False)
    name, *numbers = method.split(",")
    factors = [float(number) for number in numbers]
    ranged = name == "minmax" or (name == "fixed" and len(factors) == 2 and sum(factors) != 0)
    if ranged:
        return _affine(
            x, int(qtype.removeprefix("int")), shared, None if name == "minmax" else factors, nudge
        )
    if qtype == "nf4":
        return CodebookQuant(LargestOver(tuple(axes)), NF4)(x).quant_tensor(signed=True, training=False)
    numerics = numerics_of(qtype)
    calibration = CALIBRATIONS[name](*factors)
    if x.dtype == jnp.bfloat16:  # Qwix divides in bfloat16
        scale = jnp.max(jnp.abs(x), shared, keepdims=True) / jnp.bfloat16(numerics.bound)
        payload = numerics.encode(x / scale)
        return IntQuantTensor.from_int(payload, scale.astype(jnp.float32), dtype=x.dtype)
    found = d.OperandQuantizer(numerics, Nudged(calibration, nudge)).quantize(x, shared)
    if isinstance(numerics, d.Float8Numerics):
        return FloatQuantTensor.from_payload(found.payload, found.scale, dtype=x.dtype)
    return IntQuantTensor.from_int(found.payload, found.scale, bit_width=numerics.bits, dtype=x.dtype)


def _affine(
    x: jax.Array, bits: int, shared: list[int], fixed: list[float] | None, nudge: float
) -> IntQuantTensor:
    """An operand with a zero point: its range, which 0 is in, or a fixed one."""
    lowest, highest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    if fixed is None:
        low = jnp.minimum(x.min(shared, keepdims=True), 0)
        high = jnp.maximum(x.max(shared, keepdims=True), 0)
    else:
        low, high = (jnp.full((1,) * x.ndim, end) for end in fixed)
    scale = (high - low) / (highest - lowest)
    zero = jnp.round(lowest - low / scale)
    integers = jnp.clip(jnp.round(x / (scale * nudge) + zero), lowest, highest)
    return IntQuantTensor.from_int(integers.astype(jnp.int8), scale, zero, bits)


def with_ties(x: jax.Array, *how: Any, method: str = "absmax") -> tuple[Any, jax.Array]:
    """A quantized operand, and how far its ties reach."""
    below, above = (quantized(x, *how, nudge, method) for nudge in (BELOW, ABOVE))
    return below, _ties(jnp.asarray(below), jnp.asarray(above), getattr(below, "scale", 1.0))


def _ties(below: jax.Array, above: jax.Array, scale: Any) -> jax.Array:
    apart = jnp.abs(below.astype(jnp.float32) - above.astype(jnp.float32))
    return jnp.where(apart > scale / 2, apart, 0.0)


def contracted(contract: Callable[[Any, Any], Any], lhs: Any, rhs: Any) -> dict[str, Any]:
    """The output of two operands with their ties, and what the ties may change."""
    return {"out": contract(lhs[0], rhs[0]), "allowed": {"out": _reach(contract, lhs, rhs)}}


def _reach(contract: Callable[[Any, Any], Any], lhs: Any, rhs: Any) -> Any:
    (left, left_ties), (right, right_ties) = lhs, rhs
    left, right = (jnp.abs(jnp.asarray(x)).astype(jnp.float32) for x in (left, right))
    return contract(left + left_ties, right + right_ties) - contract(left, right)


def operands(case: Case, inputs: Arrays) -> list[Any]:
    given = case["config"]
    found = []
    for side, default in (("lhs", [0]), ("rhs", [1])):
        x = jnp.asarray(inputs[side], case["inputs"][side]["dtype"])
        axes = given.get(f"{side}_channelwise", default)
        method = given.get(f"{side}_method", "absmax")
        found.append(with_ties(x, given[f"{side}_qtype"], axes, method=method))
    return found


def dot(case: Case, inputs: Arrays) -> dict[str, Any]:
    given = case["config"]
    found = [qtype for qtype in (given["lhs_qtype"], given["rhs_qtype"]) if qtype and is_microscaled(qtype)]
    if found:
        tile = {"tile_size": 16 if found[0] == "nvfp4" else 32}
        return subchannel({**case, "config": {**tile, **given}}, inputs)
    numbers = given.get("dimension_numbers", PLAIN)
    dtype = given.get("preferred_element_type")
    return contracted(
        lambda a, b: d.dot_general(a, b, numbers, preferred_element_type=dtype), *operands(case, inputs)
    )


def einsum(case: Case, inputs: Arrays) -> dict[str, Any]:
    return contracted(lambda a, b: d.einsum(case["config"]["eqn"], a, b), *operands(case, inputs))


def conv(case: Case, inputs: Arrays) -> dict[str, Any]:
    given = case["config"]
    strides = given.get("strides", [1] * (inputs["lhs"].ndim - 2))
    numbers = tuple(given["dimension_numbers"])
    names = ("lhs_dilation", "rhs_dilation", "feature_group_count", "batch_group_count")
    options = {name: given[name] for name in names if name in given}
    return contracted(
        lambda a, b: d.conv_general_dilated(
            a, b, strides, given["padding"], dimension_numbers=numbers, **options
        ),
        *operands(case, inputs),
    )


def subchannel(case: Case, inputs: Arrays) -> dict[str, Any]:
    """The summed axis cut in tiles: an axis more, along which the scale varies."""
    given = case["config"]
    lhs, rhs = jnp.asarray(inputs["lhs"]), jnp.asarray(inputs["rhs"])
    size = given["tile_size"]
    length = lhs.shape[1]
    size = round(length * size) if isinstance(size, float) else size
    left = with_ties(lhs.reshape(-1, length // size, size), given["lhs_qtype"], [0, 1])
    right = with_ties(rhs.reshape(length // size, size, -1), given["rhs_qtype"], [0, 2])
    return contracted(lambda a, b: d.dot_general(a, b, (((1, 2), (0, 1)), ((), ()))), left, right)


CALIBRATIONS = {
    "absmax": lambda factor=1.0: d.AbsMaxCalibration(float(factor)),
    "rms": lambda factor: d.AbsMeanCalibration(float(factor), 2.0, count_zeros=True),
    "fixed": lambda *ends: d.ConstantCalibration(float(ends[-1])),
}


def forward_operand(given: dict[str, Any], side: str) -> type:
    name, *factors = given.get(f"{side}_calibration_method", "absmax").split(",")
    per_tensor = given.get(f"{side}_disable_channelwise_axes")
    # A range that is the data's own, or wider, is taken to clip nothing.
    within = name == "absmax" and (not factors or float(factors[0]) >= 1)
    clips = not within and not given.get("disable_gradient_clipping")
    return d.OperandInjector.let(
        numerics=numerics_of(given.get(f"{side}_qtype"), clips),
        calibration=CALIBRATIONS[name](*factors),
        calibration_axes="tensor" if per_tensor else "contracting",
    )


def injector_of(given: dict[str, Any]) -> type:
    tile = given.get("tile_size")
    forward = d.ContractionInjector.let(
        lhs=forward_operand(given, "lhs"),
        rhs=forward_operand(given, "rhs"),
        local_aqt=None if tile is None else d.LocalAqt(None, tile, "last"),
    )

    def backward(side: str) -> type:
        # Qwix takes the forward pass's numbers as they are, and quantizes the gradient alone.
        reused = tile is None and not given.get("use_original_residuals")
        other = d.OperandInjector.let(bits=None, use_fwd_quant=reused)
        gradient = d.OperandInjector.let(numerics=numerics_of(given.get(f"{side}_grad_qtype")))
        return d.ContractionInjector.let(lhs=gradient, rhs=other)

    return d.DotGeneralInjector.let(
        forward=forward, backward_lhs=backward("dlhs"), backward_rhs=backward("drhs")
    )


def with_gradients(case: Case, inputs: Arrays) -> dict[str, Any]:
    given = case["config"]
    numbers = given.get("dimension_numbers", PLAIN)
    lhs, rhs, g = (jnp.asarray(inputs[name]) for name in ("lhs", "rhs", "g"))
    general = injector_of(given).dot_general
    y, pull = jax.vjp(lambda a, b: general(a, b, numbers), lhs, rhs)
    dlhs, drhs = pull(g)
    found = {"out": y, "dlhs": dlhs, "drhs": drhs}
    return found | {"allowed": _allowed(case, inputs, general, numbers)}


def _allowed(case: Case, inputs: Arrays, general: d.QuantizedDotGeneral, numbers: Any) -> dict[str, Any]:
    """What ties of the forward operands and of the gradient may change."""
    given = case["config"]
    lhs, rhs, g = (jnp.asarray(inputs[name]) for name in ("lhs", "rhs", "g"))
    whole = lhs.shape, rhs.shape
    dims = Dimensions.of(lhs.ndim, rhs.ndim, numbers)
    sums = {"dlhs": dims.gradient_of_lhs()[0].lhs_contract, "drhs": dims.gradient_of_rhs()[0].lhs_contract}
    if "tile_size" in given:  # the tiles' ties, found in operands that are laid out in tiles
        parts = lhs.shape[-1] // given["tile_size"]
        tiled = lhs.reshape(*lhs.shape[:-1], parts, -1), rhs.reshape(parts, -1, rhs.shape[-1])
        lhs, rhs = tiled
        numbers = (((lhs.ndim - 2, lhs.ndim - 1), (0, 1)), ((), ()))
        shared = {"lhs": (lhs.ndim - 1,), "rhs": (1,)}
    else:
        (left, right), _ = numbers
        per_tensor = given.get("lhs_disable_channelwise_axes")
        shared = {
            "lhs": tuple(range(lhs.ndim)) if per_tensor else tuple(left),
            "rhs": tuple(range(rhs.ndim)) if per_tensor else tuple(right),
        }
    left, right = (
        _quantizer_ties(getattr(general.fwd, f"{side}_quantizer"), x, shared[side])
        for side, x in (("lhs", lhs), ("rhs", rhs))
    )
    of_g = [_quantizer_ties(getattr(general, side).lhs_quantizer, g, axes) for side, axes in sums.items()]
    (y, pull), reach = jax.vjp(lambda a, b: _plain(a, b, numbers), left[0], right[0]), []
    widest, wider = jax.vjp(lambda a, b: _plain(a, b, numbers), left[0] + left[1], right[0] + right[1])
    for place in range(2):
        most, ties = of_g[place]
        more = wider(most + ties)[place] - pull(most)[place]
        reach.append(more.reshape(whole[place]))
    return {"out": widest - y, "dlhs": reach[0], "drhs": reach[1]}


def _plain(lhs: jax.Array, rhs: jax.Array, numbers: Any) -> jax.Array:
    return jax.lax.dot_general(lhs, rhs, numbers)


def _quantizer_ties(
    quantizer: d.OperandQuantizer, x: jax.Array, axes: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """The magnitudes of a quantized operand, and how far its ties reach."""
    if quantizer.numerics is None:
        return jnp.abs(x), jnp.zeros_like(x)
    below, above = (
        replace(quantizer, calibration=Nudged(quantizer.calibration, nudge)).quantize(x, axes)
        for nudge in (BELOW, ABOVE)
    )
    values = below.dequantize(), above.dequantize()
    return jnp.maximum(jnp.abs(x), jnp.abs(values[0])), _ties(*values, below.scale)


def noise(case: Case, inputs: Arrays) -> dict[str, Any]:
    given = case["config"]
    draw = {"uniform": d.JaxUniform, "low_bit_uniform": d.RandomCenteredUniform}[given["method"]]()
    keys = jax.random.split(jax.random.key(3), given["n_keys"])
    drawn = np.asarray(jax.vmap(lambda key: draw(tuple(given["shape"]), key))(keys))
    return {"mean": drawn.mean(), "var": drawn.var(), "min": drawn.min(), "max": drawn.max()}
