"""Trained models, with data to calibrate, train and score them: each subject answers the same questions.

Calibration, training and evaluation data come from different seeds or different pictures. The models are the ports of
`examples/trained`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jqinject.quant as q

EXAMPLES = str(Path(__file__).resolve().parents[1] / "examples")
if EXAMPLES not in sys.path:
    sys.path.append(EXAMPLES)


Batch = tuple[jax.Array, ...]
"""The arguments of a call."""


@dataclass(frozen=True)
class Subject:
    """A trained model and its data.

    Attributes:
        name: of the model.
        model: the float one, in evaluation mode.
        calibration: batches that ranges, recipes and corrections see.
        evaluation: batches of one shape that nothing else sees.
        training: number of a step -> a batch for training with quantizers.
        score: a model and its outputs for `evaluation` -> percent.
        unit: what the percentage is of.
        timed: the call that is timed.
        edges: pattern of the first and last layers.
        dynamic: the quantizer of inputs in a range found at run time.
        float_edges: whether the inputs of the first and last layers are float in all rows.
    """

    name: str
    model: Any
    calibration: list[Batch]
    evaluation: list[Batch]
    training: Callable[[int], Batch]
    score: Callable[[Any, list[np.ndarray]], float]
    unit: str
    timed: Batch
    edges: str
    dynamic: Any = q.ShiftedUint8DynamicActPerTensorFloat
    float_edges: bool = False


def outputs(model: Any, batches: list[Batch]) -> list[np.ndarray]:
    """Return the arrays that a model answers, over all batches."""
    graphdef, state = nnx.split(model)
    call = jax.jit(lambda state, batch: nnx.merge(graphdef, state)(*batch))
    answers = [jax.tree.leaves(call(state, batch)) for batch in batches]
    return [np.concatenate(parts) for parts in zip(*answers, strict=True)]


def tones(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return frames (count, 1024) of tones with up to ten harmonics and 0 to 20 dB of noise, and their cents."""
    from trained import crepe

    rng = np.random.default_rng(seed)
    pitch = np.exp(rng.uniform(np.log(60), np.log(1000), (count, 1)))
    time = (np.arange(crepe.WINDOW) - crepe.WINDOW / 2) / crepe.SAMPLE_RATE
    frames = np.zeros((count, crepe.WINDOW))
    decay = rng.uniform(0.3, 1.5, (count, 1))
    for harmonic in range(1, 11):
        audible = harmonic * pitch < 0.95 * crepe.SAMPLE_RATE / 2
        loudness = audible * harmonic**-decay * rng.uniform(0.3, 1, (count, 1))
        phase = rng.uniform(0, 2 * np.pi, (count, 1))
        frames += loudness * np.sin(2 * np.pi * harmonic * pitch * time + phase)
    power = (frames**2).mean(1, keepdims=True)
    noise = power * 10 ** (-rng.uniform(0, 20, (count, 1)) / 10)
    frames += np.sqrt(noise) * rng.standard_normal(frames.shape)
    return crepe.normalized(frames), 1200 * np.log2(pitch[:, 0] / 10)


def crepe_subject() -> Subject:
    """Return the pitch tracker: frames whose pitch is within 50 cents of the tone's."""
    from trained import crepe

    frames, pitch = tones(0, 2000)

    def score(model: Any, answers: list[np.ndarray]) -> float:
        return 100 * float(np.mean(abs(np.asarray(crepe.cents(jnp.asarray(answers[0]))) - pitch) < 50))

    def batch(seed: int, count: int) -> Batch:
        return (jnp.asarray(tones(seed, count)[0]),)

    return Subject(
        "CREPE tiny",
        crepe.load(),
        [batch(1000 + seed, 20) for seed in range(4)],  # 10,240 rows for the widest layer's 8,192 columns
        [(jnp.asarray(part),) for part in np.split(frames, 20)],
        lambda step: batch(10_000 + step, 16),
        score,
        "pitch within 50 cents, %",
        (jnp.asarray(frames[:16]),),
        r"convs\.0|classifier",
    )


def picture(name: str) -> np.ndarray:
    """Return a picture (rows, columns, 3) of bytes that scikit-image ships."""
    import skimage.data

    pixels = getattr(skimage.data, name)()
    pixels = np.asarray(pixels[0] if isinstance(pixels, tuple) else pixels)
    return np.repeat(pixels[..., None], 3, 2) if pixels.ndim == 2 else pixels[..., :3]


