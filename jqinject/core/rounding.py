"""Components that round, `float_to_int_impl(x)`: floats to whole numbers, with gradient 1.

By learned rounding (AdaRound) each weight learns whether to go up or down. `LearnedRoundSte` holds a parameter `value`
of the weight's shape, interpreted by one of:

| class                     | p                                                     | training       | evaluation      |
|---------------------------|-------------------------------------------------------|----------------|-----------------|
| `LearnedRoundHardSigmoid` | `clip(sigmoid(value) * (zeta - gamma) + gamma, 0, 1)` | `floor(x) + p` | `p > 1/2` is up |
| `LearnedRoundSigmoid`     | `sigmoid(value / temperature)`                        | `floor(x) + p` | `value > 0`     |
| `LearnedRoundIdentity`    | `clip(value, -1/2, 1/2)`                              | `round(x + p)` | the same        |

A gradient mask, `gradient_mask_impl(steps, rounded)`, replaces the rule of the clamp. It sees a number in steps of its
scale before and after rounding; the gradient goes to
the number where the mask is True, and nowhere else.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import KW_ONLY, InitVar, dataclass, field
from inspect import unwrap
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike

from jqinject.core import _protocols, check, component, state
from jqinject.ops import ste


@dataclass(frozen=True)
class _StraightThrough:
    """Abstract: rounds each number, with gradient 1: `elementwise` without the gradient, `_rounded` with it."""

    _rounded: ClassVar[Callable[[ArrayLike], jax.Array]]

    def __call__(self, x: ArrayLike) -> jax.Array:
        """Round `x`."""
        return type(self)._rounded(x)


class RoundSte(_StraightThrough):
    """Round to nearest, ties to even. See `jqinject.ops.round_ste`.

    Example:
        >>> RoundSte()(1.5)
        Array(2., dtype=float32, weak_type=True)
    """

    is_nearest = True
    elementwise, _rounded = staticmethod(ste.nearest), staticmethod(ste.round_ste)


class CeilSte(_StraightThrough):
    """Round up. See `jqinject.ops.ceil_ste`."""

    elementwise, _rounded = staticmethod(jax.lax.ceil), staticmethod(ste.ceil_ste)


class FloorSte(_StraightThrough):
    """Round down. See `jqinject.ops.floor_ste`."""

    elementwise, _rounded = staticmethod(jax.lax.floor), staticmethod(ste.floor_ste)


class RoundToZeroSte(_StraightThrough):
    """Round towards zero. See `jqinject.ops.round_to_zero_ste`."""

    elementwise, _rounded = staticmethod(unwrap(ste.round_to_zero_ste)), staticmethod(ste.round_to_zero_ste)


class DPURoundSte(_StraightThrough):
    """Round to nearest; ties of negative numbers go up. See `jqinject.ops.dpu_round_ste`."""

    elementwise, _rounded = staticmethod(unwrap(ste.dpu_round_ste)), staticmethod(ste.dpu_round_ste)


class RoundHalfToZeroSte(_StraightThrough):
    """Round to nearest; ties go to the integer nearer to zero. See `jqinject.ops.round_half_to_zero_ste`."""

    elementwise = staticmethod(unwrap(ste.round_half_to_zero_ste))
    _rounded = staticmethod(ste.round_half_to_zero_ste)


def _set_view(self: Any, deterministic: bool | None = None) -> None:
    """Switch between training and evaluation.

    Args:
      deterministic: round to whole numbers, without chance; None keeps what is set.
    """  # indented as `nnx.view_info` expects it
    if deterministic is not None:
        self.deterministic = deterministic


@component.component
class StochasticRoundSte(component.InnerModule):
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
        random_bits: per random number: 32, or 16 or 8, which take less time; see `ops.stochastic_round_ste`.

    Raises:
        ValueError: `random_bits` is none of these.

    Example:
        >>> import jax.numpy as jnp
        >>> rounding = StochasticRoundSte(nnx.Rngs(0))
        >>> abs(float(rounding(jnp.full((10_000,), 0.3)).mean()) - 0.3) < 0.02
        True
    """

    rngs: InitVar[nnx.Rngs | None] = None
    _: KW_ONLY
    seed: InitVar[int] = 0
    deterministic: bool = False
    noise_sharing_axes: tuple[int, ...] = ()
    random_bits: Annotated[int, check.among((8, 16, 32), "8, 16 or 32", check.integer)] = 32

    is_nearest = True

    def __post_init__(self, rngs: nnx.Rngs | None, seed: int) -> None:
        seed = check.integer(seed, "StochasticRoundSte", "seed")
        source = (nnx.Rngs(seed) if rngs is None else rngs)["stochastic_round"]
        # A fork, always named alike: names are part of the graph.
        self.stream = nnx.RngStream(source(), tag="stochastic_round")

    def __call__(self, x: ArrayLike) -> jax.Array:
        """Round `x`."""
        if self.deterministic:
            return ste.round_ste(x)
        return ste.stochastic_round_ste(x, self.stream(), self.noise_sharing_axes, self.random_bits)

    set_view = _set_view


