"""A factor and a summand by channel, and batch normalizations that become one or go into the layer before them."""

import copy
import operator
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject.core import ParameterFromStatsFromParameterZeroPoint, QuantParam
from jqinject.nn import (
    MergedBatchNorm,
    QuantBatchNorm,
    QuantConv,
    QuantConvTranspose,
    QuantEmbed,
    QuantLinear,
    QuantLinearGeneral,
    QuantScaleBias,
    merge_bn,
)
from jqinject.nn.base.batch_norm_folding import factors_of
from jqinject.quant import (
    Int4WeightPerChannelLearned,
    Int8ActPerTensorFloat,
    Int8WeightPerChannelFloat,
    Int8WeightPerChannelFloatMSE,
    Int8WeightPerTensorFloat,
    Int32Bias,
    ShiftedUint8WeightPerChannelFloat,
)

X = jax.random.normal(jax.random.key(0), (4, 5, 5, 3))


def _trained(features, cls=nnx.BatchNorm, **given):
    """A normalization that has seen some data, in evaluation mode."""
    norm = cls(features, rngs=nnx.Rngs(0), **given)
    keys = jax.random.split(jax.random.key(7), 4)
    values = [jax.random.normal(key, (features,)) for key in keys]
    norm.mean[...], norm.scale[...], norm.bias[...] = values[0], values[1], values[2]
    norm.var[...] = jnp.exp(values[3])
    norm.eval()
    return norm


def _quantized(**given):
    return QuantScaleBias(
        3,
        weight_quant=Int8WeightPerTensorFloat,
        input_quant=Int8ActPerTensorFloat,
        return_quant_tensor=True,
        **given,
    )


def test_without_quantizers_it_is_a_product_and_a_sum():
    layer = QuantScaleBias(3, weight_quant=None, axis=1)
    layer.scale = nnx.Param(jnp.array([1.0, -2.0, 3.0]))
    layer.bias = nnx.Param(jnp.array([0.5, 0.0, -1.0]))
    x = jnp.moveaxis(X, -1, 1)
    expected = np.asarray(x) * np.array([1.0, -2.0, 3.0]).reshape(3, 1, 1) + np.array([0.5, 0, -1]).reshape(
        3, 1, 1
    )
    np.testing.assert_allclose(layer(x), expected, rtol=1e-6, atol=1e-6)


def test_its_output_is_a_product_of_integers():
    layer = _quantized(use_bias=False)
    layer.scale = nnx.Param(jnp.array([0.5, 1.0, -1.27]))
    y = layer(X)
    x = layer.input_quant(X)
    assert y.is_valid and y.bit_width == 16
    np.testing.assert_allclose(y.scale, x.scale * 0.01, rtol=1e-6)
    np.testing.assert_array_equal(y.int(), x.int().astype(np.int32) * np.array([50, 100, -127]))


def test_a_bias_on_the_grid_of_the_product():
    layer = _quantized(bias_quant=Int32Bias)
    layer.bias = nnx.Param(jnp.array([1.0, 2.0, 3.0]))
    y = layer(X)
    assert y.is_valid and float(jnp.abs(y.zero_point).max()) == 0
    plain = layer.input_quant(X).value * layer.quant_weight().value + layer.bias[...]
    np.testing.assert_allclose(y.value, plain, atol=float(y.scale.max()))


def test_frozen_copied_and_pickled_it_stays():
    layer = _quantized(weight_bit_width=4)
    layer(X)
    layer.eval()
    expected = layer(X).value
    for other in (
        nnx.clone(layer),
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        jqinject.freeze(layer),
    ):
        np.testing.assert_allclose(other(X).value, expected, rtol=1e-6)
    assert layer.frozen.form.stored.dtype == jnp.int4


def test_a_batch_norm_becomes_one():
    norm = _trained(3)
    layer = QuantScaleBias.from_batch_norm(norm, weight_quant=None)
    np.testing.assert_allclose(layer(X), norm(X), rtol=1e-5, atol=1e-5)


