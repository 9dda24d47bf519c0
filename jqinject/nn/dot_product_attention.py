"""Scaled dot-product attention between quantizers, as a function and as layers, and its float twin."""

from collections.abc import Callable
from typing import Any, NamedTuple, Unpack, final

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jqinject.core.flax_internals import promote_dtype as default_promote_dtype
from jqinject.core.transforms import along
from jqinject.dot.geometry.equation import EinsumLabels
from jqinject.dot.tensors.choice import OF_KINDS, check_choice, choose
from jqinject.dot.tensors.contract import contract_as
from jqinject.nn import base
from jqinject.nn.base import keywords
from jqinject.proxy import ActQuantProxyFromInjector, restored
from jqinject.quant_tensor import AnyQuantTensor, Operand, as_array

Q_SCALED, K_TRANSPOSED, V = base.act_slot("q_scaled_"), base.act_slot("k_transposed_"), base.act_slot("v_")
SOFTMAX_INPUT, ATTN_OUTPUT_WEIGHTS = base.act_slot("softmax_input_"), base.act_slot("attn_output_weights_")
# In the order in which attention computes.
IN_ATTENTION = (Q_SCALED, K_TRANSPOSED, SOFTMAX_INPUT, ATTN_OUTPUT_WEIGHTS, V)


class QuantAttentionLayer(base.QuantLayer[base.Out]):
    """Abstract: a layer with places for quantizers within attention.

    Attributes:
        contraction: in which numbers operands are contracted.
    """

    q_scaled_quant = Q_SCALED
    k_transposed_quant = K_TRANSPOSED
    softmax_input_quant = SOFTMAX_INPUT
    attn_output_weights_quant = ATTN_OUTPUT_WEIGHTS
    v_quant = V
    options = (base.RETURN, base.CONTRACTION)
    contraction: base.ContractionKind = "auto"


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
    contraction: base.ContractionKind = "auto"


def attention(
    layer: QuantAttentionLayer[Any], query: jax.Array, key: Operand, value: Operand, call: AttentionCall
) -> jax.Array:
    """`softmax(q k^T) v` with quantizers of scaled queries, products and weights.

    A transform `T` that keys undo goes on the queries, `q T^-T (k T)^T = q k^T`; that of values comes off the output.

    Args:
        layer: whose quantizers these are.
        query: (*batch, queries, heads, features), not scaled yet.
        key, value: (*batch, keys, kv_heads, features), arrays or QuantTensors, as `rows_of` returns them; `kv_heads`
            divides `heads`.
        call: the rest.

    Returns:
        (*batch, queries, heads, features), in the dtype of `query`.

    Raises:
        ValueError: shapes that do not fit; dropout without a key.
    """
    _check(query, key, value, call)
    of_key, of_value = layer.k_transposed_quant, layer.v_quant
    if _undoes(of_key):
        query = along(of_key.pre_transform.dual, query, of_key.transform_axes)
    weights = base.through(layer.attn_output_weights_quant, _weights(layer, query, key, call))
    if call.module is not None:
        call.module.sow(nnx.Intermediate, "attention_weights", as_array(weights))
    *_, kv_heads, features = value.shape
    if query.shape[-2] == kv_heads:
        out = _contract("...hqk,...khd->...qhd", weights, value, query.dtype, call)
    else:
        grouped = _grouped(weights, -3, kv_heads)
        out = _contract("...hgqk,...khd->...qhgd", grouped, value, query.dtype, call)
        out = out.reshape(*query.shape[:-1], features)
    return restored(of_value, out) if _undoes(of_value) else out


def rows_of(proxy: ActQuantProxyFromInjector | None, x: jax.Array) -> Operand:
    """Keys or values through their quantizer, as `attention` takes them and a cache stores them.

    Args:
        proxy: the quantizer, or None.
        x: (*batch, keys, kv_heads, features).
    """
    if proxy is None or not _undoes(proxy):
        return base.through(proxy, x)
    return proxy.quantize_for_cache(x)


def _undoes(proxy: ActQuantProxyFromInjector | None) -> bool:
    return proxy is not None and proxy.undo_transform and proxy.is_quant_enabled


