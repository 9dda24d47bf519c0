# Written by `python tools/typed_keywords.py`: the keywords of layers, of Flax and of quantizers.
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Optional, TypeAlias, TypedDict, Union

import jax
import numpy as np
from flax import nnx
from flax.typing import Axes, ConvGeneralDilatedT, DotGeneralT, Dtype, EinsumT, Initializer, PaddingLike
from flax.typing import PrecisionLike, PromoteDtypeFn
from jax.typing import DTypeLike

from jqinject.inject import ExtendedInjector
from jqinject.nn.base import ContractionKind, SchemeLike
from jqinject.proxy import QuantProxyFromInjector
from jqinject.quant import QuantizerLike, enums

Component: TypeAlias = Callable[..., Any] | nnx.Module | None
Array: TypeAlias = float | jax.Array | np.ndarray
DType: TypeAlias = DTypeLike | None
AxisName: TypeAlias = str | tuple[str, ...] | None
Injector: TypeAlias = type[ExtendedInjector]
Axis: TypeAlias = int
Size: TypeAlias = int

BitWidthImplType: TypeAlias = enums.BitWidthImplType | Literal['const', 'CONST', 'parameter', 'PARAMETER', 'stateful_const', 'STATEFUL_CONST']
FloatToIntImplType: TypeAlias = enums.FloatToIntImplType | Literal['round', 'ROUND', 'ceil', 'CEIL', 'floor', 'FLOOR', 'round_to_zero', 'ROUND_TO_ZERO', 'dpu', 'DPU', 'learned_round', 'LEARNED_ROUND', 'stochastic_round', 'STOCHASTIC_ROUND']
LearnedRoundImplType: TypeAlias = enums.LearnedRoundImplType | Literal['hard_sigmoid', 'HARD_SIGMOID', 'sigmoid', 'SIGMOID', 'identity', 'IDENTITY']
QuantType: TypeAlias = enums.QuantType | Literal['binary', 'BINARY', 'ternary', 'TERNARY', 'int', 'INT', 'fp', 'FP']
RestrictValueType: TypeAlias = enums.RestrictValueType | Literal['fp', 'FP', 'signed_fp', 'SIGNED_FP', 'log_fp', 'LOG_FP', 'int', 'INT', 'power_of_two', 'POWER_OF_TWO']
ScaleRounding: TypeAlias = enums.ScaleRounding | Literal['floor', 'FLOOR', 'ceil', 'CEIL', 'even', 'EVEN', 'rceil', 'RCEIL']
ScalingImplType: TypeAlias = enums.ScalingImplType | Literal['he', 'HE', 'const', 'CONST', 'stats', 'STATS', 'affine_stats', 'AFFINE_STATS', 'parameter', 'PARAMETER', 'parameter_from_stats', 'PARAMETER_FROM_STATS']
ScalingPerOutputType: TypeAlias = enums.ScalingPerOutputType | Literal['tensor', 'TENSOR', 'channel', 'CHANNEL', 'group', 'GROUP']
StatsOp: TypeAlias = enums.StatsOp | Literal['max', 'MAX', 'ave', 'AVE', 'max_ave', 'MAX_AVE', 'mean_sigma_std', 'MEAN_SIGMA_STD', 'mean_learn_sigma_std', 'MEAN_LEARN_SIGMA_STD', 'percentile', 'PERCENTILE', 'min_max', 'MIN_MAX', 'percentile_interval', 'PERCENTILE_INTERVAL', 'signed_max', 'SIGNED_MAX', 'sigma_std', 'SIGMA_STD']
TruncScalingImplType: TypeAlias = enums.TruncScalingImplType | Literal['msb', 'MSB', 'wrapper', 'WRAPPER']

class InputActNames(TypedDict, total=False):
    input_about_mean: bool
    input_amax_compute_algo: Literal["max", "most_recent"]
    input_amax_history_length: int
    input_amax_of_gradient: bool
    input_averaging_impl: Component
    input_axis_name: AxisName
    input_batch_axes: tuple[int, ...]
    input_bipolar_search: bool
    input_bit_width: int
    input_bit_width_impl: Component
    input_bit_width_impl_type: BitWidthImplType
    input_block_dim: int | None
    input_block_scale_impl: Component
    input_block_width: int
    input_by_factor: bool
    input_calibration_impl: Component
    input_candidates: int
    input_cast_impl: Component
    input_channel_axes: int
    input_channel_shape: tuple[int, ...]
    input_channelwise_axes: tuple[int, ...]
    input_clip_gradient: bool
    input_codebook: Any
    input_collect_stats_steps: int
    input_collected_range: float | None
    input_collected_zero_point: float | None
    input_compute_max_mantissa: Component
    input_correction_size: int
    input_delayed: bool
    input_dq_dtype: DType
    input_dynamic_scaling_broadcastable_fn: Component
    input_exponent_bias: int
    input_exponent_bias_impl: Component
    input_exponent_bit_class: Injector
    input_exponent_bit_width: int
    input_exponent_bit_width_impl: Component
    input_exponent_bit_width_impl_type: BitWidthImplType
    input_exponent_impl: Component
    input_factor: float
    input_float_clamp_impl: Component
    input_float_scaling_impl: Component
    input_float_to_int_impl: Component
    input_float_to_int_impl_type: FloatToIntImplType
    input_folded: bool
    input_fractions: tuple[float, ...] | None
    input_gradient_mask_impl: Component
    input_group_dim: int | None
    input_group_elements_axis: int | None
    input_group_padding: bool
    input_group_size: int | tuple[int, int] | None
    input_high_percentile_q: float
    input_hqo_beta_zp: float
    input_hqo_init_op_zp: Component
    input_hqo_iters_zp: int
    input_hqo_kappa_zp: float
    input_hqo_lp_norm_zp: float
    input_inf_values: tuple[str, ...] | None
    input_inner_stats_input_view_shape_impl: Component
    input_input_view_impl: Component
    input_int_quant: Component
    input_int_scaling_impl: Component
    input_keepdim: bool
    input_keeps_infinite: bool
    input_learned_round_gamma: float
    input_learned_round_impl: Component
    input_learned_round_impl_type: LearnedRoundImplType
    input_learned_round_init: Array
    input_learned_round_temperature: float
    input_learned_round_zeta: float
    input_least_scale: float
    input_limit_steps: float
    input_low_percentile_q: float
    input_mantissa_bit_class: Injector
    input_mantissa_bit_width: int
    input_mantissa_bit_width_impl: Component
    input_mantissa_bit_width_impl_type: BitWidthImplType
    input_margin: float
    input_max_available_float: float | None
    input_max_val: float
    input_memory_shape: tuple[int, ...] | None
    input_midmax_mantissa_bit_bias: int
    input_min_bit_width: int
    input_min_val: float
    input_momentum: float | None
    input_mse_scale: Injector
    input_mse_search_method: Literal["grid", "fibonacci", "exact"]
    input_mse_zero_point: Injector
    input_nan_values: tuple[str, ...] | None
    input_narrow_range: bool
    input_noise_sharing_axes: tuple[int, ...]
    input_normal_clip: float
    input_normal_scale: float
    input_override_pretrained_bit_width: bool
    input_per_channel_broadcastable_shape: tuple[int, ...]
    input_percentile: float
    input_permute_dims: tuple[int, ...] | None
    input_power_of_two_factor: bool
    input_pre_transform: Component
    input_preserve_zero: bool
    input_proxy_class: type[QuantProxyFromInjector]
    input_q_dtype: DType
    input_quant_delay_steps: int | None
    input_quant_type: QuantType
    input_quantize_zero_point: bool
    input_random_bits: int
    input_range_steps: float | None
    input_restart: bool
    input_restrict_bit_width_impl: Component
    input_restrict_scale_positive: bool
    input_restrict_scale_threshold_impl: Component
    input_restrict_scaling_impl: Component
    input_restrict_scaling_type: RestrictValueType
    input_restrict_threshold_impl: Component
    input_restrict_value_float_to_int_impl: Component
    input_saturating: bool
    input_scale_quant: Injector
    input_scale_rounding: ScaleRounding
    input_scale_stop_grad: bool
    input_scale_to_int_impl: Component
    input_scale_to_int_impl_type: FloatToIntImplType
    input_scaling_affine_rescaling_init: float | None
    input_scaling_affine_shifting_init: float | None
    input_scaling_gradient_scale: float | None
    input_scaling_impl: Component
    input_scaling_impl_type: ScalingImplType
    input_scaling_init: Array
    input_scaling_init_impl: Component
    input_scaling_min_val: float | None
    input_scaling_per_output: ScalingPerOutputType
    input_scaling_per_output_channel: bool
    input_scaling_per_output_channel_shape: tuple[int, ...]
    input_scaling_per_output_type: ScalingPerOutputType
    input_scaling_shape: tuple[int, ...]
    input_scaling_stats_impl: Component
    input_scaling_stats_input_view_shape_impl: Component
    input_scaling_stats_momentum: float | None
    input_scaling_stats_op: StatsOp
    input_scaling_stats_permute_dims: tuple[int, ...] | None
    input_seed: int
    input_shared_axes: tuple[int, ...] | None
    input_shared_per_row: bool
    input_sigma: float
    input_signed: bool
    input_stats_impl_zp: Component
    input_stats_output_shape: tuple[int, ...]
    input_stats_reduce_dim: int | None
    input_std_dev_epsilon: float
    input_straight_through: bool
    input_tensor_clamp_impl: Component
    input_tensor_quant: Component
    input_threshold: float
    input_threshold_mixin: Injector
    input_ties: Literal["first", "shared", "near"] | None
    input_trust: float
    input_trust_steps: float
    input_undo_transform: bool
    input_zero_point_impl: Component
    input_zero_point_shape: tuple[int, ...]
    input_zero_point_stats_impl: Component
    input_zero_point_stats_input_view_shape_impl: Component
    input_zero_point_stats_momentum: float | None

class OutputActNames(TypedDict, total=False):
    output_about_mean: bool
    output_amax_compute_algo: Literal["max", "most_recent"]
    output_amax_history_length: int
    output_amax_of_gradient: bool
    output_averaging_impl: Component
    output_axis_name: AxisName
    output_batch_axes: tuple[int, ...]
    output_bipolar_search: bool
    output_bit_width: int
    output_bit_width_impl: Component
    output_bit_width_impl_type: BitWidthImplType
    output_block_dim: int | None
    output_block_scale_impl: Component
    output_block_width: int
    output_by_factor: bool
    output_calibration_impl: Component
    output_candidates: int
    output_cast_impl: Component
    output_channel_axes: int
    output_channel_shape: tuple[int, ...]
    output_channelwise_axes: tuple[int, ...]
    output_clip_gradient: bool
    output_codebook: Any
    output_collect_stats_steps: int
    output_collected_range: float | None
    output_collected_zero_point: float | None
    output_compute_max_mantissa: Component
    output_correction_size: int
    output_delayed: bool
    output_dq_dtype: DType
    output_dynamic_scaling_broadcastable_fn: Component
    output_exponent_bias: int
    output_exponent_bias_impl: Component
    output_exponent_bit_class: Injector
    output_exponent_bit_width: int
    output_exponent_bit_width_impl: Component
    output_exponent_bit_width_impl_type: BitWidthImplType
    output_exponent_impl: Component
    output_factor: float
    output_float_clamp_impl: Component
    output_float_scaling_impl: Component
    output_float_to_int_impl: Component
    output_float_to_int_impl_type: FloatToIntImplType
    output_folded: bool
    output_fractions: tuple[float, ...] | None
    output_gradient_mask_impl: Component
    output_group_dim: int | None
    output_group_elements_axis: int | None
    output_group_padding: bool
    output_group_size: int | tuple[int, int] | None
    output_high_percentile_q: float
    output_hqo_beta_zp: float
    output_hqo_init_op_zp: Component
    output_hqo_iters_zp: int
    output_hqo_kappa_zp: float
    output_hqo_lp_norm_zp: float
    output_inf_values: tuple[str, ...] | None
    output_inner_stats_input_view_shape_impl: Component
    output_input_view_impl: Component
    output_int_quant: Component
    output_int_scaling_impl: Component
    output_keepdim: bool
    output_keeps_infinite: bool
    output_learned_round_gamma: float
    output_learned_round_impl: Component
    output_learned_round_impl_type: LearnedRoundImplType
    output_learned_round_init: Array
    output_learned_round_temperature: float
    output_learned_round_zeta: float
    output_least_scale: float
    output_limit_steps: float
    output_low_percentile_q: float
    output_mantissa_bit_class: Injector
    output_mantissa_bit_width: int
    output_mantissa_bit_width_impl: Component
    output_mantissa_bit_width_impl_type: BitWidthImplType
    output_margin: float
    output_max_available_float: float | None
    output_max_val: float
    output_memory_shape: tuple[int, ...] | None
    output_midmax_mantissa_bit_bias: int
    output_min_bit_width: int
    output_min_val: float
    output_momentum: float | None
    output_mse_scale: Injector
    output_mse_search_method: Literal["grid", "fibonacci", "exact"]
    output_mse_zero_point: Injector
    output_nan_values: tuple[str, ...] | None
    output_narrow_range: bool
    output_noise_sharing_axes: tuple[int, ...]
    output_normal_clip: float
    output_normal_scale: float
    output_override_pretrained_bit_width: bool
    output_per_channel_broadcastable_shape: tuple[int, ...]
    output_percentile: float
    output_permute_dims: tuple[int, ...] | None
    output_power_of_two_factor: bool
    output_pre_transform: Component
    output_preserve_zero: bool
    output_proxy_class: type[QuantProxyFromInjector]
    output_q_dtype: DType
    output_quant_delay_steps: int | None
    output_quant_type: QuantType
    output_quantize_zero_point: bool
    output_random_bits: int
    output_range_steps: float | None
    output_restart: bool
    output_restrict_bit_width_impl: Component
    output_restrict_scale_positive: bool
    output_restrict_scale_threshold_impl: Component
    output_restrict_scaling_impl: Component
    output_restrict_scaling_type: RestrictValueType
    output_restrict_threshold_impl: Component
    output_restrict_value_float_to_int_impl: Component
    output_saturating: bool
    output_scale_quant: Injector
    output_scale_rounding: ScaleRounding
    output_scale_stop_grad: bool
    output_scale_to_int_impl: Component
    output_scale_to_int_impl_type: FloatToIntImplType
    output_scaling_affine_rescaling_init: float | None
    output_scaling_affine_shifting_init: float | None
    output_scaling_gradient_scale: float | None
    output_scaling_impl: Component
    output_scaling_impl_type: ScalingImplType
    output_scaling_init: Array
    output_scaling_init_impl: Component
    output_scaling_min_val: float | None
    output_scaling_per_output: ScalingPerOutputType
    output_scaling_per_output_channel: bool
    output_scaling_per_output_channel_shape: tuple[int, ...]
    output_scaling_per_output_type: ScalingPerOutputType
    output_scaling_shape: tuple[int, ...]
    output_scaling_stats_impl: Component
    output_scaling_stats_input_view_shape_impl: Component
    output_scaling_stats_momentum: float | None
    output_scaling_stats_op: StatsOp
    output_scaling_stats_permute_dims: tuple[int, ...] | None
    output_seed: int
    output_shared_axes: tuple[int, ...] | None
    output_shared_per_row: bool
    output_sigma: float
    output_signed: bool
    output_stats_impl_zp: Component
    output_stats_output_shape: tuple[int, ...]
    output_stats_reduce_dim: int | None
    output_std_dev_epsilon: float
    output_straight_through: bool
    output_tensor_clamp_impl: Component
    output_tensor_quant: Component
    output_threshold: float
    output_threshold_mixin: Injector
    output_ties: Literal["first", "shared", "near"] | None
    output_trust: float
    output_trust_steps: float
    output_undo_transform: bool
    output_zero_point_impl: Component
    output_zero_point_shape: tuple[int, ...]
    output_zero_point_stats_impl: Component
    output_zero_point_stats_input_view_shape_impl: Component
    output_zero_point_stats_momentum: float | None

class GradGradNames(TypedDict, total=False):
    grad_about_mean: bool
    grad_amax_compute_algo: Literal["max", "most_recent"]
    grad_amax_history_length: int
    grad_amax_of_gradient: bool
    grad_axis_name: AxisName
    grad_bipolar_search: bool
    grad_bit_width: int
    grad_bit_width_impl: Component
    grad_bit_width_impl_type: BitWidthImplType
    grad_block_dim: int | None
    grad_block_scale_impl: Component
    grad_block_width: int
    grad_by_factor: bool
    grad_cast_impl: Component
    grad_channel_axes: int
    grad_channel_shape: tuple[int, ...]
    grad_compute_max_mantissa: Component
    grad_correction_size: int
    grad_delayed: bool
    grad_dq_dtype: DType
    grad_dynamic_scaling_broadcastable_fn: Component
    grad_exponent_bias: int
    grad_exponent_bias_impl: Component
    grad_exponent_bit_class: Injector
    grad_exponent_bit_width: int
    grad_exponent_bit_width_impl: Component
    grad_exponent_bit_width_impl_type: BitWidthImplType
    grad_exponent_impl: Component
    grad_factor: float
    grad_float_clamp_impl: Component
    grad_float_scaling_impl: Component
    grad_float_to_int_impl: Component
    grad_float_to_int_impl_type: FloatToIntImplType
    grad_folded: bool
    grad_gradient_mask_impl: Component
    grad_group_dim: int | None
    grad_group_elements_axis: int | None
    grad_group_padding: bool
    grad_group_size: int | tuple[int, int] | None
    grad_high_percentile_q: float
    grad_inf_values: tuple[str, ...] | None
    grad_input_view_impl: Component
    grad_int_quant: Component
    grad_int_scaling_impl: Component
    grad_keepdim: bool
    grad_keeps_infinite: bool
    grad_learned_round_gamma: float
    grad_learned_round_impl: Component
    grad_learned_round_impl_type: LearnedRoundImplType
    grad_learned_round_init: Array
    grad_learned_round_temperature: float
    grad_learned_round_zeta: float
    grad_low_percentile_q: float
    grad_mantissa_bit_class: Injector
    grad_mantissa_bit_width: int
    grad_mantissa_bit_width_impl: Component
    grad_mantissa_bit_width_impl_type: BitWidthImplType
    grad_margin: float
    grad_max_available_float: float | None
    grad_max_val: float
    grad_midmax_mantissa_bit_bias: int
    grad_min_bit_width: int
    grad_min_val: float
    grad_nan_values: tuple[str, ...] | None
    grad_narrow_range: bool
    grad_noise_sharing_axes: tuple[int, ...]
    grad_override_pretrained_bit_width: bool
    grad_per_channel_broadcastable_shape: tuple[int, ...]
    grad_permute_dims: tuple[int, ...] | None
    grad_power_of_two_factor: bool
    grad_proxy_class: type[QuantProxyFromInjector]
    grad_q_dtype: DType
    grad_quant_delay_steps: int | None
    grad_quant_type: QuantType
    grad_random_bits: int
    grad_restrict_bit_width_impl: Component
    grad_restrict_scale_positive: bool
    grad_restrict_scale_threshold_impl: Component
    grad_restrict_scaling_impl: Component
    grad_restrict_scaling_type: RestrictValueType
    grad_restrict_threshold_impl: Component
    grad_restrict_value_float_to_int_impl: Component
    grad_saturating: bool
    grad_scale_rounding: ScaleRounding
    grad_scale_to_int_impl: Component
    grad_scale_to_int_impl_type: FloatToIntImplType
    grad_scaling_impl: Component
    grad_scaling_impl_type: ScalingImplType
    grad_scaling_init: Array
    grad_scaling_init_impl: Component
    grad_scaling_min_val: float | None
    grad_scaling_per_output: ScalingPerOutputType
    grad_scaling_per_output_channel: bool
    grad_scaling_per_output_channel_shape: tuple[int, ...]
    grad_scaling_per_output_type: ScalingPerOutputType
    grad_scaling_shape: tuple[int, ...]
    grad_scaling_stats_impl: Component
    grad_scaling_stats_input_view_shape_impl: Component
    grad_scaling_stats_op: StatsOp
    grad_scaling_stats_permute_dims: tuple[int, ...] | None
    grad_seed: int
    grad_shared_per_row: bool
    grad_sigma: float
    grad_signed: bool
    grad_stats_output_shape: tuple[int, ...]
    grad_stats_reduce_dim: int | None
    grad_std_dev_epsilon: float
    grad_straight_through: bool
    grad_tensor_clamp_impl: Component
    grad_tensor_quant: Component
    grad_threshold: float
    grad_threshold_mixin: Injector
    grad_ties: Literal["first", "shared", "near"] | None
    grad_zero_point_impl: Component

class ActNames(TypedDict, total=False):
    about_mean: bool
    amax_compute_algo: Literal["max", "most_recent"]
    amax_history_length: int
    amax_of_gradient: bool
    averaging_impl: Component
    axis_name: AxisName
    batch_axes: tuple[int, ...]
    bipolar_search: bool
    bit_width: int
    bit_width_impl: Component
    bit_width_impl_type: BitWidthImplType
    block_dim: int | None
    block_scale_impl: Component
    block_width: int
    by_factor: bool
    calibration_impl: Component
    candidates: int
    cast_impl: Component
    channel_axes: int
    channel_shape: tuple[int, ...]
    channelwise_axes: tuple[int, ...]
    clip_gradient: bool
    codebook: Any
    collect_stats_steps: int
    collected_range: float | None
    collected_zero_point: float | None
    compute_max_mantissa: Component
    correction_size: int
    delayed: bool
    dq_dtype: DType
    dynamic_scaling_broadcastable_fn: Component
    exponent_bias: int
    exponent_bias_impl: Component
    exponent_bit_class: Injector
    exponent_bit_width: int
    exponent_bit_width_impl: Component
    exponent_bit_width_impl_type: BitWidthImplType
    exponent_impl: Component
    factor: float
    float_clamp_impl: Component
    float_scaling_impl: Component
    float_to_int_impl: Component
    float_to_int_impl_type: FloatToIntImplType
    folded: bool
    fractions: tuple[float, ...] | None
    gradient_mask_impl: Component
    group_dim: int | None
    group_elements_axis: int | None
    group_padding: bool
    group_size: int | tuple[int, int] | None
    high_percentile_q: float
    hqo_beta_zp: float
    hqo_init_op_zp: Component
    hqo_iters_zp: int
    hqo_kappa_zp: float
    hqo_lp_norm_zp: float
    inf_values: tuple[str, ...] | None
    inner_stats_input_view_shape_impl: Component
    input_view_impl: Component
    int_quant: Component
    int_scaling_impl: Component
    keepdim: bool
    keeps_infinite: bool
    learned_round_gamma: float
    learned_round_impl: Component
    learned_round_impl_type: LearnedRoundImplType
    learned_round_init: Array
    learned_round_temperature: float
    learned_round_zeta: float
    least_scale: float
    limit_steps: float
    low_percentile_q: float
    mantissa_bit_class: Injector
    mantissa_bit_width: int
    mantissa_bit_width_impl: Component
    mantissa_bit_width_impl_type: BitWidthImplType
    margin: float
    max_available_float: float | None
    max_val: float
    memory_shape: tuple[int, ...] | None
    midmax_mantissa_bit_bias: int
    min_bit_width: int
    min_val: float
    momentum: float | None
    mse_scale: Injector
    mse_search_method: Literal["grid", "fibonacci", "exact"]
    mse_zero_point: Injector
    nan_values: tuple[str, ...] | None
    narrow_range: bool
    noise_sharing_axes: tuple[int, ...]
    normal_clip: float
    normal_scale: float
    override_pretrained_bit_width: bool
    per_channel_broadcastable_shape: tuple[int, ...]
    percentile: float
    permute_dims: tuple[int, ...] | None
    power_of_two_factor: bool
    pre_transform: Component
    preserve_zero: bool
    proxy_class: type[QuantProxyFromInjector]
    q_dtype: DType
    quant_delay_steps: int | None
    quant_type: QuantType
    quantize_zero_point: bool
    random_bits: int
    range_steps: float | None
    restart: bool
    restrict_bit_width_impl: Component
    restrict_scale_positive: bool
    restrict_scale_threshold_impl: Component
    restrict_scaling_impl: Component
    restrict_scaling_type: RestrictValueType
    restrict_threshold_impl: Component
    restrict_value_float_to_int_impl: Component
    saturating: bool
    scale_quant: Injector
    scale_rounding: ScaleRounding
    scale_stop_grad: bool
    scale_to_int_impl: Component
    scale_to_int_impl_type: FloatToIntImplType
    scaling_affine_rescaling_init: float | None
    scaling_affine_shifting_init: float | None
    scaling_gradient_scale: float | None
    scaling_impl: Component
    scaling_impl_type: ScalingImplType
    scaling_init: Array
    scaling_init_impl: Component
    scaling_min_val: float | None
    scaling_per_output: ScalingPerOutputType
    scaling_per_output_channel: bool
    scaling_per_output_channel_shape: tuple[int, ...]
    scaling_per_output_type: ScalingPerOutputType
    scaling_shape: tuple[int, ...]
    scaling_stats_impl: Component
    scaling_stats_input_view_shape_impl: Component
    scaling_stats_momentum: float | None
    scaling_stats_op: StatsOp
    scaling_stats_permute_dims: tuple[int, ...] | None
    seed: int
    shared_axes: tuple[int, ...] | None
    shared_per_row: bool
    sigma: float
    signed: bool
    stats_impl_zp: Component
    stats_output_shape: tuple[int, ...]
    stats_reduce_dim: int | None
    std_dev_epsilon: float
    straight_through: bool
    tensor_clamp_impl: Component
    tensor_quant: Component
    threshold: float
    threshold_mixin: Injector
    ties: Literal["first", "shared", "near"] | None
    trust: float
    trust_steps: float
    undo_transform: bool
    zero_point_impl: Component
    zero_point_shape: tuple[int, ...]
    zero_point_stats_impl: Component
    zero_point_stats_input_view_shape_impl: Component
    zero_point_stats_momentum: float | None

class WeightWeightNames(TypedDict, total=False):
    weight_about_mean: bool
    weight_accumulator_bit_width: int
    weight_accumulator_bit_width_impl: Component
    weight_amax_compute_algo: Literal["max", "most_recent"]
    weight_amax_history_length: int
    weight_amax_of_gradient: bool
    weight_averaging_impl: Component
    weight_axis_name: AxisName
    weight_batch_axes: tuple[int, ...]
    weight_bipolar_search: bool
    weight_bit_width: int
    weight_bit_width_impl: Component
    weight_bit_width_impl_type: BitWidthImplType
    weight_block_dim: int | None
    weight_block_scale_impl: Component
    weight_block_width: int
    weight_by_factor: bool
    weight_calibration_impl: Component
    weight_cast_impl: Component
    weight_channel_axes: int
    weight_channel_shape: tuple[int, ...]
    weight_channelwise_axes: tuple[int, ...]
    weight_clip_gradient: bool
    weight_codebook: Any
    weight_compute_max_mantissa: Component
    weight_decoupled_int_quant: Component
    weight_delayed: bool
    weight_dq_dtype: DType
    weight_expanded_groupwise_shape: tuple[int, ...]
    weight_exponent_bias: int
    weight_exponent_bias_impl: Component
    weight_exponent_bit_class: Injector
    weight_exponent_bit_width: int
    weight_exponent_bit_width_impl: Component
    weight_exponent_bit_width_impl_type: BitWidthImplType
    weight_exponent_impl: Component
    weight_factor: float
    weight_float_clamp_impl: Component
    weight_float_scaling_impl: Component
    weight_float_to_int_impl: Component
    weight_float_to_int_impl_type: FloatToIntImplType
    weight_folded: bool
    weight_force_parameter: bool
    weight_gradient_mask_impl: Component
    weight_group_dim: int | None
    weight_group_elements_axis: int | None
    weight_group_padding: bool
    weight_group_size: int | tuple[int, int] | None
    weight_high_percentile_q: float
    weight_hqo_beta_scale: float
    weight_hqo_beta_zp: float
    weight_hqo_init_op_scale: Component
    weight_hqo_init_op_zp: Component
    weight_hqo_iters_scale: int
    weight_hqo_iters_zp: int
    weight_hqo_kappa_scale: float
    weight_hqo_kappa_zp: float
    weight_hqo_lp_norm_scale: float
    weight_hqo_lp_norm_zp: float
    weight_inf_values: tuple[str, ...] | None
    weight_inner_stats_input_view_shape_impl: Component
    weight_input_view_impl: Component
    weight_int_quant: Component
    weight_int_scaling_impl: Component
    weight_keepdim: bool
    weight_keeps_infinite: bool
    weight_learned_round_gamma: float
    weight_learned_round_impl: Component
    weight_learned_round_impl_type: LearnedRoundImplType
    weight_learned_round_init: Array
    weight_learned_round_temperature: float
    weight_learned_round_zeta: float
    weight_limit_steps: float
    weight_low_percentile_q: float
    weight_mantissa_bit_class: Injector
    weight_mantissa_bit_width: int
    weight_mantissa_bit_width_impl: Component
    weight_mantissa_bit_width_impl_type: BitWidthImplType
    weight_margin: float
    weight_max_available_float: float | None
    weight_memory_shape: tuple[int, ...] | None
    weight_midmax_mantissa_bit_bias: int
    weight_min_bit_width: int
    weight_mse_scale: Injector
    weight_mse_search_method: Literal["grid", "fibonacci", "exact"]
    weight_mse_zero_point: Injector
    weight_nan_values: tuple[str, ...] | None
    weight_narrow_range: bool
    weight_noise_sharing_axes: tuple[int, ...]
    weight_normal_clip: float
    weight_normal_scale: float
    weight_normalize_stats_impl: Component
    weight_out_channels: int
    weight_output_channel_dim: int | tuple[int, ...]
    weight_override_pretrained_bit_width: bool
    weight_per_channel_pre_norm: Injector
    weight_permute_dims: tuple[int, ...] | None
    weight_power_of_two_factor: bool
    weight_pre_scaling_impl: Component
    weight_pre_scaling_min_val: float | None
    weight_pre_scaling_shape: tuple[int, ...]
    weight_pre_zero_point_impl: Component
    weight_proxy_class: type[QuantProxyFromInjector]
    weight_q_dtype: DType
    weight_quant_delay_steps: int | None
    weight_quant_type: QuantType
    weight_quantize_zero_point: bool
    weight_quantized_shape: tuple[int, ...]
    weight_random_bits: int
    weight_range_steps: float | None
    weight_restrict_bit_width_impl: Component
    weight_restrict_pre_scaling_impl: Component
    weight_restrict_scale_positive: bool
    weight_restrict_scale_threshold_impl: Component
    weight_restrict_scaling_impl: Component
    weight_restrict_scaling_type: RestrictValueType
    weight_restrict_threshold_impl: Component
    weight_restrict_value_float_to_int_impl: Component
    weight_saturating: bool
    weight_scale_quant: Injector
    weight_scale_rounding: ScaleRounding
    weight_scale_shift_zero_point_impl: Component
    weight_scale_stop_grad: bool
    weight_scaling_affine_rescaling_init: float | None
    weight_scaling_affine_shifting_init: float | None
    weight_scaling_const: float
    weight_scaling_gradient_scale: float | None
    weight_scaling_impl: Component
    weight_scaling_impl_type: ScalingImplType
    weight_scaling_init: Array
    weight_scaling_init_impl: Component
    weight_scaling_min_val: float | None
    weight_scaling_per_group_shape: tuple[int, ...]
    weight_scaling_per_output: ScalingPerOutputType
    weight_scaling_per_output_channel: bool
    weight_scaling_per_output_channel_shape: tuple[int, ...]
    weight_scaling_per_output_type: ScalingPerOutputType
    weight_scaling_shape: tuple[int, ...]
    weight_scaling_stats_impl: Component
    weight_scaling_stats_input_concat_dim: int
    weight_scaling_stats_input_view_shape_impl: Component
    weight_scaling_stats_op: StatsOp
    weight_seed: int
    weight_shared_axes: tuple[int, ...] | None
    weight_shared_per_row: bool
    weight_sigma: float
    weight_signed: bool
    weight_stats_impl_scale: Component
    weight_stats_impl_zp: Component
    weight_stats_output_shape: tuple[int, ...]
    weight_stats_reduce_dim: int | None
    weight_std_dev_epsilon: float
    weight_straight_through: bool
    weight_tensor_clamp_impl: Component
    weight_tensor_quant: Component
    weight_threshold: float
    weight_threshold_mixin: Injector
    weight_ties: Literal["first", "shared", "near"] | None
    weight_trust: float
    weight_trust_steps: float
    weight_upstream_shape: tuple[int, ...]
    weight_zero_point_affine_rescaling_init: float | None
    weight_zero_point_affine_shifting_init: float | None
    weight_zero_point_impl: Component
    weight_zero_point_shape: tuple[int, ...]
    weight_zero_point_stats_impl: Component
    weight_zero_point_stats_input_concat_dim: int
    weight_zero_point_stats_input_view_shape_impl: Component

