"""Quantization that starts late: the first calls pass the tensor through."""

from __future__ import annotations

import operator

import jax
import jax.numpy as jnp

from jqinject.core.construction.check import MOST_STEPS
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.core.construction.component import Component
from jqinject.core.state.variables import QuantStat, float_array


@checked_arguments
class DelayWrapper(Component):
    """Returns `x` in the first `quant_delay_steps` calls, `y` after.

    Every call counts, in training and evaluation. State: `countdown`, the calls left; none without a delay.

    Args:
        quant_delay_steps: the number of calls that pass through; None or at most 0 for no delay.

    Raises:
        TypeError: when it is neither None nor an integer.

    Example:
        >>> delay = DelayWrapper(1)
        >>> [float(delay(jnp.float32(0.3), jnp.float32(0.25))) for _ in range(2)]
        [0.30000001192092896, 0.25]
    """

    is_scale_free = True
    countdown: QuantStat | None = None

    def __init__(self, quant_delay_steps: int | None) -> None:
        steps = delay_steps(quant_delay_steps, "DelayWrapper")
        if steps > 0:
            self.countdown = QuantStat(float_array(steps))

    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """`x` while the delay lasts, else `y`."""
        if self.countdown is None:
            return y
        left = self.countdown.get_value()
        self.countdown.set_value(jnp.maximum(left - 1, 0))
        return jnp.where(left > 0, x, y)


def delay_steps(quant_delay_steps: int | None, where: str) -> int:
    """The number of delayed calls, at least 0.

    Raises:
        TypeError: when it is neither None nor an integer.
        ValueError: when a counter cannot hold it.
    """
    if quant_delay_steps is None:
        return 0
    try:
        steps = operator.index(quant_delay_steps)
    except TypeError:
        raise TypeError(
            f"{where}: quant_delay_steps must be an int or None, got {quant_delay_steps!r}."
        ) from None
    if steps > MOST_STEPS:
        raise ValueError(f"{where}: quant_delay_steps must be at most {MOST_STEPS}, got {steps}.")
    return max(steps, 0)


def delay_of(quant_delay_steps: int | None, where: str) -> DelayWrapper | None:
    """A `DelayWrapper`, or None without a delay."""
    steps = delay_steps(quant_delay_steps, where)
    return DelayWrapper(steps) if steps else None
