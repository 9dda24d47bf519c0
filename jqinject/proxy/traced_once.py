"""Trace a quantizer once for tensors alike.

Quantizers that are values: each is traced once for all tensors of a shape and dtype.

What a proxy says of the numbers that its quantizer makes: asked of the quantizer, else of its result.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.core
import numpy as np
from flax import nnx

from jqinject.core import QuantResult
from jqinject.core.component import Component
from jqinject.ops.fake_quant import is_known_zero, known_zero

KNOWN_ZERO = "known zero"


def traced_once(quantizer: Any, x: Any) -> Any:
    """What a quantizer, which keeps payloads if it can, returns for a tensor of a program that is being traced.

    None if it has state, the tensor is there, or the result knows numbers before the program runs. A model traces its
    quantizers hundreds of times, each about a millisecond; the equations are the same, and JAX inlines them.

    Args:
        quantizer: the quantizer.
        x: a float array.
    """
    is_value = isinstance(quantizer, Component) and not isinstance(quantizer, nnx.Pytree)
    if not is_value or not isinstance(x, jax.core.Tracer):
        return None
    return _traced(quantizer, x).result()


@partial(jax.jit, static_argnums=0, inline=True)
def _traced(quantizer: Any, x: jax.Array) -> _Parts:
    return _Parts.of(getattr(quantizer, "keeping_payload", quantizer)(x))


@jax.tree_util.register_pytree_node_class
class _Parts:
    """The parts of a quantizer's result: arrays of the program, and what is known of them beforehand."""

    def __init__(self, kind: type | None, arrays: tuple[Any, ...], known: tuple[Any, ...]) -> None:
        self.kind, self.arrays, self.known = kind, arrays, known

    @classmethod
    def of(cls, result: Any) -> _Parts:
        """Take a result apart; without a kind if it knows numbers."""
        if isinstance(result, QuantResult):
            fields = {**result._asdict(), **getattr(result, "__dict__", {})}
        elif dataclasses.is_dataclass(result):
            fields = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
        else:
            return cls(None, (), ())
        arrays: list[Any] = []
        known: list[tuple[str, Any]] = []
        for name, part in fields.items():
            if isinstance(part, jax.core.Tracer):
                arrays.append(part)
                known.append((name, len(arrays) - 1))
            elif isinstance(part, jax.Array) and is_known_zero(part):
                known.append((name, KNOWN_ZERO))
            elif isinstance(part, jax.Array | np.ndarray):
                return cls(None, (), ())
            else:
                known.append((name, (part,)))
        return cls(type(result), tuple(arrays), tuple(known))

    def result(self) -> Any:
        """The result; None without a kind."""
        if self.kind is None:
            return None
        fields = {name: self._part(where) for name, where in self.known}
        if not issubclass(self.kind, QuantResult):
            return self.kind(**fields)
        made = self.kind(*(fields.pop(name) for name in QuantResult._fields))
        if fields:  # of a subclass; the tuple itself has no others
            vars(made).update(fields)
        return made

    def _part(self, where: Any) -> Any:
        if where == KNOWN_ZERO:
            return known_zero()
        return self.arrays[where] if isinstance(where, int) else where[0]

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        """The arrays, and the rest."""
        return self.arrays, (self.kind, self.known)

    @classmethod
    def tree_unflatten(cls, rest: Any, arrays: Any) -> _Parts:
        """From these."""
        return cls(rest[0], tuple(arrays), rest[1])
