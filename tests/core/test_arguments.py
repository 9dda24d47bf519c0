"""Every constructor argument of every component is checked: nonsense is refused, and the error names the argument."""

import inspect
import math
import re

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject.core
import jqinject.dot.geometry.tiles
from jqinject import core
from jqinject.core import check, views, zero_point
from jqinject.core.component import component as as_component
from jqinject.core.statistics import extremes, half_quadratic_search, means, search

ROOMS = (
    jqinject.core,
    extremes,
    half_quadratic_search,
    means,
    search,
    views,
    zero_point,
    jqinject.dot.geometry.tiles,
)
ONE = core.ConstScaling(1.0)
INT = core.IntQuant(False, True)
BITS = core.BitWidthConst(8)
VIEW = core.OverTensorView()
# Arguments without a default, by name: right for every component that has one so named.
RIGHT = {
    "accumulator_bit_width_impl": core.BitWidthConst(16),
    "bit_width": 8,
    "bit_width_impl": BITS,
    "bit_width_to_remove": 2,
    "bit_width_to_remove_impl": core.BitWidthConst(2),
    "bits": 8,
    "codebook": (-1.0, 0.0, 1.0),
    "collect_stats_steps": 3,
    "decoupled_int_quant": core.DecoupledIntQuant(True, True),
    "dtype": jnp.float8_e4m3fn,
    "expanded_groupwise_shape": (2, 4),
    "exponent_bias": 7,
    "exponent_bias_impl": core.StaticExponentBias(7),
    "exponent_bit_width_impl": core.ExponentWidthConst(4),
    "float_clamp_impl": core.FloatClamp(),
    "float_to_int_impl": core.RoundSte(),
    "group_dim": 0,
    "group_size": 4,
    "high": 1.0,
    "high_percentile_q": 99.0,
    "hqo_init_op_scale": core.AbsMax(),
    "hqo_init_op_zp": core.AbsMax(),
    "inner_stats_input_view_shape_impl": VIEW,
    "input_view_impl": core.Identity(),
    "int_quant": INT,
    "int_scaling_impl": core.IntScaling(False, True),
    "learned_round_impl": core.LearnedRoundSigmoid(),
    "learned_round_init": np.zeros(3, np.float32),
    "low": -1.0,
    "low_percentile_q": 1.0,
    "mantissa_bit_width_impl": core.MantissaWidthConst(3),
    "max_overall_bit_width": 8,
    "max_val": 1.0,
    "min_overall_bit_width": 2,
    "min_val": -1.0,
    "mse_init_op": core.AbsMax(),
    "mse_iters": 5,
    "narrow_range": False,
    "normalize_stats_impl": core.AbsMax(),
    "pre_scaling_impl": ONE,
    "pre_zero_point_impl": core.ZeroZeroPoint(),
    "pre_zero_point_stats_input_view_shape_impl": VIEW,
    "quant_delay_steps": 0,
    "quantize_zero_point": True,
    "restrict_value_float_to_int_impl": core.RoundSte(),
    "scaling_impl": ONE,
    "scaling_init": 1.0,
    "scaling_stats_impl": core.AbsMax(),
    "scaling_stats_input_view_shape_impl": VIEW,
    "sigma": 3.0,
    "signed": True,
    "stats_reduce_dim": 1,
    "threshold": 0.5,
    "tracked_parameter_list": [jnp.ones((3, 4))],
    "trunc_int_scaling_impl": core.PowerOfTwoIntScaling(True),
    "value": 1.0,
    "zero_point_impl": core.ZeroZeroPoint(),
    "zero_point_init": 0.0,
    "zero_point_shape": (),
    "zero_point_stats_impl": core.AbsMax(),
    "zero_point_stats_input_concat_dim": 0,
    "zero_point_stats_input_view_shape_impl": VIEW,
    "zp_int_quant": INT,
}
BESIDE = {
    "FloatQuant": {"cast_impl": core.Float8Cast()},
    "L1Norm": {"stats_reduce_dim": 1},
    "L2Norm": {"stats_reduce_dim": 1},
    "LocalAqt": {"contraction_axis_shard_count": 2},
    "AccumulatorAwareZeroCenterParameterPreScaling": {
        "pre_zero_point_impl": core.PreZeroCenterZeroPoint(1, core.OverOutputChannelView()),
    },
    "DecoupledRescalingIntQuantWithInput": {
        "pre_scaling_impl": core.AccumulatorAwareParameterPreScaling(
            ONE, core.AbsMax(), VIEW, [jnp.ones((3, 4))], accumulator_bit_width_impl=core.BitWidthConst(16)
        ),
    },
}
NONSENSE = {
    "bool": (None, 0, 1, "False", math.nan),
    "bool | None": (0, 1, "False"),
    "int": (None, True, 1.5, math.nan, "8", -(10**9)),
    "int | None": (True, 1.5, math.nan, "8"),
    "float": (None, True, math.nan, "0.1"),
    "float | None": (True, math.nan, "0.1"),
    "tuple[int, ...]": (None, 3, "ab", (1.5,), (True,)),
    "tuple[int, ...] | None": (3, "ab", (1.5,)),
    "Sequence[int]": (None, 3, "ab", (1.5,)),
    "Sequence[int] | None": (3, "ab", (1.5,)),
    "tuple[float, ...]": (None, 3.0, "ab", (), (math.nan,), (1.0, True)),
    **{kind: (None, 3, core.AbsMax) for kind in ("Stat", "View", "Scaling", "BitWidth", "Rounding", "Clamp")},
    **{f"{kind} | None": (3, core.AbsMax) for kind in ("Stat", "View", "Restrict", "Rounding", "Clamp")},
}
ANY_INT = ("group_dim", "stats_reduce_dim", "seed", "exponent_bias", "zero_point_stats_input_concat_dim")
ANY_INT += ("scaling_stats_input_concat_dim",)