def _weights(
    layer: QuantAttentionLayer[Any], query: jax.Array, key: Operand, call: AttentionCall
) -> jax.Array:
    """(*batch, heads, queries, keys), softmax in at least float32, then in the dtype of the query."""
    dtype, features = query.dtype, query.shape[-1]
    scaled = (
        query / jnp.sqrt(features).astype(dtype)
        if call.scale is None
        else query * jnp.asarray(call.scale, dtype)
    )
    q = base.through(layer.q_scaled_quant, scaled)
    wide = dtype if dtype.itemsize >= 4 else jnp.dtype(jnp.float32)
    if query.shape[-2] == key.shape[-2]:
        logits = _contract("...qhd,...khd->...hqk", q, key, wide, call)
    else:
        logits = _contract("...qhgd,...khd->...hgqk", _grouped(q, -2, key.shape[-2]), key, wide, call)
        logits = logits.reshape(*query.shape[:-3], query.shape[-2], query.shape[-3], key.shape[-3])
    if call.bias is not None:
        logits = logits + call.bias.astype(wide)
    # Before the mask: masked products must not enter a range.
    logits = as_array(base.through(layer.softmax_input_quant, logits))
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


def _grouped(x: Operand, axis: int, kv_heads: int) -> Any:
    """The axis of heads split in two: those of keys and values, and the queries' heads that share one of them."""
    axis += x.ndim
    return x.reshape((*x.shape[:axis], kv_heads, x.shape[axis] // kv_heads, *x.shape[axis + 1 :]))


def _contract(equation: str, lhs: Operand, rhs: Operand, dtype: DTypeLike, call: AttentionCall) -> jax.Array:
    """The einsum in the numbers of the table: by default integers that are kept, as in evaluation, and 8-bit floats."""
    axes, numbers = EinsumLabels.parse(equation, lhs.shape, rhs.shape).axes, call.contraction
    dims = axes.plain
    # A scale that varies along what is summed over would cut the sum into single numbers.
    choice = choose(lhs, rhs, dims, numbers, rounded=False, apart=() if numbers == "auto" else None)
    check_choice(choice, dims, numbers)
    if choice.kernel == "floats":
        how = {"precision": call.precision, "preferred_element_type": dtype}
        return jnp.einsum(equation, as_array(lhs), as_array(rhs), **how)
    return axes.ordered(contract_as(choice, dims, dtype)[0])


def _check(query: Operand, key: Operand, value: Operand, call: AttentionCall) -> None:
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


SDPA_OUTPUT = base.act_slot("sdpa_output_")
# The keywords that the quantized attention has in common with Flax's.
SHARED_OPTIONS = frozenset(AttentionCall._fields) - {"scale", "contraction"}
Process = Callable[..., jax.Array]


def identity(x: object) -> Any:
    """`x` unchanged."""
    return x


@final
class ScaledDotProductAttention(nnx.Module):
    """`nnx.dot_product_attention` as a layer: `softmax(q k^T / sqrt(d)) v`.

    It can be the `attention_fn` of `nnx.MultiHeadAttention`, and is the float twin of
    `QuantScaledDotProductAttention`.

    Args:
        pre_process_q, pre_process_k, pre_process_v: applied to queries, keys and values first: functions, or modules
            such as rotary embeddings. Where the call is given `input_positions`, that of queries and keys get them too.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.ones((1, 3, 2, 4))  # (batch, length, heads, features)
        >>> ScaledDotProductAttention()(x, x, x).shape
        (1, 3, 2, 4)
    """

    def __init__(
        self,
        pre_process_q: Process = identity,
        pre_process_k: Process = identity,
        pre_process_v: Process = identity,
    ) -> None:
        self.pre_process_q = pre_process_q
        self.pre_process_k = pre_process_k
        self.pre_process_v = pre_process_v

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        input_positions: jax.Array | None = None,
        **options: Any,
    ) -> jax.Array:
        """Attention.

        Args:
            query: (*batch, queries, heads, features).
            key, value: (*batch, keys, kv_heads, features); `kv_heads` divides `heads`.
            input_positions: for the functions that are applied first.
            options: the keywords of `nnx.dot_product_attention`.

        Returns:
            (*batch, queries, heads, features).
        """
        query, key, value = pre_processed(self, query, key, value, input_positions)
        return nnx.dot_product_attention(query, key, value, **options)


@final
class QuantScaledDotProductAttention(QuantAttentionLayer[base.Out]):
    """Scaled dot-product attention with quantizers of all it contracts.

    `out_q(w_q(softmax(s_q(q_q(q / sqrt(d)) k_q(k)^T))) v_q(v))`, with the quantizers named below. In evaluation,
    integers of at most 8 bits are contracted as integers; training contracts what they stand for. It can be the
    `attention_fn` of `nnx.MultiHeadAttention`, whose signature it has. With every quantizer None, the default, it is
    `nnx.dot_product_attention` to the bit.

    Args:
        pre_process_q, pre_process_k, pre_process_v: as for `ScaledDotProductAttention`.
        softmax_input_quant: quantizer of the products, with their bias and before the mask.
        attn_output_weights_quant: quantizer of the weights, after dropout.
        q_scaled_quant: quantizer of the scaled queries.
        k_transposed_quant: quantizer of the keys.
        v_quant: quantizer of the values.
        sdpa_output_quant: quantizer of the output.
        return_quant_tensor: return a QuantTensor, with the scale of `sdpa_output_quant`.
        contraction: "auto"; or "float", "int" or "fp8" to insist.
        rngs: for quantizers that draw random numbers.
        more: names that quantizers declare anew, with their prefix: `q_scaled_bit_width=4`, `v_...`.

    Raises:
        TypeError: an argument that is not a quantizer of activations, or an override that has no effect.
        ValueError: `return_quant_tensor` without `sdpa_output_quant`; a `contraction` that there is not.

    Source: Brevitas. Differs from Brevitas: no slot has a quantizer by default; operands are laid out as in Flax,
    lengths before heads; a mask hides products from the softmax, not from the range of `softmax_input_quant`; `dropout`
    is off in evaluation.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jqinject.quant import Int8ActPerTensorFloat
        >>> sdpa = QuantScaledDotProductAttention(v_quant=Int8ActPerTensorFloat, v_bit_width=4)
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 5, 2, 8))
        >>> sdpa(q, k, v, is_causal=True).shape, sdpa.v_quant.bit_width()
        ((1, 5, 2, 8), 4)
    """

    sdpa_output_quant = SDPA_OUTPUT

    _results: "base.Results[QuantScaledDotProductAttention[jax.Array], QuantScaledDotProductAttention[AnyQuantTensor]]"

    def __init__(
        self,
        pre_process_q: Process = identity,
        pre_process_k: Process = identity,
        pre_process_v: Process = identity,
        *,
        rngs: nnx.Rngs | None = None,
        **more: Unpack[keywords.QuantScaledDotProductAttentionKeywords],
    ) -> None:
        self.pre_process_q = pre_process_q
        self.pre_process_k = pre_process_k
        self.pre_process_v = pre_process_v
        self._init_layer(locals())

    def _init_quantizers(
        self, arguments: base.Arguments, overrides: base.Arguments, rngs: nnx.Rngs | None
    ) -> None:
        self.contraction = OF_KINDS(arguments["contraction"], type(self).__name__, "contraction")
        super()._init_quantizers(arguments, overrides, rngs)

    def _check_scale_to_return(self) -> None:
        if not base.is_on(self.sdpa_output_quant):
            raise self._no_scale_to_return("sdpa_output_quant")

    def __call__(
        self,
        query: Any,
        key: Any,
        value: Any,
        bias: jax.Array | None = None,
        mask: jax.Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: jax.Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: nnx.Module | None = None,
        promote_dtype: Any = default_promote_dtype,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        input_positions: jax.Array | None = None,
    ) -> base.Out:
        """Attention; arguments as for `nnx.dot_product_attention`.

        Args:
            query: (*batch, queries, heads, features).
            key, value: (*batch, keys, kv_heads, features); `kv_heads` divides `heads` (grouped-query attention).
            bias: added to the products of queries and keys.
            mask: where weights may be other than 0; broadcasts to (*batch, heads, queries, keys).
            broadcast_dropout, dropout_rng, dropout_rate, deterministic: dropout of the weights.
            dtype: of the computation; None promotes.
            precision: of contractions of floats.
            module: sows the quantized weights as `attention_weights`.
            promote_dtype: how operands are promoted.
            is_causal: whether a query sees only keys up to its own position.
            scale: what queries are multiplied by; None for 1 / sqrt(features).
            input_positions: for the functions that are applied first.

        Returns:
            (*batch, queries, heads, features); a QuantTensor with `return_quant_tensor`.
        """
        options = {name: argument for name, argument in locals().items() if name in SHARED_OPTIONS}
        operands = (as_array(query), as_array(key), as_array(value))
        query, key, value = pre_processed(self, *operands, input_positions)
        if scale is None and not any(base.is_on(slot.__get__(self)) for slot in IN_ATTENTION):
            out: Any = nnx.dot_product_attention(
                query, key, value, dtype=dtype, promote_dtype=promote_dtype, **options
            )
        else:
            query, key, value = promote_dtype((query, key, value), dtype=dtype)
            call = AttentionCall(**options, scale=scale, contraction=self.contraction)
            key, value = rows_of(self.k_transposed_quant, key), rows_of(self.v_quant, value)
            out = attention(self, query, key, value, call)
        out = base.through(self.sdpa_output_quant, out)
        return out if self.return_quant_tensor else as_array(out)


def pre_processed(
    layer: Any, query: jax.Array, key: jax.Array, value: jax.Array, positions: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values after the layer's own functions."""
    where = () if positions is None else (positions,)
    return layer.pre_process_q(query, *where), layer.pre_process_k(key, *where), layer.pre_process_v(value)
