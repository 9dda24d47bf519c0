"""4-bit weights as onnxruntime's `MatMulNBits`: the numbers of the frozen model, and four bits of each in the file."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject.nn import QuantConv, QuantEinsum, QuantLinear, QuantLinearGeneral
from jqinject.quant import (
    Int4WeightPerGroupAbsMax,
    Int8ActPerTensorFloatMinMaxInit,
    Int8WeightPerChannelFloat,
    IntWeightSymmetricGroupQuant,
    ShiftedUint8WeightGroupQuantFloat,
    ShiftedUint8WeightPerGroupFloatHQO,
)
from jqinject.quant_tensor import as_array

REASON = "ONNX needs jax2onnx, onnx and onnxruntime: pip install 'jqinject[export]' onnxruntime"
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of other packages, as they are imported
    pytest.importorskip("jax2onnx", reason=REASON)
    onnxruntime = pytest.importorskip("onnxruntime", reason=REASON)
    onnx = pytest.importorskip("onnx", reason=REASON)

FEATURES = 80  # 2.5 blocks of 32


class W4(IntWeightSymmetricGroupQuant):
    bit_width = 4
    group_size = 32


class ShiftedW4(ShiftedUint8WeightGroupQuantFloat):
    bit_width = 4
    group_size = 32


class HqoW4(ShiftedUint8WeightPerGroupFloatHQO):
    bit_width = 4
    group_size = 16


class ChannelW4(Int8WeightPerChannelFloat):
    bit_width = 4


def frozen(layer):
    jqinject.freeze(layer)
    return layer


def linear(weight, **more):
    bias = {"bias_init": nnx.initializers.normal(1.0)}
    return frozen(QuantLinear(FEATURES, 6, weight_quant=weight, **bias, **more, rngs=nnx.Rngs(0)))


def run(proto, *inputs):
    """The first output, by onnxruntime."""
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]
    return session.run(None, dict(zip(names, map(np.asarray, inputs), strict=True)))[0]


def served(model, *inputs):
    return np.asarray(nnx.jit(lambda model, *inputs: as_array(model(*inputs)))(model, *inputs))


def products(proto):
    """Of each `MatMulNBits`, its attributes and stored inputs."""
    stored = {entry.name: onnx.numpy_helper.to_array(entry) for entry in proto.graph.initializer}
    return [
        ({entry.name: entry.i for entry in node.attribute}, [stored[name] for name in node.input[1:]])
        for node in proto.graph.node
        if (node.domain, node.op_type) == ("com.microsoft", "MatMulNBits")
    ]


def unpacked(codes, k):
    """(n, k) integers from 0 to 15: ONNX's definition, the low half first."""
    halves = np.stack([codes & 15, codes >> 4], -1)
    return halves.reshape(codes.shape[0], -1)[:, :k].astype(np.float64)


@pytest.fixture(scope="module")
def x():
    return jax.random.normal(jax.random.key(0), (5, FEATURES))