def components():
    found = {}
    for room in ROOMS:
        for name, member in vars(room).items():
            if not inspect.isclass(member) or not member.__module__.startswith("jqinject."):
                continue
            built = "__init__" in vars(member) and not issubclass(member, tuple | nnx.Variable)
            needed = [
                p.name
                for p in list(inspect.signature(member.__init__).parameters.values())[1:]
                if p.default is p.empty
            ]
            if built and not inspect.isabstract(member) and set(needed) <= set(RIGHT):
                found[name] = member
    return found


def cases():
    for name, component in sorted(components().items()):
        parameters = list(inspect.signature(component.__init__).parameters.values())[1:]
        needed = {p.name: RIGHT[p.name] for p in parameters if p.default is p.empty} | BESIDE.get(name, {})
        for parameter in parameters:
            values = NONSENSE.get(str(parameter.annotation), ())
            for value in values:
                if not (value == -(10**9) and parameter.name in ANY_INT):
                    yield component, needed, parameter.name, value


def test_components_can_be_built_from_right_arguments():
    for name, component in components().items():
        parameters = list(inspect.signature(component.__init__).parameters.values())[1:]
        given = {p.name: RIGHT[p.name] for p in parameters if p.default is p.empty}
        component(**{**given, **BESIDE.get(name, {})})


def test_nonsense_is_refused_by_name():
    accepted = []
    for component, needed, name, value in cases():
        try:
            component(**{**needed, name: value})
        except (TypeError, ValueError) as error:
            if name not in str(error):
                accepted.append(
                    f"{component.__name__}({name}={value!r}) is refused without its name: {error}"
                )
        else:
            accepted.append(f"{component.__name__}({name}={value!r}) is accepted")
    assert not accepted, "\n".join(accepted)


