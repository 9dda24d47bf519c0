"""Checkpoints of other libraries in models: the numbers of the file, in its bytes, and refusals that change nothing."""

import json
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject import unfreeze
from jqinject.formats import (
    CheckpointError,
    DequantizedWarning,
    IdleNameWarning,
    Name,
    explain_load,
    load,
    read_checkpoint,
    save,
)

safetensors = pytest.importorskip("safetensors.numpy", reason="of the extra jqinject[formats]")
pytest.importorskip("gguf", reason="of the extra jqinject[formats]")
FILES = Path(__file__).parents[1] / "golden" / "formats" / "files"
ARRAYS = FILES.parent
INPUTS = (r".*input_(global_)?scale", r".*input_zero_point")
QKV = "model.layers.0.self_attn.q_proj"


class Node(nnx.Module):
    """A place in a tree."""


def net_of(found: Any) -> Any:
    """A layer at the path of each tensor, as `transformers` calls them."""
    root = Node()
    for name in found.names:
        *path, leaf = name.split(".")
        if leaf != "weight":
            continue
        held = found.matrices.get(name) or found.tensors[name]
        node = root
        for part in path[:-1]:
            if not hasattr(node, part):
                setattr(node, part, Node())
            node = getattr(node, part)
        bias = name.removesuffix("weight") + "bias" in found.tensors
        made: Any = nnx.RMSNorm(held.shape[0], rngs=nnx.Rngs(0))
        if len(held.shape) == 2:
            out, into = held.shape
            is_table = "emb" in name
            made = (
                nnx.Embed(out, into, rngs=nnx.Rngs(0))
                if is_table
                else nnx.Linear(into, out, use_bias=bias, rngs=nnx.Rngs(0))
            )
        setattr(node, path[-1], made)
    return root


def at(node: Any, path: str) -> Any:
    for part in path.split("."):
        node = getattr(node, part)
    return node


# --- the numbers of the file


@pytest.mark.lengthy
@pytest.mark.parametrize(
    "case",
    [
        "compressed_tensors/int4_g32_asym",
        "compressed_tensors/fp8_block128",
        "compressed_tensors/mxfp6",
        "compressed_tensors/int8_embedding_too",
        "modelopt/nvfp4",
        "awq/gemm_g64_bias",
        "gptq/v1_int3_g32_sym",
        "bitsandbytes/nf4_double_blocks_cross_rows",
        "bitsandbytes/fp4",
        "hqq/int2_g16_axis1",
        "torchao/intx_int4_g32",
        "gguf/mixed_q4_k_m/model.gguf",
        "gguf/mxfp4/model.gguf",
    ],
)
def test_a_loaded_layer_has_the_numbers_of_the_file(case: str) -> None:
    found = read_checkpoint(FILES / case)
    net = load(net_of(found), found, ignore=INPUTS)
    for name, matrix in found.matrices.items():
        layer = at(net, name.removesuffix(".weight"))
        table = isinstance(layer, nnx.Embed)
        weight = np.asarray(layer.embedding[...] if table else layer.kernel[...].T)
        expected = matrix.dequantize()
        # A minimum becomes a zero point in units of the scale, which rounds once more.
        least = 2.0**-20 * np.abs(expected).max()
        np.testing.assert_allclose(weight, expected, rtol=2e-6, atol=least, err_msg=name)
        # GGUF's blocks hold their scales too, and torchao keeps 4 bits in bytes.
        apart = not matrix.layout.startswith(("GGUF", "torchao Intx"))
        if matrix.grid.bit_width in (2, 3, 4, 8) and apart:
            assert layer.frozen.numbers["value"].nbytes == matrix.bytes, f"{name}: bytes of the codes"


