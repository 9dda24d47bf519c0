"""Batch normalizations of the quantized model get the statistics of what they normalize there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.model import calibrate_batch_norm
from jqinject.model.walk import modules_by_path
from jqinject.ops.processes import on_host
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

    `jqinject.calibrate_batch_norm` as a pass: each statistic becomes its mean over all batches. It takes up shifts that
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
        norms = modules_by_path(work.quantized, nnx.BatchNorm)
        before = {path: (norm.mean.get_value(), norm.var.get_value()) for path, norm in norms.items()}
        calibrate_batch_norm(
            work.quantized, work.batches, method=work.method, call=work.call, progress=work.progress
        )
        found = []
        for path, norm in norms.items():
            mean, var = before[path]
            if self.variance == "geometric":
                norm.var.set_value(jnp.sqrt(var * norm.var.get_value()))
            moved = np.abs(on_host(norm.mean.get_value() - mean)) / np.sqrt(on_host(var) + norm.epsilon)
            factors = on_host(norm.var.get_value()) / np.maximum(on_host(var), norm.epsilon)
            found.append(Renormed(path, float(moved.max()), (float(factors.min()), float(factors.max()))))
        return found
