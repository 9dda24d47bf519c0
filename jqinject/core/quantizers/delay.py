"""Quantizers that wait: the first calls return the tensor unchanged."""

from dataclasses import InitVar, field

import jax
import jax.numpy as jnp

from jqinject.core import check, component, state

_STEPS = check.between(0, check.MOST_STEPS, check.integer)


@component.component
class DelayWrapper(component.Component):
    """Returns `x` in the first `quant_delay_steps` calls, `y` after.

    Every call counts, in training and evaluation. State: `countdown`, the calls left; none without a delay.

    Args:
        quant_delay_steps: the number of calls that pass through; None or 0 for no delay.

    Raises:
        TypeError: when it is neither None nor an integer.

    Example:
        >>> delay = DelayWrapper(1)
        >>> [float(delay(jnp.float32(0.3), jnp.float32(0.25))) for _ in range(2)]
        [0.30000001192092896, 0.25]
    """

    is_scale_free = True
    quant_delay_steps: InitVar[int | None]
    countdown: state.QuantStat | None = field(default=None, init=False)

    def __post_init__(self, quant_delay_steps: int | None) -> None:
        if steps := delay_steps(quant_delay_steps, "DelayWrapper"):
            self.countdown = state.QuantStat(state.float_array(steps))

    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """`x` while the delay lasts, else `y`."""
        if self.countdown is None:
            return y
        left = self.countdown.get_value()
        self.countdown.set_value(jnp.maximum(left - 1, 0))
        return jnp.where(left > 0, x, y)


def delay_steps(quant_delay_steps: int | None, where: str) -> int:
    """The number of delayed calls; 0 for None.

    Raises:
        TypeError: when it is neither None nor an integer.
        ValueError: when it is negative, or more than a counter can hold.
    """
    return 0 if quant_delay_steps is None else _STEPS(quant_delay_steps, where, "quant_delay_steps")


class Delayed(component.Component):
    """Abstract: what quantizes after `quant_delay_steps` calls, its one `InitVar`.

    Attributes:
        delay: returns `x` until then; None if it does not wait.
    """

    delay: DelayWrapper | None = None

    def __post_init__(self, quant_delay_steps: int | None) -> None:
        if steps := delay_steps(quant_delay_steps, type(self).__name__):
            self.delay = DelayWrapper(steps)
