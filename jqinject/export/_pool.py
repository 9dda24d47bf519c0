"""Pooling over windows in ONNX's layout, with the channels before the spatial axes.

jax2onnx writes a window reduction with a window along every axis, including batch and channels; runtimes have pools of
one to three spatial axes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jqinject.export._fold import Rule
from jqinject.program.jaxpr import Primitive

POOL = Primitive("jqinject_pool")
"""Operand: `(batch, channels, *spatial)`. Parameters: `operator`, ONNX's name; `shape`, of the result; `attributes`."""

POOL.def_abstract_eval(lambda x, operator, shape, attributes: x.update(shape=shape))

# Ranks of an operand with the batch first and the channels last: one to three spatial axes.
RANKS = (3, 4, 5)


def pool(primitive: Primitive, operator: str) -> Rule:
    """The rule of a reduction over windows.

    Args:
        primitive: the reduction.
        operator: "MaxPool" or "AveragePool".
    """

    def write(operands: Sequence[Any], params: Mapping[str, Any]) -> Sequence[Any]:
        (x,) = operands
        window, strides, padding = (params[n] for n in ("window_dimensions", "window_strides", "padding"))
        dilated = set(params["base_dilation"]) | set(params["window_dilation"]) != {1}
        inner = slice(1, -1)
        whole = all(window[axis] == strides[axis] == 1 and not any(padding[axis]) for axis in (0, -1))
        if x.ndim not in RANKS or dilated or not whole:
            return [primitive.bind(x, **params)]
        last = x.ndim - 1
        channels_first = jax.lax.transpose(x, (0, last, *range(1, last)))
        sizes = jax.eval_shape(lambda x: primitive.bind(x, **params), x).shape
        before, after = zip(*padding[inner], strict=True)
        attributes = {"kernel_shape": window[inner], "strides": strides[inner], "pads": (*before, *after)}
        if operator == "AveragePool":
            attributes["count_include_pad"] = 1
        y = POOL.bind(
            channels_first,
            operator=operator,
            shape=(sizes[0], sizes[last], *sizes[inner]),
            attributes=tuple(attributes.items()),
        )
        y = jax.lax.transpose(y, (0, *range(2, last + 1), 1))
        # The reduction is a sum: the mean times the number of elements.
        return [y * np.asarray(math.prod(window), y.dtype) if operator == "AveragePool" else y]

    return write


POOLS = {
    "reduce_window_max": pool(jax.lax.reduce_window_max_p, "MaxPool"),
    "reduce_window_sum": pool(jax.lax.reduce_window_sum_p, "AveragePool"),
}