class BiasBiasNames(TypedDict, total=False):
    bias_about_mean: bool
    bias_axis_name: AxisName
    bias_bit_width: int
    bias_bit_width_impl: Component
    bias_bit_width_impl_type: BitWidthImplType
    bias_channel_axes: int
    bias_channel_shape: tuple[int, ...]
    bias_exponent_impl: Component
    bias_factor: float
    bias_float_to_int_impl: Component
    bias_float_to_int_impl_type: FloatToIntImplType
    bias_force_parameter: bool
    bias_group_dim: int | None
    bias_group_elements_axis: int | None
    bias_high_percentile_q: float
    bias_input_view_impl: Component
    bias_int_quant: Component
    bias_int_scaling_impl: Component
    bias_keepdim: bool
    bias_learned_round_gamma: float
    bias_learned_round_impl: Component
    bias_learned_round_impl_type: LearnedRoundImplType
    bias_learned_round_init: Array
    bias_learned_round_temperature: float
    bias_learned_round_zeta: float
    bias_low_percentile_q: float
    bias_min_bit_width: int
    bias_narrow_range: bool
    bias_noise_sharing_axes: tuple[int, ...]
    bias_output_channel_dim: int | tuple[int, ...]
    bias_override_pretrained_bit_width: bool
    bias_permute_dims: tuple[int, ...] | None
    bias_proxy_class: type[QuantProxyFromInjector]
    bias_quant_delay_steps: int | None
    bias_quant_type: QuantType
    bias_random_bits: int
    bias_requires_input_scale: bool
    bias_restrict_bit_width_impl: Component
    bias_restrict_scale_threshold_impl: Component
    bias_restrict_scaling_impl: Component
    bias_restrict_scaling_type: RestrictValueType
    bias_restrict_threshold_impl: Component
    bias_restrict_value_float_to_int_impl: Component
    bias_scale_rounding: ScaleRounding
    bias_scaling_affine_rescaling_init: float | None
    bias_scaling_affine_shifting_init: float | None
    bias_scaling_const: float
    bias_scaling_impl: Component
    bias_scaling_impl_type: ScalingImplType
    bias_scaling_init: Array
    bias_scaling_init_impl: Component
    bias_scaling_min_val: float | None
    bias_scaling_per_output: ScalingPerOutputType
    bias_scaling_per_output_channel: bool
    bias_scaling_per_output_channel_shape: tuple[int, ...]
    bias_scaling_per_output_type: ScalingPerOutputType
    bias_scaling_shape: tuple[int, ...]
    bias_scaling_stats_impl: Component
    bias_scaling_stats_input_concat_dim: int
    bias_scaling_stats_input_view_shape_impl: Component
    bias_scaling_stats_op: StatsOp
    bias_scaling_stats_permute_dims: tuple[int, ...] | None
    bias_seed: int
    bias_sigma: float
    bias_signed: bool
    bias_stats_output_shape: tuple[int, ...]
    bias_stats_reduce_dim: int | None
    bias_std_dev_epsilon: float
    bias_tensor_clamp_impl: Component
    bias_tensor_quant: Component
    bias_ties: Literal["first", "shared", "near"] | None
    bias_zero_point_impl: Component

class IoActNames(TypedDict, total=False):
    io_about_mean: bool
    io_amax_compute_algo: Literal["max", "most_recent"]
    io_amax_history_length: int
    io_amax_of_gradient: bool
    io_averaging_impl: Component
    io_axis_name: AxisName
    io_batch_axes: tuple[int, ...]
    io_bipolar_search: bool
    io_bit_width: int
    io_bit_width_impl: Component
    io_bit_width_impl_type: BitWidthImplType
    io_block_dim: int | None
    io_block_scale_impl: Component
    io_block_width: int
    io_by_factor: bool
    io_calibration_impl: Component
    io_candidates: int
    io_cast_impl: Component
    io_channel_axes: int
    io_channel_shape: tuple[int, ...]
    io_channelwise_axes: tuple[int, ...]
    io_clip_gradient: bool
    io_codebook: Any
    io_collect_stats_steps: int
    io_collected_range: float | None
    io_collected_zero_point: float | None
    io_compute_max_mantissa: Component
    io_correction_size: int
    io_delayed: bool
    io_dq_dtype: DType
    io_dynamic_scaling_broadcastable_fn: Component
    io_exponent_bias: int
    io_exponent_bias_impl: Component
    io_exponent_bit_class: Injector
    io_exponent_bit_width: int
    io_exponent_bit_width_impl: Component
    io_exponent_bit_width_impl_type: BitWidthImplType
    io_exponent_impl: Component
    io_factor: float
    io_float_clamp_impl: Component
    io_float_scaling_impl: Component
    io_float_to_int_impl: Component
    io_float_to_int_impl_type: FloatToIntImplType
    io_folded: bool
    io_fractions: tuple[float, ...] | None
    io_gradient_mask_impl: Component
    io_group_dim: int | None
    io_group_elements_axis: int | None
    io_group_padding: bool
    io_group_size: int | tuple[int, int] | None
    io_high_percentile_q: float
    io_hqo_beta_zp: float
    io_hqo_init_op_zp: Component
    io_hqo_iters_zp: int
    io_hqo_kappa_zp: float
    io_hqo_lp_norm_zp: float
    io_inf_values: tuple[str, ...] | None
    io_inner_stats_input_view_shape_impl: Component
    io_input_view_impl: Component
    io_int_quant: Component
    io_int_scaling_impl: Component
    io_keepdim: bool
    io_keeps_infinite: bool
    io_learned_round_gamma: float
    io_learned_round_impl: Component
    io_learned_round_impl_type: LearnedRoundImplType
    io_learned_round_init: Array
    io_learned_round_temperature: float
    io_learned_round_zeta: float
    io_least_scale: float
    io_limit_steps: float
    io_low_percentile_q: float
    io_mantissa_bit_class: Injector
    io_mantissa_bit_width: int
    io_mantissa_bit_width_impl: Component
    io_mantissa_bit_width_impl_type: BitWidthImplType
    io_margin: float
    io_max_available_float: float | None
    io_max_val: float
    io_memory_shape: tuple[int, ...] | None
    io_midmax_mantissa_bit_bias: int
    io_min_bit_width: int
    io_min_val: float
    io_momentum: float | None
    io_mse_scale: Injector
    io_mse_search_method: Literal["grid", "fibonacci", "exact"]
    io_mse_zero_point: Injector
    io_nan_values: tuple[str, ...] | None
    io_narrow_range: bool
    io_noise_sharing_axes: tuple[int, ...]
    io_normal_clip: float
    io_normal_scale: float
    io_override_pretrained_bit_width: bool
    io_per_channel_broadcastable_shape: tuple[int, ...]
    io_percentile: float
    io_permute_dims: tuple[int, ...] | None
    io_power_of_two_factor: bool
    io_pre_transform: Component
    io_preserve_zero: bool
    io_proxy_class: type[QuantProxyFromInjector]
    io_q_dtype: DType
    io_quant_delay_steps: int | None
    io_quant_type: QuantType
    io_quantize_zero_point: bool
    io_random_bits: int
    io_range_steps: float | None
    io_restart: bool
    io_restrict_bit_width_impl: Component
    io_restrict_scale_positive: bool
    io_restrict_scale_threshold_impl: Component
    io_restrict_scaling_impl: Component
    io_restrict_scaling_type: RestrictValueType
    io_restrict_threshold_impl: Component
    io_restrict_value_float_to_int_impl: Component
    io_saturating: bool
    io_scale_quant: Injector
    io_scale_rounding: ScaleRounding
    io_scale_stop_grad: bool
    io_scale_to_int_impl: Component
    io_scale_to_int_impl_type: FloatToIntImplType
    io_scaling_affine_rescaling_init: float | None
    io_scaling_affine_shifting_init: float | None
    io_scaling_gradient_scale: float | None
    io_scaling_impl: Component
    io_scaling_impl_type: ScalingImplType
    io_scaling_init: Array
    io_scaling_init_impl: Component
    io_scaling_min_val: float | None
    io_scaling_per_output: ScalingPerOutputType
    io_scaling_per_output_channel: bool
    io_scaling_per_output_channel_shape: tuple[int, ...]
    io_scaling_per_output_type: ScalingPerOutputType
    io_scaling_shape: tuple[int, ...]
    io_scaling_stats_impl: Component
    io_scaling_stats_input_view_shape_impl: Component
    io_scaling_stats_momentum: float | None
    io_scaling_stats_op: StatsOp
    io_scaling_stats_permute_dims: tuple[int, ...] | None
    io_seed: int
    io_shared_axes: tuple[int, ...] | None
    io_shared_per_row: bool
    io_sigma: float
    io_signed: bool
    io_stats_impl_zp: Component
    io_stats_output_shape: tuple[int, ...]
    io_stats_reduce_dim: int | None
    io_std_dev_epsilon: float
    io_straight_through: bool
    io_tensor_clamp_impl: Component
    io_tensor_quant: Component
    io_threshold: float
    io_threshold_mixin: Injector
    io_ties: Literal["first", "shared", "near"] | None
    io_trust: float
    io_trust_steps: float
    io_undo_transform: bool
    io_zero_point_impl: Component
    io_zero_point_shape: tuple[int, ...]
    io_zero_point_stats_impl: Component
    io_zero_point_stats_input_view_shape_impl: Component
    io_zero_point_stats_momentum: float | None

class GateAccActNames(TypedDict, total=False):
    gate_acc_about_mean: bool
    gate_acc_amax_compute_algo: Literal["max", "most_recent"]
    gate_acc_amax_history_length: int
    gate_acc_amax_of_gradient: bool
    gate_acc_averaging_impl: Component
    gate_acc_axis_name: AxisName
    gate_acc_batch_axes: tuple[int, ...]
    gate_acc_bipolar_search: bool
    gate_acc_bit_width: int
    gate_acc_bit_width_impl: Component
    gate_acc_bit_width_impl_type: BitWidthImplType
    gate_acc_block_dim: int | None
    gate_acc_block_scale_impl: Component
    gate_acc_block_width: int
    gate_acc_by_factor: bool
    gate_acc_calibration_impl: Component
    gate_acc_candidates: int
    gate_acc_cast_impl: Component
    gate_acc_channel_axes: int
    gate_acc_channel_shape: tuple[int, ...]
    gate_acc_channelwise_axes: tuple[int, ...]
    gate_acc_clip_gradient: bool
    gate_acc_codebook: Any
    gate_acc_collect_stats_steps: int
    gate_acc_collected_range: float | None
    gate_acc_collected_zero_point: float | None
    gate_acc_compute_max_mantissa: Component
    gate_acc_correction_size: int
    gate_acc_delayed: bool
    gate_acc_dq_dtype: DType
    gate_acc_dynamic_scaling_broadcastable_fn: Component
    gate_acc_exponent_bias: int
    gate_acc_exponent_bias_impl: Component
    gate_acc_exponent_bit_class: Injector
    gate_acc_exponent_bit_width: int
    gate_acc_exponent_bit_width_impl: Component
    gate_acc_exponent_bit_width_impl_type: BitWidthImplType
    gate_acc_exponent_impl: Component
    gate_acc_factor: float
    gate_acc_float_clamp_impl: Component
    gate_acc_float_scaling_impl: Component
    gate_acc_float_to_int_impl: Component
    gate_acc_float_to_int_impl_type: FloatToIntImplType
    gate_acc_folded: bool
    gate_acc_fractions: tuple[float, ...] | None
    gate_acc_gradient_mask_impl: Component
    gate_acc_group_dim: int | None
    gate_acc_group_elements_axis: int | None
    gate_acc_group_padding: bool
    gate_acc_group_size: int | tuple[int, int] | None
    gate_acc_high_percentile_q: float
    gate_acc_hqo_beta_zp: float
    gate_acc_hqo_init_op_zp: Component
    gate_acc_hqo_iters_zp: int
    gate_acc_hqo_kappa_zp: float
    gate_acc_hqo_lp_norm_zp: float
    gate_acc_inf_values: tuple[str, ...] | None
    gate_acc_inner_stats_input_view_shape_impl: Component
    gate_acc_input_view_impl: Component
    gate_acc_int_quant: Component
    gate_acc_int_scaling_impl: Component
    gate_acc_keepdim: bool
    gate_acc_keeps_infinite: bool
    gate_acc_learned_round_gamma: float
    gate_acc_learned_round_impl: Component
    gate_acc_learned_round_impl_type: LearnedRoundImplType
    gate_acc_learned_round_init: Array
    gate_acc_learned_round_temperature: float
    gate_acc_learned_round_zeta: float
    gate_acc_least_scale: float
    gate_acc_limit_steps: float
    gate_acc_low_percentile_q: float
    gate_acc_mantissa_bit_class: Injector
    gate_acc_mantissa_bit_width: int
    gate_acc_mantissa_bit_width_impl: Component
    gate_acc_mantissa_bit_width_impl_type: BitWidthImplType
    gate_acc_margin: float
    gate_acc_max_available_float: float | None
    gate_acc_max_val: float
    gate_acc_memory_shape: tuple[int, ...] | None
    gate_acc_midmax_mantissa_bit_bias: int
    gate_acc_min_bit_width: int
    gate_acc_min_val: float
    gate_acc_momentum: float | None
    gate_acc_mse_scale: Injector
    gate_acc_mse_search_method: Literal["grid", "fibonacci", "exact"]
    gate_acc_mse_zero_point: Injector
    gate_acc_nan_values: tuple[str, ...] | None
    gate_acc_narrow_range: bool
    gate_acc_noise_sharing_axes: tuple[int, ...]
    gate_acc_normal_clip: float
    gate_acc_normal_scale: float
    gate_acc_override_pretrained_bit_width: bool
    gate_acc_per_channel_broadcastable_shape: tuple[int, ...]
    gate_acc_percentile: float
    gate_acc_permute_dims: tuple[int, ...] | None
    gate_acc_power_of_two_factor: bool
    gate_acc_pre_transform: Component
    gate_acc_preserve_zero: bool
    gate_acc_proxy_class: type[QuantProxyFromInjector]
    gate_acc_q_dtype: DType
    gate_acc_quant_delay_steps: int | None
    gate_acc_quant_type: QuantType
    gate_acc_quantize_zero_point: bool
    gate_acc_random_bits: int
    gate_acc_range_steps: float | None
    gate_acc_restart: bool
    gate_acc_restrict_bit_width_impl: Component
    gate_acc_restrict_scale_positive: bool
    gate_acc_restrict_scale_threshold_impl: Component
    gate_acc_restrict_scaling_impl: Component
    gate_acc_restrict_scaling_type: RestrictValueType
    gate_acc_restrict_threshold_impl: Component
    gate_acc_restrict_value_float_to_int_impl: Component
    gate_acc_saturating: bool
    gate_acc_scale_quant: Injector
    gate_acc_scale_rounding: ScaleRounding
    gate_acc_scale_stop_grad: bool
    gate_acc_scale_to_int_impl: Component
    gate_acc_scale_to_int_impl_type: FloatToIntImplType
    gate_acc_scaling_affine_rescaling_init: float | None
    gate_acc_scaling_affine_shifting_init: float | None
    gate_acc_scaling_gradient_scale: float | None
    gate_acc_scaling_impl: Component
    gate_acc_scaling_impl_type: ScalingImplType
    gate_acc_scaling_init: Array
    gate_acc_scaling_init_impl: Component
    gate_acc_scaling_min_val: float | None
    gate_acc_scaling_per_output: ScalingPerOutputType
    gate_acc_scaling_per_output_channel: bool
    gate_acc_scaling_per_output_channel_shape: tuple[int, ...]
    gate_acc_scaling_per_output_type: ScalingPerOutputType
    gate_acc_scaling_shape: tuple[int, ...]
    gate_acc_scaling_stats_impl: Component
    gate_acc_scaling_stats_input_view_shape_impl: Component
    gate_acc_scaling_stats_momentum: float | None
    gate_acc_scaling_stats_op: StatsOp
    gate_acc_scaling_stats_permute_dims: tuple[int, ...] | None
    gate_acc_seed: int
    gate_acc_shared_axes: tuple[int, ...] | None
    gate_acc_shared_per_row: bool
    gate_acc_sigma: float
    gate_acc_signed: bool
    gate_acc_stats_impl_zp: Component
    gate_acc_stats_output_shape: tuple[int, ...]
    gate_acc_stats_reduce_dim: int | None
    gate_acc_std_dev_epsilon: float
    gate_acc_straight_through: bool
    gate_acc_tensor_clamp_impl: Component
    gate_acc_tensor_quant: Component
    gate_acc_threshold: float
    gate_acc_threshold_mixin: Injector
    gate_acc_ties: Literal["first", "shared", "near"] | None
    gate_acc_trust: float
    gate_acc_trust_steps: float
    gate_acc_undo_transform: bool
    gate_acc_zero_point_impl: Component
    gate_acc_zero_point_shape: tuple[int, ...]
    gate_acc_zero_point_stats_impl: Component
    gate_acc_zero_point_stats_input_view_shape_impl: Component
    gate_acc_zero_point_stats_momentum: float | None

class SigmoidActNames(TypedDict, total=False):
    sigmoid_about_mean: bool
    sigmoid_amax_compute_algo: Literal["max", "most_recent"]
    sigmoid_amax_history_length: int
    sigmoid_amax_of_gradient: bool
    sigmoid_averaging_impl: Component
    sigmoid_axis_name: AxisName
    sigmoid_batch_axes: tuple[int, ...]
    sigmoid_bipolar_search: bool
    sigmoid_bit_width: int
    sigmoid_bit_width_impl: Component
    sigmoid_bit_width_impl_type: BitWidthImplType
    sigmoid_block_dim: int | None
    sigmoid_block_scale_impl: Component
    sigmoid_block_width: int
    sigmoid_by_factor: bool
    sigmoid_calibration_impl: Component
    sigmoid_candidates: int
    sigmoid_cast_impl: Component
    sigmoid_channel_axes: int
    sigmoid_channel_shape: tuple[int, ...]
    sigmoid_channelwise_axes: tuple[int, ...]
    sigmoid_clip_gradient: bool
    sigmoid_codebook: Any
    sigmoid_collect_stats_steps: int
    sigmoid_collected_range: float | None
    sigmoid_collected_zero_point: float | None
    sigmoid_compute_max_mantissa: Component
    sigmoid_correction_size: int
    sigmoid_delayed: bool
    sigmoid_dq_dtype: DType
    sigmoid_dynamic_scaling_broadcastable_fn: Component
    sigmoid_exponent_bias: int
    sigmoid_exponent_bias_impl: Component
    sigmoid_exponent_bit_class: Injector
    sigmoid_exponent_bit_width: int
    sigmoid_exponent_bit_width_impl: Component
    sigmoid_exponent_bit_width_impl_type: BitWidthImplType
    sigmoid_exponent_impl: Component
    sigmoid_factor: float
    sigmoid_float_clamp_impl: Component
    sigmoid_float_scaling_impl: Component
    sigmoid_float_to_int_impl: Component
    sigmoid_float_to_int_impl_type: FloatToIntImplType
    sigmoid_folded: bool
    sigmoid_fractions: tuple[float, ...] | None
    sigmoid_gradient_mask_impl: Component
    sigmoid_group_dim: int | None
    sigmoid_group_elements_axis: int | None
    sigmoid_group_padding: bool
    sigmoid_group_size: int | tuple[int, int] | None
    sigmoid_high_percentile_q: float
    sigmoid_hqo_beta_zp: float
    sigmoid_hqo_init_op_zp: Component
    sigmoid_hqo_iters_zp: int
    sigmoid_hqo_kappa_zp: float
    sigmoid_hqo_lp_norm_zp: float
    sigmoid_inf_values: tuple[str, ...] | None
    sigmoid_inner_stats_input_view_shape_impl: Component
    sigmoid_input_view_impl: Component
    sigmoid_int_quant: Component
    sigmoid_int_scaling_impl: Component
    sigmoid_keepdim: bool
    sigmoid_keeps_infinite: bool
    sigmoid_learned_round_gamma: float
    sigmoid_learned_round_impl: Component
    sigmoid_learned_round_impl_type: LearnedRoundImplType
    sigmoid_learned_round_init: Array
    sigmoid_learned_round_temperature: float
    sigmoid_learned_round_zeta: float
    sigmoid_least_scale: float
    sigmoid_limit_steps: float
    sigmoid_low_percentile_q: float
    sigmoid_mantissa_bit_class: Injector
    sigmoid_mantissa_bit_width: int
    sigmoid_mantissa_bit_width_impl: Component
    sigmoid_mantissa_bit_width_impl_type: BitWidthImplType
    sigmoid_margin: float
    sigmoid_max_available_float: float | None
    sigmoid_max_val: float
    sigmoid_memory_shape: tuple[int, ...] | None
    sigmoid_midmax_mantissa_bit_bias: int
    sigmoid_min_bit_width: int
    sigmoid_min_val: float
    sigmoid_momentum: float | None
    sigmoid_mse_scale: Injector
    sigmoid_mse_search_method: Literal["grid", "fibonacci", "exact"]
    sigmoid_mse_zero_point: Injector
    sigmoid_nan_values: tuple[str, ...] | None
    sigmoid_narrow_range: bool
    sigmoid_noise_sharing_axes: tuple[int, ...]
    sigmoid_normal_clip: float
    sigmoid_normal_scale: float
    sigmoid_override_pretrained_bit_width: bool
    sigmoid_per_channel_broadcastable_shape: tuple[int, ...]
    sigmoid_percentile: float
    sigmoid_permute_dims: tuple[int, ...] | None
    sigmoid_power_of_two_factor: bool
    sigmoid_pre_transform: Component
    sigmoid_preserve_zero: bool
    sigmoid_proxy_class: type[QuantProxyFromInjector]
    sigmoid_q_dtype: DType
    sigmoid_quant_delay_steps: int | None
    sigmoid_quant_type: QuantType
    sigmoid_quantize_zero_point: bool
    sigmoid_random_bits: int
    sigmoid_range_steps: float | None
    sigmoid_restart: bool
    sigmoid_restrict_bit_width_impl: Component
    sigmoid_restrict_scale_positive: bool
    sigmoid_restrict_scale_threshold_impl: Component
    sigmoid_restrict_scaling_impl: Component
    sigmoid_restrict_scaling_type: RestrictValueType
    sigmoid_restrict_threshold_impl: Component
    sigmoid_restrict_value_float_to_int_impl: Component
    sigmoid_saturating: bool
    sigmoid_scale_quant: Injector
    sigmoid_scale_rounding: ScaleRounding
    sigmoid_scale_stop_grad: bool
    sigmoid_scale_to_int_impl: Component
    sigmoid_scale_to_int_impl_type: FloatToIntImplType
    sigmoid_scaling_affine_rescaling_init: float | None
    sigmoid_scaling_affine_shifting_init: float | None
    sigmoid_scaling_gradient_scale: float | None
    sigmoid_scaling_impl: Component
    sigmoid_scaling_impl_type: ScalingImplType
    sigmoid_scaling_init: Array
    sigmoid_scaling_init_impl: Component
    sigmoid_scaling_min_val: float | None
    sigmoid_scaling_per_output: ScalingPerOutputType
    sigmoid_scaling_per_output_channel: bool
    sigmoid_scaling_per_output_channel_shape: tuple[int, ...]
    sigmoid_scaling_per_output_type: ScalingPerOutputType
    sigmoid_scaling_shape: tuple[int, ...]
    sigmoid_scaling_stats_impl: Component
    sigmoid_scaling_stats_input_view_shape_impl: Component
    sigmoid_scaling_stats_momentum: float | None
    sigmoid_scaling_stats_op: StatsOp
    sigmoid_scaling_stats_permute_dims: tuple[int, ...] | None
    sigmoid_seed: int
    sigmoid_shared_axes: tuple[int, ...] | None
    sigmoid_shared_per_row: bool
    sigmoid_sigma: float
    sigmoid_signed: bool
    sigmoid_stats_impl_zp: Component
    sigmoid_stats_output_shape: tuple[int, ...]
    sigmoid_stats_reduce_dim: int | None
    sigmoid_std_dev_epsilon: float
    sigmoid_straight_through: bool
    sigmoid_tensor_clamp_impl: Component
    sigmoid_tensor_quant: Component
    sigmoid_threshold: float
    sigmoid_threshold_mixin: Injector
    sigmoid_ties: Literal["first", "shared", "near"] | None
    sigmoid_trust: float
    sigmoid_trust_steps: float
    sigmoid_undo_transform: bool
    sigmoid_zero_point_impl: Component
    sigmoid_zero_point_shape: tuple[int, ...]
    sigmoid_zero_point_stats_impl: Component
    sigmoid_zero_point_stats_input_view_shape_impl: Component
    sigmoid_zero_point_stats_momentum: float | None

class TanhActNames(TypedDict, total=False):
    tanh_about_mean: bool
    tanh_amax_compute_algo: Literal["max", "most_recent"]
    tanh_amax_history_length: int
    tanh_amax_of_gradient: bool
    tanh_averaging_impl: Component
    tanh_axis_name: AxisName
    tanh_batch_axes: tuple[int, ...]
    tanh_bipolar_search: bool
    tanh_bit_width: int
    tanh_bit_width_impl: Component
    tanh_bit_width_impl_type: BitWidthImplType
    tanh_block_dim: int | None
    tanh_block_scale_impl: Component
    tanh_block_width: int
    tanh_by_factor: bool
    tanh_calibration_impl: Component
    tanh_candidates: int
    tanh_cast_impl: Component
    tanh_channel_axes: int
    tanh_channel_shape: tuple[int, ...]
    tanh_channelwise_axes: tuple[int, ...]
    tanh_clip_gradient: bool
    tanh_codebook: Any
    tanh_collect_stats_steps: int
    tanh_collected_range: float | None
    tanh_collected_zero_point: float | None
    tanh_compute_max_mantissa: Component
    tanh_correction_size: int
    tanh_delayed: bool
    tanh_dq_dtype: DType
    tanh_dynamic_scaling_broadcastable_fn: Component
    tanh_exponent_bias: int
    tanh_exponent_bias_impl: Component
    tanh_exponent_bit_class: Injector
    tanh_exponent_bit_width: int
    tanh_exponent_bit_width_impl: Component
    tanh_exponent_bit_width_impl_type: BitWidthImplType
    tanh_exponent_impl: Component
    tanh_factor: float
    tanh_float_clamp_impl: Component
    tanh_float_scaling_impl: Component
    tanh_float_to_int_impl: Component
    tanh_float_to_int_impl_type: FloatToIntImplType
    tanh_folded: bool
    tanh_fractions: tuple[float, ...] | None
    tanh_gradient_mask_impl: Component
    tanh_group_dim: int | None
    tanh_group_elements_axis: int | None
    tanh_group_padding: bool
    tanh_group_size: int | tuple[int, int] | None
    tanh_high_percentile_q: float
    tanh_hqo_beta_zp: float
    tanh_hqo_init_op_zp: Component
    tanh_hqo_iters_zp: int
    tanh_hqo_kappa_zp: float
    tanh_hqo_lp_norm_zp: float
    tanh_inf_values: tuple[str, ...] | None
    tanh_inner_stats_input_view_shape_impl: Component
    tanh_input_view_impl: Component
    tanh_int_quant: Component
    tanh_int_scaling_impl: Component
    tanh_keepdim: bool
    tanh_keeps_infinite: bool
    tanh_learned_round_gamma: float
    tanh_learned_round_impl: Component
    tanh_learned_round_impl_type: LearnedRoundImplType
    tanh_learned_round_init: Array
    tanh_learned_round_temperature: float
    tanh_learned_round_zeta: float
    tanh_least_scale: float
    tanh_limit_steps: float
    tanh_low_percentile_q: float
    tanh_mantissa_bit_class: Injector
    tanh_mantissa_bit_width: int
    tanh_mantissa_bit_width_impl: Component
    tanh_mantissa_bit_width_impl_type: BitWidthImplType
    tanh_margin: float
    tanh_max_available_float: float | None
    tanh_max_val: float
    tanh_memory_shape: tuple[int, ...] | None
    tanh_midmax_mantissa_bit_bias: int
    tanh_min_bit_width: int
    tanh_min_val: float
    tanh_momentum: float | None
    tanh_mse_scale: Injector
    tanh_mse_search_method: Literal["grid", "fibonacci", "exact"]
    tanh_mse_zero_point: Injector
    tanh_nan_values: tuple[str, ...] | None
    tanh_narrow_range: bool
    tanh_noise_sharing_axes: tuple[int, ...]
    tanh_normal_clip: float
    tanh_normal_scale: float
    tanh_override_pretrained_bit_width: bool
    tanh_per_channel_broadcastable_shape: tuple[int, ...]
    tanh_percentile: float
    tanh_permute_dims: tuple[int, ...] | None
    tanh_power_of_two_factor: bool
    tanh_pre_transform: Component
    tanh_preserve_zero: bool
    tanh_proxy_class: type[QuantProxyFromInjector]
    tanh_q_dtype: DType
    tanh_quant_delay_steps: int | None
    tanh_quant_type: QuantType
    tanh_quantize_zero_point: bool
    tanh_random_bits: int
    tanh_range_steps: float | None
    tanh_restart: bool
    tanh_restrict_bit_width_impl: Component
    tanh_restrict_scale_positive: bool
    tanh_restrict_scale_threshold_impl: Component
    tanh_restrict_scaling_impl: Component
    tanh_restrict_scaling_type: RestrictValueType
    tanh_restrict_threshold_impl: Component
    tanh_restrict_value_float_to_int_impl: Component
    tanh_saturating: bool
    tanh_scale_quant: Injector
    tanh_scale_rounding: ScaleRounding
    tanh_scale_stop_grad: bool
    tanh_scale_to_int_impl: Component
    tanh_scale_to_int_impl_type: FloatToIntImplType
    tanh_scaling_affine_rescaling_init: float | None
    tanh_scaling_affine_shifting_init: float | None
    tanh_scaling_gradient_scale: float | None
    tanh_scaling_impl: Component
    tanh_scaling_impl_type: ScalingImplType
    tanh_scaling_init: Array
    tanh_scaling_init_impl: Component
    tanh_scaling_min_val: float | None
    tanh_scaling_per_output: ScalingPerOutputType
    tanh_scaling_per_output_channel: bool
    tanh_scaling_per_output_channel_shape: tuple[int, ...]
    tanh_scaling_per_output_type: ScalingPerOutputType
    tanh_scaling_shape: tuple[int, ...]
    tanh_scaling_stats_impl: Component
    tanh_scaling_stats_input_view_shape_impl: Component
    tanh_scaling_stats_momentum: float | None
    tanh_scaling_stats_op: StatsOp
    tanh_scaling_stats_permute_dims: tuple[int, ...] | None
    tanh_seed: int
    tanh_shared_axes: tuple[int, ...] | None
    tanh_shared_per_row: bool
    tanh_sigma: float
    tanh_signed: bool
    tanh_stats_impl_zp: Component
    tanh_stats_output_shape: tuple[int, ...]
    tanh_stats_reduce_dim: int | None
    tanh_std_dev_epsilon: float
    tanh_straight_through: bool
    tanh_tensor_clamp_impl: Component
    tanh_tensor_quant: Component
    tanh_threshold: float
    tanh_threshold_mixin: Injector
    tanh_ties: Literal["first", "shared", "near"] | None
    tanh_trust: float
    tanh_trust_steps: float
    tanh_undo_transform: bool
    tanh_zero_point_impl: Component
    tanh_zero_point_shape: tuple[int, ...]
    tanh_zero_point_stats_impl: Component
    tanh_zero_point_stats_input_view_shape_impl: Component
    tanh_zero_point_stats_momentum: float | None

