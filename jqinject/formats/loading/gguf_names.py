"""GGUF: names and the order of rows, as llama.cpp has them and as the models' own checkpoints do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.loading.parameter_names import compiled

# Parts of names that GGUF files have, as the models' own checkpoints call them.
GGUF = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{i}.attn_q": "model.layers.{i}.self_attn.q_proj",
    "blk.{i}.attn_k": "model.layers.{i}.self_attn.k_proj",
    "blk.{i}.attn_v": "model.layers.{i}.self_attn.v_proj",
    "blk.{i}.attn_output": "model.layers.{i}.self_attn.o_proj",
    "blk.{i}.attn_q_norm": "model.layers.{i}.self_attn.q_norm",
    "blk.{i}.attn_k_norm": "model.layers.{i}.self_attn.k_norm",
    "blk.{i}.attn_norm": "model.layers.{i}.input_layernorm",
    "blk.{i}.ffn_norm": "model.layers.{i}.post_attention_layernorm",
    "blk.{i}.ffn_gate": "model.layers.{i}.mlp.gate_proj",
    "blk.{i}.ffn_up": "model.layers.{i}.mlp.up_proj",
    "blk.{i}.ffn_down": "model.layers.{i}.mlp.down_proj",
}
# What holds the number of heads whose two rotated halves llama.cpp keeps in turn, row by row.
HEADS = {"blk.{i}.attn_q": "llama.attention.head_count", "blk.{i}.attn_k": "llama.attention.head_count_kv"}


def published_name(gguf: str) -> str:
    """A name of a GGUF file as the model's own checkpoint has it; unknown ones stay.

    Example:
        >>> published_name("blk.2.attn_q.weight")
        'model.layers.2.self_attn.q_proj.weight'
    """
    return _translated(gguf, GGUF)


def gguf_name(published: str) -> str:
    """A name of a model's own checkpoint, with or without `model.` in front, as GGUF has it; unknown ones stay.

    Example:
        >>> gguf_name("layers.2.self_attn.q_proj.weight")
        'blk.2.attn_q.weight'
    """
    turned = {name: gguf for gguf, name in GGUF.items()}
    found = _translated(published, turned)
    return found if found != published else _bare(published, turned)


def _bare(published: str, turned: Mapping[str, str]) -> str:
    found = _translated(f"model.{published}", turned)
    return published if found == f"model.{published}" else found


def _translated(name: str, patterns: Mapping[str, str]) -> str:
    module, dot, leaf = name.rpartition(".")
    for pattern, other in patterns.items():
        found = compiled(pattern).fullmatch(module)
        if found:
            return other.format(**found.groupdict()) + dot + leaf
    return name


def heads_in_turn(gguf: str, values: Mapping[str, Any]) -> int:
    """The heads of a tensor of a GGUF file whose rows llama.cpp keeps in another order; 0 for any other tensor.

    Args:
        gguf: the tensor's name.
        values: of the file; Llama's architecture (Mistral's too) has such rows.

    Raises:
        CheckpointError: the number of heads is not there.
    """
    if values.get("general.architecture") != "llama":
        return 0
    for pattern, key in HEADS.items():
        found = compiled(pattern).fullmatch(gguf.rpartition(".")[0])
        if found is None:
            continue
        held = values.get(key, values.get(HEADS["blk.{i}.attn_q"]))
        if isinstance(held, list | tuple) and found["i"].isdigit() and int(found["i"]) < len(held):
            held = held[int(found["i"])]
        if not isinstance(held, int) or held < 1:
            raise CheckpointError(
                f"{gguf} has rows in the order of Llama's heads, but {key} is {held!r}.\n"
                f"  cure: names={{{gguf!r}: ...}}, which takes them as they lie"
            )
        return held
    return 0


def published_order(rows: int, heads: int, name: str) -> np.ndarray:
    """Which row of a GGUF file is which row of the model's own checkpoint: `published = gguf[order]`.

    llama.cpp keeps the numbers that one rotation turns beside each other; the checkpoints, half a head apart.

    Args:
        rows: of the tensor.
        heads: that they make up.
        name: of the tensor, for errors.

    Raises:
        CheckpointError: the rows are no such heads.

    Example:
        >>> published_order(8, 2, "blk.0.attn_q.weight").tolist()
        [0, 2, 1, 3, 4, 6, 5, 7]
    """
    if rows % (2 * heads):
        raise CheckpointError(f"{name} has {rows} rows, which are no {heads} heads with two halves each")
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
