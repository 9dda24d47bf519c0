"""What the names of the ready-made quantizers mean, and what may be given for them.

`QuantLinear.overrides(...)` shows this, and the keywords that type checkers know are made from it
(`python -m jqinject.catalogue.typed_keywords`). A name of a user's own injector is not here: it goes through `.let()`.
"""

from collections.abc import Mapping
from typing import NamedTuple


class NameFacts(NamedTuple):
    """What may be given for a name.

    Attributes:
        type: as it stands in an annotation; `Component` is a class or an instance of one, `Array` a number or an array.
        meaning: what the name says.
    """

    type: str
    meaning: str


# Passed by layers and proxies: not to be overridden.
PASSED = frozenset(
    (
        "module",
        "rngs",
        "tracked_parameter_list",
        "activation_channel_shape",
        "upstream_scaling",
        "deterministic",
    )
)

_SHAPE, _AXES = "tuple[int, ...]", "int | tuple[int, ...]"

_ROWS: Mapping[str, tuple[str, str]] = {
    # numbers
    "bit_width": ("int", "bits of one number"),
    "preserve_zero": ("bool", "whether 0 is a number; not of half-integers"),
    "signed": ("bool", "whether there are negative numbers"),
    "narrow_range": ("bool", "leave out one integer, -128 of signed 8 bits, so that the range is symmetric"),
    "quant_type": ("QuantType", "integers, binary, ternary, or no quantization"),
    "q_dtype": ("DType", "dtype of the stored 8-bit floats"),
    "dq_dtype": ("DType", "dtype of the dequantized values; None for that of the input"),
    "codebook": ("Any", "the table of numbers of a codebook, ascending"),
    "normal_clip": ("float", "root mean squares that the largest number of a table stands for"),
    "normal_scale": ("float", "standard deviations that the number 1 of a minifloat stands for"),
    "gradient_mask_impl": ("Component", "which numbers get a gradient; None leaves it to the clamp"),
    "trust": ("float", "root mean squares by which rounding may move a number that gets a gradient"),
    "trust_steps": ("float", "trust, in units of the scale"),
    "limit_steps": ("float", "the magnitude, in units of the scale, from which numbers get no gradient"),
    "threshold": ("float", "numbers up to this fraction of the scale become 0 (ternary)"),
    "range_steps": ("float | None", "steps from 0 to the end of a symmetric range"),
    "accumulator_bit_width": ("int", "bits of the accumulator that sums must fit"),
    "requires_input_scale": ("bool", "whether a bias takes its scale from input and weight"),
    "exponent_bit_width": ("int", "exponent bits of a minifloat"),
    "mantissa_bit_width": ("int", "mantissa bits of a minifloat"),
    "exponent_bias": ("int", "exponent bias of a minifloat"),
    "inf_values": ("tuple[str, ...] | None", "mantissas, in binary, that mean inf with the largest exponent"),
    "nan_values": ("tuple[str, ...] | None", "mantissas, in binary, that mean nan with the largest exponent"),
    "max_available_float": ("float | None", "largest number of a minifloat; None if all codes are numbers"),
    "midmax_mantissa_bit_bias": ("int", "half a step of the largest mantissa, for the largest number"),
    "saturating": ("bool", "clamp what is beyond the largest number of a minifloat"),
    "min_val": ("float", "the least value to represent"),
    "max_val": ("float", "the greatest value to represent"),
    "margin": ("float", "powers of two that are left above the largest number"),
    # bit widths and rounding
    "bit_width_impl_type": ("BitWidthImplType", "whether the bit width is constant or learned"),
    "bit_width_impl": ("Component", "the component that gives the bit width"),
    "exponent_bit_width_impl_type": ("BitWidthImplType", "whether the exponent bits are constant or learned"),
    "exponent_bit_width_impl": ("Component", "the component that gives the exponent bits"),
    "exponent_bit_class": ("Injector", "injector of the exponent bits"),
    "exponent_bias_impl": ("Component", "the component that gives the exponent bias"),
    "mantissa_bit_width_impl_type": ("BitWidthImplType", "whether the mantissa bits are constant or learned"),
    "mantissa_bit_width_impl": ("Component", "the component that gives the mantissa bits"),
    "mantissa_bit_class": ("Injector", "injector of the mantissa bits"),
    "accumulator_bit_width_impl": ("Component", "the component that gives the bits of the accumulator"),
    "min_bit_width": ("int", "the least bit width that may be learned"),
    "override_pretrained_bit_width": ("bool", "keep the declared bit width when a checkpoint is loaded"),
    "restrict_bit_width_impl": ("Component", "which bit widths may be learned; whole numbers by default"),
    "float_to_int_impl_type": ("FloatToIntImplType", "how numbers are rounded"),
    "float_to_int_impl": ("Component", "the component that rounds"),
    "learned_round_impl_type": ("LearnedRoundImplType", "what the parameter of learned rounding means"),
    "learned_round_impl": ("Component", "the component of learned rounding"),
    "learned_round_init": ("Array", "initial value of learned rounding, in the weight's shape"),
    "learned_round_gamma": ("float", "lower end of learned rounding before clipping, below 0"),
    "learned_round_zeta": ("float", "upper end of learned rounding before clipping, above 1"),
    "learned_round_temperature": ("float", "temperature of learned rounding, above 0"),
    "seed": ("int", "seed of random numbers without `rngs`"),
    "random_bits": ("int", "bits of each random number of stochastic rounding, 32 or 16"),
    "noise_sharing_axes": (_SHAPE, "axes along which random numbers are shared"),
    "clip_gradient": ("bool", "whether clipping stops the gradient"),
    "quant_delay_steps": ("int | None", "calls that return their input before quantization starts"),
    # the scale
    "scaling_impl_type": ("ScalingImplType", "where the scale comes from"),
    "scaling_impl": ("Component", "the component that gives the scale"),
    "scaling_per_output_type": (
        "ScalingPerOutputType",
        "one scale for the tensor, each channel or each group",
    ),
    "scaling_per_output": ("ScalingPerOutputType", "what shares a scale, as components read it"),
    "scaling_per_output_channel": ("bool", "a scale for each channel: Brevitas's older name"),
    "scaling_init": ("Array", "initial scale of a constant or learned one, or the range it is made from"),
    "scaling_init_impl": ("Component", "the component that gives the initial scale"),
    "scaling_const": ("float", "the constant scale"),
    "scaling_shape": (_SHAPE, "shape of the scale"),
    "scaling_min_val": ("float | None", "the least scale"),
    "scaling_per_output_channel_shape": (_SHAPE, "shape of a scale for each channel"),
    "per_channel_broadcastable_shape": (_SHAPE, "shape of a scale for each channel of an activation"),
    "channel_shape": (_SHAPE, "shape of a scale for each channel, broadcast against the tensor"),
    "restrict_scaling_type": ("RestrictValueType", "which values a scale may take, such as powers of two"),
    "restrict_scaling_impl": ("Component", "the component that restricts the scale"),
    "restrict_scale_positive": ("bool", "whether a scale is kept positive"),
    "restrict_threshold_impl": ("Component", "which values the threshold (the range's end) may take"),
    "restrict_scale_threshold_impl": ("Component", "which values the threshold of a scale may take"),
    "restrict_value_float_to_int_impl": ("Component", "how the exponent of a power-of-two scale is rounded"),
    "threshold_mixin": ("Injector", "injector of the threshold"),
    "int_scaling_impl": ("Component", "how many integer steps the range spans"),
    "float_scaling_impl": ("Component", "which number of a minifloat the range's end becomes"),
    "float_clamp_impl": ("Component", "the range of a minifloat, and what happens beyond it"),
    "compute_max_mantissa": ("Component", "the component that gives the largest mantissa"),
    "tensor_clamp_impl": ("Component", "how to clamp, and where the gradient goes"),
    "force_parameter": ("bool", "keep a single tracked parameter too"),
    "affine_rescaling": ("bool", "learn an affine map of the statistic"),
    "scaling_affine_rescaling_init": (
        "float | None",
        "initial factor of a learned affine map of the statistic",
    ),
    "scaling_affine_shifting_init": (
        "float | None",
        "initial shift of a learned affine map of the statistic",
    ),
    "scaling_gradient_scale": (
        "float | None",
        "factor of the gradient of a learned scale instead of `1 / sqrt(N Q)`",
    ),
    "scale_quant": ("Injector", "injector that quantizes the scales themselves"),
    "scale_stop_grad": ("bool", "stop the gradient of the range"),
    "dynamic_scaling_broadcastable_fn": ("Component", "brings a statistic into a shape that broadcasts"),
    # statistics
    "scaling_stats_op": ("StatsOp", "the statistic that a scale comes from"),
    "scaling_stats_impl": ("Component", "the component of the statistic that a scale comes from"),
    "scaling_stats_momentum": (
        "float | None",
        "weight of the newest batch, in (0, 1]; None for the mean of all",
    ),
    "scaling_stats_permute_dims": ("tuple[int, ...] | None", "order of axes that brings the channels first"),
    "scaling_stats_input_view_shape_impl": ("Component", "how the tensor is laid out for the statistic"),
    "scaling_stats_input_concat_dim": ("int", "axis along which several parameters are joined"),
    "inner_stats_input_view_shape_impl": ("Component", "how the tensor is laid out inside a search"),
    "input_view_impl": ("Component", "a view of the tensor before it is quantized, such as groups"),
    "collect_stats_steps": ("int", "training steps whose statistics set the scale, at least 1"),
    "high_percentile_q": ("float", "percentile of the upper end, 0 to 100"),
    "low_percentile_q": ("float", "percentile of the lower end, 0 to 100"),
    "percentile": ("float", "percentile of the magnitudes, 0 to 100"),
    "sigma": ("float", "standard deviations that the range spans"),
    "std_dev_epsilon": ("float", "added to the variance, or to the deviation"),
    "about_mean": ("bool", "whether a deviation is that from the mean, else from 0"),
    "momentum": ("float | None", "weight of a new batch, in (0, 1]; None weighs all alike"),
    "averaging_impl": ("Component", "averages ranges over batches; None does not"),
    "calibration_impl": ("Component", "the component that finds the range"),
    "candidates": ("int", "how many ranges a search tries"),
    "fractions": ("tuple[float, ...] | None", "the fractions of the range that a search tries"),
    "factor": ("float", "factor of the range's end"),
    "restart": ("bool", "search afresh at every batch"),
    "batch_axes": (_SHAPE, "axes with a range each, averaged over the batch"),
    "stats_reduce_dim": ("int | None", "the axis of the view that shares a scale; None for all"),
    "stats_output_shape": (_SHAPE, "shape of the statistic"),
    "keepdim": ("bool", "keep the reduced axis with size 1"),
    "permute_dims": ("tuple[int, ...] | None", "order of axes that brings the output channel first"),
    "axis_name": ("AxisName", "mapped axis that the tensor is spread over, whose devices share the range"),
    "channelwise_axes": (_SHAPE, "axes with a scale for each index"),
    "shared_axes": ("tuple[int, ...] | None", "the axes that share a scale: `(-1,)` for one per row"),
    "channel_axes": ("int", "how many axes hold channels"),
    "amax_compute_algo": ('Literal["max", "most_recent"]', "what a history of largest magnitudes gives"),
    "delayed": ("bool", "whether the scale is that of the largest magnitudes of earlier steps"),
    "amax_history_length": ("int", "steps that the record remembers"),
    "keeps_infinite": ("bool", "whether inf and nan enter the record"),
    "amax_of_gradient": ("bool", "whether the record is of a gradient"),
    # groups
    "by_factor": ("bool", "multiply by the inverse of the scale instead of dividing by the scale"),
    "power_of_two_factor": ("bool", "round that inverse down to a power of two"),
    "straight_through": ("bool", "gradients pass unchanged, and the payload is kept"),
    "scale_rounding": ("ScaleRounding", "how the power of two that a block shares is rounded"),
    "block_scale_impl": ("Component", "how a block's scale and the shared one follow from magnitudes"),
    "folded": (
        "bool",
        "divide by the shared scale and by 6 at once, as TransformerEngine's PyTorch side does",
    ),
    "shared_per_row": ("bool", "the scale that blocks share is one per row, instead of one per tensor"),
    "exponent_impl": ("Component", "from a block's largest magnitude to the exponent of its scale"),
    "group_size": ("int | tuple[int, int]", "elements of a group, or of a block along both axes"),
    "collected_range": ("float | None", "a range that counts as collected; calibration replaces it"),
    "collected_zero_point": (
        "float | None",
        "a distance below zero that counts as collected; calibration replaces it",
    ),
    "group_dim": ("int | None", "the axis that is cut into groups"),
    "block_width": ("int", "groups beside each other that share a scale"),
    "block_dim": ("int | None", "the axis along which they are beside each other"),
    "group_padding": ("bool", "pad the last group with zeros"),
    "group_elements_axis": ("int | None", "the axis of a group's elements in the view"),
    "scaling_per_group_shape": (_SHAPE, "shape of the scales of groups"),
    "expanded_groupwise_shape": (_SHAPE, "shape of the view in groups"),
    "reshaped_groupwise_shape": (_SHAPE, "shape of the quantized tensor out of the view"),
    # zero points
    "zero_point_impl": ("Component", "the component that gives the zero point"),
    "zero_point_shape": (_SHAPE, "shape of the zero point"),
    "zero_point_stats_impl": ("Component", "the statistic that a zero point comes from"),
    "zero_point_stats_input_view_shape_impl": (
        "Component",
        "how the tensor is laid out for the statistic of the zero point",
    ),
    "zero_point_stats_input_concat_dim": (
        "int",
        "axis along which several parameters are joined for the zero point",
    ),
    "zero_point_stats_momentum": (
        "float | None",
        "weight of the newest batch in the statistic of the zero point",
    ),
    "zero_point_affine_rescaling_init": (
        "float | None",
        "initial factor of a learned affine map of the zero point",
    ),
    "zero_point_affine_shifting_init": (
        "float | None",
        "initial shift of a learned affine map of the zero point",
    ),
    "quantize_zero_point": ("bool", "make the zero point an integer of the range"),
    "scale_shift_zero_point_impl": ("Component", "from a distance in floats to the zero point"),
    # searches
    "mse_scale": ("Injector", "injector of the search for the scale with the least squared error"),
    "mse_zero_point": ("Injector", "injector of the search for the zero point with the least squared error"),
    "bipolar_search": ("bool", "search on both sides of the first candidate"),
    "hqo_beta_scale": ("float", "half-quadratic search of the scale: initial beta"),
    "hqo_beta_zp": ("float", "half-quadratic search of the zero point: initial beta"),
    "hqo_kappa_scale": ("float", "half-quadratic search of the scale: growth of beta in a round"),
    "hqo_kappa_zp": ("float", "half-quadratic search of the zero point: growth of beta in a round"),
    "hqo_iters_scale": ("int", "half-quadratic search of the scale: maximum number of rounds"),
    "hqo_iters_zp": ("int", "half-quadratic search of the zero point: maximum number of rounds"),
    "hqo_lp_norm_scale": ("float", "half-quadratic search of the scale: p of the error norm"),
    "hqo_lp_norm_zp": ("float", "half-quadratic search of the zero point: p of the error norm"),
    "hqo_init_op_scale": ("Component", "half-quadratic search of the scale: statistic it starts from"),
    "hqo_init_op_zp": ("Component", "half-quadratic search of the zero point: statistic it starts from"),
    "stats_impl_scale": ("Component", "the search for the scale"),
    "stats_impl_zp": ("Component", "the search for the zero point"),
    "memory_shape": ("tuple[int, ...] | None", "shape in which a search remembers its last result"),
    # weights
    "pre_scaling_impl": ("Component", "the scale before rounding"),
    "pre_scaling_min_val": ("float | None", "the least scale before rounding"),
    "pre_scaling_shape": (_SHAPE, "shape of the scale before rounding"),
    "restrict_pre_scaling_impl": ("Component", "which values the scale before rounding may take"),
    "pre_zero_point_impl": ("Component", "what is added before rounding"),
    "per_channel_pre_norm": ("Injector", "injector of the norm of each channel"),
    "normalize_stats_impl": ("Component", "the statistic that weights are divided by"),
    "output_channel_dim": (_AXES, "the axis of the output channels, or the axes"),
    "out_channels": ("int", "number of output channels"),
    "weight_ndims": ("int", "number of axes of the weight"),
    "quantized_shape": (_SHAPE, "shape of the tensor that is quantized"),
    "upstream_shape": (_SHAPE, "shape of the scale that another one multiplies"),
    # the quantizer as a whole
    "tensor_quant": ("Component", "the component that quantizes"),
    "int_quant": ("Component", "the component that makes integers of scaled numbers"),
    "decoupled_int_quant": ("Component", "to integers by a scale before rounding, and back by another"),
    "proxy_class": ("type[QuantProxyFromInjector]", "the module between the injector and its layer"),
    "trunc_scaling_impl_type": ("TruncScalingImplType", "what an accumulator's integers are divided by"),
    "trunc_scaling_impl": ("Component", "the component that gives what an accumulator is divided by"),
    "trunc_int_scaling_impl": ("Component", "how many integer steps the truncated range spans"),
}

NAMES: Mapping[str, NameFacts] = {name: NameFacts(*facts) for name, facts in _ROWS.items()}
