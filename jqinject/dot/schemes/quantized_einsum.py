"""`einsum` of two operands, by a quantized `dot_general`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.typing import DTypeLike

from jqinject.dot.geometry.dimensions import Operand, OutSharding
from jqinject.dot.geometry.equation import EinsumLabels
from jqinject.ops.sharding import asked, before_transpose, with_sharding
from jqinject.quant_tensor import as_array


def einsum_by(
    dot_general: Callable[..., jax.Array],
    equation: str,
    lhs: Operand,
    rhs: Operand,
    out_sharding: OutSharding = None,
) -> jax.Array:
    """The einsum of two arrays as one call of `dot_general`, in the given order.

    Before it, diagonals are taken and labels of one operand alone are summed; after it, the output is transposed.

    Args:
        dot_general: called `dot_general(lhs, rhs, dimension_numbers)`; with `out_sharding` on a mesh with explicit
            axes.
        equation: as for `jnp.einsum`: explicit or implicit output, ellipsis, repeated labels.
        lhs, rhs: arrays.
        out_sharding: of the result, as for `jnp.einsum`.

    Raises:
        TypeError: the equation is not a string.
        ValueError: it does not have two operands, or does not fit them.

    Example:
        >>> import jax.numpy as jnp
        >>> einsum_by(jax.lax.dot_general, "df,bd->bf", jnp.ones((3, 2)), jnp.ones((4, 3))).shape
        (4, 2)
    """
    parsed = EinsumLabels.parse(equation, lhs.shape, rhs.shape)
    lhs, rhs, simple = parsed.prepared(lhs, rhs)
    sharding = before_transpose(asked(out_sharding, as_array(lhs), as_array(rhs)), simple.permutation())
    options = {} if sharding is None else {"out_sharding": sharding}
    y: Any = dot_general(lhs, rhs, simple.dimensions().numbers, **options)
    return with_sharding(y.transpose(simple.permutation()), out_sharding)


def einsum_op(dot_general: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Return a function with the arguments of `jnp.einsum` that contracts two operands by a quantized `dot_general`.

    Args:
        dot_general: as for `einsum_by`, with `preferred_element_type`.
    """

    def contract(
        equation: str,
        lhs: jax.Array,
        rhs: jax.Array,
        *,
        precision: jax.lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
        out_sharding: OutSharding = None,
    ) -> jax.Array:
        by = partial(dot_general, preferred_element_type=preferred_element_type)
        return einsum_by(by, equation, lhs, rhs, out_sharding)

    return contract


def kernel_axes_of(equation: str, kernel_shape: tuple[int, ...]) -> tuple[int, ...]:
    """The axes of the right operand that an equation sums over: those missing from the output.

    Args:
        equation: of two operands, with an output.
        kernel_shape: of the right operand.

    Example:
        >>> kernel_axes_of("...d,dnh->...nh", (8, 2, 4))
        (0,)
    """
    inputs, _, out = equation.replace(" ", "").partition("->")
    labels = inputs.split(",")[1]
    if "..." in labels:  # an ellipsis goes into the output
        hidden = len(kernel_shape) - len(labels.replace("...", ""))
        before = labels.index("...")
        labels = labels[:before] + "." * hidden + labels[before + 3 :]
    return tuple(axis for axis, label in enumerate(labels) if label != "." and label not in out)