@pytest.mark.parametrize(
    ("weight", "block", "size", "zeros"),
    [
        (W4, 256, 32, None),
        (W4, 16, 16, None),
        (Int4WeightPerGroupAbsMax.let(group_size=16), 32, 16, None),
        (ChannelW4, 64, 64, None),
        (ChannelW4.let(bit_width=3), 64, 64, None),
        (W4.let(group_size=48), 128, 16, None),
        (ShiftedW4, 128, 32, np.uint8),
        (HqoW4, 32, 16, np.float32),
    ],
    ids=[
        "groups",
        "halves of groups",
        "-8 to 7",
        "channels",
        "3 bits",
        "48",
        "zero points",
        "between integers",
    ],
)
def test_onnxruntime_computes_the_frozen_layer(weight, block, size, zeros, x):
    layer = linear(weight)
    proto = jqinject.export.onnx(layer, x, block=block)
    ((attributes, (codes, scales, *more)),) = products(proto)
    shape = {"K": FEATURES, "N": 6, "bits": 4, "block_size": size, "accuracy_level": 0}
    blocks = -(-FEATURES // size)
    assert attributes == shape
    assert (codes.dtype, codes.shape, scales.shape) == (np.uint8, (6, blocks, size // 2), (6 * blocks,))
    assert [part.dtype for part in more] == ([] if zeros is None else [zeros])
    np.testing.assert_allclose(run(proto, x), served(layer, x), atol=1e-5)
    # The numbers by the definition of the operator, beside those of the layer.
    zero = np.full((6, blocks), 8.0)
    if more:
        zero = more[0].reshape(6, -1) if zeros == np.float32 else unpacked(more[0].reshape(6, -1), blocks)
    steps, zero = (np.repeat(part.reshape(6, -1), size, 1)[:, :FEATURES] for part in (scales, zero))
    np.testing.assert_allclose(
        ((unpacked(codes, FEATURES) - zero) * steps).T, layer.quant_weight().value, rtol=1e-6, atol=1e-7
    )


class Several(nnx.Module):
    """Layers of several kinds whose weights have 4 bits, and two that have no such product."""

    def __init__(self):
        rngs, w4 = nnx.Rngs(0), {"weight_quant": W4}
        self.conv = QuantConv(1, 4, (3, 3), weight_quant=ChannelW4, rngs=rngs)
        self.rounded = QuantLinear(64, 64, **w4, input_quant=Int8ActPerTensorFloatMinMaxInit, input_min_val=-1.0,
                                   input_max_val=1.0, rngs=rngs)  # fmt: skip
        self.heads = QuantLinearGeneral(64, (2, 32), **w4, rngs=rngs)
        self.merge = QuantLinearGeneral((2, 32), 64, axis=(-2, -1), **w4, rngs=rngs)
        self.einsum = QuantEinsum("bd,dhf->hbf", (64, 2, 8), **w4, rngs=rngs)
        self.bytes = QuantLinear(8, 3, weight_quant=Int8WeightPerChannelFloat, rngs=rngs)

    def __call__(self, x):
        y = self.conv(x).reshape(x.shape[0], -1)
        y = self.merge(nnx.relu(self.heads(self.rounded(y))))
        return self.bytes(self.einsum(y))


@pytest.mark.heavy
def test_layers_of_several_kinds():
    model = frozen(Several())
    x = jax.random.normal(jax.random.key(0), (3, 4, 4, 1))
    (batch,) = jax.export.symbolic_shape("batch")
    proto = jqinject.export.onnx(
        model, jax.ShapeDtypeStruct((batch, 4, 4, 1), jnp.float32), block=64, accuracy_level=1
    )
    assert [facts["N"] for facts, _ in products(proto)] == [64, 64, 64, 16]
    assert {facts["accuracy_level"] for facts, _ in products(proto)} == {1}
    assert sum(node.op_type == "QuantizeLinear" for node in proto.graph.node) == 1
    assert sum(node.op_type == "DequantizeLinear" for node in proto.graph.node) == 3  # and of conv and bytes
    np.testing.assert_allclose(run(proto, x), served(model, x), rtol=1e-4, atol=1e-5)


@pytest.mark.heavy
def test_a_product_that_the_model_writes_itself_takes_four_and_a_half_bits_a_weight():
    class Own(nnx.Module):
        def __init__(self):
            self.table = nnx.Param(jax.random.normal(jax.random.key(0), (512, 256)))

        def __call__(self, x):
            return jnp.einsum("btd,df->btf", x, self.table[...])

    x = jax.random.normal(jax.random.key(1), (2, 3, 512))
    rule = jqinject.Rule(weight_quant=IntWeightSymmetricGroupQuant.let(bit_width=4, group_size=64))
    model = frozen(jqinject.quantize(Own(), rule, inputs=x))
    proto = jqinject.export.onnx(model, x, block=64)
    assert proto.ByteSize() * 8 / (512 * 256) == pytest.approx(4.5, abs=0.05)
    np.testing.assert_allclose(run(proto, x), served(model, x), rtol=1e-4, atol=1e-4)


def test_what_fits_no_block_is_refused_by_path(x):
    class Model(nnx.Module):
        def __init__(self, size):
            weight = W4.let(group_size=size)
            self.layers = nnx.List([QuantLinear(FEATURES, 6, weight_quant=weight, rngs=nnx.Rngs(0))])

        def __call__(self, x):
            return self.layers[0](x)

    with pytest.raises(ValueError, match=r"^onnx\(block=32\): layers.0.kernel: scales or zero points vary within 16 "
                       r"neighbours along the summed axes; expected groups of a multiple of 16 along the last of them."
                       r"\n  cure: weight_group_size=32; or block=None"):  # fmt: skip
        jqinject.export.onnx(frozen(Model(8)), x, block=32)
    with pytest.raises(ValueError, match=r"^onnx\(block=...\): Model has no frozen weight in integers of 3 or 4 bits; "
                       r"expected at least one.\n  cure: jqinject.freeze\(model\)"):  # fmt: skip
        jqinject.export.onnx(Model(32), x, block=32)
    for block in (8, 48, 512, True):
        with pytest.raises(
            ValueError, match=rf"^onnx: block is {block}; expected None or the largest block of"
        ):
            jqinject.export.onnx(frozen(Model(32)), x, block=block)
    with pytest.raises(ValueError, match=r"^onnx: accuracy_level is 5; expected 0 to 4"):
        jqinject.export.onnx(frozen(Model(32)), x, block=32, accuracy_level=5)


def test_a_loop_over_layers_is_refused_by_path():
    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=0, out_axes=0)
    def stack(rngs):
        return QuantLinear(32, 32, weight_quant=W4, rngs=rngs)

    class Stack(nnx.Module):
        def __init__(self):
            self.layers = stack(nnx.Rngs(0))

        def __call__(self, x):
            return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
                x, self.layers
            )

    with pytest.raises(ValueError, match=r"^onnx\(block=32\): layers.kernel: contracted in a loop over layers, or "
                       r"apart for each index of a batch axis; expected one matrix"):  # fmt: skip
        jqinject.export.onnx(frozen(Stack()), jnp.ones((2, 32)), block=32)
