"""A number format of one's own, wherever a ready-made one goes: the signs and exponents of the page that shows how."""

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject import Rule, freeze, quantize, unfreeze
from jqinject.nn import QuantLinear
from jqinject.ops import Codebook
from jqinject.quant import Int8WeightPerChannelFloat, Int8WeightPerTensorFloat
from tests.quant._own_format import Log2, Log2ActPerRow, Log2Grid, Log2WeightPerGroup

POWERS = [2.0**-k for k in range(7)]
X = jax.random.normal(jax.random.key(1), (6, 64))


class PerTensor(Log2, Int8WeightPerTensorFloat): ...


class PerChannel(Log2, Int8WeightPerChannelFloat): ...


WEIGHTS = {"tensor": PerTensor, "channel": PerChannel, "group": Log2WeightPerGroup}


def layer(name: str, **others: Any) -> QuantLinear:
    made = QuantLinear(64, 8, weight_quant=WEIGHTS[name], **others, rngs=nnx.Rngs(0))
    made.eval()
    return made


@pytest.mark.heavy
def test_the_grid_follows_from_its_codes() -> None:
    grid = Log2Grid()
    assert sorted(set(grid.table.tolist())) == sorted({0.0, *POWERS, *(-power for power in POWERS)})
    assert (grid.bounds, grid.largest, grid.signed, str(grid)) == ((-1.0, 1.0), 1.0, True, "4-bit Log2Grid")
    codes = jnp.arange(16, dtype=jnp.uint8)
    np.testing.assert_array_equal(grid.decode(grid.encode(grid.decode(codes))), grid.table)
    np.testing.assert_array_equal(grid.unpack(grid.pack(codes), codes.shape), codes)
    assert grid.pack(codes).shape == (8,)


@pytest.mark.heavy
def test_rounding_is_to_the_nearest_power() -> None:
    steps = np.linspace(-1.2, 1.2, 4801, dtype=np.float32)
    steps = steps[(np.abs(steps) >= POWERS[-1]) | (np.abs(steps) < POWERS[-1] / 2)]
    table = np.unique(Log2Grid().table)
    distances = np.abs(steps[:, None] - table)
    found = np.asarray(Log2Grid().round(jnp.asarray(steps)))
    np.testing.assert_array_equal(np.abs(steps - found), distances.min(1))
    edges = Log2Grid().round(jnp.array([jnp.nan, jnp.inf, -jnp.inf, 0.0]))
    np.testing.assert_array_equal(edges, [np.nan, 1, -1, 0])


@dataclass(frozen=True)
class Wide(Log2Grid):
    """More bits than a byte."""

    bit_width: int = 9


