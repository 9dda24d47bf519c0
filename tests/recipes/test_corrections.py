"""Corrections of biases and of batch normalizations: the means of outputs come back, wherever the bias stands."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject import Rule
from jqinject.quant import Int8ActPerTensorAbsMax, Int8WeightPerChannelFloat
from jqinject.recipes import (
    RTN,
    CorrectBatchNorm,
    CorrectBiases,
    FoldBatchNorm,
    LowRank,
    Recipe,
    Solve,
    TweakNorms,
)
from jqinject.recipes.quantized_parameter import quantized_parameters

X = jax.random.normal(jax.random.key(0), (48, 8)) + 1
RULE = Rule(weight_quant=Int8WeightPerChannelFloat.let(bit_width=3), input_quant=Int8ActPerTensorAbsMax)


class Bare(nnx.Module):
    """Parameters of the model's own, contracted by einsum; the first has a bias, the second has none."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.w = nnx.Param(jax.random.normal(rngs(), (8, 2, 4)))
        self.b = nnx.Param(jnp.linspace(-1, 1, 8).reshape(2, 4))
        self.o = nnx.Param(jax.random.normal(rngs(), (2, 4, 8)) / 3)

    def __call__(self, x: jax.Array) -> jax.Array:
        heads = jnp.einsum("bd,dhk->bhk", x, self.w[...]) + self.b[...]
        return x + jnp.einsum("bhk,hkd->bd", nnx.relu(heads), self.o[...])


