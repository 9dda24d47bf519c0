"""Solvers: for each role of a quantizer, a table that says which function computes what.

A row `name = function` means: unless `name` is declared, `function` computes it from the names of its arguments. The
functions are in `solve_numbers`, `solve_scales` and `solve_shapes`.
"""

from jqinject.core.clamp import Identity
from jqinject.inject import ExtendedInjector
from jqinject.proxy import (
    ActQuantProxyFromInjector,
    BiasQuantProxyFromInjector,
    GradQuantProxyFromInjector,
    TruncQuantProxyFromInjector,
    WeightQuantProxyFromInjector,
)
from jqinject.quant.enums import LearnedRoundImplType
from jqinject.quant.solver import solve_numbers, solve_scales, solve_shapes


class WeightQuantSolver(ExtendedInjector, defaults=True):
    """Turns the choices by enum and the shape of the layer into the components of a weight quantizer."""

    proxy_class = WeightQuantProxyFromInjector
    tensor_quant = solve_numbers.weight_tensor_quant
    int_quant = solve_numbers.int_quant
    bit_width_impl = solve_numbers.bit_width_impl
    tensor_clamp_impl = solve_numbers.parameter_tensor_clamp_impl
    float_to_int_impl = solve_numbers.float_to_int_impl
    learned_round_impl_type = LearnedRoundImplType.HARD_SIGMOID
    learned_round_impl = solve_numbers.learned_round_impl
    learned_round_init = solve_numbers.learned_round_init
    scaling_impl = solve_scales.parameter_scaling_impl
    scaling_init_impl = solve_scales.parameter_scaling_init_impl
    scaling_init = solve_scales.scaling_init
    affine_rescaling = solve_scales.affine_rescaling
    restrict_scaling_impl = solve_scales.restrict_scaling_impl
    restrict_scale_positive = solve_scales.restrict_scale_positive
    bipolar_search = solve_scales.bipolar_search
    int_scaling_impl = solve_scales.int_scaling_impl
    scaling_stats_impl = solve_scales.scaling_stats_impl
    exponent_impl = solve_scales.exponent_impl
    scaling_per_output = solve_scales.scaling_per_output
    scaling_shape = solve_scales.parameter_scaling_shape
    scaling_stats_input_view_shape_impl = solve_shapes.scaling_stats_input_view_shape_impl
    scaling_stats_input_concat_dim = solve_shapes.weight_concat_dim
    stats_reduce_dim = solve_shapes.stats_reduce_dim
    keepdim = solve_shapes.keepdim
    permute_dims = solve_shapes.weight_permute_dims
    weight_ndims = solve_shapes.weight_ndims
    output_channel_dim = solve_shapes.output_channel_dim
    out_channels = solve_shapes.out_channels
    channel_axes = solve_shapes.weight_channel_axes
    channel_shape = solve_shapes.weight_channel_shape
    scaling_per_output_channel_shape = solve_shapes.weight_per_output_channel_shape
    input_view_impl = solve_shapes.weight_input_view_impl
    group_dim = solve_shapes.weight_group_dim
    block_width = solve_shapes.block_width
    block_dim = solve_shapes.weight_block_dim
    group_elements_axis = solve_shapes.group_elements_axis
    upstream_shape = solve_shapes.upstream_shape
    quantized_shape = solve_shapes.quantized_shape
    expanded_groupwise_shape = solve_shapes.expanded_groupwise_shape
    reshaped_groupwise_shape = solve_shapes.reshaped_groupwise_shape
    scaling_per_group_shape = solve_shapes.scaling_per_group_shape


class ActQuantSolver(ExtendedInjector, defaults=True):
    """Turns the choices by enum into the components of an activation quantizer."""

    proxy_class = ActQuantProxyFromInjector
    tensor_quant = solve_numbers.act_tensor_quant
    int_quant = solve_numbers.int_quant
    bit_width_impl = solve_numbers.bit_width_impl
    float_to_int_impl = solve_numbers.float_to_int_impl
    learned_round_impl_type = LearnedRoundImplType.HARD_SIGMOID
    learned_round_impl = solve_numbers.learned_round_impl
    learned_round_init = solve_numbers.learned_round_init
    scaling_impl = solve_scales.act_scaling_impl
    scaling_init_impl = solve_scales.act_scaling_init_impl
    scaling_init = solve_scales.scaling_init
    min_val = solve_scales.min_val
    affine_rescaling = solve_scales.affine_rescaling
    restrict_scaling_impl = solve_scales.restrict_scaling_impl
    restrict_scale_positive = solve_scales.restrict_scale_positive
    bipolar_search = solve_scales.bipolar_search
    int_scaling_impl = solve_scales.int_scaling_impl
    scaling_stats_impl = solve_scales.scaling_stats_impl
    exponent_impl = solve_scales.exponent_impl
    scaling_per_output = solve_scales.scaling_per_output
    scaling_shape = solve_scales.act_scaling_shape
    scaling_stats_input_view_shape_impl = solve_shapes.scaling_stats_input_view_shape_impl
    stats_reduce_dim = solve_shapes.stats_reduce_dim
    keepdim = solve_shapes.keepdim
    permute_dims = solve_shapes.declared_permute_dims
    per_channel_broadcastable_shape = solve_shapes.per_channel_broadcastable_shape
    channel_shape = solve_shapes.act_channel_shape
    scaling_per_output_channel_shape = solve_shapes.act_per_output_channel_shape
    input_view_impl = solve_shapes.act_input_view_impl
    group_dim = -1
    block_width = solve_shapes.block_width
    block_dim = -2
    group_elements_axis = solve_shapes.group_elements_axis


