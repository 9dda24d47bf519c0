"""How often an operation walks the whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx

import jqinject
from jqinject import Rule
from jqinject.model import walk
from jqinject.model.walk import ModelIndex
from jqinject.quant import Int8ActPerTensorMinMax, Int8WeightPerChannelFloat

W8A8 = Rule(weight_quant=Int8WeightPerChannelFloat, input_quant=Int8ActPerTensorMinMax)


def model() -> nnx.Module:
    return nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(4, 4, rngs=nnx.Rngs(1)))


@pytest.mark.parametrize(
    ("operation", "most"),
    [
        (lambda m: jqinject.load_state(m, nnx.state(m)), 1),
        (lambda m: jqinject.reassemble(m), 1),
        (lambda m: jqinject.calibrate(m, [jnp.ones((2, 4))], progress=False), 2),  # the model, and its copy
        (lambda m: jqinject.freeze(m, allow_uncalibrated=True), 1),
    ],
    ids=["load_state", "reassemble", "calibrate", "freeze"],
)
def test_walks(operation: Callable[[Any], Any], most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized = jqinject.quantize(model(), W8A8)
    walks: list[Any] = []
    original = walk.walk
    monkeypatch.setattr(walk, "walk", lambda root: walks.append(root) or original(root))
    operation(quantized)
    assert len(walks) <= most


def test_quantize_walks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    walks: list[Any] = []
    original = walk.walk
    monkeypatch.setattr(walk, "walk", lambda root: walks.append(root) or original(root))
    jqinject.quantize(model(), W8A8)
    assert len(walks) == 1


def test_places_of_what_is_shared() -> None:
    inner = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    index = ModelIndex(nnx.Dict(a=inner, b=nnx.List([inner])))
    assert [found.paths for found in index.variables] == [
        [("a", "kernel"), ("b", "0", "kernel")],
        [("a", "bias"), ("b", "0", "bias")],
    ]
    assert [node for node in index.modules if isinstance(node, nnx.Linear)] == [inner]
    assert [path for path, _ in index.outermost(lambda node: isinstance(node, nnx.Linear))] == [("a",)]
    assert not index.is_abstract and ModelIndex(nnx.eval_shape(model)).is_abstract
