"""Models as Flax publishes them, for device compilers: trained with every operation quantized, converted, exported."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject.odml import COMPOSITE_NAME, OdmlConversion, OdmlQat
from tests.model._flax_models import PUBLISHED, Decoder, Published, evaluate, trained

# Names of places that a model must have a quantizer at, besides its output.
PLACES = {
    "cnn": ("conv1.conv_general_dilated0_lhs", "avg_pool1", "linear2.dot_general0_rhs"),
    "decoder": ("blocks.0.attention.softmax0", "blocks.0.attention.einsum1_rhs", "norm.norm_op0"),
    "optimized_lstm": ("rnn.cell.dense_h.dot_general0_lhs", "rnn.scan_output1"),
    "resnet": ("max_pool0", "stages.1.add0_lhs", "stages.1.add0_rhs", "mean0"),
}


@dataclass(frozen=True)
class Life:
    """One model through everything, and what was seen on the way."""

    name: str
    case: Published
    model: Any
    losses: list[float]
    evaluated: jax.Array
    program: Any


pytestmark = pytest.mark.slow  # whole models are trained, converted and exported


@pytest.fixture(scope="module", params=PLACES)
def life(request: pytest.FixtureRequest) -> Any:
    case = PUBLISHED[request.param]
    with jax.numpy_dtype_promotion(case.promotion):
        plain = case.make()
        plain.train()
        inputs = (case.x, nnx.Rngs(0)) if case.rngs else (case.x,)
        model = jqinject.quantize(plain, OdmlQat(), inputs=inputs)
        losses = trained(model, case, steps=3)
        model.eval()
        converted = OdmlConversion().quantize(model, case.x)
        program = jqinject.export.stablehlo(converted, case.x)
        yield Life(request.param, case, model, losses, evaluate(model, case.x), program)


def test_training_lowers_the_loss(life: Life) -> None:
    assert np.isfinite(life.losses).all()
    assert life.losses[-1] < life.losses[0]


def test_quantizers_are_where_devices_have_them_and_see_every_step(life: Life) -> None:
    held = life.model.op_quant
    assert {*PLACES[life.name], "final_output0"} <= set(held)
    averages = [held[name].tensor_quant.scaling_impl.averaging_impl for name in held]
    counts = {int(mean.counter[...]) for mean in averages if mean is not None and not mean.policy.restart}
    assert counts <= {3, 3 * life.case.x.shape[1]}  # every turn of a loop counts
    assert 3 in counts


def test_the_exported_program_has_a_marker_for_every_quantizer_and_agrees(life: Life) -> None:
    assert life.program.text.count(f'stablehlo.composite "{COMPOSITE_NAME}"') >= len(life.model.op_quant)
    np.testing.assert_allclose(life.program.call(life.case.x), life.evaluated, atol=1e-5)


@pytest.mark.parametrize("name", ["lstm", "optimized_lstm", "gru"])
def test_what_a_cell_carries_is_an_activation_though_it_begins_as_a_constant(name: str) -> None:
    case = PUBLISHED[name]
    model: Any = OdmlQat().quantize(case.make(), case.x)
    hidden = "hi" if name == "lstm" else "dense_h"
    places = {f"rnn.cell.{hidden}.dot_general0_{side}" for side in ("lhs", "rhs")}
    assert places <= set(model.op_quant)


def test_a_mask_is_no_part_of_a_range_and_keeps_the_future_out() -> None:
    tokens = PUBLISHED["decoder"].x
    later = tokens.at[:, 4:].set((tokens[:, 4:] + 1) % 11)
    model: Any = OdmlQat().quantize(Decoder(dropout_rate=0.0, rngs=nnx.Rngs(0)), tokens)
    for _ in range(2):  # the sum of two ends of a mask would overflow
        evaluate(model, tokens)
    mean = model.op_quant["blocks.0.attention.softmax0"].tensor_quant.scaling_impl.averaging_impl
    assert -100 < float(mean.sum_of_min[...]) < 0 < float(mean.sum_of_max[...]) < 100
    model.eval()
    now, then = evaluate(model, tokens), evaluate(model, later)
    np.testing.assert_array_equal(now[:, :4], then[:, :4])
    assert not np.array_equal(now[:, 4:], then[:, 4:])


def test_random_streams_among_the_arguments_move_as_the_model_moves_them() -> None:
    case = PUBLISHED["cnn"]
    with jax.numpy_dtype_promotion(case.promotion):
        plain = case.make()
        plain.train()
        ours, theirs = nnx.Rngs(5), nnx.Rngs(5)
        model = OdmlQat().quantize(plain, case.x, nnx.Rngs(0))
        nnx.jit(lambda m, x, rngs: m(x, rngs))(model, case.x, ours)
        nnx.jit(lambda m, x, rngs: m(x, rngs=rngs))(plain, case.x, theirs)
    assert int(ours.default.count[...]) == int(theirs.default.count[...]) == 2
