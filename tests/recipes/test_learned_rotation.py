"""Learned rotations: orthogonal at every step, and better for the quantized model without moving the float one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject import Rule
from jqinject.quant import Int8DynamicActPerRowAbsMax, Int8WeightPerChannelFloat
from jqinject.recipes import LearnedRotation, Recipe
from jqinject.recipes.passes.descent import cayley_step

W4A4 = Rule(
    weight_quant=Int8WeightPerChannelFloat,
    weight_bit_width=4,
    input_quant=Int8DynamicActPerRowAbsMax,
    input_bit_width=4,
)


@pytest.mark.heavy
@pytest.mark.parametrize("keeps_sums", [False, True])
def test_every_step_is_orthogonal(keeps_sums: bool) -> None:
    step = jax.jit(cayley_step, static_argnums=3)
    matrix = jnp.eye(12)
    for key in jax.random.split(jax.random.key(0), 40):
        matrix = step(matrix, jax.random.normal(key, (12, 12)), jnp.float32(0.3), keeps_sums)
        np.testing.assert_allclose(matrix.T @ matrix, np.eye(12), atol=1e-5)
        if keeps_sums:
            np.testing.assert_allclose(matrix @ np.ones(12), np.ones(12), atol=1e-5)
    assert float(jnp.abs(matrix - jnp.eye(12)).max()) > 0.2


class Stream(nnx.Module):
    """A residual stream with an outlier channel."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.into = nnx.Linear(6, 16, rngs=rngs)
        self.into.kernel[...] = self.into.kernel[...].at[:, 3].multiply(20.0)
        self.norm = nnx.RMSNorm(16, use_scale=False, rngs=rngs)
        self.up, self.down = nnx.Linear(16, 24, rngs=rngs), nnx.Linear(24, 16, rngs=rngs)
        self.last = nnx.RMSNorm(16, use_scale=False, rngs=rngs)
        self.head = nnx.Linear(16, 5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.into(x)
        x = x + self.down(nnx.relu(self.up(self.norm(x))))
        return self.head(self.last(x))


@pytest.mark.heavy
def test_the_quantized_outputs_come_nearer_and_the_float_ones_stay() -> None:
    batches = [jax.random.normal(jax.random.key(seed), (32, 6)) for seed in range(2)]
    result = Recipe(LearnedRotation(steps=20, learning_rate=0.2)).apply(
        Stream(nnx.Rngs(0)), [Rule("into"), W4A4], batches, progress=False
    )
    (learned,) = (each for each in result.report.steps[0].sites if not each.reason)
    assert learned.name == "R1 of 16"
    assert learned.facts["after"] < 0.85 * learned.facts["before"]
    wanted, found = (
        jnp.concatenate([model(x) for x in batches]) for model in (Stream(nnx.Rngs(0)), result.model)
    )
    off = float(jnp.square(found - wanted).sum() / jnp.square(wanted).sum())
    assert off == pytest.approx(learned.facts["after"], rel=0.3)


@pytest.mark.heavy
def test_steps_that_make_nothing_better_change_nothing() -> None:
    batches = [jax.random.normal(jax.random.key(0), (4, 6))]
    passes = LearnedRotation(steps=1, learning_rate=1e-30)
    result = Recipe(passes).apply(Stream(nnx.Rngs(0)), W4A4, batches, progress=False)
    (told,) = (site for site in result.report.steps[0].sites if "steps" in site.facts)
    assert told.facts["steps"] == 0 and told.facts["after"] == told.facts["before"]
    assert "after 0 steps" in str(result.report)
    np.testing.assert_array_equal(result.model.up.kernel[...], Stream(nnx.Rngs(0)).up.kernel[...])


def test_a_model_without_a_stream_is_told() -> None:
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    result = Recipe(LearnedRotation(steps=1)).apply(model, W4A4, [jnp.ones((2, 4))], progress=False)
    assert "no residual stream and no values between two weights can be rotated" in str(result.report)


@pytest.mark.parametrize("settings", [{"kinds": ("R4",)}, {"steps": 0}, {"learning_rate": 2.0}])
def test_settings_that_make_no_sense_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="cure"):
        LearnedRotation(**settings)  # pyright: ignore[reportArgumentType]
