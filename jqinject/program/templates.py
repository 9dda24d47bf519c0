"""Recognizes functions that have no name in a program, by the equations that they leave.

`jax.nn.softmax` is five to nine equations in a program. The function is traced for the actual shape, and the program's
equations are compared with that trace, so the pattern follows the versions of the library.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jqinject.program.jaxpr import Body, Equation, Function

Candidate = tuple[Any, ...]
"""A function of the pattern's input, and its further arguments: hashable, so that it is traced once for each shape."""


def _softmaxes(first: Equation, shape: Any) -> Iterator[Candidate]:
    if first.name == "reduce_max" and len(first.params["axes"]) == 1:
        axis = first.params["axes"][0]
        yield _softmax, axis
        # Attention maps it over an axis, which adds transposes.
        for mapped in range(len(shape)):
            inner = axis - (mapped < axis)
            for out in {mapped, 0} if mapped != axis else ():
                yield _mapped_softmax, inner, mapped, out


def _softmax(x: jax.Array, axis: int) -> jax.Array:
    return jax.nn.softmax(x, axis=axis)


def _mapped_softmax(x: jax.Array, axis: int, mapped: int, out: int) -> jax.Array:
    return jax.vmap(functools.partial(jax.nn.softmax, axis=axis), mapped, out)(x)


def _means(first: Equation, shape: object) -> Iterator[Candidate]:
    if first.name == "reduce_sum":
        axes = tuple(first.params["axes"])
        yield _mean, axes, False
        yield _mean, axes, True


def _mean(x: jax.Array, axes: tuple[int, ...], keepdims: bool) -> jax.Array:
    return jnp.mean(x, axis=axes, keepdims=keepdims)


def _gelus(first: Equation, shape: tuple[int, ...]) -> Iterator[Candidate]:
    yield _gelu, True
    yield _gelu, False


def _gelu(x: jax.Array, approximate: bool) -> jax.Array:
    return jax.nn.gelu(x, approximate=approximate)


def _average_pools(first: Equation, shape: object) -> Iterator[Candidate]:
    if first.name == "reduce_window_sum":
        yield _average_pool, *(tuple(first.params[name]) for name in _WINDOW)


_WINDOW = ("window_dimensions", "window_strides", "padding", "base_dilation", "window_dilation")


def _average_pool(x: jax.Array, *window: tuple[int, ...]) -> jax.Array:
    sums = jax.lax.reduce_window_sum_p.bind(x, **dict(zip(_WINDOW, window, strict=True)))
    return sums / float(np.prod(window[0]))


# The start of a name's templates: (primitives, candidates for a first equation).
TEMPLATES: dict[str, tuple[frozenset[str], Callable[[Equation, Any], Iterator[Candidate]]]] = {
    "softmax": (frozenset({"reduce_max"}), _softmaxes),
    "mean": (frozenset({"reduce_sum"}), _means),
    "gelu": (frozenset({"integer_pow", "mul", "square", "neg", "div", "pow", "sqrt"}), _gelus),
    "avg_pool": (frozenset({"reduce_window_sum"}), _average_pools),
}


def with_functions(body: Body) -> Body:
    """A body in which the equations that make up a known function are one."""
    equations: list[Equation] = []
    index = 0
    while index < len(body.equations):
        function = _function_at(body, index)
        equations.append(function or body.equations[index])
        index += 1 if function is None else function.length
    return body.with_equations(equations)


def _function_at(body: Body, start: int) -> Function | None:
    """The known function that begins at an equation, if any."""
    first = body.equations[start]
    for name, (begins, candidates) in TEMPLATES.items():
        floats = (at for at in first.variables if jnp.issubdtype(first.inputs[at].dtype, jnp.floating))
        place = next(floats, None)
        if first.name not in begins or place is None:
            continue
        operand = first.inputs[place]
        # What a function is traced to depends on these settings.
        settings = jnp.result_type(float), jax.sharding.get_abstract_mesh()
        for candidate in candidates(first, operand.shape):
            pattern = _traced(candidate, operand.shape, operand.dtype, settings)
            function = body.matched(start, place, name, pattern)
            if function is not None:
                return function
    return None


@functools.lru_cache(maxsize=256)  # of programs of a few equations, without constants
def _traced(candidate: Candidate, shape: tuple[int, ...], dtype: DTypeLike, settings: object) -> Body:
    function, *arguments = candidate
    return Body.of(jax.make_jaxpr(lambda x: function(x, *arguments))(jax.ShapeDtypeStruct(shape, dtype)))
