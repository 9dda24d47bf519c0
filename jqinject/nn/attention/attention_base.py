"""Scaled dot-product attention between quantizers: what the attention layers have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.dot.geometry.equation import EinsumLabels
from jqinject.dot.tensors.choice import check_choice, choose
from jqinject.dot.tensors.contract import contract_as
from jqinject.nn.base.slots import act_slot, through
from jqinject.nn.base.weight_layer import ContractionKind
from jqinject.quant_tensor import as_array

Q_SCALED, K_TRANSPOSED, V = act_slot("q_scaled_"), act_slot("k_transposed_"), act_slot("v_")
SOFTMAX_INPUT, ATTN_OUTPUT_WEIGHTS = act_slot("softmax_input_"), act_slot("attn_output_weights_")
# In the order in which attention computes.
IN_ATTENTION = (Q_SCALED, K_TRANSPOSED, SOFTMAX_INPUT, ATTN_OUTPUT_WEIGHTS, V)


class AttentionCall(NamedTuple):
    """What one call of an attention function is given beside its operands; see `nnx.dot_product_attention`.

    Attributes:
        bias: added to the products of queries and keys; broadcasts to (*batch, heads, queries, keys).
        mask: where weights may be other than 0; broadcasts likewise.
        is_causal: whether a query sees only the keys up to its own position.
        broadcast_dropout, dropout_rng, dropout_rate, deterministic: dropout of the weights, as Flax draws it.
        precision: of contractions of floats.
        module: sows the weights, as they multiply the values, if given.
        scale: what queries are multiplied by; None for 1 / sqrt(features of a head).
        contraction: "auto", "float", "int" or "fp8".
    """

    bias: jax.Array | None = None
    mask: jax.Array | None = None
    is_causal: bool = False
    broadcast_dropout: bool = True
    dropout_rng: jax.Array | None = None
    dropout_rate: float = 0.0
    deterministic: bool = False
    precision: Any = None
    module: Any = None
    scale: float | None = None
    contraction: ContractionKind = "auto"


def attention(
    query: jax.Array, key: Any, value: Any, proxies: Mapping[str, Any], call: AttentionCall
) -> jax.Array:
    """`softmax(q k^T) v` with quantizers of scaled queries, products and weights.

    Args:
        query: (*batch, queries, heads, features), not scaled yet.
        key, value: (*batch, keys, kv_heads, features), arrays or QuantTensors, quantized already; `kv_heads` divides
            `heads`.
        proxies: by slot name, or None.
        call: the rest.

    Returns:
        (*batch, queries, heads, features), in the dtype of `query`.

    Raises:
        ValueError: shapes that do not fit; dropout without a key.
    """
    _check(query, key, value, call)
    weights = _weights(query, key, proxies, call)
    weights = through(proxies.get("attn_output_weights_quant"), weights)
    if call.module is not None:
        call.module.sow(nnx.Intermediate, "attention_weights", as_array(weights))
    *_, kv_heads, features = value.shape
    if query.shape[-2] == kv_heads:
        return _contract("...hqk,...khd->...qhd", weights, value, query.dtype, call)
    grouped = _grouped(weights, -3, kv_heads)
    out = _contract("...hgqk,...khd->...qhgd", grouped, value, query.dtype, call)
    return out.reshape(*query.shape[:-1], features)


def _weights(query: jax.Array, key: Any, proxies: Mapping[str, Any], call: AttentionCall) -> jax.Array:
    """(*batch, heads, queries, keys), softmax in at least float32, then in the dtype of the query."""
    dtype, features = query.dtype, query.shape[-1]
    scaled = (
        query / jnp.sqrt(features).astype(dtype)
        if call.scale is None
        else query * jnp.asarray(call.scale, dtype)
    )
    q = through(proxies.get("q_scaled_quant"), scaled)
    wide = dtype if dtype.itemsize >= 4 else jnp.dtype(jnp.float32)
    if query.shape[-2] == key.shape[-2]:
        logits = _contract("...qhd,...khd->...hqk", q, key, wide, call)
    else:
        logits = _contract("...qhgd,...khd->...hgqk", _grouped(q, -2, key.shape[-2]), key, wide, call)
        logits = logits.reshape(*query.shape[:-3], query.shape[-2], query.shape[-3], key.shape[-3])
    if call.bias is not None:
        logits = logits + call.bias.astype(wide)
    # Before the mask: masked products must not enter a range.
    logits = as_array(through(proxies.get("softmax_input_quant"), logits))
    allowed = _allowed(call, logits.shape)
    if allowed is not None:
        logits = jnp.where(allowed, logits, jnp.finfo(dtype).min.astype(wide))
    return _dropped(jax.nn.softmax(logits).astype(dtype), call)


def _allowed(call: AttentionCall, shape: tuple[int, ...]) -> jax.Array | None:
    allowed = None if call.mask is None else call.mask.astype(bool)
    if call.is_causal:
        causal = jnp.tril(jnp.ones(shape[-2:], bool))
        allowed = causal if allowed is None else allowed & causal
    return allowed


def _dropped(weights: jax.Array, call: AttentionCall) -> jax.Array:
    if call.deterministic or call.dropout_rate == 0.0:
        return weights
    if call.dropout_rng is None:
        raise ValueError(
            f"attention with dropout_rate={call.dropout_rate} needs a dropout_rng.\n"
            "  cure: a key, or deterministic=True"
        )
    share = 1.0 - call.dropout_rate
    drawn = (1,) * (weights.ndim - 2) + weights.shape[-2:] if call.broadcast_dropout else weights.shape
    keep = jax.random.bernoulli(call.dropout_rng, share, drawn)
    return weights * (keep.astype(weights.dtype) / jnp.asarray(share, weights.dtype))


def _grouped(x: Any, axis: int, kv_heads: int) -> Any:
    """The axis of heads split in two: those of keys and values, and the queries' heads that share one of them."""
    axis += x.ndim
    return x.reshape((*x.shape[:axis], kv_heads, x.shape[axis] // kv_heads, *x.shape[axis + 1 :]))


def _contract(equation: str, lhs: Any, rhs: Any, dtype: Any, call: AttentionCall) -> jax.Array:
    """The einsum in the numbers of the table: by default integers that are kept, as in evaluation, and 8-bit floats."""
    labels = EinsumLabels.parse(equation, lhs.shape, rhs.shape)
    dims, numbers = labels.dimensions(), call.contraction
    # A scale that varies along what is summed over would cut the sum into single numbers.
    choice = choose(lhs, rhs, dims, numbers, rounded=False, apart=() if numbers == "auto" else None)
    check_choice(choice, dims, numbers)
    if choice.kernel == "floats":
        how = {"precision": call.precision, "preferred_element_type": dtype}
        return jnp.einsum(equation, as_array(lhs), as_array(rhs), **how)
    return contract_as(choice, dims, dtype)[0].transpose(labels.permutation())


def _check(query: Any, key: Any, value: Any, call: AttentionCall) -> None:
    shapes = f"got query {query.shape}, key {key.shape}, value {value.shape}"
    expected = "expected (*batch, length, heads, features)"
    if min(query.ndim, key.ndim, value.ndim) < 3 or not query.ndim == key.ndim == value.ndim:
        raise ValueError(f"attention: operands of the same number of axes, at least 3: {expected}, {shapes}")
    if not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(f"attention: the batch axes differ; {expected}, {shapes}")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"attention: queries and keys have to have as many features; {shapes}")
    if key.shape[-3:-1] != value.shape[-3:-1]:
        raise ValueError(f"attention: keys and values have to have the same length and heads; {shapes}")
    if query.shape[-2] % key.shape[-2]:
        raise ValueError(
            f"attention: the queries' {query.shape[-2]} heads cannot share {key.shape[-2]} heads of keys and values "
            f"evenly; {shapes}.\n  cure: a number of heads that num_kv_heads divides"
        )
    if not 0.0 <= call.dropout_rate < 1.0:
        raise ValueError(f"attention: dropout_rate has to be in [0, 1), got {call.dropout_rate!r}")
