"""Frozen models lowered for CUDA, without a GPU: which operands are contracted there."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jqinject import freeze
from jqinject.dot import QDotGeneral, config_v4
from jqinject.nn import QuantLinear
from jqinject.quant import (
    Fp8e4m3OCPActPerTensorFloat,
    Fp8e4m3OCPWeightPerChannelFloat,
    Int4WeightPerGroupAbsMax,
    Int8DynamicActPerRowFloat,
    Int8WeightPerChannelFloat,
    IntWeightSymmetricGroupQuant,
    MXFloat4e2m1Weight,
    NF4WeightPerGroupFloat,
)

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


def test_what_a_gpu_contracts_by_a_scheme() -> None:
    layer = freeze(nnx.Linear(K, N, dot_general=QDotGeneral(config_v4()), rngs=nnx.Rngs(0)))
    assert set(DOT.findall(for_cuda(layer))) == {("i8", "i8", "i32")}