def crops(names: tuple[str, ...], seed: int, count: int, size: int, least: float = 0.6) -> np.ndarray:
    """Return squares of each picture at random places, resized, every second one flipped: (pictures, size, size, 3).

    Args:
        names: of the pictures.
        seed: of the places.
        count: of squares from each picture.
        size: of a square's edge.
        least: edge of the smallest square, as a share of the picture's shorter edge.
    """
    from trained.detection import resized

    rng = np.random.default_rng(seed)
    squares = []
    for pixels in map(picture, names):
        shorter = min(pixels.shape[:2])
        for number in range(count):
            edge = int(shorter * rng.uniform(least, 1))
            row, column = (rng.integers(0, length - edge + 1) for length in pixels.shape[:2])
            square = resized(pixels[row : row + edge, column : column + edge].astype(np.float32), size, size)
            squares.append(square[:, ::-1] if number % 2 else square)
    return np.stack(squares)


def in_batches(size: int, *arrays: np.ndarray) -> list[Batch]:
    """Return batches of one size; what is left over is dropped."""
    starts = range(0, len(arrays[0]) - size + 1, size)
    return [tuple(jnp.asarray(x[start : start + size]) for x in arrays) for start in starts]


def efficientnet_subject(name: str = "EfficientNet-Lite0", activation: Any = nnx.relu6) -> Subject:
    """Return the classifier: crops with the float model's class, of those where its probability is above a half."""
    from trained import efficientnet_lite0

    import jqinject

    size = efficientnet_lite0.SIZE
    model = efficientnet_lite0.load(activation)
    jqinject.fold_batch_norm(model, jnp.zeros((1, size, size, 3)))
    photographs = ("chelsea", "coffee", "rocket", "camera", "clock")
    others = ("stereo_motorcycle", "coins", "moon", "grass", "gravel", "brick", "astronaut", "page")

    def prepared(names: tuple[str, ...], seed: int, count: int) -> np.ndarray:
        return efficientnet_lite0.normalized(crops(names, seed, count, size))

    candidates = in_batches(12, prepared(photographs, 0, 40))
    answers = outputs(model, candidates)[0]
    sure = np.asarray(jax.nn.softmax(answers)).max(1) > 0.5
    evaluation = in_batches(12, np.concatenate([np.asarray(x) for (x,) in candidates])[sure])
    expected = answers[sure].argmax(1)

    def score(model: Any, answers: list[np.ndarray]) -> float:
        return 100 * float(np.mean(answers[0].argmax(1) == expected[: len(answers[0])]))

    return Subject(
        name,
        model,
        in_batches(
            8, prepared(others, 1, 5)
        ),  # 1,960 rows for the widest pointwise convolution's 1,152 columns
        evaluation,
        lambda step: in_batches(4, prepared(others[step % 2 :: 2], 10 + step, 1))[0],
        score,
        "the float model's class, %",
        (evaluation[0][0][:1],),
        r"stem\.conv|classifier",
    )


def mtcnn_subject() -> Subject:
    """Return the face detector: how much its boxes have in common with the float model's."""
    import skimage.data
    from trained import detection, mtcnn

    model = mtcnn.load()
    scenes = [crops(("astronaut",), seed, 1, 320, 0.7).round().clip(0, 255) for seed in range(7)]
    scenes = [scene[0] for scene in scenes if len(detection.detect(model, scene[0], 60))]
    boxes = [detection.detect(model, scene, 60) for scene in scenes]

    def score(model: Any, answers: list[np.ndarray]) -> float:
        shares = []
        for scene, expected in zip(scenes, boxes, strict=True):
            detected = detection.detect(model, scene, 60)
            for box in expected:
                shares.append(detection.overlap(box, detected).max(initial=0.0))
        return 100 * float(np.mean(shares))

    def looks(names: tuple[str, ...], seed: int, count: int) -> list[np.ndarray]:
        views = [crops(names, seed + size, count, size, 0.15) for size in (24, 24, 48)]
        faces = np.repeat(255 * skimage.data.lfw_subset()[:100, ..., None], 3, 3)  # grey, 25 x 25
        for view in views:
            view[::2] = [
                detection.resized(faces[(seed + k) % 100], *view.shape[1:3]) for k in range(len(view[::2]))
            ]
        return [detection.normalized(view) for view in views]

    others = ("chelsea", "coffee", "rocket", "stereo_motorcycle")
    return Subject(
        "MTCNN",
        model,
        in_batches(128, *looks(others, 1, 320)),  # 1,280 rows for the widest dense layer's 1,152 columns
        in_batches(
            64, *[detection.normalized(crops(("astronaut",), 5 + n, 256, n, 0.15)) for n in (24, 24, 48)]
        ),
        lambda step: in_batches(64, *looks(others, 100 + step, 16))[0],
        score,
        "IoU with the float model's boxes, %",
        in_batches(
            16, *[detection.normalized(crops(("astronaut",), 5 + n, 16, n, 0.15)) for n in (24, 24, 48)]
        )[0],
        r".*\.convs\.0|.*\.heads\..*",
    )


