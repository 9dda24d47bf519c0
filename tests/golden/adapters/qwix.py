"""Drives Qwix's contractions: of quantized arrays, and with quantized gradients.

An operand's largest magnitude lies on a tie (127.5 steps), which goes either way by the last bit of the scale, and in
the reference differs from channel to channel. The manifest accepts one step there: every driver also returns, as
`allowed`, how much an output changes if all the ties go the other way.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jqinject.dot as d
from jqinject.core import CodebookQuant
from jqinject.dot.geometry.dimensions import Dimensions
from jqinject.inject import Binding
from jqinject.ops import NF4
from jqinject.quant import aqt
from jqinject.quant_tensor import IntQuantTensor
from tests.golden._config import Settings, meaning, reading
from tests.golden.adapters.aqt_stochastic import drawn_noise
from tests.golden.adapters.qwix_arrays import ScaleOver, form_of, is_microscaled, range_of
from tests.ranges import in_range

Case = dict[str, Any]
Arrays = dict[str, np.ndarray]
PLAIN = [[[1], [0]], [[], []]]
BELOW, ABOVE = 1 - 1e-6, 1 + 1e-6


@dataclass(frozen=True)
class Nudged:
    """A range that is a little off."""

    calibration: Any
    factor: float

    def __call__(self, x: jax.Array, axes: Any, names: Any = ()) -> Any:
        found = self.calibration(x, axes)
        return found._replace(high=found.high * self.factor)


FLOATS = {name: jnp.dtype(name) for name in ("float8_e4m3fn", "float8_e5m2")}


def driver(case: Case) -> Callable[..., dict[str, Any]]:
    """The function that drives a case."""
    group, given = case["id"].split("/")[0], case["config"]
    if group == "qt_core":
        return noise if "n_keys" in given else with_gradients
    meaning({"ops": None}, group, "a group of contractions")
    if "group_sizes" in case["inputs"]:
        return ragged
    if "eqn" in given:
        return einsum
    if isinstance(given.get("dimension_numbers", [[]])[0], str):
        return conv
    return subchannel if "tile_size" in given else dot


def bits_of(qtype: str | None) -> Any:
    """The `bits` of an operand."""
    if qtype is None or qtype.startswith("int"):
        return None if qtype is None else int(qtype.removeprefix("int"))
    return meaning(FLOATS, qtype, "a type")


def quantized(x: jax.Array, qtype: str | None, axes: list[int], nudge: float, method: str = "absmax") -> Any:
    """A QuantTensor with one scale for each index of `axes`, by Qwix's rules; the array itself for no type."""
    if qtype is None:
        return x
    shared = [axis for axis in range(x.ndim) if axis not in axes]
    if is_microscaled(qtype):
        made = in_range(range_of(method), channelwise_axes=axes, **form_of(qtype))(x)
        return made.quant_tensor(training=False)
    name, *numbers = method.split(",")
    factors = [float(number) for number in numbers]
    ranged = name == "minmax" or (name == "fixed" and len(factors) == 2 and sum(factors) != 0)
    if ranged:
        return _affine(
            x, int(qtype.removeprefix("int")), shared, None if name == "minmax" else factors, nudge
        )
    if qtype == "nf4":
        return CodebookQuant(ScaleOver(method, tuple(axes)), NF4)(x).quant_tensor(training=False)
    if x.dtype == jnp.bfloat16:  # Qwix divides in bfloat16
        bound = 2.0 ** (bits_of(qtype) - 1)
        scale = jnp.max(jnp.abs(x), shared, keepdims=True) / jnp.bfloat16(bound - 0.5)
        payload = jnp.clip(jnp.round(x / scale), -bound, bound - 1).astype(jnp.int8)
        return IntQuantTensor.from_int(payload, scale.astype(jnp.float32), dtype=x.dtype)
    made = in_range(Nudged(range_of(method), nudge), channelwise_axes=axes, **form_of(qtype))(x)
    return made.quant_tensor(training=False)


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


class Operand(NamedTuple):
    """One operand of a contraction, as a case describes it."""

    qtype: str | None
    axes: list[int]
    method: str


