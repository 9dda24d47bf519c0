"""One choice overridden re-wires the quantizer: which component each enum member stands for, however it is written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject import DependencyError, core, explain
from jqinject.nn import QuantIdentity, QuantLinear
from jqinject.quant import (
    Int8ActPerTensorFloat,
    Int8ActPerTensorFloatMinMaxInit,
    Int8BiasPerTensorFloatInternalScaling,
    Int8WeightPerTensorFloat,
    Int32Bias,
    ShiftedUint8WeightPerTensorFloat,
)
from jqinject.quant.enums import (
    BitWidthImplType,
    FloatToIntImplType,
    QuantType,
    RestrictValueType,
    ScalingImplType,
    ScalingPerOutputType,
    StatsOp,
)

X = jax.random.normal(jax.random.key(0), (5, 4))


def with_more(quantizer, more):
    """What only some of the choices read, declared: an override that is not read is refused."""
    return type(quantizer)(quantizer.__name__, (quantizer,), more)


def weight(quantizer=Int8WeightPerTensorFloat, more=(), **overrides):
    quantizer = with_more(quantizer, dict(more)) if more else quantizer
    named = {f"weight_{name}": choice for name, choice in overrides.items()}
    return QuantLinear(4, 3, weight_quant=quantizer, rngs=nnx.Rngs(0), **named)


def act(quantizer=Int8ActPerTensorFloat, more=(), **overrides):
    quantizer = with_more(quantizer, {"collect_stats_steps": 1, **dict(more)})
    return QuantIdentity(quantizer, return_quant_tensor=True, **overrides)


# (builds a layer, what it takes besides, where the component is, enum member -> its class)
WEIGHT_SCALING = {
    ScalingImplType.STATS: core.StatsFromParameterScaling,
    ScalingImplType.AFFINE_STATS: core.StatsFromParameterScaling,
    ScalingImplType.PARAMETER_FROM_STATS: core.ParameterFromStatsFromParameterScaling,
    ScalingImplType.PARAMETER: core.ParameterScaling,
    ScalingImplType.CONST: core.ConstScaling,
    ScalingImplType.HE: core.ConstScaling,
}
ACT_SCALING = {
    ScalingImplType.STATS: core.RuntimeStatsScaling,
    ScalingImplType.AFFINE_STATS: core.RuntimeStatsScaling,
    ScalingImplType.PARAMETER_FROM_STATS: core.ParameterFromRuntimeStatsScaling,
    ScalingImplType.PARAMETER: core.ParameterScaling,
    ScalingImplType.CONST: core.ConstScaling,
}
STATS = {
    StatsOp.MAX: core.AbsMax,
    StatsOp.AVE: core.AbsAve,
    StatsOp.MAX_AVE: core.AbsMaxAve,
    StatsOp.MEAN_SIGMA_STD: core.MeanSigmaStd,
    StatsOp.MEAN_LEARN_SIGMA_STD: core.MeanLearnedSigmaStd,
    StatsOp.PERCENTILE: core.AbsPercentile,
    StatsOp.MIN_MAX: core.AbsMinMax,
    StatsOp.PERCENTILE_INTERVAL: core.PercentileInterval,
    StatsOp.SIGNED_MAX: core.SignedAbsMax,
}
ROUNDING = {
    FloatToIntImplType.ROUND: core.RoundSte,
    FloatToIntImplType.FLOOR: core.FloorSte,
    FloatToIntImplType.CEIL: core.CeilSte,
    FloatToIntImplType.ROUND_TO_ZERO: core.RoundToZeroSte,
    FloatToIntImplType.DPU: core.DPURoundSte,
    FloatToIntImplType.STOCHASTIC_ROUND: core.StochasticRoundSte,
}
BIT_WIDTH = {
    BitWidthImplType.CONST: core.BitWidthConst,
    BitWidthImplType.PARAMETER: core.BitWidthParameter,
    BitWidthImplType.STATEFUL_CONST: core.BitWidthStatefulConst,
}
RESTRICT = {
    RestrictValueType.FP: core.FloatRestrictValue,
    RestrictValueType.SIGNED_FP: core.SignedFloatRestrictValue,
    RestrictValueType.LOG_FP: core.LogFloatRestrictValue,
    RestrictValueType.POWER_OF_TWO: core.PowerOfTwoRestrictValue,
}
VIEWS = {
    ScalingPerOutputType.TENSOR: core.OverTensorView,
    ScalingPerOutputType.CHANNEL: core.OverOutputChannelView,
}
QUANT = {
    QuantType.INT: core.RescalingIntQuant,
    QuantType.TERNARY: core.TernaryQuant,
    QuantType.BINARY: core.BinaryQuant,
}
CLAMPED = {**QUANT, QuantType.BINARY: core.ClampedBinaryQuant}

SIGMAS = {"sigma": 2.0, "high_percentile_q": 99.0, "low_percentile_q": 1.0}
CONSTANT = {"scaling_const": 0.5}
BOUNDS = {"min_val": -1.0, "max_val": 1.0}
CHOICES = [
    (weight, "scaling_impl_type", CONSTANT, "scaling_impl", WEIGHT_SCALING),
    (act, "scaling_impl_type", BOUNDS, "scaling_impl", ACT_SCALING),
    (weight, "scaling_stats_op", SIGMAS, "scaling_stats_impl", STATS),
    (act, "scaling_stats_op", SIGMAS, "scaling_stats_impl", STATS),
    (weight, "float_to_int_impl_type", {}, "float_to_int_impl", ROUNDING),
    (act, "float_to_int_impl_type", {}, "float_to_int_impl", ROUNDING),
    (weight, "bit_width_impl_type", {}, "bit_width_impl", BIT_WIDTH),
    (act, "bit_width_impl_type", {}, "bit_width_impl", BIT_WIDTH),
    (weight, "restrict_scaling_type", {}, "restrict_scaling_impl", RESTRICT),
    (act, "restrict_scaling_type", {}, "restrict_scaling_impl", RESTRICT),
    (weight, "scaling_per_output_type", {}, "scaling_stats_input_view_shape_impl", VIEWS),
    (weight, "quant_type", {"threshold": 0.5}, "tensor_quant", QUANT),
    (act, "quant_type", {"threshold": 0.5}, "tensor_quant", CLAMPED),
]
CASES = [
    pytest.param(build, name, more, where, member, cls, id=f"{build.__name__}-{name}-{member.value}")
    for build, name, more, where, table in CHOICES
    for member, cls in table.items()
]


def proxy_of(layer):
    return layer.weight_quant if isinstance(layer, QuantLinear) else layer.act_quant


def parts_of(layer):
    """Everything that the quantizer is made of."""
    held = core.components_in(proxy_of(layer).tensor_quant)
    return [part for component in held for part in (component, *vars(component).values())]


@pytest.mark.parametrize(("build", "name", "more", "where", "member", "cls"), CASES)
def test_a_member_its_name_and_its_name_in_capitals_wire_the_same_component(
    build, name, more, where, member, cls
):
    layers = [build(**{name: written}, more=more) for written in (member, member.value, member.value.upper())]
    outputs = [layer(X) for layer in layers]
    for layer, output in zip(layers, outputs, strict=True):
        tree = explain(proxy_of(layer), module=layer, name=where)
        assert tree.value is cls
        assert any(isinstance(part, cls) for part in parts_of(layer)) or cls in (
            core.FloatRestrictValue,
            core.RoundSte,
            core.OverTensorView,
        )
        jax.tree.map(np.testing.assert_array_equal, output, outputs[0])
    value = outputs[0].value if build is act else outputs[0]
    assert bool(jnp.all(jnp.isfinite(value)))


@pytest.mark.heavy
@pytest.mark.parametrize(("build", "name", "more", "where", "member", "cls"), CASES)
def test_a_choice_is_trained_as_any_other(build, name, more, where, member, cls):
    layer = build(**{name: member}, more=more)
    value = lambda m: m(X).value if build is act else m(X)  # noqa: E731
    for _ in range(3):
        gradients = nnx.grad(lambda m: jnp.sum(value(m) ** 2))(layer)
    assert all(bool(jnp.all(jnp.isfinite(g))) for g in jax.tree.leaves(gradients))
    result = layer.quant_weight() if build is weight else layer(X)
    if not (name == "restrict_scaling_type" and member is RestrictValueType.SIGNED_FP):
        assert bool(jnp.all(result.scale > 0))
    if member is RestrictValueType.POWER_OF_TWO:
        assert float(jnp.log2(result.scale)).is_integer()


WRONG = {
    "scaling_impl_type": ("statz", "stats"),
    "scaling_stats_op": ("maxx", "max"),
    "restrict_scaling_type": ("power_of_too", "power_of_two"),
    "float_to_int_impl_type": ("rond", "round"),
    "bit_width_impl_type": ("konst", "const"),
    "scaling_per_output_type": ("chanel", "channel"),
    "quant_type": ("itn", "int"),
}
ENUMS = {
    "scaling_impl_type": ScalingImplType,
    "scaling_stats_op": StatsOp,
    "restrict_scaling_type": RestrictValueType,
    "float_to_int_impl_type": FloatToIntImplType,
    "bit_width_impl_type": BitWidthImplType,
    "scaling_per_output_type": ScalingPerOutputType,
    "quant_type": QuantType,
}


@pytest.mark.parametrize("build", [weight, act])
@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_member_is_answered_with_the_members(build, name):
    wrong, near = WRONG[name]
    with pytest.raises(ValueError) as caught:
        build(**{name: wrong})
    text = str(caught.value)
    assert f"{name} = {wrong!r}" in text and f"did you mean {near.upper()!r}" in text
    assert all(member.name in text for member in ENUMS[name])


@pytest.mark.parametrize("build", [weight, act])
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("wrong", [8, RestrictValueType])
def test_what_is_no_string_is_a_type_error(build, name, wrong):
    with pytest.raises((TypeError, DependencyError)):
        build(**{name: wrong})


UNFIT = {
    "groups without a size": (weight, {"scaling_per_output_type": "group"}, "has no name 'group_size'"),
    "groups of an activation that keep a scale": (
        act,
        {"scaling_per_output_type": "group", "group_size": 2},
        "an activation's groups have no scales of their own to keep",
    ),
    "learned rounding of an activation": (
        act,
        {"float_to_int_impl_type": "learned_round"},
        "learns how each element of one weight is rounded, and this quantizer has no weight",
    ),
    "he of an activation": (
        act,
        {"scaling_impl_type": "he"},
        "scaling_impl_type = 'he' cannot be used here",
    ),
    "negative power of two": (
        weight,
        {"scaling_stats_op": "signed_max", "restrict_scaling_type": "power_of_two"},
        "declare restrict_scaling_type = 'signed_fp'",
    ),
    "bits by name": (weight, {"bit_width": "8"}, "bit_width must be an int"),
    "no bits": (weight, {"bit_width": 0}, "bit_width must be in 1 .. 32, got 0"),
    "no channels to go by": (act, {"scaling_per_output_type": "channel"}, "per_channel_broadcastable_shape"),
}


@pytest.mark.parametrize("case", UNFIT.values(), ids=UNFIT)
def test_choices_that_do_not_go_together(case):
    build, overrides, message = case
    with pytest.raises((ValueError, TypeError, DependencyError), match=message):
        build(**overrides)


def test_per_channel_activations():
    layer = act(scaling_per_output_type="channel", per_channel_broadcastable_shape=(1, 4),
                scaling_stats_permute_dims=(1, 0), scaling_stats_op="max")  # fmt: skip
    scale = layer(X).scale
    np.testing.assert_allclose(scale, np.abs(np.asarray(X)).max(0, keepdims=True) / 128, rtol=1e-6)


SCALES = {  # the scale by hand: of the weight w, of integers to 127
    "max": (weight, {}, lambda w: np.abs(w).max() / 127),
    "mean": (weight, {"scaling_stats_op": "ave"}, lambda w: np.abs(w).mean() / 127),
    "bits": (weight, {"bit_width": 3}, lambda w: np.abs(w).max() / 3),
    "wide": (weight, {"narrow_range": False}, lambda w: np.abs(w).max() / 128),
    "power of two": (
        weight,
        {"restrict_scaling_type": "power_of_two", "restrict_value_float_to_int_impl": core.CeilSte},
        lambda w: 2 ** np.ceil(np.log2(np.abs(w).max())) / 128,
    ),
    "constant": (weight, {"scaling_impl_type": "const", "scaling_const": 0.5}, lambda w: 0.5 / 127),
    "he": (weight, {"scaling_impl_type": "he"}, lambda w: np.sqrt(2 / 4) / 127),
    "sigma": (
        weight,
        {"scaling_stats_op": "mean_sigma_std", "sigma": 2.0},
        lambda w: (np.abs(w).mean() + 2 * np.abs(w).std(ddof=1)) / 127,
    ),
    "shifted": (
        lambda **g: weight(ShiftedUint8WeightPerTensorFloat, **g),
        {},
        lambda w: (w.max() - w.min()) / 255,
    ),
    "least": (weight, {"scaling_min_val": 9.0}, lambda w: 9.0 / 127),
    "channels": (
        weight,
        {"scaling_per_output_type": "channel"},
        lambda w: np.abs(w).max(0, keepdims=True) / 127,
    ),
}


@pytest.mark.parametrize("case", SCALES.values(), ids=SCALES)
def test_the_scale_by_hand(case):
    build, overrides, expected = case
    layer = build(**overrides)
    np.testing.assert_allclose(layer.weight_quant.scale(), expected(np.asarray(layer.kernel[...])), rtol=2e-6)


def test_the_bias_has_a_scale_of_its_own_or_the_accumulators():
    layer = QuantLinear(
        4,
        3,
        input_quant=Int8ActPerTensorFloat,
        bias_quant=Int32Bias,
        bias_init=nnx.initializers.normal(),
        rngs=nnx.Rngs(0),
    )
    x, w = layer.input_quant(X), layer.quant_weight()
    np.testing.assert_allclose(layer.quant_bias(x, w).scale, x.scale * w.scale, rtol=1e-6)
    own = QuantLinear(
        4,
        3,
        bias_quant=Int8BiasPerTensorFloatInternalScaling,
        bias_init=nnx.initializers.normal(),
        rngs=nnx.Rngs(0),
    )
    np.testing.assert_allclose(
        own.bias_quant.scale(), np.abs(np.asarray(own.bias[...])).max() / 128, rtol=1e-6
    )
    channels = QuantLinear(
        4, 3, bias_quant=Int8BiasPerTensorFloatInternalScaling, bias_scaling_per_output_type="channel",
        bias_init=nnx.initializers.normal(), rngs=nnx.Rngs(0),
    )  # fmt: skip
    np.testing.assert_allclose(
        channels.bias_quant.scale(), np.abs(np.asarray(channels.bias[...])) / 128, rtol=1e-6
    )


def test_a_learned_activation_scale_starts_from_what_is_declared():
    layer = QuantIdentity(Int8ActPerTensorFloatMinMaxInit, min_val=-2.0, max_val=1.0)
    assert float(layer.act_quant.scale()) == 2.0 / 128
    assert float(layer(jnp.array([100.0]))[0]) == pytest.approx(2.0 * 127 / 128)
