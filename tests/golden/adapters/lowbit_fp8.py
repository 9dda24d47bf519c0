"""Drives FP8 by users' quantizers and the ready-made schemes: TransformerEngine's current and delayed scaling and
MXFP8, torchao's dynamic scaling and int8 rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core.clamping import Identity
from jqinject.dot import QDotGeneral, Scheme
from jqinject.nn import QuantIdentity
from jqinject.quant import (
    Fp8CurrentTraining,
    Fp8e4m3ActPerTensorCurrent,
    Fp8e4m3ActPerTensorDelayed,
    Fp8TrainingAct,
    Fp8TrainingGrad,
    Fp8TrainingWeight,
    Int8DynamicActPerRowFloat,
    MXFP8e5m2TrainingGrad,
    MXFP8Training,
    MXFP8TrainingAct,
)
from tests.golden._config import CannotDrive, reading
from tests.golden.adapters.lowbit_mx import DATA, DTYPES, bits_of, exponents_of, quantized

Arrays = dict[str, np.ndarray]
FORMATS = {name: getattr(jnp, name) for name in ("float8_e4m3fn", "float8_e5m2")}
SHORT = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}
LARGEST = {np.dtype(dtype): float(jnp.finfo(dtype).max) for dtype in FORMATS.values()}
X_W = (((1,), (0,)), ((), ()))


def _current(q: Any, power_of_two: bool, eps: float, dtype: Any = jnp.float32) -> Any:
    class Quantizer(Fp8e4m3ActPerTensorCurrent):
        q_dtype = q
        by_factor = True
        power_of_two_factor = power_of_two
        scaling_min_val = eps
        dq_dtype = dtype
        scaling_init = LARGEST[np.dtype(q)]  # a tensor of zeros has the factor 1

    return Quantizer


def _factor(scale: Any) -> np.ndarray:
    """The inverse of a scale, whose float32 number has one neighbour at most that could have been meant."""
    return np.float32(1) / np.asarray(scale, np.float32)


def te_current_of(config: dict[str, Any]) -> tuple[Any, Any]:
    """The quantizer of TransformerEngine's current scaling, and the dtype of its input."""
    with reading(config, "te_current") as given:
        given.choose("data", dict.fromkeys(DATA))
        given.take("seed")
        given.take("shape")
        dtype = given.choose("input_dtype", DTYPES)
        q = given.choose("fp8", FORMATS)
        return _current(q, given.take("power_of_two_scale"), given.take("eps")), dtype


def te_current(case: dict[str, Any], inputs: Arrays) -> dict[str, Any]:
    """Codes of the tensor and its transpose, the scale and its inverse."""
    quantizer, dtype = te_current_of(case["config"])
    x = inputs["x"]
    tensor, payload = quantized(quantizer, x, dtype)
    transposed = quantized(quantizer, x.T, dtype)
    eps = case["config"]["eps"]
    return {
        "amax": np.maximum(np.abs(x).max(), np.float32(eps))[None],
        "bits": bits_of(tensor, payload, x),
        "bits_t": bits_of(*transposed, x.T),
        "value": payload.astype(np.float32),
        "dequantized": np.asarray(tensor.value, np.float32),
        "scale": _factor(tensor.scale)[None],
        "scale_inv": np.asarray(tensor.scale)[None],
    }


def te_current_gemm_of(config: dict[str, Any]) -> type[Scheme]:
    """The scheme of TransformerEngine's products by current scaling."""
    with reading(config, "te_current products") as given:
        for name in ("k", "m", "n", "seed"):
            given.take(name)
        x, w, g = (given.choose(name, SHORT) for name in ("x", "w", "g"))
        power = given.take("power_of_two_scale")
    of_both = {"power_of_two_factor": power}
    gradient = Fp8TrainingGrad.let(q_dtype=g, **of_both)
    return Fp8CurrentTraining.let(
        fprop_lhs=Fp8TrainingAct.let(q_dtype=x, **of_both),
        fprop_rhs=Fp8TrainingWeight.let(q_dtype=w, **of_both),
        dgrad_grad=gradient,
        wgrad_grad=gradient,
    )


