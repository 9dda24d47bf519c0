"""Batch normalizations of the quantized model get the statistics of what they normalize there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.model.walk import modules_by_path
from jqinject.ops.processes import on_host
from jqinject.program import Call, compiled_call
from jqinject.recipes.work import Work


@dataclass(frozen=True)
class Renormed:
    """What was done to one batch normalization.

    Attributes:
        path: the module's.
        mean: how far the means moved at most, in standard deviations of the float model's input.
        variance: the smallest and the largest factor of the variances.
    """

    path: str
    mean: float
    variance: tuple[float, float]

    def __str__(self) -> str:
        low, high = self.variance
        return f"{self.path}: means moved by at most {self.mean:.3g} deviations, variances by {low:.3g} to {high:.3g}"


@dataclass(frozen=True)
class CorrectBatchNorm:
    """Re-estimates the mean and variance of every batch normalization from its inputs in the quantized model.

    Quantized weights shift the distributions that a float model's statistics describe. Each statistic becomes its mean
    over all batches; everything else runs in evaluation mode and stays as it is. It takes up shifts that
    `CorrectBiases` would take back too: correct biases before it, not after.

    Args:
        variance: "measured", or the geometric mean of the measured one and the float model's ("geometric").

    Raises:
        ValueError: (when applied) the model has no batch normalization.

    Differs from Brevitas: `norm_correction_mode` keeps the geometric mean; and its variances are unbiased, as torch's
    are, where Flax's are not.

    Example:
        >>> CorrectBatchNorm()
        CorrectBatchNorm(variance='measured')
    """

    variance: Literal["measured", "geometric"] = "measured"

    def __post_init__(self) -> None:
        if self.variance not in ("measured", "geometric"):
            raise ValueError(
                f"CorrectBatchNorm: variance is {self.variance!r}, must be 'measured' or 'geometric'.\n"
                "  cure: variance='measured'"
            )

    def __call__(self, work: Work) -> list[Renormed]:
        """See `Pass`."""
        return self.correct(work.quantized, work.calls)

    def correct(self, model: nnx.Module, calls: Iterable[Call]) -> list[Renormed]:
        """Re-estimate the statistics of a quantized model, in place.

        Args:
            model: with `nnx.BatchNorm`s (or `QuantBatchNorm`s).
            calls: of it, which are taken one by one.
        """
        norms = modules_by_path(model, nnx.BatchNorm)
        if not norms:
            raise ValueError(
                f"{type(model).__name__} has no nnx.BatchNorm, so there are no statistics to take again"
            )
        copy = nnx.clone(model, graph=True)
        copy.eval()
        for norm in modules_by_path(copy, nnx.BatchNorm).values():
            norm.use_running_average = False
            norm.momentum = 0.0  # after a call the statistics are that batch's own
        total: Any = None
        count = 0
        step = compiled_call(_statistics_of)
        for count, call in enumerate(calls, 1):  # noqa: B007
            seen = step(copy, call)
            total = seen if total is None else jax.tree.map(jnp.add, total, seen)
        return [self._renormed(path, norm, *(x / count for x in total[path])) for path, norm in norms.items()]

    def _renormed(self, path: str, norm: nnx.BatchNorm, mean: jax.Array, var: jax.Array) -> Renormed:
        """Give a batch normalization its statistics."""
        old_mean, old_var = norm.mean.get_value(), norm.var.get_value()
        if self.variance == "geometric":
            var = jnp.sqrt(old_var * var)
        norm.mean.set_value(mean)
        norm.var.set_value(var)
        moved = np.abs(on_host(mean - old_mean)) / np.sqrt(on_host(old_var) + norm.epsilon)
        factors = on_host(var) / np.maximum(on_host(old_var), norm.epsilon)
        return Renormed(path, float(moved.max()), (float(factors.min()), float(factors.max())))


def _statistics_of(model: Any, call: Call) -> dict[str, tuple[jax.Array, jax.Array]]:
    """The mean and the variance that each batch normalization has after a call."""
    call(model)
    norms = modules_by_path(model, nnx.BatchNorm)
    return {path: (norm.mean.get_value(), norm.var.get_value()) for path, norm in norms.items()}
