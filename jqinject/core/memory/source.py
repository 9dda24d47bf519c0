"""Where a number of a quantizer comes from: constant, learned, or a statistic.

How batch statistics are averaged, and for how long: the static part.

The base of all sources, and their interface to scales and zero points.

Sources independent of the tensor: a constant, and a parameter with a given initial value.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jqinject.core import check
from jqinject.core._protocols import Factors, Restrict, Stat, View, scale_dtype, searches
from jqinject.core.component import Component, InnerModule, assign, set_given
from jqinject.core.state import QuantParam, float_array
from jqinject.core.statistics.search import Task

EVERY_STEP = 2**25  # no counter reaches it


class DefaultMomentum(float):
    """A default momentum, which calibration replaces by the mean."""


DEFAULT_MOMENTUM = DefaultMomentum(0.1)


@dataclass(frozen=True)
class Collection:
    """How a statistic is collected: static, compared by value.

    Attributes:
        steps: training calls with a finite statistic before the parameter takes over.
        momentum: weight of the newest statistic in the running one; None for the cumulative mean.
        shape: shape of statistic, buffer and parameter.
        shape_name: its name in error messages.
        named: whether the user chose the momentum; otherwise calibration takes the cumulative mean.
        calibrates: whether this is a calibration: as many steps as batches.
    """

    steps: int
    momentum: float | None
    shape: tuple[int, ...]
    shape_name: str
    named: bool
    calibrates: bool = False

    @cached_property
    def limit(self) -> int:
        """The current number of steps."""
        return EVERY_STEP if self.calibrates else self.steps

    @cached_property
    def weight(self) -> float | None:
        """The current weight of the newest statistic; None for the cumulative mean."""
        return self.momentum if self.named or not self.calibrates else None


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


@dataclass(frozen=True)
class _Array:
    """A float32 array as a static value, compared by content."""

    data: bytes
    shape: tuple[int, ...]

    def array(self) -> np.ndarray:
        return np.frombuffer(self.data, dtype=np.float32).reshape(self.shape)


class Constant(Source):
    """Abstract: a constant, static: neither in the state nor in checkpoints.

    Args:
        stored: the number, in the domain of the rule.
    """

    constant: _Array

    def __init__(self, stored: np.ndarray) -> None:
        assign(self, constant=_Array(stored.tobytes(), stored.shape))

    def number(self, x: Any, domain: Domain, task: Task = None) -> Number:
        """The constant."""
        return Number(stored=jnp.asarray(self.constant.array()))


class Learned(Source):
    """Abstract: the parameter `value`.

    Args:
        stored: the initial value, in the domain of the rule.
    """

    value: QuantParam

    def __init__(self, stored: Any) -> None:
        assign(self, value=QuantParam(jnp.asarray(stored)))

    def number(self, x: Any, domain: Domain, task: Task = None) -> Number:
        """The parameter."""
        return Number(stored=self.value.get_value())

    def rescaled(self, factors: Factors) -> dict[str, jax.Array]:
        """See `Rescales`."""
        return rescaled_value(self, self.value, factors)


def initial_number(init: Any, shape: Any, where: str, names: tuple[str, str]) -> Any:
    """An initial value of a given shape: a NumPy array, or a traced one while its layer is traced.

    Args:
        init: a number or an array.
        shape: None for its own.
        where, names: for errors: the component, and the names of value and shape.

    Raises:
        ValueError: the shapes disagree, or the value is not finite.
    """
    wanted = None if shape is None else check.shape(shape, where, names[1])
    made = check.traced_initial_value if isinstance(init, jax.core.Tracer) else check.initial_value
    return made(init, wanted, where, *names)
