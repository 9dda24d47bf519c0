"""Which quantizer is better, at 4 and 2 bits: the digits classifier over several seeds, with jqinject.

    python benchmarks/orderings.py
    python benchmarks/orderings.py --seeds 2 --bits 4 --epochs 5

Accuracy on the test set in percent, mean and standard deviation over the seeds. A seed is the split, the initial
weights and the order of batches; for each, all quantized models start from the same float classifier. All layers have
the bits; with --edges-8-bits the first and the last one keep 8, and then 4 bits lose nothing on these digits.

Trained with the quantizers in the loop (weights and activations at the bits, a scale for the tensor):
  learned      scales that start from max |w| and the batches' maxima, and are learned as their log2
  statistics   scales made anew from max |w|, and from running maxima of activations
  fixed        scales known beforehand: weights in [-1, 1], activations in [0, 6]
Not trained, weights alone:
  per tensor, per channel   a scale from max |w|, weights rounded to nearest
  nearest, AdaRound         a scale for each channel with the least squared error; rounding to nearest, or learned

The last table says how often the ordering known from the literature holds, seed by seed and on average.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

import jqinject
import jqinject.quant as q
from _timing import print_table
from jqinject.demo import classifier
from jqinject.demo.classifier import Classifier
from jqinject.demo.recipes import DemoRecipe, Image

FLOAT_EPOCHS = 30
CALIBRATION_BATCHES = 8
LEARNING_RATE = 3e-3


class Weight(q.Int8WeightPerTensorFloat):
    """Weights of the inner layers; what shares a scale and where it comes from is overridden."""


class Act(q.Uint8ActPerTensorFloat):
    """Results of a ReLU."""

    collect_stats_steps = CALIBRATION_BATCHES
    scaling_stats_op = "max"


class LearnedWeight(Weight):
    """Learned as its log2, from max |w|."""

    scaling_impl_type = "parameter_from_stats"
    restrict_scaling_type = "log_fp"


class LearnedAct(Act):
    """Learned as its log2, from the batches' maxima."""

    restrict_scaling_type = "log_fp"


class FixedWeight(Weight):
    """Weights between -1 and 1."""

    scaling_impl_type = "const"
    scaling_const = 1.0


class RunningAct(Act):
    """The scale follows the batches' maxima."""

    scaling_impl_type = "stats"


class FixedAct(Act):
    """Activations up to 6."""

    scaling_impl_type = "const"
    max_val = 6.0


@dataclass(frozen=True)
class Trial:
    """One row: how the inner layers are quantized, and what is done after loading.

    Attributes:
        name: for the table.
        weight: quantizer of the inner weights.
        act: quantizer of activations, None for 8 bits.
        trained: whether the model is trained.
        rounding: whether its rounding is learned.
    """

    name: str
    weight: Any
    act: Any = None
    trained: bool = False
    rounding: bool = False


TRIALS = (
    Trial("learned", LearnedWeight, LearnedAct, trained=True),
    Trial("statistics", Weight, RunningAct, trained=True),
    Trial("fixed", FixedWeight, FixedAct, trained=True),
    Trial("per tensor", q.Int8WeightPerTensorFloat),
    Trial("per channel", q.Int8WeightPerChannelFloat),
    Trial("nearest", q.Int8WeightPerChannelFloatMSE),
    Trial("AdaRound", q.Int8WeightPerChannelFloatMSE, rounding=True),
)
ORDERINGS = (
    ("learned", "statistics"),
    ("statistics", "fixed"),
    ("per channel", "per tensor"),
    ("AdaRound", "nearest"),
)


def quantized(trial: Trial, bits: int, floats: Classifier, seed: int, everywhere: bool) -> Classifier:
    """The classifier with the weights of the float one."""
    act = Act.let(bit_width=8) if trial.act is None else trial.act.let(bit_width=bits)
    weight = trial.weight.let(bit_width=bits)
    edge = weight if everywhere else q.Int8WeightPerChannelFloat
    recipe = DemoRecipe(trial.name, weight, bits, act, bits, 0, image=Image, edge_weight=edge)
    model = Classifier(recipe, rngs=nnx.Rngs(seed))
    jqinject.load_state(model, nnx.state(floats, nnx.Param))
    return model


def measured(
    trial: Trial,
    bits: int,
    floats: Classifier,
    digits: classifier.Digits,
    seed: int,
    arguments: argparse.Namespace,
) -> float:
    """The accuracy of one model in percent."""
    model = quantized(trial, bits, floats, seed, not arguments.edges_8_bits)
    classifier.calibrate(model, digits, seed)
    if trial.trained:
        classifier.train(model, digits, arguments.epochs, LEARNING_RATE, seed, lambda: None)
    if trial.rounding:
        model.eval()
        images = [jnp.asarray(batch) for batch, _ in classifier.batches(digits, 1, seed)]
        jqinject.learn_rounding(model, images, steps=arguments.rounding_steps, progress=False)
    return 100 * classifier.accuracy(model, digits)


def trained_floats(digits: classifier.Digits, seed: int, epochs: int) -> Classifier:
    """The float classifier."""
    floats = Classifier(None, rngs=nnx.Rngs(seed))
    classifier.train(floats, digits, epochs, LEARNING_RATE, seed, lambda: None)
    return floats


def collect(arguments: argparse.Namespace, note: Callable[[str], None]) -> dict[tuple[str, int], list[float]]:
    """Accuracies by row and bits, one for each seed; float ones under 32 bits."""
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for seed in range(arguments.seeds):
        digits = classifier.load(seed)
        floats = trained_floats(digits, seed, arguments.float_epochs)
        found["float", 32].append(100 * classifier.accuracy(floats, digits))
        for bits in arguments.bits:
            for trial in TRIALS:
                found[trial.name, bits].append(measured(trial, bits, floats, digits, seed, arguments))
        note(f"seed {seed} done")
    return found


def show(found: dict[tuple[str, int], list[float]], arguments: argparse.Namespace) -> None:
    """Print both tables."""

    def cell(key: tuple[str, int]) -> str:
        return f"{np.mean(found[key]):.1f} +- {np.std(found[key]):.1f}"

    columns = [f"{bits} bits" for bits in arguments.bits]
    rows = [["float", *[cell(("float", 32))] * len(columns)]]
    rows += [[trial.name, *(cell((trial.name, bits)) for bits in arguments.bits)] for trial in TRIALS]
    title = f"jqinject: test accuracy in percent, digits, {arguments.seeds} seeds"
    print_table(title, ["scale", *columns], rows)
    rows = []
    for better, worse in ORDERINGS:
        cells = []
        for bits in arguments.bits:
            gains = np.subtract(found[better, bits], found[worse, bits])
            cells.append(f"{np.mean(gains):+.1f}, {int(np.sum(gains >= 0))} of {len(gains)} seeds")
        rows.append([f"{better} >= {worse}", *cells])
    print_table("mean gain in percent points, and where it is not negative", ["ordering", *columns], rows)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 2])
    parser.add_argument("--epochs", type=int, default=30, help="of training with quantizers in the loop")
    parser.add_argument("--float-epochs", type=int, default=FLOAT_EPOCHS)
    parser.add_argument(
        "--edges-8-bits", action="store_true", help="the first and the last layer have 8 bits"
    )
    parser.add_argument("--rounding-steps", type=int, default=500, help="of AdaRound, for each layer")
    arguments = parser.parse_args()
    show(collect(arguments, lambda text: print(text, flush=True)), arguments)


if __name__ == "__main__":
    main()