def products(scheme: Any, x: np.ndarray, w: np.ndarray, g: np.ndarray) -> tuple[np.ndarray, ...]:
    """`y = x w` and its gradients for the cotangent `g`, compiled."""
    op = QDotGeneral(scheme)

    @jax.jit
    def run(x: jax.Array, w: jax.Array, g: jax.Array) -> Any:
        y, pull = jax.vjp(lambda x, w: op(x, w, X_W), x, w)
        return (y, *pull(g))

    return tuple(map(np.asarray, run(x, w, g)))


def te_current_gemm(case: dict[str, Any], inputs: Arrays) -> dict[str, Any]:
    """The products, of weights that lie as in torch, and the codes that went into them."""
    scheme = te_current_gemm_of(case["config"])
    x, w, g = inputs["x"], inputs["w"], inputs["g"]
    y, dx, dw = products(scheme, x, w.T, g)
    found: dict[str, Any] = {"y": y, "dx": dx, "dw": dw.T}
    for name, operand, source in (
        ("x", scheme.fprop_lhs, x),
        ("w", scheme.fprop_lhs.let(q_dtype=scheme.fprop_rhs.q_dtype), w),
        ("g", scheme.fprop_lhs.let(q_dtype=scheme.dgrad_grad.q_dtype), g),
    ):
        tensor, payload = quantized(operand, source, jnp.float32)
        found |= {
            f"{name}.bits": bits_of(tensor, payload),
            f"{name}.scale_inv": np.asarray(tensor.scale)[None],
        }
    return found


MODES = {"MXFP8_1D_SCALING": "mx", "CURRENT_TENSOR_SCALING": "current"}


def te_jax_of(config: dict[str, Any]) -> tuple[str, Any, Any]:
    """The kind of scaling of TransformerEngine's JAX quantizers, the quantizer, and the dtype of its input."""
    with reading(config, "te_jax") as given:
        given.choose("data", dict.fromkeys(DATA))
        given.choose("flatten_axis", {-1: None})
        given.take("seed")
        given.take("shape")
        dtype = given.choose("input_dtype", DTYPES)
        q = given.choose("q_dtype", FORMATS)
        mode = given.choose("mode", MODES)
    return mode, _te_jax_quantizer(mode, q, dtype), dtype


def _te_jax_quantizer(mode: str, q: Any, dtype: Any) -> Any:
    if mode == "current":
        return _current(q, False, 0.0, dtype)  # what is dequantized has the input's dtype
    return E5M2_ROWS if q is jnp.float8_e5m2 else MXFP8TrainingAct


E5M2_ROWS = MXFP8TrainingAct.let(
    exponent_bit_width=5, mantissa_bit_width=2
)  # of gradients, as a layer shows them


def te_jax(case: dict[str, Any], inputs: Arrays) -> dict[str, Any]:
    """A tensor quantized along its rows and along its columns."""
    mode, quantizer, dtype = te_jax_of(case["config"])
    return _both_ways(mode, quantizer, inputs["x"], dtype)


