"""Dequantizing frozen numbers in one equation of a program, known by its name. Next: `frozen_param`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax

from jqinject.dot.frozen.frozen_form import FrozenForm
from jqinject.dot.frozen.frozen_numbers import quant_tensor_of

DEQUANTIZE = "jqinject_dequantize"
"""The name of the compiled function that dequantizes a `FrozenParam`, by which a program's equation is known."""


def _value_of(numbers: dict[str, jax.Array], form: FrozenForm) -> jax.Array:
    return quant_tensor_of(numbers, form).value


_value_of.__name__ = _value_of.__qualname__ = DEQUANTIZE
_dequantize = partial(jax.jit, static_argnames="form")(_value_of)


def dequantize(numbers: Mapping[str, jax.Array], form: FrozenForm) -> jax.Array:
    """The dequantized array of frozen numbers: in a program, one equation named `jqinject_dequantize`.

    The inputs of the equation are the numbers in the order of their sorted names; `numbers_of_leaves` names them.

    Args:
        numbers: as stored; see `quant_tensor_of`.
        form: of the weight that was frozen.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.dot import ScaleForms, frozen_numbers
        >>> from jqinject.quant_tensor import IntQuantTensor
        >>> weight = IntQuantTensor.from_int(jnp.array([[2, -1]], jnp.int8), jnp.array([[0.5]]))
        >>> numbers, form = frozen_numbers(weight, (), False, None, ScaleForms())
        >>> "name=jqinject_dequantize" in str(jax.make_jaxpr(lambda numbers: dequantize(numbers, form))(numbers))
        True
    """
    return _dequantize(dict(numbers), form)