def operands_of(given: Settings, channels: int = 1) -> tuple[Operand, Operand]:
    """Both operands; `channels` is the axis of the second one's outputs."""
    lhs, rhs = (
        Operand(
            given.take(f"{side}_qtype"),
            given.take(f"{side}_channelwise", axes),
            given.take(f"{side}_method", "absmax"),
        )
        for side, axes in (("lhs", [0]), ("rhs", [channels]))
    )
    for operand in (lhs, rhs):
        range_of(operand.method)
        if operand.qtype not in (None, "nf4") and not is_microscaled(str(operand.qtype)):
            bits_of(operand.qtype)
    return lhs, rhs


def operands(case: Case, inputs: Arrays, given: tuple[Operand, Operand]) -> list[Any]:
    found = []
    for side, operand in zip(("lhs", "rhs"), given, strict=True):
        x = jnp.asarray(inputs[side], case["inputs"][side]["dtype"])
        found.append(with_ties(x, operand.qtype, operand.axes, method=operand.method))
    return found


def dot_of(config: dict[str, Any]) -> tuple[tuple[Operand, Operand], Any, Any]:
    """The operands, the dimension numbers, and the dtype that is asked for."""
    with reading(config, "a contraction") as given:
        dtype = given.take("preferred_element_type", None)
        return operands_of(given), given.take("dimension_numbers", PLAIN), dtype


def dot(case: Case, inputs: Arrays) -> dict[str, Any]:
    both, numbers, dtype = dot_of(case["config"])
    found = [operand.qtype for operand in both if operand.qtype and is_microscaled(operand.qtype)]
    if found:
        return _in_tiles(inputs, both, 16 if found[0] == "nvfp4" else 32)
    return contracted(
        lambda a, b: d.dot_general(a, b, numbers, preferred_element_type=dtype),
        *operands(case, inputs, both),
    )


def einsum_of(config: dict[str, Any]) -> tuple[tuple[Operand, Operand], str]:
    """The operands and the equation."""
    with reading(config, "an einsum") as given:
        return operands_of(given), given.take("eqn")


def einsum(case: Case, inputs: Arrays) -> dict[str, Any]:
    both, eqn = einsum_of(case["config"])
    return contracted(lambda a, b: d.einsum(eqn, a, b), *operands(case, inputs, both))


def ragged_of(config: dict[str, Any]) -> tuple[tuple[Operand, Operand], Any]:
    """The operands, rows of x and a matrix for each expert, and the dtype that is asked for."""
    with reading(config, "a ragged contraction") as given:
        return operands_of(given, channels=2), given.take("preferred_element_type", None)


def ragged(case: Case, inputs: Arrays) -> dict[str, Any]:
    both, dtype = ragged_of(case["config"])
    sizes = jnp.asarray(inputs["group_sizes"])
    numbers = jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
    return contracted(
        lambda a, b: d.ragged_dot_general(a, b, sizes, numbers, preferred_element_type=dtype),
        *operands(case, inputs, both),
    )


def conv_of(config: dict[str, Any]) -> tuple[tuple[Operand, Operand], dict[str, Any]]:
    """The operands, and the convolution's own arguments."""
    with reading(config, "a convolution") as given:
        numbers = given.take("dimension_numbers")
        arguments = {"dimension_numbers": tuple(numbers), "padding": given.take("padding")}
        arguments["window_strides"] = given.take("strides", [1] * (len(numbers[0]) - 2))
        names = ("lhs_dilation", "rhs_dilation", "batch_group_count")
        arguments |= {name: given.take(name) for name in names if name in given}
        arguments["feature_group_count"] = given.take("groups", 1)
        return operands_of(given), arguments


def conv(case: Case, inputs: Arrays) -> dict[str, Any]:
    both, arguments = conv_of(case["config"])
    return contracted(lambda a, b: d.conv_general_dilated(a, b, **arguments), *operands(case, inputs, both))


def subchannel_of(config: dict[str, Any]) -> tuple[tuple[Operand, Operand], float, int | None]:
    """The operands, the tiles' length or share of the summed axis, and the length of that."""
    with reading(config, "a contraction in tiles") as given:
        given.take("note", "")  # prose
        return operands_of(given), given.take("tile_size"), given.take("contraction", None)


def subchannel(case: Case, inputs: Arrays) -> dict[str, Any]:
    both, size, length = subchannel_of(case["config"])
    assert inputs["lhs"].shape[1] == (length or inputs["lhs"].shape[1])
    return _in_tiles(inputs, both, size)


