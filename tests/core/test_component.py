"""Components are values while they hold no Variables, and NNX modules once they do."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jqinject.core import (
    BitWidthConst,
    Component,
    IntQuant,
    IntScaling,
    ParameterScaling,
    RescalingIntQuant,
    ZeroZeroPoint,
    components_in,
)
from jqinject.nn import QuantLinear
from jqinject.quant import Int8ActPerTensorFloat, Int8WeightPerChannelFloat

W8A8: dict[str, Any] = {"weight_quant": Int8WeightPerChannelFloat, "input_quant": Int8ActPerTensorFloat}


class Scaled(Component):
    def __init__(self, factor: Any) -> None:
        self.factor = factor

    def __call__(self, x: jax.Array, threshold: Any = None) -> jax.Array:
        return jnp.asarray(self.factor)


class OwnNode(nnx.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        return x


def quantizer(scaling: Any, bits: int = 8) -> Any:
    return RescalingIntQuant(
        int_quant=IntQuant(narrow_range=True, signed=True),
        scaling_impl=scaling,
        int_scaling_impl=IntScaling(narrow_range=True, signed=True),
        zero_point_impl=ZeroZeroPoint(),
        bit_width_impl=BitWidthConst(bits),
    )


@pytest.mark.parametrize(
    "part",
    [
        nnx.Param(jnp.ones(())),
        jnp.ones(()),
        OwnNode(),
        nnx.data(None),
        Scaled(nnx.Param(jnp.ones(()))),
    ],
    ids=["variable", "array", "module", "marked", "below"],
)
def test_what_changes_makes_a_component_a_module(part: Any) -> None:
    made = Scaled(part)
    assert isinstance(made, Scaled) and isinstance(made, nnx.Module)
    assert nnx.graphdef(nnx.clone(made)) == nnx.graphdef(made)
    assert made != Scaled(part) and len({made, made}) == 1


def test_values_are_equal_by_their_parts_and_their_types() -> None:
    assert quantizer(Scaled(2.0)) == quantizer(Scaled(2.0))
    assert hash(quantizer(Scaled(2.0))) == hash(quantizer(Scaled(2.0)))
    assert quantizer(Scaled(2.0)) != quantizer(Scaled(3.0))
    assert quantizer(Scaled(2.0)) != quantizer(Scaled(2.0), bits=4)
    assert Scaled(1) != Scaled(1.0) and Scaled(1) != Scaled(True)
    assert not isinstance(quantizer(Scaled(2.0)), nnx.Module)


def test_a_value_is_frozen_and_says_what_to_do() -> None:
    made = Scaled(2.0)
    expected = (
        "Scaled holds no Variables, so it is a value shared by identical layers: it cannot be changed, "
        "got factor = 3.0.\n  cure: make another one, Scaled(...), and assemble the quantizer with it"
    )
    with pytest.raises(AttributeError, match=f"^{re.escape(expected)}$"):
        made.factor = 3.0
    with pytest.raises(AttributeError, match="got del factor"):
        del made.factor
    assert made.factor == 2.0
    learned = Scaled(nnx.Param(jnp.ones(())))
    learned.note = "modules change"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "scaling", [lambda: Scaled(0.5), lambda: ParameterScaling(0.5)], ids=["value", "module"]
)
def test_copies_and_pickles(scaling: Any) -> None:
    made, x = quantizer(scaling()), jnp.array([0.3, -0.7])
    for other in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made)), nnx.clone(made)):
        assert type(other) is type(made) and nnx.graphdef(other) == nnx.graphdef(made)
        assert jnp.array_equal(other(x).value, made(x).value)
    assert pickle.loads(pickle.dumps(nnx.graphdef(made))) == nnx.graphdef(made)
    assert type(made)(**{n: getattr(made, n) for n, _ in vars(quantizer(Scaled(1.0))).items() if n[0] != "_"})


def test_a_value_goes_through_transforms_as_a_constant() -> None:
    traces = []

    def quantized(quant: Any, x: jax.Array) -> jax.Array:
        traces.append(quant)
        return quant(x).value

    x = jnp.array([0.3, -0.7])
    expected = quantizer(Scaled(0.5))(x).value
    for transform in (jax.jit, nnx.jit):
        traces.clear()
        compiled = transform(quantized)
        for _ in range(3):
            assert jnp.array_equal(compiled(quantizer(Scaled(0.5)), x), expected)
        assert len(traces) == 1
    made = quantizer(Scaled(0.5))
    made.eval()
    made.train()
    assert not jax.tree.leaves(nnx.state(made))


def test_what_a_class_makes_is_made_once() -> None:
    assert type(Scaled(jnp.ones(()))) is type(Scaled(nnx.Param(jnp.ones(()))))
    assert type(Scaled(jnp.ones(()))).__name__ == "Scaled"

    class Module(Scaled, nnx.Module):
        """A user's own, which is a module whatever it holds."""

    assert isinstance(Module(2.0), nnx.Module)


def test_components_are_found_whether_values_or_modules() -> None:
    layer = QuantLinear(
        4, 3, weight_quant=Int8WeightPerChannelFloat, input_quant=Int8ActPerTensorFloat, rngs=nnx.Rngs(0)
    )
    found = list(components_in(layer))
    assert sum(isinstance(node, RescalingIntQuant) for node in found) == 2
    assert sum(isinstance(node, IntQuant) for node in found) == 2
    assert len({id(node) for node in found}) == len(found)
    assert not list(components_in(3))


def test_the_graph_of_a_layer_has_no_nodes_for_what_holds_no_variables() -> None:
    layer = QuantLinear(
        4, 3, weight_quant=Int8WeightPerChannelFloat, input_quant=Int8ActPerTensorFloat, rngs=nnx.Rngs(0)
    )
    modules = {".".join(map(str, path)) for path, _ in nnx.iter_modules(layer)}
    assert modules == {
        "",
        "weight_quant",
        "input_quant",
        "input_quant.tensor_quant",
        "input_quant.tensor_quant.scaling_impl",
    }
