"""A float checkpoint that is frozen while it is read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jqinject import Rule, freeze, load_frozen, quantize
from jqinject.model.state import load_frozen as state_of_load_frozen
from jqinject.nn import freeze_layer
from jqinject.quant import (
    Fp6e3m2OCPWeightPerChannelFloat,
    Fp8e4m3OCPWeightPerTensorFloat,
    Int4WeightPerChannelLearned,
    Int4WeightPerGroupAbsMax,
    Int8DynamicActPerRowAbsMax,
    Int8WeightPerChannelAbsMax,
    Int8WeightPerChannelFloat,
    Int8WeightPerTensorAbsMax,
    Int8WeightPerTensorFloat,
    NF4WeightPerChannelFloat,
    NF4WeightPerGroupFloat,
    NVFP4Weight,
    ShiftedMXUInt8Weight,
    ShiftedUint8WeightPerChannelFloat,
)

IDS = jnp.arange(6)


class Learned(Int8WeightPerTensorFloat):
    scaling_impl_type = "parameter_from_stats"


class Mixed(nnx.Module):
    """A tied table, a matrix, a layer of Flax with a bias, and a parameter that no rule takes."""

    def __init__(self, seed: int = 0, sharded: bool = False) -> None:
        rngs = nnx.Rngs(seed)
        names: dict[str, Any] = {"out_sharding": (None, "model")} if sharded else {}
        self.table = nnx.Param(rngs.params.normal((32, 16)))
        self.w = nnx.Param(rngs.params.normal((16, 24)), **names)
        self.layer = nnx.Linear(24, 16, rngs=rngs)
        self.scale = nnx.Param(rngs.params.normal((16,)))

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.table[ids] * self.scale
        return self.layer(x @ self.w) @ self.table.T


RULES = {
    "int8": Rule(weight_quant=Int8WeightPerChannelFloat, input_quant=Int8DynamicActPerRowAbsMax),
    "nvfp4": Rule(weight_quant=NVFP4Weight),
    "learned": Rule(weight_quant=Learned),
}


def checkpoint(seed: int = 1) -> Iterator[tuple[Any, np.ndarray]]:
    for path, variable in nnx.to_flat_state(nnx.state(Mixed(seed))):
        yield path, np.asarray(variable.get_value())


@pytest.mark.heavy
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_numbers_are_those_of_freezing_the_loaded_model(rule: Rule) -> None:
    wanted = freeze(quantize(Mixed(1), rule, inputs=IDS))
    found = load_frozen(lambda: quantize(Mixed(), rule, inputs=IDS), checkpoint())
    assert jax.tree.structure(nnx.state(found)) == jax.tree.structure(nnx.state(wanted))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(found), nnx.state(wanted))
    np.testing.assert_array_equal(found(IDS), wanted(IDS))


def test_floats_are_let_go_of_one_by_one() -> None:
    """When an array is read, those before it have become integers."""
    width, depth = 64, 6

    class Deep(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.List([nnx.Param(jnp.ones((width, width))) for _ in range(depth)])

        def __call__(self, x: jax.Array) -> jax.Array:
            for w in self.w:
                x = x @ w
            return x

    alive = []

    def arrays() -> Iterator[tuple[Any, np.ndarray]]:
        for i in range(depth):
            held = [a for a in jax.live_arrays() if a.shape == (width, width) and a.dtype == jnp.float32]
            alive.append(len(held))
            yield ("w", i), np.full((width, width), 1.0 + i, np.float32)

    before = [a for a in jax.live_arrays() if a.shape == (width, width) and a.dtype == jnp.float32]
    model = load_frozen(
        lambda: quantize(Deep(), RULES["int8"], inputs=jnp.ones((2, width))),
        arrays(),
        allow_uncalibrated=True,
    )
    assert max(alive) <= len(before) + 1
    np.testing.assert_allclose(model.w[3][...], np.full((width, width), 4.0), rtol=1e-6)


@pytest.mark.heavy
@pytest.mark.skipif(jax.device_count() < 8, reason="the mesh has 8 devices")
def test_arrays_are_put_where_the_model_wants_them() -> None:
    mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        model = load_frozen(lambda: quantize(Mixed(sharded=True), RULES["int8"], inputs=IDS), checkpoint())
        assert isinstance(model.w.sharding, NamedSharding) and model.w.sharding.spec == P(None, "model")
        value = model.w.get_raw_value()["value"]
        assert value.sharding.shard_shape(value.shape) == (3, 16)  # stored with the summed axis last
        wanted = freeze(quantize(Mixed(1), RULES["int8"], inputs=IDS))(IDS)
        np.testing.assert_allclose(model(IDS), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda given: given[1:], "no array was given for layer.bias"),
        (lambda given: [*given, given[0]], "layer.bias was given before"),
        (lambda given: [*given, (("ww",), given[0][1])], "the model has no ww; did you mean"),
        (lambda given: [(given[0][0], np.ones(3, np.float32)), *given[1:]], "layer.bias: "),
        (lambda given: [(path, np.full_like(a, np.nan)) for path, a in given], "have nan or inf"),
    ],
    ids=["missing", "twice", "unknown", "shape", "nan"],
)
def test_checkpoints_that_do_not_fit(change: Any, error: str) -> None:
    given = sorted(checkpoint())
    assert given[0][0] == ("layer", "bias")
    with pytest.raises(ValueError, match=re.escape(error)):
        load_frozen(lambda: quantize(Mixed(), RULES["int8"], inputs=IDS), change(given))


def _same_bits(found: Any, wanted: Any) -> None:
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    bits = [np.asarray(array).reshape(-1).view(np.uint8) for array in (found, wanted)]
    np.testing.assert_array_equal(bits[0], bits[1])


# At most so many bytes for each number: a few slices, and of fp8 a copy of the payload.
@pytest.mark.parametrize(("quantizer", "dtype", "bound"), [
    (Int8WeightPerChannelFloat, jnp.float32, 1),
    (Int8WeightPerChannelFloat, jnp.bfloat16, 1),
    (Int8WeightPerTensorFloat, jnp.float32, 1),
    (Int8WeightPerChannelFloat.let(bit_width=4), jnp.float32, 1),
    (Int8WeightPerTensorFloat.let(bit_width=3), jnp.float32, 1),
    (ShiftedUint8WeightPerChannelFloat, jnp.float32, 1),
    (Fp8e4m3OCPWeightPerTensorFloat, jnp.float32, 1.5),
    (Fp6e3m2OCPWeightPerChannelFloat, jnp.float32, 1),
    (Int4WeightPerChannelLearned, jnp.float32, 1),
    (Int8WeightPerChannelAbsMax, jnp.float32, 1),
    (Int4WeightPerGroupAbsMax, jnp.bfloat16, 1),
    (NVFP4Weight, jnp.float32, 1),
    (ShiftedMXUInt8Weight, jnp.float32, 1),
    (NF4WeightPerGroupFloat, jnp.float32, 5),
])  # fmt: skip
@pytest.mark.parametrize("committed", [False, True])
def test_weights_frozen_in_slices_have_the_same_bits_and_take_less_memory(
    quantizer: Any, dtype: Any, bound: int, committed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 512
    linear = nnx.Linear(size, size, use_bias=False, param_dtype=dtype, dtype=dtype, rngs=nnx.Rngs(0))
    linear = quantize(linear, Rule(weight_quant=quantizer))
    if committed:  # as after a solver
        linear.weight_quant.commit(linear)
    compiled, found = freeze_layer.compiled_numbers, {}
    for number, sliced_from in ((1, 2**30), (16, 1)):
        memory = []

        def measured(*arguments: Any, memory: list[float] = memory) -> Any:
            needed = compiled.lower(*arguments).compile().memory_analysis()
            memory.append(needed.temp_size_in_bytes / arguments[1].size)
            return compiled(*arguments)

        monkeypatch.setattr(freeze_layer, "compiled_numbers", measured)
        found[number] = freeze(nnx.clone(linear), sliced_from=sliced_from).kernel, *memory
    assert found[16][0].form == found[1][0].form
    jax.tree.map(_same_bits, found[16][0].numbers, found[1][0].numbers)
    assert found[16][1] < bound and (committed or bound < found[1][1])


class Wide(nnx.Module):
    """A site of three axes, and a layer."""

    def __init__(self) -> None:
        self.w = nnx.Param(jax.random.normal(jax.random.key(0), (8, 16, 32)))
        self.layer = nnx.Linear(32, 128, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layer(jnp.einsum("bd,dnh->bnh", x, self.w[...]))


@pytest.mark.heavy
@pytest.mark.parametrize(
    "quantizer",
    [
        Int8WeightPerChannelFloat,
        Int8WeightPerTensorAbsMax,
        ShiftedUint8WeightPerChannelFloat,
        NF4WeightPerChannelFloat,
    ],
)
def test_large_arrays_of_numpy_are_frozen_from_slices(
    quantizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(freeze_layer, "LARGE", 1)
    monkeypatch.setattr(freeze_layer, "ALIGNED", 2**40)  # no array is
    placed: list[Any] = []
    whole = state_of_load_frozen._Loading.placed
    monkeypatch.setattr(
        state_of_load_frozen._Loading,
        "placed",
        lambda self, path, array: placed.append(path) or whole(self, path, array),
    )
    floats, rule, x = Wide(), Rule(weight_quant=quantizer), jnp.ones((2, 8))
    arrays = [
        (path, np.array(variable.get_value())) for path, variable in nnx.to_flat_state(nnx.state(floats))
    ]
    found = load_frozen(lambda: quantize(Wide(), rule, inputs=x), reversed(arrays))
    assert placed == [("layer", "bias")]
    wanted = freeze(quantize(floats, rule, inputs=x))
    assert nnx.graphdef(found) == nnx.graphdef(wanted)
    jax.tree.map(_same_bits, nnx.state(found), nnx.state(wanted))
    arrays[-1][1].reshape(-1)[3] = np.nan
    with pytest.raises(ValueError, match="have nan or inf"):
        load_frozen(lambda: quantize(Wide(), rule, inputs=x), arrays)


@pytest.mark.parametrize("quantizer", [Int8WeightPerChannelFloat.let(bit_width=3), NVFP4Weight])
def test_stacks_frozen_one_by_one_have_the_same_bits(quantizer: Any) -> None:
    class Stack(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jax.random.normal(jax.random.key(0), (3, 32, 32)))

        def __call__(self, x: jax.Array) -> jax.Array:
            return jax.lax.scan(lambda carry, w: (carry @ w, None), x, self.w[...])[0]

    model = quantize(Stack(), Rule(weight_quant=quantizer), inputs=jnp.ones((2, 32)))
    whole, one_by_one = (nnx.state(freeze(nnx.clone(model), sliced_from=n)) for n in (2**30, 1))
    jax.tree.map(_same_bits, one_by_one, whole)


@pytest.mark.heavy
def test_large_weights_on_one_device_are_frozen_in_slices() -> None:
    large = jnp.zeros((512, 512))
    assert freeze_layer.slices_of(large, 2**20) > 1
    assert freeze_layer.slices_of(large[0], 2**20) == 1
    assert freeze_layer.slices_of(jax.eval_shape(lambda: large), 2**20) == 1
    devices = jax.make_mesh((2,), ("model",), (AxisType.Auto,), devices=jax.devices()[:2])
    assert freeze_layer.slices_of(jax.device_put(large, NamedSharding(devices, P("model"))), 2**20) == 1
