"""Quantized layers that do not contract their weight: a table of rows, and a factor for each channel."""

from functools import cache
from typing import Any, Self, Unpack, final

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype

from jqinject.core.flax_internals import ParameterView, promote_dtype
from jqinject.dot import without_zero_points
from jqinject.nn import base
from jqinject.nn.base.keywords import QuantEmbedKeywords, QuantScaleBiasKeywords
from jqinject.quant_tensor import (
    AnyQuantTensor,
    GroupwiseQuantTensor,
    QuantTensor,
    as_array,
    in_groups,
    is_grouped,
    on_integers,
    on_minifloats,
    on_table,
    reshape,
    shaping,
)


@final
class QuantEmbed(base.QuantWeightLayer[base.Out], nnx.Embed):
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
    weight_name = "embedding"
    options = (base.RETURN,)
    takes_batch_norm = False
    _flax_attend = staticmethod(nnx.Embed.attend)
    contraction_needs = {
        "int": "a contraction of integers, which a lookup is not",
        "fp8": "a contraction of 8-bit floats, which a lookup is not",
    }

    _results: "base.Results[QuantEmbed[jax.Array], QuantEmbed[AnyQuantTensor]]"

    def __init__(
        self, num_embeddings: int, features: int, *, rngs: nnx.Rngs, **more: Unpack[QuantEmbedKeywords]
    ) -> None:
        self._init_layer(locals())

    @property
    def geometry(self) -> base.LayerGeometry:
        """A table has a channel for each row."""
        return _of_table(self.features)

    def attend(self, query: object, out_sharding: object = None) -> jax.Array:
        """The products of a query with every row of the quantized table; `output_quant` is not for these.

        Args:
            query: float array or QuantTensor, (..., features).
            out_sharding: as for the parent.

        Returns:
            An array, (..., num_embeddings).

        Raises:
            ValueError: the query has other features than the table.
        """
        base.check_features(self, query, {-1: self.features}, argument="features", what="a query")
        table: Any = ParameterView(self, {"embedding": as_array(self._quantized_weight(None))})
        return self._flax_attend(table, as_array(query), out_sharding=out_sharding)

    def _check_features(self, inputs: object) -> None:
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
            return jnp.take(metadata, x, axis=0) if metadata.shape[0] > 1 else metadata

        return shaping.map_metadata(weight, y, looked_up)


@cache
def _of_table(features: int) -> base.LayerGeometry:
    return base.LayerGeometry(2, channels=(0,), output_channels=(features,))


def _rows_in_groups(y: jax.Array, table: GroupwiseQuantTensor, x: jax.Array) -> GroupwiseQuantTensor:
    """The rows of a table with a scale for each group of columns."""
    grouped = table.grouped
    fields = {"value": table.groups.split(y), "scale": jnp.take(grouped.scale, x, axis=0)}
    if grouped.zero_point.ndim:
        fields["zero_point"] = jnp.take(grouped.zero_point, x, axis=0)
    return in_groups(grouped.set(**fields), table.group_size, -1, table.shape[-1])


