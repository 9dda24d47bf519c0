"""Proxies of quantizers that have a scale for each group."""

from typing import Any, final

import jax

from jqinject.inject import Binding
from jqinject.proxy.act import ActQuantProxy, input_dependent
from jqinject.proxy.base import QuantFacts
from jqinject.proxy.weight import WeightQuantProxy
from jqinject.quant_tensor import GroupwiseQuantTensor, as_array, in_groups


@final
class GroupwiseWeightQuantProxyFromInjector(WeightQuantProxy):
    """Quantizes weights to integers with a scale (and zero point) for each group.

    Example:
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> from jqinject.quant import MXInt8Weight
        >>> fc = QuantLinear(40, 3, weight_quant=MXInt8Weight, rngs=nnx.Rngs(0))
        >>> fc.weight_quant.group_size, fc.weight_quant.scale_().shape, fc.weight_quant.scale().shape
        (32, (2, 1, 3), (40, 3))
    """

    @property
    def group_size(self) -> int | None:
        """Elements that share a scale."""
        return self.facts.group_size

    @property
    def group_dim(self) -> int | None:
        """The axis of the weight that is cut into groups."""
        return self.facts.group_dim

    def scale_(self) -> jax.Array | None:
        """The scale of each group, with 1 along the elements of a group; None where quantization is off."""
        return self._attribute("scale_")

    def zero_point_(self) -> jax.Array | None:
        """The zero point of each group; None where quantization is off."""
        return self._attribute("zero_point_")

    def _read_facts(self, layers: tuple[Any, ...], quantizer: Any) -> QuantFacts:
        return with_groups(super()._read_facts(layers, quantizer), self.binding, layers, quantizer)

    def _seen(self, packed: Any, x: Any) -> Any:
        return super()._seen(seen_in_groups(packed, self.facts, x), x)


@final
class GroupwiseActQuantProxyFromInjector(ActQuantProxy):
    """Quantizes what flows to integers, with a scale for each group, made from the tensor at hand.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.nn import QuantIdentity
        >>> from jqinject.quant import MXInt8Act
        >>> identity = QuantIdentity(act_quant=MXInt8Act, group_size=2, return_quant_tensor=True)
        >>> identity(jnp.array([0.5, 1.0, 100.0, 3.0])).scale
        Array([0.0078125, 0.0078125, 0.5      , 0.5      ], dtype=float32)
    """

    @property
    def group_size(self) -> int | None:
        """Elements that share a scale."""
        return self.facts.group_size

    @property
    def group_dim(self) -> int | None:
        """The axis that is cut into groups."""
        return self.facts.group_dim

    def _attribute(self, name: str, force_eval: bool) -> Any:
        return input_dependent(self, name)

    def _read_facts(self, layers: tuple[Any, ...], quantizer: Any) -> QuantFacts:
        return with_groups(super()._read_facts(layers, quantizer), self.binding, layers, quantizer)

    def _seen(self, packed: Any, x: Any) -> Any:
        return super()._seen(seen_in_groups(packed, self.facts, x), x)


def with_groups(facts: QuantFacts, binding: Binding, layers: tuple[Any, ...], quantizer: Any) -> QuantFacts:
    """The facts of a quantizer together with those of its groups."""
    if quantizer is None:
        return facts
    module = layers[0] if len(layers) == 1 else layers
    size, dim = (binding.resolve(name, module=module) for name in ("group_size", "group_dim"))
    return facts._replace(group_size=size, group_dim=dim)


def seen_in_groups(packed: Any, facts: QuantFacts, x: Any) -> GroupwiseQuantTensor:
    """What a quantizer made of a tensor in groups, in the shape of the tensor.

    Args:
        packed: a QuantTensor with the two axes of groups.
        facts: of the quantizer.
        x: the tensor.
    """
    assert facts.group_size is not None and facts.group_dim is not None, (
        "read when the quantizer is assembled"
    )
    length = as_array(x).shape[facts.group_dim]
    return in_groups(packed, facts.group_size, facts.group_dim, length)
