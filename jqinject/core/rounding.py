"""Rounding components: `float_to_int_impl(x)` turns floats into whole numbers, with gradient 1."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from flax import nnx
from jax.typing import ArrayLike

from jqinject.core._protocols import Rounding
from jqinject.core.construction.assign import set_given
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.core.construction.component import Component, InnerModule
from jqinject.ops import ste


@dataclass(frozen=True)
class RoundSte:
    """Round to nearest, ties to even. See `jqinject.ops.round_ste`.

    Example:
        >>> RoundSte()(1.5)
        Array(2., dtype=float32, weak_type=True)
    """

    is_nearest = True
    elementwise = staticmethod(ste.nearest)

    def __call__(self, x: ArrayLike) -> jax.Array:
        """Round `x`."""
        return ste.round_ste(x)


@dataclass(frozen=True)
class CeilSte:
    """Round up. See `jqinject.ops.ceil_ste`."""

    elementwise = staticmethod(jax.lax.ceil)

    def __call__(self, x: ArrayLike) -> jax.Array:
        """Round `x`."""
        return ste.ceil_ste(x)


@dataclass(frozen=True)
class FloorSte:
    """Round down. See `jqinject.ops.floor_ste`."""

    elementwise = staticmethod(jax.lax.floor)

    def __call__(self, x: ArrayLike) -> jax.Array:
        """Round `x`."""
        return ste.floor_ste(x)


@dataclass(frozen=True)
class RoundToZeroSte:
    """Round towards zero. See `jqinject.ops.round_to_zero_ste`."""

    elementwise = staticmethod(ste.toward_zero)

    def __call__(self, x: ArrayLike) -> jax.Array:
        """Round `x`."""
        return ste.round_to_zero_ste(x)


@dataclass(frozen=True)
class DPURoundSte:
    """Round to nearest; ties of negative numbers go up. See `jqinject.ops.dpu_round_ste`."""

    elementwise = staticmethod(ste.nearest_ties_up_below_zero)

    def __call__(self, x: ArrayLike) -> jax.Array:
        """Round `x`."""
        return ste.dpu_round_ste(x)


@dataclass(frozen=True)
class RoundHalfToZeroSte:
    """Round to nearest; ties go to the integer nearer to zero. See `jqinject.ops.round_half_to_zero_ste`."""

    elementwise = staticmethod(ste.nearest_ties_to_zero)

    def __call__(self, x: ArrayLike) -> jax.Array:
        """Round `x`."""
        return ste.round_half_to_zero_ste(x)


@checked_arguments
class StochasticRoundSte(InnerModule):
    """Round up with a probability equal to the fraction, else down; to nearest when `deterministic`.

    Each call in training mode uses a new key of its random stream. `model.eval()` sets `deterministic`, so that serving
    is reproducible.

    Differs from Brevitas: the randomness comes from `rngs`; there is no global generator, and no evaluation
    mode that stays random (`deterministic_inference=False`).

    Args:
        rngs: where the stream comes from; None makes one from `seed`.
        seed: seed of the stream when `rngs` is None.
        deterministic: round to nearest (evaluation mode).
        noise_sharing_axes: axes along which random numbers are shared, which is cheaper but correlates errors.
        random_bits: per random number: 32, or 16, which takes less than half the time.

    Raises:
        ValueError: `random_bits` is neither.

    Example:
        >>> import jax.numpy as jnp
        >>> rounding = StochasticRoundSte(nnx.Rngs(0))
        >>> abs(float(rounding(jnp.full((10_000,), 0.3)).mean()) - 0.3) < 0.02
        True
    """

    is_nearest = True
    noise_sharing_axes: tuple[int, ...] = ()
    random_bits: int = 32

    def __init__(
        self,
        rngs: nnx.Rngs | None = None,
        *,
        seed: int = 0,
        deterministic: bool = False,
        noise_sharing_axes: tuple[int, ...] = (),
        random_bits: int = 32,
    ) -> None:
        if random_bits not in (16, 32):
            raise ValueError(f"StochasticRoundSte: random_bits must be 16 or 32, got {random_bits}")
        source = (nnx.Rngs(seed) if rngs is None else rngs)["stochastic_round"]
        # A fork, always named alike: names are part of the graph.
        self.stream = nnx.RngStream(source(), tag="stochastic_round")
        self.deterministic = deterministic
        set_given(self, noise_sharing_axes=tuple(noise_sharing_axes), random_bits=random_bits)

    def __call__(self, x: ArrayLike) -> jax.Array:
        """Round `x`."""
        if self.deterministic:
            return ste.round_ste(x)
        return ste.stochastic_round_ste(x, self.stream(), self.noise_sharing_axes, self.random_bits)

    def set_view(self, deterministic: bool | None = None) -> None:
        """Switch between training and evaluation.

        Args:
          deterministic: round to nearest instead of stochastically; None keeps what is set.
        """
        if deterministic is not None:
            self.deterministic = deterministic


@checked_arguments
class RoundToOddSte(Component):
    """Round to odd numbers, with gradient 1: `2 * floor(x / 2) + 1`, the nearest one.

    Integers of b + 1 bits include 2^b odd ones, symmetric about 0: AQT's b-bit numbers with `preserve_zero=False`, in
    half steps.

    Args:
        halves_to_int_impl: how to round `(x - 1) / 2`, such as `StochasticRoundSte(...)`; None for the above.

    Example:
        >>> import jax.numpy as jnp
        >>> RoundToOddSte()(jnp.array([0.3, -0.3, 2.5]))
        Array([ 1., -1.,  3.], dtype=float32)
    """

    halves_to_int_impl: Rounding | None = None

    def __init__(self, halves_to_int_impl: Rounding | None = None) -> None:
        set_given(self, halves_to_int_impl=halves_to_int_impl)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Round `x`."""
        if self.halves_to_int_impl is None:
            return 2.0 * ste.floor_ste(0.5 * x) + 1.0
        return 2.0 * self.halves_to_int_impl(0.5 * (x - 1.0)) + 1.0
