"""Equalization by weights, biases and activations, and the splitting of channels, against their formulas."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject import Rule
from jqinject.quant import Int8WeightPerChannelFloat
from jqinject.recipes import Equalize, Recipe, SmoothQuant, SplitChannels
from jqinject.recipes.passes.equalize import shrinkage_of

X = jax.random.normal(jax.random.key(2), (6, 8))
RULE = Rule(weight_quant=Int8WeightPerChannelFloat)


class Heads(nnx.Module):
    """An MLP of bare parameters whose hidden channels are heads of 4, then a layer of Flax, and a norm before it."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Param(jax.random.normal(rngs(), (8, 12)))
        self.shift = nnx.Param(jnp.linspace(-1, 1, 12))
        self.heads = True
        self.down = nnx.Param(jax.random.normal(rngs(), (12, 8)))
        self.norm = nnx.RMSNorm(8, rngs=rngs)
        self.out = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(x @ self.up[...] + self.shift[...])
        if self.heads:
            x = x.reshape(-1, 3, 4).reshape(-1, 12)
        return self.out(self.norm(x @ self.down[...]))


def floating(model: Any, *passes: Any, x: Any = X) -> tuple[Any, list[Any]]:
    """The float model after passes, and what the last of them did."""
    kept: list[Any] = []

    def keep(work: Any) -> list[Any]:
        kept.append(work.model)
        return []

    report = Recipe(*passes, keep).apply(model, RULE, [x], progress=False).report
    return kept[0], list(report.steps[-2].sites)


def chain(activation: Any = nnx.relu) -> Any:
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(8, 10, rngs=rngs), activation, nnx.Linear(10, 4, rngs=rngs))
    model.layers[0].bias.set_value(jnp.linspace(-1, 30, 10))  # pyright: ignore
    return model


@pytest.mark.heavy
def test_biases_count_in_the_ranges_that_equalize_makes_the_same() -> None:
    model, (done, *_) = floating(chain(), Equalize(biases=4.0))
    first, bias, second = (
        np.asarray(x) for x in (model.layers[0].kernel, model.layers[0].bias, model.layers[2].kernel)
    )
    making = np.maximum(np.abs(first).max(axis=0), np.abs(bias) / 4)
    np.testing.assert_allclose(making, np.abs(second).max(axis=1), rtol=1e-5)
    assert "layers.0.bias" in done.facts["folded"]


@pytest.mark.parametrize(
    ("bias", "weights", "expected"),
    [(9.0, 0.5, 2), (9.0, 0.05, 20), (200.0, 1.0, 20), (20.0, 1.0, 10), (10.0, 1.0, 5)],
)
def test_shrinkage_goes_by_the_sizes_of_biases(bias: float, weights: float, expected: float) -> None:
    rows = np.full((2, 3), weights, np.float32)
    assert shrinkage_of(np.float32([bias, -bias]), rows) == expected


def test_shrinkage_goes_by_the_weights_that_are_small_too() -> None:
    assert shrinkage_of(np.float32([5.0]), np.float32([[0.5, 0.001, 0.0]])) == 5


@pytest.mark.heavy
def test_ranges_of_makers_take_part_in_smooth_quant() -> None:
    model = chain()
    made, _ = floating(model, SmoothQuant(alpha=0.3, with_sources=True))
    first, second = (np.asarray(model.layers[place].kernel) for place in (0, 2))
    hidden = np.asarray(nnx.relu(model.layers[0](X))).max(axis=0)
    scale = ((hidden + np.abs(first).max(axis=0)) / 2) ** 0.3 / np.abs(second).max(axis=1) ** 0.7
    np.testing.assert_allclose(made.layers[2].kernel, second * scale[:, None], rtol=1e-4)


FACTORS = {
    "power": (SmoothQuant(alpha=0.3), lambda high, low, w: np.maximum(high, -low) ** 0.3 / w**0.7),
    "default": (SmoothQuant(), lambda high, low, w: np.sqrt(np.maximum(high, -low) / w)),
    "ranges": (
        SmoothQuant(alpha=0.3, ranges="minmax"),
        lambda high, low, w: (high - low) ** 0.3 / (2 * w) ** 0.7,
    ),
    "log": (
        SmoothQuant(formula="log"),
        lambda high, low, w: np.maximum(high, -low) / np.log2(2 + np.maximum(high, -low)),
    ),
}


