"""Trained models in low bits: accuracy, noise, bytes and time, for weights that other packages ship.

    python benchmarks/trained_models.py
    python benchmarks/trained_models.py --model crepe --rows "W8A8 static" "W4A16 GPTQ"
    python benchmarks/trained_models.py --rounds 0

The models are the ports of `examples/trained`; a model whose package is not installed is left out, with the command
that installs it. Calibration, training and evaluation have different data. Batch normalizations are folded where a
convolution is before them. In rows of 4 bits and fewer the first and the last layer have 8 bits. Training (QAT) sees
the float model's outputs, no labels.

For each row: the score; the ratio of signal to noise of the outputs against the float model's; the bytes of the frozen
model, without its code; the seconds to quantize, compilation included; the time of a compiled call over the float
model's (interleaved, medians and quartiles of the rounds' ratios; left out with `--rounds 0`). Each frozen model is
saved by Orbax and loaded into one that was built from rules; the run ends if an output is not the same. The row with
weights in bfloat16 and nothing else shows how much the score moves by itself. GPTQ leaves layers with fewer samples
than columns to rounding to nearest. Qwix's row is left out where Qwix is not installed; of MTCNN, whose three networks
the cascade calls apart from one another, where Qwix intercepts calls of the whole model; and of the speaker encoder, as
its quantized weights do not pass through the scan of `nnx.RNN`.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

import jqinject
import jqinject.quant as q
from _timing import Timing, interleaved, processor
from _trained_subjects import SUBJECTS, Subject, outputs
from jqinject import Rule
from jqinject.core.transforms import Hadamard
from jqinject.recipes import AWQ, GPTQ, RTN, CorrectBiases, Equalize, Recipe, Solve

W8 = q.Int8WeightPerChannelFloat
W8_TENSOR = q.Int8WeightPerTensorFloat
A8 = q.Int8ActPerTensorMinMax
A4 = q.Int8ActPerTensorMSE.let(bit_width=4)
LSQ4 = q.Int4ActPerTensorLearned
STATIC = (A8, A4, LSQ4)
FP8 = q.Fp8e4m3OCPWeightPerChannelFloat, q.Fp8e4m3OCPDynamicActPerTensorFloat
QWIX = "W8A8 dynamic, Qwix"
DEPTHWISE = ("efficientnet", "efficientnet-relu")
QAT_STEPS, QAT_RATE = 200, 1e-3


def weight(bits: int) -> Any:
    """Return a quantizer with a scale for each output channel, of least squared error."""
    return q.Int8WeightPerChannelFloatMSE.let(bit_width=bits)


@dataclass(frozen=True)
class Row:
    """A way to quantize a model.

    Attributes:
        weight, act: the quantizers; no `act` leaves the inputs of layers float; "dynamic" is the subject's own.
        passes: of the recipe; without any, weights are rounded to nearest and ranges calibrated.
        few: whether the first and the last layer have 8 bits.
        rotated: whether inputs are rotated before they are rounded, where channels allow it.
        trained: whether it is trained.
        only: names of the subjects it is for; all if empty.
    """

    weight: Any
    act: Any = None
    passes: tuple[Any, ...] = ()
    few: bool = False
    rotated: bool = False
    trained: bool = False
    only: tuple[str, ...] = ()

    def rules(self, subject: Subject) -> list[Rule]:
        """Return the rules."""
        act = subject.dynamic if self.act == "dynamic" else self.act
        in_8_bits = Rule(
            subject.edges, weight_quant=W8, input_quant=None if subject.float_edges else act and A8
        )
        edges = [in_8_bits] if self.few or subject.float_edges else []
        turned = [
            Rule(
                path.replace(".", r"\."),
                weight_quant=self.weight,
                input_quant=act.let(pre_transform=Hadamard(size)),
            )
            for path, size in (rotations(subject) if self.rotated else {}).items()
        ]
        return [*edges, *turned, Rule(weight_quant=self.weight, input_quant=act)]

    def quantize(self, model: Any, subject: Subject) -> Any:
        """Return a model quantized by the rules; where all layers are rotated, that for the others takes none."""
        inputs = subject.calibration[0]
        return jqinject.quantize(model, self.rules(subject), inputs=inputs, allow_idle=self.rotated)

    def make(self, subject: Subject) -> Any:
        """Return the quantized model."""
        model = rotated(subject) if self.rotated else subject.model
        if self.passes:
            recipe = Recipe(*self.passes)
            return recipe.apply(model, self.rules(subject), subject.calibration, progress=False).model
        quantized = self.quantize(model, subject)
        quantized.eval()
        if self.act in STATIC or (self.few and self.act is not None and not subject.float_edges):
            jqinject.calibrate(quantized, subject.calibration, progress=False)
        if self.trained:
            train(quantized, subject)
        return quantized


def rotations(subject: Subject) -> dict[str, int]:
    """Return the paths of layers between the edges whose input can be rotated, and how many channels a matrix mixes."""
    sizes = {}
    for parts, layer in nnx.iter_modules(subject.model):
        path = ".".join(map(str, parts))
        if not isinstance(layer, nnx.Conv | nnx.Linear) or re.fullmatch(subject.edges, path):
            continue
        channels = layer.kernel.shape[-2]
        if getattr(layer, "feature_group_count", 1) == 1 and channels % 8 == 0:
            sizes[path] = channels & -channels  # the largest power of two that divides it
    return sizes


def rotated(subject: Subject) -> Any:
    """Return a float model whose weights expect rotated inputs."""
    model = nnx.clone(subject.model)
    sizes = rotations(subject)
    for parts, layer in nnx.iter_modules(model):
        size = sizes.get(".".join(map(str, parts)))
        if size is not None:
            kernel: Any = layer.kernel
            kernel[...] = jnp.swapaxes(Hadamard(size).dual(jnp.swapaxes(kernel[...], -1, -2)), -1, -2)
    return model


def train(model: Any, subject: Subject) -> None:
    """Train a quantized model, in place, to answer as the float model does."""
    graphdef, state = nnx.split(subject.model)
    teacher = jax.jit(lambda state, batch: jax.tree.leaves(nnx.merge(graphdef, state)(*batch)))
    model.train()
    model.set_attributes(use_running_average=True, raise_if_not_found=False)
    rate = optax.cosine_decay_schedule(QAT_RATE, QAT_STEPS)
    optimizer = nnx.Optimizer(model, optax.adam(rate), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, batch: Any, targets: list[jax.Array]) -> None:
        def loss(model: Any) -> jax.Array:
            pairs = zip(jax.tree.leaves(model(*batch)), targets, strict=True)
            return sum((((y - target) ** 2).sum() / (target**2).sum() for y, target in pairs), jnp.zeros(()))

        _, gradients = jqinject.value_and_grad(loss)(model)
        optimizer.update(model, gradients)

    for number in range(QAT_STEPS):
        batch = subject.training(number)
        step(model, optimizer, batch, teacher(state, batch))
    model.eval()


def in_bfloat16(subject: Subject) -> Any:
    """Return the float model with its weights rounded to bfloat16, kept in float32."""
    model = nnx.clone(subject.model)
    for _, layer in nnx.iter_modules(model):
        if isinstance(layer, nnx.Conv | nnx.Linear):
            kernel: Any = layer.kernel
            kernel[...] = kernel[...].astype(jnp.bfloat16).astype(kernel.dtype)
    return model


def by_qwix(subject: Subject) -> Any:
    """Return the model with Qwix's int8 weights, and inputs quantized at run time."""
    import qwix

    quantization = [qwix.QuantizationRule(module_path=".*", weight_qtype="int8", act_qtype="int8")]
    return qwix.quantize_model(subject.model, qwix.PtqProvider(quantization), *subject.calibration[0])


