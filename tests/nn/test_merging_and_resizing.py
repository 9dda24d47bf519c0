"""Sums, concatenations, pools and enlargements on the integer grid."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject.nn import (
    QuantAvgPool,
    QuantCat,
    QuantConcat,
    QuantEltwiseAdd,
    QuantHardSwish,
    QuantIdentity,
    QuantMaxPool,
    QuantUpsample,
)
from jqinject.quant import Fp8e4m3OCPActPerTensorFloat, Int8ActPerTensorFloat, Uint8ActPerTensorFloat
from jqinject.quant_tensor import DifferentScalesWarning, FloatQuantTensor, IntQuantTensor

A, B = jax.random.normal(jax.random.key(0), (2, 3, 4))
IMAGE = jax.random.normal(jax.random.key(1), (2, 4, 6, 3))
NONE = {"input_quant": None, "output_quant": None}


def _ints(shape, scale=0.5, zero_point=0.0, seed=2):
    integers = jax.random.randint(jax.random.key(seed), shape, -100, 101).astype(jnp.int8)
    return IntQuantTensor.from_int(integers, scale, zero_point)


def _evaluating(layer, *args):
    layer(*args)
    layer.eval()
    return layer


@pytest.mark.heavy
def test_a_sum_of_integers_that_count_in_the_same_steps():
    add = _evaluating(QuantEltwiseAdd(output_quant=None, return_quant_tensor=True), A, B)
    y = add(A, B)
    steps = [add.input_quant(x) for x in (A, B)]
    np.testing.assert_array_equal(y.int(), sum(np.asarray(x.int(), np.int32) for x in steps))
    assert y.bit_width == 9
    np.testing.assert_array_equal(y.scale, add.input_quant.scale())


def test_the_sum_has_the_scale_of_its_output_quantizer():
    add = _evaluating(QuantEltwiseAdd(return_quant_tensor=True, output_bit_width=4), A, B)
    y = add(A, B)
    assert y.bit_width == 4
    assert float(y.scale) == float(add.output_quant.scale())
    assert not isinstance(QuantEltwiseAdd()(A, B), IntQuantTensor)


def test_without_quantizers_tensors_add_by_their_own_rule():
    add = QuantEltwiseAdd(**NONE, return_quant_tensor=True)
    x, y = _ints((3,)), _ints((3,), seed=3)
    assert add(x, y).bit_width == 9
    with pytest.raises(ValueError, match=r"scaling factors are different"):
        add(x, _ints((3,), scale=0.25))
    with pytest.raises(ValueError, match=r"neither inputs nor output are quantized"):
        add(A, B)
    np.testing.assert_array_equal(QuantEltwiseAdd(**NONE)(A, B), A + B)


MERGES = {QuantEltwiseAdd: lambda layer, *xs: layer(*xs), QuantConcat: lambda layer, *xs: layer(xs)}


@pytest.mark.parametrize("kind", MERGES)
def test_scales_may_differ_in_training_only_by_the_statistics_of_one_quantizer(kind):
    first, second = (QuantIdentity(return_quant_tensor=True) for _ in range(2))
    with pytest.warns(DifferentScalesWarning, match="scaling factors are different"):
        MERGES[kind](kind(**NONE), first(A), second(9 * B))
    shared = kind(output_quant=None, return_quant_tensor=True)
    scales = [shared.input_quant(x).scale for x in (A, 9 * B)]
    assert scales[0] != scales[1]
    MERGES[kind](shared, A, 9 * B)  # a warning is an error


JOINS = {QuantEltwiseAdd: lambda layer: layer(A, B), QuantConcat: lambda layer: layer([A, B])}


@pytest.mark.parametrize("kind", JOINS)
def test_one_quantizer_for_inputs_and_output(kind):
    for given in (
        {"output_quant": None, "input_bit_width": 5},
        {"input_quant": None, "output_bit_width": 5},
    ):
        layer = kind(tie_input_output_quant=True, return_quant_tensor=True, **given)
        assert layer.input_quant is layer.output_quant
        y = JOINS[kind](layer)
        assert y.bit_width == 5
        assert int(layer.input_quant.tensor_quant.scaling_impl.counter[...]) == 3
        copy = pickle.loads(pickle.dumps(layer))
        assert copy.input_quant is copy.output_quant
    both_alike = kind(tie_input_output_quant=True)
    assert both_alike.input_quant is both_alike.output_quant
    with pytest.raises(ValueError, match=r"one quantizer for inputs and output, got two"):
        kind(Int8ActPerTensorFloat, Uint8ActPerTensorFloat, tie_input_output_quant=True)
    with pytest.raises(ValueError, match=r"got two \(output_bit_width\).\n  cure: output_quant=None"):
        kind(tie_input_output_quant=True, output_bit_width=4)
    with (
        nnx.set_graph_mode(False),
        pytest.raises(ValueError, match=r"tree mode knows no shared objects"),
    ):
        kind(tie_input_output_quant=True)


def test_the_gradient_of_a_shared_scale_comes_from_every_call():
    layer = QuantEltwiseAdd(output_quant=None, input_scaling_impl_type="parameter", input_scaling_init=1.0)
    layer.train()
    found = nnx.grad(lambda m: m(A, B).sum())(layer)
    one = nnx.grad(lambda m: m.input_quant(A).value.sum() + m.input_quant(B).value.sum())(layer)
    assert jax.tree.leaves(found) == jax.tree.leaves(one) != [0.0]


def test_a_concatenation():
    assert QuantCat is QuantConcat
    join = _evaluating(QuantConcat(output_quant=None, return_quant_tensor=True), [A, B])
    y = join([A, B], axis=0)
    np.testing.assert_array_equal(y.int(), jnp.concatenate([join.input_quant(x).int() for x in (A, B)]))
    assert y.bit_width == 8
    plain = QuantConcat(**NONE)
    np.testing.assert_array_equal(plain([A, B]), jnp.concatenate([A, B], -1))
    with pytest.raises(ValueError, match=r"scaling factors are different"):
        plain([_ints((3,)), _ints((3,), scale=0.25)])
    with pytest.raises(ValueError, match=r"got no tensors"):
        plain([])


def test_hard_swish():
    x = jnp.linspace(-4, 4, 33)
    np.testing.assert_array_equal(QuantHardSwish(None)(x), jax.nn.hard_swish(x))
    y = QuantHardSwish(return_quant_tensor=True)(x)
    assert not y.signed
    np.testing.assert_allclose(y.value, jnp.maximum(jax.nn.hard_swish(x), 0), atol=4 / 255 / 2 * 1.01)


POOLS = {"window alone": ((2, 3),), "strides": ((2, 2), (2, 1)), "same": ((3, 3), (2, 2), "SAME")}


@pytest.mark.parametrize("window", POOLS.values(), ids=POOLS)
def test_pools_of_arrays_are_flaxs(window):
    np.testing.assert_array_equal(QuantMaxPool(*window)(IMAGE), nnx.max_pool(IMAGE, *window))
    with jax.numpy_dtype_promotion("standard"):
        means = [nnx.avg_pool(IMAGE, *window, count_include_pad=padded) for padded in (True, False)]
    for padded, expected in zip((True, False), means, strict=True):
        np.testing.assert_allclose(
            QuantAvgPool(*window, count_include_pad=padded)(IMAGE), expected, rtol=1e-5, atol=1e-7
        )


def test_pools_of_integers():
    x = _ints((2, 4, 6, 3), zero_point=3.0)
    y = QuantMaxPool((2, 2), (2, 2))(x)
    blocks = np.asarray(x.int(), np.int32).reshape(2, 2, 2, 3, 2, 3)
    np.testing.assert_array_equal(y.int(), blocks.max((2, 4)))
    assert (y.bit_width, float(y.scale), float(y.zero_point)) == (8, 0.5, 3.0)
    mean = QuantAvgPool((2, 2), (2, 2))(x)
    np.testing.assert_array_equal(mean.int(), blocks.sum((2, 4)))
    assert (mean.bit_width, float(mean.scale), float(mean.zero_point)) == (10, 0.125, 12.0)
    again = QuantAvgPool((2, 2), (2, 2), output_quant=Int8ActPerTensorFloat)(x)
    assert again.bit_width == 8
    assert not isinstance(QuantAvgPool((2, 2), return_quant_tensor=False)(x), IntQuantTensor)


def test_a_mean_whose_divisors_differ_has_no_scale():
    x = _ints((2, 4, 6, 3))
    pool = QuantAvgPool((3, 3), (2, 2), "SAME", count_include_pad=False)
    y = pool(x)
    assert not isinstance(y, IntQuantTensor)
    np.testing.assert_allclose(y, pool(x.value), rtol=1e-6)
    valid = QuantAvgPool((3, 3), (2, 2), count_include_pad=False)(x)
    assert isinstance(valid, IntQuantTensor)


def test_pools_that_can_not_be():
    with pytest.raises(ValueError, match=r"window_shape has a size of at least 1"):
        QuantMaxPool((2, 0))
    with pytest.raises(ValueError, match=r"strides \(1,\) and window_shape \(2, 2\)"):
        QuantAvgPool((2, 2), (1,))
    with pytest.raises(TypeError, match=r"'input_bit_width' would have no effect"):
        QuantMaxPool((2, 2), input_bit_width=4)


def test_the_largest_minifloat_stays_one():
    pool = QuantMaxPool((2, 2), (2, 2), input_quant=Fp8e4m3OCPActPerTensorFloat)
    y = pool(IMAGE)
    assert isinstance(y, FloatQuantTensor)
    np.testing.assert_array_equal(y.value, nnx.max_pool(pool.input_quant(IMAGE).value, (2, 2), (2, 2)))


def _bilinear(row, size, align_corners):
    """A row enlarged, one output at a time."""
    n = len(row)
    out = []
    for i in range(size):
        place = i * (n - 1) / (size - 1) if align_corners else max((i + 0.5) * n / size - 0.5, 0.0)
        low = min(int(place), n - 1)
        high = min(low + 1, n - 1)
        out.append(row[low] + (row[high] - row[low]) * (place - low))
    return np.stack(out)


@pytest.mark.parametrize(
    "given", [{"scale_factor": 2}, {"size": (7, 9)}, {"scale_factor": (1.5, 1.0)}], ids=str
)
def test_nearest_repeats_and_keeps_the_grid(given):
    x = _ints((2, 4, 6, 3), scale=jnp.array([0.5, 1.0, 2.0]))
    up = QuantUpsample(**given)
    y = up(x)
    m = y.shape[1:3]
    rows, columns = (np.floor(np.arange(k) * n / k).astype(int) for k, n in zip(m, (4, 6), strict=True))
    np.testing.assert_array_equal(y.int(), np.asarray(x.int())[:, rows][:, :, columns])
    np.testing.assert_array_equal(y.scale.reshape(-1), [0.5, 1.0, 2.0])
    np.testing.assert_array_equal(up(x.value), y.value)


@pytest.mark.heavy
@pytest.mark.parametrize("align", [False, True])
def test_bilinear_rounds_to_the_grid(align):
    up = QuantUpsample(size=(5, 9), method="bilinear", align_corners=align)
    rows = np.stack([_bilinear(image, 5, align) for image in np.asarray(IMAGE, np.float64)])
    expected = np.stack([_bilinear(image.swapaxes(0, 1), 9, align).swapaxes(0, 1) for image in rows])
    np.testing.assert_allclose(up(IMAGE), expected, atol=1e-5)
    if not align:
        np.testing.assert_allclose(
            up(IMAGE), jax.image.resize(IMAGE, (2, 5, 9, 3), "bilinear", antialias=False), atol=1e-5
        )
    scale = jnp.array([0.01, 0.02, 0.03])
    x = IntQuantTensor.from_int(jnp.round(IMAGE / scale).astype(jnp.int16), scale, bit_width=12)
    y = up(x)
    assert y.is_valid
    assert np.abs(y.value - up(x.value)).max() <= 0.03 / 2 * 1.001
    gradient = jax.grad(lambda v: up(x.set(value=v)).value.sum())(x.value)
    np.testing.assert_allclose(gradient, jax.grad(lambda v: up(v).sum())(x.value), atol=1e-5)


@pytest.mark.parametrize(
    ("factor", "nearest", "bilinear"),
    [
        (0.7, [0, 10, 20, 40], [2.142857, 16.428571, 30.714287, 45.0]),
        (1.3, [0, 0, 10, 20, 30, 30, 40], [0.0, 6.538462, 14.230769, 21.923077, 29.615385, 37.307693, 45.0]),
    ],
)
def test_elements_are_as_far_apart_as_the_factor_says(factor, nearest, bilinear):
    # What torch's `interpolate`, which Brevitas calls, gives of 0, 10, ..., 50.
    x = jnp.arange(0.0, 60.0, 10.0).reshape(1, 6, 1)
    np.testing.assert_array_equal(QuantUpsample(scale_factor=factor)(x).ravel(), nearest)
    up = QuantUpsample(scale_factor=factor, method="bilinear")
    np.testing.assert_allclose(up(x).ravel(), bilinear, rtol=1e-6)


def test_enlargements_that_can_not_be():
    for given in ({}, {"size": 2, "scale_factor": 2}):
        with pytest.raises(ValueError, match=r"either size or scale_factor"):
            QuantUpsample(**given)
    with pytest.raises(ValueError, match=r"method must be one of"):
        QuantUpsample(size=2, method="cubic")
    with pytest.raises(ValueError, match=r"size has to be positive, got \(2, 0\)"):
        QuantUpsample(size=(2, 0))
    with pytest.raises(ValueError, match=r"\(2, 2\) is for 2 spatial axes, got an input of shape \(3, 4\)"):
        QuantUpsample(size=(2, 2))(A)
    varying = _ints((1, 2, 1), scale=jnp.array([[0.5], [1.0]]))
    with pytest.raises(ValueError, match=r"scale of shape \(2, 1\) varies along a spatial axis"):
        QuantUpsample(size=4, method="bilinear")(varying)


@pytest.mark.parametrize(
    ("layer", "inputs"),
    [
        (QuantEltwiseAdd(), (A, B)),
        (QuantConcat(), ([A, B],)),
        (QuantMaxPool((2, 2), input_quant=Int8ActPerTensorFloat), (IMAGE,)),
        (QuantAvgPool((2, 2), output_quant=Int8ActPerTensorFloat, return_quant_tensor=False), (IMAGE,)),
        (QuantUpsample(scale_factor=2, method="bilinear"), (_ints((1, 3, 2)),)),
    ],
    ids=["add", "concat", "max", "avg", "upsample"],
)
def test_under_jit_and_in_bfloat16(layer, inputs):
    copy = nnx.clone(layer)
    eager, jitted = layer(*inputs), nnx.jit(lambda m, *x: m(*x))(copy, *inputs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), eager, jitted)
    half = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16), inputs, is_leaf=lambda x: isinstance(x, IntQuantTensor)
    )
    assert layer(*half).dtype == jnp.bfloat16
