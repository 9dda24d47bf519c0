"""Scales of quantized caches: into the quantizers of keys and values, and out of them."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject import Rule, calibrate, freeze, quantize, quantized_cache
from jqinject.dot import LowBitCache
from jqinject.formats import CheckpointError, explain_load, load, read_checkpoint, save
from jqinject.nn import QuantScaledDotProductAttention
from jqinject.quant import (
    Fp8e4m3OCPActPerTensorFloat,
    Int8ActPerTensorAbsMax,
    Int8ActPerTensorFloat,
    Int8DynamicActPerRowAbsMax,
    Int8WeightPerChannelFloat,
)

safetensors = pytest.importorskip("safetensors.numpy", reason="of the extra jqinject[formats]")
SCALES = {"k_scale": np.float32([0.25]), "v_scale": np.float32([0.0625])}
X = jax.random.normal(jax.random.key(0), (2, 1, 16))
E4M3 = jnp.float8_e4m3fn


def written(folder: Path, scheme: dict[str, Any] | None = None, **scales: np.ndarray) -> Path:
    """A checkpoint of one attention: int8 projections, and a cache in 8-bit floats."""
    rng = np.random.default_rng(0)
    tensors = {f"model.layers.0.self_attn.{name}": scale for name, scale in (SCALES | scales).items()}
    for name in "kv":
        module = f"model.layers.0.self_attn.{name}_proj"
        tensors[f"{module}.weight"] = rng.integers(-127, 128, (16, 16)).astype(np.int8)
        tensors[f"{module}.weight_scale"] = rng.uniform(0.01, 0.02, (16, 1)).astype(np.float32)
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    cache = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    settings = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "kv_cache_scheme": cache if scheme is None else cache | scheme,
    }
    folder.mkdir(exist_ok=True)
    safetensors.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))
    return folder


class Cached(nnx.Module):
    """Writes keys and values into a cache that it is given."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Dict({"self_attn": nnx.Dict({})})])
        for name in ("k_proj", "v_proj"):
            self.layers[0]["self_attn"][name] = nnx.Linear(16, 16, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array, cache: dict[str, Any]) -> tuple[jax.Array, dict[str, Any]]:
        parts = self.layers[0]["self_attn"]
        new = {
            name: jax.lax.dynamic_update_slice(
                cache[name], parts[f"{name}_proj"](x).reshape(2, 1, 2, 8), (0, 1, 0, 0)
            )
            for name in "kv"
        }
        weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", x.reshape(2, 1, 2, 8), new["k"]))
        return jnp.einsum("bnts,bsnh->btnh", weights, new["v"]), new


EMPTY = {name: jnp.zeros((2, 3, 2, 8)) for name in "kv"}
NAMES = {
    **{
        f"model.layers.{{i}}.self_attn.{name}_proj.weight": f"layers.{{i}}.self_attn.{name}_proj.kernel"
        for name in "kv"
    },
    **{f"model.layers.0.self_attn.{name}_scale": f"cache.{name}" for name in "kv"},
}


@pytest.mark.lengthy
def test_the_caches_that_names_are_for_hold_the_numbers_of_the_checkpoint(tmp_path: Path) -> None:
    folder = written(tmp_path / "given")
    assert "scale of the cache cache.k: model.layers.0.self_attn.k_scale" in str(
        explain_load(Cached(), folder, names=NAMES)
    )
    served = load(Cached(), folder, names=NAMES, inputs=(X, EMPTY))
    _, cache = served(X, quantized_cache(served, EMPTY))
    for name, held in cache.items():
        assert isinstance(held, LowBitCache) and held.numbers["value"].dtype == E4M3
        scale = SCALES[f"{name}_scale"]
        np.testing.assert_array_equal(held.numbers["scale"], np.full((2, 3, 2, 1), scale))
        rows = served.layers[0]["self_attn"][f"{name}_proj"](X).reshape(2, 1, 2, 8)
        np.testing.assert_array_equal(held.numbers["value"][:, 1:2], (rows / scale).astype(E4M3))
    again = read_checkpoint(save(served, tmp_path / "saved", names=NAMES))
    assert again.cache_format == read_checkpoint(folder).cache_format
    for name, scale in SCALES.items():
        np.testing.assert_array_equal(again.array(f"model.layers.0.self_attn.{name}"), scale)


