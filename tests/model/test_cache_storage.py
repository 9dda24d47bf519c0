"""Caches in low bits: sharded, saved, reported on, and refused where a call would leave floats."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jqinject import Rule, coverage, load_state, quantize, quantized_cache, report
from jqinject.dot import LowBitCache
from jqinject.quant import (
    Int8DynamicActPerGroupFloat,
    Int8DynamicActPerRowFloat,
    Int8WeightPerChannelFloat,
    TurboQuant4Act,
)

KV8 = Rule(cache_quant=Int8DynamicActPerRowFloat)
W8 = Rule(weight_quant=Int8WeightPerChannelFloat)
X = jax.random.normal(jax.random.key(0), (2, 1, 4, 8))
EMPTY = jnp.zeros((2, 6, 4, 8))


class Groups(Int8DynamicActPerGroupFloat):
    group_size = 4


class Attention(nnx.Module):
    """Reads a cache that is sharded by examples and heads."""

    def __init__(self) -> None:
        self.w = nnx.Param(jax.random.normal(jax.random.key(1), (8, 8)) / 3)

    def __call__(self, x: jax.Array, cache: dict[str, Any]) -> tuple[jax.Array, dict[str, Any]]:
        new = x @ self.w[...]
        sharding = jax.typeof(cache["k"]).sharding
        if not sharding.mesh.empty and sharding.mesh.explicit_axes:
            new, x = (jax.sharding.reshard(one, sharding.spec) for one in (new, x))
        k = jax.lax.dynamic_update_slice(cache["k"], new, (0, 2, 0, 0))
        return jnp.einsum("btnh,bsnh->bnts", x, k), {"k": k}


@pytest.mark.heavy
@pytest.mark.skipif(jax.device_count() < 8, reason="the mesh has 8 devices")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("quantizer", [Int8DynamicActPerRowFloat, Groups, TurboQuant4Act])
def test_sharded_caches_hold_the_numbers_of_one_device(kind: AxisType, quantizer: Any) -> None:
    model = quantize(Attention(), [W8, Rule(cache_quant=quantizer)], inputs=(X, {"k": EMPTY}))
    wanted, low = model(X, quantized_cache(model, {"k": EMPTY}))
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)
    spec = P("data", None, "model", None)
    with jax.set_mesh(mesh):
        cache = quantized_cache(model, {"k": jax.device_put(EMPTY, NamedSharding(mesh, spec))})
        assert cache["k"].sharding.spec[:3] == spec[:3]
        for call in (model, nnx.jit(lambda *given: model(*given))):
            found, after = call(jax.device_put(X, NamedSharding(mesh, spec)), cache)
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
            for name, held in after["k"].numbers.items():
                np.testing.assert_allclose(held, low["k"].numbers[name], rtol=1e-6)
                assert held.sharding.spec[:3] == ("data", None, "model")


class Own(nnx.Module):
    """Keeps the cache itself."""

    def __init__(self) -> None:
        self.k = nnx.Cache(EMPTY)
        self.w = nnx.Param(jnp.ones((8, 8)))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.k[...] = jax.lax.dynamic_update_slice(self.k[...], x, (0, 1, 0, 0))
        return jnp.einsum("btnh,bsnh->bnts", x @ self.w[...], self.k[...])


def test_caches_are_saved_copied_and_traced(tmp_path: Path) -> None:
    model = quantize(Attention(), [W8, KV8], inputs=(X, {"k": EMPTY}))
    own = quantized_cache(quantize(Own(), [W8, KV8], inputs=(X,)))
    _, filled = model(X, quantized_cache(model, {"k": EMPTY}))
    own(X)
    for name, saved in (("argument", filled), ("variables", nnx.state(own, nnx.Cache))):
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / name, saved)
            checkpointer.wait_until_finished()
            restored = checkpointer.restore(tmp_path / name, jax.eval_shape(lambda x: x, saved))
        assert jax.tree.structure(restored) == jax.tree.structure(saved)
        jax.tree.map(np.testing.assert_array_equal, restored, saved)
    for copy in (pickle.loads(pickle.dumps(own)), nnx.clone(own)):
        np.testing.assert_array_equal(copy(X), own(X))
        assert isinstance(copy.k.get_raw_value(), LowBitCache)
    logits, cache = nnx.eval_shape(lambda model, x, cache: model(x, cache), model, X, filled)
    assert logits.shape == (2, 4, 1, 6) and cache["k"].numbers["value"].dtype == jnp.int8
    with pytest.raises(
        ValueError, match=r"load_state: k holds a cache in low bits(.|\n)*before jqinject\.quantized"
    ):
        load_state(own, nnx.state(own))


@pytest.mark.heavy
def test_reports_of_models_with_caches_in_low_bits() -> None:
    model = quantize(Attention(), [W8, KV8], inputs=(X, {"k": EMPTY}))
    own = quantize(Own(), [W8, KV8], inputs=(X,))
    for plain, low in (
        ((model, X, {"k": EMPTY}), (model, X, quantized_cache(model, {"k": EMPTY}))),
        ((own, X), (quantized_cache(own), X)),
    ):
        assert [row.parameter for row in coverage(*low).weights] == ["w"]
        assert coverage(*low).weights == coverage(*plain).weights
        assert [row.layer for row in report(*low).layers] == [row.layer for row in report(*plain).layers]


def keys_masked(k: jax.Array) -> Any:
    return {"keys": jnp.where(jnp.arange(k.shape[1])[:, None, None] < 4, k, 0.0)}


LEFT = {
    "another name": (keys_masked, r"k \(in the output 1\.keys\)"),
    "stacked": (lambda k: jnp.stack([k, k]), r"k \(in the output 1\)"),
    "padded": (lambda k: {"cache": jnp.pad(k, ((0, 0), (0, 2), (0, 0), (0, 0)))}, r"in the output 1\.cache"),
    "reordered": (lambda k: k[jnp.array([1, 0])], r"in the output 1"),
    "in a loop": (
        lambda k: jax.lax.fori_loop(0, 2, lambda i, k: k * 1.0, k),
        r"k: the cache.* a loop leaves",
    ),
    "by arithmetic": (lambda k: k * 0.5, r"in the output 1"),
}


class Leaving(nnx.Module):
    def __init__(self, leave: Any) -> None:
        self.leave = leave

    def __call__(self, x: jax.Array, k: jax.Array) -> tuple[jax.Array, Any]:
        k = jax.lax.dynamic_update_slice(k, x, (0, 2, 0, 0))
        return jnp.einsum("btnh,bsnh->bnts", x, k), self.leave(k)


@pytest.mark.parametrize("case", LEFT)
def test_a_cache_that_becomes_floats_is_named(case: str) -> None:
    leave, message = LEFT[case]
    model = quantize(Leaving(leave), KV8, inputs=(X, EMPTY))
    with pytest.raises(ValueError, match=message + r"(.|\n)*cure: write it"):
        model(X, quantized_cache(model, EMPTY))
    assert model(X, EMPTY)[0].shape == (2, 4, 1, 6)


def test_another_name_and_readings_beside_the_cache_are_fine() -> None:
    for leave in (lambda k: {"keys": k}, lambda k: (k, k[:, :1])):
        model = quantize(Leaving(leave), KV8, inputs=(X, EMPTY))
        kept = model(X, quantized_cache(model, EMPTY))[1]
        held = kept["keys"] if isinstance(kept, dict) else kept[0]
        assert isinstance(held, LowBitCache)
