"""Ready-made names: the checkpoints of Llama, Qwen, Mistral and Gemma for models of JAX."""

from __future__ import annotations

from jqinject.formats.loading.parameter_names import Name

FILE = "model.layers.{i}."
HEADS_OF = "(heads dim) in -> in heads dim"
OF_HEADS = "out (heads dim) -> heads dim out"
TRANSPOSED = "out in -> in out"
AS_ROWS = "rows columns -> rows columns"


def _mlp(model: str) -> tuple[Name, ...]:
    return tuple(
        Name(f"{FILE}mlp.{part}_proj.weight", f"{model}.{part}_proj.kernel", TRANSPOSED)
        for part in ("gate", "up", "down")
    )


def _tunix() -> tuple[Name, ...]:
    attention, layer = "layers.{i}.attn.", "layers.{i}."
    return (
        Name("model.embed_tokens.weight", "embedder.input_embedding", AS_ROWS),
        Name("model.norm.weight", "final_norm.w"),
        Name("lm_head.weight", "lm_head.w", TRANSPOSED),
        *(Name(f"{FILE}self_attn.{p}_proj.weight", f"{attention}{p}_proj.w", HEADS_OF) for p in "qkv"),
        Name(f"{FILE}self_attn.o_proj.weight", f"{attention}o_proj.w", OF_HEADS),
        *(Name(f"{FILE}self_attn.{p}_proj.bias", f"{attention}{p}_bias") for p in "qkv"),
        *(Name(f"{FILE}self_attn.{p}_norm.weight", f"{attention}{p}_norm.w") for p in "qk"),
        *_mlp("layers.{i}.mlp"),
        *(
            Name(f"{FILE}{norm}.weight", f"{layer}{norm}.w")
            for norm in ("input_layernorm", "post_attention_layernorm")
        ),
    )


TUNIX = _tunix()
"""Llama, Qwen and Mistral checkpoints for Tunix's models (`tunix.models.llama3`, `qwen2`, `qwen3`)."""


def _tunix_gemma() -> tuple[Name, ...]:
    attention, layer = "layers.{i}.attn.", "layers.{i}."
    norms = {
        "input_layernorm": "pre_attention_norm",
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "pre_ffw_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    }
    keys_and_values = tuple(f"{FILE}self_attn.{p}_proj.weight" for p in "kv")
    return (
        Name("model.embed_tokens.weight", "embedder.input_embedding", AS_ROWS),
        Name("model.norm.weight", "final_norm.scale"),
        Name(f"{FILE}self_attn.q_proj.weight", f"{attention}q_einsum.w", "(heads dim) in -> heads in dim"),
        Name(
            keys_and_values,
            f"{attention}kv_einsum.w",
            "(both heads dim) in -> both heads in dim",
            {"both": 2},
        ),
        Name(f"{FILE}self_attn.o_proj.weight", f"{attention}attn_vec_einsum.w", OF_HEADS),
        Name(f"{FILE}self_attn.q_norm.weight", f"{attention}_query_norm.scale"),
        Name(f"{FILE}self_attn.k_norm.weight", f"{attention}_key_norm.scale"),
        *_mlp("layers.{i}.mlp"),
        *(Name(f"{FILE}{norm}.weight", f"{layer}{own}.scale") for norm, own in norms.items()),
    )


TUNIX_GEMMA3 = _tunix_gemma()
"""Gemma 3 checkpoints (text) for `tunix.models.gemma3`, of models with fewer heads of keys than of queries.

Its parameters are bfloat16 unless `ModelConfig(param_dtype=jnp.float32)` says otherwise, and `load` keeps that; Tunix's
own loader gives them the dtype of the file."""


def _fused() -> tuple[Name, ...]:
    layer = "layers.{i}."
    return (
        Name("model.embed_tokens.weight", "embed_tokens.embedding", AS_ROWS),
        Name("model.norm.weight", "norm.scale"),
        Name("lm_head.weight", "lm_head.kernel", TRANSPOSED),
        Name(
            f"{FILE}self_attn.qkv_proj.weight",
            tuple(f"{layer}self_attn.{p}_proj.kernel" for p in "qkv"),
            TRANSPOSED,
        ),
        Name(f"{FILE}self_attn.o_proj.weight", f"{layer}self_attn.o_proj.kernel", TRANSPOSED),
        Name(
            f"{FILE}mlp.gate_up_proj.weight",
            tuple(f"{layer}mlp.{p}_proj.kernel" for p in ("gate", "up")),
            TRANSPOSED,
        ),
        Name(f"{FILE}mlp.down_proj.weight", f"{layer}mlp.down_proj.kernel", TRANSPOSED),
        *(
            Name(f"{FILE}{norm}.weight", f"{layer}{norm}.scale")
            for norm in ("input_layernorm", "post_attention_layernorm")
        ),
    )


FUSED = _fused()
"""Checkpoints with fused `qkv_proj` and `gate_up_proj` (Phi's, vLLM's) for models of Flax's layers, called as in
`transformers` without `model.`, that have them apart. Where nothing is fused such a model needs no names."""

READY = (*TUNIX, *TUNIX_GEMMA3, *FUSED)
"""All rules of these tables, which are for several models: none has a tensor for each of them."""
