"""Columns in activation order and stacks of layers as files: one matrix a layer, its columns in their own order."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject import Rule, freeze, quantize
from jqinject.core.transforms import Hadamard, Permutation, Sized
from jqinject.formats import CheckpointError, Name, load, read_checkpoint, save
from jqinject.quant import (
    Int8ActPerTensorFloat,
    Int8WeightPerChannelFloat,
    IntWeightSymmetricGroupQuant,
    NoneActQuant,
)

safetensors = pytest.importorskip("safetensors.numpy", reason="of the extra jqinject[formats]")
FILES = Path(__file__).parents[1] / "golden" / "formats" / "files"
NAME = "model.layers.0.self_attn.q_proj.weight"


def ordered(case: str = "gptq/v1_int4_g32_sym_desc_act") -> tuple[Any, Any]:
    """A checkpoint of one matrix whose columns are in activation order, and its numbers."""
    found = read_checkpoint(FILES / case)
    matrix = found.matrices[NAME]
    return replace(found, matrices={NAME: matrix}, tensors={}), matrix


class Alone(nnx.Module):
    """A parameter that the model contracts by itself."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.own = nnx.Param(jnp.zeros(shape))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.einsum("bi,io->bo", x, self.own[...])


def layer(matrix: Any) -> Any:
    outputs, inputs = matrix.shape
    return nnx.Sequential(nnx.Linear(inputs, outputs, use_bias=False, rngs=nnx.Rngs(0)))


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("method", "is_layer"),
    [("compressed-tensors", True), ("compressed-tensors", False), ("jqinject", True), ("jqinject", False)],
)
def test_columns_in_activation_order_are_written_in_their_own_order(
    method: str, is_layer: bool, tmp_path: Path
) -> None:
    found, matrix = ordered()
    path = "layers.0.kernel" if is_layer else "own"
    names = {NAME: (path, "out in -> in out")}
    model = layer(matrix) if is_layer else Alone(matrix.shape[::-1])
    inputs = (jnp.ones((2, matrix.shape[1])),)
    served = load(model, found, names=names, inputs=inputs)
    own = method == "jqinject"
    folder = save(served, tmp_path / "saved", method=method, names=None if own else names)
    again = read_checkpoint(folder)
    written = again.matrices[path if own else NAME]
    np.testing.assert_array_equal(written.codes(), matrix.codes().astype(np.int8) - 8)
    np.testing.assert_array_equal(written.read().group_of_column, matrix.read().group_of_column)
    np.testing.assert_array_equal(written.dequantize(), matrix.dequantize())
    if not own:
        settings = json.loads((folder / "config.json").read_text())["quantization_config"]
        assert settings["config_groups"]["group_0"]["weights"]["actorder"] == "group"
    twice = load(model, again, names=None if own else names, inputs=inputs)
    before, after = (nnx.state(each, lambda path, _: "pre_transform" not in path) for each in (served, twice))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    np.testing.assert_array_equal(twice(inputs[0]), served(inputs[0]))


@pytest.mark.heavy
def test_a_scale_for_each_row_needs_no_groups_of_columns(tmp_path: Path) -> None:
    model = quantize(
        nnx.Sequential(nnx.Linear(16, 4, rngs=nnx.Rngs(0))),
        Rule(
            weight_quant=Int8WeightPerChannelFloat,
            input_quant=Int8ActPerTensorFloat.let(pre_transform=Sized(Permutation, 16)),
        ),
    )
    x = jax.random.normal(jax.random.key(0), (3, 16))
    model(x)
    served = freeze(model)
    again = load(nnx.Sequential(nnx.Linear(16, 4, rngs=nnx.Rngs(0))), save(served, tmp_path / "saved"))
    np.testing.assert_allclose(again(x), served(x), rtol=1e-6, atol=1e-6)
    assert again.layers[0].input_quant.pre_transform is None


