"""Wrong arguments are refused at construction, by an error that says what to do."""

import jax.numpy as jnp
import pytest
from flax import nnx

from jqinject import core

VIEW = core.OverTensorView()
INT = core.IntQuant(False, False)

CASES = {
    "bit width float": (
        lambda: core.BitWidthConst(8.0),
        TypeError,
        r"must be an int, got 8\.0 of type float.*bit_width = 8",
    ),
    "bit width bool": (lambda: core.BitWidthConst(True), TypeError, r"must be an int, got True"),
    "bit width 0": (lambda: core.BitWidthConst(0), ValueError, r"must be in 1 \.\. 32, got 0"),
    "bit width 33": (lambda: core.BitWidthConst(33), ValueError, r"must be in 1 \.\. 32, got 33"),
    "learned below least": (
        lambda: core.BitWidthParameter(1),
        ValueError,
        r"bit_width=1 is less than min_bit_width=2.*lower min_bit_width",
    ),
    "steps 0": (
        lambda: core.ParameterFromRuntimeStatsScaling(0, core.AbsMax()),
        ValueError,
        r"collect_stats_steps must be at least 1, got 0.*use ParameterScaling",
    ),
    "steps float": (
        lambda: core.ParameterFromRuntimeZeroPoint(1.5, INT, True, core.AbsMax(), (), VIEW),
        TypeError,
        r"collect_stats_steps must be an int, got 1\.5",
    ),
    "percentile": (lambda: core.AbsPercentile(100.5), ValueError, r"expected 0 \.\. 100, got 100\.5"),
    "percentiles crossed": (
        lambda: core.PercentileInterval(60.0, 40.0),
        ValueError,
        r"60\.0 is above .*40\.0",
    ),
    "log of zero": (
        lambda: core.ParameterScaling(0.0, restrict_scaling_impl=core.LogFloatRestrictValue()),
        ValueError,
        r"must be positive, got 0\.0.*scaling_init.*FloatRestrictValue",
    ),
    "log of a negative": (
        lambda: core.ConstScaling(-1.0, core.PowerOfTwoRestrictValue()),
        ValueError,
        r"must be positive, got -1\.0",
    ),
    "nan": (lambda: core.ParameterScaling(float("nan")), ValueError, r"scaling_init must be finite, got nan"),
    "shape of scaling_init": (
        lambda: core.ParameterScaling(jnp.ones(3), (4,)),
        ValueError,
        r"scaling_init has shape \(3,\), scaling_shape is \(4,\).*scaling_init\.reshape\(\(4,\)\)",
    ),
    "shape of zero_point_init": (
        lambda: core.ParameterZeroPoint(jnp.ones(3), INT, True, (4,)),
        ValueError,
        r"zero_point_init has shape \(3,\), zero_point_shape is \(4,\)",
    ),
    "scaling_shape": (
        lambda: core.ParameterScaling(1.0, 4),
        TypeError,
        r"scaling_shape must be a tuple of ints such as \(\) or \(1, 64\), got 4",
    ),
    "momentum": (
        lambda: core.RuntimeStatsScaling(core.AbsMax(), scaling_stats_momentum=1.5),
        ValueError,
        r"momentum must be in \(0, 1\], or None.*got 1\.5",
    ),
    "least value": (
        lambda: core.ConstScaling(1.0, scaling_min_val=-1.0),
        ValueError,
        r"scaling_min_val must be None or a finite number >= 0",
    ),
    "shift without factor": (
        lambda: core.StatsFromParameterScaling(core.AbsMax(), VIEW, scaling_affine_shifting_init=0.1),
        ValueError,
        r"give scaling_affine_rescaling_init=1\.0",
    ),
    "forced without parameter": (
        lambda: core.StatsFromParameterScaling(core.AbsMax(), VIEW, force_parameter=True),
        ValueError,
        r"needs a parameter in tracked_parameter_list, got none",
    ),
    "channels needed": (
        lambda: core.AbsMaxAve(None),
        ValueError,
        r"give stats_reduce_dim .*use AbsMax or AbsAve",
    ),
    "unsigned binary": (
        lambda: core.BinaryQuant(core.ConstScaling(1.0), signed=False),
        ValueError,
        r"signed=True",
    ),
    "ternary threshold": (
        lambda: core.TernaryQuant(core.ConstScaling(1.0), -0.5),
        ValueError,
        r"expected >= 0",
    ),
    "delay": (
        lambda: core.IntQuant(True, True, quant_delay_steps=0.5),
        TypeError,
        r"quant_delay_steps must be an int",
    ),
    "no steps": (
        lambda: core.IntScaling(True, True)(1),
        ValueError,
        r"leaves 0 as the only integer.*BinaryQuant",
    ),
    "signedness unknown": (
        lambda: core.PowerOfTwoIntScaling()(8),
        ValueError,
        r"Build it with signed=True or False",
    ),
    "no tensor": (
        lambda: core.StatsFromParameterScaling(core.AbsMax(), VIEW)(None),
        TypeError,
        r"call it with the weight, or build it with force_parameter=True",
    ),
    "statistic of another shape": (
        lambda: core.StatsFromParameterScaling(core.AbsMax(), VIEW, scaling_shape=(1, 4))(jnp.ones((3, 4))),
        ValueError,
        r"statistic has shape \(\), scaling_shape is \(1, 4\).*OverOutputChannelView",
    ),
    "reduced axis": (
        lambda: core.AbsMax(stats_reduce_dim=1)(jnp.ones(4)),
        ValueError,
        r"stats_reduce_dim=1 is not an axis of the viewed tensor of shape \(4,\)",
    ),
    "permutation": (
        lambda: core.OverOutputChannelView((1, 0))(jnp.ones((2, 3, 4))),
        ValueError,
        r"permute_dims=\(1, 0\) does not permute the 3 axes",
    ),
    "shared layers that do not fit": (
        lambda: core.StatsFromParameterScaling(
            core.AbsMax(1),
            core.OverOutputChannelView((1, 0)),
            1,
            [nnx.Param(jnp.ones((3, 4))), nnx.Param(jnp.ones((3, 5)))],
            (1, 4),
        )(jnp.ones((3, 4))),
        ValueError,
        r"shapes \[\(3, 4\), \(3, 5\)\] share one quantizer.*same number of output channels",
    ),
}


@pytest.mark.parametrize(("build", "error", "text"), CASES.values(), ids=CASES.keys())
def test_error(build, error, text):
    with pytest.raises(error, match=text):
        build()
