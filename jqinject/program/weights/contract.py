"""One contraction of a program on the numbers that its operands have: payloads where both have them, else floats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jqinject.dot import conv_general_dilated, dot_general, float8_dot_general, ragged_dot_general
from jqinject.dot.geometry.dimensions import Dimensions
from jqinject.dot.kernels.integer import has_integers
from jqinject.dot.tensors.decision import contraction_kind
from jqinject.program.jaxpr import Equation
from jqinject.program.policy import Choice
from jqinject.program.weights.equation_arguments import arguments_of
from jqinject.quant_tensor import (
    grouped_integers,
    is_quantized,
    on_integers,
    on_minifloats,
)


def contracts_payloads(choice: Choice | None, lhs: Any, rhs: Any) -> bool:
    """Whether a contraction takes the operands' payloads, if they have one in common.

    Training contracts floats: integers made anew at every step cost more than they save. Evaluation contracts what the
    frozen model contracts.

    Args:
        choice: the quantizers of the operation.
        lhs, rhs: the operands.
    """
    if not (is_quantized(lhs) and is_quantized(rhs)):
        return False
    asked = "auto" if choice is None else choice.contraction
    if asked != "auto":
        return asked != "float"
    if on_minifloats(lhs):
        return True
    return any(map(_is_stored, (lhs, rhs))) or (_keeps_integers(lhs) and _keeps_integers(rhs))


def _keeps_integers(x: Any) -> bool:
    """Whether a tensor keeps the integers that it was rounded to, as quantizers in evaluation mode let it."""
    return x.kept_payload is not None and has_integers(x.grouped if x.is_grouped else x)


def _is_stored(x: Any) -> bool:
    whole = x.grouped if grouped_integers(x) else x
    return on_integers(whole) and whole.is_stored


class Contracted(NamedTuple):
    """The output of a contraction.

    Attributes:
        value: the output.
        token: whose cotangent is the scale of the output's gradient, if backward its payload is contracted; else None.
    """

    value: Any
    token: Any = None


def contract_float8(
    eqn: Equation, choice: Choice | None, lhs: Any, rhs: Any, grad_dtype: Any
) -> Contracted | None:
    """The contraction of two tensors of 8-bit floats that goes on with the gradient's payload backward.

    Args:
        eqn: its equation.
        choice: the quantizers of the operation.
        lhs, rhs: the operands.
        grad_dtype: dtype of the gradient's payload, or None.

    Returns:
        None if there is no such payload, or the operands are contracted in other numbers.
    """
    asked: Any = "auto" if choice is None else choice.contraction
    floats = on_minifloats(lhs) and on_minifloats(rhs)
    if grad_dtype is None or not floats or eqn.name != "dot_general":
        return None
    numbers = eqn.params["dimension_numbers"]
    if contraction_kind(lhs, rhs, Dimensions.of(lhs.ndim, rhs.ndim, numbers), asked) != "fp8":
        return None
    return Contracted(
        *float8_dot_general(
            lhs,
            rhs,
            numbers,
            grad_dtype=grad_dtype,
            preferred_element_type=eqn.outputs[0].dtype,
            out_sharding=eqn.params.get("out_sharding"),
        )
    )


def contract(
    eqn: Equation, choice: Choice | None, lhs: Any, rhs: Any, rest: list[Any], evaluate: Callable[..., Any]
) -> Any:
    """The contraction of two QuantTensors, by their payloads if their scales allow it.

    Args:
        eqn: its equation.
        choice: the quantizers of the operation.
        lhs, rhs: the operands.
        rest: further operands.
        evaluate: contracts arrays.
    """
    asked: Any = "auto" if choice is None else choice.contraction
    dtype, params = eqn.outputs[0].dtype, eqn.params
    if eqn.name == "dot_general":
        return dot_general(
            lhs,
            rhs,
            params["dimension_numbers"],
            preferred_element_type=dtype,
            contraction=asked,
            out_sharding=params.get("out_sharding"),
        )
    if eqn.name == "conv_general_dilated":
        return conv_general_dilated(
            lhs, rhs, **arguments_of(eqn), preferred_element_type=dtype, contraction=asked
        )
    if eqn.name == "ragged_dot_general" and _cuts_rows_alone(params):
        numbers = params["ragged_dot_dimension_numbers"]
        return ragged_dot_general(
            lhs,
            rhs,
            rest[0],
            numbers,
            preferred_element_type=dtype,
            precision=params["precision"],
            contraction=asked,
        )
    if asked in ("int", "fp8"):
        raise ValueError(
            f"contraction={asked!r} of {eqn.name} with these parameters is not defined: {params}\n"
            "  cure: contraction='auto'"
        )
    (found,) = evaluate([lhs.value, rhs.value, *rest])
    return found


def _cuts_rows_alone(params: Any) -> bool:
    """Whether a ragged contraction asks for nothing beside the groups of rows."""
    return params.get("group_offset") is None and params.get("out_sharding") is None
