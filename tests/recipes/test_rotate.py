"""Rotations and folded norms: the float model's function stays, and what is folded is found from the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject import Rule
from jqinject.model.calibration import BatchCalls
from jqinject.program import CALL
from jqinject.quant import (
    Int8DynamicActPerRowAbsMax,
    Int8WeightPerChannelFloat,
    Int8WeightPerTensorFloat,
)
from jqinject.recipes import RTN, FoldNorms, Recipe, Rotate, SmoothQuant, Solve
from jqinject.recipes.passes.rotate import largest_size
from jqinject.recipes.work import Work

WIDTH, HEADS, HIDDEN = 16, 4, 24
RULE = Rule(weight_quant=Int8WeightPerChannelFloat, input_quant=Int8DynamicActPerRowAbsMax)


class PlusOneNorm(nnx.Module):
    """RMSNorm with a gain of `1 + g`."""

    def __init__(self, width: int) -> None:
        self.g = nnx.Param(jnp.zeros(width))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        normal = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)
        return (normal * (1 + self.g[...].astype(jnp.float32))).astype(x.dtype)


class Block(nnx.Module):
    """RMSNorm, RoPE, grouped queries, SwiGLU."""

    def __init__(self, rngs: nnx.Rngs, **dtypes: Any) -> None:
        def linear(one: int, other: int, **more: Any) -> nnx.Linear:
            return nnx.Linear(one, other, rngs=rngs, **dtypes, **more)

        self.before, self.between = PlusOneNorm(WIDTH), nnx.RMSNorm(WIDTH, rngs=rngs, **dtypes)
        self.q, self.k = linear(WIDTH, HEADS * 8, use_bias=False), linear(WIDTH, 16, use_bias=False)
        self.v, self.o = linear(WIDTH, 16), linear(HEADS * 8, WIDTH)
        self.gate, self.up = linear(WIDTH, HIDDEN, use_bias=False), linear(WIDTH, HIDDEN)
        self.down = linear(HIDDEN, WIDTH)

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, _ = x.shape
        y = self.before(x)
        angle = jnp.arange(length, dtype=jnp.float32)[:, None, None] / 10.0 ** jnp.arange(
            4, dtype=jnp.float32
        )
        sin, cos = jnp.sin(angle).astype(x.dtype), jnp.cos(angle).astype(x.dtype)

        def heads(y: jax.Array, turn: bool) -> jax.Array:
            y = y.reshape(batch, length, -1, 8)
            a, b = y[..., :4], y[..., 4:]
            y = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1) if turn else y
            return jnp.repeat(y, HEADS // y.shape[2], 2)

        scores = jnp.einsum("bqhd,bkhd->bhqk", heads(self.q(y), True), heads(self.k(y), True))
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, jnp.asarray(-1e4, x.dtype))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), heads(self.v(y), False))
        x = x + self.o(mixed.reshape(batch, length, -1))
        y = self.between(x)
        return x + self.down(jax.nn.silu(self.gate(y)) * self.up(y))


class Decoder(nnx.Module):
    """Blocks, one by one or stacked, with a head of their own or that of the table."""

    def __init__(self, depth: int = 2, tied: bool = False, stacked: bool = False, **dtypes: Any) -> None:
        rngs = nnx.Rngs(0)
        self.table, self.tied, self.stacked = nnx.Embed(11, WIDTH, rngs=rngs, **dtypes), tied, stacked
        if stacked:
            self.blocks = nnx.vmap(lambda rngs: Block(rngs, **dtypes))(rngs.split(depth))
        else:
            self.blocks = nnx.List([Block(rngs, **dtypes) for _ in range(depth)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs, **dtypes)
        self.head = None if tied else nnx.Linear(WIDTH, 11, use_bias=False, rngs=rngs, **dtypes)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.table(tokens)
        if self.stacked:
            x = nnx.scan(lambda block, x: block(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(
                self.blocks, x
            )
        else:
            for block in self.blocks:
                x = block(x)
        x = self.norm(x)
        return self.table.attend(x) if self.head is None else self.head(x)


class Encoder(nnx.Module):
    """Patches, LayerNorm, Flax's attention, GELU."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.patch = nnx.Conv(3, WIDTH, (2, 2), strides=2, rngs=rngs)
        self.place = nnx.Param(jax.random.normal(rngs(), (1, 4, WIDTH)))
        self.before, self.between = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, WIDTH, rngs=rngs, decode=False)
        self.up, self.down = nnx.Linear(WIDTH, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 5, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.patch(x).reshape(x.shape[0], -1, WIDTH) + self.place[...]
        x = x + self.attention(self.before(x))
        x = x + self.down(jax.nn.gelu(self.up(self.between(x))))
        return self.head(self.norm(x)[:, 0])


def _with_noise(model: Any, but: tuple[str, ...] = ()) -> Any:
    """Gains and biases as after training."""
    for place, (path, variable) in enumerate(nnx.to_flat_state(nnx.state(model, nnx.Param))):
        if path[-1] in ("scale", "g", "bias") and path[0] not in but:
            value = variable[...]
            noise = 0.3 * jax.random.normal(jax.random.key(place), value.shape)
            variable[...] = value + noise.astype(value.dtype)
    return model


def _work(model: Any, x: jax.Array) -> Work:
    model.eval()
    calls = list(BatchCalls(model, CALL, None, "test").of([x]))
    copy = nnx.clone(model)
    return Work(model=copy, rules=(RULE,), batches=[x], calls=calls, methods={CALL: x}, progress=False)


def _output(work: Work) -> jax.Array:
    stream = work.stream()
    with jax.default_matmul_precision("highest"):
        for _ in stream:
            pass
        (y,) = stream.outputs()
    return y


def _tokens() -> jax.Array:
    return jax.random.randint(jax.random.key(1), (2, 5), 0, 11)


def _folded_and_rotated(model: Any, x: jax.Array) -> tuple[Work, list[Any], list[Any]]:
    work = _work(model, x)
    before = _output(work)
    folded, rotated = FoldNorms()(work), Rotate()(work)
    after = _output(work)
    scale = float(jnp.abs(before.astype(jnp.float32)).max())
    allowed = 1e-5 if before.dtype == jnp.float32 else 8 * float(jnp.finfo(before.dtype).eps)
    np.testing.assert_allclose(
        np.asarray(after, np.float32), np.asarray(before, np.float32), rtol=0, atol=2 * allowed * scale
    )
    return work, folded, rotated


def _kinds(done: list[Any]) -> dict[Any, set[str]]:
    found: dict[Any, set[str]] = {}
    for one in done:
        if not one.reason:
            names = {name.rpartition(".")[0] for name in one.name.partition(" of ")[2].split(", ")}
            found[one.facts["kind"]] = found.get(one.facts["kind"], set()) | names
    return found


@pytest.mark.lengthy
def test_a_decoder_keeps_its_function() -> None:
    work, folded, rotated = _folded_and_rotated(_with_noise(Decoder()), _tokens())
    assert len(folded) == 5 and not any(one.reason for one in folded)
    kinds = _kinds(rotated)
    per_block = {"q", "k", "v", "gate", "up"}
    assert kinds["R1"] == {f"blocks.{i}.{name}" for i in (0, 1) for name in per_block} | {"head"}
    assert kinds["R2"] == {"blocks.0.o", "blocks.1.o"}
    assert (
        kinds["R4"]
        == {"blocks.0.down", "blocks.1.down"}
        == {name.removesuffix(".kernel") for name in work.online}
    )
    np.testing.assert_allclose(work.model.blocks[0].before.g[...], 0, atol=1e-6)  # pyright: ignore
    online = [one for one in rotated if not one.reason and one.facts["kind"] == "R4"]
    (one,) = (one for one in online if one.name.startswith("R4 of blocks.0"))
    assert one.facts["block"] == HIDDEN


@pytest.mark.lengthy
def test_a_quantized_decoder_is_served_with_its_rotations() -> None:
    model, tokens = _with_noise(Decoder(1)), _tokens()
    rule = Rule(
        r"(?!table).*", weight_quant=Int8WeightPerChannelFloat, input_quant=Int8DynamicActPerRowAbsMax
    )
    result = Recipe(FoldNorms(), Rotate(), Solve(RTN())).apply(model, rule, [tokens], progress=False)
    y, wanted = result.model(tokens), model(tokens)
    assert float(jnp.linalg.norm(y - wanted)) < 0.05 * float(jnp.linalg.norm(wanted))
    frozen = jqinject.freeze(nnx.clone(result.model))
    np.testing.assert_allclose(frozen(tokens), y, rtol=1e-4, atol=1e-4)


@pytest.mark.lengthy
def test_blocks_under_scan_keep_their_function() -> None:
    _, folded, rotated = _folded_and_rotated(_with_noise(Decoder(stacked=True)), _tokens())
    assert len(folded) == 3 and not any(one.reason for one in folded)
    kinds = _kinds(rotated)
    assert kinds["R1"] == {f"blocks.{name}" for name in ("q", "k", "v", "gate", "up")} | {"head"}
    assert kinds["R2"] == {"blocks.o"} and kinds["R4"] == {"blocks.down"}


@pytest.mark.lengthy
def test_a_tied_head_is_rotated_with_its_table_and_keeps_its_norms_gain() -> None:
    _, folded, rotated = _folded_and_rotated(_with_noise(Decoder(1, tied=True), but=("norm",)), _tokens())
    assert not any(one.reason for one in folded)
    assert "R1" in _kinds(rotated)
    work = _work(_with_noise(Decoder(1, tied=True)), _tokens())
    (stays,) = (one for one in FoldNorms()(work) if one.reason)
    assert stays.name == "norm.scale" and "table.embedding is read by gather too" in stays.reason
    done = Rotate("R1")(work)
    assert not _kinds(done)
    assert any("which FoldNorms takes out" in str(one) for one in done)


@pytest.mark.lengthy
def test_bfloat16_models_move_by_its_rounding_alone() -> None:
    with jax.numpy_dtype_promotion("standard"):  # Flax's RMSNorm multiplies float32 by bfloat16
        model = _with_noise(Decoder(1, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16))
        _, _, rotated = _folded_and_rotated(model, _tokens())
    assert set(_kinds(rotated)) == {"R1", "R2", "R4"}


@pytest.mark.lengthy
def test_layer_norms_and_flax_attention_keep_their_function() -> None:
    x = jax.random.normal(jax.random.key(2), (2, 4, 4, 3))
    _, folded, rotated = _folded_and_rotated(_with_noise(Encoder()), x)
    assert {one.name: one.what.partition("; its bias is ")[2] for one in folded} == {
        "before.scale": "folded",
        "between.scale": "folded",
        "norm.scale": "divided by the gain",
    }
    kinds = _kinds(rotated)
    attention = {f"attention.{name}" for name in ("query", "key", "value")}
    assert kinds == {"R1": attention | {"up", "head"}, "R2": {"attention.out"}, "R4": {"down"}}


class Experts(nnx.Module):
    """Rows in two groups, each with a matrix of its own."""

    def __init__(self) -> None:
        self.rows = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
        self.up = nnx.Param(jax.random.normal(jax.random.key(1), (2, 4, 6)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(self.rows(x), self.up[...], jnp.array([1, 2]))


@pytest.mark.heavy
def test_ragged_products_are_rotated_with_what_makes_their_rows() -> None:
    work = _work(Experts(), jax.random.normal(jax.random.key(0), (3, 8)))
    (done,) = (one for one in Rotate("R2")(work) if not one.reason)
    assert {*done.facts["folded"]} == {"rows.kernel", "up"} and done.facts["block"] == 4


class Between(nnx.Module):
    """Something between two weights."""

    def __init__(self, between: Callable[[jax.Array], jax.Array]) -> None:
        self.a = nnx.Param(jax.random.normal(jax.random.key(0), (16, 8)))
        self.b = nnx.Param(jax.random.normal(jax.random.key(1), (8, 4)))
        self.between = between

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.between(x @ self.a[...]) @ self.b[...]


def _updated(rows: jax.Array, update: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(rows, update, (1, 0))


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (lambda x: _updated(jnp.zeros((8, 8)), x), ""),
        (lambda x: _updated(x, jnp.ones((1, 8))), "it is a constant"),
        (lambda x: jnp.pad(x, ((1, 0), (0, 0))), ""),
        (lambda x: jnp.pad(x, ((1, 0), (0, 0)), constant_values=1.0), "not 0 are put around it"),
        (lambda x: jnp.cumsum(x, axis=0), ""),
        (lambda x: jnp.cumsum(x, axis=1), "cumsum takes it apart"),
        (lambda x: jnp.stack([x, 2 * x], axis=2)[..., 1], ""),
    ],
)
def test_what_moves_numbers_is_rotated_with_all_of_them_or_refused(
    between: Callable[[jax.Array], jax.Array], reason: str
) -> None:
    model, x = Between(between), jax.random.normal(jax.random.key(2), (6, 16))
    rule = Rule(weight_quant=Int8WeightPerChannelFloat)
    _, site = Recipe(Rotate("R2")).apply(model, rule, [x], progress=False).report.steps[0].sites
    if reason:
        assert reason in site.reason
    else:
        assert {*site.facts["folded"]} == {"a", "b"}


@pytest.mark.heavy
def test_sizes_without_a_matrix_are_mixed_in_blocks_or_refused_by_path() -> None:
    assert [largest_size(each) for each in (16, 24, 6, 84, 7, 88)] == [16, 24, 2, 28, 1, 8]
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(8, 6, rngs=rngs), nnx.relu, nnx.Linear(6, 4, rngs=rngs))
    x = jax.random.normal(jax.random.key(0), (3, 8))
    with pytest.raises(
        ValueError, match=r"layers\.2\.dot_general0 \(layers\.2\.kernel\): no Hadamard matrix of size 6"
    ):
        Rotate("R4", full_size=True)(_work(model, x))
    work = _work(model, x)
    (done,) = (one for one in Rotate("R4")(work) if not one.reason)
    assert done.facts["block"] == 2 and [*work.online] == ["layers.2.kernel"]


def test_an_unknown_rotation_is_refused() -> None:
    with pytest.raises(ValueError, match="'R5' is no kind of rotation"):
        Rotate("R5")
    assert Rotate() == Rotate("R1", "R2", "R3", "R4") != Rotate("R1")


class BothAxes(nnx.Module):
    """Contracts a parameter along its rows, and along its columns."""

    def __init__(self, width: int) -> None:
        self.w = nnx.Param(jax.random.normal(jax.random.key(0), (8, width)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.tanh(x) @ self.w[...]) @ self.w[...].T


@pytest.mark.heavy
@pytest.mark.parametrize("width", [8, 4])
@pytest.mark.parametrize("transform", [Rotate("R4"), SmoothQuant(online="all")], ids=["rotate", "smooth"])
def test_a_parameter_contracted_along_both_axes_is_left_out_with_its_cause(
    width: int, transform: Rotate | SmoothQuant
) -> None:
    rule, x = Rule(weight_quant=Int8WeightPerTensorFloat), jax.random.normal(jax.random.key(1), (6, 8))
    report = Recipe(transform).apply(BothAxes(width), rule, [x], progress=False).report
    reasons = {left.reason for left in report.steps[0].sites if left.reason}
    assert reasons == {"dot_general0 and dot_general1 contract different axes or channels of it"}
