"""The byte-level language model, its checkpoint, and the arithmetic of the table of recipes."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject.quant import Int8DynamicActPerRowFloat, TurboQuant2Act, TurboQuant3Act, TurboQuant4Act

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "benchmarks")]  # scripts import each other from there

from byte_lm import ByteLM, Corpus, Size, Training, bits_of_windows, load, save  # noqa: E402
from byte_lm.corpus import is_validation  # noqa: E402
from byte_lm.model import rotated  # noqa: E402
from byte_lm.training import Schedule  # noqa: E402

from recipe_trials.formats import FORMATS  # noqa: E402
from recipe_trials.intervals import difference, interval  # noqa: E402
from recipe_trials.orderings import Ordering  # noqa: E402
from recipe_trials.records import Records, Trial  # noqa: E402
from recipe_trials.tracks import CHECKPOINT, plant_outliers  # noqa: E402

TINY = Size(width=16, depth=1, hidden=32, heads=2)


@pytest.fixture(scope="module")
def model():
    return ByteLM(TINY, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def corpus():
    text = np.random.default_rng(0).integers(0, 256, 2_000).astype(np.uint8)
    return Corpus(text[:1_500], text[1_500:], "0" * 64, "3")


@pytest.mark.heavy
def test_a_uniform_model_takes_8_bits_a_byte(model, corpus):
    uniform = nnx.clone(model)
    uniform.head.kernel[...] = jnp.zeros_like(uniform.head.kernel[...])
    found = bits_of_windows(uniform, corpus.validation_windows(4, 8), batch=2)
    assert found.shape == (4,)
    np.testing.assert_allclose(found, 8.0, rtol=1e-6)


def test_positions_turn_by_their_distance():
    x, y = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)
    left, right = (rotated(jnp.broadcast_to(jnp.asarray(v), (1, 6, 1, 4)))[0, :, 0] for v in (x, y))
    products = np.asarray(left @ right.T)
    for distance in range(-5, 6):
        np.testing.assert_allclose(np.ptp(np.diagonal(products, distance)), 0, atol=1e-5)
    np.testing.assert_allclose(products[0, 0], x @ y, rtol=1e-5)


@pytest.mark.heavy
def test_planted_outliers_leave_the_float_function_alone(model, corpus):
    tokens = corpus.validation_windows(2, 8)
    planted = nnx.clone(model)
    channels = plant_outliers(planted, share=0.125)
    wanted, found = np.asarray(model(tokens)), np.asarray(planted(tokens))
    assert np.linalg.norm(found - wanted) <= 1e-5 * np.linalg.norm(wanted)
    ratios = planted.blocks[0].mlp_norm.scale[...] / model.blocks[0].mlp_norm.scale[...]
    assert len(set(channels.tolist())) == 2
    assert np.flatnonzero(np.asarray(ratios) > 29).tolist() == sorted(channels.tolist())


class Cached(nnx.Module):
    """The language model with a cache of keys and values."""

    def __init__(self, lm):
        self.lm = lm

    def __call__(self, tokens, cache):
        x, after = self.lm.embedding(tokens), {}
        for number, block in enumerate(self.lm.blocks):
            y, attention, rows = block.attention_norm(x), block.attention, cache[f"block_{number}"]
            query, key, value = (
                layer(y).reshape(*y.shape[:-1], attention.heads, -1)
                for layer in (attention.query, attention.key, attention.value)
            )
            new = {"k": rotated(key), "v": value}
            rows = {name: jax.lax.dynamic_update_slice(rows[name], new[name], (0,) * 4) for name in new}
            after[f"block_{number}"] = rows
            mixed = jax.nn.dot_product_attention(rotated(query), rows["k"], rows["v"], is_causal=True)
            x = x + attention.out(mixed.reshape(x.shape))
            x = x + block.mlp(block.mlp_norm(x))
        return self.lm.head(self.lm.norm(x)), after


@pytest.mark.heavy
def test_greedy_bytes_of_the_trained_model_with_caches_in_low_bits():
    model = Cached(load(CHECKPOINT))
    text = np.frombuffer(Path(json.__file__).read_bytes()[: 8 * 128], np.uint8)
    tokens = jnp.asarray(text.reshape(8, 128), jnp.int32)
    size = model.lm.size
    rows = jnp.zeros((8, 128, size.heads, size.width // size.heads))
    empty = {f"block_{number}": {"k": rows, "v": rows} for number in range(size.depth)}
    wanted = model.lm(tokens)
    quantizers = {2: TurboQuant2Act, 3: TurboQuant3Act, 4: TurboQuant4Act, 8: Int8DynamicActPerRowFloat}
    agreement, noise = {}, {}
    for bits, quantizer in quantizers.items():
        quantized = jqinject.quantize(model, jqinject.Rule(cache_quant=quantizer), inputs=(tokens, empty))
        cache = jqinject.quantized_cache(quantized, empty)
        found, after = nnx.jit(lambda model, *inputs: model(*inputs))(quantized, tokens, cache)
        assert after["block_0"]["k"].nbytes == rows.size // 32 * (32 * bits // 8 + 4)
        agreement[bits] = float((found.argmax(-1) == wanted.argmax(-1)).mean())
        noise[bits] = float(jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted))
    assert noise[2] > 1.5 * noise[3] > 2.25 * noise[4] > noise[8]
    assert agreement[2] < agreement[3] < agreement[4] < agreement[8]
    assert agreement[4] > 0.92 and agreement[8] > 0.98


@pytest.mark.heavy
def test_a_checkpoint_is_within_half_a_step(model, tmp_path):
    save(model, tmp_path / "lm.npz")
    found = load(tmp_path / "lm.npz")
    assert found.size == TINY
    for name, wanted in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        other = np.asarray(dict(nnx.to_flat_state(nnx.state(found, nnx.Param)))[name][...])
        wanted = np.asarray(wanted[...])
        assert (abs(other - wanted) <= abs(wanted).max() / 127 / 2 * 1.01).all(), name


@pytest.mark.heavy
def test_the_shipped_checkpoint_predicts_python():
    assert CHECKPOINT.stat().st_size < 1.5e6
    text = (ROOT / "jqinject" / "terminal.py").read_bytes()[: 4 * 129]
    windows = jnp.asarray(np.frombuffer(text, np.uint8).reshape(4, 129).astype(np.int32))
    assert bits_of_windows(load(CHECKPOINT), windows, batch=4).mean() < 3


@pytest.mark.heavy
def test_training_goes_on_where_it_stopped(corpus, tmp_path):
    schedule = Schedule(steps=3, batch=2, context=8)

    def fresh():
        return Training(ByteLM(TINY, rngs=nnx.Rngs(0)), schedule, corpus)

    whole, first, second = fresh(), fresh(), fresh()
    with jax.numpy_dtype_promotion("standard"):  # optax counts in integers
        whole.run()
        first.run(until=2)
        first.save(tmp_path / "state")
        second.resume(tmp_path / "state")
        second.run()
    assert second.done == 3
    for wanted, found in zip(*(jax.tree.leaves(nnx.state(t.model)) for t in (whole, second)), strict=True):
        np.testing.assert_array_equal(found, wanted)
    other = Training(ByteLM(TINY, rngs=nnx.Rngs(0)), Schedule(context=4), corpus)
    with pytest.raises(ValueError, match="cure: another file"):
        other.resume(tmp_path / "state")


def test_batches_depend_on_the_step_alone(corpus):
    np.testing.assert_array_equal(corpus.batch(5, 2, 8, 0), corpus.batch(5, 2, 8, 0))
    assert not np.array_equal(corpus.batch(5, 2, 8, 0), corpus.batch(6, 2, 8, 0))


def test_files_are_split_by_their_paths():
    names = [f"package/module_{i}.py" for i in range(2_000)]
    assert 0.04 < np.mean([is_validation(name) for name in names]) < 0.09
    assert is_validation("argparse.py") == is_validation("argparse.py")


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("W3A16", 3 + (32 + 3) / 128),
        ("W4A4", 4 + 32 * 20 / (256 * 20)),
        ("MXFP4", 4 + 8 / 32),
        ("NVFP4", 4 + 8 / 16),
    ],
)
def test_bits_count_scales(name, wanted):
    assert FORMATS[name].effective_bits([(256, 10), (256, 10)]) == wanted


def test_intervals_and_orderings():
    scores = np.random.default_rng(0).normal(2.0, 1.0, (3, 200))
    found = interval(scores)
    assert found.low < found.mean < found.high
    assert 0.05 < found.high - found.low < 1.0
    better = scores[:1] - 0.1  # one seed stands for all
    assert difference(scores[:1], better).low == pytest.approx(0.1)
    cells = {("t", "f", "good"): better, ("t", "f", "bad"): scores[:1], ("t", "f", "same"): scores[:1]}

    def verdict(better, worse):
        return Ordering("", ("t", "f", better), ("t", "f", worse)).verdict(cells.get)[0]

    assert verdict("good", "bad") == "seen"
    assert verdict("bad", "good") == "not seen"
    assert verdict("same", "bad") == "within noise"
    assert verdict("absent", "bad") == "not measured"


def test_records_are_gone_on_with_only_under_the_same_settings(tmp_path):
    file = tmp_path / "trials.json"
    trial = Trial("natural", "W3A16", "RTN", 0, (1.0, 2.0), 0.5, 3.25)
    Records.at(file, {"windows": 2}).add(trial)
    again = Records.at(file, {"windows": 2})
    assert again.trials == {trial.key: trial}
    assert again.scores(trial.key[:3]).tolist() == [[1.0, 2.0]]
    with pytest.raises(ValueError, match="cure: another --json file"):
        Records.at(file, {"windows": 4})
