"""The proxy of a quantizer, by Brevitas's names.

Solvers choose it from `scaling_per_output_type`; a quantizer without a solver, or with scales made from the tensor at
hand, says it.
"""

from jqinject.inject import ExtendedInjector
from jqinject.proxy import (
    DynamicActQuantProxyFromInjector,
    GroupwiseActFloatQuantProxyFromInjector,
    GroupwiseActQuantProxyFromInjector,
    GroupwiseWeightFloatQuantProxyFromInjector,
    GroupwiseWeightQuantProxyFromInjector,
)


class GroupwiseWeightProxyMixin(ExtendedInjector):
    """The proxy of weights in groups of integers."""

    proxy_class = GroupwiseWeightQuantProxyFromInjector


class GroupwiseActProxyMixin(ExtendedInjector):
    """The proxy of activations in groups of integers."""

    proxy_class = GroupwiseActQuantProxyFromInjector


class GroupwiseWeightFloatProxyMixin(ExtendedInjector):
    """The proxy of weights in groups of minifloats."""

    proxy_class = GroupwiseWeightFloatQuantProxyFromInjector


class GroupwiseActFloatProxyMixin(ExtendedInjector):
    """The proxy of activations in groups of minifloats."""

    proxy_class = GroupwiseActFloatQuantProxyFromInjector


class DynamicActProxyMixin(ExtendedInjector):
    """The proxy of activations whose scale is that of the tensor at hand."""

    proxy_class = DynamicActQuantProxyFromInjector