@pytest.mark.parametrize(
    "case",
    [
        "int8_w8a8_dynamic",
        "int8_w8a8_static_asym_act",
        "fp8_tensor_static",
        "fp8_block128",
        pytest.param("nvfp4_w4a4", marks=pytest.mark.lengthy),
    ],
)
def test_a_loaded_layer_quantizes_its_input_as_the_package_does(case: str) -> None:
    found = read_checkpoint(FILES / "compressed_tensors" / case)
    net = load(net_of(found), found, ignore=INPUTS)
    with np.load(ARRAYS / "compressed_tensors.npz") as arrays:
        x, expected = (arrays[f"{case}|{end}"] for end in (f"input|{QKV}.x", f"output|{QKV}.y_fake_quant"))
    exact = x @ found.matrices[f"{QKV}.weight"].dequantize().T
    got = np.asarray(at(net, QKV)(jnp.asarray(x)))

    def distance(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.linalg.norm(a - b) / np.linalg.norm(b))

    # The package computes in bfloat16, which decides ties of 4-bit numbers otherwise.
    assert distance(got, expected) < max(0.02, 0.3 * distance(exact, expected))


@pytest.mark.parametrize(
    "case",
    [
        "int8_w8a8_static",
        "int8_w8a8_static_asym_act",
        "fp8_tensor_static",
        "fp8_block128",
        "nvfp4_w4a4",
        "int4_g32_sym_actorder",
    ],
)
def test_loaded_layers_are_equal_by_value_and_can_be_pickled(case: str) -> None:
    found = read_checkpoint(FILES / "compressed_tensors" / case)
    one, two = (load(net_of(found), found, ignore=INPUTS) for _ in range(2))
    again = pickle.loads(pickle.dumps(at(one, QKV)))
    assert nnx.graphdef(one) == nnx.graphdef(two)
    assert nnx.graphdef(again) == nnx.graphdef(at(one, QKV))
    x = jax.random.normal(jax.random.key(0), (3, again.in_features))
    np.testing.assert_array_equal(again(x), at(one, QKV)(x))


