"""Solvers: for each role of a quantizer, a table that says which function computes what.

A row `name = function` means: unless `name` is declared, `function` computes it from the names of its arguments. The
functions are in `solve_components` and `solve_shapes`. Below the tables there is for each role the quantizer that does
not quantize: a layer that has it computes in float.
"""

from jqinject import core, proxy
from jqinject.inject import ExtendedInjector, this
from jqinject.quant.enums import LearnedRoundImplType, QuantType
from jqinject.quant.solver import solve_components, solve_shapes


class WeightQuantSolver(ExtendedInjector, defaults=True):
    """Turns the choices by enum and the shape of the layer into the components of a weight quantizer."""

    proxy_class = proxy.WeightQuantProxyFromInjector
    tensor_quant = solve_components.weight_tensor_quant
    int_quant = solve_components.int_quant
    bit_width_impl = solve_components.bit_width_impl
    tensor_clamp_impl = solve_components.parameter_tensor_clamp_impl
    float_to_int_impl = solve_components.float_to_int_impl
    learned_round_impl_type = LearnedRoundImplType.HARD_SIGMOID
    learned_round_impl = solve_components.learned_round_impl
    learned_round_init = solve_components.learned_round_init
    scaling_impl = solve_components.parameter_scaling_impl
    scaling_init_impl = solve_components.parameter_scaling_init_impl
    scaling_init = solve_components.scaling_init
    affine_rescaling = solve_components.affine_rescaling
    restrict_scaling_impl = solve_components.restrict_scaling_impl
    restrict_scale_positive = solve_components.restrict_scale_positive
    bipolar_search = solve_components.bipolar_search
    int_scaling_impl = solve_components.int_scaling_impl
    scaling_stats_impl = solve_components.scaling_stats_impl
    exponent_impl = solve_components.exponent_impl
    scaling_per_output = solve_components.scaling_per_output
    scaling_shape = solve_shapes.scaling_shape_of_weight
    scaling_stats_input_view_shape_impl = solve_shapes.scaling_stats_input_view_shape_impl
    scaling_stats_input_concat_dim = solve_shapes.weight_concat_dim
    stats_reduce_dim = solve_shapes.stats_reduce_dim
    keepdim = solve_shapes.keepdim
    permute_dims = solve_shapes.weight_permute_dims
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

    proxy_class = proxy.ActQuantProxyFromInjector
    tensor_quant = solve_components.act_tensor_quant
    int_quant = solve_components.int_quant
    bit_width_impl = solve_components.bit_width_impl
    float_to_int_impl = solve_components.float_to_int_impl
    learned_round_impl_type = LearnedRoundImplType.HARD_SIGMOID
    learned_round_impl = solve_components.learned_round_impl
    learned_round_init = solve_components.learned_round_init
    scaling_impl = solve_components.act_scaling_impl
    scaling_init_impl = solve_components.act_scaling_init_impl
    scaling_init = solve_components.scaling_init
    min_val = solve_components.min_val
    affine_rescaling = solve_components.affine_rescaling
    restrict_scaling_impl = solve_components.restrict_scaling_impl
    restrict_scale_positive = solve_components.restrict_scale_positive
    bipolar_search = solve_components.bipolar_search
    int_scaling_impl = solve_components.int_scaling_impl
    scaling_stats_impl = solve_components.scaling_stats_impl
    exponent_impl = solve_components.exponent_impl
    scaling_per_output = solve_components.scaling_per_output
    scaling_shape = solve_shapes.scaling_shape_of_act
    scaling_stats_input_view_shape_impl = solve_shapes.scaling_stats_input_view_shape_impl
    stats_reduce_dim = solve_shapes.stats_reduce_dim
    keepdim = solve_shapes.keepdim
    permute_dims = solve_shapes.declared_permute_dims
    per_channel_broadcastable_shape = solve_shapes.per_channel_broadcastable_shape
    channel_shape = solve_shapes.act_channel_shape
    scaling_per_output_channel_shape = this.per_channel_broadcastable_shape
    input_view_impl = solve_shapes.act_input_view_impl
    group_dim = -1
    block_width = solve_shapes.block_width
    block_dim = -2
    group_elements_axis = solve_shapes.group_elements_axis


class GradQuantSolver(ActQuantSolver, defaults=True):
    """As for activations, and what is recorded belongs to the backward pass."""

    proxy_class = proxy.GradQuantProxyFromInjector
    amax_of_gradient = True