class GradQuantSolver(ActQuantSolver, defaults=True):
    """As for activations, and what is recorded belongs to the backward pass."""

    proxy_class = GradQuantProxyFromInjector
    amax_of_gradient = True


class BiasQuantSolver(ExtendedInjector, defaults=True):
    """Turns the choices by enum and the shape of the layer into the components of a bias quantizer."""

    proxy_class = BiasQuantProxyFromInjector
    tensor_quant = solve_numbers.bias_tensor_quant
    int_quant = solve_numbers.int_quant
    bit_width_impl = solve_numbers.bit_width_impl
    tensor_clamp_impl = solve_numbers.parameter_tensor_clamp_impl
    float_to_int_impl = solve_numbers.float_to_int_impl
    learned_round_impl_type = LearnedRoundImplType.HARD_SIGMOID
    learned_round_impl = solve_numbers.learned_round_impl
    learned_round_init = solve_numbers.learned_round_init
    scaling_impl = solve_scales.parameter_scaling_impl
    scaling_init_impl = solve_scales.parameter_scaling_init_impl
    scaling_init = solve_scales.scaling_init
    affine_rescaling = solve_scales.affine_rescaling
    restrict_scaling_impl = solve_scales.restrict_scaling_impl
    int_scaling_impl = solve_scales.int_scaling_impl
    scaling_stats_impl = solve_scales.scaling_stats_impl
    scaling_per_output = solve_scales.scaling_per_output
    scaling_shape = solve_scales.parameter_scaling_shape
    scaling_stats_input_view_shape_impl = solve_shapes.scaling_stats_input_view_shape_impl
    scaling_stats_input_concat_dim = 0
    stats_reduce_dim = solve_shapes.stats_reduce_dim
    keepdim = solve_shapes.keepdim
    permute_dims = solve_shapes.declared_permute_dims
    output_channel_dim = 0
    channel_axes = solve_shapes.bias_channel_axes
    scaling_per_output_channel_shape = solve_shapes.bias_per_output_channel_shape
    input_view_impl = Identity
    group_dim = solve_shapes.no_group_dim
    group_elements_axis = solve_shapes.group_elements_axis


class TruncQuantSolver(ExtendedInjector, defaults=True):
    """Turns the choices by enum into the components of a quantizer of accumulators."""

    proxy_class = TruncQuantProxyFromInjector
    tensor_quant = solve_numbers.trunc_tensor_quant
    bit_width_impl = solve_numbers.bit_width_impl
    float_to_int_impl = solve_numbers.float_to_int_impl
    learned_round_impl_type = LearnedRoundImplType.HARD_SIGMOID
    learned_round_impl = solve_numbers.learned_round_impl
    learned_round_init = solve_numbers.learned_round_init
    trunc_scaling_impl = solve_scales.trunc_scaling_impl
    trunc_int_scaling_impl = solve_scales.trunc_int_scaling_impl
    scaling_impl = solve_scales.act_scaling_impl
    scaling_init_impl = solve_scales.act_scaling_init_impl
    scaling_init = solve_scales.scaling_init
    min_val = solve_scales.min_val
    affine_rescaling = solve_scales.affine_rescaling
    restrict_scaling_impl = solve_scales.restrict_scaling_impl
    int_scaling_impl = solve_scales.int_scaling_impl
    scaling_stats_impl = solve_scales.scaling_stats_impl
    scaling_per_output = solve_scales.scaling_per_output
    scaling_shape = solve_scales.act_scaling_shape
    scaling_stats_input_view_shape_impl = solve_shapes.scaling_stats_input_view_shape_impl
    stats_reduce_dim = solve_shapes.stats_reduce_dim
    keepdim = solve_shapes.keepdim
    permute_dims = solve_shapes.declared_permute_dims
    per_channel_broadcastable_shape = solve_shapes.per_channel_broadcastable_shape
    channel_shape = solve_shapes.act_channel_shape
    scaling_per_output_channel_shape = solve_shapes.act_per_output_channel_shape
    input_view_impl = Identity
    group_elements_axis = solve_shapes.group_elements_axis