def voice(speaker: int, seed: int, frames: int = 160) -> np.ndarray:
    """Return the mel spectrogram (frames, 40) of a synthetic voice: pulses through three resonances that wander.

    A speaker has a pitch, three factors of the resonances and a slope of the spectrum; an utterance its vowels. There
    is noise 10 dB below it, as in recordings: in its absence tiny changes of the encoder's weights are large ones of
    its output.
    """
    from trained import speaker as encoder

    own, rng = np.random.default_rng((7, speaker)), np.random.default_rng((11, speaker, seed))
    pitch, tract, slope = own.uniform(80, 260), own.uniform(0.85, 1.2, 3), own.uniform(0.4, 1)
    samples = encoder.STEP * (frames - 1)
    time = np.arange(samples) / encoder.SAMPLE_RATE
    vowels = 1 + rng.integers(0, 5, 13)
    formants = np.array(
        [
            [0, 0, 0],
            [730, 1090, 2440],
            [270, 2290, 3010],
            [300, 870, 2240],
            [530, 1840, 2480],
            [570, 840, 2410],
        ]
    )
    places = np.linspace(0, time[-1], len(vowels))
    tracks = [tract[k] * np.interp(time, places, formants[vowels, k]) for k in range(3)]
    melody = pitch * (1 + 0.08 * np.sin(2 * np.pi * rng.uniform(1.5, 4) * time + rng.uniform(0, 6)))
    phase = 2 * np.pi * np.cumsum(melody) / encoder.SAMPLE_RATE
    wave = np.zeros(samples)
    for harmonic in range(1, 60):
        frequency = harmonic * melody
        gain = sum(1 / (1 + ((frequency - track) / 80) ** 2) for track in tracks) + 0.03
        wave += (frequency < 7600) * gain * harmonic**-slope * np.sin(harmonic * phase)
    wave *= 0.3 + 0.7 * abs(np.sin(2 * np.pi * rng.uniform(1, 2.5) * time))
    wave += 0.3 * wave.std() * rng.standard_normal(samples)
    return encoder.mel_spectrogram(wave)[:frames]


def speaker_subject() -> Subject:
    """Return the speaker encoder: voices whose nearest other utterance is the same speaker's."""
    from trained import speaker

    count, utterances = 20, 5

    def voices(speakers: range, seeds: range) -> np.ndarray:
        return np.stack([voice(number, seed) for number in speakers for seed in seeds])

    def score(model: Any, answers: list[np.ndarray]) -> float:
        likeness = answers[0] @ answers[0].T - 2 * np.eye(len(answers[0]))
        owner = np.arange(len(answers[0])) // utterances
        return 100 * float(np.mean(owner[likeness.argmax(1)] == owner))

    pool = voices(range(500, 520), range(2))
    mels = voices(range(count), range(utterances))
    return Subject(
        "speaker encoder",
        speaker.load(),
        in_batches(20, pool),
        in_batches(20, mels),
        lambda step: (jnp.asarray(np.take(pool, range(8 * step, 8 * step + 8), 0, mode="wrap")),),
        score,
        "nearest voice is the speaker's, %",
        (jnp.asarray(mels[:4]),),
        r"layers\.0\.cell\.dense_i|linear",
        q.Int8DynamicActPerRowFloat,
        float_edges=True,  # powers of a spectrogram span decades, and 8 bits lose the quiet ones
    )


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "crepe": crepe_subject,
    "efficientnet": efficientnet_subject,
    "efficientnet-relu": partial(efficientnet_subject, "EfficientNet-Lite0 with ReLU", nnx.relu),
    "mtcnn": mtcnn_subject,
    "speaker": speaker_subject,
}