LAYERS = {
    "linear": lambda **given: QuantLinear(3, 4, **given, rngs=nnx.Rngs(1)),
    "without bias": lambda **given: QuantLinear(3, 4, use_bias=False, **given, rngs=nnx.Rngs(1)),
    "conv": lambda **given: QuantConv(3, 4, (3, 3), **given, rngs=nnx.Rngs(1)),
    "transposed": lambda **given: QuantConvTranspose(
        3, 4, (2, 2), strides=2, transpose_kernel=True, **given, rngs=nnx.Rngs(1)
    ),
    "general": lambda **given: QuantLinearGeneral((5, 3), 4, axis=(-2, -1), **given, rngs=nnx.Rngs(1)),
    "flax": lambda weight_quant: nnx.Conv(3, 4, (3, 3), rngs=nnx.Rngs(1)),
}


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_merging_keeps_what_is_computed(make):
    layer, norm = make(weight_quant=None), _trained(4)
    expected = norm(layer(X))
    merge_bn(layer, norm)
    np.testing.assert_allclose(layer(X), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", (1e-5, 1e-8, 0.0))
def test_small_variances_lie_under_the_root_with_epsilon(size):
    layer, norm = LAYERS["linear"](weight_quant=None), _trained(4)
    norm.var[...] = jnp.array([size, 2 * size, 1.0, size / 2])
    factor, _ = factors_of(norm)
    scale, var = np.float64(norm.scale[...]), np.float64(norm.var[...])
    np.testing.assert_allclose(factor, scale / np.sqrt(var + 1e-5), rtol=1e-6)
    expected = norm(layer(X))
    merge_bn(layer, norm)
    np.testing.assert_allclose(layer(X), expected, rtol=1e-4, atol=1e-3)


def test_quantizers_are_assembled_from_the_merged_weight():
    layer = LAYERS["conv"](weight_quant=Int8WeightPerChannelFloat)
    before = layer.quant_weight().scale
    norm = _trained(4)
    layer.merge_bn_in(norm)
    factor = jnp.abs(norm.scale[...]) / jnp.sqrt(norm.var[...] + norm.epsilon)
    np.testing.assert_allclose(layer.quant_weight().scale, before * factor, rtol=1e-5)


LEARNED = {"scaling_impl_type": "parameter_from_stats"}
TRAINED = {
    "LSQ": Int4WeightPerChannelLearned,
    "from statistics": Int8WeightPerChannelFloat.let(**LEARNED, bit_width=4),
    "from the least error": Int8WeightPerChannelFloatMSE.let(**LEARNED),
    "least error": Int8WeightPerChannelFloatMSE,
    "as a logarithm": Int8WeightPerChannelFloat.let(**LEARNED, restrict_scaling_type="log_fp"),
    "bit width": Int8WeightPerChannelFloat.let(bit_width_impl_type="parameter"),
    "both": Int8WeightPerChannelFloat.let(**LEARNED, bit_width_impl_type="parameter"),
}


def _after_training(layer):
    """A layer whose quantizer has been moved from where it began: scales times 0.6, bit widths to 4."""
    layer(X)
    quantizer = layer.weight_quant.tensor_quant
    for path, variable in nnx.to_flat_state(nnx.state(quantizer, QuantParam)):
        learned = {"bit_width_offset": 2.0}.get(path[-1], variable[...] * 0.6)
        operator.attrgetter(".".join(path))(quantizer)[...] = learned
    layer.eval()
    return layer


@pytest.mark.parametrize("kind", ("linear", "conv", "transposed"))
@pytest.mark.parametrize("quant", TRAINED.values(), ids=TRAINED)
def test_what_a_quantizer_learned_follows_the_weight(kind, quant):
    layer, norm = _after_training(LAYERS[kind](weight_quant=quant)), _trained(4)
    before, expected = layer.quant_weight(), norm(layer(X))
    merge_bn(layer, norm)
    np.testing.assert_array_equal(layer.quant_weight().bit_width, before.bit_width)
    np.testing.assert_allclose(layer(X), expected, rtol=1e-4, atol=1e-4)


def test_a_channel_that_becomes_zero_keeps_its_scale():
    layer, norm = _after_training(LAYERS["linear"](weight_quant=TRAINED["as a logarithm"])), _trained(4)
    norm.scale[...] = norm.scale[...].at[1].set(0.0)
    expected = norm(layer(X))
    merge_bn(layer, norm)
    np.testing.assert_allclose(layer(X), expected, rtol=1e-4, atol=1e-4)


def test_committed_scales_follow_the_weight():
    layer, norm = QuantLinear(3, 4, weight_quant=Int8WeightPerChannelFloat, rngs=nnx.Rngs(1)), _trained(4)
    layer.weight_quant.commit()
    layer.kernel[...] = layer.kernel[...] / 3  # a solver chose other numbers of the grid
    expected = norm(layer(X))
    before = layer.quant_weight().int()
    merge_bn(layer, norm)
    np.testing.assert_array_equal(jnp.abs(layer.quant_weight().int()), jnp.abs(before))
    np.testing.assert_allclose(layer(X), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"weight_quant": Int8WeightPerTensorFloat.let(**LEARNED)},
            r"conv, before first: weight_quant\.tensor_quant\.scaling_impl: .*shape \(\), are not one per channel",
        ),
        (
            {
                "weight_quant": ShiftedUint8WeightPerChannelFloat.let(
                    **LEARNED, zero_point_impl=ParameterFromStatsFromParameterZeroPoint
                )
            },
            r"conv, before first: weight_quant\.tensor_quant\.zero_point_impl: .*negative number",
        ),
    ],
)
def test_what_cannot_follow_is_refused_by_path(given, said):
    model = Net()
    model.conv = QuantConv(3, 3, (3, 3), **given, rngs=nnx.Rngs(0))
    model.first = _trained(3)
    _after_training(model.conv)
    held = jax.tree.map(jnp.copy, nnx.to_pure_dict(nnx.state(model)))
    with pytest.raises(ValueError, match=said):
        jqinject.fold_batch_norm(model, X)
    jax.tree.map(np.testing.assert_array_equal, held, nnx.to_pure_dict(nnx.state(model)))