GPTQ_OR_RTN = Solve(GPTQ(), fallback=RTN())
ROWS: dict[str, Row | Callable[[Subject], Any]] = {
    "float": lambda subject: subject.model,
    "weights rounded to bfloat16": in_bfloat16,
    "W8A8 static": Row(W8, A8),
    "W8A8 dynamic": Row(W8, "dynamic"),
    QWIX: by_qwix,
    "W8A8 per tensor": Row(W8_TENSOR, A8, only=DEPTHWISE),
    "the same, Equalize": Row(W8_TENSOR, A8, passes=(Equalize(), Solve(RTN())), only=DEPTHWISE),
    "the same, CorrectBiases": Row(W8_TENSOR, A8, passes=(Solve(RTN()), CorrectBiases()), only=DEPTHWISE),
    "the same, both": Row(W8_TENSOR, A8, passes=(Equalize(), Solve(RTN()), CorrectBiases()), only=DEPTHWISE),
    "W8A8 GPTQ": Row(W8, A8, passes=(GPTQ_OR_RTN,)),
    "W4A16 RTN": Row(weight(4), few=True),
    "W4A16 GPTQ": Row(weight(4), passes=(GPTQ_OR_RTN,), few=True),
    "W4A16 AWQ": Row(weight(4), passes=(AWQ(), Solve(RTN())), few=True),
    "W4A8 GPTQ": Row(weight(4), A8, passes=(GPTQ_OR_RTN,), few=True),
    "W3A16 RTN": Row(weight(3), few=True),
    "W3A16 GPTQ": Row(weight(3), passes=(GPTQ_OR_RTN,), few=True),
    "FP8": Row(*FP8),
    "MXFP4": Row(q.MXFloat4e2m1Weight, q.MXFloat4e2m1Act, few=True),
    "NVFP4": Row(q.NVFP4Weight, q.NVFP4Act, few=True),
    "W4A4 RTN": Row(weight(4), A4, few=True),
    "W4A4 rotated": Row(weight(4), A4, few=True, rotated=True),
    "W4A4 QAT": Row(q.Int4WeightPerChannelLearned, LSQ4, few=True, trained=True),
}


