"""A Llama of two layers in every format of the guide's table: loaded by one call, it computes what its numbers say."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jqinject.formats import Checkpoint, explain_load, load, read_checkpoint
from jqinject.formats.gguf_files import write_gguf
from jqinject.formats.loading.parameter_names import gguf_name
from jqinject.formats.safetensors_files import write_safetensors
from jqinject.ops import NF4
from tests.formats.test_load import Llama

safetensors = pytest.importorskip("safetensors.numpy", reason="of the extra jqinject[formats]")
pytest.importorskip("gguf", reason="of the extra jqinject[formats]")
RNG = np.random.default_rng(0)
GROUP = 16
MODULES = {
    f"model.layers.{layer}.{module}": shape
    for layer in range(2)
    for module, shape in {
        "self_attn.q_proj": (32, 32),
        "self_attn.k_proj": (16, 32),
        "self_attn.v_proj": (16, 32),
        "self_attn.o_proj": (32, 32),
        "mlp.gate_proj": (64, 32),
        "mlp.up_proj": (64, 32),
        "mlp.down_proj": (32, 64),
    }.items()
}
Tensors = dict[str, np.ndarray]


def scales(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return RNG.uniform(0.01, 0.03, shape).astype(dtype)


def words(*shape: int) -> np.ndarray:
    return RNG.integers(-(2**31), 2**31, shape, np.int64).astype(np.int32)


def codes(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape).astype(np.uint8)


def fp8(*shape: int) -> np.ndarray:
    return RNG.normal(0, 2, shape).astype(ml_dtypes.float8_e4m3fn)


def floats() -> Tensors:
    found = {
        "model.embed_tokens.weight": RNG.normal(size=(48, 32)),
        "lm_head.weight": RNG.normal(size=(48, 32)),
    }
    norms = [f"model.layers.{i}.{name}_layernorm" for i in range(2) for name in ("input", "post_attention")]
    found |= {f"{name}.weight": RNG.uniform(0.9, 1.1, 32) for name in (*norms, "model.norm")}
    return {name: array.astype(np.float32) for name, array in found.items()}


def gptq(name: str, out: int, into: int) -> Tensors:
    groups = into // GROUP
    zeros, of_groups = words(groups, out // 8), scales(groups, out, dtype=np.float16)
    return {f"{name}.qweight": words(into // 8, out), f"{name}.qzeros": zeros, f"{name}.scales": of_groups}


def awq(name: str, out: int, into: int) -> Tensors:
    groups = into // GROUP
    zeros, of_groups = words(groups, out // 8), scales(groups, out, dtype=np.float16)
    return {f"{name}.qweight": words(into, out // 8), f"{name}.qzeros": zeros, f"{name}.scales": of_groups}


def nf4(name: str, out: int, into: int) -> Tensors:
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [out, into]}
    return {
        f"{name}.weight": codes(out * into // 2, 1),
        f"{name}.weight.absmax": scales(out * into // 64) * 10,
        f"{name}.weight.quant_map": NF4.table,
        f"{name}.weight.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }


def int8(name: str, out: int, into: int) -> Tensors:
    return {f"{name}.weight": codes(out, into).view(np.int8), f"{name}.SCB": scales(out) * 20}


def fp8_blocks(name: str, out: int, into: int) -> Tensors:
    return {f"{name}.weight": fp8(out, into), f"{name}.weight_scale_inv": scales(1, 1)}


def modelopt(name: str, out: int, into: int) -> Tensors:
    return {f"{name}.weight": fp8(out, into), f"{name}.weight_scale": scales(1)}


def hqq(name: str, out: int, into: int) -> Tensors:
    rows = out * into // GROUP
    return {
        f"{name}.W_q": codes(rows // 2, GROUP),
        f"{name}.scale": scales(rows, 1),
        f"{name}.zero": RNG.uniform(7, 8, (rows, 1)).astype(np.float32),
        f"{name}.shape": np.array([out, into], np.int32),
        **{
            f"{name}.{end}": np.array(x, np.int32)
            for end, x in (("nbits", 4), ("axis", 1), ("group_size", GROUP))
        },
    }


def torchao(name: str, out: int, into: int) -> Tensors:
    return {
        f"{name}._weight_qdata": codes(out, into).view(np.int8),
        f"{name}._weight_scale": scales(out, 1) / 8,
    }


SETTINGS: dict[str, Mapping[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP},
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "fp8_blocks": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "hqq": {"quant_method": "hqq"},
}


def folder_of(kind: Callable[[str, int, int], Tensors], folder: Path) -> Path:
    tensors = floats()
    for name, (out, into) in MODULES.items():
        tensors |= kind(name, out, into)
    if kind is torchao:
        safetensors.save_file(tensors, folder / "model.safetensors", metadata_of_torchao())
    else:
        write_safetensors(folder, tensors, None)
    settings = SETTINGS.get(kind.__name__)
    (folder / "config.json").write_text(json.dumps({"quantization_config": settings} if settings else {}))
    if kind is modelopt:
        (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    return folder


def metadata_of_torchao() -> dict[str, str]:
    held = {
        f"{name}.weight": {
            "_type": "Int8Tensor",
            "_data": {"block_size": [1, into]},
            "_tensor_data_names": ["qdata", "scale"],
        }
        for name, (_, into) in MODULES.items()
    }
    return {"tensor_names": json.dumps([*held]), **{name: json.dumps(each) for name, each in held.items()}}


def gguf(folder: Path) -> Path:
    """Q8_0, by GGUF's names."""
    tensors: dict[str, Any] = {gguf_name(name): array for name, array in floats().items()}
    for name, (out, into) in MODULES.items():
        blocks = codes(out, into // 32, 34)
        blocks[..., :2] = scales(out, into // 32, 1, dtype=np.float16).view(np.uint8)
        tensors[gguf_name(f"{name}.weight")] = ("Q8_0", blocks)
    write_gguf(folder / "model.gguf", tensors, {"general.architecture": "other"})
    return folder


KINDS = (gptq, awq, nf4, int8, fp8_blocks, modelopt, hqq, torchao, gguf)


@pytest.mark.lengthy
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_one_call_loads_a_llama_that_computes_what_its_numbers_say(kind: Any, tmp_path: Path) -> None:
    found = read_checkpoint(gguf(tmp_path) if kind is gguf else folder_of(kind, tmp_path))
    served, model = load(Llama(nnx.Rngs(0)), found), Llama(nnx.Rngs(0))
    low = put_dequantized(model, found)
    assert len(low) == len(MODULES)
    ids = jnp.arange(12).reshape(2, 6)
    inputs = kind is fp8_blocks  # whose layers quantize their inputs too, to 3 bits of mantissa
    expected = np.asarray(model(ids))
    tolerance = 0.1 * np.abs(expected).max() if inputs else 1e-3
    np.testing.assert_allclose(served(ids), expected, atol=tolerance)
    for path, name in low.items():
        layer = served
        for part in path.split(".")[:-1]:
            layer = layer[int(part)] if part.isdigit() else getattr(layer, part)
        matrix = found.matrices[name]
        stored = math.prod(matrix.shape) * matrix.grid.bit_width // 8
        assert layer.frozen.numbers["value"].nbytes == stored
        assert kind is gguf or stored == matrix.bytes  # GGUF's blocks hold their scales too


def put_dequantized(model: Any, found: Checkpoint) -> dict[str, str]:
    """Write a checkpoint's numbers into a float model; the tensors of the parameters in low bits."""
    low = {}
    variables = {
        ".".join(map(str, path)): each for path, each in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }
    for each in explain_load(model, found).assignments:
        ((name, _),) = each.sources
        held = found.matrices[name].dequantize() if each.is_low else found.array(name)
        variables[each.path].set_value(
            jnp.asarray(held.T if each.path.endswith("kernel") else held, jnp.float32)
        )
        if each.is_low:
            low[each.path] = name
    return low