OUT_OF_RANGE = {
    "delay below 0": (lambda: core.DelayWrapper(-1), "quant_delay_steps must be in 0 .. 16777215, got -1"),
    "delay of a quantizer": (lambda: core.IntQuant(True, True, quant_delay_steps=-3), "got -3"),
    "delay beyond its counter": (lambda: core.BinaryQuant(ONE, quant_delay_steps=2**24), "quant_delay_steps"),
    "steps beyond their counter": (
        lambda: core.ParameterFromRuntimeStatsScaling(2**24, core.AbsMax()),
        "collect_stats_steps must be at most 16777215",
    ),
    "history": (
        lambda: core.AmaxScaling(amax_history_length=10**9),
        "amax_history_length must be at most 1048576",
    ),
    "margin above": (lambda: core.AmaxScaling(margin=200), "margin must be in -32 .. 32, got 200"),
    "margin below": (lambda: core.AmaxScaling(margin=-200), "margin must be in -32 .. 32, got -200"),
    "scale 0": (lambda: core.ConstScaling(0.0), "scaling_init must be positive, got 0.0"),
    "scale below 0": (lambda: core.ParameterScaling(-0.5), "scaling_init must be positive, got -0.5"),
    "one scale of several": (
        lambda: core.ParameterScaling(jnp.array([1.0, -2.0])),
        "scaling_init must be positive, got -2.0",
    ),
    "scale 0, of either sign": (
        lambda: core.ParameterScaling(0.0, restrict_scaling_impl=core.SignedFloatRestrictValue()),
        "scaling_init must be positive",
    ),
    "crossed bounds": (lambda: core.ScalarClamp(1.0, -1.0), "min_val=1.0 is above max_val=-1.0"),
    "crossed bounds, straight through": (lambda: core.ScalarClampSte(1.0, -1.0), "min_val=1.0 is above"),
    "bound": (lambda: core.ClampMin(math.nan), "min_val must be a number, got nan"),
    "crossed widths": (
        lambda: core.MsbClampBitWidth(core.BitWidthConst(2), 8, 2),
        "min_overall_bit_width=8 is above max_overall_bit_width=2",
    ),
    "sigma": (lambda: core.MeanSigmaStd(-1.0), "sigma must be at least 0, got -1.0"),
    "epsilon": (lambda: core.MeanSigmaStd(3.0, None, 0.0), "std_dev_epsilon must be above 0, got 0.0"),
    "largest float": (lambda: core.FloatScaling(-448.0), "max_available_float must be above 0, got -448.0"),
    "clipping scale": (
        lambda: core.AbsMaxRange(factor=0.0),
        "factor must be a positive number, got 0.0",
    ),
    "clipping scales": (
        lambda: core.MSERange(fractions=(1.0, -0.5)),
        "fractions must be above 0",
    ),
    "exponent of a mean": (
        lambda: core.AbsMeanRange(p=0.0),
        "p must be above 0",
    ),
    "bound of a calibration": (
        lambda: core.FixedRange(-math.inf, math.inf),
        "low must be a finite number, got -inf",
    ),
}


@pytest.mark.parametrize(("build", "text"), OUT_OF_RANGE.values(), ids=OUT_OF_RANGE.keys())
def test_numbers_out_of_range_are_refused(build, text):
    with pytest.raises(ValueError) as error:
        build()
    assert text in str(error.value)


def test_arguments_of_your_own_components_are_checked_by_their_annotations():
    @as_component
    class Own(core.Component):
        share: "check.Percentage"
        steps: "int | None" = None
        float_to_int_impl: core.RoundSte = core.RoundSte()

    assert (Own(np.int64(3)).share, Own(3, np.int64(4)).steps, Own(3).steps) == (3.0, 4, None)
    for arguments, text in (
        ((101,), "Own: share is a percentage, expected 0 .. 100, got 101."),
        ((3, 1.5), "Own: steps must be an int, got 1.5 of type float."),
        ((3, None, core.RoundSte), "Own: float_to_int_impl must be a component, got the class RoundSte."),
    ):
        with pytest.raises((TypeError, ValueError), match=re.escape(text)):
            Own(*arguments)


def test_what_is_legitimate_passes():
    assert core.DelayWrapper(None).countdown is None
    assert core.ScalarClamp(-math.inf, 0.0)(jnp.float32(-9.0)) == -9.0
    core.AbsMax(np.int64(1), keepdim=np.True_)
    core.ConstScaling(-1.0, core.SignedFloatRestrictValue())
    core.AmaxScaling(margin=np.float32(1.5))


def test_the_magnitude_of_a_signed_clamp_counts():
    x = jnp.array([-3.0, -0.5, 0.0, 0.5])
    np.testing.assert_array_equal(core.ScalarSignedClampMinSte(-1.0)(x), [-3.0, -1.0, 1.0, 1.0])
    np.testing.assert_array_equal(core.ScalarSignedClampMinSte(-1.0)(x), core.ScalarSignedClampMinSte(1.0)(x))