@dataclass
class Result:
    """A row's numbers, and its model to time."""

    name: str
    score: float
    sqnr: float
    size: int
    seconds: float
    served: Any


def stored(model: Any) -> int:
    """Return the bytes of a model's arrays, sub-byte dtypes by their bits."""
    leaves = jax.tree.leaves(nnx.as_pure(nnx.state(model, nnx.Not(nnx.RngState))))
    return sum(-(-x.size * jax.dtypes.itemsize_bits(x.dtype) // 8) for x in leaves)


def reloaded(served: Any, row: Row, subject: Subject) -> Any:
    """Save a frozen model, and load it into one that was built from the rules alone."""

    def build() -> Any:
        model = row.quantize(subject.model, subject)
        model.eval()
        return jqinject.freeze(model, allow_uncalibrated=True)

    target = nnx.eval_shape(build)
    jqinject.load_state(target, served)  # raises where the models differ
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path(folder, "frozen"), nnx.as_pure(nnx.state(served)))
        checkpointer.wait_until_finished()
        shapes = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), nnx.as_pure(nnx.state(target))
        )
        state = checkpointer.restore(Path(folder, "frozen"), shapes)
    jqinject.load_state(target, state)
    return target


def measured(name: str, subject: Subject, expected: list[np.ndarray]) -> Result:
    """Quantize, freeze, save, load and score."""
    row = ROWS[name]
    start = time.perf_counter()
    if not isinstance(row, Row):
        served = row(subject)
        seconds = time.perf_counter() - start
        answers = outputs(served, subject.evaluation)
        score, sqnr = subject.score(served, answers), decibels(expected, answers)
        return Result(name, score, sqnr, stored(served), seconds, served)
    model = row.make(subject)
    jax.block_until_ready(jax.tree.leaves(nnx.as_pure(nnx.state(model))))
    seconds = time.perf_counter() - start
    served = jqinject.freeze(model)
    answers = outputs(served, subject.evaluation)
    again = outputs(reloaded(served, row, subject), subject.evaluation[:1])
    for a, b in zip(answers, again, strict=True):
        np.testing.assert_array_equal(a[: len(b)], b, err_msg=f"{subject.name}, {name}: not what was saved")
    return Result(
        name, subject.score(served, answers), decibels(expected, answers), stored(served), seconds, served
    )


