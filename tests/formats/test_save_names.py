"""What a rule of names joins or divides for a model is divided or joined again for the file."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject import Rule, freeze, quantize
from jqinject.formats import FUSED, CheckpointError, Name, load, read_checkpoint, save
from jqinject.quant import (
    Int8ActPerTensorFloat,
    Int8WeightPerChannelFloat,
    IntWeightSymmetricGroupQuant,
    NVFP4Weight,
)

safetensors = pytest.importorskip("safetensors.numpy", reason="of the extra jqinject[formats]")
QK = Name("qk.weight", ("q.kernel", "k.kernel"))
PER_ROW = {"weight_quant": Int8WeightPerChannelFloat}
GROUPS = {"weight_quant": IntWeightSymmetricGroupQuant, "weight_group_size": 32, "weight_bit_width": 4}


class Pair(nnx.Module):
    """Two layers of one input."""

    def __init__(self) -> None:
        self.q = nnx.Linear(64, 6, use_bias=False, rngs=nnx.Rngs(0))
        self.k = nnx.Linear(64, 3, use_bias=False, rngs=nnx.Rngs(1))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.concatenate([self.q(x), self.k(x)], axis=-1)


def frozen(*rules: Rule) -> Pair:
    model = quantize(Pair(), rules)
    model(jax.random.normal(jax.random.key(0), (4, 64)))
    return freeze(model)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("settings", "method"),
    [
        (PER_ROW | {"input_quant": Int8ActPerTensorFloat}, "compressed-tensors"),
        (GROUPS, "compressed-tensors"),
        (GROUPS, "gguf"),
        (None, "compressed-tensors"),
    ],
    ids=["static int8", "int4 in groups", "int4 in groups, gguf", "floats"],
)
def test_parameters_that_divide_a_matrix_are_one_matrix(
    settings: dict[str, Any] | None, method: str, tmp_path: Path
) -> None:
    model = Pair() if settings is None else frozen(Rule(**settings))
    whole = np.concatenate([np.asarray(each.kernel[...]).T for each in (model.q, model.k)])
    values = {"general.architecture": "llama"} if method == "gguf" else {}
    lossy = method == "gguf"  # whose scales are float16
    folder = save(model, tmp_path / "whole", method=method, names=[QK], config=values, round_scales=lossy)
    found = read_checkpoint(folder)
    held = found.array("qk.weight") if settings is None else found.matrices["qk.weight"].dequantize()
    np.testing.assert_allclose(held, whole, rtol=1e-3 if lossy else 1e-7)
    again = load(Pair(), found, names=[QK])
    for mine, theirs in ((again.q, model.q), (again.k, model.k)):
        np.testing.assert_allclose(mine.kernel[...], theirs.kernel[...], rtol=1e-3 if lossy else 1e-7)
    if settings is not None and "input_quant" in settings:
        x = jax.random.normal(jax.random.key(1), (2, 64))
        np.testing.assert_allclose(again(x), model(x), rtol=1e-6, atol=1e-6)


class Joined(nnx.Module):
    """Keys and values in one parameter, and a stack of two matrices in one."""

    def __init__(self) -> None:
        self.kv = nnx.Param(jnp.zeros((2, 2, 8, 3)))
        self.gate_up = nnx.Param(jnp.zeros((3, 8, 12)))

    def __call__(self, x: jax.Array) -> jax.Array:
        heads = jnp.einsum("bd,cndh->bcnh", x, self.kv[...]).sum()
        return heads + jnp.einsum("bd,ldf->lbf", x, self.gate_up[...])


JOINED = (
    Name(("k.weight", "v.weight"), "kv", "(both heads dim) in -> both heads in dim", {"both": 2}),
    Name(("h.{i}.gate.weight", "h.{i}.up.weight"), "gate_up", "(part out) in -> in (part out)", {"part": 2}),
)


def files_of_joined(folder: Path) -> Path:
    """A checkpoint of 8-bit rows, each with a scale."""
    rng = np.random.default_rng(0)
    tensors = {}
    for name in ("k", "v", *(f"h.{i}.{part}" for i in range(3) for part in ("gate", "up"))):
        tensors[f"{name}.weight"] = rng.integers(-127, 128, (6, 8)).astype(np.int8)
        tensors[f"{name}.SCB"] = rng.uniform(1, 2, 6).astype(np.float32)
    safetensors.save_file(tensors, folder / "model.safetensors")
    settings = '{"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": true}}'
    (folder / "config.json").write_text(settings)
    return folder


def test_a_parameter_that_joins_matrices_is_taken_apart(tmp_path: Path) -> None:
    first = read_checkpoint(files_of_joined(tmp_path))
    model = load(Joined(), first, names=JOINED, inputs=(jnp.zeros((1, 8)),))
    again = read_checkpoint(save(model, tmp_path / "again", names=JOINED))
    assert again.matrices.keys() == first.matrices.keys()
    for name, matrix in first.matrices.items():
        np.testing.assert_array_equal(again.matrices[name].dequantize(), matrix.dequantize(), err_msg=name)


class Grouped(nnx.Module):
    """Queries, and keys and values of half as many heads, in one layer."""

    def __init__(self) -> None:
        self.qkv = nnx.Linear(64, 16, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.qkv(x)


def names_of_grouped(rows: tuple[int, ...] | None) -> list[Name]:
    return [
        Name(tuple(f"{part}.{leaf}" for part in "qkv"), f"qkv.{own}", rows=rows)
        for leaf, own in (("weight", "kernel"), ("bias", "bias"))
    ]


@pytest.mark.heavy
@pytest.mark.parametrize("settings", [GROUPS, None], ids=["int4 in groups", "floats"])
def test_matrices_of_unequal_rows_are_joined_and_taken_apart(
    settings: dict[str, Any] | None, tmp_path: Path
) -> None:
    model: nnx.Module = Grouped()
    if settings is not None:
        model = freeze(quantize(model, [Rule(**settings)], inputs=jnp.zeros((1, 64))))
    names, x = names_of_grouped((8, 4, 4)), jax.random.normal(jax.random.key(0), (3, 64))
    found = read_checkpoint(save(model, tmp_path / "parts", names=names))
    kept = found.matrices if settings else found.tensors
    assert {name: each.shape for name, each in kept.items() if "weight" in name} == {
        "q.weight": (8, 64),
        "k.weight": (4, 64),
        "v.weight": (4, 64),
    }
    np.testing.assert_array_equal(load(Grouped(), found, names=names)(x), model(x))
    np.testing.assert_array_equal(load(Grouped(), found, names=names_of_grouped(None))(x), model(x))
    with pytest.raises(CheckpointError, match=r"q\.bias has the shape \(8,\); its Name for qkv\.bias says 4"):
        load(Grouped(), found, names=names_of_grouped((4, 8, 4)))
    refused(model, tmp_path, names_of_grouped((8, 4, 3)), r"16 rows; its Name says 8 \+ 4 \+ 3 for q\.weight")


@pytest.mark.parametrize("rows", [(8, 4), (8, 4, 0)])
def test_a_name_has_rows_for_each_tensor(rows: tuple[int, ...]) -> None:
    with pytest.raises(
        ValueError, match=r"rows is \(8, 4.*, expected a positive number for each of q.weight, k"
    ):
        names_of_grouped(rows)


def test_ready_names_of_fused_files_serve_both_ways(tmp_path: Path) -> None:
    """`FUSED` divides `gate_up_proj` among two layers."""

    def net() -> Any:
        mlp = nnx.Module()
        for seed, part in enumerate(("gate_proj", "up_proj")):
            setattr(mlp, part, nnx.Linear(8, 4, use_bias=False, rngs=nnx.Rngs(seed)))
        mlp.down_proj = nnx.Linear(4, 8, use_bias=False, rngs=nnx.Rngs(2))
        layer, model = nnx.Module(), nnx.Module()
        layer.mlp, model.layers = mlp, nnx.List([layer])
        return model

    model = net()
    folder = save(model, tmp_path / "fused", names=FUSED)
    written = safetensors.load_file(folder / "model.safetensors")
    assert written.keys() == {f"model.layers.0.mlp.{part}.weight" for part in ("gate_up_proj", "down_proj")}
    again = load(nnx.clone(net()), folder, names=FUSED)
    for part in ("gate_proj", "up_proj", "down_proj"):
        mine, theirs = (getattr(each.layers[0].mlp, part).kernel[...] for each in (again, model))
        np.testing.assert_array_equal(mine, theirs)


def refused(model: nnx.Module, folder: Path, names: Any, match: str, **settings: Any) -> None:
    with pytest.raises(CheckpointError, match=match):
        save(model, folder / "none", names=names, **settings)
    assert not (folder / "none").exists()


@pytest.mark.heavy
def test_what_makes_no_matrix_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    mixed = frozen(Rule("q", **PER_ROW), Rule("k", **PER_ROW, weight_bit_width=4))
    refused(
        mixed, tmp_path, [QK], r"qk\.weight of q\.kernel, k\.kernel: int8 .* and int4 .* cannot be joined"
    )
    half = frozen(Rule("q", **PER_ROW))
    refused(
        half,
        tmp_path,
        [QK],
        r"q\.kernel, k\.kernel are one matrix, qk\.weight, but differ in which are frozen",
    )
    static = frozen(Rule("q", **PER_ROW, input_quant=Int8ActPerTensorFloat), Rule("k", **PER_ROW))
    refused(static, tmp_path, [QK], "differ in how their inputs are quantized.\n  cure: one rule")
    factors = frozen(Rule(weight_quant=NVFP4Weight))
    refused(factors, tmp_path, [QK], r"qk\.weight of .* factors cannot be joined")
    three = Name("qkv.weight", ("q.kernel", "k.kernel", "v.kernel"))
    refused(
        half,
        tmp_path,
        [three],
        r"qkv\.weight is made of 3 parameters, of which the model has q\.kernel, k\.kernel",
    )
    refused(half, tmp_path, [QK], "keeps the matrices of the model", method="jqinject")
    apart = Name(("a.weight", "b.weight"), "q.kernel", "out in -> in out")
    others = Name("k.weight", "k.kernel")
    refused(half, tmp_path, [apart, others], r"q\.kernel joins a\.weight, b\.weight; how many rows each has")