class CellStateActNames(TypedDict, total=False):
    cell_state_about_mean: bool
    cell_state_amax_compute_algo: Literal["max", "most_recent"]
    cell_state_amax_history_length: int
    cell_state_amax_of_gradient: bool
    cell_state_averaging_impl: Component
    cell_state_axis_name: AxisName
    cell_state_batch_axes: tuple[int, ...]
    cell_state_bipolar_search: bool
    cell_state_bit_width: int
    cell_state_bit_width_impl: Component
    cell_state_bit_width_impl_type: BitWidthImplType
    cell_state_block_dim: int | None
    cell_state_block_scale_impl: Component
    cell_state_block_width: int
    cell_state_by_factor: bool
    cell_state_calibration_impl: Component
    cell_state_candidates: int
    cell_state_cast_impl: Component
    cell_state_channel_axes: int
    cell_state_channel_shape: tuple[int, ...]
    cell_state_channelwise_axes: tuple[int, ...]
    cell_state_clip_gradient: bool
    cell_state_codebook: Any
    cell_state_collect_stats_steps: int
    cell_state_collected_range: float | None
    cell_state_collected_zero_point: float | None
    cell_state_compute_max_mantissa: Component
    cell_state_correction_size: int
    cell_state_delayed: bool
    cell_state_dq_dtype: DType
    cell_state_dynamic_scaling_broadcastable_fn: Component
    cell_state_exponent_bias: int
    cell_state_exponent_bias_impl: Component
    cell_state_exponent_bit_class: Injector
    cell_state_exponent_bit_width: int
    cell_state_exponent_bit_width_impl: Component
    cell_state_exponent_bit_width_impl_type: BitWidthImplType
    cell_state_exponent_impl: Component
    cell_state_factor: float
    cell_state_float_clamp_impl: Component
    cell_state_float_scaling_impl: Component
    cell_state_float_to_int_impl: Component
    cell_state_float_to_int_impl_type: FloatToIntImplType
    cell_state_folded: bool
    cell_state_fractions: tuple[float, ...] | None
    cell_state_gradient_mask_impl: Component
    cell_state_group_dim: int | None
    cell_state_group_elements_axis: int | None
    cell_state_group_padding: bool
    cell_state_group_size: int | tuple[int, int] | None
    cell_state_high_percentile_q: float
    cell_state_hqo_beta_zp: float
    cell_state_hqo_init_op_zp: Component
    cell_state_hqo_iters_zp: int
    cell_state_hqo_kappa_zp: float
    cell_state_hqo_lp_norm_zp: float
    cell_state_inf_values: tuple[str, ...] | None
    cell_state_inner_stats_input_view_shape_impl: Component
    cell_state_input_view_impl: Component
    cell_state_int_quant: Component
    cell_state_int_scaling_impl: Component
    cell_state_keepdim: bool
    cell_state_keeps_infinite: bool
    cell_state_learned_round_gamma: float
    cell_state_learned_round_impl: Component
    cell_state_learned_round_impl_type: LearnedRoundImplType
    cell_state_learned_round_init: Array
    cell_state_learned_round_temperature: float
    cell_state_learned_round_zeta: float
    cell_state_least_scale: float
    cell_state_limit_steps: float
    cell_state_low_percentile_q: float
    cell_state_mantissa_bit_class: Injector
    cell_state_mantissa_bit_width: int
    cell_state_mantissa_bit_width_impl: Component
    cell_state_mantissa_bit_width_impl_type: BitWidthImplType
    cell_state_margin: float
    cell_state_max_available_float: float | None
    cell_state_max_val: float
    cell_state_memory_shape: tuple[int, ...] | None
    cell_state_midmax_mantissa_bit_bias: int
    cell_state_min_bit_width: int
    cell_state_min_val: float
    cell_state_momentum: float | None
    cell_state_mse_scale: Injector
    cell_state_mse_search_method: Literal["grid", "fibonacci", "exact"]
    cell_state_mse_zero_point: Injector
    cell_state_nan_values: tuple[str, ...] | None
    cell_state_narrow_range: bool
    cell_state_noise_sharing_axes: tuple[int, ...]
    cell_state_normal_clip: float
    cell_state_normal_scale: float
    cell_state_override_pretrained_bit_width: bool
    cell_state_per_channel_broadcastable_shape: tuple[int, ...]
    cell_state_percentile: float
    cell_state_permute_dims: tuple[int, ...] | None
    cell_state_power_of_two_factor: bool
    cell_state_pre_transform: Component
    cell_state_preserve_zero: bool
    cell_state_proxy_class: type[QuantProxyFromInjector]
    cell_state_q_dtype: DType
    cell_state_quant_delay_steps: int | None
    cell_state_quant_type: QuantType
    cell_state_quantize_zero_point: bool
    cell_state_random_bits: int
    cell_state_range_steps: float | None
    cell_state_restart: bool
    cell_state_restrict_bit_width_impl: Component
    cell_state_restrict_scale_positive: bool
    cell_state_restrict_scale_threshold_impl: Component
    cell_state_restrict_scaling_impl: Component
    cell_state_restrict_scaling_type: RestrictValueType
    cell_state_restrict_threshold_impl: Component
    cell_state_restrict_value_float_to_int_impl: Component
    cell_state_saturating: bool
    cell_state_scale_quant: Injector
    cell_state_scale_rounding: ScaleRounding
    cell_state_scale_stop_grad: bool
    cell_state_scale_to_int_impl: Component
    cell_state_scale_to_int_impl_type: FloatToIntImplType
    cell_state_scaling_affine_rescaling_init: float | None
    cell_state_scaling_affine_shifting_init: float | None
    cell_state_scaling_gradient_scale: float | None
    cell_state_scaling_impl: Component
    cell_state_scaling_impl_type: ScalingImplType
    cell_state_scaling_init: Array
    cell_state_scaling_init_impl: Component
    cell_state_scaling_min_val: float | None
    cell_state_scaling_per_output: ScalingPerOutputType
    cell_state_scaling_per_output_channel: bool
    cell_state_scaling_per_output_channel_shape: tuple[int, ...]
    cell_state_scaling_per_output_type: ScalingPerOutputType
    cell_state_scaling_shape: tuple[int, ...]
    cell_state_scaling_stats_impl: Component
    cell_state_scaling_stats_input_view_shape_impl: Component
    cell_state_scaling_stats_momentum: float | None
    cell_state_scaling_stats_op: StatsOp
    cell_state_scaling_stats_permute_dims: tuple[int, ...] | None
    cell_state_seed: int
    cell_state_shared_axes: tuple[int, ...] | None
    cell_state_shared_per_row: bool
    cell_state_sigma: float
    cell_state_signed: bool
    cell_state_stats_impl_zp: Component
    cell_state_stats_output_shape: tuple[int, ...]
    cell_state_stats_reduce_dim: int | None
    cell_state_std_dev_epsilon: float
    cell_state_straight_through: bool
    cell_state_tensor_clamp_impl: Component
    cell_state_tensor_quant: Component
    cell_state_threshold: float
    cell_state_threshold_mixin: Injector
    cell_state_ties: Literal["first", "shared", "near"] | None
    cell_state_trust: float
    cell_state_trust_steps: float
    cell_state_undo_transform: bool
    cell_state_zero_point_impl: Component
    cell_state_zero_point_shape: tuple[int, ...]
    cell_state_zero_point_stats_impl: Component
    cell_state_zero_point_stats_input_view_shape_impl: Component
    cell_state_zero_point_stats_momentum: float | None

class InProjInputActNames(TypedDict, total=False):
    in_proj_input_about_mean: bool
    in_proj_input_amax_compute_algo: Literal["max", "most_recent"]
    in_proj_input_amax_history_length: int
    in_proj_input_amax_of_gradient: bool
    in_proj_input_averaging_impl: Component
    in_proj_input_axis_name: AxisName
    in_proj_input_batch_axes: tuple[int, ...]
    in_proj_input_bipolar_search: bool
    in_proj_input_bit_width: int
    in_proj_input_bit_width_impl: Component
    in_proj_input_bit_width_impl_type: BitWidthImplType
    in_proj_input_block_dim: int | None
    in_proj_input_block_scale_impl: Component
    in_proj_input_block_width: int
    in_proj_input_by_factor: bool
    in_proj_input_calibration_impl: Component
    in_proj_input_candidates: int
    in_proj_input_cast_impl: Component
    in_proj_input_channel_axes: int
    in_proj_input_channel_shape: tuple[int, ...]
    in_proj_input_channelwise_axes: tuple[int, ...]
    in_proj_input_clip_gradient: bool
    in_proj_input_codebook: Any
    in_proj_input_collect_stats_steps: int
    in_proj_input_collected_range: float | None
    in_proj_input_collected_zero_point: float | None
    in_proj_input_compute_max_mantissa: Component
    in_proj_input_correction_size: int
    in_proj_input_delayed: bool
    in_proj_input_dq_dtype: DType
    in_proj_input_dynamic_scaling_broadcastable_fn: Component
    in_proj_input_exponent_bias: int
    in_proj_input_exponent_bias_impl: Component
    in_proj_input_exponent_bit_class: Injector
    in_proj_input_exponent_bit_width: int
    in_proj_input_exponent_bit_width_impl: Component
    in_proj_input_exponent_bit_width_impl_type: BitWidthImplType
    in_proj_input_exponent_impl: Component
    in_proj_input_factor: float
    in_proj_input_float_clamp_impl: Component
    in_proj_input_float_scaling_impl: Component
    in_proj_input_float_to_int_impl: Component
    in_proj_input_float_to_int_impl_type: FloatToIntImplType
    in_proj_input_folded: bool
    in_proj_input_fractions: tuple[float, ...] | None
    in_proj_input_gradient_mask_impl: Component
    in_proj_input_group_dim: int | None
    in_proj_input_group_elements_axis: int | None
    in_proj_input_group_padding: bool
    in_proj_input_group_size: int | tuple[int, int] | None
    in_proj_input_high_percentile_q: float
    in_proj_input_hqo_beta_zp: float
    in_proj_input_hqo_init_op_zp: Component
    in_proj_input_hqo_iters_zp: int
    in_proj_input_hqo_kappa_zp: float
    in_proj_input_hqo_lp_norm_zp: float
    in_proj_input_inf_values: tuple[str, ...] | None
    in_proj_input_inner_stats_input_view_shape_impl: Component
    in_proj_input_input_view_impl: Component
    in_proj_input_int_quant: Component
    in_proj_input_int_scaling_impl: Component
    in_proj_input_keepdim: bool
    in_proj_input_keeps_infinite: bool
    in_proj_input_learned_round_gamma: float
    in_proj_input_learned_round_impl: Component
    in_proj_input_learned_round_impl_type: LearnedRoundImplType
    in_proj_input_learned_round_init: Array
    in_proj_input_learned_round_temperature: float
    in_proj_input_learned_round_zeta: float
    in_proj_input_least_scale: float
    in_proj_input_limit_steps: float
    in_proj_input_low_percentile_q: float
    in_proj_input_mantissa_bit_class: Injector
    in_proj_input_mantissa_bit_width: int
    in_proj_input_mantissa_bit_width_impl: Component
    in_proj_input_mantissa_bit_width_impl_type: BitWidthImplType
    in_proj_input_margin: float
    in_proj_input_max_available_float: float | None
    in_proj_input_max_val: float
    in_proj_input_memory_shape: tuple[int, ...] | None
    in_proj_input_midmax_mantissa_bit_bias: int
    in_proj_input_min_bit_width: int
    in_proj_input_min_val: float
    in_proj_input_momentum: float | None
    in_proj_input_mse_scale: Injector
    in_proj_input_mse_search_method: Literal["grid", "fibonacci", "exact"]
    in_proj_input_mse_zero_point: Injector
    in_proj_input_nan_values: tuple[str, ...] | None
    in_proj_input_narrow_range: bool
    in_proj_input_noise_sharing_axes: tuple[int, ...]
    in_proj_input_normal_clip: float
    in_proj_input_normal_scale: float
    in_proj_input_override_pretrained_bit_width: bool
    in_proj_input_per_channel_broadcastable_shape: tuple[int, ...]
    in_proj_input_percentile: float
    in_proj_input_permute_dims: tuple[int, ...] | None
    in_proj_input_power_of_two_factor: bool
    in_proj_input_pre_transform: Component
    in_proj_input_preserve_zero: bool
    in_proj_input_proxy_class: type[QuantProxyFromInjector]
    in_proj_input_q_dtype: DType
    in_proj_input_quant_delay_steps: int | None
    in_proj_input_quant_type: QuantType
    in_proj_input_quantize_zero_point: bool
    in_proj_input_random_bits: int
    in_proj_input_range_steps: float | None
    in_proj_input_restart: bool
    in_proj_input_restrict_bit_width_impl: Component
    in_proj_input_restrict_scale_positive: bool
    in_proj_input_restrict_scale_threshold_impl: Component
    in_proj_input_restrict_scaling_impl: Component
    in_proj_input_restrict_scaling_type: RestrictValueType
    in_proj_input_restrict_threshold_impl: Component
    in_proj_input_restrict_value_float_to_int_impl: Component
    in_proj_input_saturating: bool
    in_proj_input_scale_quant: Injector
    in_proj_input_scale_rounding: ScaleRounding
    in_proj_input_scale_stop_grad: bool
    in_proj_input_scale_to_int_impl: Component
    in_proj_input_scale_to_int_impl_type: FloatToIntImplType
    in_proj_input_scaling_affine_rescaling_init: float | None
    in_proj_input_scaling_affine_shifting_init: float | None
    in_proj_input_scaling_gradient_scale: float | None
    in_proj_input_scaling_impl: Component
    in_proj_input_scaling_impl_type: ScalingImplType
    in_proj_input_scaling_init: Array
    in_proj_input_scaling_init_impl: Component
    in_proj_input_scaling_min_val: float | None
    in_proj_input_scaling_per_output: ScalingPerOutputType
    in_proj_input_scaling_per_output_channel: bool
    in_proj_input_scaling_per_output_channel_shape: tuple[int, ...]
    in_proj_input_scaling_per_output_type: ScalingPerOutputType
    in_proj_input_scaling_shape: tuple[int, ...]
    in_proj_input_scaling_stats_impl: Component
    in_proj_input_scaling_stats_input_view_shape_impl: Component
    in_proj_input_scaling_stats_momentum: float | None
    in_proj_input_scaling_stats_op: StatsOp
    in_proj_input_scaling_stats_permute_dims: tuple[int, ...] | None
    in_proj_input_seed: int
    in_proj_input_shared_axes: tuple[int, ...] | None
    in_proj_input_shared_per_row: bool
    in_proj_input_sigma: float
    in_proj_input_signed: bool
    in_proj_input_stats_impl_zp: Component
    in_proj_input_stats_output_shape: tuple[int, ...]
    in_proj_input_stats_reduce_dim: int | None
    in_proj_input_std_dev_epsilon: float
    in_proj_input_straight_through: bool
    in_proj_input_tensor_clamp_impl: Component
    in_proj_input_tensor_quant: Component
    in_proj_input_threshold: float
    in_proj_input_threshold_mixin: Injector
    in_proj_input_ties: Literal["first", "shared", "near"] | None
    in_proj_input_trust: float
    in_proj_input_trust_steps: float
    in_proj_input_undo_transform: bool
    in_proj_input_zero_point_impl: Component
    in_proj_input_zero_point_shape: tuple[int, ...]
    in_proj_input_zero_point_stats_impl: Component
    in_proj_input_zero_point_stats_input_view_shape_impl: Component
    in_proj_input_zero_point_stats_momentum: float | None

class InProjWeightWeightNames(TypedDict, total=False):
    in_proj_weight_about_mean: bool
    in_proj_weight_accumulator_bit_width: int
    in_proj_weight_accumulator_bit_width_impl: Component
    in_proj_weight_amax_compute_algo: Literal["max", "most_recent"]
    in_proj_weight_amax_history_length: int
    in_proj_weight_amax_of_gradient: bool
    in_proj_weight_averaging_impl: Component
    in_proj_weight_axis_name: AxisName
    in_proj_weight_batch_axes: tuple[int, ...]
    in_proj_weight_bipolar_search: bool
    in_proj_weight_bit_width: int
    in_proj_weight_bit_width_impl: Component
    in_proj_weight_bit_width_impl_type: BitWidthImplType
    in_proj_weight_block_dim: int | None
    in_proj_weight_block_scale_impl: Component
    in_proj_weight_block_width: int
    in_proj_weight_by_factor: bool
    in_proj_weight_calibration_impl: Component
    in_proj_weight_cast_impl: Component
    in_proj_weight_channel_axes: int
    in_proj_weight_channel_shape: tuple[int, ...]
    in_proj_weight_channelwise_axes: tuple[int, ...]
    in_proj_weight_clip_gradient: bool
    in_proj_weight_codebook: Any
    in_proj_weight_compute_max_mantissa: Component
    in_proj_weight_decoupled_int_quant: Component
    in_proj_weight_delayed: bool
    in_proj_weight_dq_dtype: DType
    in_proj_weight_expanded_groupwise_shape: tuple[int, ...]
    in_proj_weight_exponent_bias: int
    in_proj_weight_exponent_bias_impl: Component
    in_proj_weight_exponent_bit_class: Injector
    in_proj_weight_exponent_bit_width: int
    in_proj_weight_exponent_bit_width_impl: Component
    in_proj_weight_exponent_bit_width_impl_type: BitWidthImplType
    in_proj_weight_exponent_impl: Component
    in_proj_weight_factor: float
    in_proj_weight_float_clamp_impl: Component
    in_proj_weight_float_scaling_impl: Component
    in_proj_weight_float_to_int_impl: Component
    in_proj_weight_float_to_int_impl_type: FloatToIntImplType
    in_proj_weight_folded: bool
    in_proj_weight_force_parameter: bool
    in_proj_weight_gradient_mask_impl: Component
    in_proj_weight_group_dim: int | None
    in_proj_weight_group_elements_axis: int | None
    in_proj_weight_group_padding: bool
    in_proj_weight_group_size: int | tuple[int, int] | None
    in_proj_weight_high_percentile_q: float
    in_proj_weight_hqo_beta_scale: float
    in_proj_weight_hqo_beta_zp: float
    in_proj_weight_hqo_init_op_scale: Component
    in_proj_weight_hqo_init_op_zp: Component
    in_proj_weight_hqo_iters_scale: int
    in_proj_weight_hqo_iters_zp: int
    in_proj_weight_hqo_kappa_scale: float
    in_proj_weight_hqo_kappa_zp: float
    in_proj_weight_hqo_lp_norm_scale: float
    in_proj_weight_hqo_lp_norm_zp: float
    in_proj_weight_inf_values: tuple[str, ...] | None
    in_proj_weight_inner_stats_input_view_shape_impl: Component
    in_proj_weight_input_view_impl: Component
    in_proj_weight_int_quant: Component
    in_proj_weight_int_scaling_impl: Component
    in_proj_weight_keepdim: bool
    in_proj_weight_keeps_infinite: bool
    in_proj_weight_learned_round_gamma: float
    in_proj_weight_learned_round_impl: Component
    in_proj_weight_learned_round_impl_type: LearnedRoundImplType
    in_proj_weight_learned_round_init: Array
    in_proj_weight_learned_round_temperature: float
    in_proj_weight_learned_round_zeta: float
    in_proj_weight_limit_steps: float
    in_proj_weight_low_percentile_q: float
    in_proj_weight_mantissa_bit_class: Injector
    in_proj_weight_mantissa_bit_width: int
    in_proj_weight_mantissa_bit_width_impl: Component
    in_proj_weight_mantissa_bit_width_impl_type: BitWidthImplType
    in_proj_weight_margin: float
    in_proj_weight_max_available_float: float | None
    in_proj_weight_memory_shape: tuple[int, ...] | None
    in_proj_weight_midmax_mantissa_bit_bias: int
    in_proj_weight_min_bit_width: int
    in_proj_weight_mse_scale: Injector
    in_proj_weight_mse_search_method: Literal["grid", "fibonacci", "exact"]
    in_proj_weight_mse_zero_point: Injector
    in_proj_weight_nan_values: tuple[str, ...] | None
    in_proj_weight_narrow_range: bool
    in_proj_weight_noise_sharing_axes: tuple[int, ...]
    in_proj_weight_normal_clip: float
    in_proj_weight_normal_scale: float
    in_proj_weight_normalize_stats_impl: Component
    in_proj_weight_out_channels: int
    in_proj_weight_output_channel_dim: int | tuple[int, ...]
    in_proj_weight_override_pretrained_bit_width: bool
    in_proj_weight_per_channel_pre_norm: Injector
    in_proj_weight_permute_dims: tuple[int, ...] | None
    in_proj_weight_power_of_two_factor: bool
    in_proj_weight_pre_scaling_impl: Component
    in_proj_weight_pre_scaling_min_val: float | None
    in_proj_weight_pre_scaling_shape: tuple[int, ...]
    in_proj_weight_pre_zero_point_impl: Component
    in_proj_weight_proxy_class: type[QuantProxyFromInjector]
    in_proj_weight_q_dtype: DType
    in_proj_weight_quant_delay_steps: int | None
    in_proj_weight_quant_type: QuantType
    in_proj_weight_quantize_zero_point: bool
    in_proj_weight_quantized_shape: tuple[int, ...]
    in_proj_weight_random_bits: int
    in_proj_weight_range_steps: float | None
    in_proj_weight_restrict_bit_width_impl: Component
    in_proj_weight_restrict_pre_scaling_impl: Component
    in_proj_weight_restrict_scale_positive: bool
    in_proj_weight_restrict_scale_threshold_impl: Component
    in_proj_weight_restrict_scaling_impl: Component
    in_proj_weight_restrict_scaling_type: RestrictValueType
    in_proj_weight_restrict_threshold_impl: Component
    in_proj_weight_restrict_value_float_to_int_impl: Component
    in_proj_weight_saturating: bool
    in_proj_weight_scale_quant: Injector
    in_proj_weight_scale_rounding: ScaleRounding
    in_proj_weight_scale_shift_zero_point_impl: Component
    in_proj_weight_scale_stop_grad: bool
    in_proj_weight_scaling_affine_rescaling_init: float | None
    in_proj_weight_scaling_affine_shifting_init: float | None
    in_proj_weight_scaling_const: float
    in_proj_weight_scaling_gradient_scale: float | None
    in_proj_weight_scaling_impl: Component
    in_proj_weight_scaling_impl_type: ScalingImplType
    in_proj_weight_scaling_init: Array
    in_proj_weight_scaling_init_impl: Component
    in_proj_weight_scaling_min_val: float | None
    in_proj_weight_scaling_per_group_shape: tuple[int, ...]
    in_proj_weight_scaling_per_output: ScalingPerOutputType
    in_proj_weight_scaling_per_output_channel: bool
    in_proj_weight_scaling_per_output_channel_shape: tuple[int, ...]
    in_proj_weight_scaling_per_output_type: ScalingPerOutputType
    in_proj_weight_scaling_shape: tuple[int, ...]
    in_proj_weight_scaling_stats_impl: Component
    in_proj_weight_scaling_stats_input_concat_dim: int
    in_proj_weight_scaling_stats_input_view_shape_impl: Component
    in_proj_weight_scaling_stats_op: StatsOp
    in_proj_weight_seed: int
    in_proj_weight_shared_axes: tuple[int, ...] | None
    in_proj_weight_shared_per_row: bool
    in_proj_weight_sigma: float
    in_proj_weight_signed: bool
    in_proj_weight_stats_impl_scale: Component
    in_proj_weight_stats_impl_zp: Component
    in_proj_weight_stats_output_shape: tuple[int, ...]
    in_proj_weight_stats_reduce_dim: int | None
    in_proj_weight_std_dev_epsilon: float
    in_proj_weight_straight_through: bool
    in_proj_weight_tensor_clamp_impl: Component
    in_proj_weight_tensor_quant: Component
    in_proj_weight_threshold: float
    in_proj_weight_threshold_mixin: Injector
    in_proj_weight_ties: Literal["first", "shared", "near"] | None
    in_proj_weight_trust: float
    in_proj_weight_trust_steps: float
    in_proj_weight_upstream_shape: tuple[int, ...]
    in_proj_weight_zero_point_affine_rescaling_init: float | None
    in_proj_weight_zero_point_affine_shifting_init: float | None
    in_proj_weight_zero_point_impl: Component
    in_proj_weight_zero_point_shape: tuple[int, ...]
    in_proj_weight_zero_point_stats_impl: Component
    in_proj_weight_zero_point_stats_input_concat_dim: int
    in_proj_weight_zero_point_stats_input_view_shape_impl: Component

class InProjBiasBiasNames(TypedDict, total=False):
    in_proj_bias_about_mean: bool
    in_proj_bias_axis_name: AxisName
    in_proj_bias_bit_width: int
    in_proj_bias_bit_width_impl: Component
    in_proj_bias_bit_width_impl_type: BitWidthImplType
    in_proj_bias_channel_axes: int
    in_proj_bias_channel_shape: tuple[int, ...]
    in_proj_bias_exponent_impl: Component
    in_proj_bias_factor: float
    in_proj_bias_float_to_int_impl: Component
    in_proj_bias_float_to_int_impl_type: FloatToIntImplType
    in_proj_bias_force_parameter: bool
    in_proj_bias_group_dim: int | None
    in_proj_bias_group_elements_axis: int | None
    in_proj_bias_high_percentile_q: float
    in_proj_bias_input_view_impl: Component
    in_proj_bias_int_quant: Component
    in_proj_bias_int_scaling_impl: Component
    in_proj_bias_keepdim: bool
    in_proj_bias_learned_round_gamma: float
    in_proj_bias_learned_round_impl: Component
    in_proj_bias_learned_round_impl_type: LearnedRoundImplType
    in_proj_bias_learned_round_init: Array
    in_proj_bias_learned_round_temperature: float
    in_proj_bias_learned_round_zeta: float
    in_proj_bias_low_percentile_q: float
    in_proj_bias_min_bit_width: int
    in_proj_bias_narrow_range: bool
    in_proj_bias_noise_sharing_axes: tuple[int, ...]
    in_proj_bias_output_channel_dim: int | tuple[int, ...]
    in_proj_bias_override_pretrained_bit_width: bool
    in_proj_bias_permute_dims: tuple[int, ...] | None
    in_proj_bias_proxy_class: type[QuantProxyFromInjector]
    in_proj_bias_quant_delay_steps: int | None
    in_proj_bias_quant_type: QuantType
    in_proj_bias_random_bits: int
    in_proj_bias_requires_input_scale: bool
    in_proj_bias_restrict_bit_width_impl: Component
    in_proj_bias_restrict_scale_threshold_impl: Component
    in_proj_bias_restrict_scaling_impl: Component
    in_proj_bias_restrict_scaling_type: RestrictValueType
    in_proj_bias_restrict_threshold_impl: Component
    in_proj_bias_restrict_value_float_to_int_impl: Component
    in_proj_bias_scale_rounding: ScaleRounding
    in_proj_bias_scaling_affine_rescaling_init: float | None
    in_proj_bias_scaling_affine_shifting_init: float | None
    in_proj_bias_scaling_const: float
    in_proj_bias_scaling_impl: Component
    in_proj_bias_scaling_impl_type: ScalingImplType
    in_proj_bias_scaling_init: Array
    in_proj_bias_scaling_init_impl: Component
    in_proj_bias_scaling_min_val: float | None
    in_proj_bias_scaling_per_output: ScalingPerOutputType
    in_proj_bias_scaling_per_output_channel: bool
    in_proj_bias_scaling_per_output_channel_shape: tuple[int, ...]
    in_proj_bias_scaling_per_output_type: ScalingPerOutputType
    in_proj_bias_scaling_shape: tuple[int, ...]
    in_proj_bias_scaling_stats_impl: Component
    in_proj_bias_scaling_stats_input_concat_dim: int
    in_proj_bias_scaling_stats_input_view_shape_impl: Component
    in_proj_bias_scaling_stats_op: StatsOp
    in_proj_bias_scaling_stats_permute_dims: tuple[int, ...] | None
    in_proj_bias_seed: int
    in_proj_bias_sigma: float
    in_proj_bias_signed: bool
    in_proj_bias_stats_output_shape: tuple[int, ...]
    in_proj_bias_stats_reduce_dim: int | None
    in_proj_bias_std_dev_epsilon: float
    in_proj_bias_tensor_clamp_impl: Component
    in_proj_bias_tensor_quant: Component
    in_proj_bias_ties: Literal["first", "shared", "near"] | None
    in_proj_bias_zero_point_impl: Component

