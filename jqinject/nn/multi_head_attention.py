"""Quantized multi-head attention."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Unpack, final

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jqinject.core.flax_internals import ParameterView, change_class
from jqinject.dot.tensors.choice import OF_KINDS
from jqinject.nn import base, kv_cache, linear
from jqinject.nn.base import keywords
from jqinject.nn.dot_product_attention import (
    IN_ATTENTION,
    K_TRANSPOSED,
    AttentionCall,
    QuantAttentionLayer,
    V,
    attention,
    rows_of,
)
from jqinject.quant_tensor import AnyQuantTensor, Operand

IN_PROJ_INPUT = base.act_slot("in_proj_input_")
IN_PROJ, OUT_PROJ = "in_proj_", "out_proj_"
PROJECTION_SLOTS = tuple(
    replace(slot, name=side + slot.name, prefix=side + slot.prefix, argument="")
    for side, slots in (
        (IN_PROJ, (base.INPUT, base.WEIGHT, base.BIAS, base.GRAD)),
        (OUT_PROJ, (base.INPUT, base.WEIGHT, base.BIAS, base.OUTPUT, base.GRAD)),
    )
    for slot in slots
)
# Shared by projections that are one matrix, if it is one number for the matrix.
SHARED = ("weight_quant", "bias_quant")
CACHED = {K_TRANSPOSED: "cached_key", V: "cached_value"}


@final
class QuantMultiHeadAttention(QuantAttentionLayer[base.Out], nnx.MultiHeadAttention):
    """`nnx.MultiHeadAttention` with quantizers of its projections and of all that attention contracts.

    Parameters, their paths and shapes are those of `nnx.MultiHeadAttention`, so that float checkpoints load. Quantizer
    arguments are injectors, proxies to share, or None, the default, for none; further keywords override what a
    quantizer declares, by its prefix: `in_proj_weight_bit_width=4`, `v_bit_width=4`. With every quantizer None the
    layer is `nnx.MultiHeadAttention` to the bit. In evaluation, integers of at most 8 bits are contracted as integers.

    Decoding (`decode=True`, after `init_cache`) keeps keys and values as `k_transposed_quant` and `v_quant` make them:
    in integers (or 8-bit floats, or codes of a table) with their scales, a quarter of their bytes in float32 for 8
    bits, an eighth for 4; `TurboQuant4Act` keeps them rotated, and attention rotates queries and output instead. A
    position is quantized once, when it is new, as the whole sequence would be: with quantizers that look at no other
    position (a constant scale, or `Int8DynamicActPerRowAbsMax`: one for each head and position) decoding is the full
    forward.

    Args:
        num_heads, in_features, qkv_features, out_features, num_kv_heads, in_kv_features: as for
            `nnx.MultiHeadAttention`.
        in_proj_input_quant, in_proj_weight_quant, in_proj_bias_quant: quantizers of the projections of queries, keys
            and values.
        softmax_input_quant: quantizer of the products of queries and keys, before the mask.
        attn_output_weights_quant: quantizer of the weights, after dropout; None beside an `attention_fn` of your own,
            as are the next three.
        q_scaled_quant: quantizer of the scaled queries.
        k_transposed_quant, v_quant: quantizers of keys and values, and so of their cache.
        out_proj_input_quant, out_proj_weight_quant, out_proj_bias_quant, out_proj_output_quant: quantizers of the
            output projection.
        in_proj_grad_quant, out_proj_grad_quant: quantizers of the gradients that flow into the projections.
        packed_in_proj: project queries, keys and values as by one matrix: one input quantizer (`in_proj_input_quant`
            of this layer), and one scale for the three weights where a quantizer has one for a tensor, which needs
            NNX's graph mode. If False, or with an `in_kv_features` of its own, each projection has its own quantizers.
        attention_fn: as for `nnx.MultiHeadAttention`. One of your own, such as a `QuantScaledDotProductAttention`, is
            used unchanged, without this layer's quantizers within attention.
        return_quant_tensor: return a QuantTensor, as `QuantLinearGeneral` does.
        contraction: "auto"; or "float", "int" or "fp8" to insist, of projections and of attention.
        rngs: for the parameters, and for quantizers that draw random numbers.
        dtype, param_dtype, broadcast_dropout, dropout_rate, deterministic, precision, kernel_init,
            out_kernel_init, bias_init, out_bias_init, use_bias, decode, normalize_qk, qkv_promote_dtype,
            out_promote_dtype, ln_promote_dtype, qkv_dot_general, out_dot_general, qkv_dot_general_cls,
            out_dot_general_cls, keep_rngs, kernel_metadata, out_kernel_metadata, bias_metadata,
            out_bias_metadata, query_ln_scale_metadata, key_ln_scale_metadata: as for `nnx.MultiHeadAttention`.
        more: overrides of quantizers: `in_proj_weight_...` and its like for each of the quantizers above.

    Raises:
        TypeError: an argument that is not a quantizer or is one of another kind, or an override that has no effect.
        ValueError: quantizers within attention beside an `attention_fn` of your own; `return_quant_tensor` without
            anything to take a scale from; packed projections in NNX's tree mode.
        DependencyError: a quantizer that cannot be assembled; the text shows the path.

    Source: Brevitas's `QuantMultiheadAttention`. Differs from Brevitas: no slot has a quantizer by default; projections
    are not packed by default, as Flax has three; packed ones take keys and values other than the queries too, quantized
    by the same quantizer; a mask hides products from the softmax, not from the range of `softmax_input_quant`.

    Example:
        >>> from jqinject.quant import Int8DynamicActPerRowAbsMax
        >>> mha = QuantMultiHeadAttention(
        ...     2, 8, decode=False, k_transposed_quant=Int8DynamicActPerRowAbsMax, v_quant=Int8DynamicActPerRowAbsMax,
        ...     rngs=nnx.Rngs(0))
        >>> mha(jnp.ones((1, 3, 8))).shape, mha.query.kernel.shape
        ((1, 3, 8), (8, 2, 4))
        >>> mha.init_cache((1, 16, 8))
        >>> mha.eval()
        >>> mha(jnp.ones((1, 1, 8)), decode=True).shape, mha.cached_key.dtype
        ((1, 1, 8), dtype('int8'))
    """

    in_proj_input_quant = IN_PROJ_INPUT
    packed_in_proj: bool = False
    cached_key_scale: nnx.Cache[jax.Array] | None = None
    cached_key_zero_point: nnx.Cache[jax.Array] | None = None
    cached_value_scale: nnx.Cache[jax.Array] | None = None
    cached_value_zero_point: nnx.Cache[jax.Array] | None = None

    @classmethod
    def override_slots(cls) -> tuple[base.Slot, ...]:
        """Those of the projections, and those within attention."""
        return (*PROJECTION_SLOTS, *IN_ATTENTION)

    _results: "base.Results[QuantMultiHeadAttention[jax.Array], QuantMultiHeadAttention[AnyQuantTensor]]"

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        rngs: nnx.Rngs,
        packed_in_proj: bool = False,
        **more: Unpack[keywords.QuantMultiHeadAttentionKeywords],
    ) -> None:
        self._init_layer(locals())

    def _init_quantizers(
        self, arguments: base.Arguments, overrides: base.Arguments, rngs: nnx.Rngs | None
    ) -> None:
        self.contraction = OF_KINDS(arguments["contraction"], type(self).__name__, "contraction")
        self.packed_in_proj = arguments["packed_in_proj"] and self.in_kv_features == self.in_features
        if self.packed_in_proj and not nnx.set_graph_mode.current_value():
            raise ValueError(
                "QuantMultiHeadAttention(packed_in_proj=True) shares quantizers between projections, and NNX's tree "
                "mode knows no shared objects.\n  cure: packed_in_proj=False, or graph mode"
            )
        within = {slot.name: arguments[slot.name] for slot in IN_ATTENTION}
        self._check_attention_fn(within)
        of_projections = {slot.name: arguments[slot.name] for slot in PROJECTION_SLOTS}
        own = {n: value for n, value in overrides.items() if not n.startswith((IN_PROJ, OUT_PROJ))}
        self._hold_projections(of_projections, overrides, arguments["return_quant_tensor"], rngs)
        base.hold_proxies(self, within, own, rngs, slots=IN_ATTENTION)

    def _facts(self) -> base.LayerFacts:
        return base.LayerFacts(tuple(self.query.kernel.shape[:-3]), {IN_PROJ_INPUT.name: (self.in_features,)})

    def _hold_projections(
        self,
        arguments: Mapping[str, object],
        overrides: Mapping[str, object],
        return_quant_tensor: bool,
        rngs: nnx.Rngs | None,
    ) -> None:
        """Make the projections quantized layers; their parameters stay what they are.

        Packed, queries, keys and values are projected as by one matrix: one quantizer of the input, which is this
        layer's, and one of the weights and of the biases where these have one scale for a tensor.
        """
        common = {"contraction": self.contraction}
        of_in, of_out = (common | _with_prefix(side, arguments) for side in (IN_PROJ, OUT_PROJ))
        of_out["return_quant_tensor"] = return_quant_tensor
        in_overrides, out_overrides = (_with_prefix(side, overrides) for side in (IN_PROJ, OUT_PROJ))
        if self.packed_in_proj:
            of_input = {
                IN_PROJ + n: in_overrides.pop(n) for n in list(in_overrides) if n.startswith("input_")
            }
            quantizer = {IN_PROJ_INPUT.name: of_in.pop("input_quant")}
            base.hold_proxies(self, quantizer, of_input, rngs, slots=(IN_PROJ_INPUT,))
        packed = "packed " if self.packed_in_proj else ""
        cure = " (packed_in_proj=False gives each its own quantizers)" if packed else ""
        of_them = f"in the {packed}projections of queries, keys and values, whose keywords start with {IN_PROJ}{cure}"
        with _noted(of_them):
            for layer in (self.query, self.key, self.value):
                _quantize(layer, of_in, in_overrides, rngs)
                if packed and layer is self.query:
                    shared = _of_one_matrix(layer)
                    of_in |= shared
                    prefixes = tuple(name.removesuffix("quant") for name in shared)
                    in_overrides = {n: v for n, v in in_overrides.items() if not n.startswith(prefixes)}
        with _noted(f"in the output projection, whose keywords start with {OUT_PROJ}"):
            _quantize(self.out, of_out, out_overrides, rngs)

    def _check_attention_fn(self, within: dict[str, object]) -> None:
        """Refuse quantizers within attention beside an attention function that has no place for them."""
        idle = [name for name, quantizer in within.items() if quantizer is not None]
        if idle and self.attention_fn is not nnx.dot_product_attention:
            raise ValueError(
                f"QuantMultiHeadAttention: {', '.join(idle)} cannot be put into an attention_fn of your own, which "
                "computes attention by itself.\n"
                "  cure: attention_fn=QuantScaledDotProductAttention(...), which takes them, or leave them out"
            )

    # --- forward

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        inputs_q: Any,
        inputs_k: Any = None,
        inputs_v: Any = None,
        *,
        decode: bool | None = None,
        is_causal: bool = False,
        **options: Any,
    ) -> base.Out:
        """Attention of `inputs_q` to `inputs_k` and `inputs_v`.

        Args:
            inputs_q: (*batch, length, in_features), array or QuantTensor.
            inputs_k: (*batch, keys, in_kv_features); None for `inputs_q`.
            inputs_v: likewise; None for `inputs_k`.
            decode: whether this is one more position of what the cache holds; None for what the layer was given.
            is_causal: whether a query sees only keys up to its own position; when decoding it does.
            options: the other keywords of `nnx.MultiHeadAttention`: `mask`, `deterministic`, `rngs`, `sow_weights` (the
                weights as they multiply the values, quantized), `out_sharding`, `qkv_sharding`, and those of the
                installed Flax.

        Returns:
            (*batch, length, out_features); a QuantTensor with `return_quant_tensor`.

        Raises:
            ValueError: inputs that do not fit; decoding without a cache, or more than one position.
        """
        inputs = self._quantized_inputs(inputs_q, inputs_k, inputs_v)
        if not any(base.is_on(slot.__get__(self)) for slot in IN_ATTENTION):
            y: Any = self._flax_forward(self, *inputs, decode=decode, is_causal=is_causal, **options)
            return y
        decodes = self.decode if decode is None else decode

        def attend(query: object, key: object, value: object, **call: object) -> jax.Array:
            return self._attend(query, key, value, bool(decodes), call)

        inner = None if decodes is None else False
        parameter_view = ParameterView(self, {"attention_fn": attend, "decode": inner})
        return self._flax_forward(parameter_view, *inputs, is_causal=is_causal, **options)

    def _quantized_inputs(self, q: object, k: object, v: object) -> tuple[object, object, object]:
        """The inputs as packed projections take them, each quantized once; which of them are None stays."""
        base.check_features(self, q, {-1: self.in_features})
        for x in (k, v):
            if x is not None:
                base.check_features(self, x, {-1: self.in_kv_features}, argument="in_kv_features")
        if self.in_proj_input_quant is None:
            return q, k, v
        quantized: dict[int, object] = {id(None): None}
        for x in (q, k, v):
            if id(x) not in quantized:
                quantized[id(x)] = self.in_proj_input_quant(x)
        return quantized[id(q)], quantized[id(k)], quantized[id(v)]

    def _attend(self, query: Any, key: Any, value: Any, decodes: bool, options: dict[str, Any]) -> jax.Array:
        if options.pop("input_positions", None) is not None:
            raise TypeError(
                "QuantMultiHeadAttention: input_positions are for an attention_fn of your own.\n"
                "  cure: attention_fn=QuantScaledDotProductAttention(pre_process_q=..., pre_process_k=...)"
            )
        dtype = options.pop("dtype")
        query, key, value = self.qkv_promote_dtype((query, key, value), dtype=dtype)
        key, value = rows_of(self.k_transposed_quant, key), rows_of(self.v_quant, value)
        if decodes:
            key, value, options["mask"] = self._through_cache(key, value, options["mask"])
            options["is_causal"] = False
        return attention(self, query, key, value, AttentionCall(**options, contraction=self.contraction))

    # --- cache

    def init_cache(self, input_shape: Sequence[int], dtype: DTypeLike = jnp.float32) -> None:
        """Make an empty cache, before the first position is decoded.

        Args:
            input_shape: (*batch, positions, in_features): of the whole sequence.
            dtype: of keys and values where they are floats.
        """
        if not any(base.is_on(slot.__get__(self)) for slot in CACHED):
            super().init_cache(input_shape, dtype)
            return
        *batch, length, _ = input_shape
        position = jnp.zeros((*batch, 1, self.num_kv_heads, self.head_dim), dtype)
        for slot, name in CACHED.items():
            proxy = slot.__get__(self)
            quantized = nnx.eval_shape(rows_of, None if proxy is None else nnx.clone(proxy), position)
            fields = kv_cache.empty(quantized, _has_zero_point(proxy), length)
            for field in kv_cache.FIELDS:
                variable = nnx.Cache(fields[field]) if field in fields else None
                setattr(self, kv_cache.attribute(name, field), nnx.data(variable))
        self.cache_index = nnx.Cache(jnp.array(0, jnp.int32))

    def _through_cache(self, key: Operand, value: Operand, mask: Any) -> tuple[Any, Any, Any]:
        """One more position into the cache, and what is in it now, with the mask of what is."""
        if self.cached_key is None or self.cached_value is None or self.cache_index is None:
            raise ValueError(
                "QuantMultiHeadAttention: decoding needs a cache.\n  cure: layer.init_cache(input_shape) first"
            )
        index = self.cache_index[...]
        tensors = []
        for (slot, name), new in zip(CACHED.items(), (key, value), strict=True):
            fields, form = kv_cache.encoded(new, _has_zero_point(slot.__get__(self)))
            stored: dict[str, Any] = {f: vars(self).get(kv_cache.attribute(name, f)) for f in kv_cache.FIELDS}
            at = new.ndim - kv_cache.OPERAND_AXES
            kv_cache.check(name, stored, fields, at)
            now = {f: kv_cache.put(stored[f], array, index, at) for f, array in fields.items()}
            tensors.append(kv_cache.decoded(now, form))
        self.cache_index[...] = index + 1
        *batch, length, _, _ = tensors[0].shape
        written = jnp.broadcast_to(jnp.arange(length) <= index, (*batch, 1, 1, length))
        return tensors[0], tensors[1], nnx.combine_masks(mask, written)


def _has_zero_point(proxy: Any) -> bool:
    return base.is_on(proxy) and proxy.has_zero_point


@contextmanager
def _noted(note: str) -> Generator[None]:
    """Say in an error where it was raised."""
    try:
        yield
    except Exception as error:
        error.add_note(note)
        raise


def _quantize(
    layer: Any, arguments: Mapping[str, Any], overrides: Mapping[str, object], rngs: nnx.Rngs | None
) -> None:
    change_class(layer, linear.QuantLinearGeneral)
    layer._init_quantizers(arguments, overrides, rngs)


def _with_prefix(prefix: str, arguments: Mapping[str, object]) -> dict[str, object]:
    return {name.removeprefix(prefix): value for name, value in arguments.items() if name.startswith(prefix)}


def _of_one_matrix(query: object) -> dict[str, object]:
    """The proxies of the first projection that serve the others too: those with one scale for the tensor.

    With a scale for each channel, the scales of one matrix are those of its parts.
    """
    shared = {}
    for name in SHARED:
        proxy = getattr(query, name)
        scale = None if proxy is None else proxy.scale()
        if scale is not None and scale.size == 1:
            shared[name] = proxy
    return shared
