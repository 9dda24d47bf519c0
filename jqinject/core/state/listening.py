"""Whether a backward pass must report, so that lost gradient statistics are an error.

It changes no number. The quantizers concerned are *not* among the arguments of `value_and_grad` (the model was reached
through a closure), so no argument or state can tell them; hence a context variable.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_EXPECTED: ContextVar[bool] = ContextVar("jqinject_reports_expected", default=False)


@contextmanager
def reports_expected() -> Iterator[None]:
    """Within this context, every gradient quantizer in training mode must be able to report."""
    token = _EXPECTED.set(True)
    try:
        yield
    finally:
        _EXPECTED.reset(token)


def check_heard(listening: bool) -> None:
    """Raise if this report would be lost.

    Raises:
        ValueError: the quantizer's statistics are not among what is differentiated.
    """
    if _EXPECTED.get() and not listening:
        raise ValueError(
            "a gradient quantizer in training mode is not part of the arguments of jqinject.value_and_grad (or grad), "
            "so what its backward pass sees would be lost: the model was reached through a closure, or its statistics "
            "were filtered away (split off) before.\n  cure: pass the whole model as a positional argument: "
            "jqinject.value_and_grad(loss_fn)(model, ...); or put what is not trained into eval mode: model.eval()"
        )
