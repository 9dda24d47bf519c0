"""Layers with weights, built alike."""

import pytest
from flax import nnx

from jqinject.nn import QuantConv, QuantLinear, QuantLinearGeneral


def _linear(**given):
    return QuantLinear(6, 4, **{"rngs": nnx.Rngs(0), **given})


def _conv(**given):
    return QuantConv(6, 4, (2, 3), **{"rngs": nnx.Rngs(0), "padding": "VALID", **given})


def _general(**given):
    return QuantLinearGeneral(6, 4, **{"rngs": nnx.Rngs(0), **given})


@pytest.fixture(params=[_linear, _conv, _general], ids=["linear", "conv", "general"])
def make(request):
    """Builds a layer from 6 to 4 channels; its input is (2, 3, 4, 6)."""
    return request.param
