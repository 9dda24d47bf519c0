"""Channels are rescaled where the program allows it, and nowhere else; the float model's function stays."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject import Rule, quantize
from jqinject.quant import Int8WeightPerChannelFloat, IntWeightSymmetricGroupQuant
from jqinject.recipes import AWQ, RTN, Equalize, Recipe, SmoothQuant, Solve
from jqinject.recipes.passes.float_change import Rescaling
from jqinject.recipes.quantized_parameter import quantized_parameters
from jqinject.recipes.stream.flat_program import Note

X = jax.random.normal(jax.random.key(2), (3, 6, 16)) * jnp.linspace(0.1, 9, 16)
IMAGES = jax.random.normal(jax.random.key(2), (2, 6, 6, 3))
RULE = Rule(weight_quant=Int8WeightPerChannelFloat)


class Attention(nnx.Module):
    """Two key and value heads for four queries; gated, with a fused projection; the norms' gains are not 1."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.RMSNorm(16, rngs=rngs)
        self.norm.scale.set_value(jnp.linspace(0.5, 2, 16))  # pyright: ignore
        self.qkv = nnx.Linear(16, 32, rngs=rngs)
        self.out = nnx.Linear(16, 16, rngs=rngs)
        self.norm2 = nnx.LayerNorm(16, rngs=rngs)
        self.gate_up = nnx.Linear(16, 48, rngs=rngs)
        self.down = nnx.Linear(24, 16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = jnp.split(self.qkv(self.norm(x)), [16, 24], axis=-1)
        q, k, v = (y.reshape(*x.shape[:2], -1, 4) for y in (q, k, v))
        k, v = (jnp.repeat(y, 2, axis=2) for y in (k, v))
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        x = x + self.out(jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape))
        gate, up = jnp.split(self.gate_up(self.norm2(x)), 2, axis=-1)
        return x + self.down(nnx.silu(gate) * up)


def convolutions() -> nnx.Sequential:
    rngs = nnx.Rngs(0)
    return nnx.Sequential(
        nnx.Conv(3, 8, (3, 3), rngs=rngs),
        nnx.BatchNorm(8, rngs=rngs),
        nnx.relu,
        lambda x: nnx.max_pool(x, (2, 2), (2, 2)),
        nnx.Conv(8, 8, (3, 3), feature_group_count=2, rngs=rngs),
        nnx.leaky_relu,
        nnx.Conv(8, 8, (3, 3), feature_group_count=8, rngs=rngs),
        lambda x: x.mean(axis=(1, 2)),
        nnx.Linear(8, 4, rngs=rngs),
    )


def rescaled(model: nnx.Module, x: Any) -> tuple[dict[str, Note], dict[str, str]]:
    result = Recipe(SmoothQuant()).apply(model, RULE, [x], progress=False)
    sites = result.report.steps[0].sites
    done = {name: each for each in sites if not each.reason for name in each.name.split(", ")}
    return done, {each.name: each.reason for each in sites if each.reason}


@pytest.mark.heavy
def test_a_transformer_block_is_rescaled_through_norms_heads_and_gates() -> None:
    done, left = rescaled(Attention(nnx.Rngs(0)), X)
    folded = {name: set(each.facts["folded"]) for name, each in done.items()}
    assert not left
    assert folded == {
        "qkv.dot_general0": {"norm.scale"},
        "out.dot_general0": {"qkv.kernel", "qkv.bias"},
        "gate_up.dot_general0": {"norm2.scale", "norm2.bias"},
        "down.dot_general0": {"gate_up.kernel", "gate_up.bias"},
    }
    assert done["out.dot_general0"].facts["channels"] == 8, (
        "two query heads share the factors of a value head"
    )


@pytest.mark.heavy
def test_convolutions_are_rescaled_through_batch_norm_groups_and_pooling() -> None:
    done, left = rescaled(convolutions(), IMAGES)
    folded = {name: set(each.facts["folded"]) for name, each in done.items()}
    assert (
        left
        == {"layers.0.conv_general_dilated0": "it is an input of the model, or state that is no parameter"}
        or len(left) == 1
    )
    assert folded["layers.4.conv_general_dilated0"] == {"layers.1.scale", "layers.1.bias"}
    assert folded["layers.6.conv_general_dilated0"] == {"layers.4.kernel", "layers.4.bias"}
    assert folded["layers.8.dot_general0"] == {"layers.6.kernel", "layers.6.bias"}


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (nnx.gelu, "does not commute with a factor"),
        (lambda x: x + 1, "it is a constant"),
        (lambda x: x * x, "itself"),
        (lambda x: jnp.minimum(x, 6), "it is a constant"),
        (lambda x: x @ jnp.ones((8, 8)), "it is a constant"),
        (lambda x: x / x.sum(), "mixes channels"),
    ],
)
def test_what_does_not_commute_with_factors_is_left_out_with_its_reason(between: Any, reason: str) -> None:
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(16, 8, rngs=rngs), between, nnx.Linear(8, 4, rngs=rngs))
    done, left = rescaled(model, X)
    assert not done
    assert reason in left["layers.2.dot_general0"]