class BiasQuantSolver(ExtendedInjector, defaults=True):
    """Turns the choices by enum and the shape of the layer into the components of a bias quantizer."""

    proxy_class = proxy.BiasQuantProxyFromInjector
    tensor_quant = solve_components.bias_tensor_quant
    int_quant = solve_components.int_quant
    bit_width_impl = solve_components.bit_width_impl
    tensor_clamp_impl = solve_components.parameter_tensor_clamp_impl
    float_to_int_impl = solve_components.float_to_int_impl
    learned_round_impl_type = LearnedRoundImplType.HARD_SIGMOID
    learned_round_impl = solve_components.learned_round_impl
    learned_round_init = solve_components.learned_round_init
    scaling_impl = solve_components.parameter_scaling_impl
    scaling_init_impl = solve_components.parameter_scaling_init_impl
    scaling_init = solve_components.scaling_init
    affine_rescaling = solve_components.affine_rescaling
    restrict_scaling_impl = solve_components.restrict_scaling_impl
    int_scaling_impl = solve_components.int_scaling_impl
    scaling_stats_impl = solve_components.scaling_stats_impl
    scaling_per_output = solve_components.scaling_per_output
    scaling_shape = solve_shapes.scaling_shape_of_weight
    scaling_stats_input_view_shape_impl = solve_shapes.scaling_stats_input_view_shape_impl
    scaling_stats_input_concat_dim = 0
    stats_reduce_dim = solve_shapes.stats_reduce_dim
    keepdim = solve_shapes.keepdim
    permute_dims = solve_shapes.declared_permute_dims
    output_channel_dim = 0
    channel_axes = solve_shapes.bias_channel_axes
    scaling_per_output_channel_shape = solve_shapes.bias_per_output_channel_shape
    input_view_impl = core.Identity
    group_dim = solve_shapes.no_group_dim
    group_elements_axis = solve_shapes.group_elements_axis


class TruncQuantSolver(ExtendedInjector, defaults=True):
    """Turns the choices by enum into the components of a quantizer of accumulators."""

    proxy_class = proxy.TruncQuantProxyFromInjector
    tensor_quant = solve_components.trunc_tensor_quant
    bit_width_impl = solve_components.bit_width_impl
    float_to_int_impl = solve_components.float_to_int_impl
    learned_round_impl_type = LearnedRoundImplType.HARD_SIGMOID
    learned_round_impl = solve_components.learned_round_impl
    learned_round_init = solve_components.learned_round_init
    trunc_scaling_impl = solve_components.trunc_scaling_impl
    trunc_int_scaling_impl = solve_components.trunc_int_scaling_impl
    scaling_impl = solve_components.act_scaling_impl
    scaling_init_impl = solve_components.act_scaling_init_impl
    scaling_init = solve_components.scaling_init
    min_val = solve_components.min_val
    affine_rescaling = solve_components.affine_rescaling
    restrict_scaling_impl = solve_components.restrict_scaling_impl
    int_scaling_impl = solve_components.int_scaling_impl
    scaling_stats_impl = solve_components.scaling_stats_impl
    scaling_per_output = solve_components.scaling_per_output
    scaling_shape = solve_shapes.scaling_shape_of_act
    scaling_stats_input_view_shape_impl = solve_shapes.scaling_stats_input_view_shape_impl
    stats_reduce_dim = solve_shapes.stats_reduce_dim
    keepdim = solve_shapes.keepdim
    permute_dims = solve_shapes.declared_permute_dims
    per_channel_broadcastable_shape = solve_shapes.per_channel_broadcastable_shape
    channel_shape = solve_shapes.act_channel_shape
    scaling_per_output_channel_shape = this.per_channel_broadcastable_shape
    input_view_impl = core.Identity
    group_elements_axis = solve_shapes.group_elements_axis


class NoneWeightQuant(WeightQuantSolver):
    """Float weights."""

    quant_type = QuantType.FP


class NoneActQuant(ActQuantSolver):
    """Float activations."""

    quant_type = QuantType.FP


class NoneBiasQuant(BiasQuantSolver):
    """Float biases."""

    quant_type = QuantType.FP
    requires_input_scale = False


class NoneTruncQuant(TruncQuantSolver):
    """Accumulators with all their bits."""

    quant_type = QuantType.FP
