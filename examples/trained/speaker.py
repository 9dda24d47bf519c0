"""Resemblyzer's speaker encoder: a voice in 256 numbers, by three LSTM layers and a dense one.

Weights: `resemblyzer/pretrained.pt` of the package Resemblyzer. Wan, Wang, Papir, Moreno: Generalized End-to-End Loss
for Speaker Verification, 2018 (arXiv:1710.10467).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trained.weights import fill_linear, package_file, read_torch

SAMPLE_RATE = 16_000
MELS = 40
HIDDEN = 256
WINDOW, STEP = 400, 160
"""Samples of a frame of the spectrogram, and from one frame to the next."""


class SpeakerEncoder(nnx.Module):
    """Map mel spectrograms (batch, frames, 40) to embeddings (batch, 256) of length 1."""

    def __init__(self, *, rngs: nnx.Rngs):
        sizes = (MELS, HIDDEN, HIDDEN)
        self.layers = nnx.List([nnx.RNN(nnx.OptimizedLSTMCell(size, HIDDEN, rngs=rngs)) for size in sizes])
        self.linear = nnx.Linear(HIDDEN, HIDDEN, rngs=rngs)

    def __call__(self, mels: jax.Array) -> jax.Array:
        """Return the embeddings, of the last frame's state."""
        x = mels
        for layer in self.layers:
            x = layer(x)
        x = nnx.relu(self.linear(x[:, -1]))
        return x / jnp.linalg.norm(x, axis=1, keepdims=True)


def load() -> SpeakerEncoder:
    """Return the trained model, in evaluation mode."""
    path = package_file("resemblyzer", "pretrained.pt", "Resemblyzer==0.1.4")
    arrays = read_torch(path, "model_state")
    model = SpeakerEncoder(rngs=nnx.Rngs(0))
    for number, layer in enumerate(model.layers):
        cell = layer.cell  # both have the gates in the order input, forget, cell, output
        cell.dense_i.kernel[...] = arrays[f"lstm.weight_ih_l{number}"].T
        cell.dense_h.kernel[...] = arrays[f"lstm.weight_hh_l{number}"].T
        cell.dense_h.bias[...] = arrays[f"lstm.bias_ih_l{number}"] + arrays[f"lstm.bias_hh_l{number}"]
    fill_linear(model.linear, arrays, "linear")
    model.eval()
    return model


def mel_filters() -> np.ndarray:
    """Return the weights (40, 201) of triangles on Slaney's mel scale, each of area 1 over frequency."""
    # Linear below 1 kHz (200 / 3 Hz a mel), then 27 steps for a factor of 6.4.
    corner, log_step = 1000.0 / (200.0 / 3), np.log(6.4) / 27

    def to_mel(hertz: float) -> float:
        return hertz * 3 / 200 if hertz < 1000 else corner + np.log(hertz / 1000) / log_step

    mels = np.linspace(0, to_mel(SAMPLE_RATE / 2), MELS + 2)
    edges = np.where(mels < corner, mels * 200 / 3, 1000 * np.exp(log_step * (mels - corner)))
    bins = np.linspace(0, SAMPLE_RATE / 2, WINDOW // 2 + 1)
    rising = (bins - edges[:-2, None]) / np.diff(edges)[:-1, None]
    falling = (edges[2:, None] - bins) / np.diff(edges)[1:, None]
    return np.maximum(0, np.minimum(rising, falling)) * (2 / (edges[2:] - edges[:-2]))[:, None]


def mel_spectrogram(wave: np.ndarray) -> np.ndarray:
    """Return the mel power spectrogram (frames, 40) of 16 kHz sound (samples,), raised to -30 dBFS."""
    wave = wave * (10 ** (-30 / 20) / np.sqrt(np.mean(wave**2)))
    padded = np.pad(wave, WINDOW // 2)
    starts = np.arange(0, len(padded) - WINDOW + 1, STEP)
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    frames = padded[starts[:, None] + np.arange(WINDOW)] * hann
    return (abs(np.fft.rfft(frames)) ** 2 @ mel_filters().T).astype(np.float32)
