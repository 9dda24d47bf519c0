"""Permutations of channels: the function stays, and blocks of a rotation share what is large."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from jqinject import Rule
from jqinject.model.calibration import BatchCalls
from jqinject.program import CALL
from jqinject.quant import Int8DynamicActPerRowAbsMax, IntWeightSymmetricGroupQuant
from jqinject.recipes import FoldNorms, Permute, Recipe, Rotate
from jqinject.recipes.passes.permute import ORDERS
from jqinject.recipes.work import Work
from tests.recipes.test_rotate import HIDDEN, WIDTH, Decoder, Encoder

BITS = {
    "weight_quant": IntWeightSymmetricGroupQuant.let(bit_width=4, group_size=8),
    "input_quant": Int8DynamicActPerRowAbsMax.let(bit_width=4),
}


@given(st.integers(1, 5), st.integers(2, 6), st.integers(0, 2**31))
@pytest.mark.parametrize("method", ORDERS)
def test_every_order_has_each_channel_once(method: str, blocks: int, block: int, seed: int) -> None:
    sizes = np.random.default_rng(seed).lognormal(sigma=2, size=blocks * block).astype(np.float32)
    order = ORDERS[method](sizes, block)
    assert sorted(order) == list(range(sizes.size))
    if method == "absmax":
        assert (np.diff(sizes[order]) <= 0).all()
    else:  # no two of the largest channels, one for each block, are in one
        largest = np.argsort(-sizes, kind="stable")[:blocks]
        assert sorted(np.argsort(order)[largest] // block) == list(range(blocks))


def test_mass_diff_is_the_greedy_choice() -> None:
    # 10, 6 and 5 begin; 4 goes to 5, 3 to 6, 3 to the first 9, which is full, 3 to the other; 2 and 2 to 10.
    mass = np.array([10.0, 6.0, 5.0, 4.0, 3.0, 3.0, 3.0, 2.0, 2.0])
    order = ORDERS["massdiff"](mass, 3)
    assert order.tolist() == [0, 7, 8, 1, 4, 5, 2, 3, 6]


def with_noise(model: Any) -> Any:
    """Gains and biases as after training."""
    for place, (path, variable) in enumerate(nnx.to_flat_state(nnx.state(model, nnx.Param))):
        if path[-1] in ("scale", "g", "bias"):
            noise = 0.3 * jax.random.normal(jax.random.key(place), variable.shape)
            variable[...] = variable[...] + noise
    return model


def work_of(model: Any, x: jax.Array) -> Work:
    model.eval()
    calls = list(BatchCalls(model, CALL, None, "test").of([x]))
    return Work(
        model=model, rules=(Rule(**BITS),), batches=[x], calls=calls, methods={CALL: x}, progress=False
    )


def permuted(model: Any, x: jax.Array, apply: Permute) -> list[Any]:
    """What the pass did; the model is checked to be the same function."""
    before = model(x)
    work = work_of(nnx.clone(model), x)
    done = apply(work)
    after: Any = work.model
    np.testing.assert_allclose(after(x), before, atol=2e-5 * float(jnp.abs(before).max()), rtol=0)
    return done


@pytest.mark.lengthy
@pytest.mark.parametrize("kind", ["decoder", "tied", "stacked", "encoder"])
def test_a_model_keeps_its_function(kind: str) -> None:
    if kind == "encoder":
        model, x = with_noise(Encoder()), jax.random.normal(jax.random.key(2), (2, 4, 4, 3))
        stream, hidden, made = "before.scale", "down.kernel", "up.bias"
    else:
        model = with_noise(Decoder(tied=kind == "tied", stacked=kind == "stacked"))
        x = jax.random.randint(jax.random.key(1), (2, 5), 0, 11)
        block = "blocks" if kind == "stacked" else "blocks.0"
        stream, hidden, made = f"{block}.before.g", f"{block}.down.kernel", f"{block}.up.kernel"
    done = permuted(model, x, Permute("zigzag", block=4))
    folded = {path: note for note in done if not note.reason for path in note.facts["folded"]}
    assert len(folded[stream].facts["channels"]) == WIDTH
    assert len(folded[made].facts["channels"]) == HIDDEN and hidden in folded
    assert folded[made].name != folded[stream].name
    if kind != "encoder":  # queries and keys go through RoPE; values lie in heads of 8
        sites = [note for note in done if note.reason]
        assert not sites
        values = [note for note in done if len(note.facts["channels"]) == 8]
        assert len(values) == (1 if kind == "stacked" else 2)


class Mlp(nnx.Module):
    """A normed stream, GELU between, and large channels side by side in one of the two."""

    def __init__(self, place: str) -> None:
        rngs = nnx.Rngs(0)
        self.first, self.norm = nnx.Linear(16, 64, rngs=rngs), nnx.RMSNorm(64, rngs=rngs)
        self.up, self.down = nnx.Linear(64, 128, rngs=rngs), nnx.Linear(128, 64, rngs=rngs)
        self.head = nnx.Linear(64, 8, rngs=rngs)
        if place == "stream":
            self.first.kernel[...] *= jnp.ones(64).at[:8].set(30.0)
        else:
            self.up.kernel[...] *= jnp.ones(128).at[16:24].set(30.0)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.first(x)
        x = x + self.down(jax.nn.gelu(self.up(self.norm(x))))
        return self.head(x)


@pytest.mark.lengthy
@pytest.mark.parametrize(("place", "site"), [("stream", "head"), ("hidden", "down")])
def test_a_permutation_before_block_rotations_lessens_the_error_of_w4a4(place: str, site: str) -> None:
    rule = Rule(site, **BITS)  # of what contracts the large channels
    model, x = Mlp(place), jax.random.normal(jax.random.key(3), (64, 16))
    expected = model(x)

    def error(*passes: Any) -> float:
        result = Recipe(FoldNorms(), *passes).apply(nnx.clone(model), rule, [x], progress=False)
        quantized: Any = result.model
        return float(jnp.linalg.norm(quantized(x) - expected) / jnp.linalg.norm(expected))

    rotate = Rotate("R1", "R4", block=8)
    plain = error(rotate)
    for method in ("massdiff", "zigzag"):
        assert error(Permute(method, block=8), rotate) < 0.85 * plain


@pytest.mark.lengthy
def test_what_depends_on_the_order_is_left_alone() -> None:
    class Ordered(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.first, self.middle = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)
            self.last, self.small = nnx.Linear(8, 6, rngs=rngs), nnx.Linear(6, 3, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            y = self.middle(jnp.cumsum(self.first(x), axis=-1))
            return self.small(nnx.relu(self.last(nnx.sigmoid(y) * jnp.arange(8.0))))

    done = permuted(Ordered(), jnp.ones((2, 8)), Permute("absmax", block=4))
    assert [str(note) for note in done] == [
        "first.dot_general0 (first.kernel): it is an input of the model, or state that is no parameter",
        "middle.dot_general0 (middle.kernel): cumsum takes it apart",
        "last.dot_general0 (last.kernel): it is a constant",
        "small.dot_general0 (small.kernel): blocks of 4 do not divide its 6 channels",
    ]


def test_arguments_are_checked() -> None:
    with pytest.raises(
        ValueError, match=r"^Permute: method must be 'massdiff', 'zigzag' or 'absmax', got 'zig-zag'"
    ):
        Permute("zig-zag")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"^Permute: block must be at least 2, got 1.\n  cure: block=32"):
        Permute(block=1)
    with pytest.raises(
        ValueError, match=r"^Rotate: block=1, full_size=False; expected a block of at least 2"
    ):
        Rotate(block=1)
    with pytest.raises(ValueError, match=r"^Rotate: block=8, full_size=True; expected a block"):
        Rotate(block=8, full_size=True)
    assert repr(Rotate("R1", block=8)) == "Rotate('R1', block=8)"