@final
class QuantScaleBias(base.QuantWeightLayer[base.Out]):
    """y = x_q * s_q + b_q, with one s and one b for each channel.

    A quantizer argument is an injector, a proxy to share (`other.weight_quant`), or None. Further keywords
    override what a quantizer declares: `weight_bit_width=4` declares `bit_width = 4` anew for the weight quantizer.
    Parameters are called `scale` and `bias`, as those of `nnx.BatchNorm`.

    Source: Brevitas's `QuantScaleBias`, and by `from_batch_norm` its `BatchNorm1dToQuantScaleBias` and
    `BatchNorm2dToQuantScaleBias`. Differs from Brevitas: `axis` says where channels are, not a shape to view as.

    Args:
        num_features: how many channels.
        use_bias: whether there is a summand.
        axis: the axis of the input that holds the channels.
        dtype: of the computation; None for the common one of input and parameters.
        param_dtype: of the parameters.
        weight_quant: quantizer of `scale`; by default `Int8WeightPerTensorFloat`, as in Brevitas; None keeps it float.
        bias_quant: quantizer of `bias`.
        input_quant: quantizer of the input; `act_quant` is another name of it.
        output_quant: quantizer of the output.
        return_quant_tensor: return an `IntQuantTensor`, with the product of the scales or the scale of `output_quant`.
        grad_quant: quantizer of the gradient that flows into the output, on its way back.
        rngs: for quantizers that draw random numbers.
        more: overrides of quantizers: `weight_...`, `bias_...`, `input_...`, `output_...`, `grad_...`.

    Raises:
        TypeError: an argument that is not a quantizer or is one of another kind, or an override that has no effect.
        ValueError: `return_quant_tensor` without anything to take a scale from; a quantizer that does not say `signed`.
        DependencyError: a quantizer that cannot be assembled; the text shows the path.

    Example:
        >>> layer = QuantScaleBias(3, weight_quant=None)
        >>> layer.scale = nnx.Param(jnp.array([1.0, 2.0, 3.0]))
        >>> layer(jnp.ones((1, 3)))
        Array([[1., 2., 3.]], dtype=float32)
    """

    options = (base.RETURN, base.ACT_INPUT)
    weight_name = "scale"
    contraction_needs = {
        "int": "a contraction of integers, which a product of elements is not",
        "fp8": "a contraction of 8-bit floats, which a product of elements is not",
    }

    _results: "base.Results[QuantScaleBias[jax.Array], QuantScaleBias[AnyQuantTensor]]"

    def __init__(
        self,
        num_features: int,
        use_bias: bool = True,
        *,
        axis: int = -1,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs | None = None,
        **more: Unpack[QuantScaleBiasKeywords],
    ) -> None:
        self.num_features = num_features
        self.axis = axis
        self.dtype = dtype
        self.scale = nnx.Param(jnp.ones((num_features,), param_dtype))
        self.bias = nnx.data(nnx.Param(jnp.zeros((num_features,), param_dtype)) if use_bias else None)
        rngs = nnx.Rngs() if rngs is None else rngs
        self._init_layer(locals())

    @classmethod
    def from_batch_norm(cls, norm: nnx.BatchNorm, **quantizers: Any) -> Self:
        """The layer that does what a trained batch normalization does in evaluation mode, up to quantization.

        Args:
            norm: `nnx.BatchNorm` or `QuantBatchNorm`; it is not changed.
            quantizers: quantizers and overrides, as for the class.

        Returns:
            A new layer.

        Raises:
            TypeError: `norm` is not a batch normalization.
            ValueError: it has channels along several axes.

        Example:
            >>> norm = nnx.BatchNorm(2, use_running_average=True, rngs=nnx.Rngs(0))
            >>> norm.mean[...] = jnp.array([1.0, 2.0])
            >>> layer = QuantScaleBias.from_batch_norm(norm, weight_quant=None)
            >>> jnp.allclose(layer(jnp.ones((3, 2))), norm(jnp.ones((3, 2))))
            Array(True, dtype=bool)
        """
        factor, summand = base.factors_of(norm)
        axis = norm.axis
        if not isinstance(axis, int):
            raise ValueError(f"QuantScaleBias has channels along one axis, got a batch norm with axis={axis}")
        layer = cls(
            norm.num_features, axis=axis, dtype=norm.dtype, param_dtype=norm.param_dtype, **quantizers
        )
        layer.scale = nnx.Param(factor.astype(norm.param_dtype))
        layer.bias = nnx.Param(summand.astype(norm.param_dtype))
        return layer

    @property
    def geometry(self) -> base.LayerGeometry:
        """A weight has channels alone; those of the input are known where `axis` counts from the end."""
        return _of_channels(self.num_features, self.axis)

    def _check_features(self, inputs: object) -> None:
        base.check_features(self, inputs, {self.axis: self.num_features}, argument="num_features")

    def _expanded_shape(self, ndim: int) -> tuple[int, ...]:
        shape = [1] * ndim
        shape[self.axis] = self.num_features
        return tuple(shape)

    def _parent_forward(self, parameter_view: Any, inputs: jax.Array, out_sharding: Any) -> jax.Array:
        x, scale, bias = promote_dtype((inputs, parameter_view.scale, parameter_view.bias), dtype=self.dtype)
        y = x * scale.reshape(self._expanded_shape(x.ndim))
        y = y if bias is None else y + bias.reshape(self._expanded_shape(x.ndim))
        return y if out_sharding is None else jax.lax.with_sharding_constraint(y, out_sharding)

    def _accumulator(self, y: jax.Array, x: QuantTensor, weight: QuantTensor, bias: object) -> Any:
        if not (on_integers(x) and on_integers(weight)):
            return y
        shape = self._expanded_shape(x.ndim)
        left, right = without_zero_points(x, reshape(weight, shape), self._zero_points())
        product: Any = left * right
        if on_integers(bias) and self._bias_on_grid(bias):
            product = product + reshape(bias, shape)
        elif bias is not None:
            product = product + as_array(bias).astype(product.dtype).reshape(shape)
        return product.set(value=y)


@cache
def _of_channels(count: int, axis: int) -> base.LayerGeometry:
    shape = (count, *(1,) * (-axis - 1)) if axis < 0 else None
    return base.LayerGeometry(1, input_channels=shape, output_channels=shape)
