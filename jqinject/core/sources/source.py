"""The base of all sources, and their interface to scales and zero points."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jqinject.core._protocols import Restrict, Stat, View
from jqinject.core.construction.assign import assign, set_given
from jqinject.core.construction.component import Component, InnerModule
from jqinject.core.facts import Factors, scale_dtype, searches
from jqinject.core.state.variables import QuantParam, float_array
from jqinject.core.stats.search import Task


class Number(NamedTuple):
    """What a source found.

    Attributes:
        statistic: a statistic; None if there is none.
        stored: a number in the domain in which it is learned; None if there is none.
        collecting: a bool scalar, if there are both: whether the statistic is used.
    """

    statistic: Any = None
    stored: Any = None
    collecting: Any = None


EMPTY = {"scaling": 1.0, "zero_point": 0.0}
"""Initial values of unfilled parameters, by prefix of the user's arguments."""


class Domain(Protocol):
    """How a statistic becomes the number that is stored and learned."""

    def clamped(self, stat: jax.Array, /) -> jax.Array:
        """The statistic, bounded from below."""
        ...

    def to_stored(self, value: jax.Array, /) -> jax.Array:
        """From a value to the domain in which it is learned."""
        ...

    def from_stored(self, stored: jax.Array, /) -> jax.Array:
        """From the domain in which it is learned to the value."""
        ...


@dataclass(frozen=True)
class _Distance:
    """Distances in floats, learned directly: zero points."""

    def clamped(self, stat: jax.Array) -> jax.Array:
        """The statistic itself."""
        return stat

    def to_stored(self, value: jax.Array) -> jax.Array:
        """The value itself."""
        return value

    def from_stored(self, stored: jax.Array) -> jax.Array:
        """The value itself."""
        return stored


DISTANCE = _Distance()


class Source(Component):
    """Abstract: finds the number that a scale or a zero point is made from.

    Attributes:
        stats: the statistic, if any.
        view: its view.
        rule: from the number to a scale; None for zero points.
        searches: whether the statistic is searched.
    """

    stats: Stat | None = None
    view: View | None = None
    rule: Any = None
    searches: bool = False

    def _take(self, stats: Stat, view: View) -> None:
        """Hold a statistic and its view."""
        assign(self, stats=stats, view=view)
        set_given(self, searches=searches(stats))

    def unfilled(self) -> tuple[str, ...]:
        """Return the names of the Variables that hold placeholders until training fills them."""
        return ()

    @property
    def scale_dtype(self) -> np.dtype | None:
        """The `scale_dtype` of the rule."""
        return scale_dtype(self.rule)

    @property
    def restrict_scaling_impl(self) -> Restrict | None:
        """How stored scales are read; None for zero points."""
        return None if self.rule is None else self.rule.restrict_scaling_impl

    @abstractmethod
    def number(self, x: Any, domain: Domain, task: Task = None) -> Number:
        """The number for `x`.

        Args:
            x: the tensor.
            domain: of stored numbers.
            task: for a statistic that is searched.
        """

    def complete_state(self, entries: dict[str, Any]) -> dict[str, Any]:
        """Translate a checkpoint's entries for this component.

        Args:
            entries: variable name -> array, as found in the checkpoint.

        Returns:
            The entries to load.
        """
        return dict(entries)


def rescaled_value(source: Source, value: QuantParam, factors: Factors) -> dict[str, jax.Array]:
    """Return a source's learned number for a tensor multiplied by `factors`; see `Rescales`."""
    if source.rule is not None:
        return {"value": source.rule.to_stored(factors.times(source.rule.from_stored(value.get_value())))}
    factors.check_signs()  # a range that reaches below zero would reach above it
    return {"value": factors.times(value.get_value())}


class AffineRescaling(InnerModule):
    """`weight * x + bias`, both learned; without `bias` unless given an initial value.

    Args:
        shape: shape of the parameters.
        weight_init: initial `affine_weight`.
        bias_init: initial `affine_bias`, or None if absent.
    """

    affine_bias: QuantParam | None = None

    def __init__(self, shape: tuple[int, ...], weight_init: float, bias_init: float | None = None) -> None:
        self.affine_weight = QuantParam(float_array(weight_init, shape))
        if bias_init is not None:
            self.affine_bias = QuantParam(float_array(bias_init, shape))

    def __call__(self, x: jax.Array) -> jax.Array:
        """The mapped number."""
        y = x * self.affine_weight.get_value()
        return y if self.affine_bias is None else y + self.affine_bias.get_value()


def affine_rescaling(
    shape: tuple[int, ...], init: tuple[float | None, float | None], where: str, what: str
) -> AffineRescaling | None:
    """The affine map for an initial factor and shift, or None.

    Raises:
        ValueError: a shift without a factor.
    """
    weight_init, bias_init = init
    if weight_init is not None:
        return AffineRescaling(shape, weight_init, bias_init)
    if bias_init is not None:
        raise ValueError(
            f"{where}: {what}_affine_shifting_init={bias_init} needs a factor as well: give "
            f"{what}_affine_rescaling_init=1.0."
        )
    return None