def test_a_transform_that_no_file_can_say_is_refused_before_a_float_input_too(tmp_path: Path) -> None:
    rule = Rule(
        weight_quant=Int8WeightPerChannelFloat, input_quant=NoneActQuant.let(pre_transform=Hadamard())
    )
    served = freeze(quantize(nnx.Sequential(nnx.Linear(16, 4, rngs=nnx.Rngs(0))), rule))
    with pytest.raises(CheckpointError, match=r"layers\.0\.kernel: a transform of the input is not written"):
        save(served, tmp_path / "saved")
    found, matrix = ordered()
    served = load(layer(matrix), found, names={NAME: "layers.0.kernel"})
    with pytest.raises(CheckpointError, match=r"(?s)columns in activation order.*cure: .*method='compressed"):
        save(served, tmp_path / "saved", method="fp8")
    assert not (tmp_path / "saved").exists()


def test_an_order_of_minus_ones_is_that_of_the_columns(tmp_path: Path) -> None:
    case = FILES / "compressed_tensors" / "int4_g32_sym_actorder"
    tensors = safetensors.load_file(case / "model.safetensors")
    name = next(name for name in tensors if name.endswith("g_idx"))
    tensors[name] = np.full_like(tensors[name], -1)
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((case / "config.json").read_bytes())
    numbers = read_checkpoint(tmp_path).matrices[NAME].read()
    assert numbers.group_of_column is None and numbers.block == (1, 32)


# --- stacks


class Stack(nnx.Module):
    """Layers that a loop runs over, a norm and a parameter of its own in each."""

    def __init__(self) -> None:
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stacked(rngs: nnx.Rngs) -> Any:
            return nnx.Dict(
                {"norm": nnx.RMSNorm(64, rngs=rngs), "up": nnx.Linear(64, 64, use_bias=False, rngs=rngs)}
            )

        self.layers = stacked(nnx.Rngs(0))
        self.own = nnx.Param(jax.random.normal(jax.random.key(3), (3, 64, 32)))

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x: jax.Array, layer: Any) -> jax.Array:
            return x + layer["up"](layer["norm"](x))

        return jnp.einsum("bi,lio->lbo", run(x, self.layers), self.own[...])


STACKED = (
    Name("h.{i}.up.weight", "layers.up.kernel", "out in -> in out"),
    Name("h.{i}.norm.weight", "layers.norm.scale"),
    Name("h.{i}.own.weight", "own", "out in -> in out"),
)


@pytest.mark.lengthy
@pytest.mark.parametrize("method", ["compressed-tensors", "gguf"])
def test_a_stack_of_layers_is_one_matrix_a_layer(method: str, tmp_path: Path) -> None:
    x = jax.random.normal(jax.random.key(0), (2, 64))
    inputs = Int8ActPerTensorFloat if method == "compressed-tensors" else None
    rules = [
        Rule("layers.*", weight_quant=IntWeightSymmetricGroupQuant, weight_group_size=32, input_quant=inputs),
        Rule("own", weight_quant=IntWeightSymmetricGroupQuant, weight_group_size=32),
    ]
    model = quantize(Stack(), rules, inputs=(x,))
    model(x)
    served = freeze(model)
    gguf = {"config": {"general.architecture": "mine"}, "round_scales": True} if method == "gguf" else {}
    folder = save(served, tmp_path / "saved", method=method, names=STACKED, **gguf)
    found = read_checkpoint(folder)
    assert sorted(found.matrices) == [f"h.{i}.{end}.weight" for i in range(3) for end in ("own", "up")]
    kernel = np.asarray(served.layers["up"].kernel[...])
    for i in range(3):
        written = found.matrices[f"h.{i}.up.weight"].dequantize().T
        np.testing.assert_allclose(written, kernel[i], rtol=2.0**-11 if gguf else 2e-7)
    again = load(Stack(), found, names=STACKED, inputs=(x,))
    np.testing.assert_allclose(again(x), served(x), rtol=1e-3 if gguf else 1e-5, atol=1e-2 if gguf else 1e-5)


def test_a_stack_without_a_rule_that_takes_it_apart_is_refused_with_the_rule(tmp_path: Path) -> None:
    x = jnp.ones((2, 64))
    served = freeze(quantize(Stack(), Rule("layers.*", weight_quant=Int8WeightPerChannelFloat), inputs=(x,)))
    cure = (
        r"(?s)layers\.up\.kernel is a stack.*cure: names=\{'layers\.up\.\{i\}\.weight': 'layers\.up\.kernel'"
    )
    with pytest.raises(CheckpointError, match=cure):
        save(served, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