class Stack(nnx.Module):
    """Three blocks in a loop."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def made(rngs: nnx.Rngs) -> Bare:
            return Bare(rngs)

        self.blocks = made(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def loop(block: Bare, x: jax.Array) -> jax.Array:
            return block(x)

        return loop(self.blocks, x)


def applied(model: Any, *passes: Any, batches: Any = (X,), rule: Any = RULE) -> Any:
    return Recipe(*passes).apply(model, rule, list(batches), progress=False)


def shift(model: Any, result: Any, batches: Any = (X,)) -> float:
    return _shift(model, result.model, batches)


def _shift(model: Any, other: Any, batches: Any) -> float:
    moved = [np.asarray(other(x) - model(x), np.float32).mean(axis=0) for x in batches]
    return float(np.abs(np.mean(moved, axis=0)).max())


@pytest.mark.lengthy
def test_every_output_gets_its_mean_back_when_sites_see_the_quantized_model() -> None:
    model = nnx.Sequential(nnx.Linear(8, 6, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(6, 4, rngs=nnx.Rngs(1)))
    batches = X[:24], X[24:]
    shifts: list[float] = []
    corrections = [CorrectBiases(inputs="quantized")] * 2
    Recipe(Solve(RTN()), *corrections).apply(
        model,
        RULE,
        batches,
        progress=False,
        evaluate=lambda each: shifts.append(_shift(model, each, batches)) or 0.0,
    )
    assert shifts[0] > 0.05
    assert shifts[1] < 1e-5 and shifts[2] == shifts[1], "a second correction changes nothing"


@pytest.mark.heavy
def test_batches_of_two_shapes_are_one_mean() -> None:
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    parts = X[:40], X[40:]
    result = applied(model, CorrectBiases(), batches=parts)
    errors = [np.asarray(model(x) - applied(model, batches=parts).model(x)).mean(axis=0) for x in parts]
    expected = np.asarray(model.bias) + np.mean(errors, axis=0)
    np.testing.assert_allclose(result.model.bias, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.heavy
def test_the_bias_of_a_models_own_einsum_is_found_and_a_missing_one_is_named() -> None:
    model = Bare(nnx.Rngs(0))
    rule = Rule(weight_quant=Int8WeightPerChannelFloat.let(bit_width=3))
    result = applied(model, CorrectBiases(), rule=rule)
    done, left = result.report.steps[0].sites
    assert (done.path, left.path) == ("b", "o") and "keeps its shifted mean" in str(left)
    quantized = quantized_parameters(result.model)["w"].quantized(model.w.get_value()).value
    wanted = jnp.einsum("bd,dhk->hk", X, model.w[...] - quantized) / len(X) + model.b[...]
    np.testing.assert_allclose(result.model.b, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.heavy
def test_every_block_of_a_loop_has_its_own_correction() -> None:
    model = Stack(nnx.Rngs(1))
    rule = Rule(weight_quant=Int8WeightPerChannelFloat.let(bit_width=4))
    result = applied(model, CorrectBiases(), rule=rule)
    done = [each for each in result.report.steps[0].sites if not each.reason]
    assert [each.name for each in done] == [f"blocks.einsum0[{turn}]" for turn in range(3)]
    moved = np.abs(np.asarray(result.model.blocks.b - model.blocks.b)).max(axis=(1, 2))
    assert (moved > 1e-3).all() and len(set(moved)) == 3


@pytest.mark.heavy
def test_a_layer_without_a_bias_gets_one_as_in_brevitas_or_is_named() -> None:
    model = nnx.Sequential(nnx.Linear(8, 4, use_bias=False, rngs=nnx.Rngs(0)))
    added, left = applied(model, Solve(RTN()), CorrectBiases()), applied(model, CorrectBiases(add=False))
    assert shift(model, added) < 1e-5 < shift(model, left)
    assert "which is new" in str(added.report.steps[1]) and added.model.layers[0].bias.shape == (4,)
    assert left.report.steps[0].sites[0].reason
    assert model.layers[0].bias is None and left.model.layers[0].bias is None


@pytest.mark.heavy
@pytest.mark.parametrize("inputs", ["float", "quantized"])
def test_what_a_low_rank_product_adds_is_part_of_the_output(inputs: Any) -> None:
    model = nnx.Sequential(nnx.Linear(8, 4, rngs=nnx.Rngs(0)))
    plain = applied(model, LowRank(2))
    assert shift(model, applied(model, LowRank(2), CorrectBiases(inputs))) < 1e-5 < shift(model, plain)


@pytest.mark.heavy
def test_a_bias_of_16_bits_stays_one() -> None:
    model = nnx.Linear(8, 4, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    x = X.astype(jnp.bfloat16)
    result = applied(model, CorrectBiases(), batches=(x,))
    assert result.model.bias.dtype == jnp.bfloat16
    assert shift(model, result, (x,)) < 0.5 * shift(model, applied(model, batches=(x,)), (x,))


class Branching(nnx.Module):
    """A bias that small batches do without, and one that all have."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.w, self.v = (nnx.Param(jax.random.normal(rngs(), (8, 8))) for _ in range(2))
        self.b, self.c = (nnx.Param(jnp.zeros(8)) for _ in range(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x @ self.w[...]
        y = y + self.b[...] if x.shape[0] > 8 else y
        return y @ self.v[...] + self.c[...]


@pytest.mark.heavy
@pytest.mark.parametrize("inputs", ["float", "quantized"])
def test_a_batch_whose_program_adds_no_bias_goes_on_as_it_is(inputs: Any) -> None:
    model = Branching(nnx.Rngs(0))
    first, second = applied(model, CorrectBiases(inputs), batches=(X, X[:8])).report.steps[0].sites
    assert (first.path, second.path) == ("b", "c")


@pytest.mark.heavy
def test_batch_norms_get_the_statistics_of_the_quantized_model() -> None:
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(8, 6, rngs=rngs), nnx.BatchNorm(6, rngs=rngs))
    model.train()
    for _ in range(200):
        model(X)
    model.eval()
    measured = applied(model, CorrectBatchNorm())
    hidden = np.asarray(measured.model.layers[0](X))
    norm, before = measured.model.layers[1], model.layers[1]
    np.testing.assert_allclose(norm.mean, hidden.mean(axis=0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(norm.var, hidden.var(axis=0), rtol=1e-4)
    geometric = applied(model, CorrectBatchNorm(variance="geometric")).model.layers[1].var
    np.testing.assert_allclose(geometric, np.sqrt(np.asarray(before.var) * hidden.var(axis=0)), rtol=1e-4)  # pyright: ignore


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: CorrectBiases(inputs="both"), "inputs must be 'float' or 'quantized', got 'both'"),  # pyright: ignore
        (lambda: CorrectBatchNorm(variance="mean"), "variance must be 'measured' or 'geometric', got 'mean'"),  # pyright: ignore
        (
            lambda: applied(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), CorrectBatchNorm()),
            "has no nnx.BatchNorm",
        ),
    ],
)
def test_wrong_choices_are_refused(wrong: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        wrong()


class Residual(nnx.Module):
    """Rows of a table, and what a parameter makes of them: the sum of both is no bias."""

    def __init__(self) -> None:
        self.table = nnx.Embed(8, 4, rngs=nnx.Rngs(0))
        self.w = nnx.Param(jax.random.normal(jax.random.key(0), (4, 4)))

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.table(ids)
        return x + jnp.einsum("bd,de->be", x, self.w[...])


@pytest.mark.heavy
def test_rows_of_a_table_are_no_bias() -> None:
    rule = Rule("w", weight_quant=Int8WeightPerChannelFloat)
    result = Recipe(CorrectBiases()).apply(Residual(), [rule, Rule("table")], [jnp.arange(8)])
    assert "no parameter is added to its output" in str(result.report)


class Normed(nnx.Module):
    """A norm before a layer of few bits."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm, self.fc = nnx.RMSNorm(8, rngs=rngs), nnx.Linear(8, 6, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc(self.norm(x))


@pytest.mark.heavy
def test_norms_are_tweaked_until_the_channels_have_their_distribution_back() -> None:
    rule = Rule(weight_quant=Int8WeightPerChannelFloat.let(bit_width=2))
    model, batches = Normed(nnx.Rngs(0)), [X, X + 0.1]
    result = Recipe(Solve(RTN()), TweakNorms(steps=40, learning_rate=0.02)).apply(
        model, rule, batches, progress=False
    )
    (tweaked,) = result.report.steps[1].sites
    assert tweaked.name == "norm.scale"
    assert tweaked.facts["after"] < 0.8 * tweaked.facts["before"]

    def distance(served: nnx.Module) -> float:
        found, wanted = (np.asarray(each(X), np.float64) for each in (served, model))  # pyright: ignore
        return float(
            np.abs(found.mean(0) - wanted.mean(0)).mean() + np.abs(found.var(0) - wanted.var(0)).mean()
        )

    plain = Recipe(Solve(RTN())).apply(model, rule, batches, progress=False)
    assert distance(result.model) < distance(plain.model)
    np.testing.assert_array_equal(model.norm.scale[...], np.ones(8))  # pyright: ignore


@pytest.mark.heavy
def test_a_model_without_gains_is_told() -> None:
    result = Recipe(Solve(RTN()), TweakNorms(steps=1)).apply(Bare(nnx.Rngs(0)), RULE, [X], progress=False)
    assert "no gains" in str(result.report)


@pytest.mark.heavy
def test_batch_norms_are_folded_before_and_after_rounding() -> None:
    norm = nnx.BatchNorm(6, rngs=nnx.Rngs(0))
    norm.mean[...], norm.var[...] = jnp.linspace(-1, 1, 6), jnp.linspace(0.5, 4, 6)
    model = nnx.Sequential(nnx.Linear(8, 6, rngs=nnx.Rngs(0)), norm, nnx.Linear(6, 4, rngs=nnx.Rngs(1)))
    model.eval()
    before = applied(model, FoldBatchNorm(), Solve(RTN()))
    after = applied(model, Solve(RTN()), FoldBatchNorm(pairs=(("layers.0", "layers.1"),)))
    for result, step in ((before, 0), (after, 1)):
        assert str(result.report.steps[step]).endswith("\n  layers.1: in layers.0")
        np.testing.assert_allclose(result.float_model(X), model(X), atol=1e-5)
        assert type(model.layers[1]) is nnx.BatchNorm
    # Rounded before: the codes stay, and the committed scales follow the factors of the channels.
    plain, folded = applied(model, Solve(RTN())).model.layers[0], after.model.layers[0]
    np.testing.assert_array_equal(folded.quant_weight().int(), plain.quant_weight().int())
    factors = np.asarray(1 / np.sqrt(norm.var[...] + norm.epsilon))
    np.testing.assert_allclose(folded.quant_weight().scale, plain.quant_weight().scale * factors, rtol=1e-6)
    with pytest.raises(ValueError, match="nothing to merge"):
        applied(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), FoldBatchNorm())