@dataclass(frozen=True)
class Infinite(Log2Grid):
    """Its code 15 stands for no number."""

    def decode(self, payload: jax.Array) -> jax.Array:
        return jnp.where(payload == 15, jnp.inf, 1.0)


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (Wide(), r"Wide: bit_width must be 1 to 8, got 9"),
        (Infinite(), r"Infinite.decode: every code must stand"),
    ],
)
def test_a_format_that_cannot_be_is_refused(grid: Codebook, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _ = grid.bounds


def test_a_format_without_codes_is_refused() -> None:
    abstract: Any = Codebook
    with pytest.raises(TypeError, match="decode"):
        abstract()


@pytest.mark.heavy
@pytest.mark.parametrize("name", WEIGHTS)
def test_values_are_powers_of_two_times_the_scale(name: str) -> None:
    made = layer(name, input_quant=Log2ActPerRow)
    weight: Any = made.quant_weight()
    kernel = np.asarray(made.kernel[...])
    in_groups = kernel.reshape(4, 16, 8) if name == "group" else kernel[None]
    axes = (0, 1, 2) if name == "tensor" else 1
    scale = np.abs(in_groups).max(axes, keepdims=True)
    steps = np.asarray(weight.value).reshape(in_groups.shape) / scale
    np.testing.assert_allclose(steps, Log2Grid().round(jnp.asarray(in_groups / scale)), rtol=1e-6)
    np.testing.assert_array_equal(made.input_quant(X).scale[:, 0], np.abs(X).max(1))


@pytest.mark.parametrize("name", WEIGHTS)
def test_bits_are_those_of_a_compiled_call_and_gradients_go_through(name: str) -> None:
    made = layer(name, input_quant=Log2ActPerRow)
    compiled = nnx.jit(lambda layer: layer.quant_weight().value)(made)
    np.testing.assert_array_equal(compiled, made.quant_weight().value)
    gradient = nnx.grad(lambda layer: layer.quant_weight().value.sum())(made).kernel[...]
    assert np.isfinite(gradient).all() and float(jnp.abs(gradient).max()) > 0


@pytest.mark.heavy
@pytest.mark.parametrize("name", WEIGHTS)
def test_frozen_packed_and_unfrozen_numbers_are_the_same(name: str) -> None:
    made = layer(name, input_quant=Log2ActPerRow)
    value, before = made.quant_weight().value, made(X)
    frozen = freeze(made)
    assert (
        frozen.frozen.numbers["value"].size == 64 * 8 // 2
        and frozen.frozen.numbers["value"].dtype == jnp.uint8
    )
    for copy in (frozen, nnx.clone(frozen), pickle.loads(pickle.dumps(frozen))):
        np.testing.assert_array_equal(copy.frozen.quant_tensor().value, value)
        np.testing.assert_allclose(copy(X), before, atol=1e-5)
    again: Any = unfreeze(nnx.clone(frozen), from_payload=True)
    np.testing.assert_array_equal(again.quant_weight().value, value)
    assert "4-bit Log2Grid x 4-bit Log2Grid" in str(jqinject.report(frozen, X))


@pytest.mark.parametrize("name", WEIGHTS)
def test_checkpoints_of_our_own_layout_hold_it(name: str, tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="of the extra jqinject[formats]")
    from jqinject.formats import load, save

    def floats(seed: int) -> nnx.Sequential:
        return nnx.Sequential(nnx.Linear(64, 8, rngs=nnx.Rngs(seed)))

    served: Any = freeze(quantize(floats(0), Rule(weight_quant=WEIGHTS[name])))
    loaded: Any = load(floats(1), save(served, tmp_path / "saved", method="jqinject"))
    np.testing.assert_array_equal(
        loaded.layers[0].frozen.quant_tensor().value, served.layers[0].frozen.quant_tensor().value
    )
    np.testing.assert_allclose(loaded(X), served(X), atol=1e-6)


class Signs(Codebook):
    """Not a dataclass, and its codes are of JAX's default integers."""

    bit_width = 1

    def decode(self, payload: jax.Array) -> jax.Array:
        return jnp.where(payload == 1, 1.0, -1.0)

    def encode(self, steps: jax.Array) -> jax.Array:
        return (steps >= 0).astype(int)


def test_codes_are_stored_in_bytes_whatever_the_format_makes() -> None:
    class Plain(Log2, Int8WeightPerChannelFloat):
        codebook = Signs()

    made = QuantLinear(64, 8, weight_quant=Plain, rngs=nnx.Rngs(0))
    made.eval()
    assert made.quant_weight().codes().dtype == jnp.uint8
    np.testing.assert_array_equal(freeze(made).frozen.quant_tensor().value, made.quant_weight().value)


@pytest.mark.parametrize("codebook", [3, "nf4"])
def test_what_is_no_codebook_is_refused(codebook: Any) -> None:
    class Wrong(Log2, Int8WeightPerChannelFloat): ...

    with pytest.raises(
        TypeError, match=rf"a codebook is a jqinject.ops.Codebook, or the numbers .*got {codebook!r}"
    ):
        QuantLinear(64, 8, weight_quant=Wrong.let(codebook=codebook), rngs=nnx.Rngs(0))
