"""The life of models as Flax publishes them: quantized by one rule, trained, calibrated, frozen, exported."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
import jqinject.quant as q
from jqinject import Rule
from jqinject.core.state import flat_parts
from tests.model._flax_models import PUBLISHED, Published, evaluate, trained

TRAINED_SCALES = Rule(weight_quant=q.Int8WeightPerChannelFloat, input_quant=q.Int8ActPerTensorFloat)
STATIC_RANGES = Rule(weight_quant=q.Int8WeightPerChannelFloat, input_quant=q.Int8ActPerTensorMinMax)
LIVES = {
    "cnn": TRAINED_SCALES,
    "decoder": STATIC_RANGES,
    "optimized_lstm": STATIC_RANGES,
    "resnet": STATIC_RANGES,
}
# The layers whose input is quantized: all with a weight but embeddings.
CONTRACTING = {"cnn": 4, "decoder": 7, "optimized_lstm": 3, "resnet": 7}


@dataclass(frozen=True)
class Life:
    """One model through everything, and what was seen on the way."""

    name: str
    case: Published
    plain: nnx.Module
    plain_before: dict[Any, np.ndarray]
    paths: set[Any]
    losses: list[float]
    calibrated: Any
    evaluated: jax.Array
    frozen: nnx.Module
    report: Any
    program: Any


def numbers(model: nnx.Module) -> dict[Any, np.ndarray]:
    """Path -> array, without the keys of random streams."""
    flat = flat_parts(nnx.state(model))
    return {p: np.asarray(v[...]) for p, v in flat if not isinstance(v, nnx.RngKey)}


pytestmark = pytest.mark.slow  # whole models are trained, calibrated, frozen and exported


@pytest.fixture(scope="module", params=LIVES)
def life(request: pytest.FixtureRequest) -> Any:
    name = request.param
    case = PUBLISHED[name]
    with jax.numpy_dtype_promotion(case.promotion):
        plain = case.make()
        before = numbers(plain)
        model = jqinject.quantize(plain, LIVES[name])
        paths = set(numbers(model))
        losses = trained(model, case, steps=6)
        calibrated = jqinject.calibrate(model, [case.x], progress=False)
        evaluated = evaluate(model, case.x)
        frozen = jqinject.freeze(model)
        yield Life(
            name=name,
            case=case,
            plain=plain,
            plain_before=before,
            paths=paths,
            losses=losses,
            calibrated=calibrated,
            evaluated=evaluated,
            frozen=frozen,
            report=jqinject.report(frozen, case.x),
            program=jqinject.export.stablehlo(frozen, case.x),
        )


def test_the_float_model_stays_and_its_paths_are_those_of_the_quantized_one(life: Life) -> None:
    jax.tree.map(np.testing.assert_array_equal, life.plain_before, numbers(life.plain))
    added = life.paths - set(life.plain_before)
    assert set(life.plain_before) <= life.paths
    assert added and all(any(str(part).endswith("_quant") for part in path) for path in added)


def test_training_lowers_the_loss(life: Life) -> None:
    assert np.isfinite(life.losses).all()
    assert life.losses[-1] < 0.98 * life.losses[0]


def test_a_float_state_loads(life: Life) -> None:
    model = jqinject.quantize(life.case.make(), LIVES[life.name])
    moved = jax.tree.map(
        lambda x: x + 0.5 if jnp.issubdtype(x.dtype, jnp.floating) else x, nnx.state(life.plain)
    )
    report = jqinject.load_state(model, moved)
    assert set(report.loaded) == {".".join(map(str, p)) for p, _ in nnx.to_flat_state(moved)}
    after = numbers(model)
    for path, value in life.plain_before.items():
        moves = jnp.issubdtype(value.dtype, jnp.floating)
        np.testing.assert_array_equal(after[path], value + np.float32(0.5) if moves else value)


def test_calibration_reaches_every_contraction(life: Life) -> None:
    assert len(life.calibrated.quantizers) == CONTRACTING[life.name]
    assert life.calibrated.batches == 1


def test_what_is_frozen_are_integers_and_serves_what_was_evaluated(life: Life) -> None:
    held = numbers(life.frozen)
    assert not any(path[-1] == "kernel" for path in held)
    payloads = [value for path, value in held.items() if path[-2:] == ("kernel", "value")]
    assert len(payloads) >= CONTRACTING[life.name]
    assert {value.dtype for value in payloads} == {np.dtype(np.int8)}
    np.testing.assert_allclose(life.program.call(life.case.x), life.evaluated, rtol=1e-5, atol=1e-5)


def test_the_report_finds_integers_in_every_contraction(life: Life) -> None:
    contracting = [layer for layer in life.report.layers if layer.operations]
    assert {layer.contraction for layer in contracting} == {"int"}
    assert len(contracting) == CONTRACTING[life.name]


def test_the_exported_program_holds_integers_and_agrees_to_the_bit(life: Life) -> None:
    assert "xi8>" in life.program.text
    np.testing.assert_array_equal(life.program.call(life.case.x), evaluate(life.frozen, life.case.x))


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_other_cells_too(name: str) -> None:
    case = PUBLISHED[name]
    with jax.numpy_dtype_promotion(case.promotion):
        model = jqinject.quantize(case.make(), STATIC_RANGES)
        assert len(jqinject.calibrate(model, [case.x], progress=False).quantizers) == (
            9 if name == "lstm" else 3
        )
        evaluated = evaluate(model, case.x)
        served = evaluate(jqinject.freeze(model), case.x)
    np.testing.assert_allclose(served, evaluated, rtol=1e-5, atol=1e-5)
