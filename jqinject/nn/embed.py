"""The quantized embedding."""

from __future__ import annotations

from functools import cache
from typing import Any, Unpack, final

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.nn.base.keywords import QuantEmbedKeywords
from jqinject.nn.base.layer_geometry import LayerGeometry, check_features
from jqinject.nn.base.quant_layer import Out, Results
from jqinject.nn.base.weight_layer import ParameterView, QuantWeightLayer
from jqinject.quant import Int8WeightPerTensorFloat, QuantizerLike
from jqinject.quant_tensor import (
    AnyQuantTensor,
    GroupwiseQuantTensor,
    as_array,
    in_groups,
    is_grouped,
    on_integers,
    on_minifloats,
    on_table,
)


@final
class QuantEmbed(QuantWeightLayer[Out], nnx.Embed):
    """`nnx.Embed` with a quantized table: y = E_q[inputs].

    A quantizer argument is an injector, a proxy to share (`other.weight_quant`), or None. Further keywords
    override what a quantizer declares: `weight_bit_width=4` declares `bit_width = 4` anew for the weight quantizer.
    With every quantizer None the layer is `nnx.Embed` to the bit.

    Source: Brevitas's `QuantEmbedding`; differs from Brevitas: the arguments of the float layer are Flax's, there is an
    output quantizer, and an override without effect is an error.

    Args:
        num_embeddings: rows of the table.
        features: columns of the table.
        weight_quant: quantizer of the table; channels are its rows. By default `Int8WeightPerTensorFloat`, as in
            Brevitas; None keeps the table float.
        output_quant: quantizer of the rows that were looked up.
        return_quant_tensor: return a QuantTensor, with the scale of the table or of `output_quant`.
        grad_quant: quantizer of the gradient that flows into the output, on its way back.
        rngs: for the parameters, and for quantizers that draw random numbers.
        dtype, param_dtype, embedding_init, promote_dtype, embedding_metadata: as for `nnx.Embed`.
        more: overrides of quantizers: `weight_...`, `output_...`, `grad_...`.

    Raises:
        TypeError: an argument that is not a quantizer or is one of another kind, or an override that has no effect.
        ValueError: `return_quant_tensor` without anything to take a scale from; a quantizer that does not say `signed`.
        DependencyError: a quantizer that cannot be assembled; the text shows the path.

    Example:
        >>> from jqinject.quant import Int8WeightPerChannelFloat
        >>> embed = QuantEmbed(
        ...     10, 4, weight_quant=Int8WeightPerChannelFloat, return_quant_tensor=True, rngs=nnx.Rngs(0))
        >>> rows = embed(jnp.array([[3, 3, 9]]))
        >>> rows.shape, rows.scale.shape, rows.int().dtype
        ((1, 3, 4), (1, 3, 1), dtype('int8'))
    """

    bias_quant = None
    input_quant = None
    bias = None
    weight_name = "embedding"
    takes_batch_norm = False
    _flax_attend = staticmethod(nnx.Embed.attend)
    contraction_needs = {
        "int": "a contraction of integers, which a lookup is not",
        "fp8": "a contraction of 8-bit floats, which a lookup is not",
    }

    _results: Results[QuantEmbed[jax.Array], QuantEmbed[AnyQuantTensor]]

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        rngs: nnx.Rngs,
        weight_quant: QuantizerLike = Int8WeightPerTensorFloat,
        output_quant: QuantizerLike = None,
        return_quant_tensor: bool = False,
        grad_quant: QuantizerLike = None,
        **more: Unpack[QuantEmbedKeywords],
    ) -> None:
        self._init_layer(locals())

    @property
    def geometry(self) -> LayerGeometry:
        """A table has a channel for each row."""
        return _of_table(self.features)

    def attend(self, query: Any, out_sharding: Any = None) -> jax.Array:
        """The products of a query with every row of the quantized table; `output_quant` is not for these.

        Args:
            query: float array or QuantTensor, (..., features).
            out_sharding: as for the parent.

        Returns:
            An array, (..., num_embeddings).

        Raises:
            ValueError: the query has other features than the table.
        """
        check_features(self, query, {-1: self.features}, argument="features", what="a query")
        table: Any = ParameterView(self, {"embedding": as_array(self._quantized_weight(None))})
        return self._flax_attend(table, as_array(query), out_sharding=out_sharding)

    def _check_features(self, inputs: Any) -> None:
        dtype = jnp.result_type(inputs)
        if not jnp.issubdtype(dtype, jnp.integer):
            raise ValueError(
                f"QuantEmbed takes indices of rows, integers from 0 to {self.num_embeddings - 1}, got an array of "
                f"{dtype.name}.\n  cure: x.astype(jnp.int32) where they are whole numbers; layer.attend(x) for the "
                "products of a query with every row"
            )

    def _with_metadata(self, y: jax.Array, x: Any, weight: Any, bias: Any) -> Any:
        if is_grouped(weight):
            return _rows_in_groups(y, weight, x)
        if not (on_integers(weight) or on_minifloats(weight) or on_table(weight)):
            raise ValueError(
                "QuantEmbed(return_quant_tensor=True): the table is not quantized, so the output has no scale.\n"
                "  cure: give the layer weight_quant=..."
            )

        def looked_up(metadata: jax.Array) -> jax.Array:
            by_row = metadata.ndim == 2 and metadata.shape[0] > 1
            return jnp.take(metadata, x, axis=0) if by_row else metadata

        moved = {"value": y, "scale": looked_up(weight.scale)}
        if on_integers(weight):
            moved["zero_point"] = looked_up(weight.zero_point)
        return weight.set(**moved)


@cache
def _of_table(features: int) -> LayerGeometry:
    return LayerGeometry(2, channels=(0,), output_channels=(features,))


def _rows_in_groups(y: jax.Array, table: GroupwiseQuantTensor, x: jax.Array) -> GroupwiseQuantTensor:
    """The rows of a table with a scale for each group of columns."""
    grouped = table.grouped
    fields = {"value": table.groups.split(y), "scale": jnp.take(grouped.scale, x, axis=0)}
    if grouped.zero_point.ndim:
        fields["zero_point"] = jnp.take(grouped.zero_point, x, axis=0)
    return in_groups(grouped.set(**fields), table.group_size, -1, table.shape[-1])
