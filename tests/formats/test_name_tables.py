"""Ready-made names: fused matrices come apart, heads become axes."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject.formats import FUSED, TUNIX_GEMMA3, Name, load, read_checkpoint
from tests.formats.test_load import Block, Llama, at, bytes_of_rows

pytest.importorskip("safetensors", reason="of the extra jqinject[formats]")
RNG = np.random.default_rng(0)
LAYER = "model__layers__0__"


def codes(rows: int, columns: int) -> np.ndarray:
    return RNG.integers(-127, 128, (rows, columns))


class OneBlock(Llama):
    def __init__(self) -> None:
        super().__init__(nnx.Rngs(0))
        self.layers = nnx.List([Block(nnx.Rngs(1))])


@pytest.mark.heavy
def test_fused_matrices_come_apart(tmp_path: Path) -> None:
    fused = {
        f"{LAYER}self_attn__qkv_proj": codes(64, 32),
        f"{LAYER}self_attn__o_proj": codes(32, 32),
        f"{LAYER}mlp__gate_up_proj": codes(128, 32),
        f"{LAYER}mlp__down_proj": codes(32, 64),
        "model__embed_tokens": codes(48, 32),
        "lm_head": codes(48, 32),
    }
    found = read_checkpoint(bytes_of_rows(tmp_path, **fused))
    norms = [f"model.layers.0.{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")]
    kept = [rule for rule in FUSED if "norm" not in rule.files[0]]
    assert {"model.norm.weight", *norms} == {
        file.replace("{i}", "0") for rule in FUSED if rule not in kept for file in rule.files
    }
    net: Any = OneBlock()
    for name in ("norm", "layers.0.input_layernorm", "layers.0.post_attention_layernorm"):
        module = net
        for part in name.split("."):
            module = module[int(part)] if part.isdigit() else getattr(module, part)
        del module.scale
    loaded: Any = load(net, found, names=kept)
    whole = found.matrices["model.layers.0.self_attn.qkv_proj.weight"].dequantize().T
    attention = loaded.layers[0].self_attn
    parts = [attention.q_proj.kernel[...], attention.k_proj.kernel[...], attention.v_proj.kernel[...]]
    np.testing.assert_array_equal(jnp.concatenate(parts, axis=1), whole)


class Gemma(nnx.Module):
    """The names and shapes that Tunix's Gemma 3 has in one attention."""

    def __init__(self) -> None:
        self.q_einsum = nnx.Dict({"w": nnx.Param(jnp.zeros((4, 8, 2)))})
        self.kv_einsum = nnx.Dict({"w": nnx.Param(jnp.zeros((2, 2, 8, 2)))})
        self.attn_vec_einsum = nnx.Dict({"w": nnx.Param(jnp.zeros((4, 2, 8)))})

    def __call__(self, x: Any) -> Any:
        q = jnp.einsum("btd,ndh->btnh", x, self.q_einsum["w"][...])
        kv = jnp.einsum("btd,cndh->cbtnh", x, self.kv_einsum["w"][...])
        return jnp.einsum("btnh,nhd->btd", q + kv.sum((0, 3))[:, :, None], self.attn_vec_einsum["w"][...])


def test_keys_and_values_of_gemma_are_joined_with_their_heads_as_axes(tmp_path: Path) -> None:
    shapes = {"q": (8, 8), "k": (4, 8), "v": (4, 8), "o": (8, 8)}
    held = {f"{LAYER}self_attn__{name}_proj": codes(*shape) for name, shape in shapes.items()}
    found = read_checkpoint(bytes_of_rows(tmp_path, **held))
    rules = [rule for rule in TUNIX_GEMMA3 if "self_attn" in rule.files[0] and "_proj" in rule.files[0]]
    own = [
        Name(
            tuple(file.replace("{i}", "0") for file in rule.files),
            rule.models[0].replace("layers.{i}.attn.", ""),
            rule.axes,
            rule.sizes,
        )
        for rule in rules
    ]
    x = RNG.normal(size=(2, 3, 8)).astype(np.float32)
    net = load(Gemma(), found, names=own, inputs=(x,))
    q, k, v, o = (
        found.matrices[f"model.layers.0.self_attn.{name}_proj.weight"].dequantize() for name in "qkvo"
    )
    np.testing.assert_allclose(net.q_einsum["w"][...], q.reshape(4, 2, 8).swapaxes(1, 2), rtol=1e-6)
    both = np.stack([each.reshape(2, 2, 8).swapaxes(1, 2) for each in (k, v)])
    np.testing.assert_allclose(net.kv_einsum["w"][...], both, rtol=1e-6)
    np.testing.assert_allclose(net.attn_vec_einsum["w"][...], o.T.reshape(4, 2, 8), rtol=1e-6)
    assert at(net, "kv_einsum")["w"].get_raw_value()["value"].dtype == jnp.int8