class InProjGradGradNames(TypedDict, total=False):
    in_proj_grad_about_mean: bool
    in_proj_grad_amax_compute_algo: Literal["max", "most_recent"]
    in_proj_grad_amax_history_length: int
    in_proj_grad_amax_of_gradient: bool
    in_proj_grad_axis_name: AxisName
    in_proj_grad_bipolar_search: bool
    in_proj_grad_bit_width: int
    in_proj_grad_bit_width_impl: Component
    in_proj_grad_bit_width_impl_type: BitWidthImplType
    in_proj_grad_block_dim: int | None
    in_proj_grad_block_scale_impl: Component
    in_proj_grad_block_width: int
    in_proj_grad_by_factor: bool
    in_proj_grad_cast_impl: Component
    in_proj_grad_channel_axes: int
    in_proj_grad_channel_shape: tuple[int, ...]
    in_proj_grad_compute_max_mantissa: Component
    in_proj_grad_correction_size: int
    in_proj_grad_delayed: bool
    in_proj_grad_dq_dtype: DType
    in_proj_grad_dynamic_scaling_broadcastable_fn: Component
    in_proj_grad_exponent_bias: int
    in_proj_grad_exponent_bias_impl: Component
    in_proj_grad_exponent_bit_class: Injector
    in_proj_grad_exponent_bit_width: int
    in_proj_grad_exponent_bit_width_impl: Component
    in_proj_grad_exponent_bit_width_impl_type: BitWidthImplType
    in_proj_grad_exponent_impl: Component
    in_proj_grad_factor: float
    in_proj_grad_float_clamp_impl: Component
    in_proj_grad_float_scaling_impl: Component
    in_proj_grad_float_to_int_impl: Component
    in_proj_grad_float_to_int_impl_type: FloatToIntImplType
    in_proj_grad_folded: bool
    in_proj_grad_gradient_mask_impl: Component
    in_proj_grad_group_dim: int | None
    in_proj_grad_group_elements_axis: int | None
    in_proj_grad_group_padding: bool
    in_proj_grad_group_size: int | tuple[int, int] | None
    in_proj_grad_high_percentile_q: float
    in_proj_grad_inf_values: tuple[str, ...] | None
    in_proj_grad_input_view_impl: Component
    in_proj_grad_int_quant: Component
    in_proj_grad_int_scaling_impl: Component
    in_proj_grad_keepdim: bool
    in_proj_grad_keeps_infinite: bool
    in_proj_grad_learned_round_gamma: float
    in_proj_grad_learned_round_impl: Component
    in_proj_grad_learned_round_impl_type: LearnedRoundImplType
    in_proj_grad_learned_round_init: Array
    in_proj_grad_learned_round_temperature: float
    in_proj_grad_learned_round_zeta: float
    in_proj_grad_low_percentile_q: float
    in_proj_grad_mantissa_bit_class: Injector
    in_proj_grad_mantissa_bit_width: int
    in_proj_grad_mantissa_bit_width_impl: Component
    in_proj_grad_mantissa_bit_width_impl_type: BitWidthImplType
    in_proj_grad_margin: float
    in_proj_grad_max_available_float: float | None
    in_proj_grad_max_val: float
    in_proj_grad_midmax_mantissa_bit_bias: int
    in_proj_grad_min_bit_width: int
    in_proj_grad_min_val: float
    in_proj_grad_nan_values: tuple[str, ...] | None
    in_proj_grad_narrow_range: bool
    in_proj_grad_noise_sharing_axes: tuple[int, ...]
    in_proj_grad_override_pretrained_bit_width: bool
    in_proj_grad_per_channel_broadcastable_shape: tuple[int, ...]
    in_proj_grad_permute_dims: tuple[int, ...] | None
    in_proj_grad_power_of_two_factor: bool
    in_proj_grad_proxy_class: type[QuantProxyFromInjector]
    in_proj_grad_q_dtype: DType
    in_proj_grad_quant_delay_steps: int | None
    in_proj_grad_quant_type: QuantType
    in_proj_grad_random_bits: int
    in_proj_grad_restrict_bit_width_impl: Component
    in_proj_grad_restrict_scale_positive: bool
    in_proj_grad_restrict_scale_threshold_impl: Component
    in_proj_grad_restrict_scaling_impl: Component
    in_proj_grad_restrict_scaling_type: RestrictValueType
    in_proj_grad_restrict_threshold_impl: Component
    in_proj_grad_restrict_value_float_to_int_impl: Component
    in_proj_grad_saturating: bool
    in_proj_grad_scale_rounding: ScaleRounding
    in_proj_grad_scale_to_int_impl: Component
    in_proj_grad_scale_to_int_impl_type: FloatToIntImplType
    in_proj_grad_scaling_impl: Component
    in_proj_grad_scaling_impl_type: ScalingImplType
    in_proj_grad_scaling_init: Array
    in_proj_grad_scaling_init_impl: Component
    in_proj_grad_scaling_min_val: float | None
    in_proj_grad_scaling_per_output: ScalingPerOutputType
    in_proj_grad_scaling_per_output_channel: bool
    in_proj_grad_scaling_per_output_channel_shape: tuple[int, ...]
    in_proj_grad_scaling_per_output_type: ScalingPerOutputType
    in_proj_grad_scaling_shape: tuple[int, ...]
    in_proj_grad_scaling_stats_impl: Component
    in_proj_grad_scaling_stats_input_view_shape_impl: Component
    in_proj_grad_scaling_stats_op: StatsOp
    in_proj_grad_scaling_stats_permute_dims: tuple[int, ...] | None
    in_proj_grad_seed: int
    in_proj_grad_shared_per_row: bool
    in_proj_grad_sigma: float
    in_proj_grad_signed: bool
    in_proj_grad_stats_output_shape: tuple[int, ...]
    in_proj_grad_stats_reduce_dim: int | None
    in_proj_grad_std_dev_epsilon: float
    in_proj_grad_straight_through: bool
    in_proj_grad_tensor_clamp_impl: Component
    in_proj_grad_tensor_quant: Component
    in_proj_grad_threshold: float
    in_proj_grad_threshold_mixin: Injector
    in_proj_grad_ties: Literal["first", "shared", "near"] | None
    in_proj_grad_zero_point_impl: Component

class OutProjInputActNames(TypedDict, total=False):
    out_proj_input_about_mean: bool
    out_proj_input_amax_compute_algo: Literal["max", "most_recent"]
    out_proj_input_amax_history_length: int
    out_proj_input_amax_of_gradient: bool
    out_proj_input_averaging_impl: Component
    out_proj_input_axis_name: AxisName
    out_proj_input_batch_axes: tuple[int, ...]
    out_proj_input_bipolar_search: bool
    out_proj_input_bit_width: int
    out_proj_input_bit_width_impl: Component
    out_proj_input_bit_width_impl_type: BitWidthImplType
    out_proj_input_block_dim: int | None
    out_proj_input_block_scale_impl: Component
    out_proj_input_block_width: int
    out_proj_input_by_factor: bool
    out_proj_input_calibration_impl: Component
    out_proj_input_candidates: int
    out_proj_input_cast_impl: Component
    out_proj_input_channel_axes: int
    out_proj_input_channel_shape: tuple[int, ...]
    out_proj_input_channelwise_axes: tuple[int, ...]
    out_proj_input_clip_gradient: bool
    out_proj_input_codebook: Any
    out_proj_input_collect_stats_steps: int
    out_proj_input_collected_range: float | None
    out_proj_input_collected_zero_point: float | None
    out_proj_input_compute_max_mantissa: Component
    out_proj_input_correction_size: int
    out_proj_input_delayed: bool
    out_proj_input_dq_dtype: DType
    out_proj_input_dynamic_scaling_broadcastable_fn: Component
    out_proj_input_exponent_bias: int
    out_proj_input_exponent_bias_impl: Component
    out_proj_input_exponent_bit_class: Injector
    out_proj_input_exponent_bit_width: int
    out_proj_input_exponent_bit_width_impl: Component
    out_proj_input_exponent_bit_width_impl_type: BitWidthImplType
    out_proj_input_exponent_impl: Component
    out_proj_input_factor: float
    out_proj_input_float_clamp_impl: Component
    out_proj_input_float_scaling_impl: Component
    out_proj_input_float_to_int_impl: Component
    out_proj_input_float_to_int_impl_type: FloatToIntImplType
    out_proj_input_folded: bool
    out_proj_input_fractions: tuple[float, ...] | None
    out_proj_input_gradient_mask_impl: Component
    out_proj_input_group_dim: int | None
    out_proj_input_group_elements_axis: int | None
    out_proj_input_group_padding: bool
    out_proj_input_group_size: int | tuple[int, int] | None
    out_proj_input_high_percentile_q: float
    out_proj_input_hqo_beta_zp: float
    out_proj_input_hqo_init_op_zp: Component
    out_proj_input_hqo_iters_zp: int
    out_proj_input_hqo_kappa_zp: float
    out_proj_input_hqo_lp_norm_zp: float
    out_proj_input_inf_values: tuple[str, ...] | None
    out_proj_input_inner_stats_input_view_shape_impl: Component
    out_proj_input_input_view_impl: Component
    out_proj_input_int_quant: Component
    out_proj_input_int_scaling_impl: Component
    out_proj_input_keepdim: bool
    out_proj_input_keeps_infinite: bool
    out_proj_input_learned_round_gamma: float
    out_proj_input_learned_round_impl: Component
    out_proj_input_learned_round_impl_type: LearnedRoundImplType
    out_proj_input_learned_round_init: Array
    out_proj_input_learned_round_temperature: float
    out_proj_input_learned_round_zeta: float
    out_proj_input_least_scale: float
    out_proj_input_limit_steps: float
    out_proj_input_low_percentile_q: float
    out_proj_input_mantissa_bit_class: Injector
    out_proj_input_mantissa_bit_width: int
    out_proj_input_mantissa_bit_width_impl: Component
    out_proj_input_mantissa_bit_width_impl_type: BitWidthImplType
    out_proj_input_margin: float
    out_proj_input_max_available_float: float | None
    out_proj_input_max_val: float
    out_proj_input_memory_shape: tuple[int, ...] | None
    out_proj_input_midmax_mantissa_bit_bias: int
    out_proj_input_min_bit_width: int
    out_proj_input_min_val: float
    out_proj_input_momentum: float | None
    out_proj_input_mse_scale: Injector
    out_proj_input_mse_search_method: Literal["grid", "fibonacci", "exact"]
    out_proj_input_mse_zero_point: Injector
    out_proj_input_nan_values: tuple[str, ...] | None
    out_proj_input_narrow_range: bool
    out_proj_input_noise_sharing_axes: tuple[int, ...]
    out_proj_input_normal_clip: float
    out_proj_input_normal_scale: float
    out_proj_input_override_pretrained_bit_width: bool
    out_proj_input_per_channel_broadcastable_shape: tuple[int, ...]
    out_proj_input_percentile: float
    out_proj_input_permute_dims: tuple[int, ...] | None
    out_proj_input_power_of_two_factor: bool
    out_proj_input_pre_transform: Component
    out_proj_input_preserve_zero: bool
    out_proj_input_proxy_class: type[QuantProxyFromInjector]
    out_proj_input_q_dtype: DType
    out_proj_input_quant_delay_steps: int | None
    out_proj_input_quant_type: QuantType
    out_proj_input_quantize_zero_point: bool
    out_proj_input_random_bits: int
    out_proj_input_range_steps: float | None
    out_proj_input_restart: bool
    out_proj_input_restrict_bit_width_impl: Component
    out_proj_input_restrict_scale_positive: bool
    out_proj_input_restrict_scale_threshold_impl: Component
    out_proj_input_restrict_scaling_impl: Component
    out_proj_input_restrict_scaling_type: RestrictValueType
    out_proj_input_restrict_threshold_impl: Component
    out_proj_input_restrict_value_float_to_int_impl: Component
    out_proj_input_saturating: bool
    out_proj_input_scale_quant: Injector
    out_proj_input_scale_rounding: ScaleRounding
    out_proj_input_scale_stop_grad: bool
    out_proj_input_scale_to_int_impl: Component
    out_proj_input_scale_to_int_impl_type: FloatToIntImplType
    out_proj_input_scaling_affine_rescaling_init: float | None
    out_proj_input_scaling_affine_shifting_init: float | None
    out_proj_input_scaling_gradient_scale: float | None
    out_proj_input_scaling_impl: Component
    out_proj_input_scaling_impl_type: ScalingImplType
    out_proj_input_scaling_init: Array
    out_proj_input_scaling_init_impl: Component
    out_proj_input_scaling_min_val: float | None
    out_proj_input_scaling_per_output: ScalingPerOutputType
    out_proj_input_scaling_per_output_channel: bool
    out_proj_input_scaling_per_output_channel_shape: tuple[int, ...]
    out_proj_input_scaling_per_output_type: ScalingPerOutputType
    out_proj_input_scaling_shape: tuple[int, ...]
    out_proj_input_scaling_stats_impl: Component
    out_proj_input_scaling_stats_input_view_shape_impl: Component
    out_proj_input_scaling_stats_momentum: float | None
    out_proj_input_scaling_stats_op: StatsOp
    out_proj_input_scaling_stats_permute_dims: tuple[int, ...] | None
    out_proj_input_seed: int
    out_proj_input_shared_axes: tuple[int, ...] | None
    out_proj_input_shared_per_row: bool
    out_proj_input_sigma: float
    out_proj_input_signed: bool
    out_proj_input_stats_impl_zp: Component
    out_proj_input_stats_output_shape: tuple[int, ...]
    out_proj_input_stats_reduce_dim: int | None
    out_proj_input_std_dev_epsilon: float
    out_proj_input_straight_through: bool
    out_proj_input_tensor_clamp_impl: Component
    out_proj_input_tensor_quant: Component
    out_proj_input_threshold: float
    out_proj_input_threshold_mixin: Injector
    out_proj_input_ties: Literal["first", "shared", "near"] | None
    out_proj_input_trust: float
    out_proj_input_trust_steps: float
    out_proj_input_undo_transform: bool
    out_proj_input_zero_point_impl: Component
    out_proj_input_zero_point_shape: tuple[int, ...]
    out_proj_input_zero_point_stats_impl: Component
    out_proj_input_zero_point_stats_input_view_shape_impl: Component
    out_proj_input_zero_point_stats_momentum: float | None

class OutProjWeightWeightNames(TypedDict, total=False):
    out_proj_weight_about_mean: bool
    out_proj_weight_accumulator_bit_width: int
    out_proj_weight_accumulator_bit_width_impl: Component
    out_proj_weight_amax_compute_algo: Literal["max", "most_recent"]
    out_proj_weight_amax_history_length: int
    out_proj_weight_amax_of_gradient: bool
    out_proj_weight_averaging_impl: Component
    out_proj_weight_axis_name: AxisName
    out_proj_weight_batch_axes: tuple[int, ...]
    out_proj_weight_bipolar_search: bool
    out_proj_weight_bit_width: int
    out_proj_weight_bit_width_impl: Component
    out_proj_weight_bit_width_impl_type: BitWidthImplType
    out_proj_weight_block_dim: int | None
    out_proj_weight_block_scale_impl: Component
    out_proj_weight_block_width: int
    out_proj_weight_by_factor: bool
    out_proj_weight_calibration_impl: Component
    out_proj_weight_cast_impl: Component
    out_proj_weight_channel_axes: int
    out_proj_weight_channel_shape: tuple[int, ...]
    out_proj_weight_channelwise_axes: tuple[int, ...]
    out_proj_weight_clip_gradient: bool
    out_proj_weight_codebook: Any
    out_proj_weight_compute_max_mantissa: Component
    out_proj_weight_decoupled_int_quant: Component
    out_proj_weight_delayed: bool
    out_proj_weight_dq_dtype: DType
    out_proj_weight_expanded_groupwise_shape: tuple[int, ...]
    out_proj_weight_exponent_bias: int
    out_proj_weight_exponent_bias_impl: Component
    out_proj_weight_exponent_bit_class: Injector
    out_proj_weight_exponent_bit_width: int
    out_proj_weight_exponent_bit_width_impl: Component
    out_proj_weight_exponent_bit_width_impl_type: BitWidthImplType
    out_proj_weight_exponent_impl: Component
    out_proj_weight_factor: float
    out_proj_weight_float_clamp_impl: Component
    out_proj_weight_float_scaling_impl: Component
    out_proj_weight_float_to_int_impl: Component
    out_proj_weight_float_to_int_impl_type: FloatToIntImplType
    out_proj_weight_folded: bool
    out_proj_weight_force_parameter: bool
    out_proj_weight_gradient_mask_impl: Component
    out_proj_weight_group_dim: int | None
    out_proj_weight_group_elements_axis: int | None
    out_proj_weight_group_padding: bool
    out_proj_weight_group_size: int | tuple[int, int] | None
    out_proj_weight_high_percentile_q: float
    out_proj_weight_hqo_beta_scale: float
    out_proj_weight_hqo_beta_zp: float
    out_proj_weight_hqo_init_op_scale: Component
    out_proj_weight_hqo_init_op_zp: Component
    out_proj_weight_hqo_iters_scale: int
    out_proj_weight_hqo_iters_zp: int
    out_proj_weight_hqo_kappa_scale: float
    out_proj_weight_hqo_kappa_zp: float
    out_proj_weight_hqo_lp_norm_scale: float
    out_proj_weight_hqo_lp_norm_zp: float
    out_proj_weight_inf_values: tuple[str, ...] | None
    out_proj_weight_inner_stats_input_view_shape_impl: Component
    out_proj_weight_input_view_impl: Component
    out_proj_weight_int_quant: Component
    out_proj_weight_int_scaling_impl: Component
    out_proj_weight_keepdim: bool
    out_proj_weight_keeps_infinite: bool
    out_proj_weight_learned_round_gamma: float
    out_proj_weight_learned_round_impl: Component
    out_proj_weight_learned_round_impl_type: LearnedRoundImplType
    out_proj_weight_learned_round_init: Array
    out_proj_weight_learned_round_temperature: float
    out_proj_weight_learned_round_zeta: float
    out_proj_weight_limit_steps: float
    out_proj_weight_low_percentile_q: float
    out_proj_weight_mantissa_bit_class: Injector
    out_proj_weight_mantissa_bit_width: int
    out_proj_weight_mantissa_bit_width_impl: Component
    out_proj_weight_mantissa_bit_width_impl_type: BitWidthImplType
    out_proj_weight_margin: float
    out_proj_weight_max_available_float: float | None
    out_proj_weight_memory_shape: tuple[int, ...] | None
    out_proj_weight_midmax_mantissa_bit_bias: int
    out_proj_weight_min_bit_width: int
    out_proj_weight_mse_scale: Injector
    out_proj_weight_mse_search_method: Literal["grid", "fibonacci", "exact"]
    out_proj_weight_mse_zero_point: Injector
    out_proj_weight_nan_values: tuple[str, ...] | None
    out_proj_weight_narrow_range: bool
    out_proj_weight_noise_sharing_axes: tuple[int, ...]
    out_proj_weight_normal_clip: float
    out_proj_weight_normal_scale: float
    out_proj_weight_normalize_stats_impl: Component
    out_proj_weight_out_channels: int
    out_proj_weight_output_channel_dim: int | tuple[int, ...]
    out_proj_weight_override_pretrained_bit_width: bool
    out_proj_weight_per_channel_pre_norm: Injector
    out_proj_weight_permute_dims: tuple[int, ...] | None
    out_proj_weight_power_of_two_factor: bool
    out_proj_weight_pre_scaling_impl: Component
    out_proj_weight_pre_scaling_min_val: float | None
    out_proj_weight_pre_scaling_shape: tuple[int, ...]
    out_proj_weight_pre_zero_point_impl: Component
    out_proj_weight_proxy_class: type[QuantProxyFromInjector]
    out_proj_weight_q_dtype: DType
    out_proj_weight_quant_delay_steps: int | None
    out_proj_weight_quant_type: QuantType
    out_proj_weight_quantize_zero_point: bool
    out_proj_weight_quantized_shape: tuple[int, ...]
    out_proj_weight_random_bits: int
    out_proj_weight_range_steps: float | None
    out_proj_weight_restrict_bit_width_impl: Component
    out_proj_weight_restrict_pre_scaling_impl: Component
    out_proj_weight_restrict_scale_positive: bool
    out_proj_weight_restrict_scale_threshold_impl: Component
    out_proj_weight_restrict_scaling_impl: Component
    out_proj_weight_restrict_scaling_type: RestrictValueType
    out_proj_weight_restrict_threshold_impl: Component
    out_proj_weight_restrict_value_float_to_int_impl: Component
    out_proj_weight_saturating: bool
    out_proj_weight_scale_quant: Injector
    out_proj_weight_scale_rounding: ScaleRounding
    out_proj_weight_scale_shift_zero_point_impl: Component
    out_proj_weight_scale_stop_grad: bool
    out_proj_weight_scaling_affine_rescaling_init: float | None
    out_proj_weight_scaling_affine_shifting_init: float | None
    out_proj_weight_scaling_const: float
    out_proj_weight_scaling_gradient_scale: float | None
    out_proj_weight_scaling_impl: Component
    out_proj_weight_scaling_impl_type: ScalingImplType
    out_proj_weight_scaling_init: Array
    out_proj_weight_scaling_init_impl: Component
    out_proj_weight_scaling_min_val: float | None
    out_proj_weight_scaling_per_group_shape: tuple[int, ...]
    out_proj_weight_scaling_per_output: ScalingPerOutputType
    out_proj_weight_scaling_per_output_channel: bool
    out_proj_weight_scaling_per_output_channel_shape: tuple[int, ...]
    out_proj_weight_scaling_per_output_type: ScalingPerOutputType
    out_proj_weight_scaling_shape: tuple[int, ...]
    out_proj_weight_scaling_stats_impl: Component
    out_proj_weight_scaling_stats_input_concat_dim: int
    out_proj_weight_scaling_stats_input_view_shape_impl: Component
    out_proj_weight_scaling_stats_op: StatsOp
    out_proj_weight_seed: int
    out_proj_weight_shared_axes: tuple[int, ...] | None
    out_proj_weight_shared_per_row: bool
    out_proj_weight_sigma: float
    out_proj_weight_signed: bool
    out_proj_weight_stats_impl_scale: Component
    out_proj_weight_stats_impl_zp: Component
    out_proj_weight_stats_output_shape: tuple[int, ...]
    out_proj_weight_stats_reduce_dim: int | None
    out_proj_weight_std_dev_epsilon: float
    out_proj_weight_straight_through: bool
    out_proj_weight_tensor_clamp_impl: Component
    out_proj_weight_tensor_quant: Component
    out_proj_weight_threshold: float
    out_proj_weight_threshold_mixin: Injector
    out_proj_weight_ties: Literal["first", "shared", "near"] | None
    out_proj_weight_trust: float
    out_proj_weight_trust_steps: float
    out_proj_weight_upstream_shape: tuple[int, ...]
    out_proj_weight_zero_point_affine_rescaling_init: float | None
    out_proj_weight_zero_point_affine_shifting_init: float | None
    out_proj_weight_zero_point_impl: Component
    out_proj_weight_zero_point_shape: tuple[int, ...]
    out_proj_weight_zero_point_stats_impl: Component
    out_proj_weight_zero_point_stats_input_concat_dim: int
    out_proj_weight_zero_point_stats_input_view_shape_impl: Component

class OutProjBiasBiasNames(TypedDict, total=False):
    out_proj_bias_about_mean: bool
    out_proj_bias_axis_name: AxisName
    out_proj_bias_bit_width: int
    out_proj_bias_bit_width_impl: Component
    out_proj_bias_bit_width_impl_type: BitWidthImplType
    out_proj_bias_channel_axes: int
    out_proj_bias_channel_shape: tuple[int, ...]
    out_proj_bias_exponent_impl: Component
    out_proj_bias_factor: float
    out_proj_bias_float_to_int_impl: Component
    out_proj_bias_float_to_int_impl_type: FloatToIntImplType
    out_proj_bias_force_parameter: bool
    out_proj_bias_group_dim: int | None
    out_proj_bias_group_elements_axis: int | None
    out_proj_bias_high_percentile_q: float
    out_proj_bias_input_view_impl: Component
    out_proj_bias_int_quant: Component
    out_proj_bias_int_scaling_impl: Component
    out_proj_bias_keepdim: bool
    out_proj_bias_learned_round_gamma: float
    out_proj_bias_learned_round_impl: Component
    out_proj_bias_learned_round_impl_type: LearnedRoundImplType
    out_proj_bias_learned_round_init: Array
    out_proj_bias_learned_round_temperature: float
    out_proj_bias_learned_round_zeta: float
    out_proj_bias_low_percentile_q: float
    out_proj_bias_min_bit_width: int
    out_proj_bias_narrow_range: bool
    out_proj_bias_noise_sharing_axes: tuple[int, ...]
    out_proj_bias_output_channel_dim: int | tuple[int, ...]
    out_proj_bias_override_pretrained_bit_width: bool
    out_proj_bias_permute_dims: tuple[int, ...] | None
    out_proj_bias_proxy_class: type[QuantProxyFromInjector]
    out_proj_bias_quant_delay_steps: int | None
    out_proj_bias_quant_type: QuantType
    out_proj_bias_random_bits: int
    out_proj_bias_requires_input_scale: bool
    out_proj_bias_restrict_bit_width_impl: Component
    out_proj_bias_restrict_scale_threshold_impl: Component
    out_proj_bias_restrict_scaling_impl: Component
    out_proj_bias_restrict_scaling_type: RestrictValueType
    out_proj_bias_restrict_threshold_impl: Component
    out_proj_bias_restrict_value_float_to_int_impl: Component
    out_proj_bias_scale_rounding: ScaleRounding
    out_proj_bias_scaling_affine_rescaling_init: float | None
    out_proj_bias_scaling_affine_shifting_init: float | None
    out_proj_bias_scaling_const: float
    out_proj_bias_scaling_impl: Component
    out_proj_bias_scaling_impl_type: ScalingImplType
    out_proj_bias_scaling_init: Array
    out_proj_bias_scaling_init_impl: Component
    out_proj_bias_scaling_min_val: float | None
    out_proj_bias_scaling_per_output: ScalingPerOutputType
    out_proj_bias_scaling_per_output_channel: bool
    out_proj_bias_scaling_per_output_channel_shape: tuple[int, ...]
    out_proj_bias_scaling_per_output_type: ScalingPerOutputType
    out_proj_bias_scaling_shape: tuple[int, ...]
    out_proj_bias_scaling_stats_impl: Component
    out_proj_bias_scaling_stats_input_concat_dim: int
    out_proj_bias_scaling_stats_input_view_shape_impl: Component
    out_proj_bias_scaling_stats_op: StatsOp
    out_proj_bias_scaling_stats_permute_dims: tuple[int, ...] | None
    out_proj_bias_seed: int
    out_proj_bias_sigma: float
    out_proj_bias_signed: bool
    out_proj_bias_stats_output_shape: tuple[int, ...]
    out_proj_bias_stats_reduce_dim: int | None
    out_proj_bias_std_dev_epsilon: float
    out_proj_bias_tensor_clamp_impl: Component
    out_proj_bias_tensor_quant: Component
    out_proj_bias_ties: Literal["first", "shared", "near"] | None
    out_proj_bias_zero_point_impl: Component

class OutProjOutputActNames(TypedDict, total=False):
    out_proj_output_about_mean: bool
    out_proj_output_amax_compute_algo: Literal["max", "most_recent"]
    out_proj_output_amax_history_length: int
    out_proj_output_amax_of_gradient: bool
    out_proj_output_averaging_impl: Component
    out_proj_output_axis_name: AxisName
    out_proj_output_batch_axes: tuple[int, ...]
    out_proj_output_bipolar_search: bool
    out_proj_output_bit_width: int
    out_proj_output_bit_width_impl: Component
    out_proj_output_bit_width_impl_type: BitWidthImplType
    out_proj_output_block_dim: int | None
    out_proj_output_block_scale_impl: Component
    out_proj_output_block_width: int
    out_proj_output_by_factor: bool
    out_proj_output_calibration_impl: Component
    out_proj_output_candidates: int
    out_proj_output_cast_impl: Component
    out_proj_output_channel_axes: int
    out_proj_output_channel_shape: tuple[int, ...]
    out_proj_output_channelwise_axes: tuple[int, ...]
    out_proj_output_clip_gradient: bool
    out_proj_output_codebook: Any
    out_proj_output_collect_stats_steps: int
    out_proj_output_collected_range: float | None
    out_proj_output_collected_zero_point: float | None
    out_proj_output_compute_max_mantissa: Component
    out_proj_output_correction_size: int
    out_proj_output_delayed: bool
    out_proj_output_dq_dtype: DType
    out_proj_output_dynamic_scaling_broadcastable_fn: Component
    out_proj_output_exponent_bias: int
    out_proj_output_exponent_bias_impl: Component
    out_proj_output_exponent_bit_class: Injector
    out_proj_output_exponent_bit_width: int
    out_proj_output_exponent_bit_width_impl: Component
    out_proj_output_exponent_bit_width_impl_type: BitWidthImplType
    out_proj_output_exponent_impl: Component
    out_proj_output_factor: float
    out_proj_output_float_clamp_impl: Component
    out_proj_output_float_scaling_impl: Component
    out_proj_output_float_to_int_impl: Component
    out_proj_output_float_to_int_impl_type: FloatToIntImplType
    out_proj_output_folded: bool
    out_proj_output_fractions: tuple[float, ...] | None
    out_proj_output_gradient_mask_impl: Component
    out_proj_output_group_dim: int | None
    out_proj_output_group_elements_axis: int | None
    out_proj_output_group_padding: bool
    out_proj_output_group_size: int | tuple[int, int] | None
    out_proj_output_high_percentile_q: float
    out_proj_output_hqo_beta_zp: float
    out_proj_output_hqo_init_op_zp: Component
    out_proj_output_hqo_iters_zp: int
    out_proj_output_hqo_kappa_zp: float
    out_proj_output_hqo_lp_norm_zp: float
    out_proj_output_inf_values: tuple[str, ...] | None
    out_proj_output_inner_stats_input_view_shape_impl: Component
    out_proj_output_input_view_impl: Component
    out_proj_output_int_quant: Component
    out_proj_output_int_scaling_impl: Component
    out_proj_output_keepdim: bool
    out_proj_output_keeps_infinite: bool
    out_proj_output_learned_round_gamma: float
    out_proj_output_learned_round_impl: Component
    out_proj_output_learned_round_impl_type: LearnedRoundImplType
    out_proj_output_learned_round_init: Array
    out_proj_output_learned_round_temperature: float
    out_proj_output_learned_round_zeta: float
    out_proj_output_least_scale: float
    out_proj_output_limit_steps: float
    out_proj_output_low_percentile_q: float
    out_proj_output_mantissa_bit_class: Injector
    out_proj_output_mantissa_bit_width: int
    out_proj_output_mantissa_bit_width_impl: Component
    out_proj_output_mantissa_bit_width_impl_type: BitWidthImplType
    out_proj_output_margin: float
    out_proj_output_max_available_float: float | None
    out_proj_output_max_val: float
    out_proj_output_memory_shape: tuple[int, ...] | None
    out_proj_output_midmax_mantissa_bit_bias: int
    out_proj_output_min_bit_width: int
    out_proj_output_min_val: float
    out_proj_output_momentum: float | None
    out_proj_output_mse_scale: Injector
    out_proj_output_mse_search_method: Literal["grid", "fibonacci", "exact"]
    out_proj_output_mse_zero_point: Injector
    out_proj_output_nan_values: tuple[str, ...] | None
    out_proj_output_narrow_range: bool
    out_proj_output_noise_sharing_axes: tuple[int, ...]
    out_proj_output_normal_clip: float
    out_proj_output_normal_scale: float
    out_proj_output_override_pretrained_bit_width: bool
    out_proj_output_per_channel_broadcastable_shape: tuple[int, ...]
    out_proj_output_percentile: float
    out_proj_output_permute_dims: tuple[int, ...] | None
    out_proj_output_power_of_two_factor: bool
    out_proj_output_pre_transform: Component
    out_proj_output_preserve_zero: bool
    out_proj_output_proxy_class: type[QuantProxyFromInjector]
    out_proj_output_q_dtype: DType
    out_proj_output_quant_delay_steps: int | None
    out_proj_output_quant_type: QuantType
    out_proj_output_quantize_zero_point: bool
    out_proj_output_random_bits: int
    out_proj_output_range_steps: float | None
    out_proj_output_restart: bool
    out_proj_output_restrict_bit_width_impl: Component
    out_proj_output_restrict_scale_positive: bool
    out_proj_output_restrict_scale_threshold_impl: Component
    out_proj_output_restrict_scaling_impl: Component
    out_proj_output_restrict_scaling_type: RestrictValueType
    out_proj_output_restrict_threshold_impl: Component
    out_proj_output_restrict_value_float_to_int_impl: Component
    out_proj_output_saturating: bool
    out_proj_output_scale_quant: Injector
    out_proj_output_scale_rounding: ScaleRounding
    out_proj_output_scale_stop_grad: bool
    out_proj_output_scale_to_int_impl: Component
    out_proj_output_scale_to_int_impl_type: FloatToIntImplType
    out_proj_output_scaling_affine_rescaling_init: float | None
    out_proj_output_scaling_affine_shifting_init: float | None
    out_proj_output_scaling_gradient_scale: float | None
    out_proj_output_scaling_impl: Component
    out_proj_output_scaling_impl_type: ScalingImplType
    out_proj_output_scaling_init: Array
    out_proj_output_scaling_init_impl: Component
    out_proj_output_scaling_min_val: float | None
    out_proj_output_scaling_per_output: ScalingPerOutputType
    out_proj_output_scaling_per_output_channel: bool
    out_proj_output_scaling_per_output_channel_shape: tuple[int, ...]
    out_proj_output_scaling_per_output_type: ScalingPerOutputType
    out_proj_output_scaling_shape: tuple[int, ...]
    out_proj_output_scaling_stats_impl: Component
    out_proj_output_scaling_stats_input_view_shape_impl: Component
    out_proj_output_scaling_stats_momentum: float | None
    out_proj_output_scaling_stats_op: StatsOp
    out_proj_output_scaling_stats_permute_dims: tuple[int, ...] | None
    out_proj_output_seed: int
    out_proj_output_shared_axes: tuple[int, ...] | None
    out_proj_output_shared_per_row: bool
    out_proj_output_sigma: float
    out_proj_output_signed: bool
    out_proj_output_stats_impl_zp: Component
    out_proj_output_stats_output_shape: tuple[int, ...]
    out_proj_output_stats_reduce_dim: int | None
    out_proj_output_std_dev_epsilon: float
    out_proj_output_straight_through: bool
    out_proj_output_tensor_clamp_impl: Component
    out_proj_output_tensor_quant: Component
    out_proj_output_threshold: float
    out_proj_output_threshold_mixin: Injector
    out_proj_output_ties: Literal["first", "shared", "near"] | None
    out_proj_output_trust: float
    out_proj_output_trust_steps: float
    out_proj_output_undo_transform: bool
    out_proj_output_zero_point_impl: Component
    out_proj_output_zero_point_shape: tuple[int, ...]
    out_proj_output_zero_point_stats_impl: Component
    out_proj_output_zero_point_stats_input_view_shape_impl: Component
    out_proj_output_zero_point_stats_momentum: float | None

