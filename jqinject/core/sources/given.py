"""Sources independent of the tensor: a constant, and a parameter with a given initial value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jqinject.core.construction import check
from jqinject.core.construction.assign import assign
from jqinject.core.facts import Factors
from jqinject.core.sources.source import Domain, Number, Source, rescaled_value
from jqinject.core.state.variables import QuantParam
from jqinject.core.stats.search import Task


@dataclass(frozen=True)
class _Array:
    """A float32 array as a static value, compared by content."""

    data: bytes
    shape: tuple[int, ...]

    def array(self) -> np.ndarray:
        return np.frombuffer(self.data, dtype=np.float32).reshape(self.shape)


class Constant(Source):
    """Abstract: a constant, static: neither in the state nor in checkpoints.

    Args:
        stored: the number, in the domain of the rule.
    """

    constant: _Array

    def __init__(self, stored: np.ndarray) -> None:
        assign(self, constant=_Array(stored.tobytes(), stored.shape))

    def number(self, x: Any, domain: Domain, task: Task = None) -> Number:
        """The constant."""
        return Number(stored=jnp.asarray(self.constant.array()))


class Learned(Source):
    """Abstract: the parameter `value`.

    Args:
        stored: the initial value, in the domain of the rule.
    """

    value: QuantParam

    def __init__(self, stored: Any) -> None:
        assign(self, value=QuantParam(jnp.asarray(stored)))

    def number(self, x: Any, domain: Domain, task: Task = None) -> Number:
        """The parameter."""
        return Number(stored=self.value.get_value())

    def rescaled(self, factors: Factors) -> dict[str, jax.Array]:
        """See `Rescales`."""
        return rescaled_value(self, self.value, factors)


def initial_number(init: Any, shape: Any, where: str, names: tuple[str, str]) -> Any:
    """An initial value of a given shape: a NumPy array, or a traced one while its layer is traced.

    Args:
        init: a number or an array.
        shape: None for its own.
        where, names: for errors: the component, and the names of value and shape.

    Raises:
        ValueError: the shapes disagree, or the value is not finite.
    """
    wanted = None if shape is None else check.shape(shape, where, names[1])
    made = check.traced_initial_value if isinstance(init, jax.core.Tracer) else check.initial_value
    return made(init, wanted, where, *names)