class Attention(nnx.Module):
    def __init__(self, quantizer: Any = Fp8e4m3OCPActPerTensorFloat) -> None:
        rngs = nnx.Rngs(0)
        self.k_proj = nnx.Linear(16, 16, use_bias=False, rngs=rngs)
        self.v_proj = nnx.Linear(16, 16, use_bias=False, rngs=rngs)
        self.sdpa = QuantScaledDotProductAttention(k_transposed_quant=quantizer, v_quant=quantizer)

    def __call__(self, x: jax.Array) -> jax.Array:
        heads = [y.reshape(*x.shape[:2], 2, 8) for y in (x, self.k_proj(x), self.v_proj(x))]
        return self.sdpa(*heads)


def net(quantizer: Any = Fp8e4m3OCPActPerTensorFloat) -> Any:
    return nnx.Dict({"layers": nnx.List([nnx.Dict({"self_attn": Attention(quantizer)})])})


@pytest.mark.heavy
def test_an_attention_layer_at_the_same_path_quantizes_as_the_checkpoint_says(tmp_path: Path) -> None:
    folder = written(tmp_path / "given")
    served = load(net(), folder)
    attention = served.layers[0]["self_attn"]
    for name, scale in (("k_transposed_quant", 0.25), ("v_quant", 0.0625)):
        found = getattr(attention.sdpa, name)(jnp.array([[3.3, -700.0]]))
        assert float(found.scale.max()) == scale
        np.testing.assert_array_equal(
            found.value,
            (np.clip(np.float32([[3.3, -700]]) / scale, -448, 448)).astype(E4M3).astype(np.float32) * scale,
        )
    again = read_checkpoint(save(served, tmp_path / "saved"))
    assert again.array("layers.0.self_attn.sdpa.k_scale").tolist() == [0.25]
    with pytest.raises(
        CheckpointError,
        match=r"(?s)k_transposed_quant is Int8DynamicActPerRowAbsMax, and .*k_scale is.*cure: Fp8e4m3OCPAct",
    ):
        load(net(Int8DynamicActPerRowAbsMax), folder)
    kept = load(net(Int8DynamicActPerRowAbsMax), folder, ignore=[".*_scale"])
    assert kept.layers[0]["self_attn"].sdpa.v_quant.binding.base is Int8DynamicActPerRowAbsMax


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("quant", "saved"), [(Int8ActPerTensorFloat, True), (Int8ActPerTensorAbsMax, False)], ids=str
)
def test_a_cache_that_would_be_quantized_otherwise_is_not_saved(
    quant: Any, saved: bool, tmp_path: Path
) -> None:
    x = jax.random.normal(jax.random.key(0), (2, 16))
    rules = [Rule(".*_proj", weight_quant=Int8WeightPerChannelFloat), Rule(cache_quant=quant)]
    model = quantize(Cached(), rules, inputs=(x, EMPTY))
    calibrate(model, [(x, EMPTY)], progress=False)
    if saved:
        save(freeze(model), tmp_path / "saved", names=NAMES)
        return
    with pytest.raises(CheckpointError, match=r"(?s)cache\.k.*quantizes the cache.*cure: "):
        save(freeze(model), tmp_path / "saved", names=NAMES)


def test_scales_that_nothing_takes_are_named_with_the_way_to_use_them(tmp_path: Path) -> None:
    plain = {name: path for name, path in NAMES.items() if "scale" not in name}
    said = str(explain_load(Cached(), written(tmp_path), names=plain))
    assert "2 scales of a quantized cache are not used (model.layers.0.self_attn.k_scale" in said
    assert "'model.layers.{i}.self_attn.k_scale': 'cache.layer_{i}.k'" in said


@pytest.mark.parametrize(
    ("scheme", "scales", "match"),
    [
        ({"num_bits": 4}, {}, r"(?s)bits=4.*known are 8 bits.*cure: ignore"),
        ({"symmetric": False}, {}, "known are 8 bits without zero points"),
        ({"strategy": "attn_head"}, {}, "one static scale of the tensor"),
        ({}, {"k_scale": np.float32([0.5, 0.25])}, r"k_scale is \[0\.5, 0\.25\], expected one scale above 0"),
        ({}, {"v_scale": np.float32([np.nan])}, r"v_scale is \[nan\], expected one scale above 0"),
    ],
)
def test_caches_that_cannot_be_are_refused_by_name(
    scheme: dict[str, Any], scales: dict[str, Any], match: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=match):
        load(Cached(), written(tmp_path, scheme, **scales), names=NAMES, inputs=(X, EMPTY))