@pytest.mark.parametrize(
    ("layer", "norm", "error", "said"),
    [
        (
            lambda: QuantEmbed(3, 4, rngs=nnx.Rngs(0)),
            lambda: _trained(4),
            TypeError,
            r"not into a QuantEmbed",
        ),
        (LAYERS["linear"], lambda: nnx.LayerNorm(4, rngs=nnx.Rngs(0)), TypeError, r"got LayerNorm"),
        (LAYERS["linear"], lambda: _trained(3), ValueError, r"has 4 output channels.*and the batch norm 3"),
        (LAYERS["linear"], lambda: _trained(5), ValueError, r"has 4 output channels.*and the batch norm 5"),
        (lambda: jqinject.freeze(LAYERS["linear"]()), lambda: _trained(4), ValueError, r"frozen"),
        (
            lambda: LAYERS["linear"](output_quant=Int8ActPerTensorFloat),
            lambda: _trained(4),
            ValueError,
            r"quantizes its output before the batch norm",
        ),
    ],
)
def test_what_does_not_merge_is_refused(layer, norm, error, said):
    made, its = layer(), norm()
    held = jax.tree.map(jnp.copy, nnx.to_pure_dict(nnx.state(made)))
    with pytest.raises(error, match=said):
        merge_bn(made, its)
    jax.tree.map(np.testing.assert_array_equal, held, nnx.to_pure_dict(nnx.state(made)))


class Net(nnx.Module):
    """Two layers with normalizations, of which the first may be used in another way."""

    def __init__(self, how="plainly"):
        self.how = how
        self.conv = QuantConv(3, 3, (3, 3), rngs=nnx.Rngs(0))
        self.first = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
        self.fc = QuantLinear(3, 4, rngs=nnx.Rngs(1))
        self.second = QuantBatchNorm(4, rngs=nnx.Rngs(1))
        for norm in (self.first, self.second):
            norm.mean[...] = norm.mean[...] + 0.5
            norm.var[...] = norm.var[...] * 3.0

    def __call__(self, x):
        y = self.conv(self.conv(x)) if self.how == "twice" else self.conv(x)
        z = self.first(y)
        return self.second(self.fc(nnx.relu(z + y if self.how == "beside" else z)))


def test_a_whole_model():
    model = Net()
    assert jqinject.merge_batch_norm(model, X) == (("conv", "first"), ("fc", "second"))
    twin = Net()
    for net in (twin, model):
        jqinject.calibrate(net, [X], progress=False)
    assert isinstance(model.first, MergedBatchNorm) and model.second.output_quant is not None
    # Weights per tensor are quantized by channel of another size now: near, and not the same.
    np.testing.assert_allclose(model(X), twin(X), atol=0.05)
    jqinject.load_state(Net(), nnx.state(twin))


@pytest.mark.parametrize(
    ("how", "said"), [("twice", r"conv is called 2 times"), ("beside", r"is used beside its batch norm too")]
)
def test_a_model_that_would_change_is_left_alone(how, said):
    model = Net(how)
    held = jax.tree.map(jnp.copy, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    with pytest.raises(ValueError, match=said):
        jqinject.merge_batch_norm(model, X)
    jax.tree.map(np.testing.assert_array_equal, held, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    assert isinstance(model.first, nnx.BatchNorm)


def test_places_of_a_transposed_window_that_meet():
    """The accumulator's bits count the products of one output, or as the reference does where that is more."""
    given = {"weight_quant": Int8WeightPerTensorFloat, "input_quant": Int8ActPerTensorFloat}
    for strides, terms in ((1, 3 * 9), (2, 4 * (2 + 2)), (3, 4 * (1 + 1))):
        layer = QuantConvTranspose(
            3, 4, (3, 3), strides, **given, return_quant_tensor=True, use_bias=False, rngs=nnx.Rngs(0)
        )
        assert layer(X).bit_width == int(np.ceil(np.log2(255 * 255 * terms)))
