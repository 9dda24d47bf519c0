"""QuantCheckpoint: what is kept is the payload, and the gradient is not quantized."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject.checkpoint_policies import save_quantized
from jqinject.nn import QuantCheckpoint, QuantIdentity
from jqinject.ops import IntGrid
from jqinject.quant import (
    Fp4e2m1OCPAct,
    Fp6e2m3OCPActPerTensorFloat,
    Fp8e4m3Act,
    Fp8e4m3ActPerTensorCurrent,
    Fp8e4m3ActPerTensorDelayed,
    Fp8e4m3OCPActPerTensorFloat,
    Fp8e5m2GradPerTensorDelayed,
    Int8ActPerTensorFloat,
    NoneActQuant,
    NVFP4TrainingAct,
    ShiftedUint8ActPerTensorFloat,
    SignedBinaryActPerTensorConst,
    Uint8ActPerTensorFloat,
)

WIDTH, BATCH, DEPTH = 6, 5, 4
X = jax.random.normal(jax.random.key(0), (BATCH, WIDTH))
FORMATS = {
    "fp8": (Fp8e4m3ActPerTensorCurrent, {}),
    "fp8-delayed": (Fp8e4m3ActPerTensorDelayed, {}),
    "fp8-e4m3fn": (Fp8e4m3OCPActPerTensorFloat, {}),
    "fp8-codes": (Fp8e4m3Act, {}),
    "fp6": (Fp6e2m3OCPActPerTensorFloat, {}),
    "fp4": (Fp4e2m1OCPAct, {}),
    "int8": (Int8ActPerTensorFloat, {}),
    "int5": (Int8ActPerTensorFloat, {"bit_width": 5}),
    "int4": (Int8ActPerTensorFloat, {"bit_width": 4}),
    "int3": (Int8ActPerTensorFloat, {"bit_width": 3}),
    "int2": (Int8ActPerTensorFloat, {"bit_width": 2}),
    "uint8": (Uint8ActPerTensorFloat, {}),
    "uint4": (Uint8ActPerTensorFloat, {"bit_width": 4}),
    "shifted": (ShiftedUint8ActPerTensorFloat, {}),
    "binary": (SignedBinaryActPerTensorConst, {}),
}
every_format = pytest.mark.parametrize("name", FORMATS)


def checkpoint(name: str) -> QuantCheckpoint:
    quantizer, overrides = FORMATS[name]
    return QuantCheckpoint(quantizer, **overrides)


@every_format
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 3, 4), (0, 4)], ids=str)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_the_value_is_the_quantizers(name: str, shape: tuple[int, ...], dtype: Any) -> None:
    quantizer, overrides = FORMATS[name]
    x = jax.random.normal(jax.random.key(1), shape).astype(dtype)
    kept = checkpoint(name)(x)
    np.testing.assert_array_equal(kept, QuantIdentity(quantizer, **overrides)(x))
    assert kept.dtype == dtype


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("length", [0, 1, 3, 8, 13])
def test_packing_loses_nothing(bits: int, signed: bool, length: int) -> None:
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1)) if signed else (0, 2**bits)
    numbers = (
        np.random.default_rng(0).integers(low, high, (2, length)).astype(np.int8 if signed else np.uint8)
    )
    grid = IntGrid(bits, signed)
    packed = grid.pack(jnp.array(numbers))
    size = 6 if (bits, length) == (3, 13) else -(-length * bits // 8)
    assert packed.dtype.itemsize == 1 and packed.shape == (2, size)
    np.testing.assert_array_equal(grid.unpack(packed, numbers.shape), numbers)


class Block(nnx.Module):
    def __init__(self, keep: Any, rngs: nnx.Rngs) -> None:
        self.keep = keep
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return jnp.tanh(self.dense(self.keep(x)))


def run(block: Block, x: Any) -> Any:
    return block(x)


remat = nnx.remat(run, policy=save_quantized)


@pytest.mark.heavy
@every_format
def test_the_gradient_is_that_of_the_float_block_at_the_quantized_input(name: str) -> None:
    block = Block(checkpoint(name), nnx.Rngs(0))
    value = checkpoint(name)(X)
    weights = jax.random.normal(jax.random.key(2), X.shape)
    of_block, of_x = nnx.grad(lambda b, x: jnp.sum(remat(b, x) * weights), argnums=(0, 1))(block, X)
    dense = block.dense

    def float_block(kernel: Any, bias: Any, x: Any) -> Any:
        return jnp.sum(jnp.tanh(x @ kernel + bias) * weights)

    kernel, bias, x = jax.grad(float_block, argnums=(0, 1, 2))(
        dense.kernel.get_value(), dense.bias.get_value(), value
    )
    np.testing.assert_allclose(of_block["dense"]["kernel"].get_value(), kernel, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(of_block["dense"]["bias"].get_value(), bias, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(of_x, x, rtol=1e-5, atol=1e-6)  # everywhere, saturated or not


def stack(name: str) -> Any:
    @nnx.split_rngs(splits=DEPTH)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs: nnx.Rngs) -> Block:
        return Block(checkpoint(name), rngs)

    return make(nnx.Rngs(0))


def scanned(blocks: Any, x: Any) -> Any:
    return nnx.scan(lambda x, block: remat(block, x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, blocks)


@pytest.mark.parametrize(
    ("name", "bits"), [("fp8", 8), ("int8", 8), ("uint8", 8), ("int4", 4), ("int3", 3), ("int2", 2)]
)
def test_a_scan_keeps_payloads_and_scales_alone(name: str, bits: int) -> None:
    graphdef, parameters, rest = nnx.split(stack(name), nnx.Param, ...)

    def loss(parameters: Any, x: Any) -> Any:
        return jnp.sum(scanned(nnx.merge(graphdef, parameters, rest, copy=True), x))

    kept = jax.tree.leaves(jax.eval_shape(lambda p, x: jax.vjp(loss, p, x)[1], parameters, X))
    weights = {leaf.shape for leaf in jax.tree.leaves(parameters)}
    activations = [leaf for leaf in kept if leaf.shape not in weights and leaf.size > DEPTH]
    packed = -(-WIDTH * bits // 8)
    integers = jnp.int8 if name == "int8" else jnp.uint8
    assert [(leaf.shape, leaf.dtype) for leaf in activations] == [((DEPTH, BATCH, packed), integers)]


@pytest.mark.heavy
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_a_scan_has_the_values_and_gradients_of_the_unrolled_blocks(jit: bool) -> None:
    blocks = stack("fp8-delayed")
    graphdef, state = nnx.split(blocks)
    unrolled = [nnx.merge(graphdef, jax.tree.map(lambda v, i=i: v[i], state)) for i in range(DEPTH)]

    def in_a_scan(blocks: Any, x: Any) -> Any:
        return jqinject.value_and_grad(lambda b, x: jnp.sum(scanned(b, x) ** 2), argnums=(0, 1))(blocks, x)

    def one_by_one(blocks: Any, x: Any) -> Any:
        def loss(blocks: Any, x: Any) -> Any:
            for block in blocks:
                x = block(x)
            return jnp.sum(x**2)

        return jqinject.value_and_grad(loss, argnums=(0, 1))(blocks, x)

    call = nnx.jit(in_a_scan) if jit else in_a_scan
    for number in range(3):  # the scales of later steps come from the earlier ones
        x = X * (number + 1)
        (value, (of_blocks, of_x)) = call(blocks, x)
        (expected, (of_each, x_expected)) = one_by_one(unrolled, x)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        np.testing.assert_allclose(of_x, x_expected, rtol=1e-4, atol=1e-6)
        kernels = jnp.stack([of["dense"]["kernel"].get_value() for of in of_each])
        np.testing.assert_allclose(of_blocks["dense"]["kernel"].get_value(), kernels, rtol=1e-4, atol=1e-6)
    histories = jnp.stack([b.keep.act_quant.amax_history.amax_history.get_value() for b in unrolled])
    np.testing.assert_allclose(
        blocks.keep.act_quant.amax_history.amax_history.get_value(), histories, rtol=1e-5
    )
    assert np.count_nonzero(histories[0]) == 3  # once a step, not twice


@pytest.mark.heavy
def test_a_gradient_quantizer_quantizes_the_gradient() -> None:
    plain = QuantCheckpoint(Fp8e4m3ActPerTensorCurrent)
    with_grad = QuantCheckpoint(Fp8e4m3ActPerTensorCurrent, grad_quant=Fp8e5m2GradPerTensorDelayed)
    weights = jnp.array([1.0, 0.3, -0.7])
    gradients = [
        jqinject.grad(lambda x, m: jnp.sum(m(x) * weights))(jnp.ones(3), module)
        for module in (plain, with_grad)
    ]
    np.testing.assert_array_equal(gradients[0], weights)
    np.testing.assert_array_equal(gradients[1], weights.astype(jnp.float8_e5m2).astype(jnp.float32))
    assert float(with_grad.grad_quant.amax_history.newest) == 1


@pytest.mark.heavy
def test_under_vmap_and_bfloat16() -> None:
    keep = checkpoint("int4")
    keep(X)
    keep.eval()
    mapped = jax.vmap(lambda x: keep(x))(X.astype(jnp.bfloat16))
    np.testing.assert_array_equal(mapped, keep(X.astype(jnp.bfloat16)))
    assert mapped.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("quantizer", "overrides", "text"),
    [
        (NoneActQuant, {}, "switched off or does not quantize"),
        (Int8ActPerTensorFloat, {"bit_width": 9}, "quantizes to 9 bits; what is kept has at most 8"),
        (Int8ActPerTensorFloat, {"bit_width_impl_type": "parameter"}, "to a learned number of bits"),
    ],
    ids=["none", "nine-bits", "learned"],
)
def test_what_can_not_be_kept_small(quantizer: Any, overrides: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        QuantCheckpoint(quantizer, **overrides)(X)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="needs an act_quant"):
        QuantCheckpoint(None)
    with pytest.raises(TypeError, match="quantizes activations"):
        QuantCheckpoint(Fp8e5m2GradPerTensorDelayed)
    with pytest.raises(TypeError, match="did you mean 'bit_width'"):
        QuantCheckpoint(Int8ActPerTensorFloat, bitwidth=4)


@pytest.mark.heavy
def test_small_negative_numbers_in_two_levels_are_kept():
    """They are rounded to -0, whose code is nan's in e2m1."""
    x = jnp.full((2, 16), -1e-6).at[0, 0].set(3.0)
    kept = QuantCheckpoint(act_quant=NVFP4TrainingAct)(x)
    np.testing.assert_array_equal(kept, jnp.zeros((2, 16)).at[0, 0].set(3.0))
