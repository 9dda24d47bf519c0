"""`dot_general`, `einsum` and `conv_general_dilated`: like JAX's, for QuantTensors and for arrays with a scheme."""

from collections.abc import Sequence
from functools import partial

import jax
from jax.typing import DTypeLike

from jqinject.dot.geometry.dimensions import OutSharding
from jqinject.dot.geometry.equation import einsum_by
from jqinject.dot.kernels.convolution import Convolution
from jqinject.dot.schemes import modules, scheme
from jqinject.dot.tensors.choice import ContractionKind
from jqinject.dot.tensors.contract import contract, output_dtype
from jqinject.quant_tensor import Operand, is_quantized


def dot_general(
    lhs: Operand,
    rhs: Operand,
    dimension_numbers: object,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    config: scheme.SchemeLike | None = None,
    contraction: ContractionKind = "auto",
    accumulator_dtype: DTypeLike | None = None,
    key: jax.Array | None = None,
    out_sharding: OutSharding = None,
) -> jax.Array:
    """`lax.dot_general` in low bits.

    Two `IntQuantTensor`s of at most 8 bits are contracted as integers (int8 times int8 into int32, zero points
    corrected exactly, one multiplication by the scales), two `FloatQuantTensor`s as 8-bit floats, everything else as
    floats. With `config`, two arrays are quantized accordingly, forward and backward.

    Args:
        lhs, rhs: QuantTensors or arrays. A scale may vary along summed axes: a group-wise quantized weight, laid out as
            `(groups, group, out)`.
        dimension_numbers: as for `lax.dot_general`.
        precision: of a contraction of floats.
        preferred_element_type: dtype of the output; None promotes those of the operands.
        config: a `Scheme` such as `config_v4()`, for arrays; its quantizers must be stateless.
        contraction: "auto", or "int", "fp8", "float" to insist.
        accumulator_dtype: of integers; None means int32.
        key: for stochastic rounding, with `config`.
        out_sharding: as for `lax.dot_general`.

    Returns:
        An array. Gradients pass straight through to the values of the operands.

    Raises:
        TypeError: `config` with a QuantTensor, or with `contraction` or `accumulator_dtype`, which it sets itself; not
            a scheme, or one with stateful quantizers; an accumulator that is not a signed integer.
        ValueError: dimension numbers that do not fit, `contraction` that the operands cannot have, an accumulator that
            could overflow.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.quant_tensor import IntQuantTensor
        >>> x = IntQuantTensor.from_int(jnp.array([[3, -2]]), 0.5)
        >>> dot_general(x, x, (((1,), (1,)), ((), ())))
        Array([[3.25]], dtype=float32)
    """
    if config is not None:
        _check_beside_config(lhs, rhs, contraction, accumulator_dtype)
        by_scheme = modules.QDotGeneral.of_one_call(config, key, "dot_general")
        return by_scheme(lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding)
    return contract(
        lhs,
        rhs,
        dimension_numbers,
        numbers=contraction,
        out_dtype=preferred_element_type,
        out_sharding=out_sharding,
        accumulator_dtype=accumulator_dtype,
    )


def einsum(
    equation: str,
    lhs: Operand,
    rhs: Operand,
    *,
    config: scheme.SchemeLike | None = None,
    contraction: ContractionKind = "auto",
    preferred_element_type: DTypeLike | None = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """`jnp.einsum` of two operands in low bits; see `dot_general`.

    The configuration of `lhs` always applies to the first operand, that of `rhs` to the second.

    Args:
        equation: as for `jnp.einsum`, with two operands.
        lhs, rhs: QuantTensors or arrays. QuantTensors whose axes are repeated, broadcast or summed alone are contracted
            as floats.
        config, contraction, preferred_element_type, key: as for `dot_general`.

    Raises:
        TypeError, ValueError: as for `dot_general`; an equation that does not fit or does not have two operands.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.quant.aqt import config_v4
        >>> einsum("df,bd->bf", jnp.ones((3, 2)), jnp.ones((4, 3)), config=config_v4(rng_type=None)).shape
        (4, 2)
    """
    if config is not None:
        _check_beside_config(lhs, rhs, contraction)
    how = partial(dot_general, preferred_element_type=preferred_element_type, contraction=contraction)
    return einsum_by(partial(how, config=config, key=key), equation, lhs, rhs)


def conv_general_dilated(
    lhs: Operand,
    rhs: Operand,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: object = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    config: scheme.SchemeLike | None = None,
    contraction: ContractionKind = "auto",
    key: jax.Array | None = None,
) -> jax.Array:
    """`lax.conv_general_dilated` in low bits; see `dot_general`.

    `config_v4()` and similar schemes have one scale per example of `lhs` and per output feature of `rhs`, and the
    gradients of the float convolution, straight through.

    Args:
        lhs, rhs: QuantTensors or arrays.
        window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers, feature_group_count, batch_group_count,
            precision, preferred_element_type: as for `lax.conv_general_dilated`.
        config, contraction, key: as for `dot_general`. Two IntQuantTensors of at most 8 bits are convolved as
            integers if `lhs` has one zero point and one scale (or one for each example), and `rhs` one of both (or
            one for each output feature). 8-bit floats are convolved in float32.

    Raises:
        TypeError, ValueError: as for `dot_general`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.quant.aqt import config_v4
        >>> x, kernel = jnp.ones((1, 5, 5, 2)), jnp.ones((3, 3, 2, 4))
        >>> numbers = ("NHWC", "HWIO", "NHWC")
        >>> y = conv_general_dilated(
        ...     x, kernel, (1, 1), "SAME", dimension_numbers=numbers, config=config_v4(rng_type=None)
        ... )
        >>> y.shape, y.dtype
        ((1, 5, 5, 4), dtype('float32'))
    """
    windows = window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers
    groups = feature_group_count, batch_group_count
    if config is not None:
        _check_beside_config(lhs, rhs, contraction)
        convolve = modules.QConvGeneralDilated.of_one_call(config, key, "conv_general_dilated")
        return convolve(lhs, rhs, *windows, *groups, precision, preferred_element_type)
    dtype = output_dtype(lhs, rhs, preferred_element_type)
    where = Convolution.of(lhs.shape, rhs.shape, *windows, *groups, dtype=dtype)
    return contract(lhs, rhs, where, numbers=contraction)


def _check_beside_config(
    lhs: Operand, rhs: Operand, contraction: str, accumulator_dtype: DTypeLike | None = None
) -> None:
    """Refuse operands that are already quantized, and arguments that a configuration decides."""
    for side, x in (("lhs", lhs), ("rhs", rhs)):
        if is_quantized(x):
            raise TypeError(
                f"{side} is a {type(x).__name__}, which is quantized already, and config= would quantize it again.\n"
                f"  cure: leave config= out, or pass {side}.value"
            )
    if contraction != "auto" or accumulator_dtype is not None:
        argument = f"contraction={contraction!r}" if accumulator_dtype is None else "accumulator_dtype="
        raise TypeError(
            f"{argument} would have no effect beside config=, which says it itself.\n"
            "  cure: config_v4(fwd_accumulator_dtype=..., fwd_bits=...)"
        )
