"""From a number in the learned domain to a scale: restrict, keep away from zero, divide by integer steps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core._protocols import Restrict
from jqinject.core.facts import scale_dtype
from jqinject.ops.clamp import signed_clamp_min_ste
from jqinject.ops.power import divide

POWERS_OF_TWO = np.dtype(jnp.float8_e8m0fnu)
SCALE_FLOOR = 2.0**-64
"""The least value that is divided by the integer steps (at most 2**31) to make a scale. It keeps x / scale
and its derivative finite for tensors of ordinary size, and the result for a tensor of zeros is not nan."""


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
    return signed_clamp_min_ste(x, max(scaling_min_val or 0.0, SCALE_FLOOR))


def restricted_threshold(threshold: Any, restrict: Restrict) -> jax.Array:
    """The number of integer steps as the restriction allows it: the next power of two, for instance."""
    return restrict(restrict.restrict_init_tensor(jnp.asarray(threshold, dtype=jnp.float32)))


def apply_threshold(
    value: jax.Array, threshold: Any, restrict_threshold: Restrict, restrict_scale_threshold: Restrict | None
) -> jax.Array:
    """`scale = value / threshold`, both restricted; `value` itself when there is no threshold."""
    if threshold is not None:
        value = divide(value, restricted_threshold(threshold, restrict_threshold))
    return value if restrict_scale_threshold is None else restrict_scale_threshold(value)
