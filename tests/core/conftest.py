"""Quantizers by hand, in the combinations that users meet."""

import pytest

from jqinject import core


def _weight(**changes):
    return core.RescalingIntQuant(
        core.IntQuant(True, True, tensor_clamp_impl=core.TensorClampSte()),
        core.StatsFromParameterScaling(core.AbsMax(), core.OverTensorView(), **changes),
        core.IntScaling(True, True),
        core.ZeroZeroPoint(),
        core.BitWidthConst(8),
    )


def _per_channel():
    return core.RescalingIntQuant(
        core.IntQuant(True, True),
        core.StatsFromParameterScaling(
            core.AbsMax(stats_reduce_dim=1),
            core.OverOutputChannelView(permute_dims=(1, 0)),
            scaling_shape=(1, 4),
            restrict_scaling_impl=core.PowerOfTwoRestrictValue(core.CeilSte()),
        ),
        core.PowerOfTwoIntScaling(True),
        core.ZeroZeroPoint(),
        core.BitWidthParameter(8),
    )


def _learned():
    int_quant = core.IntQuant(False, False)
    view = core.OverTensorView()
    return core.RescalingIntQuant(
        int_quant,
        core.ParameterFromStatsFromParameterScaling(core.AbsMinMax(), view),
        core.IntScaling(False, False),
        core.ParameterFromStatsFromParameterZeroPoint(int_quant, True, view, 0, core.NegativeMinOrZero(), ()),
        core.BitWidthConst(8),
    )


def _activation(restriction=None, stat=None):
    return core.RescalingIntQuant(
        core.IntQuant(False, True, quant_delay_steps=1),
        core.ParameterFromRuntimeStatsScaling(
            2, stat or core.AbsPercentile(99.999), restrict_scaling_impl=restriction
        ),
        core.IntScaling(False, True),
        core.ZeroZeroPoint(),
        core.BitWidthConst(8),
    )


def _asymmetric():
    int_quant = core.IntQuant(False, False)
    view = core.OverTensorView()
    return core.RescalingIntQuant(
        int_quant,
        core.ParameterFromRuntimeStatsScaling(2, core.PercentileInterval(0.001, 99.999), view),
        core.IntScaling(False, False),
        core.ParameterFromRuntimeZeroPoint(
            2, int_quant, True, core.NegativePercentileOrZero(0.001), (), view
        ),
        core.BitWidthConst(8),
    )


def _running():
    return core.RescalingIntQuant(
        core.IntQuant(False, True, float_to_int_impl=core.FloorSte()),
        core.RuntimeStatsScaling(core.MeanSigmaStd(3.0), restrict_scaling_impl=core.LogFloatRestrictValue()),
        core.IntScaling(False, True),
        core.ZeroZeroPoint(),
        core.BitWidthStatefulConst(8),
    )


def _binary():
    return core.BinaryQuant(core.ParameterScaling(0.3), quant_delay_steps=1)


def _ternary():
    return core.TernaryQuant(core.StatsFromParameterScaling(core.AbsAve(), core.OverTensorView()), 0.5)


QUANTIZERS = {
    "weight": _weight,
    "weight per channel, power of two, learned bits": _per_channel,
    "weight learned asymmetric": _learned,
    "activation delayed": _activation,
    "activation log": lambda: _activation(core.LogFloatRestrictValue(), core.AbsMax()),
    "activation learned sigma": lambda: _activation(None, core.MeanLearnedSigmaStd(2.0)),
    "activation asymmetric": _asymmetric,
    "activation running": _running,
    "binary": _binary,
    "clamped binary": lambda: core.ClampedBinaryQuant(core.ConstScaling(0.3)),
    "ternary": _ternary,
}


@pytest.fixture(params=QUANTIZERS.values(), ids=QUANTIZERS.keys())
def build(request):
    """A function that builds the quantizer for a tensor of shape (n, 4)."""
    return request.param