@pytest.mark.heavy
def test_smooth_quant_is_its_formula_for_both_readers_of_a_norm() -> None:
    class TwoReaders(nnx.Module):
        def __init__(self) -> None:
            self.norm = nnx.LayerNorm(16, rngs=nnx.Rngs(0))
            self.norm.bias.set_value(jnp.linspace(-1, 1, 16))  # pyright: ignore
            self.a, self.b = (nnx.Linear(16, 8, rngs=nnx.Rngs(seed)) for seed in (1, 2))

        def __call__(self, x: jax.Array) -> jax.Array:
            x = self.norm(x)
            return self.a(x) + self.b(x)

    model = TwoReaders()
    wanted = model(X)
    inputs = np.abs(model.norm(X)).max(axis=(0, 1))
    weights = np.abs(np.concatenate([layer.kernel.get_value() for layer in (model.a, model.b)], axis=1)).max(
        axis=1
    )
    scale = inputs**0.7 / weights**0.3
    rescaling = []

    def keep(work: Any) -> list[Any]:
        rescaling.append(work.model)
        return []

    Recipe(SmoothQuant(alpha=0.7), keep).apply(model, RULE, [X[:1], X[1:2], X[2:]], progress=False)
    smooth = rescaling[0]
    np.testing.assert_allclose(smooth.norm.scale, 1 / scale, rtol=1e-5)
    np.testing.assert_allclose(smooth.norm.bias, model.norm.bias / scale, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(smooth.b.kernel, model.b.kernel * scale[:, None], rtol=1e-5)
    np.testing.assert_allclose(smooth(X), wanted, rtol=1e-5, atol=1e-5)


def test_a_model_whose_function_changes_is_refused_with_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Rescaling.multiply

    def wrong(self: Rescaling, region: Any, factors: Any) -> Any:
        made = original(self, region, factors)
        self.change(region.sites[0].name, [(region.sites[0].path, lambda value: value * 2)])
        return made

    monkeypatch.setattr(Rescaling, "multiply", wrong)
    model = nnx.Sequential(nnx.LayerNorm(16, rngs=nnx.Rngs(0)), nnx.Linear(16, 4, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"moved by .* layers.1.dot_general0 were changed"):
        Recipe(SmoothQuant()).apply(model, RULE, [X], progress=False)


def test_equalize_makes_the_ranges_of_consecutive_weights_the_same() -> None:
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(16, 8, rngs=rngs), nnx.relu, nnx.Linear(8, 4, rngs=rngs))
    model.layers[0].bias.set_value(jnp.linspace(-1, 1, 8))  # pyright: ignore
    kept: list[Any] = []

    def keep(work: Any) -> list[Any]:
        kept.append(work.model)
        return []

    Recipe(Equalize(), keep).apply(model, RULE, [X], progress=False)
    first, second = (kept[0].layers[place].kernel.get_value() for place in (0, 2))
    np.testing.assert_allclose(np.abs(first).max(axis=0), np.abs(second).max(axis=1), rtol=1e-5)
    np.testing.assert_allclose(kept[0](X), model(X), rtol=1e-4, atol=1e-4)


@pytest.mark.heavy
def test_awq_has_less_error_than_rounding_the_weights_as_they_are() -> None:
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(16, 32, rngs=rngs), nnx.relu, nnx.Linear(32, 16, rngs=rngs))
    model.layers[0].kernel.set_value(model.layers[0].kernel.get_value().at[:, 3].multiply(40.0))  # pyright: ignore
    rule = Rule(weight_quant=Int8WeightPerChannelFloat.let(bit_width=3), path=r"layers\.2")

    def error(*passes: Any) -> float:
        result = Recipe(*passes, Solve(RTN())).apply(model, rule, [X], progress=False)
        return float(jnp.square(result.model(X) - model(X)).mean())

    assert error(AWQ()) < 0.7 * error()


@pytest.mark.heavy
def test_awq_takes_groups_of_a_kernels_channels_that_do_not_fill_them() -> None:
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Conv(3, 10, (1, 1), rngs=rngs), nnx.relu, nnx.Conv(10, 4, (2, 2), rngs=rngs))
    rule = Rule(r"layers\.2", weight_quant=IntWeightSymmetricGroupQuant.let(bit_width=3, group_size=4))
    quantized = quantize(nnx.clone(model), rule)
    kernel = np.asarray(model.layers[2].kernel.get_value())  # pyright: ignore
    found = np.asarray(quantized_parameters(quantized)["layers.2.kernel"].largest_of_groups(kernel))  # pyright: ignore
    for group in (slice(0, 4), slice(4, 8), slice(8, 10)):
        wanted = np.abs(kernel[:, :, group]).max(axis=2, keepdims=True)
        np.testing.assert_array_equal(found[:, :, group], np.broadcast_to(wanted, kernel[:, :, group].shape))
    result = Recipe(AWQ(grid=4), Solve(RTN())).apply(model, rule, [IMAGES], progress=False)
    assert result.report.steps[1].sites[0].path == "layers.2.kernel"


@pytest.mark.heavy
def test_passes_that_change_the_float_model_come_before_the_solver() -> None:
    model = nnx.Sequential(nnx.RMSNorm(16, rngs=nnx.Rngs(0)), nnx.Linear(16, 4, rngs=nnx.Rngs(1)))
    with pytest.raises(ValueError, match=r"SmoothQuant.* changes the float model"):
        Recipe(Solve(RTN()), SmoothQuant()).apply(model, RULE, [X], progress=False)