class OutProjGradGradNames(TypedDict, total=False):
    out_proj_grad_about_mean: bool
    out_proj_grad_amax_compute_algo: Literal["max", "most_recent"]
    out_proj_grad_amax_history_length: int
    out_proj_grad_amax_of_gradient: bool
    out_proj_grad_axis_name: AxisName
    out_proj_grad_bipolar_search: bool
    out_proj_grad_bit_width: int
    out_proj_grad_bit_width_impl: Component
    out_proj_grad_bit_width_impl_type: BitWidthImplType
    out_proj_grad_block_dim: int | None
    out_proj_grad_block_scale_impl: Component
    out_proj_grad_block_width: int
    out_proj_grad_by_factor: bool
    out_proj_grad_cast_impl: Component
    out_proj_grad_channel_axes: int
    out_proj_grad_channel_shape: tuple[int, ...]
    out_proj_grad_compute_max_mantissa: Component
    out_proj_grad_correction_size: int
    out_proj_grad_delayed: bool
    out_proj_grad_dq_dtype: DType
    out_proj_grad_dynamic_scaling_broadcastable_fn: Component
    out_proj_grad_exponent_bias: int
    out_proj_grad_exponent_bias_impl: Component
    out_proj_grad_exponent_bit_class: Injector
    out_proj_grad_exponent_bit_width: int
    out_proj_grad_exponent_bit_width_impl: Component
    out_proj_grad_exponent_bit_width_impl_type: BitWidthImplType
    out_proj_grad_exponent_impl: Component
    out_proj_grad_factor: float
    out_proj_grad_float_clamp_impl: Component
    out_proj_grad_float_scaling_impl: Component
    out_proj_grad_float_to_int_impl: Component
    out_proj_grad_float_to_int_impl_type: FloatToIntImplType
    out_proj_grad_folded: bool
    out_proj_grad_gradient_mask_impl: Component
    out_proj_grad_group_dim: int | None
    out_proj_grad_group_elements_axis: int | None
    out_proj_grad_group_padding: bool
    out_proj_grad_group_size: int | tuple[int, int] | None
    out_proj_grad_high_percentile_q: float
    out_proj_grad_inf_values: tuple[str, ...] | None
    out_proj_grad_input_view_impl: Component
    out_proj_grad_int_quant: Component
    out_proj_grad_int_scaling_impl: Component
    out_proj_grad_keepdim: bool
    out_proj_grad_keeps_infinite: bool
    out_proj_grad_learned_round_gamma: float
    out_proj_grad_learned_round_impl: Component
    out_proj_grad_learned_round_impl_type: LearnedRoundImplType
    out_proj_grad_learned_round_init: Array
    out_proj_grad_learned_round_temperature: float
    out_proj_grad_learned_round_zeta: float
    out_proj_grad_low_percentile_q: float
    out_proj_grad_mantissa_bit_class: Injector
    out_proj_grad_mantissa_bit_width: int
    out_proj_grad_mantissa_bit_width_impl: Component
    out_proj_grad_mantissa_bit_width_impl_type: BitWidthImplType
    out_proj_grad_margin: float
    out_proj_grad_max_available_float: float | None
    out_proj_grad_max_val: float
    out_proj_grad_midmax_mantissa_bit_bias: int
    out_proj_grad_min_bit_width: int
    out_proj_grad_min_val: float
    out_proj_grad_nan_values: tuple[str, ...] | None
    out_proj_grad_narrow_range: bool
    out_proj_grad_noise_sharing_axes: tuple[int, ...]
    out_proj_grad_override_pretrained_bit_width: bool
    out_proj_grad_per_channel_broadcastable_shape: tuple[int, ...]
    out_proj_grad_permute_dims: tuple[int, ...] | None
    out_proj_grad_power_of_two_factor: bool
    out_proj_grad_proxy_class: type[QuantProxyFromInjector]
    out_proj_grad_q_dtype: DType
    out_proj_grad_quant_delay_steps: int | None
    out_proj_grad_quant_type: QuantType
    out_proj_grad_random_bits: int
    out_proj_grad_restrict_bit_width_impl: Component
    out_proj_grad_restrict_scale_positive: bool
    out_proj_grad_restrict_scale_threshold_impl: Component
    out_proj_grad_restrict_scaling_impl: Component
    out_proj_grad_restrict_scaling_type: RestrictValueType
    out_proj_grad_restrict_threshold_impl: Component
    out_proj_grad_restrict_value_float_to_int_impl: Component
    out_proj_grad_saturating: bool
    out_proj_grad_scale_rounding: ScaleRounding
    out_proj_grad_scale_to_int_impl: Component
    out_proj_grad_scale_to_int_impl_type: FloatToIntImplType
    out_proj_grad_scaling_impl: Component
    out_proj_grad_scaling_impl_type: ScalingImplType
    out_proj_grad_scaling_init: Array
    out_proj_grad_scaling_init_impl: Component
    out_proj_grad_scaling_min_val: float | None
    out_proj_grad_scaling_per_output: ScalingPerOutputType
    out_proj_grad_scaling_per_output_channel: bool
    out_proj_grad_scaling_per_output_channel_shape: tuple[int, ...]
    out_proj_grad_scaling_per_output_type: ScalingPerOutputType
    out_proj_grad_scaling_shape: tuple[int, ...]
    out_proj_grad_scaling_stats_impl: Component
    out_proj_grad_scaling_stats_input_view_shape_impl: Component
    out_proj_grad_scaling_stats_op: StatsOp
    out_proj_grad_scaling_stats_permute_dims: tuple[int, ...] | None
    out_proj_grad_seed: int
    out_proj_grad_shared_per_row: bool
    out_proj_grad_sigma: float
    out_proj_grad_signed: bool
    out_proj_grad_stats_output_shape: tuple[int, ...]
    out_proj_grad_stats_reduce_dim: int | None
    out_proj_grad_std_dev_epsilon: float
    out_proj_grad_straight_through: bool
    out_proj_grad_tensor_clamp_impl: Component
    out_proj_grad_tensor_quant: Component
    out_proj_grad_threshold: float
    out_proj_grad_threshold_mixin: Injector
    out_proj_grad_ties: Literal["first", "shared", "near"] | None
    out_proj_grad_zero_point_impl: Component

class QScaledActNames(TypedDict, total=False):
    q_scaled_about_mean: bool
    q_scaled_amax_compute_algo: Literal["max", "most_recent"]
    q_scaled_amax_history_length: int
    q_scaled_amax_of_gradient: bool
    q_scaled_averaging_impl: Component
    q_scaled_axis_name: AxisName
    q_scaled_batch_axes: tuple[int, ...]
    q_scaled_bipolar_search: bool
    q_scaled_bit_width: int
    q_scaled_bit_width_impl: Component
    q_scaled_bit_width_impl_type: BitWidthImplType
    q_scaled_block_dim: int | None
    q_scaled_block_scale_impl: Component
    q_scaled_block_width: int
    q_scaled_by_factor: bool
    q_scaled_calibration_impl: Component
    q_scaled_candidates: int
    q_scaled_cast_impl: Component
    q_scaled_channel_axes: int
    q_scaled_channel_shape: tuple[int, ...]
    q_scaled_channelwise_axes: tuple[int, ...]
    q_scaled_clip_gradient: bool
    q_scaled_codebook: Any
    q_scaled_collect_stats_steps: int
    q_scaled_collected_range: float | None
    q_scaled_collected_zero_point: float | None
    q_scaled_compute_max_mantissa: Component
    q_scaled_correction_size: int
    q_scaled_delayed: bool
    q_scaled_dq_dtype: DType
    q_scaled_dynamic_scaling_broadcastable_fn: Component
    q_scaled_exponent_bias: int
    q_scaled_exponent_bias_impl: Component
    q_scaled_exponent_bit_class: Injector
    q_scaled_exponent_bit_width: int
    q_scaled_exponent_bit_width_impl: Component
    q_scaled_exponent_bit_width_impl_type: BitWidthImplType
    q_scaled_exponent_impl: Component
    q_scaled_factor: float
    q_scaled_float_clamp_impl: Component
    q_scaled_float_scaling_impl: Component
    q_scaled_float_to_int_impl: Component
    q_scaled_float_to_int_impl_type: FloatToIntImplType
    q_scaled_folded: bool
    q_scaled_fractions: tuple[float, ...] | None
    q_scaled_gradient_mask_impl: Component
    q_scaled_group_dim: int | None
    q_scaled_group_elements_axis: int | None
    q_scaled_group_padding: bool
    q_scaled_group_size: int | tuple[int, int] | None
    q_scaled_high_percentile_q: float
    q_scaled_hqo_beta_zp: float
    q_scaled_hqo_init_op_zp: Component
    q_scaled_hqo_iters_zp: int
    q_scaled_hqo_kappa_zp: float
    q_scaled_hqo_lp_norm_zp: float
    q_scaled_inf_values: tuple[str, ...] | None
    q_scaled_inner_stats_input_view_shape_impl: Component
    q_scaled_input_view_impl: Component
    q_scaled_int_quant: Component
    q_scaled_int_scaling_impl: Component
    q_scaled_keepdim: bool
    q_scaled_keeps_infinite: bool
    q_scaled_learned_round_gamma: float
    q_scaled_learned_round_impl: Component
    q_scaled_learned_round_impl_type: LearnedRoundImplType
    q_scaled_learned_round_init: Array
    q_scaled_learned_round_temperature: float
    q_scaled_learned_round_zeta: float
    q_scaled_least_scale: float
    q_scaled_limit_steps: float
    q_scaled_low_percentile_q: float
    q_scaled_mantissa_bit_class: Injector
    q_scaled_mantissa_bit_width: int
    q_scaled_mantissa_bit_width_impl: Component
    q_scaled_mantissa_bit_width_impl_type: BitWidthImplType
    q_scaled_margin: float
    q_scaled_max_available_float: float | None
    q_scaled_max_val: float
    q_scaled_memory_shape: tuple[int, ...] | None
    q_scaled_midmax_mantissa_bit_bias: int
    q_scaled_min_bit_width: int
    q_scaled_min_val: float
    q_scaled_momentum: float | None
    q_scaled_mse_scale: Injector
    q_scaled_mse_search_method: Literal["grid", "fibonacci", "exact"]
    q_scaled_mse_zero_point: Injector
    q_scaled_nan_values: tuple[str, ...] | None
    q_scaled_narrow_range: bool
    q_scaled_noise_sharing_axes: tuple[int, ...]
    q_scaled_normal_clip: float
    q_scaled_normal_scale: float
    q_scaled_override_pretrained_bit_width: bool
    q_scaled_per_channel_broadcastable_shape: tuple[int, ...]
    q_scaled_percentile: float
    q_scaled_permute_dims: tuple[int, ...] | None
    q_scaled_power_of_two_factor: bool
    q_scaled_pre_transform: Component
    q_scaled_preserve_zero: bool
    q_scaled_proxy_class: type[QuantProxyFromInjector]
    q_scaled_q_dtype: DType
    q_scaled_quant_delay_steps: int | None
    q_scaled_quant_type: QuantType
    q_scaled_quantize_zero_point: bool
    q_scaled_random_bits: int
    q_scaled_range_steps: float | None
    q_scaled_restart: bool
    q_scaled_restrict_bit_width_impl: Component
    q_scaled_restrict_scale_positive: bool
    q_scaled_restrict_scale_threshold_impl: Component
    q_scaled_restrict_scaling_impl: Component
    q_scaled_restrict_scaling_type: RestrictValueType
    q_scaled_restrict_threshold_impl: Component
    q_scaled_restrict_value_float_to_int_impl: Component
    q_scaled_saturating: bool
    q_scaled_scale_quant: Injector
    q_scaled_scale_rounding: ScaleRounding
    q_scaled_scale_stop_grad: bool
    q_scaled_scale_to_int_impl: Component
    q_scaled_scale_to_int_impl_type: FloatToIntImplType
    q_scaled_scaling_affine_rescaling_init: float | None
    q_scaled_scaling_affine_shifting_init: float | None
    q_scaled_scaling_gradient_scale: float | None
    q_scaled_scaling_impl: Component
    q_scaled_scaling_impl_type: ScalingImplType
    q_scaled_scaling_init: Array
    q_scaled_scaling_init_impl: Component
    q_scaled_scaling_min_val: float | None
    q_scaled_scaling_per_output: ScalingPerOutputType
    q_scaled_scaling_per_output_channel: bool
    q_scaled_scaling_per_output_channel_shape: tuple[int, ...]
    q_scaled_scaling_per_output_type: ScalingPerOutputType
    q_scaled_scaling_shape: tuple[int, ...]
    q_scaled_scaling_stats_impl: Component
    q_scaled_scaling_stats_input_view_shape_impl: Component
    q_scaled_scaling_stats_momentum: float | None
    q_scaled_scaling_stats_op: StatsOp
    q_scaled_scaling_stats_permute_dims: tuple[int, ...] | None
    q_scaled_seed: int
    q_scaled_shared_axes: tuple[int, ...] | None
    q_scaled_shared_per_row: bool
    q_scaled_sigma: float
    q_scaled_signed: bool
    q_scaled_stats_impl_zp: Component
    q_scaled_stats_output_shape: tuple[int, ...]
    q_scaled_stats_reduce_dim: int | None
    q_scaled_std_dev_epsilon: float
    q_scaled_straight_through: bool
    q_scaled_tensor_clamp_impl: Component
    q_scaled_tensor_quant: Component
    q_scaled_threshold: float
    q_scaled_threshold_mixin: Injector
    q_scaled_ties: Literal["first", "shared", "near"] | None
    q_scaled_trust: float
    q_scaled_trust_steps: float
    q_scaled_undo_transform: bool
    q_scaled_zero_point_impl: Component
    q_scaled_zero_point_shape: tuple[int, ...]
    q_scaled_zero_point_stats_impl: Component
    q_scaled_zero_point_stats_input_view_shape_impl: Component
    q_scaled_zero_point_stats_momentum: float | None

class KTransposedActNames(TypedDict, total=False):
    k_transposed_about_mean: bool
    k_transposed_amax_compute_algo: Literal["max", "most_recent"]
    k_transposed_amax_history_length: int
    k_transposed_amax_of_gradient: bool
    k_transposed_averaging_impl: Component
    k_transposed_axis_name: AxisName
    k_transposed_batch_axes: tuple[int, ...]
    k_transposed_bipolar_search: bool
    k_transposed_bit_width: int
    k_transposed_bit_width_impl: Component
    k_transposed_bit_width_impl_type: BitWidthImplType
    k_transposed_block_dim: int | None
    k_transposed_block_scale_impl: Component
    k_transposed_block_width: int
    k_transposed_by_factor: bool
    k_transposed_calibration_impl: Component
    k_transposed_candidates: int
    k_transposed_cast_impl: Component
    k_transposed_channel_axes: int
    k_transposed_channel_shape: tuple[int, ...]
    k_transposed_channelwise_axes: tuple[int, ...]
    k_transposed_clip_gradient: bool
    k_transposed_codebook: Any
    k_transposed_collect_stats_steps: int
    k_transposed_collected_range: float | None
    k_transposed_collected_zero_point: float | None
    k_transposed_compute_max_mantissa: Component
    k_transposed_correction_size: int
    k_transposed_delayed: bool
    k_transposed_dq_dtype: DType
    k_transposed_dynamic_scaling_broadcastable_fn: Component
    k_transposed_exponent_bias: int
    k_transposed_exponent_bias_impl: Component
    k_transposed_exponent_bit_class: Injector
    k_transposed_exponent_bit_width: int
    k_transposed_exponent_bit_width_impl: Component
    k_transposed_exponent_bit_width_impl_type: BitWidthImplType
    k_transposed_exponent_impl: Component
    k_transposed_factor: float
    k_transposed_float_clamp_impl: Component
    k_transposed_float_scaling_impl: Component
    k_transposed_float_to_int_impl: Component
    k_transposed_float_to_int_impl_type: FloatToIntImplType
    k_transposed_folded: bool
    k_transposed_fractions: tuple[float, ...] | None
    k_transposed_gradient_mask_impl: Component
    k_transposed_group_dim: int | None
    k_transposed_group_elements_axis: int | None
    k_transposed_group_padding: bool
    k_transposed_group_size: int | tuple[int, int] | None
    k_transposed_high_percentile_q: float
    k_transposed_hqo_beta_zp: float
    k_transposed_hqo_init_op_zp: Component
    k_transposed_hqo_iters_zp: int
    k_transposed_hqo_kappa_zp: float
    k_transposed_hqo_lp_norm_zp: float
    k_transposed_inf_values: tuple[str, ...] | None
    k_transposed_inner_stats_input_view_shape_impl: Component
    k_transposed_input_view_impl: Component
    k_transposed_int_quant: Component
    k_transposed_int_scaling_impl: Component
    k_transposed_keepdim: bool
    k_transposed_keeps_infinite: bool
    k_transposed_learned_round_gamma: float
    k_transposed_learned_round_impl: Component
    k_transposed_learned_round_impl_type: LearnedRoundImplType
    k_transposed_learned_round_init: Array
    k_transposed_learned_round_temperature: float
    k_transposed_learned_round_zeta: float
    k_transposed_least_scale: float
    k_transposed_limit_steps: float
    k_transposed_low_percentile_q: float
    k_transposed_mantissa_bit_class: Injector
    k_transposed_mantissa_bit_width: int
    k_transposed_mantissa_bit_width_impl: Component
    k_transposed_mantissa_bit_width_impl_type: BitWidthImplType
    k_transposed_margin: float
    k_transposed_max_available_float: float | None
    k_transposed_max_val: float
    k_transposed_memory_shape: tuple[int, ...] | None
    k_transposed_midmax_mantissa_bit_bias: int
    k_transposed_min_bit_width: int
    k_transposed_min_val: float
    k_transposed_momentum: float | None
    k_transposed_mse_scale: Injector
    k_transposed_mse_search_method: Literal["grid", "fibonacci", "exact"]
    k_transposed_mse_zero_point: Injector
    k_transposed_nan_values: tuple[str, ...] | None
    k_transposed_narrow_range: bool
    k_transposed_noise_sharing_axes: tuple[int, ...]
    k_transposed_normal_clip: float
    k_transposed_normal_scale: float
    k_transposed_override_pretrained_bit_width: bool
    k_transposed_per_channel_broadcastable_shape: tuple[int, ...]
    k_transposed_percentile: float
    k_transposed_permute_dims: tuple[int, ...] | None
    k_transposed_power_of_two_factor: bool
    k_transposed_pre_transform: Component
    k_transposed_preserve_zero: bool
    k_transposed_proxy_class: type[QuantProxyFromInjector]
    k_transposed_q_dtype: DType
    k_transposed_quant_delay_steps: int | None
    k_transposed_quant_type: QuantType
    k_transposed_quantize_zero_point: bool
    k_transposed_random_bits: int
    k_transposed_range_steps: float | None
    k_transposed_restart: bool
    k_transposed_restrict_bit_width_impl: Component
    k_transposed_restrict_scale_positive: bool
    k_transposed_restrict_scale_threshold_impl: Component
    k_transposed_restrict_scaling_impl: Component
    k_transposed_restrict_scaling_type: RestrictValueType
    k_transposed_restrict_threshold_impl: Component
    k_transposed_restrict_value_float_to_int_impl: Component
    k_transposed_saturating: bool
    k_transposed_scale_quant: Injector
    k_transposed_scale_rounding: ScaleRounding
    k_transposed_scale_stop_grad: bool
    k_transposed_scale_to_int_impl: Component
    k_transposed_scale_to_int_impl_type: FloatToIntImplType
    k_transposed_scaling_affine_rescaling_init: float | None
    k_transposed_scaling_affine_shifting_init: float | None
    k_transposed_scaling_gradient_scale: float | None
    k_transposed_scaling_impl: Component
    k_transposed_scaling_impl_type: ScalingImplType
    k_transposed_scaling_init: Array
    k_transposed_scaling_init_impl: Component
    k_transposed_scaling_min_val: float | None
    k_transposed_scaling_per_output: ScalingPerOutputType
    k_transposed_scaling_per_output_channel: bool
    k_transposed_scaling_per_output_channel_shape: tuple[int, ...]
    k_transposed_scaling_per_output_type: ScalingPerOutputType
    k_transposed_scaling_shape: tuple[int, ...]
    k_transposed_scaling_stats_impl: Component
    k_transposed_scaling_stats_input_view_shape_impl: Component
    k_transposed_scaling_stats_momentum: float | None
    k_transposed_scaling_stats_op: StatsOp
    k_transposed_scaling_stats_permute_dims: tuple[int, ...] | None
    k_transposed_seed: int
    k_transposed_shared_axes: tuple[int, ...] | None
    k_transposed_shared_per_row: bool
    k_transposed_sigma: float
    k_transposed_signed: bool
    k_transposed_stats_impl_zp: Component
    k_transposed_stats_output_shape: tuple[int, ...]
    k_transposed_stats_reduce_dim: int | None
    k_transposed_std_dev_epsilon: float
    k_transposed_straight_through: bool
    k_transposed_tensor_clamp_impl: Component
    k_transposed_tensor_quant: Component
    k_transposed_threshold: float
    k_transposed_threshold_mixin: Injector
    k_transposed_ties: Literal["first", "shared", "near"] | None
    k_transposed_trust: float
    k_transposed_trust_steps: float
    k_transposed_undo_transform: bool
    k_transposed_zero_point_impl: Component
    k_transposed_zero_point_shape: tuple[int, ...]
    k_transposed_zero_point_stats_impl: Component
    k_transposed_zero_point_stats_input_view_shape_impl: Component
    k_transposed_zero_point_stats_momentum: float | None

class SoftmaxInputActNames(TypedDict, total=False):
    softmax_input_about_mean: bool
    softmax_input_amax_compute_algo: Literal["max", "most_recent"]
    softmax_input_amax_history_length: int
    softmax_input_amax_of_gradient: bool
    softmax_input_averaging_impl: Component
    softmax_input_axis_name: AxisName
    softmax_input_batch_axes: tuple[int, ...]
    softmax_input_bipolar_search: bool
    softmax_input_bit_width: int
    softmax_input_bit_width_impl: Component
    softmax_input_bit_width_impl_type: BitWidthImplType
    softmax_input_block_dim: int | None
    softmax_input_block_scale_impl: Component
    softmax_input_block_width: int
    softmax_input_by_factor: bool
    softmax_input_calibration_impl: Component
    softmax_input_candidates: int
    softmax_input_cast_impl: Component
    softmax_input_channel_axes: int
    softmax_input_channel_shape: tuple[int, ...]
    softmax_input_channelwise_axes: tuple[int, ...]
    softmax_input_clip_gradient: bool
    softmax_input_codebook: Any
    softmax_input_collect_stats_steps: int
    softmax_input_collected_range: float | None
    softmax_input_collected_zero_point: float | None
    softmax_input_compute_max_mantissa: Component
    softmax_input_correction_size: int
    softmax_input_delayed: bool
    softmax_input_dq_dtype: DType
    softmax_input_dynamic_scaling_broadcastable_fn: Component
    softmax_input_exponent_bias: int
    softmax_input_exponent_bias_impl: Component
    softmax_input_exponent_bit_class: Injector
    softmax_input_exponent_bit_width: int
    softmax_input_exponent_bit_width_impl: Component
    softmax_input_exponent_bit_width_impl_type: BitWidthImplType
    softmax_input_exponent_impl: Component
    softmax_input_factor: float
    softmax_input_float_clamp_impl: Component
    softmax_input_float_scaling_impl: Component
    softmax_input_float_to_int_impl: Component
    softmax_input_float_to_int_impl_type: FloatToIntImplType
    softmax_input_folded: bool
    softmax_input_fractions: tuple[float, ...] | None
    softmax_input_gradient_mask_impl: Component
    softmax_input_group_dim: int | None
    softmax_input_group_elements_axis: int | None
    softmax_input_group_padding: bool
    softmax_input_group_size: int | tuple[int, int] | None
    softmax_input_high_percentile_q: float
    softmax_input_hqo_beta_zp: float
    softmax_input_hqo_init_op_zp: Component
    softmax_input_hqo_iters_zp: int
    softmax_input_hqo_kappa_zp: float
    softmax_input_hqo_lp_norm_zp: float
    softmax_input_inf_values: tuple[str, ...] | None
    softmax_input_inner_stats_input_view_shape_impl: Component
    softmax_input_input_view_impl: Component
    softmax_input_int_quant: Component
    softmax_input_int_scaling_impl: Component
    softmax_input_keepdim: bool
    softmax_input_keeps_infinite: bool
    softmax_input_learned_round_gamma: float
    softmax_input_learned_round_impl: Component
    softmax_input_learned_round_impl_type: LearnedRoundImplType
    softmax_input_learned_round_init: Array
    softmax_input_learned_round_temperature: float
    softmax_input_learned_round_zeta: float
    softmax_input_least_scale: float
    softmax_input_limit_steps: float
    softmax_input_low_percentile_q: float
    softmax_input_mantissa_bit_class: Injector
    softmax_input_mantissa_bit_width: int
    softmax_input_mantissa_bit_width_impl: Component
    softmax_input_mantissa_bit_width_impl_type: BitWidthImplType
    softmax_input_margin: float
    softmax_input_max_available_float: float | None
    softmax_input_max_val: float
    softmax_input_memory_shape: tuple[int, ...] | None
    softmax_input_midmax_mantissa_bit_bias: int
    softmax_input_min_bit_width: int
    softmax_input_min_val: float
    softmax_input_momentum: float | None
    softmax_input_mse_scale: Injector
    softmax_input_mse_search_method: Literal["grid", "fibonacci", "exact"]
    softmax_input_mse_zero_point: Injector
    softmax_input_nan_values: tuple[str, ...] | None
    softmax_input_narrow_range: bool
    softmax_input_noise_sharing_axes: tuple[int, ...]
    softmax_input_normal_clip: float
    softmax_input_normal_scale: float
    softmax_input_override_pretrained_bit_width: bool
    softmax_input_per_channel_broadcastable_shape: tuple[int, ...]
    softmax_input_percentile: float
    softmax_input_permute_dims: tuple[int, ...] | None
    softmax_input_power_of_two_factor: bool
    softmax_input_pre_transform: Component
    softmax_input_preserve_zero: bool
    softmax_input_proxy_class: type[QuantProxyFromInjector]
    softmax_input_q_dtype: DType
    softmax_input_quant_delay_steps: int | None
    softmax_input_quant_type: QuantType
    softmax_input_quantize_zero_point: bool
    softmax_input_random_bits: int
    softmax_input_range_steps: float | None
    softmax_input_restart: bool
    softmax_input_restrict_bit_width_impl: Component
    softmax_input_restrict_scale_positive: bool
    softmax_input_restrict_scale_threshold_impl: Component
    softmax_input_restrict_scaling_impl: Component
    softmax_input_restrict_scaling_type: RestrictValueType
    softmax_input_restrict_threshold_impl: Component
    softmax_input_restrict_value_float_to_int_impl: Component
    softmax_input_saturating: bool
    softmax_input_scale_quant: Injector
    softmax_input_scale_rounding: ScaleRounding
    softmax_input_scale_stop_grad: bool
    softmax_input_scale_to_int_impl: Component
    softmax_input_scale_to_int_impl_type: FloatToIntImplType
    softmax_input_scaling_affine_rescaling_init: float | None
    softmax_input_scaling_affine_shifting_init: float | None
    softmax_input_scaling_gradient_scale: float | None
    softmax_input_scaling_impl: Component
    softmax_input_scaling_impl_type: ScalingImplType
    softmax_input_scaling_init: Array
    softmax_input_scaling_init_impl: Component
    softmax_input_scaling_min_val: float | None
    softmax_input_scaling_per_output: ScalingPerOutputType
    softmax_input_scaling_per_output_channel: bool
    softmax_input_scaling_per_output_channel_shape: tuple[int, ...]
    softmax_input_scaling_per_output_type: ScalingPerOutputType
    softmax_input_scaling_shape: tuple[int, ...]
    softmax_input_scaling_stats_impl: Component
    softmax_input_scaling_stats_input_view_shape_impl: Component
    softmax_input_scaling_stats_momentum: float | None
    softmax_input_scaling_stats_op: StatsOp
    softmax_input_scaling_stats_permute_dims: tuple[int, ...] | None
    softmax_input_seed: int
    softmax_input_shared_axes: tuple[int, ...] | None
    softmax_input_shared_per_row: bool
    softmax_input_sigma: float
    softmax_input_signed: bool
    softmax_input_stats_impl_zp: Component
    softmax_input_stats_output_shape: tuple[int, ...]
    softmax_input_stats_reduce_dim: int | None
    softmax_input_std_dev_epsilon: float
    softmax_input_straight_through: bool
    softmax_input_tensor_clamp_impl: Component
    softmax_input_tensor_quant: Component
    softmax_input_threshold: float
    softmax_input_threshold_mixin: Injector
    softmax_input_ties: Literal["first", "shared", "near"] | None
    softmax_input_trust: float
    softmax_input_trust_steps: float
    softmax_input_undo_transform: bool
    softmax_input_zero_point_impl: Component
    softmax_input_zero_point_shape: tuple[int, ...]
    softmax_input_zero_point_stats_impl: Component
    softmax_input_zero_point_stats_input_view_shape_impl: Component
    softmax_input_zero_point_stats_momentum: float | None

