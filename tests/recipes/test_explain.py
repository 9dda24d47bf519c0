"""What a recipe would do is told before it does it."""

import jax
import pytest
from flax import nnx

from jqinject import Rule, quant
from jqinject.recipes import GPTQ, RTN, AllocateBits, Recipe, SmoothQuant, Solve

X = jax.random.normal(jax.random.key(0), (32, 8))


class Model(nnx.Module):
    def __init__(self) -> None:
        self.norm = nnx.LayerNorm(8, rngs=nnx.Rngs(0))
        self.first = nnx.Linear(8, 8, rngs=nnx.Rngs(1))
        self.table = nnx.Param(jax.random.normal(jax.random.key(2), (8, 4)))
        self.head = nnx.Linear(4, 4, rngs=nnx.Rngs(3))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(jax.nn.relu(self.first(self.norm(x))) @ (self.table.get_value() * 2))


class Counted:
    """A solver that must not run."""

    statistics = ()

    def __call__(self, problem: object) -> object:
        raise AssertionError("ran")


W4A8 = Rule(
    "first|table",
    weight_quant=quant.Int8WeightPerChannelFloat.let(bit_width=4),
    input_quant=quant.Int8ActPerTensorFloat,
)


@pytest.mark.lengthy
def test_an_explanation_is_what_apply_then_does() -> None:
    model = Model()
    recipe = Recipe(SmoothQuant(), AllocateBits(bits=(3, 4), mean_bits=4.0), Solve(RTN()))
    told = recipe.explain(model, W4A8, X)
    done = recipe.apply(model, W4A8, [X], progress=False).report
    scaled, allocated, solved = told.steps
    assert scaled.sites == done.steps[0].sites
    assert [one.path for one in allocated.sites] == [one.path for one in done.steps[1].sites if one.bits]
    assert str(allocated.sites[0]) == "first.kernel: 3 bits: 3, 4 bits: 4 bits on average"
    assert [(one.path, str(one).split(":")[0]) for one in solved.sites] == [
        (one.path, str(one).split(":")[0]) for one in done.steps[2].sites
    ]
    text = str(told)
    assert "8 factors" in text
    assert "first.dot_general0 (first.kernel): 8 x 8, Int8WeightPerChannelFloat, inputs of 8 bits" in text
    assert "dot_general0 (table): the parameter goes through mul before it is contracted" in text
    assert "table (32 numbers): it is not followed because of mul" in text
    assert "head.kernel (16 numbers): no rule matches its path" in text


def test_nothing_is_solved_to_explain() -> None:
    told = Recipe(Solve(Counted())).explain(Model(), W4A8, X)  # pyright: ignore
    assert told.steps[0].sites[0].path == "first.kernel"


def test_what_apply_refuses_explain_refuses() -> None:
    late = Recipe(Solve(GPTQ()), SmoothQuant())
    with pytest.raises(ValueError, match="a pass before it has made the quantized model"):
        late.explain(Model(), W4A8, X)
    stochastic = Rule(
        "first", weight_quant=quant.Int8WeightPerChannelFloat.let(float_to_int_impl_type="floor")
    )
    with pytest.raises(TypeError, match=r"first\.kernel: .* has no grid of its own"):
        Recipe(Solve(GPTQ())).explain(Model(), stochastic, X)