# --- a whole model


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.q_proj = nnx.Linear(32, 32, use_bias=False, rngs=rngs)
        self.k_proj = nnx.Linear(32, 16, use_bias=False, rngs=rngs)
        self.v_proj = nnx.Linear(32, 16, use_bias=False, rngs=rngs)
        self.o_proj = nnx.Linear(32, 32, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        q = self.q_proj(x).reshape(*x.shape[:-1], 2, 16)
        k, v = (p(x)[..., None, :] for p in (self.k_proj, self.v_proj))
        k, v = (jnp.repeat(y, 2, axis=-2) for y in (k, v))
        return self.o_proj(nnx.dot_product_attention(q, k, v).reshape(x.shape))


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.gate_proj = nnx.Linear(32, 64, use_bias=False, rngs=rngs)
        self.up_proj = nnx.Linear(32, 64, use_bias=False, rngs=rngs)
        self.down_proj = nnx.Linear(64, 32, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.input_layernorm = nnx.RMSNorm(32, rngs=rngs)
        self.self_attn = Attention(rngs)
        self.post_attention_layernorm = nnx.RMSNorm(32, rngs=rngs)
        self.mlp = Mlp(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed_tokens = nnx.Embed(48, 32, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(2)])
        self.norm = nnx.RMSNorm(32, rngs=rngs)
        self.lm_head = nnx.Linear(32, 48, use_bias=False, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


@pytest.mark.lengthy
def test_a_llama_gives_the_logits_of_its_dequantized_weights() -> None:
    found = read_checkpoint(FILES / "compressed_tensors" / "llama_int4_kv_fp8_sharded")
    floats = Llama(nnx.Rngs(0))
    ids = jnp.arange(12).reshape(2, 6)
    before = floats(ids)
    served = load(floats, found)
    np.testing.assert_array_equal(floats(ids), before)
    for path, variable in nnx.to_flat_state(nnx.state(floats, nnx.Param)):
        name = ".".join(map(str, path[:-1]))
        name = name + ".weight" if name == "lm_head" else f"model.{name}.weight"
        held = found.matrices[name].dequantize() if name in found.matrices else np.asarray(found.array(name))
        variable.set_value(jnp.asarray(held.T if path[-1] == "kernel" else held, jnp.float32))
    np.testing.assert_allclose(nnx.jit(served)(ids), floats(ids), atol=1e-3)
    assert (
        served.layers[1].mlp.up_proj.kernel.get_raw_value()["value"].nbytes
        == found.matrices["model.layers.1.mlp.up_proj.weight"].bytes
    )
    restored = nnx.clone(served)
    np.testing.assert_array_equal(restored(ids), served(ids))


# --- names


class Fused(nnx.Module):
    """A parameter of its own, contracted over heads; layers stacked; two matrices in one."""

    def __init__(self) -> None:
        self.q = nnx.Param(jnp.zeros((8, 2, 2)))
        self.gate_up = nnx.Param(jnp.zeros((3, 8, 12)))

    def __call__(self, x: jax.Array) -> jax.Array:
        heads = jnp.einsum("bd,dnh->bnh", x, self.q[...]).sum()
        return heads + jnp.einsum("bd,ldf->lbf", x, self.gate_up[...])


def bytes_of_rows(folder: Path, **matrices: np.ndarray) -> Path:
    """A checkpoint of 8-bit rows, each with a scale."""
    rng = np.random.default_rng(0)
    tensors = {}
    for name, codes in matrices.items():
        tensors[f"{name.replace('__', '.')}.weight"] = codes.astype(np.int8)
        tensors[f"{name.replace('__', '.')}.SCB"] = rng.uniform(1, 2, codes.shape[0]).astype(np.float32)
    safetensors.save_file(tensors, folder / "model.safetensors")
    settings = '{"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": true}}'
    (folder / "config.json").write_text(settings)
    return folder


def test_names_join_divide_and_stack_matrices_of_parameters(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    codes = {
        f"h__{layer}__{part}": rng.integers(-127, 128, (6, 8))
        for layer in range(3)
        for part in ("gate", "up")
    }
    folder = bytes_of_rows(tmp_path, q=rng.integers(-127, 128, (4, 8)), **codes)
    names = (
        Name("q.weight", "q", "(heads dim) in -> in heads dim"),
        Name(("h.{i}.gate.weight", "h.{i}.up.weight"), "gate_up", "out in -> in out"),
    )
    x = jax.random.normal(jax.random.key(0), (5, 8))
    net = load(Fused(), folder, names=names, inputs=(x,))
    found = read_checkpoint(folder)
    floats = Fused()
    floats.q[...] = jnp.asarray(found.matrices["q.weight"].dequantize().T.reshape(8, 2, 2))
    both = [
        np.concatenate([found.matrices[f"h.{i}.{part}.weight"].dequantize() for part in ("gate", "up")]).T
        for i in range(3)
    ]
    floats.gate_up[...] = jnp.asarray(np.stack(both))
    assert net.gate_up.numbers["value"].dtype == np.int8
    np.testing.assert_allclose(net.gate_up[...], floats.gate_up[...], rtol=1e-6)
    np.testing.assert_allclose(net(x), floats(x), rtol=1e-5, atol=1e-5)


class Two(nnx.Module):
    def __init__(self) -> None:
        self.q = nnx.Linear(8, 4, use_bias=False, rngs=nnx.Rngs(0))
        self.k = nnx.Linear(8, 2, use_bias=False, rngs=nnx.Rngs(1))


def test_a_tensor_is_divided_among_parameters(tmp_path: Path) -> None:
    codes = np.arange(48).reshape(6, 8)
    found = read_checkpoint(bytes_of_rows(tmp_path, qk=codes))
    net = load(Two(), found, names=[Name("qk.weight", ("q.kernel", "k.kernel"))])
    whole = found.matrices["qk.weight"].dequantize().T
    np.testing.assert_array_equal(jnp.concatenate([net.q.kernel[...], net.k.kernel[...]], axis=1), whole)


class Noisy(Two):
    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__()
        self.drop = nnx.Dropout(0.5, rngs=rngs)


def test_random_streams_stay_those_of_the_model(tmp_path: Path) -> None:
    found = read_checkpoint(bytes_of_rows(tmp_path, q=np.ones((4, 8)), k=np.ones((2, 8))))
    model, x = Noisy(nnx.Rngs(7)), jnp.ones(64)
    first = model.drop(x)
    net = load(model, found)
    net.train()
    second = model.drop(x)
    np.testing.assert_array_equal(net.drop(x), second)
    assert (first != second).any()


# --- what does not fit


def test_tensors_and_parameters_that_are_not_accounted_for_are_named(tmp_path: Path) -> None:
    found = read_checkpoint(bytes_of_rows(tmp_path, q=np.ones((4, 8)), extra=np.ones((2, 8))))
    model = Two()
    with pytest.raises(CheckpointError, match=r"(?s)extra\.weight.*k\.kernel.*cure: names="):
        load(model, found)
    assert not hasattr(model.q, "frozen")
    assert "no tensor for: k.kernel" in str(explain_load(model, found))
    others = {f"other{number}": np.ones((2, 8)) for number in range(14)}
    with pytest.raises(CheckpointError) as refused:
        load(model, bytes_of_rows(tmp_path, q=np.ones((4, 8)), **others))
    told = str(refused.value).splitlines()
    assert sum("is for other" in line for line in told) == 12
    assert told[-2] == "  and 3 more"  # two tensors, and k.kernel


def test_floats_that_are_rounded_to_the_dtype_of_the_model_are_named(tmp_path: Path) -> None:
    safetensors.save_file({"q.weight": np.ones((4, 8), np.float32)}, tmp_path / "model.safetensors")
    for dtype, label in ((jnp.bfloat16, "float32, rounded to bfloat16"), (jnp.float32, "float32")):
        model = Node()
        model.q = nnx.Linear(8, 4, use_bias=False, param_dtype=dtype, rngs=nnx.Rngs(0))
        (each,) = explain_load(model, tmp_path).assignments
        assert each.label == label
        assert load(model, tmp_path).q.kernel.dtype == dtype


def test_a_shape_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    found = read_checkpoint(bytes_of_rows(tmp_path, q=np.ones((4, 9)), k=np.ones((2, 8))))
    with pytest.raises(CheckpointError, match=r"q\.weight.*\(4, 9\).*q\.kernel, \(8, 4\)"):
        load(Two(), found)


def test_what_cannot_be_meant_is_refused_by_name(tmp_path: Path) -> None:
    found = read_checkpoint(bytes_of_rows(tmp_path, q=np.ones((4, 8)), k=np.ones((2, 8))))
    with pytest.raises(TypeError, match="load puts a checkpoint into an NNX module, got function"):
        load(lambda x: x, found)  # pyright: ignore[reportArgumentType]
    served = load(Two(), found)
    with pytest.raises(
        ValueError, match=r"takes a float model; this one has quantized weights: k\.kernel, q\.kernel"
    ):
        load(served, found)
    with pytest.raises(CheckpointError, match=r"config\.json is not a checkpoint"):
        load(Two(), tmp_path / "config.json")
    with pytest.raises(TypeError, match=r"names are .* got 3"):
        load(Two(), found, names=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"axes are a text such as .* got 'out in -> in out out'"):
        load(Two(), found, names=[Name("q.weight", "q.kernel", "out in -> in out out")])
    with pytest.raises(ValueError, match=r"ignore is \('\(',\), expected regular expressions"):
        load(Two(), found, ignore="(")
    assert explain_load(Two(), found, ignore="k.*").left == ("k.weight",)
    integers = replace(found.matrices["q.weight"], name="q.weight").read().codes.astype(np.int64)
    safetensors.save_file({"q.weight": integers}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"q\.weight is int64, and q\.kernel takes floats \(float32\)"):
        load(Two(), tmp_path)


def test_settings_of_another_type_or_that_are_not_read_are_refused(tmp_path: Path) -> None:
    folder = bytes_of_rows(tmp_path, q=np.ones((4, 8)))
    group = {"targets": ["Linear"], "weights": {}, "output_activations": {"num_bits": 8}}
    for settings, match in (
        ({"quant_method": "gptq", "bits": "4"}, "bits is '4', a str; expected the int 4"),
        (
            {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {"group_0": group}},
            "group_0: output_activations are quantized, which is not read",
        ),
        (
            {"quant_method": "compressed-tensors", "kv_cache_scheme": {"type": "floats"}},
            r"kv_cache_scheme: type is 'floats'.*did you mean 'float'",
        ),
    ):
        (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))
        with pytest.raises(CheckpointError, match=match):
            read_checkpoint(folder)


def test_a_rule_that_is_for_no_tensor_is_told(tmp_path: Path) -> None:
    found = read_checkpoint(bytes_of_rows(tmp_path, q=np.ones((4, 8)), k=np.ones((2, 8))))
    names = {"q.weight": "q.kernel", "k.weight": "k.kernel", "kk.weight": "k.kernel"}
    told = r"names: no tensor is called kk\.weight; did you mean 'k\.weight'"
    with pytest.warns(IdleNameWarning, match=told):
        load(Two(), found, names=names)
    assert re.search(told, str(explain_load(Two(), found, names=names)))
    del names["k.weight"]
    with pytest.raises(CheckpointError, match=f"{told}.*\n  no parameter of the model is for k"):
        load(Two(), found, names=names)


def test_a_rule_for_a_parameter_that_does_not_exist_names_the_nearest(tmp_path: Path) -> None:
    found = read_checkpoint(bytes_of_rows(tmp_path, q=np.ones((4, 8)), k=np.ones((2, 8))))
    with pytest.raises(ValueError, match=r"q\.kernl.*did you mean 'q\.kernel'"):
        load(Two(), found, names={"q.weight": "q.kernl", "k.weight": "k.kernel"})


@pytest.mark.parametrize(
    "case", ["gptq/v1_int4_g32_sym_desc_act", "compressed_tensors/int4_g32_sym_actorder"]
)
def test_columns_in_activation_order_keep_their_payload(case: str) -> None:
    found = read_checkpoint(FILES / case)
    net = load(net_of(found), found, ignore=INPUTS)
    x = jnp.zeros(0)
    for name, matrix in found.matrices.items():
        layer, weight = at(net, name.removesuffix(".weight")), matrix.dequantize()
        assert layer.frozen.numbers["value"].nbytes == matrix.bytes, f"{name}: bytes of the codes"
        x = jax.random.normal(jax.random.key(0), (3, weight.shape[1]))
        expected = x @ weight.T + (0 if layer.bias is None else layer.bias[...])
        np.testing.assert_allclose(nnx.jit(layer)(x), expected, rtol=1e-4, atol=1e-4)
    last, restored = next(reversed(found.matrices)).removesuffix(".weight"), nnx.clone(net)
    np.testing.assert_array_equal(at(restored, last)(x), at(net, last)(x))


class Alone(nnx.Module):
    """A parameter that the model contracts by itself."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.own = nnx.Param(jnp.zeros(shape))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.einsum("bi,io->bo", x, self.own[...])


def test_the_input_of_a_parameter_without_a_layer_is_permuted_too() -> None:
    found = read_checkpoint(FILES / "gptq" / "v1_int4_g32_sym_desc_act")
    name, matrix = f"{QKV}.weight", found.matrices[f"{QKV}.weight"]
    only = replace(found, matrices={name: matrix}, tensors={})
    x = jax.random.normal(jax.random.key(0), (3, matrix.shape[1]))
    net = load(Alone(matrix.shape[::-1]), only, names={name: ("own", "out in -> in out")}, inputs=(x,))
    np.testing.assert_allclose(net(x), x @ matrix.dequantize().T, rtol=1e-4, atol=1e-4)
    assert net.own.numbers["value"].nbytes == matrix.bytes


@pytest.mark.parametrize("lies", ["out in -> in out", "out in -> out in"])
def test_groups_of_outputs_that_lie_in_turn_keep_their_payload(lies: str) -> None:
    found = read_checkpoint(FILES / "hqq" / "int4_g64_axis0")
    name, matrix = next((each, held) for each, held in found.matrices.items() if held.shape == (128, 64))
    assert matrix.read().scale.size == 128  # 2 groups of 64 outputs for each input
    weight, by_input = matrix.dequantize(), lies.endswith("in out")
    only = replace(found, matrices={name: matrix}, tensors={})
    model = Alone((64, 128)) if by_input else Table()
    x = jax.random.normal(jax.random.key(0), (3, 64))
    net = load(model, only, names={name: ("own", lies)}, inputs=(x,) if by_input else (jnp.arange(3),))
    held = net.own.get_raw_value()
    assert held["value"].nbytes == matrix.bytes
    assert held["scale"].nbytes == 4 * matrix.read().scale.size
    np.testing.assert_array_equal(net.own[...], weight.T if by_input else weight)
    if by_input:
        np.testing.assert_allclose(nnx.jit(net)(x), x @ weight.T, rtol=1e-5, atol=1e-5)
        layer = load(
            nnx.Sequential(nnx.Linear(64, 128, use_bias=False, rngs=nnx.Rngs(0))),
            only,
            names={name: "layers.0.kernel"},
        )
        np.testing.assert_allclose(layer(x), x @ weight.T, rtol=1e-5, atol=1e-5)
        with pytest.raises(CheckpointError, match=r"layers\.0\.kernel: groups of outputs that lie in turn"):
            save(layer, "nowhere")
        with pytest.raises(
            ValueError, match=r"(?s)unfreeze: layers\.0.*lie in turn.*cure: unfreeze\(model\)"
        ):
            unfreeze(layer, from_payload=True)
    else:
        rows = jnp.array([0, 65, 127])
        np.testing.assert_array_equal(net(rows), weight[np.asarray(rows)])


class Table(nnx.Module):
    """A parameter that rows are looked up in."""

    def __init__(self) -> None:
        self.own = nnx.Param(jnp.zeros((128, 64)))

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.own[ids]


def test_groups_that_follow_no_axis_become_floats_and_this_is_told() -> None:
    found = read_checkpoint(FILES / "hqq" / "int4_g64_axis0")
    name, matrix = next((each, held) for each, held in found.matrices.items() if held.shape == (128, 64))
    only = replace(found, matrices={name: matrix}, tensors={})
    x = jnp.ones((3, 64))
    with pytest.warns(DequantizedWarning, match=r"(?s)own.*axis = 1"):
        net = load(Heads(), only, names={name: ("own", "(heads dim) in -> in heads dim")}, inputs=(x,))
    np.testing.assert_allclose(net.own[...].reshape(64, 128).T, matrix.dequantize(), rtol=1e-6)


@pytest.mark.parametrize("files", [("up.weight", "gate.weight"), ("gate.weight", "up.weight")])
def test_low_bits_that_are_joined_with_floats_become_floats_with_a_warning(
    files: tuple[str, str], tmp_path: Path
) -> None:
    file = bytes_of_rows(tmp_path, up=np.full((6, 8), 3)) / "model.safetensors"
    gate = np.ones((6, 8), np.float32)
    safetensors.save_file(safetensors.load_file(file) | {"gate.weight": gate}, file)
    net = nnx.Sequential(nnx.Linear(8, 12, use_bias=False, rngs=nnx.Rngs(0)))
    names = [Name(files, "layers.0.kernel", "out in -> in out")]
    assert "low bits and floats" in str(explain_load(net, tmp_path, names=names))
    with pytest.warns(DequantizedWarning, match=r"(?s)layers\.0\.kernel is joined from .*floats.*cure: "):
        loaded = load(net, tmp_path, names=names)
    values = {"up.weight": read_checkpoint(tmp_path).matrices["up.weight"].dequantize(), "gate.weight": gate}
    joined = np.concatenate([values[name] for name in files])
    np.testing.assert_array_equal(loaded.layers[0].kernel[...].T, joined)


class Heads(nnx.Module):
    def __init__(self) -> None:
        self.own = nnx.Param(jnp.zeros((64, 8, 16)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.einsum("bi,ihd->bhd", x, self.own[...])


class Deep(nnx.Module):
    """Layers that a checkpoint numbers."""

    def __init__(self, depth: int) -> None:
        self.blocks = nnx.List([nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(at)) for at in range(depth)])


@pytest.mark.heavy
def test_a_checkpoint_of_more_layers_than_the_model_is_named(tmp_path: Path) -> None:
    folder = save(Deep(12), tmp_path / "deep")
    names = {"blocks.{i}.weight": "blocks.{i}.kernel"}
    for call in (load, explain_load):
        with pytest.raises(
            ValueError,
            match=r"(?s)blocks\.\d+\.kernel, and the model ends with blocks\.9: .*more layers.*cure: ",
        ) as refused:
            call(Deep(10), folder, names=names)
        assert "did you mean" not in str(refused.value)
    load(Deep(12), folder, names=names)
    load(Deep(10), folder, names=names, ignore=[r"blocks\.1[01]\..*"])
    with pytest.raises(ValueError, match="not a parameter of the model; did you mean 'blocks"):
        load(Deep(12), folder, names={"blocks.{i}.weight": "block.{i}.kernel"})