@pytest.mark.heavy
@pytest.mark.parametrize(("smooth", "factor"), FACTORS.values(), ids=FACTORS)
def test_smooth_quant_divides_inputs_and_multiplies_weights_by_its_formula(smooth: Any, factor: Any) -> None:
    """Xiao et al., equation 4: `max |x|^alpha / max |w|^(1 - alpha)` of each channel; llm-compressor's two variants."""
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.LayerNorm(8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs))
    norm, layer = model.layers
    norm.bias.set_value(jnp.linspace(-3, 1, 8))  # pyright: ignore
    seen, weights = np.asarray(norm(X)), np.asarray(layer.kernel[...])  # pyright: ignore
    expected = factor(seen.max(axis=0), seen.min(axis=0), np.abs(weights).max(axis=1))
    made, _ = floating(model, smooth)
    np.testing.assert_allclose(made.layers[1].kernel, weights * expected[:, None], rtol=1e-4)
    np.testing.assert_allclose(made.layers[0].scale, 1 / expected, rtol=1e-4)


@pytest.mark.heavy
@pytest.mark.parametrize("split_input", [True, False])
def test_split_channels_are_halved_on_one_side_and_copied_on_the_other(split_input: bool) -> None:
    model = chain()
    made, (done, *_) = floating(model, SplitChannels(0.25, split_input))
    sizes = np.abs(np.asarray(model.layers[2 if split_input else 0].kernel)).max(axis=1 if split_input else 0)
    assert done.facts["channels"] == tuple(sorted(np.argsort(-sizes)[:3]))
    first, second = (np.asarray(made.layers[place].kernel) for place in (0, 2))
    bias, chosen = np.asarray(made.layers[0].bias), list(done.facts["channels"])
    np.testing.assert_array_equal(first[:, 10:], first[:, chosen])
    np.testing.assert_array_equal(second[10:], second[chosen])
    np.testing.assert_array_equal(bias[10:], bias[chosen])
    halved, whole = (second[chosen], first[:, chosen]) if split_input else (first[:, chosen], second[chosen])
    before = [np.asarray(model.layers[place].kernel) for place in (0, 2)]
    np.testing.assert_array_equal(halved * 2, before[1][chosen] if split_input else before[0][:, chosen])
    np.testing.assert_array_equal(whole, before[0][:, chosen] if split_input else before[1][chosen])
    assert (made.layers[0].out_features, made.layers[2].in_features) == (13, 13)
    np.testing.assert_allclose(made(X), model(X), rtol=1e-5, atol=1e-5)


@pytest.mark.heavy
def test_channels_of_bare_parameters_are_split_unless_the_code_goes_by_their_number() -> None:
    model = Heads(nnx.Rngs(0))
    same, sites = floating(model, SplitChannels(0.25))
    reasons = {each.path.partition(".")[0]: each.reason for each in sites if each.reason}
    assert same.up.shape == (8, 12) and "depends on the number of its channels" in reasons["down"]
    assert "norm's gain" in reasons["out"]
    model.heads = False
    made, sites = floating(model, SplitChannels(0.25))
    assert (made.up.shape, made.shift.shape, made.down.shape) == ((8, 15), (15,), (15, 8))
    assert not sites[0].reason


@pytest.mark.heavy
def test_convolutions_are_split_unless_they_have_groups() -> None:
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        nnx.Conv(8, 6, (3, 3), rngs=rngs),
        nnx.relu,
        nnx.Conv(6, 6, (3, 3), rngs=rngs),
        nnx.relu,
        nnx.Conv(6, 6, (3, 3), feature_group_count=2, rngs=rngs),
    )
    made, sites = floating(model, SplitChannels(0.5), x=jnp.ones((1, 4, 4, 8)))
    kernels = [made.layers[place].kernel.shape for place in (0, 2, 4)]
    assert kernels == [(3, 3, 8, 9), (3, 3, 9, 6), (3, 3, 3, 6)]
    assert any("groups" in each.reason for each in sites if each.reason)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: Equalize(biases=-1.0), "biases must be a number above 0, 'vaiq' or None, got -1.0"),
        (lambda: Equalize(biases="half"), "biases must be a number above 0, 'vaiq' or None, got 'half'"),  # pyright: ignore
        (lambda: SmoothQuant(formula="ln"), "formula must be 'power' or 'log', got 'ln'"),  # pyright: ignore
        (lambda: SplitChannels(0.0), "ratio must be above 0 and at most 1, got 0.0"),
    ],
)
def test_wrong_choices_are_refused(wrong: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        wrong()


@pytest.mark.heavy
def test_factors_before_inputs_are_served_or_the_reason_is_named() -> None:
    class Bare(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jax.random.normal(jax.random.key(0), (8, 4)))

        def __call__(self, x: jax.Array) -> jax.Array:
            return x @ self.w[...]

    model, recipe = Bare(), Recipe(SmoothQuant(online="all"))
    result = recipe.apply(model, RULE, [X], progress=False)
    assert "kept online" in str(result.report)
    np.testing.assert_allclose(result.model(X), model(X), rtol=0.05, atol=0.05)
    with pytest.raises(ValueError, match="no layer"):  # nothing is traced, and the model has no layers
        recipe.apply(model, RULE, [X], progress=False, call=lambda model, x: model(x))
