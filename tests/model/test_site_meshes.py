"""Parameters that a model contracts by itself, over several devices: same numbers, and no weight is gathered."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jqinject import Rule, freeze, quantize
from jqinject.dot import FrozenParam
from jqinject.quant import Int4WeightPerGroupAbsMax, Int8ActPerTensorFloat, Int8WeightPerChannelFloat

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="the mesh has 8 devices")

E, D, F = 4, 64, 32
X = jax.random.normal(jax.random.key(1), (16, D))
SIZES = jnp.array([5, 0, 7, 4])
W8A8 = Rule(weight_quant=Int8WeightPerChannelFloat, input_quant=Int8ActPerTensorFloat)
GROUPS = Rule(weight_quant=Int4WeightPerGroupAbsMax)
GATHER = re.compile(r"= \(?\w+\[([\d,]+)\]\S* (?:all-gather|all-to-all)(?:-start)?\(")


class Experts(nnx.Module):
    """Matrices by columns and by rows, experts batched and ragged."""

    def __init__(self, kind: str, sharded: bool = False) -> None:
        rngs = nnx.Rngs(0)
        self.kind = kind

        def parameter(shape: tuple[int, ...], *names: str | None) -> nnx.Param[jax.Array]:
            value = rngs.params.normal(shape) / 8
            return nnx.Param(value, out_sharding=names) if sharded else nnx.Param(value)

        self.up = parameter((D, F), None, "model")
        self.down = parameter((F, D), "model", None)
        self.experts = parameter((E, D, F), "model", None, None)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = jnp.tanh(jnp.dot(x, self.up[...], out_sharding=self.by("data", "model")))
        h = jnp.dot(h, self.down[...], out_sharding=self.by("data", None))
        if self.kind == "ragged":
            return jax.lax.ragged_dot(h, self.experts[...], SIZES)
        return jnp.einsum("td,edf->tef", h, self.experts[...], out_sharding=self.by("data", "model", None))

    def by(self, *names: str | None) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        return P(*names) if mesh.explicit_axes else None


def mesh_of(kind: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)


def gathered(model: Any, x: jax.Array) -> list[int]:
    """How many numbers each gathering of a compiled program makes."""
    graphdef, state = nnx.split(model, graph=True)
    compiled = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x)).lower(state, x).compile()
    return [
        int(np.prod([int(n) for n in found.split(",")])) for found in GATHER.findall(compiled.as_text() or "")
    ]


@pytest.mark.heavy
@pytest.mark.parametrize("rule", [W8A8, GROUPS], ids=["int8", "groups"])
@pytest.mark.parametrize(
    ("axes", "kind"),
    [(AxisType.Auto, "batched"), (AxisType.Auto, "ragged"), (AxisType.Explicit, "batched")],
    ids=["auto-batched", "auto-ragged", "explicit-batched"],  # JAX has no ragged product along explicit axes
)
def test_numbers_are_those_of_one_device_and_no_weight_is_gathered(
    axes: AxisType, kind: str, rule: Rule
) -> None:
    alone = quantize(Experts(kind), rule, inputs=X)
    mesh = mesh_of(axes)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("data", None)))
        floats = Experts(kind, sharded=True)
        model: Any = quantize(Experts(kind, sharded=True), rule, inputs=x)
        step = nnx.jit(lambda model, x: model(x))
        np.testing.assert_allclose(step(model, x), step(alone, X), rtol=1e-5, atol=1e-4)
        alone.eval()
        model.eval()
        wanted = step(alone, X)
        np.testing.assert_allclose(step(model, x), wanted, rtol=1e-5, atol=1e-4)
        allowed = max([*gathered(floats, x), 16 * D])
        assert max([0, *gathered(model, x)]) <= allowed
        frozen = freeze(model)
        assert isinstance(frozen.up, FrozenParam) and frozen.up.sharding.spec == P(None, "model")
        value = frozen.experts.numbers["value"]
        assert value.sharding.shard_shape(value.shape)[0] == 1
        np.testing.assert_allclose(step(frozen, x), wanted, rtol=1e-5, atol=1e-4)
        assert max([0, *gathered(frozen, x)]) <= allowed
