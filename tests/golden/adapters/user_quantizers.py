"""Quantizers that a user would declare, for the scenarios of proxies."""

import jax.numpy as jnp

from jqinject import ExtendedInjector, this, value
from jqinject.core import (
    AbsAve,
    BinaryQuant,
    ClampedBinaryQuant,
    OverTensorView,
    ParameterScaling,
    StatsFromParameterScaling,
)
from jqinject.proxy import WeightQuantProxyFromInjector


class BinaryFromMax(ExtendedInjector):
    """-s or s; s is learned and starts at the largest weight."""

    proxy_class = WeightQuantProxyFromInjector
    tensor_quant = BinaryQuant
    scaling_impl = ParameterScaling
    scaling_shape = (1,)
    signed = True

    @value
    def scaling_init(module):
        return float(jnp.max(jnp.abs(module.weight[...])))


class BinaryFromMean(ExtendedInjector):
    """-s or s; s is the mean magnitude of all the weights that share it."""

    proxy_class = WeightQuantProxyFromInjector
    tensor_quant = BinaryQuant
    scaling_impl = StatsFromParameterScaling
    scaling_stats_impl = AbsAve
    scaling_stats_input_view_shape_impl = OverTensorView
    scaling_stats_input_concat_dim = 0
    scaling_shape = ()
    signed = True


class Advanced(ExtendedInjector):
    """An interface of a user's own: two switches decide which components are used, and in which shape."""

    proxy_class = WeightQuantProxyFromInjector
    scaling_impl = ParameterScaling
    signed = True

    @value
    def tensor_quant(is_clamped):
        return ClampedBinaryQuant if is_clamped else BinaryQuant

    @value
    def scaling_init(module, scaling_per_output_channel):
        magnitude = jnp.abs(module.weight[...])
        axes = tuple(range(module.weight_ndim - 1)) if scaling_per_output_channel else None
        return jnp.max(magnitude, axis=axes, keepdims=scaling_per_output_channel)

    @value
    def scaling_shape(scaling_per_output_channel):
        return this.per_channel_shape if scaling_per_output_channel else ()

    @value
    def per_channel_shape(module):
        shape = [1] * module.weight_ndim
        shape[module.output_channel_dim] = module.out_channels
        return tuple(shape)
