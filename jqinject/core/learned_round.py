"""Learned rounding: each weight learns whether to round up or down (AdaRound).

`LearnedRoundSte` holds a parameter `value` of the weight's shape, interpreted by one of:

| class                     | p                                                     | training       | evaluation      |
|---------------------------|-------------------------------------------------------|----------------|-----------------|
| `LearnedRoundHardSigmoid` | `clip(sigmoid(value) * (zeta - gamma) + gamma, 0, 1)` | `floor(x) + p` | `p > 1/2` is up |
| `LearnedRoundSigmoid`     | `sigmoid(value / temperature)`                        | `floor(x) + p` | `value > 0`     |
| `LearnedRoundIdentity`    | `clip(value, -1/2, 1/2)`                              | `round(x + p)` | the same        |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core._protocols import View
from jqinject.core.clamp import Identity
from jqinject.core.construction.assign import set_given
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.core.construction.component import InnerModule
from jqinject.core.state.variables import QuantParam
from jqinject.ops import ste


class LearnedRound(Protocol):
    """`learned_round_impl`: from the learned number to the share of a step, and how it enters."""

    def share(self, value: jax.Array, hard: bool) -> jax.Array: ...
    def round_to(self, x: jax.Array, share: jax.Array) -> jax.Array: ...
    def start_at(self, fraction: jax.Array) -> jax.Array: ...


@checked_arguments
@dataclass(frozen=True)
class LearnedRoundHardSigmoid:
    """A stretched sigmoid, clipped to 0 and 1 so that both are reached.

    Args:
        learned_round_zeta: upper end before clipping, above 1.
        learned_round_gamma: lower end before clipping, below 0.

    Raises:
        ValueError: the ends are not outside 0 and 1.

    Source: Nagel et al., "Up or Down? Adaptive Rounding for Post-Training Quantization", 2020.

    Example:
        >>> LearnedRoundHardSigmoid().share(jnp.array([-9.0, 0.0, 9.0]), hard=False)
        Array([0. , 0.5, 1. ], dtype=float32)
    """

    learned_round_zeta: float = 1.1
    learned_round_gamma: float = -0.1

    def __post_init__(self) -> None:
        if not (self.learned_round_zeta > 1 and self.learned_round_gamma < 0):
            raise ValueError(
                "LearnedRoundHardSigmoid needs learned_round_zeta > 1 and learned_round_gamma < 0, so that rounding "
                f"up and down are both reached; got {self.learned_round_zeta} and {self.learned_round_gamma}"
            )

    def share(self, value: jax.Array, hard: bool) -> jax.Array:
        """The fraction to round up, 0 to 1; 0 or 1 if `hard`."""
        width = self.learned_round_zeta - self.learned_round_gamma
        stretched = jax.nn.sigmoid(value) * width + self.learned_round_gamma
        inside = (stretched >= 0) & (stretched <= 1)
        share = jnp.where(inside, stretched, jax.lax.stop_gradient(jnp.clip(stretched, 0.0, 1.0)))
        return _steps(share > 0.5) if hard else share

    def round_to(self, x: jax.Array, share: jax.Array) -> jax.Array:
        """`floor(x) + share`."""
        return ste.floor_ste(x) + share

    def start_at(self, fraction: jax.Array) -> jax.Array:
        """The number whose share is `fraction`, so that rounding starts at the weights."""
        width = self.learned_round_zeta - self.learned_round_gamma
        return -jnp.log(width / (fraction - self.learned_round_gamma) - 1)


@checked_arguments
@dataclass(frozen=True)
class LearnedRoundSigmoid:
    """A sigmoid, steeper at lower temperatures.

    Args:
        learned_round_temperature: above 0.

    Raises:
        ValueError: the temperature is not above 0.

    Example:
        >>> LearnedRoundSigmoid(0.5).share(jnp.array([-9.0, 0.0, 9.0]), hard=True)
        Array([0., 0., 1.], dtype=float32)
    """

    learned_round_temperature: float = 1.0

    def __post_init__(self) -> None:
        if not self.learned_round_temperature > 0:
            raise ValueError(
                f"LearnedRoundSigmoid: learned_round_temperature must be above 0, got {self.learned_round_temperature}"
            )

    def share(self, value: jax.Array, hard: bool) -> jax.Array:
        """The fraction to round up, between 0 and 1; 0 or 1 if `hard`."""
        return _steps(value > 0) if hard else jax.nn.sigmoid(value / self.learned_round_temperature)

    def round_to(self, x: jax.Array, share: jax.Array) -> jax.Array:
        """`floor(x) + share`."""
        return ste.floor_ste(x) + share

    def start_at(self, fraction: jax.Array) -> jax.Array:
        """The number whose share is `fraction`, as close as a sigmoid gets."""
        kept = jnp.clip(fraction, 1e-4, 1 - 1e-4)
        return self.learned_round_temperature * (jnp.log(kept) - jnp.log1p(-kept))


@dataclass(frozen=True)
class LearnedRoundIdentity:
    """A shift of up to half a step before rounding to nearest, in training and evaluation.

    Source: Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent" (SignRound), 2023.

    Example:
        >>> impl = LearnedRoundIdentity()
        >>> impl.round_to(jnp.array([1.4, 1.4]), impl.share(jnp.array([0.0, 0.2]), hard=False))
        Array([1., 2.], dtype=float32)
    """

    def share(self, value: jax.Array, hard: bool) -> jax.Array:
        """The shift, -1/2 to 1/2, with gradient 1."""
        return ste.with_gradient_of(value, jnp.clip(value, -0.5, 0.5))

    def round_to(self, x: jax.Array, share: jax.Array) -> jax.Array:
        """`round(x + share)`."""
        return ste.round_ste(x + share)

    def start_at(self, fraction: jax.Array) -> jax.Array:
        """No shift: to nearest."""
        return jnp.zeros_like(fraction)


def _steps(up: jax.Array) -> jax.Array:
    return up.astype(jnp.float32)


@checked_arguments
class LearnedRoundSte(InnerModule):
    """Rounding with a learned parameter for each element of one weight; its input has gradient 1.

    In training mode the first two kinds leave the weight between two integers until its share is learned.
    `model.eval()` rounds.

    Differs from Brevitas: arrays of another shape than the weight (a zero point) are rounded to nearest.

    Args:
        learned_round_impl: what the parameter means.
        learned_round_init: initial `value`, an array of the weight's shape.
        input_view_impl: the quantizer's view of the weight, also applied to `value`; None for no view.
        deterministic: evaluation mode.

    Raises:
        ValueError: `learned_round_init` is not finite.

    Example:
        >>> rounding = LearnedRoundSte(LearnedRoundHardSigmoid(), jnp.array([0.0, 9.0]))
        >>> rounding(jnp.array([1.2, 1.2]))
        Array([1.5, 2. ], dtype=float32)
        >>> rounding.deterministic = True
        >>> rounding(jnp.array([1.2, 1.2]))
        Array([1., 2.], dtype=float32)
    """

    input_view_impl: View = Identity()

    def __init__(
        self,
        learned_round_impl: LearnedRound,
        learned_round_init: Any,
        input_view_impl: View | None = None,
        *,
        deterministic: bool = False,
    ) -> None:
        init = jnp.asarray(learned_round_init, jnp.float32)
        if isinstance(learned_round_init, np.ndarray) and not np.all(np.isfinite(learned_round_init)):
            raise ValueError("LearnedRoundSte: learned_round_init must be finite")
        self.learned_round_impl = learned_round_impl
        self.value = QuantParam(init)
        self.deterministic = deterministic
        set_given(self, input_view_impl=input_view_impl)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Round `x`."""
        share = self.share()
        if x.shape != share.shape:
            share = self.input_view_impl(share)
        return self.learned_round_impl.round_to(x, share) if x.shape == share.shape else ste.round_ste(x)

    def share(self) -> jax.Array:
        """The fraction of a step that each weight is rounded up by, of the weight's shape."""
        return self.learned_round_impl.share(self.value.get_value(), self.deterministic)

    def set_view(self, deterministic: bool | None = None) -> None:
        """Switch between training and evaluation.

        Args:
          deterministic: round to whole numbers; None keeps what is set.
        """
        if deterministic is not None:
            self.deterministic = deterministic
