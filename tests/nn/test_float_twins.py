"""Without quantizers a layer is its Flax parent: the same weights, the same state, the same bits out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject.nn import (
    QuantConv,
    QuantHardSwish,
    QuantHardTanh,
    QuantIdentity,
    QuantLinear,
    QuantReLU,
    QuantSigmoid,
    QuantTanh,
)

NO_QUANTIZERS = dict.fromkeys(("weight_quant", "bias_quant", "input_quant", "output_quant"))
SEED = 3
MIXED = {"dtype": jnp.bfloat16, "preferred_element_type": jnp.float32}


def _scaled_dot(*args, **kwargs):
    return 2 * jax.lax.dot_general(*args, **kwargs)


def _scaled_conv(*args, **kwargs):
    return 2 * jax.lax.conv_general_dilated(*args, **kwargs)


def _as_half(arrays, *, dtype):
    return tuple(a if a is None else a.astype(jnp.float16) for a in arrays)


LINEAR = {
    "plain": {},
    "no bias": {"use_bias": False},
    "computed in bfloat16": {"dtype": jnp.bfloat16},
    "kept in bfloat16": {"param_dtype": jnp.bfloat16, "dtype": jnp.bfloat16},
    "kept in float16": {"param_dtype": jnp.float16, "dtype": jnp.float32},
    "precision": {"precision": jax.lax.Precision.HIGHEST},
    "initializers": {"kernel_init": nnx.initializers.ones_init(), "bias_init": nnx.initializers.normal(1.0)},
    "own dot_general": {"dot_general": _scaled_dot},
    "own promote_dtype": {"promote_dtype": _as_half},
    "preferred_element_type": {**MIXED, "use_bias": False},
}
CONV = {
    "1-D": ((5, 4), ((3,),), {}),
    "2-D": ((5, 6, 4), ((3, 2),), {}),
    "3-D": ((3, 4, 3, 4), ((2, 2, 3),), {}),
    "an int for a window": ((5, 4), (3,), {}),
    "no bias": ((5, 4), ((3,),), {"use_bias": False}),
    "strides": ((7, 6, 4), ((3, 3), (2, 3)), {}),
    "an int for strides": ((7, 4), ((3,), 2), {}),
    "valid": ((5, 6, 4), ((3, 3),), {"padding": "VALID"}),
    "padding by number": ((5, 6, 4), ((3, 3),), {"padding": 2}),
    "padding by axis": ((5, 6, 4), ((3, 3),), {"padding": ((1, 0), (0, 2))}),
    "circular": ((5, 6, 4), ((3, 3),), {"padding": "CIRCULAR"}),
    "causal": ((6, 4), ((3,),), {"padding": "CAUSAL"}),
    "reflected": ((6, 4), ((3,),), {"padding": "REFLECT"}),
    "groups": ((5, 6, 4), ((3, 3),), {"feature_group_count": 2}),
    "depthwise": ((5, 6, 4), ((3, 3),), {"feature_group_count": 4}),
    "dilated kernel": ((7, 7, 4), ((3, 3),), {"kernel_dilation": 2}),
    "dilated input": ((5, 6, 4), ((3, 3),), {"input_dilation": (1, 2), "padding": 1}),
    "mask": (
        (5, 4),
        ((3,),),
        {"mask": jnp.asarray(np.arange(3 * 4 * 8).reshape(3, 4, 8) % 3 > 0, jnp.float32)},
    ),
    "computed in bfloat16": ((5, 4), ((3,),), {"dtype": jnp.bfloat16}),
    "kept in bfloat16": ((5, 4), ((3,),), {"param_dtype": jnp.bfloat16, "dtype": jnp.bfloat16}),
    "precision": ((5, 4), ((3,),), {"precision": "highest"}),
    "own convolution": ((5, 4), ((3,),), {"conv_general_dilated": _scaled_conv}),
    "own promote_dtype": ((5, 4), ((3,),), {"promote_dtype": _as_half}),
    "preferred_element_type": ((5, 4), ((3,),), {**MIXED, "use_bias": False}),
}


def _number(shape):
    return jax.random.normal(jax.random.key(len(shape)), shape)


def _assert_twins(layer, parent, x):
    ours, theirs = nnx.to_flat_state(nnx.state(layer)), nnx.to_flat_state(nnx.state(parent))
    assert [(path, type(v)) for path, v in ours] == [(path, type(v)) for path, v in theirs]
    for (_, a), (_, b) in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a[...], b[...])
    y, expected = layer(x), parent(x)
    assert (y.dtype, y.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(y, expected)


@pytest.mark.heavy
@pytest.mark.parametrize("batch", [(), (3,), (2, 3), (0,)], ids=str)
@pytest.mark.parametrize("given", LINEAR.values(), ids=LINEAR)
def test_linear(given, batch):
    layer = QuantLinear(4, 8, **given, **NO_QUANTIZERS, rngs=nnx.Rngs(SEED))
    parent = nnx.Linear(4, 8, **given, rngs=nnx.Rngs(SEED))
    _assert_twins(layer, parent, _number((*batch, 4)))


@pytest.mark.parametrize("case", CONV.values(), ids=CONV)
def test_conv(case):
    shape, where, given = case
    layer = QuantConv(4, 8, *where, **given, **NO_QUANTIZERS, rngs=nnx.Rngs(SEED))
    parent = nnx.Conv(4, 8, *where, **given, rngs=nnx.Rngs(SEED))
    _assert_twins(layer, parent, _number((2, *shape)))


@pytest.mark.parametrize("batch", [(), (2, 1), (0,)], ids=["alone", "several batch axes", "empty"])
@pytest.mark.parametrize("case", ["1-D", "circular", "groups"])
def test_conv_over_other_batches(case, batch):
    shape, where, given = CONV[case]
    layer = QuantConv(4, 8, *where, **given, **NO_QUANTIZERS, rngs=nnx.Rngs(SEED))
    parent = nnx.Conv(4, 8, *where, **given, rngs=nnx.Rngs(SEED))
    _assert_twins(layer, parent, _number((*batch, *shape)))


@pytest.mark.parametrize("quantized", [QuantLinear, QuantConv])
@pytest.mark.parametrize("rounding", ["round", "stochastic_round"])
def test_quantizers_draw_nothing_from_the_streams_of_the_weights(quantized, rounding):
    where, parent = ((), nnx.Linear) if quantized is QuantLinear else (((3,),), nnx.Conv)
    rngs, float_rngs = (nnx.Rngs(params=SEED, stochastic_round=0) for _ in range(2))
    for _ in range(2):
        layer = quantized(4, 8, *where, weight_float_to_int_impl_type=rounding, rngs=rngs)
        twin = parent(4, 8, *where, rngs=float_rngs)
        np.testing.assert_array_equal(layer.kernel[...], twin.kernel[...])
        np.testing.assert_array_equal(layer.bias[...], twin.bias[...])


@pytest.mark.parametrize("quantized", [QuantLinear, QuantConv])
def test_metadata_of_the_parameters_is_kept(quantized):
    given = {
        "kernel_metadata": {"out_sharding": ("a", "b"), "note": "k"},
        "bias_metadata": {"out_sharding": ("b",)},
    }
    init = {"kernel_init": nnx.with_partitioning(nnx.initializers.ones_init(), ("c", "d"))}
    where, parent = ((), nnx.Linear) if quantized is QuantLinear else (((3,),), nnx.Conv)
    with nnx.use_eager_sharding(False):
        for more in (given, init):
            layer = quantized(4, 8, *where, **more, rngs=nnx.Rngs(0))
            twin = parent(4, 8, *where, **more, rngs=nnx.Rngs(0))
            assert layer.kernel.get_metadata() == twin.kernel.get_metadata()
            assert layer.bias.get_metadata() == twin.bias.get_metadata()


ACTIVATIONS = {
    QuantIdentity: lambda x: x,
    QuantReLU: jax.nn.relu,
    QuantSigmoid: jax.nn.sigmoid,
    QuantTanh: jnp.tanh,
    QuantHardTanh: jax.nn.hard_tanh,
    QuantHardSwish: jax.nn.hard_swish,
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("layer", ACTIVATIONS)
def test_activations(layer, dtype):
    x = jnp.linspace(-3, 3, 25, dtype=dtype)
    for shape in ((25,), (5, 5), (0, 3)):
        x = x[: int(np.prod(shape))].reshape(shape)
        y, expected = layer(act_quant=None)(x), ACTIVATIONS[layer](x)
        assert y.dtype == dtype
        np.testing.assert_array_equal(y, expected)
        x = jnp.linspace(-3, 3, 25, dtype=dtype)
