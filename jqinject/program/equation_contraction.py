"""One contraction of a program on the numbers that its operands have: payloads where both have them, else floats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jqinject.dot import FrozenParam
from jqinject.dot.geometry.dimensions import Dimensions
from jqinject.dot.kernels.convolution import Convolution
from jqinject.dot.kernels.ragged import Ragged
from jqinject.dot.tensors.backward_quantizer import GradientFormat
from jqinject.dot.tensors.choice import ContractionKind, check_choice, choose
from jqinject.dot.tensors.contract import contract_as
from jqinject.program.jaxpr import Equation
from jqinject.program.operations import contraction_arguments
from jqinject.program.tracked_value import Tracked, dtype_of, shape_of
from jqinject.quant_tensor import QuantTensor, is_quantized


class Contracted(NamedTuple):
    """The output of a contraction.

    Attributes:
        value: the output.
        token: whose cotangent is the scale of the output's gradient, if backward its payload is contracted; else None.
    """

    value: jax.Array
    token: jax.Array | None = None


def contracted(
    eqn: Equation,
    numbers: ContractionKind,
    operands: Sequence[Tracked],
    rest: list[jax.Array],
    evaluate: Callable[[list[jax.Array]], list[jax.Array]],
    gradient: GradientFormat | None,
) -> Contracted:
    """The contraction of an equation, by the payloads of its operands or by their floats.

    Args:
        eqn: the equation.
        numbers: which numbers the rule wants to be contracted.
        operands: the two that are contracted.
        rest: further operands.
        evaluate: contracts arrays.
        gradient: the numbers of the output's gradient, if it arrives quantized; else None.
    """
    lhs, rhs = (x.value for x in operands)
    product = None
    if is_quantized(lhs) and is_quantized(rhs):
        product = _of_payloads(eqn, numbers, lhs, rhs, rest, gradient)
    if product is not None:
        return product
    value = _stored_product(eqn, numbers, operands)
    if value is None:
        (value,) = evaluate([*(x.array for x in operands), *rest])
    return Contracted(value)


def _of_payloads(
    eqn: Equation,
    numbers: ContractionKind,
    lhs: jax.Array | QuantTensor,
    rhs: jax.Array | QuantTensor,
    rest: list[jax.Array],
    gradient: GradientFormat | None,
) -> Contracted | None:
    """The contraction of two QuantTensors by their payloads; None if the table says floats."""
    name, dtype, params = eqn.name, eqn.outputs[0].dtype, eqn.params
    sharding = params.get("out_sharding")
    how: Any = {"gradient": gradient, "out_sharding": sharding}
    plain = params.get("group_offset") is None and sharding is None
    where: Any = None
    if name == "dot_general":
        where = Dimensions.of(lhs.ndim, rhs.ndim, params["dimension_numbers"])
    elif name == "conv_general_dilated":
        where = Convolution.of(lhs.shape, rhs.shape, **contraction_arguments(eqn), dtype=np.dtype(dtype))
    elif name == "ragged_dot_general" and plain:
        how["group_sizes"] = rest[0]
        if rest[0].ndim == 1:
            numbers_of_axes = params["ragged_dot_dimension_numbers"]
            where = Ragged.of(lhs, rhs, numbers_of_axes, dtype, params["precision"])
    elif numbers in ("int", "fp8"):
        raise ValueError(
            f"contraction={numbers!r} of {name} with these parameters is not defined: {params}\n"
            "  cure: contraction='auto'"
        )
    integer_gradient = gradient is not None and gradient.is_integer
    choice = choose(
        lhs, rhs, where, numbers, rounded=False, swaps=sharding is None, gradient=integer_gradient
    )
    check_choice(choice, where, numbers)
    return None if choice.kernel == "floats" else Contracted(*contract_as(choice, where, dtype, **how))


def _stored_product(eqn: Equation, numbers: ContractionKind, operands: Sequence[Tracked]) -> jax.Array | None:
    """The contraction of floats with a frozen parameter as it is stored; None if it is none of these.

    Args:
        eqn: its equation.
        numbers: which numbers the rule wants to be contracted.
        operands: two.
    """
    place = next((place for place in (1, 0) if operands[place].stored_numbers is not None), None)
    if eqn.name != "dot_general" or numbers == "float" or place is None:
        return None
    x, stored = operands[1 - place].array, operands[place].stored_numbers
    assert stored is not None, "looked for above"
    if np.dtype(dtype_of(x)) != np.dtype(dtype_of(stored.value)):
        return None
    left, right = (len(shape_of(x)) for x in operands)
    dims = Dimensions.of(left, right, eqn.params["dimension_numbers"])
    dims = (dims if place == 1 else dims.swapped()).with_right(stored.order)
    sharding = eqn.params.get("out_sharding")
    if sharding is not None and not dims.is_ordered:
        return None
    choice = choose(x, FrozenParam.holding(stored.numbers, stored.form, {}), dims.plain, numbers)
    if choice.kernel != "stored":
        return None
    how = {"precision": eqn.params.get("precision"), "out_sharding": sharding}
    return dims.ordered(contract_as(choice, dims.plain, eqn.outputs[0].dtype, **how)[0])