def _in_tiles(inputs: Arrays, both: tuple[Operand, Operand], size: float) -> dict[str, Any]:
    """The summed axis cut in tiles: an axis more, along which the scale varies."""
    lhs, rhs = jnp.asarray(inputs["lhs"]), jnp.asarray(inputs["rhs"])
    length = lhs.shape[1]
    size = round(length * size) if isinstance(size, float) else size
    left = with_ties(lhs.reshape(-1, length // size, size), both[0].qtype, [0, 1], method=both[0].method)
    right = with_ties(rhs.reshape(length // size, size, -1), both[1].qtype, [0, 2], method=both[1].method)
    return contracted(lambda a, b: d.dot_general(a, b, (((1, 2), (0, 1)), ((), ()))), left, right)


def operand_of(given: Settings, side: str, clipping: bool) -> Any:
    """An operand of the forward contraction; None for float."""
    bits = bits_of(given.take(f"{side}_qtype", None))
    method = given.take(f"{side}_calibration_method", "absmax")
    name, *numbers = method.split(",")
    # A range that is the data's own, or wider, is taken to clip nothing.
    within = name == "absmax" and (not numbers or float(numbers[0]) >= 1)
    whole = given.take(f"{side}_disable_channelwise_axes", False)
    settings = {"calibration": range_of(method), "clip_gradient": clipping and not within}
    return None if bits is None else QWIX.let(bits=bits, calibration_axes=_axes_of(whole), **settings)


QWIX = aqt.OperandInjector.let(narrow_range=False)  # -2^(bits-1) is one of Qwix's integers


def _axes_of(whole: bool) -> str:
    return "tensor" if whole else "contracting"


def _backward(given: Settings, side: str, product: str, other: str, reused: bool) -> dict[str, Any]:
    """The operands of the contraction that gives the gradient of an operand.

    Args:
        given: the config.
        side: of the gradient.
        product: its name in a scheme.
        other: that of the operand beside the gradient.
        reused: whether Qwix takes the forward pass's numbers as they are, and quantizes the gradient alone.
    """
    residual, bits = (bits_of(given.take(f"{side}_{name}_qtype", None)) for name in ("residual", "grad"))
    axes = _axes_of(given.take(f"{side}_grad_disable_channelwise_axes", False))
    return {
        f"{product}_grad": None if bits is None else QWIX.let(bits=bits, calibration_axes=axes),
        other: None if reused or residual is None else QWIX.let(bits=residual),
        f"{product}_use_fwd_quant": reused,
        f"{product}_tile_size": _pieces(given.take(f"{side}_tile_size", None)),
    }


def _pieces(tile: float | None) -> d.LocalAqt | None:
    """Tiles by their length, or by the part of the axis that they are."""
    if tile is None:
        return None
    return (
        d.LocalAqt(round(1 / tile), None, "last")
        if isinstance(tile, float)
        else d.LocalAqt(None, tile, "last")
    )


def injector_of(config: Mapping[str, Any]) -> type:
    """The configuration that the arguments of Qwix's own describe."""
    with reading(config, "a contraction with gradients") as given:
        clipping = not given.take("disable_gradient_clipping", False)
        tile = given.take("tile_size", None)
        lhs, rhs = (operand_of(given, side, clipping) for side in ("lhs", "rhs"))
        original = given.take("use_original_residuals", False)
        reused = tile is None and not original
        # A residual that was not quantized forward is a float, which may have numbers of its own.
        dgrad = _backward(given, "dlhs", "dgrad", "dgrad_rhs", reused and rhs is not None)
        wgrad = _backward(given, "drhs", "wgrad", "wgrad_lhs", reused and lhs is not None)
    return d.Scheme.let(fprop_lhs=lhs, fprop_rhs=rhs, tile_size=_pieces(tile), **dgrad, **wgrad)


class Gradients(NamedTuple):
    """What a case of group `qt_core` says."""

    config: dict[str, Any]
    numbers: Any
    injector: type


def gradients_of(config: dict[str, Any]) -> Gradients:
    rest = {name: value for name, value in config.items() if name != "dimension_numbers"}
    return Gradients(rest, config.get("dimension_numbers", PLAIN), injector_of(rest))


def with_gradients(case: Case, inputs: Arrays) -> dict[str, Any]:
    config, numbers, injector = gradients_of(case["config"])
    lhs, rhs, g = (jnp.asarray(inputs[name]) for name in ("lhs", "rhs", "g"))
    y, pull = jax.vjp(lambda a, b: d.dot_general(a, b, numbers, config=injector), lhs, rhs)
    dlhs, drhs = pull(g)
    found = {"out": y, "dlhs": dlhs, "drhs": drhs}
    return found | {"allowed": _allowed(config, inputs, injector, numbers)}


def _allowed(given: dict[str, Any], inputs: Arrays, injector: Any, numbers: Any) -> dict[str, Any]:
    """What ties of the forward operands and of the gradient may change."""
    lhs, rhs, g = (jnp.asarray(inputs[name]) for name in ("lhs", "rhs", "g"))
    whole = lhs.shape, rhs.shape
    dims = Dimensions.of(lhs.ndim, rhs.ndim, numbers)
    sums = {
        "dlhs": tuple(dims.out.index(dims.rhs[axis]) for axis in dims.rhs_free),
        "drhs": tuple(dims.out.index(dims.lhs[axis]) for axis in dims.lhs_free),
    }
    if "tile_size" in given:  # the tiles' ties, found in operands that are laid out in tiles
        parts = lhs.shape[-1] // given["tile_size"]
        tiled = lhs.reshape(*lhs.shape[:-1], parts, -1), rhs.reshape(parts, -1, rhs.shape[-1])
        lhs, rhs = tiled
        numbers = (((lhs.ndim - 2, lhs.ndim - 1), (0, 1)), ((), ()))
        shared = {"lhs": (lhs.ndim - 1,), "rhs": (1,)}
    else:
        (left, right), _ = numbers
        shared = {
            side: tuple(range(x.ndim)) if given.get(f"{side}_disable_channelwise_axes") else tuple(axes)
            for side, x, axes in (("lhs", lhs, left), ("rhs", rhs, right))
        }
    left, right = (
        _quantizer_ties(getattr(injector, f"fprop_{side}"), x, shared[side])
        for side, x in (("lhs", lhs), ("rhs", rhs))
    )
    gradients = {"dlhs": injector.dgrad_grad, "drhs": injector.wgrad_grad}
    of_g = [_quantizer_ties(gradients[side], g, axes) for side, axes in sums.items()]
    (y, pull), reach = jax.vjp(lambda a, b: _plain(a, b, numbers), left[0], right[0]), []
    widest, wider = jax.vjp(lambda a, b: _plain(a, b, numbers), left[0] + left[1], right[0] + right[1])
    for place in range(2):
        most, ties = of_g[place]
        more = wider(most + ties)[place] - pull(most)[place]
        reach.append(more.reshape(whole[place]))
    return {"out": widest - y, "dlhs": reach[0], "drhs": reach[1]}


def _plain(lhs: jax.Array, rhs: jax.Array, numbers: Any) -> jax.Array:
    return jax.lax.dot_general(lhs, rhs, numbers)


def _quantizer_ties(operand: Any, x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """The magnitudes of a quantized operand, and how far its ties reach."""
    if operand is None:
        return jnp.abs(x), jnp.zeros_like(x)
    below, above = (
        Binding(operand, {"calibration": Nudged(operand.calibration, nudge), "shared_axes": axes}).resolve(
            "tensor_quant"
        )(x)
        for nudge in (BELOW, ABOVE)
    )
    return jnp.maximum(jnp.abs(x), jnp.abs(below.value)), _ties(below.value, above.value, below.scale)


BITS = {"uniform": 32, "low_bit_uniform": 16}


def noise_of(config: dict[str, Any]) -> tuple[int, tuple[int, ...], int]:
    """The random bits of a number, the shape that noise is drawn in, and how often."""
    with reading(config, "noise") as given:
        given.take("channelwise_noise_axes")  # moments are the same, however many numbers share the noise
        return given.choose("method", BITS), tuple(given.take("shape")), given.take("n_keys")


def noise(case: Case, inputs: Arrays) -> dict[str, Any]:
    bits, shape, count = noise_of(case["config"])
    drawn = drawn_noise(jax.random.split(jax.random.key(3), count), shape, bits)
    return {"mean": drawn.mean(), "var": drawn.var(), "min": drawn.min(), "max": drawn.max()}
