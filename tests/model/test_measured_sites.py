"""`report(numbers=True)` of what a model contracts by itself: the same numbers as of layers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject import Rule, calibrate, freeze, quantize
from jqinject.dot import FrozenParam
from jqinject.model import LayerNumbers, WeightBitWidthWeightedBySize
from jqinject.odml import OdmlQat
from jqinject.quant import Int4WeightPerGroupAbsMax, Int8ActPerTensorMinMax, Int8WeightPerChannelFloat
from jqinject.recipes import SitesLeftWarning

IDS = jnp.arange(24).reshape(2, 12) % 20
X = jax.random.normal(jax.random.key(1), (5, 16))
A8 = Int8ActPerTensorMinMax
RULES = [
    Rule("down", weight_quant=Int8WeightPerChannelFloat, input_quant=A8, output_quant=A8, weight_bit_width=3),
    Rule(weight_quant=Int8WeightPerChannelFloat, input_quant=A8),
]


PATHS = ("table", "up", "down", "head")


def normal(number: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(number), shape) * 0.3


TABLE, UP, DOWN, HEAD = normal(0, 20, 16), normal(1, 16, 24), normal(2, 24, 16), normal(3, 16, 20)


class OfLayers(nnx.Module):
    """A table and three matrices."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.table = nnx.Embed(20, 16, rngs=rngs)
        self.up = nnx.Linear(16, 24, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(24, 16, use_bias=False, rngs=rngs)
        self.head = nnx.Linear(16, 20, use_bias=False, rngs=rngs)
        self.table.embedding.set_value(TABLE)
        for layer, value in ((self.up, UP), (self.down, DOWN), (self.head, HEAD)):
            layer.kernel.set_value(value)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.table(ids)
        x = x + self.down(jnp.tanh(self.up(x)))
        return self.head(x)


class OfParameters(nnx.Module):
    """The same, of its own contractions; one of them in a rematerialized part."""

    def __init__(self) -> None:
        self.table, self.up = nnx.Param(TABLE), nnx.Param(UP)
        self.down, self.head = nnx.Param(DOWN.T), nnx.Param(HEAD)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.table[(ids,)]
        x = x + jax.checkpoint(lambda x, w: jnp.einsum("btf,df->btd", x, w))(jnp.tanh(x @ self.up), self.down)
        return jnp.dot(x, self.head[...])


def calibrated(model: Any, rules: Any, x: Any) -> Any:
    model = quantize(model, rules, inputs=x)
    if any(rule.quantizer("input_quant") for rule in rules):
        calibrate(model, [x], progress=False)
    return model


def numbers_of(report: Any, path: str) -> Any:
    return report[path].numbers


def ratio(y: list[np.ndarray], q: list[np.ndarray]) -> float:
    signal = sum((a**2).sum() for a in y)
    return float(10 * np.log10(signal / sum(((a - b) ** 2).sum() for a, b in zip(y, q, strict=True))))


def close(a: LayerNumbers, b: LayerNumbers) -> None:
    """Whether two entries have the same numbers, up to rounding."""
    assert a.calls == b.calls
    for name in (
        "isolated_sqnr_db",
        "accumulated_sqnr_db",
        "weight_sqnr_db",
        "only_quantized",
        "only_float",
    ):
        assert getattr(a, name) == pytest.approx(getattr(b, name), rel=1e-3), name
    assert dataclasses.asdict(a.saturation) == pytest.approx(dataclasses.asdict(b.saturation), abs=1e-3)
    for part in ("input", "output"):
        one, other = getattr(a.histograms, part), getattr(b.histograms, part)
        assert (one is None) == (other is None)
        if one is not None:
            assert sum(one.counts) == sum(other.counts)
            assert (one.low, one.high) == pytest.approx((other.low, other.high), rel=1e-4)


@pytest.fixture(scope="module")
def bare() -> Any:
    model = calibrated(OfParameters(), RULES, IDS)
    return model, jqinject.report(model, IDS, numbers=True)


@pytest.mark.heavy
def test_the_numbers_of_parameters_are_those_of_layers(bare: Any) -> None:
    model, found = bare
    wanted = jqinject.report(calibrated(OfLayers(), RULES, IDS), IDS, numbers=True)
    assert found.output_sqnr_db == pytest.approx(wanted.output_sqnr_db, rel=1e-3)
    assert {entry.path for entry in found} == {entry.path for entry in wanted} == {*PATHS}
    for path in PATHS:
        close(numbers_of(found, path), numbers_of(wanted, path))
        slots = {history.slot for history in numbers_of(wanted, path).histories}
        assert {history.slot for history in numbers_of(found, path).histories} == slots
    assert [entry.path for entry in found.most_sensitive(1)] == ["down"]
    assert "<h2>down</h2>" in found.html()
    assert type(model.op_quant).__name__ == "OpQuantizers" and "around" not in str(vars(model).keys())


@pytest.mark.heavy
def test_frozen_parameters_with_their_masters(bare: Any) -> None:
    model, wanted = bare
    kept = freeze(nnx.clone(model, graph=True), keep_masters=True)
    found = jqinject.report(kept, IDS, numbers=True)
    for entry in wanted:
        close(numbers_of(found, entry.path), numbers_of(wanted, entry.path))
    with pytest.raises(ValueError, match=r"weights .*down.* are gone: frozen.\n  cure: keep the model"):
        jqinject.report(freeze(nnx.clone(model, graph=True)), IDS, numbers=True)


class Tied(nnx.Module):
    """A table whose rows are looked up, and which is the output head."""

    def __init__(self) -> None:
        self.table = nnx.Param(TABLE)

    def __call__(self, ids: jax.Array) -> jax.Array:
        return jnp.tanh(self.table[ids]) @ self.table[...].T


def test_a_parameter_that_is_read_twice() -> None:
    model = quantize(Tied(), Rule(weight_quant=Int8WeightPerChannelFloat, weight_bit_width=4), inputs=IDS)
    found = numbers_of(jqinject.report(model, IDS, numbers=True), "table")
    w = np.asarray(TABLE, np.float64)
    scale = np.abs(w).max(1, keepdims=True) / 7
    q, ids = np.rint(w / scale) * scale, np.asarray(IDS)
    outputs = [w[ids], np.tanh(w[ids]) @ w.T]
    alone = [q[ids], np.tanh(w[ids]) @ q.T]
    here = [q[ids], np.tanh(q[ids]) @ q.T]
    assert found.calls == 2
    assert found.weight_sqnr_db == pytest.approx(ratio([w], [q]), rel=1e-4)
    assert found.isolated_sqnr_db == pytest.approx(ratio(outputs, alone), rel=1e-4)
    assert found.accumulated_sqnr_db == pytest.approx(ratio(outputs, here), rel=1e-4)
    assert found.only_quantized == pytest.approx(ratio(outputs[1:], here[1:]), rel=1e-4)
    assert found.only_float == np.inf


class Blocks(nnx.Module):
    """A stack that is scanned over, of layers or of bare matrices."""

    def __init__(self, kind: Any) -> None:
        self.blocks = nnx.vmap(kind)(jax.random.split(jax.random.key(0), 3))

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def run(block: Any, h: jax.Array) -> jax.Array:
            return block(h)

        return run(self.blocks, x)


class Layer(nnx.Module):
    def __init__(self, key: jax.Array) -> None:
        self.w = nnx.Linear(16, 16, use_bias=False, rngs=nnx.Rngs(0))
        self.w.kernel.set_value(jax.random.normal(key, (16, 16)) * 0.1)

    def __call__(self, h: jax.Array) -> jax.Array:
        return jnp.tanh(self.w(h))


class Matrix(nnx.Module):
    def __init__(self, key: jax.Array) -> None:
        self.w = nnx.Param(jax.random.normal(key, (16, 16)) * 0.1)

    def __call__(self, h: jax.Array) -> jax.Array:
        return jnp.tanh(h @ self.w)


@pytest.mark.heavy
def test_a_scanned_stack_in_groups() -> None:
    class Groups(Int4WeightPerGroupAbsMax):
        group_size = 8

    rules = [Rule(weight_quant=Groups)]
    found, wanted = (
        jqinject.report(quantize(Blocks(kind), rules, inputs=X), X, numbers=True) for kind in (Matrix, Layer)
    )
    close(numbers_of(found, "blocks.w"), numbers_of(wanted, "blocks.w"))
    assert numbers_of(found, "blocks.w").calls == 3


@pytest.mark.heavy
def test_a_contraction_of_activations() -> None:
    class Scores(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(normal(3, 16, 16))

        def __call__(self, x: jax.Array) -> jax.Array:
            return jnp.einsum("td,sd->ts", x @ self.w, jnp.tanh(x))

    rule = Rule(op="einsum", lhs_quant=A8, rhs_quant=A8)
    model = calibrated(Scores(), [rule, Rule(input_quant=A8)], X)
    report = jqinject.report(model, X, numbers=True)
    entry, found = report["einsum0"], numbers_of(report, "einsum0")

    def rounded(x: np.ndarray, name: str) -> np.ndarray:
        scale = np.float64(model.op_quant[name].scale())
        zero = np.float64(model.op_quant[name].zero_point())
        low, high = -128, 127
        return (np.clip(np.rint(x / scale) + zero, low, high) - zero) * scale

    x = np.asarray(X, np.float64)
    q, k = x @ np.asarray(normal(3, 16, 16), np.float64), np.tanh(x)
    y, noisy = q @ k.T, rounded(q, "einsum0_lhs") @ rounded(k, "einsum0_rhs").T
    wanted = ratio([y], [noisy])
    assert found.isolated_sqnr_db == pytest.approx(wanted, rel=1e-3)
    assert found.only_quantized == pytest.approx(wanted, rel=1e-3)
    assert (entry.layer, entry.operations) == ("einsum of activations", 5 * 5 * 16)
    assert sum(found.histograms.input.counts) == 2 * X.size


class Mixed(nnx.Module):
    """A layer and a bare matrix."""

    def __init__(self) -> None:
        self.layer = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
        self.w = nnx.Param(normal(4, 16, 24))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(self.layer(x)) @ self.w


@pytest.mark.heavy
def test_corrections_name_the_parameters_that_they_leave() -> None:
    model = quantize(Mixed(), Rule(weight_quant=Int8WeightPerChannelFloat), inputs=X)
    with pytest.warns(
        SitesLeftWarning,
        match=r"correct_biases changes biases, and leaves as they are:\n  dot_general0 \(w\)",
    ):
        assert jqinject.correct_biases(model, [X], progress=False) == ("layer",)
    learned = jqinject.learn_rounding(model, [X], steps=2, progress=False)
    assert [site.path for site in learned.sites] == ["layer.kernel", "w"]


@pytest.mark.heavy
def test_post_training_quantization_finds_parameters_by_its_first_batch() -> None:
    model, found = jqinject.post_training_quantize(
        Mixed(), "static", batches=[X], report=True, progress=False
    )
    assert {entry.path for entry in found.most_sensitive()} == {"layer", "w"}
    assert isinstance(model.w, FrozenParam)


@pytest.mark.heavy
def test_learned_bits_of_parameters_cost_what_those_of_layers_do() -> None:
    learned = Rule(weight_quant=Int8WeightPerChannelFloat, weight_bit_width_impl_type="parameter")
    model = quantize(Mixed(), learned, inputs=X)
    loss = WeightBitWidthWeightedBySize()
    assert float(loss(model)) == 8.0
    found = nnx.to_pure_dict(nnx.grad(lambda model: loss(model))(model))
    share = [
        sum(float(leaf.sum()) for leaf in jax.tree.leaves(part))
        for part in (found["layer"], found["op_quant"])
    ]
    assert share == pytest.approx([16 / 40, 24 / 40])


@pytest.mark.heavy
def test_operations_of_a_device_have_numbers() -> None:
    model = OdmlQat().quantize(Mixed(), X)
    model(X)
    found = jqinject.report(model, X, numbers=True)
    for path in ("layer", "w"):
        assert found[path].program and found[path].operations
        assert found[path].numbers is not None and found[path].numbers.weight_sqnr_db is not None