class AttnOutputWeightsActNames(TypedDict, total=False):
    attn_output_weights_about_mean: bool
    attn_output_weights_amax_compute_algo: Literal["max", "most_recent"]
    attn_output_weights_amax_history_length: int
    attn_output_weights_amax_of_gradient: bool
    attn_output_weights_averaging_impl: Component
    attn_output_weights_axis_name: AxisName
    attn_output_weights_batch_axes: tuple[int, ...]
    attn_output_weights_bipolar_search: bool
    attn_output_weights_bit_width: int
    attn_output_weights_bit_width_impl: Component
    attn_output_weights_bit_width_impl_type: BitWidthImplType
    attn_output_weights_block_dim: int | None
    attn_output_weights_block_scale_impl: Component
    attn_output_weights_block_width: int
    attn_output_weights_by_factor: bool
    attn_output_weights_calibration_impl: Component
    attn_output_weights_candidates: int
    attn_output_weights_cast_impl: Component
    attn_output_weights_channel_axes: int
    attn_output_weights_channel_shape: tuple[int, ...]
    attn_output_weights_channelwise_axes: tuple[int, ...]
    attn_output_weights_clip_gradient: bool
    attn_output_weights_codebook: Any
    attn_output_weights_collect_stats_steps: int
    attn_output_weights_collected_range: float | None
    attn_output_weights_collected_zero_point: float | None
    attn_output_weights_compute_max_mantissa: Component
    attn_output_weights_correction_size: int
    attn_output_weights_delayed: bool
    attn_output_weights_dq_dtype: DType
    attn_output_weights_dynamic_scaling_broadcastable_fn: Component
    attn_output_weights_exponent_bias: int
    attn_output_weights_exponent_bias_impl: Component
    attn_output_weights_exponent_bit_class: Injector
    attn_output_weights_exponent_bit_width: int
    attn_output_weights_exponent_bit_width_impl: Component
    attn_output_weights_exponent_bit_width_impl_type: BitWidthImplType
    attn_output_weights_exponent_impl: Component
    attn_output_weights_factor: float
    attn_output_weights_float_clamp_impl: Component
    attn_output_weights_float_scaling_impl: Component
    attn_output_weights_float_to_int_impl: Component
    attn_output_weights_float_to_int_impl_type: FloatToIntImplType
    attn_output_weights_folded: bool
    attn_output_weights_fractions: tuple[float, ...] | None
    attn_output_weights_gradient_mask_impl: Component
    attn_output_weights_group_dim: int | None
    attn_output_weights_group_elements_axis: int | None
    attn_output_weights_group_padding: bool
    attn_output_weights_group_size: int | tuple[int, int] | None
    attn_output_weights_high_percentile_q: float
    attn_output_weights_hqo_beta_zp: float
    attn_output_weights_hqo_init_op_zp: Component
    attn_output_weights_hqo_iters_zp: int
    attn_output_weights_hqo_kappa_zp: float
    attn_output_weights_hqo_lp_norm_zp: float
    attn_output_weights_inf_values: tuple[str, ...] | None
    attn_output_weights_inner_stats_input_view_shape_impl: Component
    attn_output_weights_input_view_impl: Component
    attn_output_weights_int_quant: Component
    attn_output_weights_int_scaling_impl: Component
    attn_output_weights_keepdim: bool
    attn_output_weights_keeps_infinite: bool
    attn_output_weights_learned_round_gamma: float
    attn_output_weights_learned_round_impl: Component
    attn_output_weights_learned_round_impl_type: LearnedRoundImplType
    attn_output_weights_learned_round_init: Array
    attn_output_weights_learned_round_temperature: float
    attn_output_weights_learned_round_zeta: float
    attn_output_weights_least_scale: float
    attn_output_weights_limit_steps: float
    attn_output_weights_low_percentile_q: float
    attn_output_weights_mantissa_bit_class: Injector
    attn_output_weights_mantissa_bit_width: int
    attn_output_weights_mantissa_bit_width_impl: Component
    attn_output_weights_mantissa_bit_width_impl_type: BitWidthImplType
    attn_output_weights_margin: float
    attn_output_weights_max_available_float: float | None
    attn_output_weights_max_val: float
    attn_output_weights_memory_shape: tuple[int, ...] | None
    attn_output_weights_midmax_mantissa_bit_bias: int
    attn_output_weights_min_bit_width: int
    attn_output_weights_min_val: float
    attn_output_weights_momentum: float | None
    attn_output_weights_mse_scale: Injector
    attn_output_weights_mse_search_method: Literal["grid", "fibonacci", "exact"]
    attn_output_weights_mse_zero_point: Injector
    attn_output_weights_nan_values: tuple[str, ...] | None
    attn_output_weights_narrow_range: bool
    attn_output_weights_noise_sharing_axes: tuple[int, ...]
    attn_output_weights_normal_clip: float
    attn_output_weights_normal_scale: float
    attn_output_weights_override_pretrained_bit_width: bool
    attn_output_weights_per_channel_broadcastable_shape: tuple[int, ...]
    attn_output_weights_percentile: float
    attn_output_weights_permute_dims: tuple[int, ...] | None
    attn_output_weights_power_of_two_factor: bool
    attn_output_weights_pre_transform: Component
    attn_output_weights_preserve_zero: bool
    attn_output_weights_proxy_class: type[QuantProxyFromInjector]
    attn_output_weights_q_dtype: DType
    attn_output_weights_quant_delay_steps: int | None
    attn_output_weights_quant_type: QuantType
    attn_output_weights_quantize_zero_point: bool
    attn_output_weights_random_bits: int
    attn_output_weights_range_steps: float | None
    attn_output_weights_restart: bool
    attn_output_weights_restrict_bit_width_impl: Component
    attn_output_weights_restrict_scale_positive: bool
    attn_output_weights_restrict_scale_threshold_impl: Component
    attn_output_weights_restrict_scaling_impl: Component
    attn_output_weights_restrict_scaling_type: RestrictValueType
    attn_output_weights_restrict_threshold_impl: Component
    attn_output_weights_restrict_value_float_to_int_impl: Component
    attn_output_weights_saturating: bool
    attn_output_weights_scale_quant: Injector
    attn_output_weights_scale_rounding: ScaleRounding
    attn_output_weights_scale_stop_grad: bool
    attn_output_weights_scale_to_int_impl: Component
    attn_output_weights_scale_to_int_impl_type: FloatToIntImplType
    attn_output_weights_scaling_affine_rescaling_init: float | None
    attn_output_weights_scaling_affine_shifting_init: float | None
    attn_output_weights_scaling_gradient_scale: float | None
    attn_output_weights_scaling_impl: Component
    attn_output_weights_scaling_impl_type: ScalingImplType
    attn_output_weights_scaling_init: Array
    attn_output_weights_scaling_init_impl: Component
    attn_output_weights_scaling_min_val: float | None
    attn_output_weights_scaling_per_output: ScalingPerOutputType
    attn_output_weights_scaling_per_output_channel: bool
    attn_output_weights_scaling_per_output_channel_shape: tuple[int, ...]
    attn_output_weights_scaling_per_output_type: ScalingPerOutputType
    attn_output_weights_scaling_shape: tuple[int, ...]
    attn_output_weights_scaling_stats_impl: Component
    attn_output_weights_scaling_stats_input_view_shape_impl: Component
    attn_output_weights_scaling_stats_momentum: float | None
    attn_output_weights_scaling_stats_op: StatsOp
    attn_output_weights_scaling_stats_permute_dims: tuple[int, ...] | None
    attn_output_weights_seed: int
    attn_output_weights_shared_axes: tuple[int, ...] | None
    attn_output_weights_shared_per_row: bool
    attn_output_weights_sigma: float
    attn_output_weights_signed: bool
    attn_output_weights_stats_impl_zp: Component
    attn_output_weights_stats_output_shape: tuple[int, ...]
    attn_output_weights_stats_reduce_dim: int | None
    attn_output_weights_std_dev_epsilon: float
    attn_output_weights_straight_through: bool
    attn_output_weights_tensor_clamp_impl: Component
    attn_output_weights_tensor_quant: Component
    attn_output_weights_threshold: float
    attn_output_weights_threshold_mixin: Injector
    attn_output_weights_ties: Literal["first", "shared", "near"] | None
    attn_output_weights_trust: float
    attn_output_weights_trust_steps: float
    attn_output_weights_undo_transform: bool
    attn_output_weights_zero_point_impl: Component
    attn_output_weights_zero_point_shape: tuple[int, ...]
    attn_output_weights_zero_point_stats_impl: Component
    attn_output_weights_zero_point_stats_input_view_shape_impl: Component
    attn_output_weights_zero_point_stats_momentum: float | None

class VActNames(TypedDict, total=False):
    v_about_mean: bool
    v_amax_compute_algo: Literal["max", "most_recent"]
    v_amax_history_length: int
    v_amax_of_gradient: bool
    v_averaging_impl: Component
    v_axis_name: AxisName
    v_batch_axes: tuple[int, ...]
    v_bipolar_search: bool
    v_bit_width: int
    v_bit_width_impl: Component
    v_bit_width_impl_type: BitWidthImplType
    v_block_dim: int | None
    v_block_scale_impl: Component
    v_block_width: int
    v_by_factor: bool
    v_calibration_impl: Component
    v_candidates: int
    v_cast_impl: Component
    v_channel_axes: int
    v_channel_shape: tuple[int, ...]
    v_channelwise_axes: tuple[int, ...]
    v_clip_gradient: bool
    v_codebook: Any
    v_collect_stats_steps: int
    v_collected_range: float | None
    v_collected_zero_point: float | None
    v_compute_max_mantissa: Component
    v_correction_size: int
    v_delayed: bool
    v_dq_dtype: DType
    v_dynamic_scaling_broadcastable_fn: Component
    v_exponent_bias: int
    v_exponent_bias_impl: Component
    v_exponent_bit_class: Injector
    v_exponent_bit_width: int
    v_exponent_bit_width_impl: Component
    v_exponent_bit_width_impl_type: BitWidthImplType
    v_exponent_impl: Component
    v_factor: float
    v_float_clamp_impl: Component
    v_float_scaling_impl: Component
    v_float_to_int_impl: Component
    v_float_to_int_impl_type: FloatToIntImplType
    v_folded: bool
    v_fractions: tuple[float, ...] | None
    v_gradient_mask_impl: Component
    v_group_dim: int | None
    v_group_elements_axis: int | None
    v_group_padding: bool
    v_group_size: int | tuple[int, int] | None
    v_high_percentile_q: float
    v_hqo_beta_zp: float
    v_hqo_init_op_zp: Component
    v_hqo_iters_zp: int
    v_hqo_kappa_zp: float
    v_hqo_lp_norm_zp: float
    v_inf_values: tuple[str, ...] | None
    v_inner_stats_input_view_shape_impl: Component
    v_input_view_impl: Component
    v_int_quant: Component
    v_int_scaling_impl: Component
    v_keepdim: bool
    v_keeps_infinite: bool
    v_learned_round_gamma: float
    v_learned_round_impl: Component
    v_learned_round_impl_type: LearnedRoundImplType
    v_learned_round_init: Array
    v_learned_round_temperature: float
    v_learned_round_zeta: float
    v_least_scale: float
    v_limit_steps: float
    v_low_percentile_q: float
    v_mantissa_bit_class: Injector
    v_mantissa_bit_width: int
    v_mantissa_bit_width_impl: Component
    v_mantissa_bit_width_impl_type: BitWidthImplType
    v_margin: float
    v_max_available_float: float | None
    v_max_val: float
    v_memory_shape: tuple[int, ...] | None
    v_midmax_mantissa_bit_bias: int
    v_min_bit_width: int
    v_min_val: float
    v_momentum: float | None
    v_mse_scale: Injector
    v_mse_search_method: Literal["grid", "fibonacci", "exact"]
    v_mse_zero_point: Injector
    v_nan_values: tuple[str, ...] | None
    v_narrow_range: bool
    v_noise_sharing_axes: tuple[int, ...]
    v_normal_clip: float
    v_normal_scale: float
    v_override_pretrained_bit_width: bool
    v_per_channel_broadcastable_shape: tuple[int, ...]
    v_percentile: float
    v_permute_dims: tuple[int, ...] | None
    v_power_of_two_factor: bool
    v_pre_transform: Component
    v_preserve_zero: bool
    v_proxy_class: type[QuantProxyFromInjector]
    v_q_dtype: DType
    v_quant_delay_steps: int | None
    v_quant_type: QuantType
    v_quantize_zero_point: bool
    v_random_bits: int
    v_range_steps: float | None
    v_restart: bool
    v_restrict_bit_width_impl: Component
    v_restrict_scale_positive: bool
    v_restrict_scale_threshold_impl: Component
    v_restrict_scaling_impl: Component
    v_restrict_scaling_type: RestrictValueType
    v_restrict_threshold_impl: Component
    v_restrict_value_float_to_int_impl: Component
    v_saturating: bool
    v_scale_quant: Injector
    v_scale_rounding: ScaleRounding
    v_scale_stop_grad: bool
    v_scale_to_int_impl: Component
    v_scale_to_int_impl_type: FloatToIntImplType
    v_scaling_affine_rescaling_init: float | None
    v_scaling_affine_shifting_init: float | None
    v_scaling_gradient_scale: float | None
    v_scaling_impl: Component
    v_scaling_impl_type: ScalingImplType
    v_scaling_init: Array
    v_scaling_init_impl: Component
    v_scaling_min_val: float | None
    v_scaling_per_output: ScalingPerOutputType
    v_scaling_per_output_channel: bool
    v_scaling_per_output_channel_shape: tuple[int, ...]
    v_scaling_per_output_type: ScalingPerOutputType
    v_scaling_shape: tuple[int, ...]
    v_scaling_stats_impl: Component
    v_scaling_stats_input_view_shape_impl: Component
    v_scaling_stats_momentum: float | None
    v_scaling_stats_op: StatsOp
    v_scaling_stats_permute_dims: tuple[int, ...] | None
    v_seed: int
    v_shared_axes: tuple[int, ...] | None
    v_shared_per_row: bool
    v_sigma: float
    v_signed: bool
    v_stats_impl_zp: Component
    v_stats_output_shape: tuple[int, ...]
    v_stats_reduce_dim: int | None
    v_std_dev_epsilon: float
    v_straight_through: bool
    v_tensor_clamp_impl: Component
    v_tensor_quant: Component
    v_threshold: float
    v_threshold_mixin: Injector
    v_ties: Literal["first", "shared", "near"] | None
    v_trust: float
    v_trust_steps: float
    v_undo_transform: bool
    v_zero_point_impl: Component
    v_zero_point_shape: tuple[int, ...]
    v_zero_point_stats_impl: Component
    v_zero_point_stats_input_view_shape_impl: Component
    v_zero_point_stats_momentum: float | None

class SdpaOutputActNames(TypedDict, total=False):
    sdpa_output_about_mean: bool
    sdpa_output_amax_compute_algo: Literal["max", "most_recent"]
    sdpa_output_amax_history_length: int
    sdpa_output_amax_of_gradient: bool
    sdpa_output_averaging_impl: Component
    sdpa_output_axis_name: AxisName
    sdpa_output_batch_axes: tuple[int, ...]
    sdpa_output_bipolar_search: bool
    sdpa_output_bit_width: int
    sdpa_output_bit_width_impl: Component
    sdpa_output_bit_width_impl_type: BitWidthImplType
    sdpa_output_block_dim: int | None
    sdpa_output_block_scale_impl: Component
    sdpa_output_block_width: int
    sdpa_output_by_factor: bool
    sdpa_output_calibration_impl: Component
    sdpa_output_candidates: int
    sdpa_output_cast_impl: Component
    sdpa_output_channel_axes: int
    sdpa_output_channel_shape: tuple[int, ...]
    sdpa_output_channelwise_axes: tuple[int, ...]
    sdpa_output_clip_gradient: bool
    sdpa_output_codebook: Any
    sdpa_output_collect_stats_steps: int
    sdpa_output_collected_range: float | None
    sdpa_output_collected_zero_point: float | None
    sdpa_output_compute_max_mantissa: Component
    sdpa_output_correction_size: int
    sdpa_output_delayed: bool
    sdpa_output_dq_dtype: DType
    sdpa_output_dynamic_scaling_broadcastable_fn: Component
    sdpa_output_exponent_bias: int
    sdpa_output_exponent_bias_impl: Component
    sdpa_output_exponent_bit_class: Injector
    sdpa_output_exponent_bit_width: int
    sdpa_output_exponent_bit_width_impl: Component
    sdpa_output_exponent_bit_width_impl_type: BitWidthImplType
    sdpa_output_exponent_impl: Component
    sdpa_output_factor: float
    sdpa_output_float_clamp_impl: Component
    sdpa_output_float_scaling_impl: Component
    sdpa_output_float_to_int_impl: Component
    sdpa_output_float_to_int_impl_type: FloatToIntImplType
    sdpa_output_folded: bool
    sdpa_output_fractions: tuple[float, ...] | None
    sdpa_output_gradient_mask_impl: Component
    sdpa_output_group_dim: int | None
    sdpa_output_group_elements_axis: int | None
    sdpa_output_group_padding: bool
    sdpa_output_group_size: int | tuple[int, int] | None
    sdpa_output_high_percentile_q: float
    sdpa_output_hqo_beta_zp: float
    sdpa_output_hqo_init_op_zp: Component
    sdpa_output_hqo_iters_zp: int
    sdpa_output_hqo_kappa_zp: float
    sdpa_output_hqo_lp_norm_zp: float
    sdpa_output_inf_values: tuple[str, ...] | None
    sdpa_output_inner_stats_input_view_shape_impl: Component
    sdpa_output_input_view_impl: Component
    sdpa_output_int_quant: Component
    sdpa_output_int_scaling_impl: Component
    sdpa_output_keepdim: bool
    sdpa_output_keeps_infinite: bool
    sdpa_output_learned_round_gamma: float
    sdpa_output_learned_round_impl: Component
    sdpa_output_learned_round_impl_type: LearnedRoundImplType
    sdpa_output_learned_round_init: Array
    sdpa_output_learned_round_temperature: float
    sdpa_output_learned_round_zeta: float
    sdpa_output_least_scale: float
    sdpa_output_limit_steps: float
    sdpa_output_low_percentile_q: float
    sdpa_output_mantissa_bit_class: Injector
    sdpa_output_mantissa_bit_width: int
    sdpa_output_mantissa_bit_width_impl: Component
    sdpa_output_mantissa_bit_width_impl_type: BitWidthImplType
    sdpa_output_margin: float
    sdpa_output_max_available_float: float | None
    sdpa_output_max_val: float
    sdpa_output_memory_shape: tuple[int, ...] | None
    sdpa_output_midmax_mantissa_bit_bias: int
    sdpa_output_min_bit_width: int
    sdpa_output_min_val: float
    sdpa_output_momentum: float | None
    sdpa_output_mse_scale: Injector
    sdpa_output_mse_search_method: Literal["grid", "fibonacci", "exact"]
    sdpa_output_mse_zero_point: Injector
    sdpa_output_nan_values: tuple[str, ...] | None
    sdpa_output_narrow_range: bool
    sdpa_output_noise_sharing_axes: tuple[int, ...]
    sdpa_output_normal_clip: float
    sdpa_output_normal_scale: float
    sdpa_output_override_pretrained_bit_width: bool
    sdpa_output_per_channel_broadcastable_shape: tuple[int, ...]
    sdpa_output_percentile: float
    sdpa_output_permute_dims: tuple[int, ...] | None
    sdpa_output_power_of_two_factor: bool
    sdpa_output_pre_transform: Component
    sdpa_output_preserve_zero: bool
    sdpa_output_proxy_class: type[QuantProxyFromInjector]
    sdpa_output_q_dtype: DType
    sdpa_output_quant_delay_steps: int | None
    sdpa_output_quant_type: QuantType
    sdpa_output_quantize_zero_point: bool
    sdpa_output_random_bits: int
    sdpa_output_range_steps: float | None
    sdpa_output_restart: bool
    sdpa_output_restrict_bit_width_impl: Component
    sdpa_output_restrict_scale_positive: bool
    sdpa_output_restrict_scale_threshold_impl: Component
    sdpa_output_restrict_scaling_impl: Component
    sdpa_output_restrict_scaling_type: RestrictValueType
    sdpa_output_restrict_threshold_impl: Component
    sdpa_output_restrict_value_float_to_int_impl: Component
    sdpa_output_saturating: bool
    sdpa_output_scale_quant: Injector
    sdpa_output_scale_rounding: ScaleRounding
    sdpa_output_scale_stop_grad: bool
    sdpa_output_scale_to_int_impl: Component
    sdpa_output_scale_to_int_impl_type: FloatToIntImplType
    sdpa_output_scaling_affine_rescaling_init: float | None
    sdpa_output_scaling_affine_shifting_init: float | None
    sdpa_output_scaling_gradient_scale: float | None
    sdpa_output_scaling_impl: Component
    sdpa_output_scaling_impl_type: ScalingImplType
    sdpa_output_scaling_init: Array
    sdpa_output_scaling_init_impl: Component
    sdpa_output_scaling_min_val: float | None
    sdpa_output_scaling_per_output: ScalingPerOutputType
    sdpa_output_scaling_per_output_channel: bool
    sdpa_output_scaling_per_output_channel_shape: tuple[int, ...]
    sdpa_output_scaling_per_output_type: ScalingPerOutputType
    sdpa_output_scaling_shape: tuple[int, ...]
    sdpa_output_scaling_stats_impl: Component
    sdpa_output_scaling_stats_input_view_shape_impl: Component
    sdpa_output_scaling_stats_momentum: float | None
    sdpa_output_scaling_stats_op: StatsOp
    sdpa_output_scaling_stats_permute_dims: tuple[int, ...] | None
    sdpa_output_seed: int
    sdpa_output_shared_axes: tuple[int, ...] | None
    sdpa_output_shared_per_row: bool
    sdpa_output_sigma: float
    sdpa_output_signed: bool
    sdpa_output_stats_impl_zp: Component
    sdpa_output_stats_output_shape: tuple[int, ...]
    sdpa_output_stats_reduce_dim: int | None
    sdpa_output_std_dev_epsilon: float
    sdpa_output_straight_through: bool
    sdpa_output_tensor_clamp_impl: Component
    sdpa_output_tensor_quant: Component
    sdpa_output_threshold: float
    sdpa_output_threshold_mixin: Injector
    sdpa_output_ties: Literal["first", "shared", "near"] | None
    sdpa_output_trust: float
    sdpa_output_trust_steps: float
    sdpa_output_undo_transform: bool
    sdpa_output_zero_point_impl: Component
    sdpa_output_zero_point_shape: tuple[int, ...]
    sdpa_output_zero_point_stats_impl: Component
    sdpa_output_zero_point_stats_input_view_shape_impl: Component
    sdpa_output_zero_point_stats_momentum: float | None

class TruncNames(TypedDict, total=False):
    about_mean: bool
    axis_name: AxisName
    bit_width: int
    bit_width_impl: Component
    bit_width_impl_type: BitWidthImplType
    channel_axes: int
    channel_shape: tuple[int, ...]
    collect_stats_steps: int
    collected_range: float | None
    factor: float
    float_to_int_impl: Component
    float_to_int_impl_type: FloatToIntImplType
    group_dim: int | None
    group_elements_axis: int | None
    high_percentile_q: float
    input_view_impl: Component
    int_scaling_impl: Component
    keepdim: bool
    learned_round_gamma: float
    learned_round_impl: Component
    learned_round_impl_type: LearnedRoundImplType
    learned_round_init: Array
    learned_round_temperature: float
    learned_round_zeta: float
    low_percentile_q: float
    max_val: float
    min_bit_width: int
    min_val: float
    narrow_range: bool
    noise_sharing_axes: tuple[int, ...]
    override_pretrained_bit_width: bool
    per_channel_broadcastable_shape: tuple[int, ...]
    permute_dims: tuple[int, ...] | None
    proxy_class: type[QuantProxyFromInjector]
    quant_delay_steps: int | None
    quant_type: QuantType
    random_bits: int
    restrict_bit_width_impl: Component
    restrict_scale_threshold_impl: Component
    restrict_scaling_impl: Component
    restrict_scaling_type: RestrictValueType
    restrict_threshold_impl: Component
    restrict_value_float_to_int_impl: Component
    scaling_affine_rescaling_init: float | None
    scaling_affine_shifting_init: float | None
    scaling_impl: Component
    scaling_impl_type: ScalingImplType
    scaling_init: Array
    scaling_init_impl: Component
    scaling_min_val: float | None
    scaling_per_output: ScalingPerOutputType
    scaling_per_output_channel: bool
    scaling_per_output_channel_shape: tuple[int, ...]
    scaling_per_output_type: ScalingPerOutputType
    scaling_shape: tuple[int, ...]
    scaling_stats_impl: Component
    scaling_stats_input_view_shape_impl: Component
    scaling_stats_momentum: float | None
    scaling_stats_op: StatsOp
    scaling_stats_permute_dims: tuple[int, ...] | None
    seed: int
    sigma: float
    signed: bool
    stats_output_shape: tuple[int, ...]
    stats_reduce_dim: int | None
    std_dev_epsilon: float
    tensor_clamp_impl: Component
    tensor_quant: Component
    ties: Literal["first", "shared", "near"] | None
    trunc_int_scaling_impl: Component
    trunc_scaling_impl: Component
    trunc_scaling_impl_type: TruncScalingImplType

class LhsActNames(TypedDict, total=False):
    lhs_about_mean: bool
    lhs_amax_compute_algo: Literal["max", "most_recent"]
    lhs_amax_history_length: int
    lhs_amax_of_gradient: bool
    lhs_averaging_impl: Component
    lhs_axis_name: AxisName
    lhs_batch_axes: tuple[int, ...]
    lhs_bipolar_search: bool
    lhs_bit_width: int
    lhs_bit_width_impl: Component
    lhs_bit_width_impl_type: BitWidthImplType
    lhs_block_dim: int | None
    lhs_block_scale_impl: Component
    lhs_block_width: int
    lhs_by_factor: bool
    lhs_calibration_impl: Component
    lhs_candidates: int
    lhs_cast_impl: Component
    lhs_channel_axes: int
    lhs_channel_shape: tuple[int, ...]
    lhs_channelwise_axes: tuple[int, ...]
    lhs_clip_gradient: bool
    lhs_codebook: Any
    lhs_collect_stats_steps: int
    lhs_collected_range: float | None
    lhs_collected_zero_point: float | None
    lhs_compute_max_mantissa: Component
    lhs_correction_size: int
    lhs_delayed: bool
    lhs_dq_dtype: DType
    lhs_dynamic_scaling_broadcastable_fn: Component
    lhs_exponent_bias: int
    lhs_exponent_bias_impl: Component
    lhs_exponent_bit_class: Injector
    lhs_exponent_bit_width: int
    lhs_exponent_bit_width_impl: Component
    lhs_exponent_bit_width_impl_type: BitWidthImplType
    lhs_exponent_impl: Component
    lhs_factor: float
    lhs_float_clamp_impl: Component
    lhs_float_scaling_impl: Component
    lhs_float_to_int_impl: Component
    lhs_float_to_int_impl_type: FloatToIntImplType
    lhs_folded: bool
    lhs_fractions: tuple[float, ...] | None
    lhs_gradient_mask_impl: Component
    lhs_group_dim: int | None
    lhs_group_elements_axis: int | None
    lhs_group_padding: bool
    lhs_group_size: int | tuple[int, int] | None
    lhs_high_percentile_q: float
    lhs_hqo_beta_zp: float
    lhs_hqo_init_op_zp: Component
    lhs_hqo_iters_zp: int
    lhs_hqo_kappa_zp: float
    lhs_hqo_lp_norm_zp: float
    lhs_inf_values: tuple[str, ...] | None
    lhs_inner_stats_input_view_shape_impl: Component
    lhs_input_view_impl: Component
    lhs_int_quant: Component
    lhs_int_scaling_impl: Component
    lhs_keepdim: bool
    lhs_keeps_infinite: bool
    lhs_learned_round_gamma: float
    lhs_learned_round_impl: Component
    lhs_learned_round_impl_type: LearnedRoundImplType
    lhs_learned_round_init: Array
    lhs_learned_round_temperature: float
    lhs_learned_round_zeta: float
    lhs_least_scale: float
    lhs_limit_steps: float
    lhs_low_percentile_q: float
    lhs_mantissa_bit_class: Injector
    lhs_mantissa_bit_width: int
    lhs_mantissa_bit_width_impl: Component
    lhs_mantissa_bit_width_impl_type: BitWidthImplType
    lhs_margin: float
    lhs_max_available_float: float | None
    lhs_max_val: float
    lhs_memory_shape: tuple[int, ...] | None
    lhs_midmax_mantissa_bit_bias: int
    lhs_min_bit_width: int
    lhs_min_val: float
    lhs_momentum: float | None
    lhs_mse_scale: Injector
    lhs_mse_search_method: Literal["grid", "fibonacci", "exact"]
    lhs_mse_zero_point: Injector
    lhs_nan_values: tuple[str, ...] | None
    lhs_narrow_range: bool
    lhs_noise_sharing_axes: tuple[int, ...]
    lhs_normal_clip: float
    lhs_normal_scale: float
    lhs_override_pretrained_bit_width: bool
    lhs_per_channel_broadcastable_shape: tuple[int, ...]
    lhs_percentile: float
    lhs_permute_dims: tuple[int, ...] | None
    lhs_power_of_two_factor: bool
    lhs_pre_transform: Component
    lhs_preserve_zero: bool
    lhs_proxy_class: type[QuantProxyFromInjector]
    lhs_q_dtype: DType
    lhs_quant_delay_steps: int | None
    lhs_quant_type: QuantType
    lhs_quantize_zero_point: bool
    lhs_random_bits: int
    lhs_range_steps: float | None
    lhs_restart: bool
    lhs_restrict_bit_width_impl: Component
    lhs_restrict_scale_positive: bool
    lhs_restrict_scale_threshold_impl: Component
    lhs_restrict_scaling_impl: Component
    lhs_restrict_scaling_type: RestrictValueType
    lhs_restrict_threshold_impl: Component
    lhs_restrict_value_float_to_int_impl: Component
    lhs_saturating: bool
    lhs_scale_quant: Injector
    lhs_scale_rounding: ScaleRounding
    lhs_scale_stop_grad: bool
    lhs_scale_to_int_impl: Component
    lhs_scale_to_int_impl_type: FloatToIntImplType
    lhs_scaling_affine_rescaling_init: float | None
    lhs_scaling_affine_shifting_init: float | None
    lhs_scaling_gradient_scale: float | None
    lhs_scaling_impl: Component
    lhs_scaling_impl_type: ScalingImplType
    lhs_scaling_init: Array
    lhs_scaling_init_impl: Component
    lhs_scaling_min_val: float | None
    lhs_scaling_per_output: ScalingPerOutputType
    lhs_scaling_per_output_channel: bool
    lhs_scaling_per_output_channel_shape: tuple[int, ...]
    lhs_scaling_per_output_type: ScalingPerOutputType
    lhs_scaling_shape: tuple[int, ...]
    lhs_scaling_stats_impl: Component
    lhs_scaling_stats_input_view_shape_impl: Component
    lhs_scaling_stats_momentum: float | None
    lhs_scaling_stats_op: StatsOp
    lhs_scaling_stats_permute_dims: tuple[int, ...] | None
    lhs_seed: int
    lhs_shared_axes: tuple[int, ...] | None
    lhs_shared_per_row: bool
    lhs_sigma: float
    lhs_signed: bool
    lhs_stats_impl_zp: Component
    lhs_stats_output_shape: tuple[int, ...]
    lhs_stats_reduce_dim: int | None
    lhs_std_dev_epsilon: float
    lhs_straight_through: bool
    lhs_tensor_clamp_impl: Component
    lhs_tensor_quant: Component
    lhs_threshold: float
    lhs_threshold_mixin: Injector
    lhs_ties: Literal["first", "shared", "near"] | None
    lhs_trust: float
    lhs_trust_steps: float
    lhs_undo_transform: bool
    lhs_zero_point_impl: Component
    lhs_zero_point_shape: tuple[int, ...]
    lhs_zero_point_stats_impl: Component
    lhs_zero_point_stats_input_view_shape_impl: Component
    lhs_zero_point_stats_momentum: float | None

