"""`dot_general` and `einsum`: JAX's own functions, for QuantTensors and for arrays with a configuration."""

from __future__ import annotations

from typing import Any

import jax

from jqinject.dot.geometry.dimensions import checked_dimensions
from jqinject.dot.kernels.accumulate import checked_accumulator
from jqinject.dot.schemes.quantized_dot import QuantizedDotGeneral
from jqinject.dot.schemes.quantized_einsum import einsum_by
from jqinject.dot.schemes.scheme import is_scheme
from jqinject.dot.tensors.tensor_dot import contract_tensors, output_dtype
from jqinject.inject import ExtendedInjector
from jqinject.quant_tensor import QuantTensor


def assembled(config: Any) -> QuantizedDotGeneral:
    """The quantized contraction of a configuration: an injector such as `config_v4()`, or what one assembles.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(config, QuantizedDotGeneral):
        return config
    if isinstance(config, type) and issubclass(config, ExtendedInjector) and "dot_general" in config:
        found = config.dot_general
        if isinstance(found, QuantizedDotGeneral):
            return found
    if is_scheme(config):
        raise TypeError(
            "config is a Scheme, whose quantizers may keep state, and a function has no place for it.\n  cure: "
            "QDotGeneral(scheme), QEinsum(scheme) or QConvGeneralDilated(scheme), which are called alike"
        )
    raise TypeError(
        "config must be an injector that assembles a `dot_general`, such as config_v4(), or a QuantizedDotGeneral; got "
        f"{config!r}"
    )


def dot_general(
    lhs: Any,
    rhs: Any,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    config: Any = None,
    contraction: str = "auto",
    accumulator_dtype: Any = None,
    key: jax.Array | None = None,
    out_sharding: Any = None,
) -> jax.Array:
    """`lax.dot_general` in low bits.

    Two `IntQuantTensor`s of at most 8 bits are contracted as integers (int8 times int8 into int32, zero points
    corrected exactly, one multiplication by the scales), two `FloatQuantTensor`s as 8-bit floats, everything else as
    floats. With `config`, two arrays are quantized as it says, forward and backward.

    Args:
        lhs, rhs: QuantTensors or arrays. A scale may vary along axes that are summed over: a group-wise quantized
            weight, laid out as `(groups, group, out)`.
        dimension_numbers: as for `lax.dot_general`.
        precision: of a contraction of floats.
        preferred_element_type: dtype of the output; None promotes those of the operands.
        config: an injector such as `config_v4()`, for arrays.
        contraction: "auto", or "int", "fp8", "float" to insist.
        accumulator_dtype: of integers; None means int32.
        key: for stochastic rounding, with `config`.
        out_sharding: as for `lax.dot_general`.

    Returns:
        An array. Gradients pass straight through to the values of the operands.

    Raises:
        TypeError: `config` with a QuantTensor, or with `contraction` or `accumulator_dtype`, which it says itself;
            no configuration; an accumulator that is not a signed integer.
        ValueError: dimension numbers that do not fit, `contraction` that the operands can't have, an accumulator that
            could overflow.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.quant_tensor import IntQuantTensor
        >>> x = IntQuantTensor.from_int(jnp.array([[3, -2]]), 0.5)
        >>> dot_general(x, x, (((1,), (1,)), ((), ())))
        Array([[3.25]], dtype=float32)
    """
    if config is not None:
        refuse_tensors(lhs, rhs)
        _refuse_beside_config(contraction=contraction, accumulator_dtype=accumulator_dtype)
        general = assembled(config)
        return general(
            lhs, rhs, dimension_numbers, precision, preferred_element_type, key=key, out_sharding=out_sharding
        )
    checked_accumulator(accumulator_dtype)
    dims = checked_dimensions(lhs.shape, rhs.shape, dimension_numbers)
    dtype = output_dtype(lhs, rhs, preferred_element_type)
    return contract_tensors(lhs, rhs, dims, dtype, contraction, accumulator_dtype, out_sharding)


def einsum(
    equation: str,
    lhs: Any,
    rhs: Any,
    *,
    config: Any = None,
    contraction: str = "auto",
    preferred_element_type: Any = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """`jnp.einsum` of two operands in low bits; see `dot_general`.

    Whatever the equation, the configuration of `lhs` goes with the first operand, and that of `rhs` with the second.

    Args:
        equation: as for `jnp.einsum`, with two operands.
        lhs, rhs: QuantTensors or arrays. QuantTensors whose axes the equation repeats, broadcasts or sums alone are
            contracted as floats.
        config, contraction, preferred_element_type, key: as for `dot_general`.

    Raises:
        TypeError, ValueError: as for `dot_general`; an equation that does not fit, or has other than two operands.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.dot import config_v4
        >>> einsum("df,bd->bf", jnp.ones((3, 2)), jnp.ones((4, 3)), config=config_v4(rng_type=None)).shape
        (4, 2)
    """
    if config is not None:
        refuse_tensors(lhs, rhs)
    keywords = {
        "config": config,
        "contraction": contraction,
        "preferred_element_type": preferred_element_type,
        "key": key,
    }
    return einsum_by(lambda a, b, numbers: dot_general(a, b, numbers, **keywords), equation, lhs, rhs)


def _refuse_beside_config(contraction: str, accumulator_dtype: Any) -> None:
    if contraction == "auto" and accumulator_dtype is None:
        return
    given = f"contraction={contraction!r}" if accumulator_dtype is None else "accumulator_dtype="
    raise TypeError(
        f"{given} would have no effect beside config=, which says it itself.\n"
        "  cure: config_v4(fwd_accumulator_dtype=..., fwd_bits=...)"
    )


def refuse_tensors(lhs: Any, rhs: Any) -> None:
    """Refuse operands that are quantized already."""
    for side, x in (("lhs", lhs), ("rhs", rhs)):
        if isinstance(x, QuantTensor):
            raise TypeError(
                f"{side} is a {type(x).__name__}, which is quantized already, and config= would quantize it again.\n"
                f"  cure: leave config= out, or pass {side}.value"
            )