@component.component
class RoundToOddSte(component.Component):
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

    halves_to_int_impl: _protocols.Rounding | None = None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Round `x`."""
        if self.halves_to_int_impl is None:
            return 2.0 * ste.floor_ste(0.5 * x) + 1.0
        return 2.0 * self.halves_to_int_impl(0.5 * (x - 1.0)) + 1.0


class LearnedRound(ABC):
    """Abstract `learned_round_impl`: from the learned number to the share of a step, and how it enters."""

    @abstractmethod
    def __call__(self, value: jax.Array, hard: bool) -> jax.Array:
        """The share of a step that the learned number means; that of evaluation if `hard`."""

    @abstractmethod
    def start_at(self, fraction: jax.Array) -> jax.Array:
        """The learned number whose share is `fraction`."""

    def round_to(self, x: jax.Array, share: jax.Array) -> jax.Array:
        """`floor(x) + share`."""
        return ste.floor_ste(x) + share


@component.frozen_value
class LearnedRoundHardSigmoid(LearnedRound):
    """A stretched sigmoid, clipped to 0 and 1 so that both are reached.

    Args:
        learned_round_zeta: upper end before clipping, above 1.
        learned_round_gamma: lower end before clipping, below 0.

    Raises:
        ValueError: the ends are not outside 0 and 1.

    Source: Nagel et al., "Up or Down? Adaptive Rounding for Post-Training Quantization", 2020.

    Example:
        >>> LearnedRoundHardSigmoid()(jnp.array([-9.0, 0.0, 9.0]), hard=False)
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

    def __call__(self, value: jax.Array, hard: bool) -> jax.Array:
        """The fraction to round up, 0 to 1; 0 or 1 if `hard`."""
        width = self.learned_round_zeta - self.learned_round_gamma
        stretched = jax.nn.sigmoid(value) * width + self.learned_round_gamma
        inside = (stretched >= 0) & (stretched <= 1)
        share = jnp.where(inside, stretched, jax.lax.stop_gradient(jnp.clip(stretched, 0.0, 1.0)))
        return (share > 0.5).astype(jnp.float32) if hard else share

    def start_at(self, fraction: jax.Array) -> jax.Array:
        """The number whose share is `fraction`, so that rounding starts at the weights."""
        width = self.learned_round_zeta - self.learned_round_gamma
        return -jnp.log(width / (fraction - self.learned_round_gamma) - 1)


@component.frozen_value
class LearnedRoundSigmoid(LearnedRound):
    """A sigmoid, steeper at lower temperatures.

    Args:
        learned_round_temperature: above 0.

    Raises:
        ValueError: the temperature is not above 0.

    Example:
        >>> LearnedRoundSigmoid(0.5)(jnp.array([-9.0, 0.0, 9.0]), hard=True)
        Array([0., 0., 1.], dtype=float32)
    """

    learned_round_temperature: check.Positive = 1.0

    def __call__(self, value: jax.Array, hard: bool) -> jax.Array:
        """The fraction to round up, between 0 and 1; 0 or 1 if `hard`."""
        if hard:
            return (value > 0).astype(jnp.float32)
        return jax.nn.sigmoid(value / self.learned_round_temperature)

    def start_at(self, fraction: jax.Array) -> jax.Array:
        """The number whose share is `fraction`, as close as a sigmoid gets."""
        clipped = jnp.clip(fraction, 1e-4, 1 - 1e-4)
        return self.learned_round_temperature * (jnp.log(clipped) - jnp.log1p(-clipped))


@dataclass(frozen=True)
class LearnedRoundIdentity(LearnedRound):
    """A shift of up to half a step before rounding to nearest, in training and evaluation.

    Source: Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent" (SignRound), 2023.

    Example:
        >>> impl = LearnedRoundIdentity()
        >>> impl.round_to(jnp.array([1.4, 1.4]), impl(jnp.array([0.0, 0.2]), hard=False))
        Array([1., 2.], dtype=float32)
    """

    def __call__(self, value: jax.Array, hard: bool) -> jax.Array:
        """The shift, -1/2 to 1/2, with gradient 1."""
        return ste.with_gradient_of(value, jnp.clip(value, -0.5, 0.5))

    def round_to(self, x: jax.Array, share: jax.Array) -> jax.Array:
        """`round(x + share)`."""
        return ste.round_ste(x + share)

    def start_at(self, fraction: jax.Array) -> jax.Array:
        """No shift: to nearest."""
        return jnp.zeros_like(fraction)


@component.component
class LearnedRoundSte(component.InnerModule):
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

    learned_round_impl: LearnedRound
    learned_round_init: InitVar[Any]
    input_view_impl: _protocols.View | None = None
    _: KW_ONLY
    deterministic: bool = False
    value: state.QuantParam = field(init=False)

    def __post_init__(self, learned_round_init: object) -> None:
        if isinstance(learned_round_init, np.ndarray) and not np.all(np.isfinite(learned_round_init)):
            raise ValueError("LearnedRoundSte: learned_round_init must be finite")
        self.value = state.QuantParam(jnp.asarray(learned_round_init, jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Round `x`."""
        share = self.share()
        if x.shape != share.shape and self.input_view_impl is not None:
            share = self.input_view_impl(share)
        return self.learned_round_impl.round_to(x, share) if x.shape == share.shape else ste.round_ste(x)

    def share(self) -> jax.Array:
        """The fraction of a step that each weight is rounded up by, of the weight's shape."""
        return self.learned_round_impl(self.value.get_value(), self.deterministic)

    set_view = _set_view


@component.frozen_value
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


@component.frozen_value
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
