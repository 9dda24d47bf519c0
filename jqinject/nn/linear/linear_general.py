"""The quantized dense layer over any axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack, final, overload

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype as default_promote_dtype
from flax.nnx.nn.linear import default_bias_init, default_kernel_init
from flax.typing import DotGeneralT, Dtype, Initializer, PrecisionLike, PromoteDtypeFn

from jqinject.dot.geometry.dimensions import Dimensions
from jqinject.nn.base.dot_layer import DEFAULT_WEIGHT, Placed, QuantDotLayer, SchemeLike, by_scheme
from jqinject.nn.base.override_keywords import QuantLinearGeneralOverrides
from jqinject.nn.base.quant_layer import Out
from jqinject.nn.base.slots import flax_arguments
from jqinject.nn.base.weight_layer import ContractionKind
from jqinject.quant import QuantizerLike
from jqinject.quant_tensor import AnyQuantTensor


@final
class QuantLinearGeneral(QuantDotLayer[Out], nnx.LinearGeneral):
    """`nnx.LinearGeneral` with quantizers: y = sum over `axis` of x_q W_q, plus b_q.

    A quantizer argument is an injector, a proxy to share (`other.weight_quant`), or None. Further keywords
    override what a quantizer declares: `weight_bit_width=4` declares `bit_width = 4` anew for the weight quantizer.
    With every quantizer None the layer is `nnx.LinearGeneral` to the bit. Frozen, it contracts integers where its
    input is quantized to at most 8 bits.

    Args:
        in_features: sizes of the axes of the input that are summed over.
        out_features: sizes of the output's last axes.
        weight_quant: quantizer of the kernel, shape (*batch, *in_features, *out_features). Channels are counted along
            all its axes but those of the input features: with a scale for each channel, the scale has the kernel's
            shape with 1 along `in_features`. By default `Int8WeightPerTensorFloat`, as in Brevitas; None keeps the
            kernel float.
        bias_quant: quantizer of the bias, shape (*batch, *out_features).
        input_quant: quantizer of the input; `act_quant` is another name of it.
        output_quant: quantizer of the output.
        return_quant_tensor: return an `IntQuantTensor`, with the scale of the accumulator or of `output_quant`; an
            array where sums have no scale of their own (scales along a summed axis, groups, minifloats).
        grad_quant: quantizer of the gradient that flows into the output, on its way back.
        scheme: as for `QuantLinear`: a `jqinject.dot.Scheme`, which quantizes what is contracted, forward and backward.
        contraction: as for `QuantLinear`.
        rngs: for the parameters, and for quantizers that draw random numbers.
        axis, batch_axis, use_bias, dtype, param_dtype, kernel_init, bias_init, precision, promote_dtype,
            dot_general, dot_general_cls, preferred_element_type, kernel_metadata, bias_metadata: as for
            `nnx.LinearGeneral`.
        overrides: `weight_...`, `bias_...`, `input_...`, `output_...`, `grad_...`.

    Raises:
        TypeError: an argument that is not a quantizer or is one of another kind, or an override that has no effect.
        ValueError: `return_quant_tensor` without anything to take a scale from; a quantizer that does not say `signed`.
        DependencyError: a quantizer that cannot be assembled; the text shows the path.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.quant import Int8WeightPerChannelFloat
        >>> heads = QuantLinearGeneral(8, (2, 4), weight_quant=Int8WeightPerChannelFloat, rngs=nnx.Rngs(0))
        >>> heads(jnp.ones((3, 8))).shape, heads.quant_weight().scale.shape
        ((3, 2, 4), (1, 2, 4))
    """

    _flax_forward = staticmethod(nnx.LinearGeneral.__call__)

    if TYPE_CHECKING:

        @overload
        def __new__(
            cls, *args: Any, return_quant_tensor: Literal[False] = False, **more: Any
        ) -> QuantLinearGeneral[jax.Array]: ...
        @overload
        def __new__(
            cls, *args: Any, return_quant_tensor: Literal[True], **more: Any
        ) -> QuantLinearGeneral[AnyQuantTensor]: ...
        @overload
        def __new__(cls, *args: Any, return_quant_tensor: bool, **more: Any) -> QuantLinearGeneral[Any]: ...
        def __new__(cls, *args: Any, **more: Any) -> Any: ...

    def __init__(
        self,
        in_features: int | Sequence[int],
        out_features: int | Sequence[int],
        *,
        axis: int | Sequence[int] = -1,
        batch_axis: Mapping[int, int] = {},
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        precision: PrecisionLike = None,
        promote_dtype: PromoteDtypeFn = default_promote_dtype,
        dot_general: DotGeneralT | None = None,
        dot_general_cls: Any = None,
        preferred_element_type: Dtype | None = None,
        kernel_metadata: Mapping[str, Any] = {},
        bias_metadata: Mapping[str, Any] = {},
        rngs: nnx.Rngs,
        weight_quant: QuantizerLike = DEFAULT_WEIGHT,
        bias_quant: QuantizerLike = None,
        input_quant: QuantizerLike = None,
        output_quant: QuantizerLike = None,
        return_quant_tensor: bool = False,
        act_quant: QuantizerLike = None,
        grad_quant: QuantizerLike = None,
        contraction: ContractionKind = "auto",
        scheme: SchemeLike = None,
        **overrides: Unpack[QuantLinearGeneralOverrides],
    ) -> None:
        nnx.LinearGeneral.__init__(self, **flax_arguments(nnx.LinearGeneral, locals()))
        arguments = by_scheme(self, scheme, locals(), rngs)
        self._init_quantizers(arguments, overrides, return_quant_tensor, rngs)

    @property
    def weight_ndim(self) -> int:
        """A kernel has the batch axes, and one each for input and output features."""
        return len(self.batch_axis) + len(self.in_features) + len(self.out_features)

    @property
    def output_channel_dim(self) -> int | tuple[int, ...]:
        """The axes of the kernel that are not summed over."""
        channels = tuple(axis for axis in range(self.weight_ndim) if axis not in self.summed_axes)
        return channels[0] if len(channels) == 1 else channels

    @property
    def summed_axes(self) -> tuple[int, ...]:
        """The input features."""
        return tuple(range(len(self.batch_axis), len(self.batch_axis) + len(self.in_features)))

    @property
    def input_axes(self) -> tuple[int, ...]:
        """Those of `axis`, in the order in which they lie."""
        return tuple(sorted(self.axis))

    def channel_shapes(self) -> dict[str, tuple[int, ...]]:
        """Output features are the last axes; input features too, unless `axis` says otherwise."""
        found = {} if self.batch_axis else {"output_quant": tuple(self.out_features)}
        last = tuple(range(-len(self.in_features), 0))
        return found | ({"input_quant": tuple(self.in_features)} if tuple(sorted(self.axis)) == last else {})

    def _placed(self, shape: tuple[int, ...]) -> Placed:
        ndim = len(shape)
        # Flax goes by the order of the axes, not by that in which they are given.
        axes = tuple(sorted(axis % ndim for axis in self.axis))
        batch = tuple(sorted(axis % ndim for axis in self.batch_axis))
        numbers = (axes, self.summed_axes), (batch, tuple(range(len(batch))))
        return Placed(Dimensions.of(ndim, self.weight_ndim, numbers))

    def _expected_features(self, ndim: int) -> Mapping[int, int]:
        if any(not -ndim <= axis < ndim for axis in self.axis):
            return dict(zip(self.axis, self.in_features, strict=True))  # an axis is missing: reported
        axes = sorted(
            self.axis, key=lambda axis: axis % ndim
        )  # as Flax does, whatever order they are given in
        return dict(zip(axes, self.in_features, strict=True))

    def _contracts_as_flax(self) -> bool:
        return self.dot_general is None and self.dot_general_cls is None
