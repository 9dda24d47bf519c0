"""A model that was quantized without `inputs=` warns, when it is called, of state that its blocks discard."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jqinject.core import LostStateWarning, QuantStat
from jqinject.model.quantizing.rule_policy import OURS, RulePolicy
from jqinject.model.walk import listed
from jqinject.program import (
    CALL,
    Call,
    ClassMixin,
    change_class,
    derived_class,
    original_class,
    throws_away,
)
from jqinject.proxy import QuantProxyFromInjector

# Models that need no look any more; of those in evaluation mode, one of their quantizers. Tracing makes new ones.
_KNOWN: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


class WatchedCall(ClassMixin):
    """Mixin for the class of a model: the first call in training mode looks whether statistics are lost."""

    __slots__ = ()

    @classmethod
    def method(cls, kind: type, name: str) -> Callable[..., Any]:
        """The model's own method of that name, watched."""
        call = getattr(kind, name)

        @functools.wraps(call)
        def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
            before = _statistics(self)
            out = call(self, *args, **kwargs)
            if before:
                _look(self, before, Call(args, kwargs, name))
            return out

        return watched


def watch_call(model: Any) -> None:
    """Let a quantized model tell of statistics that its call throws away; changes its class.

    Args:
        model: whose program was not looked at.
    """
    is_layer = isinstance(model, OURS) or not callable(getattr(type(model), CALL, None))
    if not is_layer and _training(model):
        change_class(model, derived_class(type(model), WatchedCall))


def unwatch_call(model: Any) -> None:
    """Undo `watch_call`, for a caller that looks itself."""
    kind: Any = type(model)
    if issubclass(kind, WatchedCall) and WatchedCall in kind.__bases__:
        change_class(model, kind._base_class)


def _training(model: Any) -> list[Any]:
    return [
        node
        for _, node in nnx.iter_modules(model, graph=True)
        if isinstance(node, QuantProxyFromInjector) and node.training
    ]


def _statistics(model: Any) -> list[tuple[Any, list[Any]]]:
    """The statistics of quantizers in training mode, with their arrays; none if a look is not needed."""
    known = _KNOWN.get(model, False)
    if known is None or (known and known.use_running_average):
        return []
    proxies = _training(model)
    if not proxies:
        any_one = (x for _, x in nnx.iter_modules(model, graph=True) if isinstance(x, QuantProxyFromInjector))
        _KNOWN[model] = next(any_one, None)
        return []
    held = [
        x for proxy in proxies for x in jax.tree.leaves(nnx.state(proxy, QuantStat), is_leaf=_is_variable)
    ]
    return [(variable, jax.tree.leaves(variable.get_raw_value())) for variable in held]


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def _look(model: Any, before: list[tuple[Any, list[Any]]], call: Call) -> None:
    """Trace the call once more if it has left some statistics as they were."""
    _KNOWN[model] = None
    same = any(
        all(new is old for new, old in zip(jax.tree.leaves(variable.get_raw_value()), arrays, strict=True))
        for variable, arrays in before
    )
    if not same:
        return
    try:
        lost = throws_away(model, RulePolicy(()), [call], mark_all=False)
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError):
        return  # it branches in Python on values, and is no program
    if lost:
        warnings.warn(
            f"{original_class(type(model)).__name__} throws away what its quantizers record in {listed(lost)}: copies "
            "of their layers are called inside a transformation (jax.checkpoint, jax.lax.scan), and it was quantized "
            "without inputs.\n  cure: quantize(float_model, rules, inputs=(x,)), which runs the model as a program and "
            "keeps it; or nnx.remat and nnx.scan; model.eval() records nothing",
            LostStateWarning,
            stacklevel=4,
        )
