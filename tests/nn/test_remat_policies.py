"""Rematerialisation keeps what its policy says; loss and gradients are those without it, to the bit.

Inputs, weights and cotangents are whole numbers whose sums float32 holds, so that no order of additions matters; the
largest are the largest of `float8_e4m3fn`.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject import quant
from jqinject.dot import QConvGeneralDilated, QDotGeneral, QuantMode
from jqinject.nn import QuantConv, QuantLinear
from jqinject.quant.aqt import config_fwd_fp8, config_v4

POLICIES = {
    "everything": jax.checkpoint_policies.everything_saveable,
    "all_but_names": jax.checkpoint_policies.save_anything_except_these_names("unused"),
}


def whole_numbers(key, shape, dtype=jnp.float32, largest=448):
    return jax.random.randint(key, shape, -largest, largest + 1).astype(dtype).at[..., 0].set(largest)


X = whole_numbers(jax.random.key(0), (4, 32))
FLOAT = {"kernel_init": whole_numbers, "rngs": nnx.Rngs(0)}
IMAGES = X.reshape(2, 4, 4, 4)
FP8_GRADIENTS = config_v4(rng_type=None, fwd_bits="e4m3", dlhs_bits="e4m3", drhs_bits="e5m2")


class Gradients(FP8_GRADIENTS):
    dlhs_use_fwd_quant = True


def frozen(model, x=X):
    model(x)
    model.eval()
    jqinject.freeze(model)
    return model


def linear(weight, act=None, grad=None):
    return QuantLinear(32, 16, weight_quant=weight, input_quant=act, grad_quant=grad, **FLOAT)


def dot(config, mode=QuantMode.TRAIN):
    op = QDotGeneral(config, rhs_quant_mode=QuantMode.CONVERT)
    layer = nnx.Linear(32, 16, dot_general=op, **FLOAT)
    layer(X)
    op.rhs_quant_mode = mode
    return layer


def conv(mode):
    op = QConvGeneralDilated(
        config_fwd_fp8(), lhs_quant_mode=QuantMode.TRAIN, rhs_quant_mode=QuantMode.CONVERT
    )
    layer = nnx.Conv(4, 8, (3, 3), conv_general_dilated=op, **FLOAT)
    layer(IMAGES)
    op.rhs_quant_mode = mode
    return layer


CASES = {
    "current": lambda: linear(
        quant.Fp8e4m3WeightPerTensorCurrent,
        quant.Fp8e4m3ActPerTensorCurrent,
        quant.Fp8e5m2GradPerTensorCurrent,
    ),
    "delayed": lambda: linear(quant.Fp8e4m3WeightPerTensorDelayed, quant.Fp8e4m3ActPerTensorDelayed),
    "fnuz": lambda: linear(
        quant.Fp8e4m3FNUZWeightPerTensorCurrent,
        quant.Fp8e4m3FNUZActPerTensorCurrent,
        quant.Fp8e5m2FNUZGradPerTensorCurrent,
    ),
    "frozen": lambda: frozen(linear(quant.Fp8e4m3WeightPerChannelCurrent, quant.Fp8e4m3ActPerTensorCurrent)),
    "frozen_weight": lambda: frozen(linear(quant.Fp8e4m3WeightPerTensorCurrent)),
    "frozen_conv": lambda: frozen(
        QuantConv(
            4,
            8,
            (3, 3),
            weight_quant=quant.Fp8e4m3WeightPerTensorCurrent,
            input_quant=quant.Fp8e4m3ActPerTensorCurrent,
            **FLOAT,
        ),
        IMAGES,
    ),
    "mxfp4": lambda: linear(quant.MXFloat4e2m1Weight, quant.MXFloat4e2m1Act),
    "mxfp4_frozen": lambda: frozen(linear(quant.MXFloat4e2m1Weight, quant.MXFloat4e2m1Act)),
    "mxfp8_frozen": lambda: frozen(linear(quant.MXFloat8e4m3Weight)),
    "nvfp4": lambda: linear(quant.NVFP4Weight, quant.NVFP4Act),
    "nvfp4_frozen": lambda: frozen(linear(quant.NVFP4Weight, quant.NVFP4Act)),
    "dot": lambda: dot(FP8_GRADIENTS),
    "dot_forward_payloads": lambda: dot(Gradients),
    "dot_served": lambda: dot(FP8_GRADIENTS, QuantMode.SERVE),
    "conv": lambda: conv(QuantMode.TRAIN),
    "conv_served": lambda: conv(QuantMode.SERVE),
}


@pytest.mark.lengthy
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_without_remat(case):
    model = CASES[case]()
    x = IMAGES if "conv" in case else X

    cotangent = whole_numbers(jax.random.key(1), nnx.eval_shape(lambda m, x: m(x), model, x).shape, largest=7)

    def loss(policy):
        run = (lambda m, x: m(x)) if policy is None else nnx.remat(lambda m, x: m(x), policy=policy)
        return lambda m, x: jnp.vdot(run(m, x), cotangent)

    @nnx.jit
    def steps(models, x):
        policies = (None, *POLICIES.values())
        return [
            jqinject.value_and_grad(loss(p), argnums=(0, 1))(m, x)
            for p, m in zip(policies, models, strict=True)
        ]

    expected, *found = steps([nnx.clone(model) for _ in (None, *POLICIES)], x)
    for name, result in zip(POLICIES, found, strict=True):
        jax.tree.map(partial(np.testing.assert_array_equal, err_msg=name), result, expected)
