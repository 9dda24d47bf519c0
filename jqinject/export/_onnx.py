"""`onnx`: a model as an ONNX file with real quantized numbers, by jax2onnx."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from jqinject.export._fold import evaluate
from jqinject.export._grid import KEPT, rules
from jqinject.export._lowerings import register
from jqinject.export._marks import mark_quantizers
from jqinject.export._model import checked_path, input_specs, needed, plain, serving_copy
from jqinject.export._pool import POOLS


def onnx(
    model: nnx.Module,
    *inputs: Any,
    path: str | os.PathLike[str] | None = None,
    opset: int = 20,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
) -> Any:
    program = _program(serving_copy(model, "onnx"), input_specs(inputs, "onnx"), opset)
    target = None if path is None else checked_path(path, "onnx")
    jax2onnx = needed("jax2onnx", "onnx", "onnx")
    register(needed("jax2onnx.plugins.plugin_system", "onnx", "onnx"))
    proto = jax2onnx.to_onnx(
        lambda *xs: evaluate(program, xs, KEPT),
        inputs=list(jax.tree.leaves(inputs)),
        model_name=type(model).__name__,
        opset=opset,
        input_names=input_names,
        output_names=output_names,
    )
    if target is not None:
        needed("onnx", "onnx", "onnx").save_model(proto, target)
    return proto


def _program(model: Any, specs: tuple[Any, ...], opset: int) -> Any:
    mark_quantizers(model)
    graphdef, state = nnx.split(model, graph=True)
    leaves, structure = jax.tree.flatten(specs)

    def run(*leaves: Any) -> Any:
        return jax.tree.leaves(plain(nnx.merge(graphdef, state)(*jax.tree.unflatten(structure, leaves))))

    marked = jax.make_jaxpr(run)(*leaves)
    return jax.make_jaxpr(lambda *xs: evaluate(marked, xs, {**rules(opset), **POOLS}))(*leaves)
