"""The calls that `quantize` traces: `inputs=` and `methods=`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jqinject.program import CALL, Call, arguments_of, checked_method

Methods = Mapping[str | Callable[..., Any], Any]


def call_with(inputs: Any) -> Call | None:
    """The call with these inputs: an array, a tuple of positional arguments or a dict of keywords; None without any.

    Raises:
        TypeError: they are not arguments.
    """
    if inputs is None:
        return None
    return Call(*_arguments(inputs, "inputs are what the model is called with", "inputs="))


def traced_calls(model: Any, call: Call | None, methods: Methods | None, caller: str) -> tuple[Call, ...]:
    """The calls of a model to trace, one for each method.

    Args:
        model: an NNX module.
        call: of `__call__`, or None.
        methods: method -> its arguments, as for `call_with`.
        caller: the calling function's name, for the error text.

    Raises:
        TypeError: the arguments are none; a method is not one of the model's class.
        ValueError: the model has no such method; a method is given twice.
    """
    calls: dict[str, Call] = {} if call is None else {CALL: call}
    for given, arguments in (methods or {}).items():
        method = checked_method(model, given, caller)
        if not isinstance(method, str) or not callable(getattr(type(model), method, None)):
            raise TypeError(
                f"{caller}: methods are those of {type(model).__name__}, by name, and {given!r:.80} is not a method of "
                "this class.\n  cure: write it as a method of the class; a module's own call is reached through the "
                "method that calls it"
            )
        if method in calls:
            raise ValueError(
                f"{caller}: {method} is given twice, and a method has one program.\n  cure: inputs=... is the short "
                "way to say methods={'__call__': ...}; give one of them"
            )
        said = f"methods[{method!r}] is what it is called with"
        calls[method] = Call(*_arguments(arguments, said, f"{method!r}: "), method)
    return tuple(calls.values())


def _arguments(given: Any, said: str, name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if not isinstance(given, Mapping | tuple | list | jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        raise TypeError(
            f"{said}, got {type(given).__name__}.\n"
            f"  cure: {name}x, an array; {name}(x, y), several; {name}{{'x': x}}, by keyword"
        )
    return arguments_of(given)
