"""A transformer language model, trained in bfloat16 and in 8-bit floats, side by side.

    python examples/fp8_transformer.py

Every dense layer of the blocks has its weights, its inputs and its gradients in 8-bit floats, with delayed scaling
(the scale comes from the largest magnitudes of earlier steps) or with current scaling (from the tensor itself).
All models start from the same parameters and see the same text. The loss is the mean of the last 20 steps, in nats
a character. `saturated` is the share of the quantized tensors whose largest numbers did not fit and were clipped.

`accumulated` cuts each batch into micro-batches. What the quantizers see must not depend on that: the last line
compares the amax histories of whole and of cut batches over some steps of a float32 model whose parameters are held.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from language_model import Size, Text, Transformer, adamw, held_out_loss, train
from quantizer_record import Record

import jqinject.quant as q

LAST = 20
STEPS_COMPARED = 3

DELAYED = {
    "weight_quant": q.Fp8e4m3WeightPerTensorDelayed,
    "input_quant": q.Fp8e4m3ActPerTensorDelayed,
    "grad_quant": q.Fp8e5m2GradPerTensorDelayed,
}
CURRENT = {
    "weight_quant": q.Fp8e4m3WeightPerTensorCurrent,
    "input_quant": q.Fp8e4m3ActPerTensorCurrent,
    "grad_quant": q.Fp8e5m2GradPerTensorCurrent,
}
VARIANTS: Mapping[str, Mapping[str, Any]] = {"bfloat16": {}, "fp8, delayed": DELAYED, "fp8, current": CURRENT}


@dataclass(frozen=True)
class Settings:
    """What all runs share."""

    steps: int = 300
    batch: int = 16
    context: int = 64
    width: int = 64
    depth: int = 2
    seed: int = 0

    def size(self, text: Text) -> Size:
        """Of the model for this text."""
        return Size(len(text.characters), self.context, self.width, self.depth)


@dataclass(frozen=True)
class Run:
    """A trained model.

    Attributes:
        losses: of every step.
        held_out: the loss on the text that was not learned from, in evaluation mode.
        record: what its quantizers saw.
    """

    losses: np.ndarray
    held_out: float
    record: Record

    @property
    def loss(self) -> float:
        """The mean of the last steps."""
        return float(self.losses[-LAST:].mean())


def trained(text: Text, quantizers: Mapping[str, Any], settings: Settings, micro_batches: int = 1) -> Run:
    """Train a fresh model: the same seed gives the same parameters and batches, however it is quantized."""
    model = Transformer(settings.size(text), quantizers, seed=settings.seed)
    batches = text.batches(settings.steps, settings.batch, settings.context, settings.seed)
    record = Record(model)
    losses = train(model, batches, adamw(model, settings.steps), micro_batches, record)
    windows = text.held_out_windows(4 * settings.batch, settings.context)
    return Run(np.array(losses), held_out_loss(model, windows), record)


def history_difference(text: Text, settings: Settings, micro_batches: int) -> float:
    """The largest relative difference between the amaxes of batches as a whole and cut into micro-batches.

    In float32 and with the learning rate at 0: else rounding, which differs with the order of sums, makes two
    models of one.
    """

    def amaxes(parts: int) -> dict[str, np.ndarray]:
        model = Transformer(settings.size(text), DELAYED, jnp.float32, settings.seed)
        batches = text.batches(STEPS_COMPARED, settings.batch, settings.context, settings.seed)
        record = Record(model)
        train(model, batches, adamw(model, STEPS_COMPARED, learning_rate=0.0), parts, record)
        return record.amaxes

    whole, cut = amaxes(1), amaxes(micro_batches)
    return max(float(np.max(np.abs(cut[name] - amax) / amax)) for name, amax in whole.items())


def arguments() -> argparse.Namespace:
    """The command line's."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    defaults = Settings()
    for name, default in vars(defaults).items():
        parser.add_argument(f"--{name}", type=int, default=default, help="(default: %(default)s)")
    parser.add_argument("--micro-batches", type=int, default=4, help="(default: %(default)s)")
    options = parser.parse_args()
    if options.batch % options.micro_batches:
        parser.error(f"--batch {options.batch} cannot be cut into {options.micro_batches} micro-batches")
    return options


def main() -> None:
    """Train all the variants, and print."""
    options = vars(arguments())
    micro_batches = options.pop("micro_batches")
    settings, text = Settings(**options), Text.of_python_help()
    print(f"{'':27}{'loss':>8}{'/ bfloat16':>12}{'held out':>10}{'/ bfloat16':>12}{'saturated':>11}")
    for parts in (1, micro_batches):
        base: Run | None = None
        for name, quantizers in VARIANTS.items():
            run = trained(text, quantizers, settings, parts)
            base = base or run
            print(
                f"{name + (', accumulated' if parts > 1 else ''):27}{run.loss:8.4f}{run.loss / base.loss:12.4f}"
                f"{run.held_out:10.4f}{run.held_out / base.held_out:12.4f}{run.record.saturated:11.4f}",
                flush=True,
            )
    difference = history_difference(text, settings, micro_batches)
    print(
        f"amax histories, {micro_batches} micro-batches against whole batches: off by {difference:.1e} at most"
    )


if __name__ == "__main__":
    main()
