"""Frozen models lowered for CUDA, without a GPU: which operands are contracted there."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject import freeze
from jqinject.dot import QDotGeneral, dot_general
from jqinject.dot.tensors import product
from jqinject.nn import QuantLinear
from jqinject.quant import (
    Fp8e4m3OCPActPerTensorFloat,
    Fp8e4m3OCPWeightPerChannelFloat,
    Int4WeightPerGroupAbsMax,
    Int8DynamicActPerRowFloat,
    Int8WeightPerChannelFloat,
    IntWeightSymmetricGroupQuant,
    MXFloat4e2m1Weight,
    MXFP8Training,
    NF4WeightPerGroupFloat,
    NVFP4Training,
)
from jqinject.quant.aqt import config_v4

K, N = 256, 32
INT4 = Int8WeightPerChannelFloat.let(bit_width=4)
GROUPS = IntWeightSymmetricGroupQuant.let(bit_width=4, group_size=128)
UNSIGNED = INT4.let(signed=False, narrow_range=False)
ROWS = Int8DynamicActPerRowFloat
BF16 = {"dtype": jnp.bfloat16}
LAYERS: dict[str, tuple[Any, Any, dict[str, Any], tuple[str, str, str]]] = {
    "int8": (Int8WeightPerChannelFloat, ROWS, {}, ("i8", "i8", "i32")),
    "int8 of bfloat16": (Int8WeightPerChannelFloat, ROWS, BF16, ("i8", "i8", "i32")),
    "int4 by int8": (INT4, ROWS, {}, ("i8", "i8", "i32")),
    "int4 by int4": (INT4, ROWS.let(bit_width=4), {}, ("i8", "i8", "i32")),
    "int4 in groups by int8": (GROUPS, ROWS, {}, ("i8", "i8", "i32")),
    "uint4 by int8": (UNSIGNED, ROWS, {}, ("i8", "i8", "i32")),
    "fp8": (
        Fp8e4m3OCPWeightPerChannelFloat,
        Fp8e4m3OCPActPerTensorFloat,
        {},
        ("f8E4M3FN", "f8E4M3FN", "f32"),
    ),
    "int4 alone": (Int4WeightPerGroupAbsMax, None, BF16, ("bf16", "bf16", "bf16")),
    "NF4 alone": (NF4WeightPerGroupFloat, None, BF16, ("bf16", "bf16", "bf16")),
    "MXFP4 alone": (MXFloat4e2m1Weight, None, BF16, ("bf16", "bf16", "bf16")),
}
DOT = re.compile(
    r"stablehlo\.dot_general .*: \(tensor<[\dx]*x(\w+)>, tensor<[\dx]*x(\w+)>\) -> tensor<[\dx]*x(\w+)>"
)


def for_cuda(model: Any, dtype: Any = jnp.float32) -> str:
    """The program of a frozen model, lowered for CUDA."""
    graphdef, state = nnx.split(model)
    traced = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x)).trace(state, jnp.ones((4, K), dtype))
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.heavy
@pytest.mark.parametrize("name", LAYERS)
def test_what_a_gpu_contracts(name: str) -> None:
    weight, given, keywords, wanted = LAYERS[name]
    layer = QuantLinear(K, N, weight_quant=weight, input_quant=given, rngs=nnx.Rngs(0), **keywords)
    dtype = keywords.get("dtype", jnp.float32)
    layer(jax.random.normal(jax.random.key(0), (4, K), dtype))
    program = for_cuda(freeze(layer), dtype)
    assert set(DOT.findall(program)) == {wanted}
    assert "custom_call" not in program, "no kernel of another platform"


def test_weights_in_4_bits_go_to_a_gpu_packed() -> None:
    layer = freeze(QuantLinear(K, N, weight_quant=INT4, rngs=nnx.Rngs(0)))
    arguments = for_cuda(layer).partition("{\n")[2].partition("{\n")[0]
    assert f"tensor<{N}x{K // 2}xui8>" in arguments and f"tensor<{N}x{K}xi8>" not in arguments


@pytest.mark.heavy
def test_what_a_gpu_contracts_by_a_scheme() -> None:
    layer = freeze(nnx.Linear(K, N, dot_general=QDotGeneral(config_v4()), rngs=nnx.Rngs(0)))
    assert set(DOT.findall(for_cuda(layer))) == {("i8", "i8", "i32")}


SCALED = re.compile(
    r"block_scaled_dot.* : \(tensor<([\dx]*)x(\w+)>, tensor<[\dx]*x\w+>, tensor<([\dx]*)x(\w+)>"
)
ROWS, WIDTH = 64, 96
NUMBERS = (((1,), (0,)), ((), ()))


def step_of(scheme: Any) -> Any:
    """A product and its two gradients."""

    def step(x: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
        y, pull = jax.vjp(lambda x, w: dot_general(x, w, NUMBERS, config=scheme, key=jax.random.key(0)), x, w)
        return y, *pull(y)

    return step


@pytest.mark.lengthy
@pytest.mark.parametrize(
    ("scheme", "payload", "scale", "sums"),
    [
        (MXFP8Training, "f8E4M3FN", "f8E8M0FNU", ("64x96", "64x32", "32x64")),
        # Blocks of 16 x 16 serve y = x w alone: dx = g w^T sums over their other side.
        (NVFP4Training, "f4E2M1FN", "f8E4M3FN", ("64x96", "32x64")),
    ],
)
def test_payloads_and_block_scales_go_to_a_gpu(
    scheme: Any, payload: str, scale: str, sums: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = jax.random.split(jax.random.key(1))
    x, w = jax.random.normal(keys[0], (ROWS, WIDTH)), 0.1 * jax.random.normal(keys[1], (WIDTH, N))
    scaled = step_of(scheme.let(scaled_products=True))
    program = jax.jit(scaled).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
    block = 32 if payload.startswith("f8") else 16
    wanted = []
    for shape in sums:
        rows, depth = map(int, shape.split("x"))
        wanted.append((f"1x{shape}", payload, f"1x{rows}x{depth // block}", scale))
    assert sorted(SCALED.findall(program)) == sorted(wanted)
    explained = QDotGeneral(scheme.let(scaled_products=True), rngs=nnx.Rngs(0)).explain(x, w, NUMBERS)
    assert str(explained).count("on CUDA by jax.nn.scaled_matmul") == len(sums)

    plain = jax.jit(step_of(scheme))(x, w)
    for found, expected in zip(jax.jit(scaled)(x, w), plain, strict=True):
        np.testing.assert_array_equal(found, expected)  # a CPU computes what it did

    called: list[Any] = []

    def reference(a: Any, b: Any, a_scales: Any, b_scales: Any, preferred_element_type: Any) -> Any:
        """What JAX documents of `scaled_matmul`."""
        called.append(a.shape)
        wide = (
            t.astype(jnp.float32) * jnp.repeat(s.astype(jnp.float32), t.shape[-1] // s.shape[-1], axis=-1)
            for t, s in ((a, a_scales), (b, b_scales))
        )
        return jnp.einsum("BMK,BNK->BMN", *wide).astype(preferred_element_type)

    def on_cuda(default: Any, cuda: Any = None, **others: Any) -> Any:
        return (cuda or default)()

    monkeypatch.setattr(jax.nn, "scaled_matmul", reference)
    monkeypatch.setattr(product, "platform_dependent", on_cuda)
    found = jax.jit(step_of(scheme.let(scaled_products=True)))(x, w)
    assert len(called) == len(sums)
    for one, expected in zip(found, plain, strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.heavy
@pytest.mark.parametrize("platform", ["rocm", "tpu"])
@pytest.mark.parametrize(("scheme", "count"), [(MXFP8Training, 3), (NVFP4Training, 2)])
def test_other_devices_get_a_marked_product(
    scheme: Any, count: int, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = jax.random.split(jax.random.key(1))
    x, w = jax.random.normal(keys[0], (ROWS, WIDTH)), 0.1 * jax.random.normal(keys[1], (WIDTH, N))
    scaled = step_of(scheme.let(scaled_products=True))
    program = jax.jit(scaled).trace(x, w).lower(lowering_platforms=(platform,)).as_text()
    assert program.count('stablehlo.composite "xla.scaled_dot"') == count
    assert "block_scaled_dot" not in program

    plain = jax.jit(step_of(scheme))(x, w)
    monkeypatch.setattr(product, "platform_dependent", lambda default, **on: on[platform]())
    found = jax.jit(step_of(scheme.let(scaled_products=True)))(x, w)
    for one, expected in zip(found, plain, strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-5, atol=1e-5)


def test_scaled_products_is_a_flag() -> None:
    with pytest.raises(TypeError, match="scaled_products"):
        QDotGeneral(MXFP8Training.let(scaled_products="yes"))
