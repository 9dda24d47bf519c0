"""Recognizes functions that have no name in a program, by the equations that they leave.

`jax.nn.softmax` is five to nine equations in a program. The function is traced for the actual shape, and the program's
equations are compared with that trace, so the pattern follows the versions of the library.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

Function = Callable[..., Any]
Candidate = tuple[Any, ...]
"""A function of the pattern's input, and its further arguments: hashable, so that it is traced once for each shape."""


class Match(NamedTuple):
    """Equations that make up a known function.

    Attributes:
        name: of the operation.
        length: the number of equations.
        input: the input variable.
        outputs: the output variables.
    """

    name: str
    length: int
    input: Any
    outputs: tuple[Any, ...]


def _softmaxes(first: Any, shape: Any) -> Iterator[Candidate]:
    if first.primitive.name == "reduce_max" and len(first.params["axes"]) == 1:
        axis = first.params["axes"][0]
        yield _softmax, axis
        # Attention maps it over an axis, which adds transposes.
        for mapped in range(len(shape)):
            inner = axis - (mapped < axis)
            for out in {mapped, 0} if mapped != axis else ():
                yield _mapped_softmax, inner, mapped, out


def _softmax(x: Any, axis: int) -> Any:
    return jax.nn.softmax(x, axis=axis)


def _mapped_softmax(x: Any, axis: int, mapped: int, out: int) -> Any:
    return jax.vmap(functools.partial(jax.nn.softmax, axis=axis), mapped, out)(x)


def _means(first: Any, shape: Any) -> Iterator[Candidate]:
    if first.primitive.name == "reduce_sum":
        axes = tuple(first.params["axes"])
        yield _mean, axes, False
        yield _mean, axes, True


def _mean(x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    return jnp.mean(x, axis=axes, keepdims=keepdims)


def _gelus(first: Any, shape: Any) -> Iterator[Candidate]:
    yield _gelu, True
    yield _gelu, False


def _gelu(x: Any, approximate: bool) -> Any:
    return jax.nn.gelu(x, approximate=approximate)


def _average_pools(first: Any, shape: Any) -> Iterator[Candidate]:
    if first.primitive.name == "reduce_window_sum":
        yield _average_pool, *(tuple(first.params[name]) for name in _WINDOW)


_WINDOW = ("window_dimensions", "window_strides", "padding", "base_dilation", "window_dilation")


def _average_pool(x: Any, *window: Any) -> Any:
    sums = jax.lax.reduce_window_sum_p.bind(x, **dict(zip(_WINDOW, window, strict=True)))
    return sums / float(np.prod(window[0]))


# The start of a name's templates: (primitives, candidates for a first equation).
TEMPLATES: dict[str, tuple[frozenset[str], Callable[[Any, Any], Iterator[Candidate]]]] = {
    "softmax": (frozenset({"reduce_max"}), _softmaxes),
    "mean": (frozenset({"reduce_sum"}), _means),
    "gelu": (frozenset({"integer_pow", "mul", "square", "neg", "div", "pow", "sqrt"}), _gelus),
    "avg_pool": (frozenset({"reduce_window_sum"}), _average_pools),
}


def find(equations: Sequence[Any], start: int, used_later: Callable[[Any, int], bool]) -> Match | None:
    """The known function that begins at the equation `start`, if any.

    Args:
        equations: of a program.
        start: index of the first one.
        used_later: whether a variable is an output, or read by an equation from some index on.
    """
    first = equations[start]
    name_of_first = first.primitive.name
    for name, (begins, candidates) in TEMPLATES.items():
        if name_of_first not in begins:
            continue
        for operand in first.invars:
            if isinstance(operand, core.Literal) or not jnp.issubdtype(operand.aval.dtype, jnp.floating):
                continue
            for candidate in candidates(first, operand.aval.shape):
                found = _compare(name, candidate, operand, equations, start, used_later)
                if found is not None:
                    return found
            break
    return None


def _compare(
    name: str,
    candidate: Candidate,
    operand: Any,
    equations: Sequence[Any],
    start: int,
    used_later: Callable[[Any, int], bool],
) -> Match | None:
    # What a function is traced to depends on these settings.
    settings = jnp.result_type(float), jax.sharding.get_abstract_mesh()
    traced = _traced(candidate, operand.aval.shape, operand.aval.dtype, settings)
    pattern = traced.jaxpr
    end = start + len(pattern.eqns)
    if traced.consts or not pattern.eqns or end > len(equations):
        return None
    same: dict[Any, Any] = {pattern.invars[0]: operand}
    for wanted, found in zip(pattern.eqns, equations[start:end], strict=True):
        if not _equal(wanted, found, same):
            return None
    outputs = tuple(same.get(var) for var in pattern.outvars)
    inner = {var for eqn in equations[start:end] for var in eqn.outvars} - set(outputs)
    if None in outputs or any(used_later(var, end) for var in inner):
        return None
    return Match(name, len(pattern.eqns), operand, outputs)


@functools.lru_cache(maxsize=256)  # of programs of a few equations, without constants
def _traced(candidate: Candidate, shape: tuple[int, ...], dtype: Any, settings: Any) -> Any:
    function, *arguments = candidate
    return jax.make_jaxpr(lambda x: function(x, *arguments))(jax.ShapeDtypeStruct(shape, dtype))


def _equal(wanted: Any, found: Any, same: dict[Any, Any]) -> bool:
    """Whether two equations are the same up to variable names; records which variables correspond."""
    if wanted.primitive is not found.primitive or len(wanted.invars) != len(found.invars):
        return False
    for a, b in zip(wanted.invars, found.invars, strict=True):
        if isinstance(a, core.Literal):
            if not isinstance(b, core.Literal) or not np.array_equal(a.val, b.val):
                return False
        elif isinstance(b, core.Literal) or same.get(a) is not b:
            return False
    if [v.aval.shape for v in wanted.outvars] != [v.aval.shape for v in found.outvars]:
        return False
    if not _same_parameters(wanted.params, found.params):
        return False
    same.update(zip(wanted.outvars, found.outvars, strict=True))
    return True


def _same_parameters(wanted: dict[str, Any], found: dict[str, Any]) -> bool:
    # Nested programs are traced anew each time, so their text is compared.
    return wanted.keys() == found.keys() and all(
        value == found[key] or (key in ("jaxpr", "call_jaxpr") and str(value) == str(found[key]))
        for key, value in wanted.items()
        if key not in ("jvp_jaxpr_fun", "ctx_mesh")
    )
