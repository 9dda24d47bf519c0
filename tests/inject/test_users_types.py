"""A user's file passes a type checker in its usual mode."""

import json
import pathlib
import subprocess
import sys

import pytest

import jqinject

USERS_FILE = '''
"""Quantizers of my own."""

import jax.numpy as jnp
from flax import nnx

from jqinject import ExtendedInjector, this, value
from jqinject.core import BinaryQuant, ClampedBinaryQuant, ParameterScaling
from jqinject.inject import choices
from jqinject.nn import QuantLinear
from jqinject.proxy import WeightQuantProxyFromInjector
from jqinject.quant import (
    Int8ActPerTensorFloat,
    Int8WeightPerChannelFloat,
    QuantizerLike,
    ScalingImplType,
    StatsOp,
)


class W4(Int8WeightPerChannelFloat):
    bit_width = 4
    scaling_impl_type = ScalingImplType.PARAMETER_FROM_STATS
    scaling_stats_op = StatsOp.MAX


@choices(BinaryQuant, ClampedBinaryQuant)
def quantizer_of(is_clamped):
    return ClampedBinaryQuant if is_clamped else BinaryQuant


class Mine(ExtendedInjector):
    proxy_class = WeightQuantProxyFromInjector
    tensor_quant = quantizer_of
    scaling_impl = ParameterScaling
    signed = True
    is_clamped = False
    levels = value(lambda bit_width: 2**bit_width)
    largest = value(lambda levels, signed: levels // 2 - 1 if signed else levels - 1)
    scaling_shape = value(lambda module: this.all_shape if module is None else ())

    @value
    @staticmethod
    def scaling_init(module):
        return float(jnp.max(jnp.abs(module.weight[...])))


def layer(weight_quant: QuantizerLike = Mine) -> QuantLinear:
    return QuantLinear(64, 32, weight_quant=weight_quant, input_quant=Int8ActPerTensorFloat, rngs=nnx.Rngs(0))


first = layer(W4.let(bit_width=3))
second = layer(first.weight_quant)
third = layer(None)
levels: int = Mine.let(bit_width=3).largest
'''


@pytest.mark.heavy
def test_a_users_file_runs():
    made = {}
    exec(compile(USERS_FILE, "mine.py", "exec"), made)
    assert made["levels"] == 3
    assert made["layer"]().weight_quant.scale() > 0
    assert made["second"].weight_quant is made["first"].weight_quant


@pytest.mark.lengthy
def test_a_type_checker_accepts_it(tmp_path):
    pytest.importorskip("pyright", reason="the type checker: pip install jqinject[dev]")
    (tmp_path / "mine.py").write_text(USERS_FILE)
    options = {
        "include": ["mine.py"],
        "extraPaths": [str(pathlib.Path(jqinject.__file__).parents[1])],
        "typeCheckingMode": "standard",
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(options))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    found = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] == 1
    assert [(d["rule"], d["message"]) for d in found["generalDiagnostics"]] == []
