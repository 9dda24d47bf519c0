"""Einsum equations of two operands, as a `dot_general` with preparation and a final transposition.

The operands always keep their order, so that each keeps its configuration.
"""

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jqinject.dot.geometry.dimensions import Dimensions, OutSharding
from jqinject.ops.sharding import asked, before_transpose, with_sharding
from jqinject.quant_tensor import Operand, as_array


@dataclass(frozen=True)
class EinsumLabels:
    """A two-operand einsum, its ellipsis spelled out.

    Attributes:
        lhs, rhs: labels of the operands' axes.
        out: labels of the output's axes.
    """

    lhs: str
    rhs: str
    out: str

    @classmethod
    def parse(cls, equation: str, lhs_shape: Sequence[int], rhs_shape: Sequence[int]) -> "EinsumLabels":
        """From a `jnp.einsum` string, with optional `...` and output.

        Raises:
            TypeError: it is not a string.
            ValueError: it does not have two operands, names missing axes, or lengths disagree.
        """
        if not isinstance(equation, str):
            raise TypeError(f"an einsum equation must be a string such as 'bd,df->bf', got {equation!r}")
        inputs, arrow, out = equation.replace(" ", "").partition("->")
        operands = inputs.split(",")
        if len(operands) != 2:
            raise ValueError(
                f"a quantized einsum contracts two operands, got {len(operands)} in {equation!r}.\n  cure: several "
                "einsums, so that it is clear what is quantized between them"
            )
        (lhs, of_lhs), (rhs, of_rhs) = (
            _spelled(labels, len(shape), equation)
            for labels, shape in zip(operands, (lhs_shape, rhs_shape), strict=True)
        )
        rest = max(of_lhs, of_rhs, key=len)
        if arrow:
            out = out.replace("...", rest)
        else:
            once = sorted(label for label in set(lhs + rhs) - set(rest) if (lhs + rhs).count(label) == 1)
            out = rest + "".join(once)
        parsed = cls(lhs, rhs, out)
        parsed._check(equation, tuple(lhs_shape), tuple(rhs_shape))
        return parsed

    def _check(self, equation: str, lhs_shape: tuple[int, ...], rhs_shape: tuple[int, ...]) -> None:
        lengths: dict[str, int] = {}
        for labels, shape in ((self.lhs, lhs_shape), (self.rhs, rhs_shape)):
            if len(labels) != len(shape):
                raise ValueError(
                    f"{equation!r}: an operand of shape {shape} does not have {len(labels)} axes"
                )
            for label, length in zip(labels, shape, strict=True):
                size = lengths.setdefault(label, length)
                if size != length and 1 not in (size, length):
                    raise ValueError(
                        f"{equation!r}: axis {label!r} is {size} long in one place and {length} in another (shapes "
                        f"{lhs_shape} and {rhs_shape})"
                    )
                lengths[label] = max(size, length)
        unknown = set(self.out) - set(lengths)
        if unknown or len(set(self.out)) != len(self.out):
            raise ValueError(
                f"{equation!r}: the output names {sorted(unknown) or 'an axis twice'}, which no operand has"
                if unknown
                else f"{equation!r}: the output names an axis twice"
            )

    def is_plain(self, lhs_shape: Sequence[int], rhs_shape: Sequence[int]) -> bool:
        """Whether it is one `dot_general` of unchanged operands: `prepared` has no effect."""
        left, right = set(self.lhs), set(self.rhs)
        lengths = dict(zip(self.lhs, lhs_shape, strict=True))
        return (
            len(left) == len(self.lhs)
            and len(right) == len(self.rhs)
            and left ^ right <= set(self.out)
            and all(lengths.get(label, n) == n for label, n in zip(self.rhs, rhs_shape, strict=True))
        )

    def prepared(self, lhs: Operand, rhs: Operand) -> "tuple[Operand, Operand, EinsumLabels]":
        """Operands without repeated labels, axes to broadcast, or labels to sum alone."""
        lengths = dict(zip(self.lhs, lhs.shape, strict=True))
        for label, length in zip(self.rhs, rhs.shape, strict=True):
            lengths[label] = max(length, lengths.get(label, 1))
        lhs, left = _diagonal(lhs, self.lhs)
        rhs, right = _diagonal(rhs, self.rhs)
        # Drop an axis of length 1 that broadcasts against the other operand's.
        lhs, left = _without(lhs, left, lambda label, length: length == 1 != lengths[label])
        rhs, right = _without(rhs, right, lambda label, length: length == 1 != lengths[label])
        alone = (set(left) ^ set(right)) - set(self.out)
        lhs, left = _without(lhs, left, lambda label, length: label in alone)
        rhs, right = _without(rhs, right, lambda label, length: label in alone)
        return lhs, rhs, EinsumLabels(left, right, self.out)

    @property
    def axes(self) -> Dimensions:
        """Of a prepared equation: labels of both operands are summed, or batch axes if the output has them."""
        return Dimensions.of_equation(self.lhs, self.rhs, self.out)


def _spelled(labels: str, ndim: int, equation: str) -> tuple[str, str]:
    """The labels with an ellipsis replaced by unused ones, and those: the last axis takes the first."""
    if "..." not in labels:
        return labels, ""
    free = [label for label in string.ascii_uppercase + string.ascii_lowercase if label not in equation]
    hidden = ndim - len(labels.replace("...", ""))
    if hidden < 0:
        raise ValueError(f"{equation!r}: an operand of {ndim} axes has no room for the axes that are named")
    rest = "".join(reversed(free[:hidden]))
    return labels.replace("...", rest), rest


def _diagonal(x: Operand, labels: str) -> tuple[Operand, str]:
    """An operand whose labels are all different."""
    for label in dict.fromkeys(labels):
        while labels.count(label) > 1:
            first, second = labels.index(label), labels.rindex(label)
            x = jnp.diagonal(as_array(x), axis1=first, axis2=second)
            labels = labels[:first] + labels[first + 1 : second] + labels[second + 1 :] + label
    return x, labels


def _without(x: Operand, labels: str, drops: Callable[[str, int], bool]) -> tuple[Operand, str]:
    """An operand with some axes summed."""
    axes = [axis for axis, label in enumerate(labels) if drops(label, x.shape[axis])]
    if not axes:  # a QuantTensor stays one
        return x, labels
    return as_array(x).sum(tuple(axes)), "".join(
        label for axis, label in enumerate(labels) if axis not in axes
    )


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
    axes = simple.axes
    sharding = before_transpose(asked(out_sharding, as_array(lhs), as_array(rhs)), axes.order)
    options = {} if sharding is None else {"out_sharding": sharding}
    y: Any = dot_general(lhs, rhs, axes.numbers, **options)
    return with_sharding(y.transpose(axes.order), out_sharding)


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
    labels, rest = _spelled(inputs.split(",")[1], len(kernel_shape), equation)
    return tuple(axis for axis, label in enumerate(labels) if label not in rest + out)
