"""Completes contractions by schemes that keep state, for the shapes that a model's call gives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from jqinject.dot.schemes.contraction import AxesRecorder, Contraction
from jqinject.model.frozen_ops import op_slot
from jqinject.nn.base.layer_schemes import stack_of_layer
from jqinject.program.tracing.trace import node_at

Path = tuple[Any, ...]


def initialize(model: nnx.Module, *args: Any, **kwargs: Any) -> None:
    """Make the state of every `QDotGeneral`, `QEinsum` and `QConvGeneralDilated` of a model, in place.

    Such a module that was written by hand, `nnx.Linear(..., dot_general=QDotGeneral(scheme))`, does not know the shapes
    of its operands. If its scheme keeps state (learned scales, running ranges, amax histories), this is called once,
    before an optimizer is made or a checkpoint loaded. The model's call is traced for shapes, and nothing is computed.
    Layers of `jqinject.nn` and models that `quantize` returns are complete, and a second call changes nothing.

    Args:
        model: an NNX module.
        args, kwargs: of its call: arrays, or `jax.ShapeDtypeStruct`s.

    Raises:
        TypeError: `model` is not an NNX module.
        ValueError: a stack of layers (built under `nnx.vmap`), which is completed under `nnx.vmap` too.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.dot import QDotGeneral
        >>> from jqinject.quant import Fp8DelayedTraining
        >>> model = nnx.Linear(8, 4, dot_general=QDotGeneral(Fp8DelayedTraining), rngs=nnx.Rngs(0))
        >>> initialize(model, jnp.ones((1, 8)))
        >>> model.dot_general.fprop_lhs.quant.scale()
        Array(1., dtype=float32)
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(f"initialize takes an NNX module, got {type(model).__name__}")
    graphdef, state = nnx.split(model, graph=True)
    recorders: dict[Path, AxesRecorder] = {}

    def call(state: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        copy = nnx.merge(graphdef, state)
        for path, contraction in _contractions(copy).items():
            # Static, so that copies of the copy, in transformations, have it too.
            contraction.recorder = recorders[path] = AxesRecorder()
        copy(*args, **kwargs)

    jax.eval_shape(call, state, args, kwargs)
    contractions = _contractions(model)
    stacked = [path for path, recorder in recorders.items() if recorder.axes and _is_stacked(model, path)]
    if stacked:
        raise ValueError(
            f"initialize: {'.'.join(map(str, stacked[0]))} belongs to a stack of layers, each of which has a state of "
            "its own.\n  cure: nnx.vmap(lambda layers, x: jqinject.initialize(layers, x), in_axes=(0, None))(layers, x)"
        )
    for path, recorder in recorders.items():
        contractions[path].complete(recorder.axes)


def _contractions(model: nnx.Module) -> dict[Path, Contraction]:
    nodes = nnx.iter_modules(model, graph=True)
    return {tuple(path): node for path, node in nodes if isinstance(node, Contraction)}


def _is_stacked(model: nnx.Module, path: Path) -> bool:
    """Whether the layer that holds a contraction is a stack of layers."""
    layer = node_at(model, path[:-1])
    return op_slot(layer) is not None and bool(stack_of_layer(layer))
