"""Re-estimates the statistics of batch normalizations under quantization."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
from flax import nnx

from jqinject.model.running.batches import BatchCalls, CallBatch
from jqinject.model.walk import modules_by_path
from jqinject.program import CALL, Call, Method, compiled_call


def calibrate_batch_norm(
    model: nnx.Module,
    batches: Iterable[Any],
    *,
    method: Method = CALL,
    call: CallBatch | None = None,
    progress: bool = True,
) -> tuple[str, ...]:
    """Re-estimate the mean and variance of every batch normalization from its inputs in the quantized model.

    Quantized weights shift the distributions that a float model's statistics describe. Each statistic becomes its mean
    over all batches; everything else runs in evaluation mode and stays as it is.

    Args:
        model: an NNX module with `nnx.BatchNorm`s (or `QuantBatchNorm`s).
        batches: the model's arguments, as for `calibrate`.
        method: the method that batches are arguments of: its name, or a function that takes the model first.
        call: a function of the model and a batch, which calls the model; instead of `method`.
        progress: show a progress bar, if `rich` is installed.

    Returns:
        Paths of the batch normalizations.

    Raises:
        ValueError: the model has no such method; no batch normalization; no batch; a batch with nan or inf.
            Nothing is changed then.

    Example:
        >>> import jax.numpy as jnp
        >>> norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
        >>> calibrate_batch_norm(norm, [jnp.full((4, 2), 1.0), jnp.full((4, 2), 3.0)], progress=False)
        ('the model itself',)
        >>> norm.mean[...]
        Array([2., 2.], dtype=float32)
    """
    calls = BatchCalls(model, method, call, "calibrate_batch_norm")
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
    for count, called in enumerate(calls.of(batches, "batch statistics", progress=progress), 1):  # noqa: B007
        seen = step(copy, called)
        total = seen if total is None else jax.tree.map(lambda a, b: a + b, total, seen)
    for path, norm in norms.items():
        for name, value in total[path].items():
            getattr(norm, name).set_value(value / count)
    return tuple(norms)


def _statistics_of(model: Any, call: Call) -> dict[str, dict[str, jax.Array]]:
    call(model)
    norms = modules_by_path(model, nnx.BatchNorm)
    return {
        path: {"mean": norm.mean.get_value(), "var": norm.var.get_value()} for path, norm in norms.items()
    }
