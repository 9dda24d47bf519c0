"""Components that are put together by hand: quantized scales and zero points, bits that are taken off, zeros."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject import ExtendedInjector, this, value
from jqinject.core import (
    AbsMax,
    AccumulatorAwareZeroCenterParameterPreScaling,
    BitWidthConst,
    ClampMin,
    ConstScaling,
    FloatRestrictValue,
    IntQuant,
    IntScaling,
    L1Norm,
    MsbClampBitWidth,
    NegativeMinOrZero,
    OverOutputChannelView,
    OverTensorView,
    QuantRestrictValue,
    RemoveBitwidthParameter,
    RescalingIntQuant,
    ScalarClamp,
    ScalarClampSte,
    ScaleShiftQuantZeroPoint,
    StatsFromParameterScaling,
    StatsFromParameterZeroPoint,
    ZeroZeroPoint,
)
from jqinject.core.state import flat_parts
from jqinject.nn import QuantLinear
from jqinject.quant import (
    Int8AccumulatorAwareWeightQuant,
    Int8AccumulatorAwareZeroCenterWeightQuant,
    Int8ActPerTensorFloat,
    Int8WeightNormL2PerChannelFixedPoint,
    Int8WeightPerChannelFloat,
    Int8WeightPerChannelFloatDecoupled,
    Int8WeightPerTensorFloat,
)


class QuantizedScales(Int8WeightPerChannelFloat):
    """A scale for each channel, and these scales in 4 unsigned bits of one scale."""

    class scale_quant(Int8WeightPerTensorFloat):
        signed = False
        narrow_range = False
        bit_width = 4
        module = (this << 1).module
        tracked_parameter_list = (this << 1).tracked_parameter_list

    restrict_scaling_impl = QuantRestrictValue
    restrict_threshold_impl = FloatRestrictValue

    @value
    def restrict_value_float_to_int_impl():
        return this.scale_quant.tensor_quant


@pytest.mark.heavy
def test_scales_on_a_grid_of_their_own():
    kernel = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
    layer = QuantLinear(8, 6, weight_quant=QuantizedScales, rngs=nnx.Rngs(0))
    jqinject.load_state(layer, {"kernel": kernel, "bias": np.zeros(6, np.float32)})
    largest = np.abs(kernel).max(axis=0)
    step = largest.max() / 15
    expected = np.round(largest / step) * step / 127
    np.testing.assert_allclose(layer.quant_weight().scale, expected[None], rtol=1e-5)
    gradient = nnx.grad(lambda m: jnp.sum(m.quant_weight().scale))(layer)["kernel"][...]
    assert int((gradient != 0).sum()) >= 6


def four_steps(scale=1.5):
    grid = {"narrow_range": False, "signed": False}
    parts = IntQuant(**grid), ConstScaling(scale), IntScaling(**grid), ZeroZeroPoint(), BitWidthConst(2)
    return RescalingIntQuant(*parts)


def test_a_zero_point_quantized_by_itself():
    int_quant = IntQuant(narrow_range=False, signed=False)
    shift = ScaleShiftQuantZeroPoint(four_steps(), int_quant)
    impl = StatsFromParameterZeroPoint(
        int_quant, True, OverTensorView(), 0, NegativeMinOrZero(), (), scale_shift_zero_point_impl=shift
    )
    zero = impl(jnp.array([-0.6, 1.0]), jnp.float32(0.1), 8)
    assert float(zero) == pytest.approx(5.0)  # 0.6 is 0.5 on the grid of steps of 0.5


def test_bits_taken_off():
    removed = RemoveBitwidthParameter(3)
    width = MsbClampBitWidth(removed, 4, 8)
    np.testing.assert_allclose([width(10), width(20), width(5)], [7.0, 8.0, 4.0], rtol=1e-5)
    gradient = nnx.grad(lambda m: m(10))(width)
    assert float(gradient["bit_width_to_remove_impl"]["bit_width_coeff"][...]) == pytest.approx(9.0, rel=1e-4)
    assert float(RemoveBitwidthParameter(0)()) == pytest.approx(0.1, rel=1e-4)
    kept = RemoveBitwidthParameter(3, override_pretrained_bit_width=True)
    assert float(
        kept.complete_state({"bit_width_coeff": jnp.float32(9)})["bit_width_coeff"]
    ) == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match=r"at least 0, got -1"):
        RemoveBitwidthParameter(-1)


def test_clamps_with_fixed_bounds():
    x = jnp.array([-3.0, 0.5, 3.0])
    cases = [(ScalarClamp(-2.0, 2.0), [-2, 0.5, 2], [0, 1, 0]), (ScalarClampSte(-2.0, 2.0), [-2, 0.5, 2], [1, 1, 1]),
             (ClampMin(0.0), [0, 0.5, 3], [0, 1, 1])]  # fmt: skip
    for clamp, y, slope in cases:
        np.testing.assert_array_equal(clamp(x), y)
        np.testing.assert_array_equal(jax.grad(lambda x, clamp=clamp: jnp.sum(clamp(x)))(x), slope)


DECOUPLED = [
    Int8WeightPerChannelFloatDecoupled,
    Int8WeightNormL2PerChannelFixedPoint,
    Int8AccumulatorAwareWeightQuant,
    Int8AccumulatorAwareZeroCenterWeightQuant,
]


@pytest.mark.parametrize("quantizer", DECOUPLED)
@pytest.mark.parametrize("shape", [(4, 3), (4, 0), (0, 3)])
def test_zeros_and_nothing_have_finite_scales(quantizer, shape):
    layer = QuantLinear(
        *shape,
        weight_quant=quantizer,
        input_quant=Int8ActPerTensorFloat,
        kernel_init=nnx.initializers.zeros,
        use_bias=False,
        rngs=nnx.Rngs(0),
    )
    weight = nnx.jit(lambda m: m.quant_weight())(layer)
    assert np.all(np.isfinite(weight.scale) & (np.asarray(weight.scale) > 0))
    np.testing.assert_array_equal(weight.value, np.zeros(shape))
    gradients = nnx.jit(nnx.grad(lambda m: jnp.sum(m.quant_weight().value)))(layer)
    assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(gradients))


@pytest.mark.parametrize("quantizer", DECOUPLED)
def test_an_abstract_layer_has_the_structure_of_a_real_one(quantizer):
    def make():
        return QuantLinear(4, 3, weight_quant=quantizer, input_quant=Int8ActPerTensorFloat, rngs=nnx.Rngs(0))

    def shapes(layer):
        return {path: (part.shape, part.dtype) for path, part in flat_parts(nnx.state(layer))}

    abstract = nnx.eval_shape(make)
    assert nnx.graphdef(abstract) == nnx.graphdef(make())
    assert shapes(abstract) == shapes(make())
    frozen = nnx.eval_shape(lambda: jqinject.freeze(make()))
    assert frozen.frozen.numbers["value"].shape == (3, 4)


def test_a_norm_that_is_learned_scales_the_integers():
    layer = QuantLinear(4, 3, weight_quant=Int8WeightNormL2PerChannelFixedPoint, rngs=nnx.Rngs(0))
    proxy = layer.weight_quant
    np.testing.assert_allclose(proxy.pre_scale(), proxy.scale(), rtol=1e-5)
    norm = proxy.tensor_quant.pre_scaling_impl.value
    np.testing.assert_allclose(norm[...][0], np.linalg.norm(layer.kernel[...], axis=0), rtol=1e-5)
    before = layer.quant_weight()
    norm[...] = norm[...] / 2
    np.testing.assert_allclose(proxy.pre_scale(), 2 * proxy.scale(), rtol=1e-5)
    assert int(abs(layer.quant_weight().int()).max()) == 64
    np.testing.assert_array_equal(layer.quant_weight().scale, before.scale)
    proxy.disable_quant = True
    assert (proxy.pre_scale(), proxy.pre_zero_point()) == (None, None)


def test_a_quantizer_by_the_input_needs_what_looks_at_it():
    class Wrong(Int8AccumulatorAwareWeightQuant):
        pre_scaling_impl = StatsFromParameterScaling
        scaling_stats_impl = AbsMax

    with pytest.raises(
        TypeError, match=r"StatsFromParameterScaling does not look at the layer's input.\n  cure: "
    ):
        QuantLinear(4, 3, weight_quant=Wrong, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"needs weights that are centered on 0, got ZeroZeroPoint"):
        AccumulatorAwareZeroCenterParameterPreScaling(
            ConstScaling(1.0),
            L1Norm(1),
            OverOutputChannelView(),
            [jnp.ones((2, 2))],
            pre_zero_point_impl=ZeroZeroPoint(),
            accumulator_bit_width_impl=BitWidthConst(16),
        )


def test_a_part_of_a_weight_has_the_scales_of_the_whole():
    layer = QuantLinear(4, 3, weight_quant=Int8WeightPerChannelFloat, rngs=nnx.Rngs(0))
    whole = layer.quant_weight()
    part = layer.quant_weight(subtensor_slice_list=[(1, 3), None])
    np.testing.assert_array_equal(part.value, whole.value[1:3])
    np.testing.assert_array_equal(part.scale, whole.scale)
    column = layer.quant_weight(subtensor_slice_list=[None, (2, 3)])
    np.testing.assert_array_equal(column.scale, whole.scale[:, 2:])
    assert column.is_valid


def test_decoupled_is_an_injector_like_others():
    class Own(ExtendedInjector):
        pass

    layer = QuantLinear(4, 3, rngs=nnx.Rngs(0))
    tree = jqinject.explain(Int8WeightPerChannelFloatDecoupled, module=layer)
    assert "StatsFromParameterScaling" in str(tree)
    assert issubclass(Int8WeightPerChannelFloatDecoupled & Own, ExtendedInjector)