def decibels(expected: list[np.ndarray], answers: list[np.ndarray]) -> float:
    """Return the ratio of signal to noise over all outputs."""
    noise = sum(float(((a - b) ** 2).sum(dtype=np.float64)) for a, b in zip(expected, answers, strict=True))
    if noise == 0:
        return math.inf
    return 10 * math.log10(sum(float((a**2).sum(dtype=np.float64)) for a in expected) / noise)


def times(results: list[Result], subject: Subject, rounds: int) -> dict[str, Timing]:
    """Return the time of a compiled call of each model."""
    calls = {}
    for result in results:
        # `nnx.RNN` draws a key for its first state, which is 0.
        draws = bool(nnx.state(result.served, nnx.RngState))
        answer = jqinject.compiled(
            result.served, *subject.timed, **({"changing": nnx.RngState} if draws else {})
        )
        calls[result.name] = lambda answer=answer: jax.block_until_ready(answer(*subject.timed))
    return interleaved(calls, rounds=rounds)


def table(subject: Subject, names: list[str], rounds: int) -> None:
    """Print a subject's table, in Markdown."""
    expected = outputs(subject.model, subject.evaluation)
    results = []
    for name in names:
        results.append(measured(name, subject, expected))
        score, sqnr = results[-1].score, results[-1].sqnr
        print(f"{subject.name}, {name}: {score:.1f} %, {sqnr:.1f} dB", file=sys.stderr, flush=True)
    timings = times(results, subject, rounds) if rounds else {}
    columns = ["", subject.unit, "SQNR, dB", "bytes", "s to make", *(["time / float"] if rounds else [])]
    print(f"\n### {subject.name}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for result in results:
        sqnr = "" if math.isinf(result.sqnr) else f"{result.sqnr:.1f}"
        cells = [result.name, f"{result.score:.1f}", sqnr, f"{result.size:,}", f"{result.seconds:.0f}"]
        if rounds:
            cells.append(timings[result.name].over(timings[names[0]]).show(factor=1, digits=2))
        print(f"| {' | '.join(cells)} |", flush=True)


def rows_of(key: str) -> list[str]:
    """Return the names of the rows for a subject."""
    names = [
        name for name, row in ROWS.items() if not isinstance(row, Row) or not row.only or key in row.only
    ]
    if key == "efficientnet-relu":
        return [name for name in names if name == "W8A8 static" or getattr(ROWS[name], "only", ())]
    if key in ("mtcnn", "speaker") or importlib.util.find_spec("qwix") is None:
        names.remove(QWIX)
    return names


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument(
        "--rows", nargs="+", choices=ROWS, help="all by default; float comes first in any case"
    )
    parser.add_argument("--rounds", type=int, default=20, help="of timing; 0 leaves times out")
    options = parser.parse_args()
    print(
        f"jqinject {jqinject.__version__}, jax {jax.__version__}, {processor()}; load {os.getloadavg()[0]:.1f}"
    )
    for key in options.model:
        try:
            subject = SUBJECTS[key]()
        except ImportError as error:
            print(f"\n{key} is left out: {error}")
            continue
        rows = ["float", *(name for name in rows_of(key) if options.rows is None or name in options.rows)]
        table(subject, list(dict.fromkeys(rows)), options.rounds)


if __name__ == "__main__":
    main()
