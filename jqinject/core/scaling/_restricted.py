"""From a number in the learned domain to a scale: restrict, keep away from zero, divide by integer steps."""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core._protocols import Restrict
from jqinject.core.facts import scale_dtype
from jqinject.core.restrict_val import FloatRestrictValue, SignedFloatRestrictValue
from jqinject.core.stats.two_phase import TwoPhaseStat
from jqinject.ops.clamp import signed_clamp_min_ste
from jqinject.ops.power import divide
from jqinject.ops.to_scale import to_scale

POWERS_OF_TWO = np.dtype(jnp.float8_e8m0fnu)
SCALE_FLOOR = 2.0**-64
"""The least value that is divided by the integer steps (at most 2**31) to make a scale. It keeps x / scale
and its derivative finite for tensors of ordinary size, and the result for a tensor of zeros is not nan."""
ANY_POSITIVE = (FloatRestrictValue, SignedFloatRestrictValue)
"""Restrictions that leave a number above 0 as it is, stored and restored."""


def _floor(scaling_min_val: float | None) -> float:
    """The least magnitude of what is divided by the integer steps."""
    return max(scaling_min_val or 0.0, SCALE_FLOOR)


class RestrictedScaling:
    """Abstract: a scaling that is a value by a threshold, both restricted, and their quotient again."""

    restrict_scaling_impl: Restrict
    restrict_threshold_impl: Restrict | None
    restrict_scale_threshold_impl: Restrict | None

    @property
    def scale_dtype(self) -> np.dtype | None:
        """That of the quotient's restriction; without one that of powers of two, where both parts are such."""
        threshold, after = self.restrict_threshold_impl, self.restrict_scale_threshold_impl
        last = scale_dtype(after)
        if last not in (None, POWERS_OF_TWO):
            return last
        parts = (self.restrict_scaling_impl, *(part for part in (threshold, after) if part is not None))
        return POWERS_OF_TWO if all(scale_dtype(part) == POWERS_OF_TWO for part in parts) else None


def clamp_scale(x: jax.Array, scaling_min_val: float | None) -> jax.Array:
    """Keep `|x|` at least `scaling_min_val`, and at least `SCALE_FLOOR` in any case; gradient 1."""
    return signed_clamp_min_ste(x, _floor(scaling_min_val))


def clamp_statistic(stat: jax.Array, scaling_min_val: float | None, of: Any) -> jax.Array:
    """As `clamp_scale`, knowing what computed the statistic."""
    return (
        to_scale(stat, _floor(scaling_min_val), None)
        if _never_negative(of)
        else clamp_scale(stat, scaling_min_val)
    )


def _never_negative(stat: Any) -> bool:
    return isinstance(stat, TwoPhaseStat) and not stat.signed


class RestrictedScale(Protocol):
    """What a component says of its scale: which values are allowed, and the least of them."""

    @property
    def restrict_scaling_impl(self) -> Restrict: ...
    @property
    def restrict_threshold_impl(self) -> Restrict | None: ...
    @property
    def restrict_scale_threshold_impl(self) -> Restrict | None: ...
    @property
    def scaling_min_val(self) -> float | None: ...


def scale_of_statistic(rule: RestrictedScale, stat: jax.Array, threshold: Any, of: Any) -> jax.Array:
    """A scale from a statistic: least value, restricted, least value again, divided by the restricted threshold.

    Args:
        rule: the component whose scale it is.
        stat: the statistic.
        threshold: the number of integer steps; None for 1.
        of: what computed the statistic. Of one that is never negative nothing has to be restricted.
    """
    restrict = rule.restrict_scaling_impl
    if _never_negative(of) and type(restrict) in ANY_POSITIVE:
        return _divided(rule, stat, threshold, of_magnitude=False)
    stored = restrict.restrict_init_tensor(clamp_scale(stat, rule.scaling_min_val))
    return scale_of_stored(rule, stored, threshold)


def scale_of_stored(rule: RestrictedScale, stored: jax.Array, threshold: Any) -> jax.Array:
    """A scale from a number in the restriction's domain: restricted, least value, divided by the restricted threshold.

    Args:
        rule: the component whose scale it is.
        stored: the number.
        threshold: the number of integer steps; None for 1.
    """
    restrict = rule.restrict_scaling_impl
    if type(restrict) is FloatRestrictValue:
        return _divided(rule, stored, threshold, of_magnitude=True)
    value = clamp_scale(restrict(stored), rule.scaling_min_val)
    if threshold is not None:
        value = divide(value, _restricted_threshold(rule, threshold))
    return _finished(rule, value)


def divides_only(rule: RestrictedScale, of: Any) -> bool:
    """Whether a statistic and a learned number alike are divided by the threshold as it is, and that is the scale."""
    threshold = rule.restrict_threshold_impl or rule.restrict_scaling_impl
    plain = type(rule.restrict_scaling_impl) is FloatRestrictValue and type(threshold) in ANY_POSITIVE
    return plain and rule.restrict_scale_threshold_impl is None and _never_negative(of)


def _divided(rule: RestrictedScale, x: jax.Array, threshold: Any, of_magnitude: bool) -> jax.Array:
    steps = None if threshold is None else _restricted_threshold(rule, threshold)
    return _finished(rule, to_scale(x, _floor(rule.scaling_min_val), steps, of_magnitude=of_magnitude))


def _restricted_threshold(rule: RestrictedScale, threshold: Any) -> float | jax.Array:
    """The number of integer steps as the restriction allows it: the next power of two, for instance."""
    restrict = rule.restrict_threshold_impl or rule.restrict_scaling_impl
    if isinstance(threshold, int | float) and threshold > 0 and type(restrict) in ANY_POSITIVE:
        return float(threshold)
    return restrict(restrict.restrict_init_tensor(jnp.asarray(threshold, dtype=jnp.float32)))


def _finished(rule: RestrictedScale, scale: jax.Array) -> jax.Array:
    restrict = rule.restrict_scale_threshold_impl
    return scale if restrict is None else restrict(scale)
