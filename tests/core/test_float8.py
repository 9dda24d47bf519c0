"""8-bit floats by hand: payloads, scales, histories; zero, inf and nan; channels; the two contractions."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import jqinject
import jqinject.quant as quantizers
from jqinject.core import AbsMax, AmaxScaling, Float8Cast, FloatQuant, OverOutputChannelView
from jqinject.core.scaling.amax import scale_of_amax
from jqinject.core.state import flat_parts
from jqinject.nn import QuantConv, QuantIdentity, QuantLinear
from jqinject.ops import FLOAT8_DTYPES, to_float8
from jqinject.quant_tensor import FloatQuantTensor, in_groups

every_dtype = pytest.mark.parametrize("dtype", FLOAT8_DTYPES, ids=lambda d: np.dtype(d).name)
NUMBERS = hnp.arrays(np.float32, (7,), elements=st.floats(-1e6, 1e6, width=32))


@every_dtype
@settings(max_examples=30)
@given(numbers=NUMBERS, exponent=st.integers(-10, 10))
def test_payloads_are_ml_dtypes_saturated(dtype: Any, numbers: np.ndarray, exponent: int) -> None:
    scale = np.float32(2.0**exponent)
    largest = float(ml_dtypes.finfo(dtype).max)
    expected = np.clip(numbers / scale, -largest, largest).astype(dtype)
    got = np.asarray(to_float8(jnp.array(numbers), jnp.asarray(scale), dtype))
    np.testing.assert_array_equal(got.view(np.uint8), expected.view(np.uint8))


@every_dtype
def test_what_is_not_finite_is_not_hidden(dtype: Any) -> None:
    x = jnp.array([jnp.nan, jnp.inf, -jnp.inf, 1e30])
    got = np.asarray(to_float8(x, jnp.float32(1), dtype).astype(jnp.float32))
    infinity = np.inf if np.dtype(dtype) == np.dtype(jnp.float8_e5m2) else np.nan
    np.testing.assert_array_equal(got, [np.nan, infinity, -infinity, float(jnp.finfo(dtype).max)])


def test_the_history_is_a_window() -> None:
    window, recent = (
        AmaxScaling(amax_history_length=3, amax_compute_algo=by) for by in ("max", "most_recent")
    )
    seen: list[float] = []
    for amax in (1.0, 8.0, 0.5, 2.0, 3.0, 0.0):
        for scaling in (window, recent):
            scaling(jnp.array([amax]))
        seen.append(amax)
        assert float(window.known_scale(1.0)) == max(seen[-3:])
        assert float(window.newest) == float(recent.newest) == amax
        assert float(recent.known_scale(1.0)) == (amax or 3.0)


@pytest.mark.parametrize("poison", [np.inf, np.nan])
def test_a_poisoned_amax_never_enters(poison: float) -> None:
    for scaling in (AmaxScaling(amax_history_length=4), AmaxScaling(delayed=False, amax_history_length=1)):
        for value in (3.0, poison, 5.0):
            scale = scaling(jnp.array([1.0, value]), 448.0)
            assert np.isfinite(scale) and scale > 0
        assert 3.0 in scaling.amax_history.get_value() or not scaling.delayed
        assert np.isfinite(scaling.amax_history.get_value()).all()
        assert float(scaling.newest) == 5


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("without", [0.0, np.inf, np.nan])
def test_a_tensor_without_a_usable_amax_takes_the_scale_of_the_last_call(
    without: float, compiled: bool
) -> None:
    scaling = AmaxScaling(delayed=False)
    call = nnx.jit(lambda scaling, x: scaling(x, 448.0)) if compiled else lambda scaling, x: scaling(x, 448.0)
    inputs = [[5.0, -896.0], [without, 0.0], [without, 0.0], [224.0, 1.0], [without, 0.0]]
    assert [float(call(scaling, jnp.array(x))) for x in inputs] == [2.0, 2.0, 2.0, 0.5, 0.5]
    scaling.use_running_average = True
    assert float(call(scaling, jnp.array([without]))) == 0.5 == float(scaling.scale.get_value())


@pytest.mark.parametrize("length", [1, 2, 5])
def test_the_history_is_rolled_by_one_before_the_newest_is_written(length: int) -> None:
    scaling = AmaxScaling(
        AbsMax(stats_reduce_dim=1), OverOutputChannelView(), scaling_shape=(2,), amax_history_length=length
    )
    expected = np.zeros((length, 2), np.float32)
    for step in range(1, 8):
        scaling(jnp.float32([[step], [10 * step]]))
        expected = np.roll(expected, -1, axis=0)
        expected[0] = step, 10 * step
        np.testing.assert_array_equal(scaling.amax_history.get_value(), expected)
    np.testing.assert_array_equal(scaling.known_scale(1.0), expected.max(0))


@pytest.mark.parametrize("delayed", [True, False])
def test_zeros_and_empty_arrays_have_a_scale(delayed: bool) -> None:
    quant = FloatQuant(scaling_impl=AmaxScaling(delayed=delayed), cast_impl=Float8Cast())
    for x in (jnp.zeros(3), jnp.zeros((0, 2)), jnp.array([1e-45], jnp.float32)):
        value, scale, *_ = quant(x)
        assert value.shape == x.shape and np.isfinite(np.asarray(value)).all() and float(scale) == 1.0


def test_a_margin_leaves_room() -> None:
    for margin in (0, 1, 3):
        scaling = AmaxScaling(delayed=False, margin=margin)
        assert float(scaling(jnp.array([448.0]), 448.0)) == 2.0**margin


def test_the_pair_of_quantize_and_its_gradient() -> None:
    identity = QuantIdentity(
        quantizers.Fp8e4m3ActPerTensorCurrent, grad_quant=quantizers.Fp8e4m3GradPerTensorCurrent
    )
    for x in (5.0, jnp.float32(5)):
        y, gradient = jqinject.value_and_grad(lambda x, m: m(x))(x, identity)
        np.testing.assert_allclose([y, gradient], [5, 1], rtol=1e-6)
    for proxy, amax in ((identity.act_quant, 5), (identity.grad_quant, 1)):
        np.testing.assert_allclose(proxy.scale(), amax / 448, rtol=1e-6)
        assert float(proxy.amax_history.newest) == amax


def test_the_payload_in_between() -> None:
    proxy = QuantIdentity(quantizers.Fp8e4m3ActPerTensorCurrent).act_quant
    quantized = proxy.quantize(jnp.array([448.0, 17.0, -1.0]))
    assert isinstance(quantized, FloatQuantTensor) and quantized.is_valid
    payload = quantized.payload()
    assert payload.dtype == jnp.float8_e4m3fn
    np.testing.assert_array_equal(payload.astype(jnp.float32), [448, 16, -1])
    np.testing.assert_array_equal(quantized.dequantize(), [448, 16, -1])
    leaves, treedef = jax.tree.flatten(quantized)
    again = jax.tree.unflatten(treedef, leaves)
    assert len(leaves) == 2 and again.q_dtype == quantized.q_dtype
    assert jax.jit(lambda q: q.payload())(quantized).dtype == jnp.float8_e4m3fn
    assert float(jnp.sum(quantized)) == 463 and float((2 - quantized)[2]) == 3
    assert quantized.reshape(3, 1).payload().shape == (3, 1)


@pytest.mark.heavy
@every_dtype
@settings(max_examples=20)
@given(numbers=NUMBERS)
def test_the_payload_survives_the_value_in_every_dtype(dtype: Any, numbers: np.ndarray) -> None:
    x = jnp.array(numbers) / 1e3
    quant = FloatQuant(scaling_impl=AmaxScaling(delayed=False), cast_impl=Float8Cast(dtype))
    for wide in (jnp.float32, jnp.bfloat16):
        value, scale, *_ = quant(x.astype(wide))
        direct = to_float8(x.astype(wide), scale, dtype)
        tensor = FloatQuantTensor(value, scale, dtype)
        assert tensor.is_valid
        np.testing.assert_array_equal(tensor.payload().astype(jnp.float32), direct.astype(jnp.float32))


NAMES = [name for name in dir(quantizers) if name.startswith("Fp8") and name.endswith(("Current", "Delayed"))]


@every_dtype
@pytest.mark.parametrize("delayed", [True, False])
def test_a_value_read_later_is_the_payload_times_the_scale(dtype: Any, delayed: bool) -> None:
    x = jnp.array([0.3, -1000.0, jnp.inf, -jnp.inf, jnp.nan, 3e38])
    quant = FloatQuant(
        scaling_impl=AmaxScaling(delayed=delayed, scaling_init=1e35), cast_impl=Float8Cast(dtype)
    )

    def values(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        result = nnx.clone(quant)(x)
        tensor = result.quant_tensor(training=True)
        copies = tensor, tensor.set(training=False), jax.tree.map(lambda part: part, tensor)
        return jnp.stack([result.value, tensor.carrier, *(copy.value for copy in copies)]), tensor.payload()

    (result, carrier, *read), payload = jax.jit(values)(x)
    largest = np.finfo(np.float32).max
    with np.errstate(invalid="ignore", over="ignore"):
        product = np.float32(payload) * np.float32(1e35)
    expected = np.where(np.isfinite(np.float32(payload)), np.clip(product, -largest, largest), product)
    np.testing.assert_array_equal(carrier, x)
    for value in (result, *read):
        np.testing.assert_array_equal(value, expected)
    _, back = jax.vjp(lambda x: values(x)[0], x)
    np.testing.assert_array_equal(back(jnp.ones((5, 6)))[0], np.full(6, 5.0))


@pytest.mark.parametrize("group", [2, 3])
def test_a_cast_tensor_in_groups_has_the_value_of_the_whole(group: int) -> None:
    x = jnp.array([[0.3, -1.7, 2.9, 5.1, 6.3, 7.7]])
    tensor = FloatQuant(scaling_impl=AmaxScaling(), cast_impl=Float8Cast())(x).quant_tensor(training=True)
    grouped = in_groups(tensor.reshape(1, 6 // group, group), group, 1, 6)
    np.testing.assert_array_equal(grouped.value, tensor.value)
    assert not np.array_equal(tensor.value, x)


def test_all_kin_are_there() -> None:
    assert len(NAMES) == 20


@pytest.mark.heavy
@pytest.mark.parametrize("name", NAMES)
def test_every_quantizer_declares_what_it_is_called(name: str) -> None:
    injector = getattr(quantizers, name)
    slot = next(s for s in ("Weight", "Act", "Grad") if s in name)
    keyword = {"Weight": "weight_quant", "Act": "input_quant", "Grad": "grad_quant"}[slot]
    given_quantizers = {"weight_quant": None, keyword: injector}
    layer = QuantLinear(4, 3, **given_quantizers, rngs=nnx.Rngs(0))
    quantizer = getattr(layer, keyword).tensor_quant
    dtype = name.split(slot)[0].removeprefix("Fp8").lower()
    assert quantizer.format.dtype.name == "float8_" + {"e4m3": "e4m3fn"}.get(dtype, dtype)
    assert quantizer.scaling_impl.delayed is name.endswith("Delayed")
    shape = (1, 3) if "PerChannel" in name else ()
    assert quantizer.scaling_impl.scale.get_value().shape == shape
    value, gradients = jqinject.value_and_grad(lambda m, x: jnp.sum(m(x) ** 2))(layer, jnp.ones((2, 4)))
    assert np.isfinite(value) and np.isfinite(gradients["kernel"].get_value()).all()
    assert np.all(getattr(layer, keyword).amax_history.newest > 0)


@pytest.mark.heavy
def test_a_channel_is_quantized_as_if_it_were_alone() -> None:
    kernel = jax.random.normal(jax.random.key(0), (5, 3)) * jnp.array([1.0, 10.0, 100.0])
    layer = QuantLinear(
        5,
        3,
        weight_quant=quantizers.Fp8e4m3WeightPerChannelCurrent,
        rngs=nnx.Rngs(0),
        kernel_init=lambda *_: kernel,
    )
    quantized = layer.quant_weight()
    np.testing.assert_allclose(quantized.scale, jnp.abs(kernel).max(0, keepdims=True) / 448, rtol=1e-6)
    for channel in range(3):
        alone = FloatQuant(scaling_impl=AmaxScaling(delayed=False), cast_impl=Float8Cast())(
            kernel[:, channel]
        ).quant_tensor(training=True)
        ours, theirs = (
            payload.astype(jnp.float32) for payload in (quantized.payload()[:, channel], alone.payload())
        )
        np.testing.assert_array_equal(ours, theirs)


FORMATS = {
    "weight_quant": quantizers.Fp8e4m3WeightPerTensorCurrent,
    "input_quant": quantizers.Fp8e4m3ActPerTensorCurrent,
    "grad_quant": quantizers.Fp8e5m2GradPerTensorCurrent,
}


@pytest.mark.parametrize("weight", ["PerTensor", "PerChannel"])
@pytest.mark.parametrize("with_grad", [True, False], ids=["quantized-gradient", "float-gradient"])
def test_payloads_and_floats_contract_to_the_same(weight: str, with_grad: bool) -> None:
    formats = {**FORMATS, "weight_quant": getattr(quantizers, f"Fp8e4m3Weight{weight}Current")}
    if not with_grad:
        formats.pop("grad_quant")
    x = jax.random.normal(jax.random.key(0), (2, 3, 8))
    results = []
    for contraction in ("fp8", "float"):
        layer = QuantLinear(8, 5, **formats, contraction=contraction, rngs=nnx.Rngs(0))
        call = jqinject.value_and_grad(lambda m, x: jnp.sum(m(x) ** 3), argnums=(0, 1))
        results.append(jax.tree.leaves(nnx.jit(call)(layer, x)))
    for payloads, floats in zip(*results, strict=True):
        np.testing.assert_allclose(payloads, floats, rtol=1e-5, atol=1e-5 * float(jnp.abs(floats).max()))


@pytest.mark.parametrize("shape", [(8,), (4, 8), (2, 3, 8), (0, 8)])
def test_inputs_of_every_rank(shape: tuple[int, ...]) -> None:
    layer = QuantLinear(8, 5, **FORMATS, rngs=nnx.Rngs(0))
    assert layer(jnp.ones(shape)).shape == (*shape[:-1], 5)


def test_the_program_contracts_8_bit_floats() -> None:
    layer = QuantLinear(8, 5, **FORMATS, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(layer)

    def gradients(state: Any, x: Any) -> Any:
        return jqinject.grad(lambda m, x: jnp.sum(m(x) ** 2), argnums=(0, 1))(nnx.merge(graphdef, state), x)

    program = str(jax.make_jaxpr(gradients)(state, jnp.ones((4, 8))))
    dots = [line for line in program.splitlines() if "dot_general" in line]
    assert len(dots) == 3 and "f32[4,5] = dot_general" in program
    assert program.count("f8_e5m2") > 0 and program.count("f8_e4m3fn") > 0
    text = jax.jit(gradients).lower(state, jnp.ones((4, 8))).as_text()
    operands = [line.split(":")[-1] for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert sum("f8E4M3FN" in o and "f8E5M2" not in o for o in operands) == 1, operands
    assert sum("f8E4M3FN" in o and "f8E5M2" in o for o in operands) == 2, operands


@pytest.mark.heavy
def test_a_convolution_quantizes_its_gradient() -> None:
    conv = QuantConv(2, 3, (3,), **FORMATS, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 5, 2))
    _y, (gradients, _) = jqinject.value_and_grad(lambda m, x: jnp.sum(m(x) ** 2), argnums=(0, 1))(conv, x)
    g = 2 * conv(x)  # current scaling: the same again
    scale = jnp.abs(g).max() / 57344
    rounded = (g / scale).astype(jnp.float8_e5m2).astype(jnp.float32) * scale
    np.testing.assert_allclose(gradients["bias"].get_value(), rounded.sum((0, 1)), rtol=1e-5)
    np.testing.assert_allclose(conv.grad_quant.scale(), scale, rtol=1e-6)


@pytest.mark.heavy
def test_outputs_keep_the_models_dtype() -> None:
    layer = QuantLinear(8, 5, **FORMATS, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    _y, gradients = jqinject.value_and_grad(lambda m, x: jnp.sum(m(x).astype(jnp.float32)))(
        layer, jnp.ones((2, 8), jnp.bfloat16)
    )
    assert layer(jnp.ones((2, 8), jnp.bfloat16)).dtype == jnp.bfloat16
    assert gradients["kernel"].get_value().dtype == jnp.float32
    found = flat_parts(nnx.state(layer, nnx.Not(nnx.Param)))
    assert {leaf.get_value().dtype for _, leaf in found} == {np.dtype("float32")}


def test_a_float_checkpoint_starts_afresh() -> None:
    layer = QuantLinear(8, 5, **FORMATS, rngs=nnx.Rngs(0))
    jqinject.value_and_grad(lambda m, x: jnp.sum(m(x)))(layer, jnp.ones((2, 8)))
    jqinject.load_state(layer, nnx.state(nnx.Linear(8, 5, rngs=nnx.Rngs(1))))
    assert float(layer.weight_quant.amax_history.newest) == 0


@pytest.mark.heavy
def test_second_derivatives_pass_straight_through() -> None:
    identity = QuantIdentity(
        quantizers.Fp8e4m3ActPerTensorCurrent, grad_quant=quantizers.Fp8e5m2GradPerTensorCurrent
    )
    identity.eval()
    x = jax.random.normal(jax.random.key(0), (8,))

    def gradient(x: Any) -> Any:
        return jax.grad(lambda x: jnp.sum(identity(x) ** 3))(x)

    y, g = identity(x), gradient(x)
    np.testing.assert_allclose(jax.grad(lambda x: jnp.sum(gradient(x) ** 2))(x), 2 * g * 6 * y, rtol=1e-6)


def test_payloads_have_no_second_derivative_and_say_so() -> None:
    layer = QuantLinear(8, 5, **FORMATS, rngs=nnx.Rngs(0))
    layer.eval()

    def penalty(x: Any) -> Any:
        return jnp.sum(jax.grad(lambda x: jnp.sum(layer(x) ** 3))(x) ** 2)

    with pytest.raises(TypeError, match=r"no second derivative.*\n  cure: contraction='float'"):
        jax.grad(penalty)(jnp.ones((2, 8)))


@pytest.mark.heavy
def test_delayed_scales_and_quotients_have_the_bits_of_flax() -> None:
    """A scale is rounded twice, and numbers are multiplied by its reciprocal, in and outside of programs."""
    random = np.random.default_rng(0)
    amaxes = np.abs(random.normal(size=512)).astype(np.float32) + np.float32(0.1)
    expected = np.float32(1) / (np.float32(448) / amaxes)
    assert np.any(expected != amaxes / np.float32(448))
    for scale in (scale_of_amax, jax.jit(scale_of_amax, static_argnums=2)):
        np.testing.assert_array_equal(scale(jnp.asarray(amaxes), jnp.ones(512), 448.0), expected)
        np.testing.assert_array_equal(scale(jnp.asarray(amaxes), jnp.ones(512), 1.0), amaxes)
        unusable = jnp.asarray([0.0, jnp.inf, jnp.nan, 1e-40], jnp.float32)
        np.testing.assert_array_equal(scale(unusable, jnp.full(4, 3.0), 448.0), np.full(4, 3.0))
    ties = (random.integers(8, 16, (512, 64)) + 0.5) * expected[:, None].astype(np.float64)
    x = ties.astype(np.float32)
    steps = x * (np.float32(1) / expected)[:, None]
    assert np.any(steps != x / expected[:, None])
    for cast in (to_float8, jax.jit(to_float8, static_argnums=2)):
        payload = cast(jnp.asarray(x), jnp.asarray(expected)[:, None], jnp.float8_e4m3fn)
        np.testing.assert_array_equal(
            payload.astype(jnp.float32), steps.astype(payload.dtype).astype(np.float32)
        )
