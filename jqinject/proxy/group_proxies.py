"""Proxies of quantizers that have a scale for each group."""

from typing import Any, ClassVar, final

import jax
import numpy as np

from jqinject.ops.groups import fitting_size
from jqinject.proxy.act import ActQuantProxy, input_dependent
from jqinject.proxy.base import QuantProxyFromInjector
from jqinject.proxy.metadata import QuantMetadata
from jqinject.proxy.weight import WeightQuantProxy
from jqinject.quant_tensor import as_array, in_groups


class Groupwise(QuantProxyFromInjector):
    """Abstract: what a proxy says and does beside its kind where every group has a scale."""

    reads: ClassVar[frozenset[str]] = QuantProxyFromInjector.reads | {"group_size", "group_dim"}

    @property
    def group_size(self) -> int | None:
        """Elements that share a scale, as declared; along a shorter axis all of them do."""
        return self.quant_metadata.group_size

    @property
    def group_dim(self) -> int | None:
        """The axis that is cut into groups."""
        return self.quant_metadata.group_dim

    def _read_metadata(self, layers: tuple[Any, ...], quantizer: Any) -> QuantMetadata:
        metadata = super()._read_metadata(layers, quantizer)
        if quantizer is None:
            return metadata
        module = layers[0] if len(layers) == 1 else layers
        size, dim = (self.binding.resolve(name, module=module) for name in ("group_size", "group_dim"))
        return metadata._replace(group_size=size, group_dim=dim)

    def _seen(self, packed: Any, x: Any) -> Any:
        size, dim = self.quant_metadata.group_size, self.quant_metadata.group_dim
        assert size is not None and dim is not None, "read when the quantizer is assembled"
        length = np.shape(as_array(x))[dim]
        return super()._seen(in_groups(packed, fitting_size(size, length), dim, length), x)


class GroupwiseWeight(Groupwise, WeightQuantProxy):
    """Abstract: the same of weights, whose scales can be asked for."""

    def scale_(self) -> jax.Array | None:
        """The scale of each group, with 1 along the elements of a group; None where quantization is off."""
        return self._attribute("scale_")

    def zero_point_(self) -> jax.Array | None:
        """The zero point of each group; None where quantization is off."""
        return self._attribute("zero_point_")


@final
class GroupwiseWeightQuantProxyFromInjector(GroupwiseWeight):
    """Quantizes weights to integers with a scale (and zero point) for each group.

    Example:
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> from jqinject.quant import MXInt8Weight
        >>> fc = QuantLinear(40, 3, weight_quant=MXInt8Weight, rngs=nnx.Rngs(0))
        >>> fc.weight_quant.group_size, fc.weight_quant.scale_().shape, fc.weight_quant.scale().shape
        (32, (2, 1, 3), (40, 3))
    """


@final
class GroupwiseActQuantProxyFromInjector(Groupwise, ActQuantProxy):
    """Quantizes what flows to integers, with a scale for each group, made from the tensor at hand.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.nn import QuantIdentity
        >>> from jqinject.quant import MXInt8Act
        >>> identity = QuantIdentity(act_quant=MXInt8Act, group_size=2, return_quant_tensor=True)
        >>> identity(jnp.array([0.5, 1.0, 100.0, 3.0])).scale
        Array([0.0078125, 0.0078125, 0.5      , 0.5      ], dtype=float32)
    """

    sample_shape = (1,)  # groups need an axis

    def _attribute(self, name: str, force_eval: bool) -> Any:
        return input_dependent(self, name)
