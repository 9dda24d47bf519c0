"""Weights of PyTorch's multi-head attention in the layout of Flax's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

PARTS = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}
NOT_HERE = ("bias_k", "bias_v")


def attention_from_torch(
    state: Mapping[str, Any], num_heads: int, *, num_kv_heads: int | None = None, prefix: str = ""
) -> dict[str, dict[str, np.ndarray]]:
    """The parameters of `nnx.MultiHeadAttention` from the state of torch's or Brevitas's multi-head attention.

    A torch weight is `(out, in)`, packed or not; ours of the projections in is `(in, heads, features)`, of that out
    `(heads, features, out)`. The result is for `jqinject.load_state(mha, result)`.

    Args:
        state: arrays by name, as `{name: tensor.numpy() for name, tensor in module.state_dict().items()}`: packed
            `in_proj_weight` (torch) or `in_proj.weight` (Brevitas), or `q_proj_weight`, `q_proj.weight` and so on,
            `out_proj.weight`, and biases. Entries of quantizers are left out: they are assembled from the weights.
        num_heads: of the layer.
        num_kv_heads: heads of keys and values; None for `num_heads`.
        prefix: what the names of this layer start with, as "blocks.0.attn."; others are left out.

    Returns:
        {"query": {"kernel": ..., "bias": ...}, "key": ..., "value": ..., "out": ...}; biases where there are.

    Raises:
        KeyError: a weight is missing.
        ValueError: sizes that do not fit; `bias_k` and `bias_v`, which Flax's layer does not have.

    Example:
        >>> state = {"in_proj_weight": np.ones((24, 8)), "out_proj.weight": np.ones((8, 8))}
        >>> {name: layer["kernel"].shape for name, layer in attention_from_torch(state, 2).items()}
        {'query': (8, 2, 4), 'key': (8, 2, 4), 'value': (8, 2, 4), 'out': (2, 4, 8)}
    """
    own = {n.removeprefix(prefix): np.asarray(x) for n, x in state.items() if n.startswith(prefix)}
    held = [name for name in NOT_HERE if name in own]
    if held:
        raise ValueError(
            f"attention_from_torch: {', '.join(held)} (add_bias_kv=True): Flax's attention appends no key and value"
        )
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    heads = {"query": num_heads, "key": kv_heads, "value": kv_heads}
    found: dict[str, dict[str, np.ndarray]] = {}
    for name in PARTS:
        weight, bias = _part(own, name, "weight"), _part(own, name, "bias")
        if weight is None:
            raise KeyError(
                f"attention_from_torch: no weight of the {name} projection (in_proj_weight, in_proj.weight, "
                f"{PARTS[name]}_weight or {PARTS[name]}.weight) with the prefix {prefix!r} in {sorted(state)}"
            )
        found[name] = {"kernel": _by_head(weight.T, heads[name], name)}
        if bias is not None:
            found[name]["bias"] = _by_head(bias, heads[name], name)
    if "out_proj.weight" not in own:
        raise KeyError(f"attention_from_torch: no {prefix}out_proj.weight in {sorted(state)}")
    out = own["out_proj.weight"]
    found["out"] = {"kernel": np.moveaxis(_by_head(out, num_heads, "out"), 0, -1)}
    if "out_proj.bias" in own:
        found["out"]["bias"] = own["out_proj.bias"]
    return found


def _part(state: Mapping[str, np.ndarray], name: str, kind: str) -> np.ndarray | None:
    """The weight or bias of one projection: its own, or its third of the packed one."""
    for own in (f"{PARTS[name]}_{kind}", f"{PARTS[name]}.{kind}"):
        if own in state:
            return state[own]
    for packed in (f"in_proj_{kind}", f"in_proj.{kind}"):
        if packed in state:
            if len(state[packed]) % 3:
                raise ValueError(
                    f"attention_from_torch: {packed} of shape {state[packed].shape} is not three of a size"
                )
            return np.split(state[packed], 3)[list(PARTS).index(name)]
    return None


def _by_head(x: np.ndarray, heads: int, name: str) -> np.ndarray:
    """The last axis as (heads, features)."""
    if x.shape[-1] % heads:
        raise ValueError(
            f"attention_from_torch: the {name} projection's {x.shape[-1]} features cannot be those of {heads} heads"
        )
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)