class RhsActNames(TypedDict, total=False):
    rhs_about_mean: bool
    rhs_amax_compute_algo: Literal["max", "most_recent"]
    rhs_amax_history_length: int
    rhs_amax_of_gradient: bool
    rhs_averaging_impl: Component
    rhs_axis_name: AxisName
    rhs_batch_axes: tuple[int, ...]
    rhs_bipolar_search: bool
    rhs_bit_width: int
    rhs_bit_width_impl: Component
    rhs_bit_width_impl_type: BitWidthImplType
    rhs_block_dim: int | None
    rhs_block_scale_impl: Component
    rhs_block_width: int
    rhs_by_factor: bool
    rhs_calibration_impl: Component
    rhs_candidates: int
    rhs_cast_impl: Component
    rhs_channel_axes: int
    rhs_channel_shape: tuple[int, ...]
    rhs_channelwise_axes: tuple[int, ...]
    rhs_clip_gradient: bool
    rhs_codebook: Any
    rhs_collect_stats_steps: int
    rhs_collected_range: float | None
    rhs_collected_zero_point: float | None
    rhs_compute_max_mantissa: Component
    rhs_correction_size: int
    rhs_delayed: bool
    rhs_dq_dtype: DType
    rhs_dynamic_scaling_broadcastable_fn: Component
    rhs_exponent_bias: int
    rhs_exponent_bias_impl: Component
    rhs_exponent_bit_class: Injector
    rhs_exponent_bit_width: int
    rhs_exponent_bit_width_impl: Component
    rhs_exponent_bit_width_impl_type: BitWidthImplType
    rhs_exponent_impl: Component
    rhs_factor: float
    rhs_float_clamp_impl: Component
    rhs_float_scaling_impl: Component
    rhs_float_to_int_impl: Component
    rhs_float_to_int_impl_type: FloatToIntImplType
    rhs_folded: bool
    rhs_fractions: tuple[float, ...] | None
    rhs_gradient_mask_impl: Component
    rhs_group_dim: int | None
    rhs_group_elements_axis: int | None
    rhs_group_padding: bool
    rhs_group_size: int | tuple[int, int] | None
    rhs_high_percentile_q: float
    rhs_hqo_beta_zp: float
    rhs_hqo_init_op_zp: Component
    rhs_hqo_iters_zp: int
    rhs_hqo_kappa_zp: float
    rhs_hqo_lp_norm_zp: float
    rhs_inf_values: tuple[str, ...] | None
    rhs_inner_stats_input_view_shape_impl: Component
    rhs_input_view_impl: Component
    rhs_int_quant: Component
    rhs_int_scaling_impl: Component
    rhs_keepdim: bool
    rhs_keeps_infinite: bool
    rhs_learned_round_gamma: float
    rhs_learned_round_impl: Component
    rhs_learned_round_impl_type: LearnedRoundImplType
    rhs_learned_round_init: Array
    rhs_learned_round_temperature: float
    rhs_learned_round_zeta: float
    rhs_least_scale: float
    rhs_limit_steps: float
    rhs_low_percentile_q: float
    rhs_mantissa_bit_class: Injector
    rhs_mantissa_bit_width: int
    rhs_mantissa_bit_width_impl: Component
    rhs_mantissa_bit_width_impl_type: BitWidthImplType
    rhs_margin: float
    rhs_max_available_float: float | None
    rhs_max_val: float
    rhs_memory_shape: tuple[int, ...] | None
    rhs_midmax_mantissa_bit_bias: int
    rhs_min_bit_width: int
    rhs_min_val: float
    rhs_momentum: float | None
    rhs_mse_scale: Injector
    rhs_mse_search_method: Literal["grid", "fibonacci", "exact"]
    rhs_mse_zero_point: Injector
    rhs_nan_values: tuple[str, ...] | None
    rhs_narrow_range: bool
    rhs_noise_sharing_axes: tuple[int, ...]
    rhs_normal_clip: float
    rhs_normal_scale: float
    rhs_override_pretrained_bit_width: bool
    rhs_per_channel_broadcastable_shape: tuple[int, ...]
    rhs_percentile: float
    rhs_permute_dims: tuple[int, ...] | None
    rhs_power_of_two_factor: bool
    rhs_pre_transform: Component
    rhs_preserve_zero: bool
    rhs_proxy_class: type[QuantProxyFromInjector]
    rhs_q_dtype: DType
    rhs_quant_delay_steps: int | None
    rhs_quant_type: QuantType
    rhs_quantize_zero_point: bool
    rhs_random_bits: int
    rhs_range_steps: float | None
    rhs_restart: bool
    rhs_restrict_bit_width_impl: Component
    rhs_restrict_scale_positive: bool
    rhs_restrict_scale_threshold_impl: Component
    rhs_restrict_scaling_impl: Component
    rhs_restrict_scaling_type: RestrictValueType
    rhs_restrict_threshold_impl: Component
    rhs_restrict_value_float_to_int_impl: Component
    rhs_saturating: bool
    rhs_scale_quant: Injector
    rhs_scale_rounding: ScaleRounding
    rhs_scale_stop_grad: bool
    rhs_scale_to_int_impl: Component
    rhs_scale_to_int_impl_type: FloatToIntImplType
    rhs_scaling_affine_rescaling_init: float | None
    rhs_scaling_affine_shifting_init: float | None
    rhs_scaling_gradient_scale: float | None
    rhs_scaling_impl: Component
    rhs_scaling_impl_type: ScalingImplType
    rhs_scaling_init: Array
    rhs_scaling_init_impl: Component
    rhs_scaling_min_val: float | None
    rhs_scaling_per_output: ScalingPerOutputType
    rhs_scaling_per_output_channel: bool
    rhs_scaling_per_output_channel_shape: tuple[int, ...]
    rhs_scaling_per_output_type: ScalingPerOutputType
    rhs_scaling_shape: tuple[int, ...]
    rhs_scaling_stats_impl: Component
    rhs_scaling_stats_input_view_shape_impl: Component
    rhs_scaling_stats_momentum: float | None
    rhs_scaling_stats_op: StatsOp
    rhs_scaling_stats_permute_dims: tuple[int, ...] | None
    rhs_seed: int
    rhs_shared_axes: tuple[int, ...] | None
    rhs_shared_per_row: bool
    rhs_sigma: float
    rhs_signed: bool
    rhs_stats_impl_zp: Component
    rhs_stats_output_shape: tuple[int, ...]
    rhs_stats_reduce_dim: int | None
    rhs_std_dev_epsilon: float
    rhs_straight_through: bool
    rhs_tensor_clamp_impl: Component
    rhs_tensor_quant: Component
    rhs_threshold: float
    rhs_threshold_mixin: Injector
    rhs_ties: Literal["first", "shared", "near"] | None
    rhs_trust: float
    rhs_trust_steps: float
    rhs_undo_transform: bool
    rhs_zero_point_impl: Component
    rhs_zero_point_shape: tuple[int, ...]
    rhs_zero_point_stats_impl: Component
    rhs_zero_point_stats_input_view_shape_impl: Component
    rhs_zero_point_stats_momentum: float | None

class CacheActNames(TypedDict, total=False):
    cache_about_mean: bool
    cache_amax_compute_algo: Literal["max", "most_recent"]
    cache_amax_history_length: int
    cache_amax_of_gradient: bool
    cache_averaging_impl: Component
    cache_axis_name: AxisName
    cache_batch_axes: tuple[int, ...]
    cache_bipolar_search: bool
    cache_bit_width: int
    cache_bit_width_impl: Component
    cache_bit_width_impl_type: BitWidthImplType
    cache_block_dim: int | None
    cache_block_scale_impl: Component
    cache_block_width: int
    cache_by_factor: bool
    cache_calibration_impl: Component
    cache_candidates: int
    cache_cast_impl: Component
    cache_channel_axes: int
    cache_channel_shape: tuple[int, ...]
    cache_channelwise_axes: tuple[int, ...]
    cache_clip_gradient: bool
    cache_codebook: Any
    cache_collect_stats_steps: int
    cache_collected_range: float | None
    cache_collected_zero_point: float | None
    cache_compute_max_mantissa: Component
    cache_correction_size: int
    cache_delayed: bool
    cache_dq_dtype: DType
    cache_dynamic_scaling_broadcastable_fn: Component
    cache_exponent_bias: int
    cache_exponent_bias_impl: Component
    cache_exponent_bit_class: Injector
    cache_exponent_bit_width: int
    cache_exponent_bit_width_impl: Component
    cache_exponent_bit_width_impl_type: BitWidthImplType
    cache_exponent_impl: Component
    cache_factor: float
    cache_float_clamp_impl: Component
    cache_float_scaling_impl: Component
    cache_float_to_int_impl: Component
    cache_float_to_int_impl_type: FloatToIntImplType
    cache_folded: bool
    cache_fractions: tuple[float, ...] | None
    cache_gradient_mask_impl: Component
    cache_group_dim: int | None
    cache_group_elements_axis: int | None
    cache_group_padding: bool
    cache_group_size: int | tuple[int, int] | None
    cache_high_percentile_q: float
    cache_hqo_beta_zp: float
    cache_hqo_init_op_zp: Component
    cache_hqo_iters_zp: int
    cache_hqo_kappa_zp: float
    cache_hqo_lp_norm_zp: float
    cache_inf_values: tuple[str, ...] | None
    cache_inner_stats_input_view_shape_impl: Component
    cache_input_view_impl: Component
    cache_int_quant: Component
    cache_int_scaling_impl: Component
    cache_keepdim: bool
    cache_keeps_infinite: bool
    cache_learned_round_gamma: float
    cache_learned_round_impl: Component
    cache_learned_round_impl_type: LearnedRoundImplType
    cache_learned_round_init: Array
    cache_learned_round_temperature: float
    cache_learned_round_zeta: float
    cache_least_scale: float
    cache_limit_steps: float
    cache_low_percentile_q: float
    cache_mantissa_bit_class: Injector
    cache_mantissa_bit_width: int
    cache_mantissa_bit_width_impl: Component
    cache_mantissa_bit_width_impl_type: BitWidthImplType
    cache_margin: float
    cache_max_available_float: float | None
    cache_max_val: float
    cache_memory_shape: tuple[int, ...] | None
    cache_midmax_mantissa_bit_bias: int
    cache_min_bit_width: int
    cache_min_val: float
    cache_momentum: float | None
    cache_mse_scale: Injector
    cache_mse_search_method: Literal["grid", "fibonacci", "exact"]
    cache_mse_zero_point: Injector
    cache_nan_values: tuple[str, ...] | None
    cache_narrow_range: bool
    cache_noise_sharing_axes: tuple[int, ...]
    cache_normal_clip: float
    cache_normal_scale: float
    cache_override_pretrained_bit_width: bool
    cache_per_channel_broadcastable_shape: tuple[int, ...]
    cache_percentile: float
    cache_permute_dims: tuple[int, ...] | None
    cache_power_of_two_factor: bool
    cache_pre_transform: Component
    cache_preserve_zero: bool
    cache_proxy_class: type[QuantProxyFromInjector]
    cache_q_dtype: DType
    cache_quant_delay_steps: int | None
    cache_quant_type: QuantType
    cache_quantize_zero_point: bool
    cache_random_bits: int
    cache_range_steps: float | None
    cache_restart: bool
    cache_restrict_bit_width_impl: Component
    cache_restrict_scale_positive: bool
    cache_restrict_scale_threshold_impl: Component
    cache_restrict_scaling_impl: Component
    cache_restrict_scaling_type: RestrictValueType
    cache_restrict_threshold_impl: Component
    cache_restrict_value_float_to_int_impl: Component
    cache_saturating: bool
    cache_scale_quant: Injector
    cache_scale_rounding: ScaleRounding
    cache_scale_stop_grad: bool
    cache_scale_to_int_impl: Component
    cache_scale_to_int_impl_type: FloatToIntImplType
    cache_scaling_affine_rescaling_init: float | None
    cache_scaling_affine_shifting_init: float | None
    cache_scaling_gradient_scale: float | None
    cache_scaling_impl: Component
    cache_scaling_impl_type: ScalingImplType
    cache_scaling_init: Array
    cache_scaling_init_impl: Component
    cache_scaling_min_val: float | None
    cache_scaling_per_output: ScalingPerOutputType
    cache_scaling_per_output_channel: bool
    cache_scaling_per_output_channel_shape: tuple[int, ...]
    cache_scaling_per_output_type: ScalingPerOutputType
    cache_scaling_shape: tuple[int, ...]
    cache_scaling_stats_impl: Component
    cache_scaling_stats_input_view_shape_impl: Component
    cache_scaling_stats_momentum: float | None
    cache_scaling_stats_op: StatsOp
    cache_scaling_stats_permute_dims: tuple[int, ...] | None
    cache_seed: int
    cache_shared_axes: tuple[int, ...] | None
    cache_shared_per_row: bool
    cache_sigma: float
    cache_signed: bool
    cache_stats_impl_zp: Component
    cache_stats_output_shape: tuple[int, ...]
    cache_stats_reduce_dim: int | None
    cache_std_dev_epsilon: float
    cache_straight_through: bool
    cache_tensor_clamp_impl: Component
    cache_tensor_quant: Component
    cache_threshold: float
    cache_threshold_mixin: Injector
    cache_ties: Literal["first", "shared", "near"] | None
    cache_trust: float
    cache_trust_steps: float
    cache_undo_transform: bool
    cache_zero_point_impl: Component
    cache_zero_point_shape: tuple[int, ...]
    cache_zero_point_stats_impl: Component
    cache_zero_point_stats_input_view_shape_impl: Component
    cache_zero_point_stats_momentum: float | None

class QuantAvgPoolKeywords(InputActNames, OutputActNames, total=False):
    input_quant: QuantizerLike
    output_quant: QuantizerLike
    return_quant_tensor: bool

class QuantBatchNormKeywords(InputActNames, OutputActNames, GradGradNames, total=False):
    act_quant: QuantizerLike
    axis: int
    axis_index_groups: Any
    axis_name: Optional[str]
    bias_init: Initializer
    bias_metadata: Mapping[str, Any]
    dtype: Optional[Dtype]
    epsilon: float
    grad_quant: QuantizerLike
    input_quant: QuantizerLike
    momentum: float
    output_quant: QuantizerLike
    param_dtype: Dtype
    promote_dtype: PromoteDtypeFn
    return_quant_tensor: bool
    scale_init: Initializer
    scale_metadata: Mapping[str, Any]
    use_bias: bool
    use_fast_variance: bool
    use_running_average: bool | None
    use_scale: bool

class QuantCheckpointKeywords(ActNames, GradGradNames, total=False):
    grad_quant: QuantizerLike

class QuantConcatKeywords(InputActNames, OutputActNames, total=False):
    return_quant_tensor: bool

class QuantConvKeywords(WeightWeightNames, BiasBiasNames, InputActNames, OutputActNames, GradGradNames, total=False):
    act_quant: QuantizerLike
    bias_init: Initializer
    bias_metadata: Mapping[str, Any]
    bias_quant: QuantizerLike
    contraction: ContractionKind
    conv_general_dilated: ConvGeneralDilatedT
    dtype: Optional[Dtype]
    feature_group_count: int
    grad_quant: QuantizerLike
    input_dilation: Union[None, int, Sequence[int]]
    input_quant: QuantizerLike
    kernel_dilation: Union[None, int, Sequence[int]]
    kernel_init: Initializer
    kernel_metadata: Mapping[str, Any]
    mask: Optional[jax.Array]
    output_quant: QuantizerLike
    padding: PaddingLike
    param_dtype: Dtype
    precision: PrecisionLike
    preferred_element_type: Dtype | None
    promote_dtype: PromoteDtypeFn
    return_quant_tensor: bool
    scheme: SchemeLike
    use_bias: bool
    weight_quant: QuantizerLike

class QuantConvTransposeKeywords(WeightWeightNames, BiasBiasNames, InputActNames, OutputActNames, GradGradNames, total=False):
    act_quant: QuantizerLike
    bias_init: Initializer
    bias_metadata: Mapping[str, Any]
    bias_quant: QuantizerLike
    contraction: ContractionKind
    dtype: Dtype | None
    grad_quant: QuantizerLike
    input_quant: QuantizerLike
    kernel_dilation: int | Sequence[int] | None
    kernel_init: Initializer
    kernel_metadata: Mapping[str, Any]
    mask: jax.Array | None
    output_quant: QuantizerLike
    padding: PaddingLike
    param_dtype: Dtype
    precision: PrecisionLike | None
    preferred_element_type: Dtype | None
    promote_dtype: PromoteDtypeFn
    return_quant_tensor: bool
    transpose_kernel: bool
    use_bias: bool
    weight_quant: QuantizerLike

class QuantEinsumKeywords(WeightWeightNames, BiasBiasNames, InputActNames, OutputActNames, GradGradNames, total=False):
    act_quant: QuantizerLike
    bias_init: Initializer
    bias_metadata: Mapping[str, Any]
    bias_quant: QuantizerLike
    contraction: ContractionKind
    dtype: Optional[Dtype]
    einsum_op: EinsumT
    grad_quant: QuantizerLike
    input_quant: QuantizerLike
    kernel_init: Initializer
    kernel_metadata: Mapping[str, Any]
    output_quant: QuantizerLike
    param_dtype: Dtype
    precision: PrecisionLike
    preferred_element_type: Dtype | None
    promote_dtype: PromoteDtypeFn
    return_quant_tensor: bool
    scheme: SchemeLike
    weight_quant: QuantizerLike

class QuantEltwiseAddKeywords(InputActNames, OutputActNames, total=False):
    return_quant_tensor: bool

class QuantEmbedKeywords(WeightWeightNames, OutputActNames, GradGradNames, total=False):
    dtype: Optional[Dtype]
    embedding_init: Initializer
    embedding_metadata: Mapping[str, Any]
    grad_quant: QuantizerLike
    output_quant: QuantizerLike
    param_dtype: Dtype
    promote_dtype: PromoteDtypeFn
    return_quant_tensor: bool
    weight_quant: QuantizerLike

class QuantGRUCellKeywords(WeightWeightNames, BiasBiasNames, IoActNames, GateAccActNames, SigmoidActNames, TanhActNames, total=False):
    activation_fn: Callable[..., Any]
    bias_init: Initializer
    bias_metadata: Mapping[str, Any]
    bias_quant: QuantizerLike
    carry_init: Initializer | None
    dtype: Dtype | None
    gate_acc_quant: QuantizerLike
    gate_fn: Callable[..., Any]
    io_quant: QuantizerLike
    keep_rngs: bool
    kernel_init: Initializer
    kernel_metadata: Mapping[str, Any]
    param_dtype: Dtype
    promote_dtype: PromoteDtypeFn
    recurrent_kernel_init: Initializer
    recurrent_kernel_metadata: Mapping[str, Any]
    sigmoid_quant: QuantizerLike
    tanh_quant: QuantizerLike
    weight_quant: QuantizerLike

class QuantGroupNormKeywords(InputActNames, OutputActNames, GradGradNames, total=False):
    act_quant: QuantizerLike
    axis_index_groups: Any
    axis_name: Optional[str]
    bias_init: Initializer
    bias_metadata: Mapping[str, Any]
    dtype: Optional[Dtype]
    epsilon: float
    grad_quant: QuantizerLike
    input_quant: QuantizerLike
    output_quant: QuantizerLike
    param_dtype: Dtype
    promote_dtype: PromoteDtypeFn
    reduction_axes: Optional[Axes]
    return_quant_tensor: bool
    scale_init: Initializer
    scale_metadata: Mapping[str, Any]
    use_bias: bool
    use_fast_variance: bool
    use_scale: bool

class QuantHardSwishKeywords(InputActNames, GradGradNames, total=False):
    about_mean: bool
    amax_compute_algo: Literal["max", "most_recent"]
    amax_history_length: int
    amax_of_gradient: bool
    averaging_impl: Component
    axis_name: AxisName
    batch_axes: tuple[int, ...]
    bipolar_search: bool
    bit_width: int
    bit_width_impl: Component
    bit_width_impl_type: BitWidthImplType
    block_dim: int | None
    block_scale_impl: Component
    block_width: int
    by_factor: bool
    calibration_impl: Component
    candidates: int
    cast_impl: Component
    channel_axes: int
    channel_shape: tuple[int, ...]
    channelwise_axes: tuple[int, ...]
    clip_gradient: bool
    codebook: Any
    collect_stats_steps: int
    collected_range: float | None
    collected_zero_point: float | None
    compute_max_mantissa: Component
    correction_size: int
    delayed: bool
    dq_dtype: DType
    dynamic_scaling_broadcastable_fn: Component
    exponent_bias: int
    exponent_bias_impl: Component
    exponent_bit_class: Injector
    exponent_bit_width: int
    exponent_bit_width_impl: Component
    exponent_bit_width_impl_type: BitWidthImplType
    exponent_impl: Component
    factor: float
    float_clamp_impl: Component
    float_scaling_impl: Component
    float_to_int_impl: Component
    float_to_int_impl_type: FloatToIntImplType
    folded: bool
    fractions: tuple[float, ...] | None
    grad_quant: QuantizerLike
    gradient_mask_impl: Component
    group_dim: int | None
    group_elements_axis: int | None
    group_padding: bool
    group_size: int | tuple[int, int] | None
    high_percentile_q: float
    hqo_beta_zp: float
    hqo_init_op_zp: Component
    hqo_iters_zp: int
    hqo_kappa_zp: float
    hqo_lp_norm_zp: float
    inf_values: tuple[str, ...] | None
    inner_stats_input_view_shape_impl: Component
    int_quant: Component
    int_scaling_impl: Component
    keepdim: bool
    keeps_infinite: bool
    learned_round_gamma: float
    learned_round_impl: Component
    learned_round_impl_type: LearnedRoundImplType
    learned_round_init: Array
    learned_round_temperature: float
    learned_round_zeta: float
    least_scale: float
    limit_steps: float
    low_percentile_q: float
    mantissa_bit_class: Injector
    mantissa_bit_width: int
    mantissa_bit_width_impl: Component
    mantissa_bit_width_impl_type: BitWidthImplType
    margin: float
    max_available_float: float | None
    max_val: float
    memory_shape: tuple[int, ...] | None
    midmax_mantissa_bit_bias: int
    min_bit_width: int
    min_val: float
    momentum: float | None
    mse_scale: Injector
    mse_search_method: Literal["grid", "fibonacci", "exact"]
    mse_zero_point: Injector
    nan_values: tuple[str, ...] | None
    narrow_range: bool
    noise_sharing_axes: tuple[int, ...]
    normal_clip: float
    normal_scale: float
    override_pretrained_bit_width: bool
    per_channel_broadcastable_shape: tuple[int, ...]
    percentile: float
    permute_dims: tuple[int, ...] | None
    power_of_two_factor: bool
    pre_transform: Component
    preserve_zero: bool
    proxy_class: type[QuantProxyFromInjector]
    q_dtype: DType
    quant_delay_steps: int | None
    quant_type: QuantType
    quantize_zero_point: bool
    random_bits: int
    range_steps: float | None
    restart: bool
    restrict_bit_width_impl: Component
    restrict_scale_positive: bool
    restrict_scale_threshold_impl: Component
    restrict_scaling_impl: Component
    restrict_scaling_type: RestrictValueType
    restrict_threshold_impl: Component
    restrict_value_float_to_int_impl: Component
    return_quant_tensor: bool
    saturating: bool
    scale_quant: Injector
    scale_rounding: ScaleRounding
    scale_stop_grad: bool
    scale_to_int_impl: Component
    scale_to_int_impl_type: FloatToIntImplType
    scaling_affine_rescaling_init: float | None
    scaling_affine_shifting_init: float | None
    scaling_gradient_scale: float | None
    scaling_impl: Component
    scaling_impl_type: ScalingImplType
    scaling_init: Array
    scaling_init_impl: Component
    scaling_min_val: float | None
    scaling_per_output: ScalingPerOutputType
    scaling_per_output_channel: bool
    scaling_per_output_channel_shape: tuple[int, ...]
    scaling_per_output_type: ScalingPerOutputType
    scaling_shape: tuple[int, ...]
    scaling_stats_impl: Component
    scaling_stats_input_view_shape_impl: Component
    scaling_stats_momentum: float | None
    scaling_stats_op: StatsOp
    scaling_stats_permute_dims: tuple[int, ...] | None
    seed: int
    shared_axes: tuple[int, ...] | None
    shared_per_row: bool
    sigma: float
    signed: bool
    stats_impl_zp: Component
    stats_output_shape: tuple[int, ...]
    stats_reduce_dim: int | None
    std_dev_epsilon: float
    straight_through: bool
    tensor_clamp_impl: Component
    tensor_quant: Component
    threshold: float
    threshold_mixin: Injector
    ties: Literal["first", "shared", "near"] | None
    trust: float
    trust_steps: float
    undo_transform: bool
    zero_point_impl: Component
    zero_point_shape: tuple[int, ...]
    zero_point_stats_impl: Component
    zero_point_stats_input_view_shape_impl: Component
    zero_point_stats_momentum: float | None

class QuantHardTanhKeywords(InputActNames, GradGradNames, total=False):
    about_mean: bool
    amax_compute_algo: Literal["max", "most_recent"]
    amax_history_length: int
    amax_of_gradient: bool
    averaging_impl: Component
    axis_name: AxisName
    batch_axes: tuple[int, ...]
    bipolar_search: bool
    bit_width: int
    bit_width_impl: Component
    bit_width_impl_type: BitWidthImplType
    block_dim: int | None
    block_scale_impl: Component
    block_width: int
    by_factor: bool
    calibration_impl: Component
    candidates: int
    cast_impl: Component
    channel_axes: int
    channel_shape: tuple[int, ...]
    channelwise_axes: tuple[int, ...]
    clip_gradient: bool
    codebook: Any
    collect_stats_steps: int
    collected_range: float | None
    collected_zero_point: float | None
    compute_max_mantissa: Component
    correction_size: int
    delayed: bool
    dq_dtype: DType
    dynamic_scaling_broadcastable_fn: Component
    exponent_bias: int
    exponent_bias_impl: Component
    exponent_bit_class: Injector
    exponent_bit_width: int
    exponent_bit_width_impl: Component
    exponent_bit_width_impl_type: BitWidthImplType
    exponent_impl: Component
    factor: float
    float_clamp_impl: Component
    float_scaling_impl: Component
    float_to_int_impl: Component
    float_to_int_impl_type: FloatToIntImplType
    folded: bool
    fractions: tuple[float, ...] | None
    grad_quant: QuantizerLike
    gradient_mask_impl: Component
    group_dim: int | None
    group_elements_axis: int | None
    group_padding: bool
    group_size: int | tuple[int, int] | None
    high_percentile_q: float
    hqo_beta_zp: float
    hqo_init_op_zp: Component
    hqo_iters_zp: int
    hqo_kappa_zp: float
    hqo_lp_norm_zp: float
    inf_values: tuple[str, ...] | None
    inner_stats_input_view_shape_impl: Component
    int_quant: Component
    int_scaling_impl: Component
    keepdim: bool
    keeps_infinite: bool
    learned_round_gamma: float
    learned_round_impl: Component
    learned_round_impl_type: LearnedRoundImplType
    learned_round_init: Array
    learned_round_temperature: float
    learned_round_zeta: float
    least_scale: float
    limit_steps: float
    low_percentile_q: float
    mantissa_bit_class: Injector
    mantissa_bit_width: int
    mantissa_bit_width_impl: Component
    mantissa_bit_width_impl_type: BitWidthImplType
    margin: float
    max_available_float: float | None
    memory_shape: tuple[int, ...] | None
    midmax_mantissa_bit_bias: int
    min_bit_width: int
    momentum: float | None
    mse_scale: Injector
    mse_search_method: Literal["grid", "fibonacci", "exact"]
    mse_zero_point: Injector
    nan_values: tuple[str, ...] | None
    narrow_range: bool
    noise_sharing_axes: tuple[int, ...]
    normal_clip: float
    normal_scale: float
    override_pretrained_bit_width: bool
    per_channel_broadcastable_shape: tuple[int, ...]
    percentile: float
    permute_dims: tuple[int, ...] | None
    power_of_two_factor: bool
    pre_transform: Component
    preserve_zero: bool
    proxy_class: type[QuantProxyFromInjector]
    q_dtype: DType
    quant_delay_steps: int | None
    quant_type: QuantType
    quantize_zero_point: bool
    random_bits: int
    range_steps: float | None
    restart: bool
    restrict_bit_width_impl: Component
    restrict_scale_positive: bool
    restrict_scale_threshold_impl: Component
    restrict_scaling_impl: Component
    restrict_scaling_type: RestrictValueType
    restrict_threshold_impl: Component
    restrict_value_float_to_int_impl: Component
    return_quant_tensor: bool
    saturating: bool
    scale_quant: Injector
    scale_rounding: ScaleRounding
    scale_stop_grad: bool
    scale_to_int_impl: Component
    scale_to_int_impl_type: FloatToIntImplType
    scaling_affine_rescaling_init: float | None
    scaling_affine_shifting_init: float | None
    scaling_gradient_scale: float | None
    scaling_impl: Component
    scaling_impl_type: ScalingImplType
    scaling_init: Array
    scaling_init_impl: Component
    scaling_min_val: float | None
    scaling_per_output: ScalingPerOutputType
    scaling_per_output_channel: bool
    scaling_per_output_channel_shape: tuple[int, ...]
    scaling_per_output_type: ScalingPerOutputType
    scaling_shape: tuple[int, ...]
    scaling_stats_impl: Component
    scaling_stats_input_view_shape_impl: Component
    scaling_stats_momentum: float | None
    scaling_stats_op: StatsOp
    scaling_stats_permute_dims: tuple[int, ...] | None
    seed: int
    shared_axes: tuple[int, ...] | None
    shared_per_row: bool
    sigma: float
    signed: bool
    stats_impl_zp: Component
    stats_output_shape: tuple[int, ...]
    stats_reduce_dim: int | None
    std_dev_epsilon: float
    straight_through: bool
    tensor_clamp_impl: Component
    tensor_quant: Component
    threshold: float
    threshold_mixin: Injector
    ties: Literal["first", "shared", "near"] | None
    trust: float
    trust_steps: float
    undo_transform: bool
    zero_point_impl: Component
    zero_point_shape: tuple[int, ...]
    zero_point_stats_impl: Component
    zero_point_stats_input_view_shape_impl: Component
    zero_point_stats_momentum: float | None

