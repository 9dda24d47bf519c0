"""Which numbers a quantizer passes a gradient to: `gradient_mask_impl(steps, rounded)`.

A mask replaces the rule of the clamp. It sees a number in steps of its scale before and after rounding; the gradient
goes to the number where the mask is True, and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jqinject.core.construction.checked_arguments import checked_arguments


@checked_arguments
@dataclass(frozen=True)
class TrustMask:
    """Numbers that rounding and clipping moved by at most `trust_steps`.

    Half the distance between neighbours is what rounding to nearest moves a number at most, so with it the gradient
    passes within the grid and as far beyond its ends.

    Args:
        trust_steps: in units of the scale.

    Source: Panferov et al., 2025, "QuEST: Stable Training of LLMs with 1-Bit Weights and Activations".

    Example:
        >>> TrustMask(0.5)(jnp.array([0.4, 8.6]), jnp.array([0.5, 7.5])).tolist()
        [True, False]
    """

    trust_steps: float

    def __call__(self, steps: jax.Array, rounded: jax.Array) -> jax.Array:
        """Whether each number is passed a gradient."""
        return jnp.abs(rounded - steps) <= self.trust_steps


@checked_arguments
@dataclass(frozen=True)
class BelowMask:
    """Numbers of a magnitude below `limit_steps`.

    Args:
        limit_steps: in units of the scale.

    Source: Castro et al., 2025, "Quartet: Native FP4 Training Can Be Optimal for Large Language Models".

    Example:
        >>> BelowMask(6.0)(jnp.array([5.9, -6.0]), jnp.array([6.0, -6.0])).tolist()
        [True, False]
    """

    limit_steps: float

    def __call__(self, steps: jax.Array, rounded: jax.Array) -> jax.Array:
        """Whether each number is passed a gradient."""
        return jnp.abs(steps) < self.limit_steps
