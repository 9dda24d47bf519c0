"""Models that a function reaches past its arguments: their gradient quantizers report to nobody.

`value_and_grad` hears the gradient quantizers of its positional arguments. A function can reach others through what
Python keeps with it: closure variables, globals that its code names, default values, the arguments of a
`functools.partial`, the `self` of a bound method. `refuse_unheard` looks there before anything runs. What it does not
find (a model that is an attribute of a plain object, say) is told by the backward pass itself: `LostStateWarning`.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

from flax import nnx

from jqinject.core._protocols import StepStatistic, collects_in_steps
from jqinject.model.walk import Path, walk
from jqinject.proxy import GradQuantProxyFromInjector

LONGEST = 1000
"""Longer lists and dicts are data, which would take long to look through in every step."""


class _Reached(NamedTuple):
    how: str
    name: str
    value: Any


def refuse_unheard(f: Callable[..., Any], args: Iterable[Any], heard: Iterable[StepStatistic]) -> None:
    """Raise if a function reaches gradient quantizers in training mode that are not among its arguments.

    Args:
        f: the function that is differentiated.
        args: its positional arguments.
        heard: the amax scalings in them.

    Raises:
        ValueError: it does.
    """
    known = {id(scaling) for scaling in heard}
    given = {id(arg) for arg in args}
    for how, name, value in _reached(f):
        path = None if id(value) in given else _unheard_in(value, known)
        if path is not None:
            raise ValueError(
                f"a gradient quantizer in training mode, {'.'.join((name, *path))}, is not part of the arguments of "
                "jqinject.value_and_grad (or grad), so what its backward pass sees would be lost: "
                f"{getattr(f, '__name__', 'the function')} reaches it through {how} {name}.\n  cure: pass the whole "
                "model as a positional argument: jqinject.value_and_grad(loss_fn)(model, ...); or put what is not "
                f"trained into eval mode: model.eval()"
            )


def _unheard_in(root: Any, heard: set[int]) -> Path | None:
    """The path of a gradient quantizer in training mode that is not `heard`; None if there is none."""
    proxy: tuple[Path, bool] | None = (
        None  # the last one and whether it is on; its contents come right after it
    )
    for path, node in walk(root):
        if isinstance(node, GradQuantProxyFromInjector):
            proxy = path, node.is_quant_enabled
        elif isinstance(node, nnx.Module) and collects_in_steps(node) and id(node) not in heard:
            scaling: Any = node
            holder, on = (path, True) if proxy is None or path[: len(proxy[0])] != proxy[0] else proxy
            if on and scaling.slot is not None and not scaling.use_running_average:
                return holder
    return None


def _reached(f: Any) -> Iterator[_Reached]:
    """What may hold modules and is kept with a function, or with functions that it may call."""
    ahead = [_Reached("the called module's own", "self", f)]
    seen: dict[int, Any] = {}
    while ahead:
        here = ahead.pop()
        if id(here.value) in seen:
            continue
        seen[id(here.value)] = here.value
        if isinstance(here.value, nnx.Pytree):
            yield here
        elif isinstance(here.value, Mapping | list | tuple):
            if len(here.value) <= LONGEST:
                yield here
        elif callable(here.value) and not isinstance(here.value, type):
            ahead.extend(_kept_with(here.value))


def _kept_with(function: Any) -> Iterator[_Reached]:
    if isinstance(function, functools.partial):
        yield _Reached("", "", function.func)
        for place, value in enumerate(function.args):
            yield _Reached("functools.partial's", f"args[{place}]", value)
        for name, value in function.keywords.items():
            yield _Reached("functools.partial's keyword", name, value)
    elif isinstance(function, MethodType):
        yield _Reached("", "", function.__func__)
        yield _Reached("the bound method's", "self", function.__self__)
    elif isinstance(function, FunctionType):
        yield from _of_function(function)
    elif (wrapped := inspect.getattr_static(function, "__wrapped__", None)) is not None:
        yield _Reached("", "", wrapped)


def _of_function(function: FunctionType) -> Iterator[_Reached]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield _Reached("the closure variable", name, cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
    defaults = function.__defaults__ or ()
    positional = code.co_varnames[: code.co_argcount]
    named = itertools.chain(
        zip(positional[len(positional) - len(defaults) :], defaults, strict=True),
        (function.__kwdefaults__ or {}).items(),
    )
    for name, value in named:
        yield _Reached("the default value of", name, value)
    for name in _globals_named_in(code):
        value = function.__globals__.get(name)
        # Of functions, those of the same file: libraries hold no models.
        if not callable(value) or isinstance(value, nnx.Pytree) or _is_of(value, function.__globals__):
            yield _Reached("the global variable", name, value)
    wrapped = vars(function).get("__wrapped__")
    if wrapped is not None:
        yield _Reached("", "", wrapped)


def _is_of(function: Any, file: dict[str, Any]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(inspect.unwrap(getattr(function, "__func__", function)), "__globals__", None) is file


@functools.lru_cache(maxsize=1024)
def _globals_named_in(code: CodeType) -> tuple[str, ...]:
    """The global variables that code reads, or a function in it does. `co_names` has attributes too."""
    own = [step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    within = [
        name for inner in code.co_consts if isinstance(inner, CodeType) for name in _globals_named_in(inner)
    ]
    return tuple(dict.fromkeys([*own, *within]))
