"""What users write; a type checker has nothing to say about any of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jqinject
import jqinject.nn as qnn
from jqinject import ExtendedInjector, FloatQuantTensor, IntQuantTensor, Rule, this, value
from jqinject.core import ParameterScaling, RoundSte
from jqinject.nn import (
    QuantAvgPool,
    QuantBatchNorm,
    QuantConv,
    QuantConvTranspose,
    QuantEinsum,
    QuantEltwiseAdd,
    QuantEmbed,
    QuantGRUCell,
    QuantHardTanh,
    QuantIdentity,
    QuantLayerNorm,
    QuantLinear,
    QuantLinearGeneral,
    QuantLSTM,
    QuantMaxPool,
    QuantMultiHeadAttention,
    QuantReLU,
    TruncAvgPool,
)
from jqinject.quant import (
    Fp8e4m3WeightPerTensorDelayed,
    Int8ActPerTensorFloat,
    Int8WeightPerChannelFloat,
    Int8WeightPerTensorFloat,
    Int32Bias,
    QuantizerLike,
    ScalingImplType,
    Uint8ActPerTensorFloat,
)

rngs = nnx.Rngs(0)
x = jnp.ones((2, 8))


# --- injectors


class W4(Int8WeightPerChannelFloat):
    bit_width = 4


class Annotated(Int8WeightPerChannelFloat):
    """With a docstring."""

    bit_width: int = 5
    narrow_range = True
    scaling_impl = ParameterScaling
    scaling_impl_type = ScalingImplType.CONST
    restrict_scaling_type = "power_of_two"
    scaling_init = value(lambda bit_width: 2.0**-bit_width)


class Computed(Int8WeightPerChannelFloat):
    @value
    def bit_width(module):
        return 8 if module.out_features > 10 else 4

    @value
    def scaling_init(bit_width, signed=True):
        return 2.0 ** (bit_width - signed)

    @value
    @staticmethod
    def my_limit(bit_width: int, signed: bool = True) -> float:
        return 2.0**bit_width

    @value
    def largest(bit_width: Any, signed: bool = True) -> float:
        return max(2.0 ** (bit_width - signed) - 1, 1.0)

    @value
    def shape(weight_shape) -> tuple[int, ...]:
        return tuple(max(size, 1) for size in weight_shape)

    @value
    def widths(bit_width):
        return [1 << bit for bit in range(bit_width)] if bit_width > 1 else [int(-bit_width)]

    pointed = this.bit_width
    further = this.table["k"].inner


def from_width(bit_width: int) -> float:
    return 2.0**bit_width


class OwnScaling(nnx.Module):
    def __init__(self, bit_width: int, my_limit: float = 1.0) -> None:
        self.limit = my_limit * bit_width

    def __call__(self, x: jax.Array, threshold: jax.Array | None = None) -> jax.Array:
        return jnp.asarray(self.limit)


class OnTop(W4.let(bit_width=3)):
    scaling_impl = OwnScaling
    my_limit = value(from_width)


class Outer(ExtendedInjector):
    inner = W4
    bits = this.inner.bit_width
    doubled = value(lambda bits: 2 * bits)


class Again(W4):
    bit_width = 2


Int3 = Int8WeightPerTensorFloat.let(bit_width=4).let(bit_width=3, my_own_name=2)
both = W4 & Int8WeightPerTensorFloat
chosen: type[ExtendedInjector] = W4 if x.size else Int3
given: QuantizerLike = None
bits: int = W4.bit_width
quantizer = Outer.inner
"bit_width" in W4
tree = jqinject.explain(W4, bit_width=3)
print(tree["bit_width"].value, tree.errors(), str(tree))


# --- layers

fc = QuantLinear(8, 4, rngs=rngs)
QuantLinear(8, 4, weight_quant=W4, weight_bit_width=3, rngs=rngs)
QuantLinear(8, 4, weight_quant=Int3, input_quant=Int8ActPerTensorFloat, bias_quant=Int32Bias, rngs=rngs)
QuantLinear(8, 4, weight_quant=None, rngs=rngs)
QuantLinear(8, 4, weight_quant=fc.weight_quant, rngs=rngs)
QuantLinear(8, 4, weight_quant=both, use_bias=False, dtype=jnp.bfloat16, param_dtype="float32", rngs=rngs)
QuantLinear(8, 4, weight_quant=chosen, kernel_init=nnx.initializers.normal(), contraction="int", rngs=rngs)
QuantLinear(8, 4, weight_quant=given, rngs=nnx.Rngs(params=0))
QuantLinear(
    8,
    4,
    weight_quant=OnTop,
    weight_scaling_impl=OwnScaling,
    weight_scaling_impl_type="const",
    weight_scaling_init=this.my_limit,
    weight_float_to_int_impl=RoundSte(),
    weight_narrow_range=False,
    input_quant=Uint8ActPerTensorFloat,
    input_scaling_init=0.1,
    input_collect_stats_steps=10,
    input_scaling_stats_momentum=None,
    rngs=rngs,
)
QuantLinear(
    8, 4, weight_scaling_init=np.ones((1, 4)), weight_scaling_impl_type=ScalingImplType.CONST, rngs=rngs
)
QuantLinear(8, 4, weight_bit_width=value(lambda module: module.out_features), rngs=rngs)
QuantLinear(8, 4, weight_quant=Fp8e4m3WeightPerTensorDelayed, weight_q_dtype=jnp.float8_e5m2, rngs=rngs)
QuantConv(3, 8, kernel_size=3, rngs=rngs)
QuantConv(3, 8, (3, 3), strides=2, padding="VALID", weight_quant=W4, rngs=rngs)
QuantConv(3, 8, kernel_size=(3, 3), weight_quant=W4, weight_scaling_per_output_type="channel", rngs=rngs)
QuantConvTranspose(3, 8, (2, 2), strides=(2, 2), transpose_kernel=True, rngs=rngs)
QuantEmbed(10, 4, weight_bit_width=4, rngs=rngs)(jnp.array([1, 2])).sum()
QuantEinsum("btd,dnh->btnh", (8, 2, 4), rngs=rngs)
QuantLinearGeneral((2, 3), (4, 5), axis=(-2, -1), rngs=rngs)
QuantReLU(bit_width=4)
QuantReLU(Uint8ActPerTensorFloat.let(bit_width=4))
QuantIdentity(Int8ActPerTensorFloat, bit_width=4, return_quant_tensor=True)
QuantHardTanh(min_val=-1.0, max_val=1.0)
QuantBatchNorm(4, output_quant=None, momentum=0.9, rngs=rngs)
QuantLayerNorm(4, output_bit_width=6, epsilon=1e-5, rngs=rngs)
mha = QuantMultiHeadAttention(2, 8, decode=False, v_quant=Int8ActPerTensorFloat, v_bit_width=4, rngs=rngs)
attended: jax.Array = mha(jnp.ones((1, 3, 8)))
lstm = QuantLSTM(3, 4, weight_quant=W4, weight_bit_width=3, dtype=jnp.float32, rngs=rngs)
out, (hidden, cell) = lstm(jnp.ones((2, 5, 3)))
nnx.RNN(QuantGRUCell(3, 4, io_quant=Int8ActPerTensorFloat, rngs=rngs))
summed: jax.Array = QuantEltwiseAdd()(x, x)
print(QuantLinear.overrides(weight_quant=W4)["weight_bit_width"].default)


# --- results

y: jax.Array = fc(x)
z = jnp.mean(nnx.relu(fc(x)) + 1.0)
pooled = jnp.sum(QuantMaxPool((2, 2))(x)) + jnp.sum(QuantAvgPool((2, 2))(x))
q = QuantLinear(8, 4, input_quant=Int8ActPerTensorFloat, return_quant_tensor=True, rngs=rngs)(x)
scaled: jax.Array = q.value / q.scale
integers = q.int()
print(q.zero_point, q.shape, q.dtype, q.is_valid, q.set(value=y))
if isinstance(q, IntQuantTensor):
    print(q.bit_width, q.signed)
weight = fc.quant_weight()
print(weight.scale.shape, weight.int().dtype, weight.value)
truncated = TruncAvgPool((2, 2))(q)
print(truncated.bit_width)
tensor = IntQuantTensor(y, 0.5, 0.0, 8, signed=True, training=False)
print(tensor.int(), tensor.scale, tensor.zero_point, tensor + tensor, tensor.astype(jnp.bfloat16).value)
float_tensor: FloatQuantTensor | None = None


# --- models


class Net(nnx.Module):
    head: QuantLinear

    def __init__(self, rngs: nnx.Rngs, weight_quant: QuantizerLike = Int8WeightPerTensorFloat):
        self.conv = QuantConv(3, 8, (3, 3), weight_quant=weight_quant, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.act = QuantReLU(bit_width=4)
        self.fc = QuantLinear(8, 4, rngs=rngs)
        self.head = qnn.QuantLinear(
            4, 2, return_quant_tensor=True, output_quant=Int8ActPerTensorFloat, rngs=rngs
        )
        self.many = nnx.List([QuantLinear(8, 8, rngs=rngs) for _ in range(3)])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.act(self.norm(self.conv(x)))
        for layer in self.many:
            x = layer(x)
        return self.fc(x.mean(axis=(1, 2)))


net = Net(rngs)
print(net.fc.kernel.shape, net.fc.in_features, net.fc.weight_quant.scale())
rules: Sequence[Rule] = [
    Rule(r"head.*"),
    Rule(op="dot_general", input_quant=Int8ActPerTensorFloat),
    Rule(op=("add", "concatenate"), input_quant=Int8ActPerTensorFloat, input_bit_width=6),
    Rule(weight_quant=W4, weight_bit_width=3, contraction="int"),
]
quantized: Net = jqinject.quantize(net, rules, inputs=(x,))
print(jqinject.coverage(quantized, x).summary)
print(jqinject.report(quantized, x).layers[0])
frozen: Net = jqinject.freeze(quantized)
jqinject.calibrate(quantized, [x, x])
jqinject.load_state(quantized, nnx.state(net, nnx.Param))


def loss_fn(model: Net, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((model(x) - y) ** 2)


def with_aux(model: Net, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    return jnp.mean(model(x)), {"x": x}


@nnx.jit
def train_step(model: Net, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
    loss, grads = jqinject.value_and_grad(loss_fn)(model, x, y)
    optimizer.update(model, grads)
    return loss


(total, aux), gradients = jqinject.value_and_grad(with_aux, has_aux=True)(net, x)
print(total.shape, aux["x"], gradients["fc"]["kernel"].shape)
of_parameters = jqinject.grad(loss_fn, argnums=nnx.DiffState(0, nnx.Param))(net, x, y)
nnx.value_and_grad(loss_fn)(net, x, y)


@jqinject.value_and_grad
def decorated(model: Net) -> jax.Array:
    return jnp.mean(model(x))


value_of, grads_of = decorated(net)
print(value_of.shape, grads_of)
graphdef, state = nnx.split(net)
merged: Net = nnx.merge(graphdef, state)