class QuantIdentityKeywords(ActNames, GradGradNames, total=False):
    grad_quant: QuantizerLike
    return_quant_tensor: bool

class QuantLSTMKeywords(WeightWeightNames, BiasBiasNames, IoActNames, CellStateActNames, GateAccActNames, SigmoidActNames, TanhActNames, total=False):
    activation_fn: Callable[..., Any]
    bias_init: Initializer
    bias_metadata: Mapping[str, Any]
    bias_quant: QuantizerLike
    carry_init: Initializer | None
    cell_state_quant: QuantizerLike
    dtype: Dtype | None
    gate_acc_quant: QuantizerLike
    gate_fn: Callable[..., Any]
    io_quant: QuantizerLike
    keep_rngs: bool
    kernel_init: Initializer
    kernel_metadata: Mapping[str, Any]
    param_dtype: Dtype
    promote_dtype: PromoteDtypeFn
    recurrent_kernel_init: Initializer
    recurrent_kernel_metadata: Mapping[str, Any]
    return_quant_tensor: bool
    sigmoid_quant: QuantizerLike
    tanh_quant: QuantizerLike
    weight_quant: QuantizerLike

class QuantLSTMCellKeywords(WeightWeightNames, BiasBiasNames, IoActNames, CellStateActNames, GateAccActNames, SigmoidActNames, TanhActNames, total=False):
    activation_fn: Callable[..., Any]
    bias_init: Initializer
    bias_metadata: Mapping[str, Any]
    bias_quant: QuantizerLike
    carry_init: Initializer | None
    cell_state_quant: QuantizerLike
    dtype: Dtype | None
    gate_acc_quant: QuantizerLike
    gate_fn: Callable[..., Any]
    io_quant: QuantizerLike
    keep_rngs: bool
    kernel_init: Initializer
    kernel_metadata: Mapping[str, Any]
    param_dtype: Dtype
    promote_dtype: PromoteDtypeFn
    recurrent_kernel_init: Initializer
    recurrent_kernel_metadata: Mapping[str, Any]
    sigmoid_quant: QuantizerLike
    tanh_quant: QuantizerLike
    weight_quant: QuantizerLike

class QuantLayerNormKeywords(InputActNames, OutputActNames, GradGradNames, total=False):
    act_quant: QuantizerLike
    axis_index_groups: Any
    axis_name: Optional[str]
    bias_init: Initializer
    bias_metadata: Mapping[str, Any]
    dtype: Optional[Dtype]
    epsilon: float
    feature_axes: Axes
    grad_quant: QuantizerLike
    input_quant: QuantizerLike
    output_quant: QuantizerLike
    param_dtype: Dtype
    promote_dtype: PromoteDtypeFn
    reduction_axes: Axes
    return_quant_tensor: bool
    scale_init: Initializer
    scale_metadata: Mapping[str, Any]
    use_bias: bool
    use_fast_variance: bool
    use_scale: bool

class QuantLinearKeywords(WeightWeightNames, BiasBiasNames, InputActNames, OutputActNames, GradGradNames, total=False):
    act_quant: QuantizerLike
    bias_init: Initializer
    bias_metadata: Mapping[str, Any]
    bias_quant: QuantizerLike
    contraction: ContractionKind
    dot_general: DotGeneralT
    dtype: Optional[Dtype]
    grad_quant: QuantizerLike
    input_quant: QuantizerLike
    kernel_init: Initializer
    kernel_metadata: Mapping[str, Any]
    output_quant: QuantizerLike
    param_dtype: Dtype
    precision: PrecisionLike
    preferred_element_type: Dtype | None
    promote_dtype: PromoteDtypeFn
    return_quant_tensor: bool
    scheme: SchemeLike
    use_bias: bool
    weight_quant: QuantizerLike

class QuantLinearGeneralKeywords(WeightWeightNames, BiasBiasNames, InputActNames, OutputActNames, GradGradNames, total=False):
    act_quant: QuantizerLike
    axis: Axis | Sequence[Axis]
    batch_axis: Mapping[Axis, Size]
    bias_init: Initializer
    bias_metadata: Mapping[str, Any]
    bias_quant: QuantizerLike
    contraction: ContractionKind
    dot_general: DotGeneralT | None
    dot_general_cls: Any
    dtype: Dtype | None
    grad_quant: QuantizerLike
    input_quant: QuantizerLike
    kernel_init: Initializer
    kernel_metadata: Mapping[str, Any]
    output_quant: QuantizerLike
    param_dtype: Dtype
    precision: PrecisionLike
    preferred_element_type: Dtype | None
    promote_dtype: PromoteDtypeFn
    return_quant_tensor: bool
    scheme: SchemeLike
    use_bias: bool
    weight_quant: QuantizerLike

class QuantLoRALinearKeywords(WeightWeightNames, BiasBiasNames, InputActNames, OutputActNames, GradGradNames, total=False):
    a_initializer: Initializer
    a_metadata: Mapping[str, Any]
    act_quant: QuantizerLike
    b_initializer: Initializer
    b_metadata: Mapping[str, Any]
    bias_init: Initializer
    bias_metadata: Mapping[str, Any]
    bias_quant: QuantizerLike
    contraction: ContractionKind
    dot_general: DotGeneralT
    dtype: Optional[Dtype]
    grad_quant: QuantizerLike
    input_quant: QuantizerLike
    kernel_init: Initializer
    kernel_metadata: Mapping[str, Any]
    lora_dtype: Optional[Dtype]
    lora_param_dtype: Dtype
    lora_param_type: type[nnx.Variable[Any]]
    lora_promote_dtype: PromoteDtypeFn
    output_quant: QuantizerLike
    param_dtype: Dtype
    precision: PrecisionLike
    preferred_element_type: Dtype | None
    promote_dtype: PromoteDtypeFn
    return_quant_tensor: bool
    use_bias: bool
    weight_quant: QuantizerLike

class QuantMaxPoolKeywords(InputActNames, OutputActNames, total=False):
    input_quant: QuantizerLike
    output_quant: QuantizerLike
    return_quant_tensor: bool

class QuantMultiHeadAttentionKeywords(InProjInputActNames, InProjWeightWeightNames, InProjBiasBiasNames, InProjGradGradNames, OutProjInputActNames, OutProjWeightWeightNames, OutProjBiasBiasNames, OutProjOutputActNames, OutProjGradGradNames, QScaledActNames, KTransposedActNames, SoftmaxInputActNames, AttnOutputWeightsActNames, VActNames, total=False):
    attention_fn: Callable[..., jax.Array]
    attn_output_weights_quant: QuantizerLike
    bias_init: Initializer
    bias_metadata: Mapping[str, Any]
    broadcast_dropout: bool
    contraction: ContractionKind
    decode: bool | None
    deterministic: bool | None
    dropout_rate: float
    dtype: Dtype | None
    in_proj_bias_quant: QuantizerLike
    in_proj_grad_quant: QuantizerLike
    in_proj_input_quant: QuantizerLike
    in_proj_weight_quant: QuantizerLike
    k_transposed_quant: QuantizerLike
    keep_rngs: bool
    kernel_init: Initializer
    kernel_metadata: Mapping[str, Any]
    key_ln_scale_metadata: Mapping[str, Any]
    ln_promote_dtype: PromoteDtypeFn
    normalize_qk: bool
    out_bias_init: Initializer | None
    out_bias_metadata: Mapping[str, Any]
    out_dot_general: DotGeneralT | None
    out_dot_general_cls: Any
    out_kernel_init: Initializer | None
    out_kernel_metadata: Mapping[str, Any]
    out_proj_bias_quant: QuantizerLike
    out_proj_grad_quant: QuantizerLike
    out_proj_input_quant: QuantizerLike
    out_proj_output_quant: QuantizerLike
    out_proj_weight_quant: QuantizerLike
    out_promote_dtype: PromoteDtypeFn
    param_dtype: Dtype
    precision: PrecisionLike
    q_scaled_quant: QuantizerLike
    qkv_dot_general: DotGeneralT | None
    qkv_dot_general_cls: Any
    qkv_promote_dtype: PromoteDtypeFn
    query_ln_scale_metadata: Mapping[str, Any]
    return_quant_tensor: bool
    softmax_input_quant: QuantizerLike
    use_bias: bool
    v_quant: QuantizerLike

class QuantOptimizedLSTMCellKeywords(WeightWeightNames, BiasBiasNames, IoActNames, CellStateActNames, GateAccActNames, SigmoidActNames, TanhActNames, total=False):
    activation_fn: Callable[..., Any]
    bias_init: Initializer
    bias_metadata: Mapping[str, Any]
    bias_quant: QuantizerLike
    carry_init: Initializer | None
    cell_state_quant: QuantizerLike
    dtype: Dtype | None
    gate_acc_quant: QuantizerLike
    gate_fn: Callable[..., Any]
    io_quant: QuantizerLike
    keep_rngs: bool
    kernel_init: Initializer
    kernel_metadata: Mapping[str, Any]
    param_dtype: Dtype
    promote_dtype: PromoteDtypeFn
    recurrent_kernel_init: Initializer
    recurrent_kernel_metadata: Mapping[str, Any]
    sigmoid_quant: QuantizerLike
    tanh_quant: QuantizerLike
    weight_quant: QuantizerLike

class QuantRMSNormKeywords(InputActNames, OutputActNames, GradGradNames, total=False):
    act_quant: QuantizerLike
    axis_index_groups: Any
    axis_name: Optional[str]
    dtype: Optional[Dtype]
    epsilon: float
    feature_axes: Axes
    grad_quant: QuantizerLike
    input_quant: QuantizerLike
    output_quant: QuantizerLike
    param_dtype: Dtype
    promote_dtype: PromoteDtypeFn
    reduction_axes: Axes
    return_quant_tensor: bool
    scale_init: Initializer
    scale_metadata: Mapping[str, Any]
    use_fast_variance: bool
    use_scale: bool

class QuantRNNKeywords(WeightWeightNames, BiasBiasNames, IoActNames, GateAccActNames, total=False):
    activation_fn: Callable[..., Any]
    bias_init: Initializer
    bias_metadata: Mapping[str, Any]
    bias_quant: QuantizerLike
    carry_init: Initializer | None
    dtype: Dtype
    gate_acc_quant: QuantizerLike
    io_quant: QuantizerLike
    keep_rngs: bool
    kernel_init: Initializer
    kernel_metadata: Mapping[str, Any]
    param_dtype: Dtype
    promote_dtype: PromoteDtypeFn
    recurrent_kernel_init: Initializer
    recurrent_kernel_metadata: Mapping[str, Any]
    residual: bool
    return_quant_tensor: bool
    weight_quant: QuantizerLike

class QuantReLUKeywords(InputActNames, GradGradNames, total=False):
    about_mean: bool
    amax_compute_algo: Literal["max", "most_recent"]
    amax_history_length: int
    amax_of_gradient: bool
    averaging_impl: Component
    axis_name: AxisName
    batch_axes: tuple[int, ...]
    bipolar_search: bool
    bit_width: int
    bit_width_impl: Component
    bit_width_impl_type: BitWidthImplType
    block_dim: int | None
    block_scale_impl: Component
    block_width: int
    by_factor: bool
    calibration_impl: Component
    candidates: int
    cast_impl: Component
    channel_axes: int
    channel_shape: tuple[int, ...]
    channelwise_axes: tuple[int, ...]
    clip_gradient: bool
    codebook: Any
    collect_stats_steps: int
    collected_range: float | None
    collected_zero_point: float | None
    compute_max_mantissa: Component
    correction_size: int
    delayed: bool
    dq_dtype: DType
    dynamic_scaling_broadcastable_fn: Component
    exponent_bias: int
    exponent_bias_impl: Component
    exponent_bit_class: Injector
    exponent_bit_width: int
    exponent_bit_width_impl: Component
    exponent_bit_width_impl_type: BitWidthImplType
    exponent_impl: Component
    factor: float
    float_clamp_impl: Component
    float_scaling_impl: Component
    float_to_int_impl: Component
    float_to_int_impl_type: FloatToIntImplType
    folded: bool
    fractions: tuple[float, ...] | None
    grad_quant: QuantizerLike
    gradient_mask_impl: Component
    group_dim: int | None
    group_elements_axis: int | None
    group_padding: bool
    group_size: int | tuple[int, int] | None
    high_percentile_q: float
    hqo_beta_zp: float
    hqo_init_op_zp: Component
    hqo_iters_zp: int
    hqo_kappa_zp: float
    hqo_lp_norm_zp: float
    inf_values: tuple[str, ...] | None
    inner_stats_input_view_shape_impl: Component
    int_quant: Component
    int_scaling_impl: Component
    keepdim: bool
    keeps_infinite: bool
    learned_round_gamma: float
    learned_round_impl: Component
    learned_round_impl_type: LearnedRoundImplType
    learned_round_init: Array
    learned_round_temperature: float
    learned_round_zeta: float
    least_scale: float
    limit_steps: float
    low_percentile_q: float
    mantissa_bit_class: Injector
    mantissa_bit_width: int
    mantissa_bit_width_impl: Component
    mantissa_bit_width_impl_type: BitWidthImplType
    margin: float
    max_available_float: float | None
    max_val: float
    memory_shape: tuple[int, ...] | None
    midmax_mantissa_bit_bias: int
    min_bit_width: int
    min_val: float
    momentum: float | None
    mse_scale: Injector
    mse_search_method: Literal["grid", "fibonacci", "exact"]
    mse_zero_point: Injector
    nan_values: tuple[str, ...] | None
    narrow_range: bool
    noise_sharing_axes: tuple[int, ...]
    normal_clip: float
    normal_scale: float
    override_pretrained_bit_width: bool
    per_channel_broadcastable_shape: tuple[int, ...]
    percentile: float
    permute_dims: tuple[int, ...] | None
    power_of_two_factor: bool
    pre_transform: Component
    preserve_zero: bool
    proxy_class: type[QuantProxyFromInjector]
    q_dtype: DType
    quant_delay_steps: int | None
    quant_type: QuantType
    quantize_zero_point: bool
    random_bits: int
    range_steps: float | None
    restart: bool
    restrict_bit_width_impl: Component
    restrict_scale_positive: bool
    restrict_scale_threshold_impl: Component
    restrict_scaling_impl: Component
    restrict_scaling_type: RestrictValueType
    restrict_threshold_impl: Component
    restrict_value_float_to_int_impl: Component
    return_quant_tensor: bool
    saturating: bool
    scale_quant: Injector
    scale_rounding: ScaleRounding
    scale_stop_grad: bool
    scale_to_int_impl: Component
    scale_to_int_impl_type: FloatToIntImplType
    scaling_affine_rescaling_init: float | None
    scaling_affine_shifting_init: float | None
    scaling_gradient_scale: float | None
    scaling_impl: Component
    scaling_impl_type: ScalingImplType
    scaling_init: Array
    scaling_init_impl: Component
    scaling_min_val: float | None
    scaling_per_output: ScalingPerOutputType
    scaling_per_output_channel: bool
    scaling_per_output_channel_shape: tuple[int, ...]
    scaling_per_output_type: ScalingPerOutputType
    scaling_shape: tuple[int, ...]
    scaling_stats_impl: Component
    scaling_stats_input_view_shape_impl: Component
    scaling_stats_momentum: float | None
    scaling_stats_op: StatsOp
    scaling_stats_permute_dims: tuple[int, ...] | None
    seed: int
    shared_axes: tuple[int, ...] | None
    shared_per_row: bool
    sigma: float
    signed: bool
    stats_impl_zp: Component
    stats_output_shape: tuple[int, ...]
    stats_reduce_dim: int | None
    std_dev_epsilon: float
    straight_through: bool
    tensor_clamp_impl: Component
    tensor_quant: Component
    threshold: float
    threshold_mixin: Injector
    ties: Literal["first", "shared", "near"] | None
    trust: float
    trust_steps: float
    undo_transform: bool
    zero_point_impl: Component
    zero_point_shape: tuple[int, ...]
    zero_point_stats_impl: Component
    zero_point_stats_input_view_shape_impl: Component
    zero_point_stats_momentum: float | None

class QuantScaleBiasKeywords(WeightWeightNames, BiasBiasNames, InputActNames, OutputActNames, GradGradNames, total=False):
    act_quant: QuantizerLike
    bias_quant: QuantizerLike
    grad_quant: QuantizerLike
    input_quant: QuantizerLike
    output_quant: QuantizerLike
    return_quant_tensor: bool
    weight_quant: QuantizerLike

class QuantScaledDotProductAttentionKeywords(QScaledActNames, KTransposedActNames, SoftmaxInputActNames, AttnOutputWeightsActNames, VActNames, SdpaOutputActNames, total=False):
    attn_output_weights_quant: QuantizerLike
    contraction: ContractionKind
    k_transposed_quant: QuantizerLike
    q_scaled_quant: QuantizerLike
    return_quant_tensor: bool
    sdpa_output_quant: QuantizerLike
    softmax_input_quant: QuantizerLike
    v_quant: QuantizerLike

class QuantSigmoidKeywords(InputActNames, GradGradNames, total=False):
    about_mean: bool
    amax_compute_algo: Literal["max", "most_recent"]
    amax_history_length: int
    amax_of_gradient: bool
    averaging_impl: Component
    axis_name: AxisName
    batch_axes: tuple[int, ...]
    bipolar_search: bool
    bit_width: int
    bit_width_impl: Component
    bit_width_impl_type: BitWidthImplType
    block_dim: int | None
    block_scale_impl: Component
    block_width: int
    by_factor: bool
    calibration_impl: Component
    candidates: int
    cast_impl: Component
    channel_axes: int
    channel_shape: tuple[int, ...]
    channelwise_axes: tuple[int, ...]
    clip_gradient: bool
    codebook: Any
    collect_stats_steps: int
    collected_range: float | None
    collected_zero_point: float | None
    compute_max_mantissa: Component
    correction_size: int
    delayed: bool
    dq_dtype: DType
    dynamic_scaling_broadcastable_fn: Component
    exponent_bias: int
    exponent_bias_impl: Component
    exponent_bit_class: Injector
    exponent_bit_width: int
    exponent_bit_width_impl: Component
    exponent_bit_width_impl_type: BitWidthImplType
    exponent_impl: Component
    factor: float
    float_clamp_impl: Component
    float_scaling_impl: Component
    float_to_int_impl: Component
    float_to_int_impl_type: FloatToIntImplType
    folded: bool
    fractions: tuple[float, ...] | None
    grad_quant: QuantizerLike
    gradient_mask_impl: Component
    group_dim: int | None
    group_elements_axis: int | None
    group_padding: bool
    group_size: int | tuple[int, int] | None
    high_percentile_q: float
    hqo_beta_zp: float
    hqo_init_op_zp: Component
    hqo_iters_zp: int
    hqo_kappa_zp: float
    hqo_lp_norm_zp: float
    inf_values: tuple[str, ...] | None
    inner_stats_input_view_shape_impl: Component
    int_quant: Component
    int_scaling_impl: Component
    keepdim: bool
    keeps_infinite: bool
    learned_round_gamma: float
    learned_round_impl: Component
    learned_round_impl_type: LearnedRoundImplType
    learned_round_init: Array
    learned_round_temperature: float
    learned_round_zeta: float
    least_scale: float
    limit_steps: float
    low_percentile_q: float
    mantissa_bit_class: Injector
    mantissa_bit_width: int
    mantissa_bit_width_impl: Component
    mantissa_bit_width_impl_type: BitWidthImplType
    margin: float
    max_available_float: float | None
    max_val: float
    memory_shape: tuple[int, ...] | None
    midmax_mantissa_bit_bias: int
    min_bit_width: int
    min_val: float
    momentum: float | None
    mse_scale: Injector
    mse_search_method: Literal["grid", "fibonacci", "exact"]
    mse_zero_point: Injector
    nan_values: tuple[str, ...] | None
    narrow_range: bool
    noise_sharing_axes: tuple[int, ...]
    normal_clip: float
    normal_scale: float
    override_pretrained_bit_width: bool
    per_channel_broadcastable_shape: tuple[int, ...]
    percentile: float
    permute_dims: tuple[int, ...] | None
    power_of_two_factor: bool
    pre_transform: Component
    preserve_zero: bool
    proxy_class: type[QuantProxyFromInjector]
    q_dtype: DType
    quant_delay_steps: int | None
    quant_type: QuantType
    quantize_zero_point: bool
    random_bits: int
    range_steps: float | None
    restart: bool
    restrict_bit_width_impl: Component
    restrict_scale_positive: bool
    restrict_scale_threshold_impl: Component
    restrict_scaling_impl: Component
    restrict_scaling_type: RestrictValueType
    restrict_threshold_impl: Component
    restrict_value_float_to_int_impl: Component
    return_quant_tensor: bool
    saturating: bool
    scale_quant: Injector
    scale_rounding: ScaleRounding
    scale_stop_grad: bool
    scale_to_int_impl: Component
    scale_to_int_impl_type: FloatToIntImplType
    scaling_affine_rescaling_init: float | None
    scaling_affine_shifting_init: float | None
    scaling_gradient_scale: float | None
    scaling_impl: Component
    scaling_impl_type: ScalingImplType
    scaling_init: Array
    scaling_init_impl: Component
    scaling_min_val: float | None
    scaling_per_output: ScalingPerOutputType
    scaling_per_output_channel: bool
    scaling_per_output_channel_shape: tuple[int, ...]
    scaling_per_output_type: ScalingPerOutputType
    scaling_shape: tuple[int, ...]
    scaling_stats_impl: Component
    scaling_stats_input_view_shape_impl: Component
    scaling_stats_momentum: float | None
    scaling_stats_op: StatsOp
    scaling_stats_permute_dims: tuple[int, ...] | None
    seed: int
    shared_axes: tuple[int, ...] | None
    shared_per_row: bool
    sigma: float
    signed: bool
    stats_impl_zp: Component
    stats_output_shape: tuple[int, ...]
    stats_reduce_dim: int | None
    std_dev_epsilon: float
    straight_through: bool
    tensor_clamp_impl: Component
    tensor_quant: Component
    threshold: float
    threshold_mixin: Injector
    ties: Literal["first", "shared", "near"] | None
    trust: float
    trust_steps: float
    undo_transform: bool
    zero_point_impl: Component
    zero_point_shape: tuple[int, ...]
    zero_point_stats_impl: Component
    zero_point_stats_input_view_shape_impl: Component
    zero_point_stats_momentum: float | None

class QuantSimpleCellKeywords(WeightWeightNames, BiasBiasNames, IoActNames, GateAccActNames, total=False):
    activation_fn: Callable[..., Any]
    bias_init: Initializer
    bias_metadata: Mapping[str, Any]
    bias_quant: QuantizerLike
    carry_init: Initializer | None
    dtype: Dtype
    gate_acc_quant: QuantizerLike
    io_quant: QuantizerLike
    keep_rngs: bool
    kernel_init: Initializer
    kernel_metadata: Mapping[str, Any]
    param_dtype: Dtype
    promote_dtype: PromoteDtypeFn
    recurrent_kernel_init: Initializer
    recurrent_kernel_metadata: Mapping[str, Any]
    residual: bool
    weight_quant: QuantizerLike

class QuantTanhKeywords(InputActNames, GradGradNames, total=False):
    about_mean: bool
    amax_compute_algo: Literal["max", "most_recent"]
    amax_history_length: int
    amax_of_gradient: bool
    averaging_impl: Component
    axis_name: AxisName
    batch_axes: tuple[int, ...]
    bipolar_search: bool
    bit_width: int
    bit_width_impl: Component
    bit_width_impl_type: BitWidthImplType
    block_dim: int | None
    block_scale_impl: Component
    block_width: int
    by_factor: bool
    calibration_impl: Component
    candidates: int
    cast_impl: Component
    channel_axes: int
    channel_shape: tuple[int, ...]
    channelwise_axes: tuple[int, ...]
    clip_gradient: bool
    codebook: Any
    collect_stats_steps: int
    collected_range: float | None
    collected_zero_point: float | None
    compute_max_mantissa: Component
    correction_size: int
    delayed: bool
    dq_dtype: DType
    dynamic_scaling_broadcastable_fn: Component
    exponent_bias: int
    exponent_bias_impl: Component
    exponent_bit_class: Injector
    exponent_bit_width: int
    exponent_bit_width_impl: Component
    exponent_bit_width_impl_type: BitWidthImplType
    exponent_impl: Component
    factor: float
    float_clamp_impl: Component
    float_scaling_impl: Component
    float_to_int_impl: Component
    float_to_int_impl_type: FloatToIntImplType
    folded: bool
    fractions: tuple[float, ...] | None
    grad_quant: QuantizerLike
    gradient_mask_impl: Component
    group_dim: int | None
    group_elements_axis: int | None
    group_padding: bool
    group_size: int | tuple[int, int] | None
    high_percentile_q: float
    hqo_beta_zp: float
    hqo_init_op_zp: Component
    hqo_iters_zp: int
    hqo_kappa_zp: float
    hqo_lp_norm_zp: float
    inf_values: tuple[str, ...] | None
    inner_stats_input_view_shape_impl: Component
    int_quant: Component
    int_scaling_impl: Component
    keepdim: bool
    keeps_infinite: bool
    learned_round_gamma: float
    learned_round_impl: Component
    learned_round_impl_type: LearnedRoundImplType
    learned_round_init: Array
    learned_round_temperature: float
    learned_round_zeta: float
    least_scale: float
    limit_steps: float
    low_percentile_q: float
    mantissa_bit_class: Injector
    mantissa_bit_width: int
    mantissa_bit_width_impl: Component
    mantissa_bit_width_impl_type: BitWidthImplType
    margin: float
    max_available_float: float | None
    max_val: float
    memory_shape: tuple[int, ...] | None
    midmax_mantissa_bit_bias: int
    min_bit_width: int
    min_val: float
    momentum: float | None
    mse_scale: Injector
    mse_search_method: Literal["grid", "fibonacci", "exact"]
    mse_zero_point: Injector
    nan_values: tuple[str, ...] | None
    narrow_range: bool
    noise_sharing_axes: tuple[int, ...]
    normal_clip: float
    normal_scale: float
    override_pretrained_bit_width: bool
    per_channel_broadcastable_shape: tuple[int, ...]
    percentile: float
    permute_dims: tuple[int, ...] | None
    power_of_two_factor: bool
    pre_transform: Component
    preserve_zero: bool
    proxy_class: type[QuantProxyFromInjector]
    q_dtype: DType
    quant_delay_steps: int | None
    quant_type: QuantType
    quantize_zero_point: bool
    random_bits: int
    range_steps: float | None
    restart: bool
    restrict_bit_width_impl: Component
    restrict_scale_positive: bool
    restrict_scale_threshold_impl: Component
    restrict_scaling_impl: Component
    restrict_scaling_type: RestrictValueType
    restrict_threshold_impl: Component
    restrict_value_float_to_int_impl: Component
    return_quant_tensor: bool
    saturating: bool
    scale_quant: Injector
    scale_rounding: ScaleRounding
    scale_stop_grad: bool
    scale_to_int_impl: Component
    scale_to_int_impl_type: FloatToIntImplType
    scaling_affine_rescaling_init: float | None
    scaling_affine_shifting_init: float | None
    scaling_gradient_scale: float | None
    scaling_impl: Component
    scaling_impl_type: ScalingImplType
    scaling_init: Array
    scaling_init_impl: Component
    scaling_min_val: float | None
    scaling_per_output: ScalingPerOutputType
    scaling_per_output_channel: bool
    scaling_per_output_channel_shape: tuple[int, ...]
    scaling_per_output_type: ScalingPerOutputType
    scaling_shape: tuple[int, ...]
    scaling_stats_impl: Component
    scaling_stats_input_view_shape_impl: Component
    scaling_stats_momentum: float | None
    scaling_stats_op: StatsOp
    scaling_stats_permute_dims: tuple[int, ...] | None
    seed: int
    shared_axes: tuple[int, ...] | None
    shared_per_row: bool
    sigma: float
    signed: bool
    stats_impl_zp: Component
    stats_output_shape: tuple[int, ...]
    stats_reduce_dim: int | None
    std_dev_epsilon: float
    straight_through: bool
    tensor_clamp_impl: Component
    tensor_quant: Component
    threshold: float
    threshold_mixin: Injector
    ties: Literal["first", "shared", "near"] | None
    trust: float
    trust_steps: float
    undo_transform: bool
    zero_point_impl: Component
    zero_point_shape: tuple[int, ...]
    zero_point_stats_impl: Component
    zero_point_stats_input_view_shape_impl: Component
    zero_point_stats_momentum: float | None

class TruncAdaptiveAvgPool2dKeywords(TruncNames, total=False):
    return_quant_tensor: bool
    trunc_quant: QuantizerLike

class TruncAvgPoolKeywords(TruncNames, total=False):
    return_quant_tensor: bool
    trunc_quant: QuantizerLike

class TruncAvgPool2dKeywords(TruncNames, total=False):
    return_quant_tensor: bool
    trunc_quant: QuantizerLike

class RuleKeywords(WeightWeightNames, BiasBiasNames, InputActNames, OutputActNames, GradGradNames, LhsActNames, RhsActNames, CacheActNames, total=False):
    ...
