"""Scales that do not look at the tensor: constant, and learned from an initial value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core._protocols import Restrict
from jqinject.core.construction import check
from jqinject.core.construction.assign import set_given
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.core.construction.component import Component
from jqinject.core.facts import keeps_sign
from jqinject.core.restrict_val import FloatRestrictValue
from jqinject.core.scaling._restricted import (
    RestrictedScaling,
    clamp_scale,
    scale_of_stored,
)
from jqinject.core.state.variables import QuantParam


@dataclass(frozen=True)
class _Constant:
    """A float32 array as a static value: equal by content."""

    data: bytes
    shape: tuple[int, ...]

    def array(self) -> np.ndarray:
        return np.frombuffer(self.data, dtype=np.float32).reshape(self.shape)


def _restricted(init: np.ndarray, restrict: Restrict, where: str) -> np.ndarray:
    """An initial value in the learned domain, in Python's own arithmetic."""
    stored = [restrict.restrict_init_float(float(number)) for number in init.reshape(-1)]
    check.positive(np.abs(init) if keeps_sign(restrict) else init, where, "scaling_init")
    return np.asarray(stored, dtype=np.float32).reshape(init.shape)


@checked_arguments
class ConstScaling(RestrictedScaling, Component):
    """A constant scale: `s = restrict(scaling_init) / threshold`.

    It is static: not in the state, not in checkpoints.

    Args:
        scaling_init: the value, a number or an array that broadcasts with the tensor.
        restrict_scaling_impl: which values are allowed; None means `FloatRestrictValue()`.
        restrict_threshold_impl: likewise for the threshold; None means as `restrict_scaling_impl`.
        restrict_scale_threshold_impl: applied to the quotient; None means nothing.
        scaling_min_val: the least value before the division.

    Raises:
        ValueError: when `scaling_init` is not finite, or not positive (it may be negative with
            `SignedFloatRestrictValue`).

    Example:
        >>> float(ConstScaling(0.5)(jnp.ones(3))), float(ConstScaling(0.5)(jnp.ones(3), 4))
        (0.5, 0.125)
    """

    restrict_scaling_impl: Restrict = FloatRestrictValue()
    restrict_threshold_impl: Restrict | None = None
    restrict_scale_threshold_impl: Restrict | None = None
    scaling_min_val: float | None = None

    def __init__(
        self,
        scaling_init: Any,
        restrict_scaling_impl: Restrict | None = None,
        restrict_threshold_impl: Restrict | None = None,
        restrict_scale_threshold_impl: Restrict | None = None,
        scaling_min_val: float | None = None,
    ) -> None:
        init = check.initial_value(scaling_init, None, "ConstScaling", "scaling_init", "scaling_shape")
        stored = _restricted(init, restrict_scaling_impl or FloatRestrictValue(), "ConstScaling")
        self.constant = _Constant(stored.tobytes(), stored.shape)
        set_given(
            self,
            restrict_scaling_impl=restrict_scaling_impl,
            restrict_threshold_impl=restrict_threshold_impl,
            restrict_scale_threshold_impl=restrict_scale_threshold_impl,
            scaling_min_val=check.minimum(scaling_min_val, "ConstScaling", "scaling_min_val"),
        )

    def __call__(self, x: jax.Array | None = None, threshold: Any = None) -> jax.Array:
        """The scale, float32. `x` is not looked at."""
        stored = jnp.asarray(self.constant.array())
        return scale_of_stored(self, stored, threshold)


@checked_arguments
class ParameterScaling(RestrictedScaling, nnx.Module):
    """A learned scale: `s = restrict(value) / threshold`, the parameter `value` starting at `scaling_init`.

    The parameter is kept in the domain of the restriction: `log2(scaling_init)` for logarithmic and
    power-of-two scales.

    Differs from Brevitas: without a threshold the scale has the shape of the parameter (there: broadcast with
    `(1,)`).

    Args:
        scaling_init: initial value, a number or an array of `scaling_shape`.
        scaling_shape: shape of the parameter; None means that of `scaling_init`.
        restrict_scaling_impl: which values are allowed; None means `FloatRestrictValue()`.
        restrict_threshold_impl: likewise for the threshold; None means as `restrict_scaling_impl`.
        restrict_scale_threshold_impl: applied to the quotient; None means nothing.
        scaling_min_val: the least value before the division.

    Raises:
        ValueError: when the shapes disagree, or `scaling_init` is not finite, or not positive where its
            logarithm is learned.

    Example:
        >>> float(ParameterScaling(6.0)(jnp.ones(3)))
        6.0
        >>> from jqinject.core.restrict_val import PowerOfTwoRestrictValue
        >>> ParameterScaling(6.0, (3,), PowerOfTwoRestrictValue())(jnp.ones(3))
        Array([8., 8., 8.], dtype=float32)
    """

    restrict_scaling_impl: Restrict = FloatRestrictValue()
    restrict_threshold_impl: Restrict | None = None
    restrict_scale_threshold_impl: Restrict | None = None
    scaling_min_val: float | None = None

    def __init__(
        self,
        scaling_init: Any,
        scaling_shape: tuple[int, ...] | None = None,
        restrict_scaling_impl: Restrict | None = None,
        restrict_threshold_impl: Restrict | None = None,
        restrict_scale_threshold_impl: Restrict | None = None,
        scaling_min_val: float | None = None,
    ) -> None:
        where = "ParameterScaling"
        shape = None if scaling_shape is None else check.shape(scaling_shape, where, "scaling_shape")
        restrict = restrict_scaling_impl or FloatRestrictValue()
        if isinstance(
            scaling_init, jax.core.Tracer
        ):  # made while a layer is traced, from its weight for instance
            traced = check.traced_initial_value(scaling_init, shape, where, "scaling_init", "scaling_shape")
            self.value = QuantParam(restrict.restrict_init_tensor(traced))
        else:
            init = check.initial_value(scaling_init, shape, where, "scaling_init", "scaling_shape")
            self.value = QuantParam(jnp.asarray(_restricted(init, restrict, where)))
        set_given(
            self,
            restrict_scaling_impl=restrict_scaling_impl,
            restrict_threshold_impl=restrict_threshold_impl,
            restrict_scale_threshold_impl=restrict_scale_threshold_impl,
            scaling_min_val=check.minimum(scaling_min_val, where, "scaling_min_val"),
        )

    def __call__(self, x: jax.Array | None = None, threshold: Any = None) -> jax.Array:
        """The scale, float32. `x` is not looked at."""
        return scale_of_stored(self, self.value.get_value(), threshold)

    def complete_state(self, entries: dict[str, Any]) -> dict[str, Any]:
        """What a checkpoint's entries for this component mean: running statistics become the value.

        Args:
            entries: variable name -> array, as found in the checkpoint.

        Returns:
            The entries to load.
        """
        if "value" in entries:
            return {"value": entries["value"]}
        for name in ("running_stats", "runtime_stats.running_stats"):
            if name in entries:
                stat = jnp.abs(jnp.asarray(entries[name]).astype(jnp.float32))
                value = clamp_scale(stat, self.scaling_min_val)
                stored = self.restrict_scaling_impl.restrict_init_tensor(value)
                return {"value": stored.reshape(self.value.get_value().shape)}
        return dict(entries)