def _both_ways(
    mode: str, quantizer: Any, x: np.ndarray, dtype: Any, gradient: bool = False
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    # Columns of one scale lie as the transpose of all other axes.
    columns = np.swapaxes(x, -1, -2) if mode == "mx" else np.moveaxis(x, -1, 0)
    for side, array in (("row", x), ("col", columns)):
        tensor, payload = quantized(quantizer, array, dtype)
        numbers = {
            "bits": bits_of(tensor, payload, array),
            "value": payload.astype(np.float32),
            "dequantized": np.asarray(tensor.value, np.float32),
        }
        if mode == "mx":
            numbers["scale_e8m0"] = exponents_of(tensor.scale_[..., 0])
            if side == "col":  # the numbers of columns keep the layout of the tensor
                numbers = {name: np.swapaxes(part, -1, -2) for name, part in numbers.items()}
        else:
            numbers["scale_inv"] = np.asarray(tensor.scale)[None]
        numbers["amax"] = np.zeros(1, np.float32)
        found |= {f"{side}.{name}": part for name, part in numbers.items()}
    return found


def te_jax_gemm_of(config: dict[str, Any]) -> tuple[str, Any, Any, Any]:
    """The kind of scaling of TransformerEngine's JAX products, their scheme, and the two quantizers in it."""
    with reading(config, "te_jax products") as given:
        for name in ("k", "m", "n", "seed"):
            given.take(name)
        given.choose("layout", {"x (M,K), kernel (K,N), g (M,N)": None})
        given.choose("fprop", {"x.row @ w.col": None})
        given.choose("dgrad", {"g.row @ w.row.T": None})
        given.choose("wgrad", {"x.col.T @ g.col": None})
        forward, backward = given.choose("fwd", FORMATS), given.choose("bwd", FORMATS)
        mode = given.choose("mode", MODES)
    if forward is not jnp.float8_e4m3fn:
        raise CannotDrive(f"te_jax products: fwd = {forward}")
    if mode == "mx":
        if backward is jnp.float8_e4m3fn:
            return mode, MXFP8Training, MXFP8TrainingAct, MXFP8TrainingAct
        gradient: Any = MXFP8e5m2TrainingGrad
        scheme: Any = MXFP8Training.let(dgrad_grad=gradient, wgrad_grad=gradient)
        return mode, scheme, MXFP8TrainingAct, E5M2_ROWS
    gradient = Fp8TrainingGrad.let(q_dtype=backward)
    scheme = Fp8CurrentTraining.let(dgrad_grad=gradient, wgrad_grad=gradient)
    return mode, scheme, Fp8TrainingAct, Fp8TrainingAct.let(q_dtype=backward)


def te_jax_gemm(case: dict[str, Any], inputs: Arrays) -> dict[str, Any]:
    """The products, and their operands along rows and columns."""
    mode, scheme, forward, backward = te_jax_gemm_of(case["config"])
    y, dx, dw = products(scheme, inputs["x"], inputs["w"], inputs["g"])
    found: dict[str, Any] = {"y": y, "dx": dx, "dw": dw}
    for name, quantizer in (("x", forward), ("w", forward), ("g", backward)):
        sides = _both_ways(mode, quantizer, inputs[name], jnp.float32)
        found |= {f"{name}.{side}": numbers for side, numbers in sides.items()}
    return found


@dataclass(frozen=True)
class Delayed:
    """Delayed scaling of some steps."""

    quantizer: Any
    history: int


def delayed_of(config: dict[str, Any]) -> Delayed:
    """The quantizer of TransformerEngine's delayed scaling."""
    with reading(config, "te_jax delayed scaling") as given:
        given.take("seed")
        given.take("steps")
        algorithm = given.choose("amax_compute_algo", {name: name for name in ("max", "most_recent")})
        steps, extra = given.take("history"), given.take("margin")
        q = given.choose("q_dtype", FORMATS)

    class Quantizer(Fp8e4m3ActPerTensorDelayed):
        q_dtype = q
        by_factor = True
        amax_history_length = steps
        amax_compute_algo = algorithm
        margin = extra
        keeps_infinite = True
        scaling_init = LARGEST[np.dtype(q)]

    return Delayed(Quantizer, steps)


def delayed(case: dict[str, Any], inputs: Arrays) -> dict[str, Any]:
    """Codes, the scale used, and what is left after every step."""
    read = delayed_of(case["config"])
    act = QuantIdentity(act_quant=read.quantizer, return_quant_tensor=True)
    scaling = act.act_quant.tensor_quant.scaling_impl
    largest = LARGEST[np.dtype(read.quantizer.q_dtype)]

    @nnx.jit
    def step(act: Any, x: jax.Array) -> Any:
        tensor = act(x)
        return tensor.payload(), tensor.scale

    rows: dict[str, list[Any]] = {
        name: [] for name in ("bits", "scale_inv_used", "scale_after", "amax_history_after")
    }
    for x in inputs["x"]:
        payload, scale = step(act, jnp.asarray(x))
        rows["bits"].append(np.asarray(payload).view(np.uint8))
        rows["scale_inv_used"].append(np.asarray(scale)[None])
        rows["scale_after"].append(np.float32(largest) / np.asarray(scaling.known_scale(1.0))[None])
        # There the newest amax moves to the end at once, and its place is cleared.
        history = np.roll(np.asarray(scaling.amax_history.get_value()), -1)
        history[0] = 0
        rows["amax_history_after"].append(history)
    return {name: np.stack(found) for name, found in rows.items()}


def torchao_float8_of(config: dict[str, Any]) -> tuple[Any, Any]:
    """The quantizer of torchao's dynamic scaling, and the dtype of its input."""
    with reading(config, "torchao float8") as given:
        dtype = given.choose("input_dtype", DTYPES)
        q = given.choose("fp8", FORMATS)
        power = given.take("power_of_two")
        axis = given.choose("axiswise_dim", {None: None, -1: -1, 0: 0})
        granularity = given.choose("granularity", {"TENSORWISE": False, "AXISWISE": True})
    if granularity is (axis is None):
        raise CannotDrive(f"torchao float8: granularity and axiswise_dim = {axis!r} do not fit")
    quantizer: Any = Fp8TrainingAct.let(q_dtype=q, power_of_two_factor=power, scaling_min_val=1e-12)
    if axis is not None:
        quantizer = quantizer.let(
            scaling_stats_input_view_shape_impl=Identity, stats_reduce_dim=axis, keepdim=True
        )
    return quantizer, dtype


def torchao_float8(case: dict[str, Any], inputs: Arrays) -> dict[str, Any]:
    """Codes, factors and numbers."""
    quantizer, dtype = torchao_float8_of(case["config"])
    tensor, payload = quantized(quantizer, inputs["x"], dtype)
    return {
        "bits": bits_of(tensor, payload, inputs["x"]),
        "dequantized": np.asarray(tensor.value, np.float32),
        "scale": _factor(tensor.scale),
    }


def torchao_int8_of(config: dict[str, Any]) -> tuple[Any, Any, int]:
    """The quantizer of torchao's int8 rows, the dtype of its input, and how many times rows are rounded at random."""
    with reading(config, "torchao int8") as given:
        dtype, samples = given.choose("input_dtype", {"float32": jnp.float32}), given.take("samples")
    return Int8DynamicActPerRowFloat.let(narrow_range=True, scaling_min_val=LEAST * 127), dtype, samples


LEAST = 1e-12  # what a scale is at least where numbers are divided by it; rows of zeros are stored with 0


def torchao_int8(case: dict[str, Any], inputs: Arrays) -> dict[str, Any]:
    """Codes and scales, and the mean of codes that are rounded at random."""
    quantizer, dtype, samples = torchao_int8_of(case["config"])
    x = jnp.asarray(inputs["x"], dtype)
    tensor = QuantIdentity(act_quant=quantizer, return_quant_tensor=True)(x)
    stochastic = quantizer.let(float_to_int_impl_type="stochastic_round")
    act = QuantIdentity(act_quant=stochastic, return_quant_tensor=True, rngs=nnx.Rngs(0))
    draws = act(jnp.broadcast_to(x, (samples, *x.shape))).int()
    scale = np.asarray(tensor.scale)[:, 0]
    return {
        "codes": np.asarray(tensor.int()),
        "scale": np.where(scale <= np.float32(LEAST), 0, scale),
        "stochastic_mean": np.asarray(draws, np.float32).mean(axis=0),
    }
