"""Whether a backward pass is expected to report, so that a gradient quantizer nobody listens to is an error.

It changes no number: it only turns statistics that would be lost in silence into an error. The quantizers in question
are those that are *not* among the arguments of `value_and_grad` (the model was reached through a closure), so that no
argument and no state of the models that are handed in can tell them; hence a context variable.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_EXPECTED: ContextVar[bool] = ContextVar("jqinject_reports_expected", default=False)


@contextmanager
def reports_expected() -> Iterator[None]:
    """While this lasts, every gradient quantizer in training mode must have somebody who listens."""
    token = _EXPECTED.set(True)
    try:
        yield
    finally:
        _EXPECTED.reset(token)


def check_heard(listening: bool) -> None:
    """Raise where reports are expected and this one would be lost.

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
