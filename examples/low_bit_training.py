"""A byte-level language model, trained in low bits by one scheme after the other: what each costs.

    python examples/low_bit_training.py                      # some hours of one core
    python examples/low_bit_training.py --quick              # a tiny model, two steps, one scheme: that it runs
    python examples/low_bit_training.py --schemes Fp8CurrentTraining NVFP4Training --steps 600

Every run has the same steps, batches and initial parameters for the same seed; the linear layers of the blocks follow
the scheme, embedding and head are bfloat16. The loss is that on held-out text, in nats a byte, the mean of the seeds;
beside it the difference from bfloat16's. SQNR is that of the gradient of all parameters in decibels, with one operand
quantized and the others in bfloat16, at the model that bfloat16's first run ends with; `all` has all of them quantized.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from byte_lm import ByteLM, Corpus, Size, Training
from byte_lm.evaluation import log_losses
from byte_lm.training import Schedule
from flax import nnx

import jqinject
import jqinject.quant as q
from jqinject import Rule
from jqinject.dot import Scheme
from jqinject.dot.schemes.product_transforms import transform_of
from jqinject.dot.schemes.scheme import SchemeSpec

FLOAT = "bfloat16"
OPERANDS = ("fprop_lhs", "fprop_rhs", "dgrad_grad", "dgrad_rhs", "wgrad_lhs", "wgrad_grad")
SCHEMES: Mapping[str, type[Scheme]] = {
    "Fp8DelayedTraining": q.Fp8DelayedTraining,
    "Fp8CurrentTraining": q.Fp8CurrentTraining,
    "Fp8RowTraining": q.Fp8RowTraining,
    "Fp8BlockTraining": q.Fp8BlockTraining,
    "MXFP8Training": q.MXFP8Training,
    "MXFP4Training": q.MXFP4Training,
    "NVFP4Training": q.NVFP4Training,
    "NVFP4Training, nearest": q.NVFP4Training.let(gradient_rounding="round"),
    "NVFP4Training, not rotated": q.NVFP4Training.let(hadamard=None),
    "NVFP4Training, 1D weights": q.NVFP4Training.let(weight_block=16),
    "Int8Training": q.Int8Training,
    "BitNet158": q.BitNet158,
}


@dataclass(frozen=True)
class Settings:
    """What all runs share.

    Attributes:
        steps: of the optimizer.
        seeds: how many runs of each scheme.
        batch: windows a step.
        context: bytes of a window.
        width, depth: of the model.
        windows: of held-out text.
    """

    steps: int = 400
    seeds: int = 3
    batch: int = 8
    context: int = 128
    width: int = 128
    depth: int = 2
    windows: int = 64

    def model(self, seed: int) -> ByteLM:
        """A fresh model: the same seed gives the same parameters."""
        size = Size(self.width, self.depth, 2 * self.width, 4)
        return ByteLM(size, dtype=jnp.bfloat16, rngs=nnx.Rngs(seed))

    def schedule(self, seed: int) -> Schedule:
        """Of one run."""
        return Schedule(self.steps, self.batch, self.context, seed=seed)


QUICK = Settings(steps=2, seeds=1, batch=2, context=32, width=32, depth=1, windows=2)


def quantized(model: ByteLM, scheme: type[Scheme] | None, seed: int = 0) -> Any:
    """The model with the linear layers of its blocks by a scheme; None leaves it as it is."""
    if scheme is None:
        return model
    rules = [Rule("head", scheme=None), Rule(scheme=scheme)]
    return jqinject.quantize(model, rules, rngs=nnx.Rngs(seed))


def trained(scheme: type[Scheme] | None, settings: Settings, seed: int, corpus: Corpus) -> tuple[Any, float]:
    """A trained model, and its loss on the held-out text in evaluation mode."""
    model = quantized(settings.model(seed), scheme, seed)
    windows = corpus.validation_windows(settings.windows, settings.context)
    if scheme is not None:
        held_out(model, windows[:1])  # a call in training begins the statistics of operands
    Training(model, settings.schedule(seed), corpus).run()
    model.eval()
    return model, float(held_out(model, windows))


@nnx.jit
def held_out(model: Any, windows: jax.Array) -> jax.Array:
    """The mean loss of some windows."""
    return log_losses(model, windows).mean()


@nnx.jit
def gradient(model: Any, windows: jax.Array) -> jax.Array:
    """The gradient of all float parameters as one vector, float32."""
    _, found = jqinject.value_and_grad(lambda model: log_losses(model, windows).mean())(model)
    return jnp.concatenate([leaf.astype(jnp.float32).reshape(-1) for leaf in jax.tree.leaves(found)])


def alone(scheme: type[Scheme], operand: str) -> type[Scheme] | None:
    """A scheme that quantizes one operand; None where the operand is float, what the forward product took, or rotated.

    A rotation cancels against that of the other operand, so it cannot be alone.
    """
    own = SchemeSpec.of(scheme)[operand]
    if own is None or not hasattr(own, "injector") or transform_of(own) is not None:
        return None
    return scheme.let(**{other: None for other in OPERANDS if other != operand})


def decibels(exact: jax.Array, found: jax.Array) -> float:
    """The ratio of a signal to what was added to it."""
    noise = float(jnp.sum((found - exact) ** 2))
    return float("inf") if noise == 0 else 10 * np.log10(float(jnp.sum(exact**2)) / noise)


def ratios(
    scheme: type[Scheme], model: ByteLM, windows: jax.Array, operands: Sequence[str]
) -> dict[str, float]:
    """The SQNR of the gradient with one operand quantized, and with all."""
    exact = gradient(model, windows)
    found: dict[str, float] = {}
    for name, part in {**{name: alone(scheme, name) for name in operands}, "all": scheme}.items():
        if part is None:
            continue
        copy = quantized(nnx.clone(model), part)
        copy.train()
        gradient(copy, windows)  # a delayed scale follows the step before
        found[name] = decibels(exact, gradient(copy, windows))
    return found


def table(losses: Mapping[str, list[float]], noise: Mapping[str, Mapping[str, float]]) -> str:
    """Losses, their distance from bfloat16's, and the noise of gradients."""
    lines = [
        f"{'scheme':28}{'loss':>8}{'+-':>8}{'%':>8}   "
        + "".join(f"{name:>12}" for name in (*OPERANDS, "all"))
    ]
    base = np.mean(losses[FLOAT])
    for name, found in losses.items():
        ratio = 100 * (np.mean(found) / base - 1)
        columns = (noise.get(name, {}).get(operand) for operand in (*OPERANDS, "all"))
        shown = "".join(f"{'' if each is None else f'{each:.1f}':>12}" for each in columns)
        lines.append(f"{name:28}{np.mean(found):8.4f}{np.std(found):8.4f}{ratio:8.2f}   {shown}")
    return "\n".join(lines)


def plot(losses: Mapping[str, list[float]], noise: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Losses and noise as bars, in a file."""
    import matplotlib.pyplot as plt  # of the extra `demo`

    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 0.4 * len(losses) + 1.5), layout="constrained", sharey=True
    )
    base = np.mean(losses[FLOAT])
    names = [name for name in losses if name != FLOAT]
    left.barh(names, [100 * (np.mean(losses[name]) / base - 1) for name in names])
    left.set_xlabel(f"held-out loss above {FLOAT}'s, %")
    for operand in (*OPERANDS, "all"):
        ratios = [noise.get(name, {}).get(operand, np.nan) for name in names]
        right.plot(ratios, names, "k|" if operand == "all" else "o", label=operand)
    right.set_xlabel("SQNR of the gradient, dB")
    right.legend(fontsize=8)
    left.invert_yaxis()
    figure.savefig(path)


def options() -> argparse.Namespace:
    """What the user asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in vars(Settings()).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--schemes", nargs="+", choices=list(SCHEMES), default=list(SCHEMES), metavar="NAME")
    parser.add_argument(
        "--operands",
        nargs="*",
        choices=OPERANDS,
        default=list(OPERANDS),
        metavar="NAME",
        help="whose SQNR is measured alone; each compiles the gradient anew (default: all six; no name: no SQNR)",
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model, two steps, one seed, one scheme")
    parser.add_argument("--plot", type=Path, help="a file for the figure; needs matplotlib")
    return parser.parse_args()


def run(
    settings: Settings, names: Sequence[str], corpus: Corpus, operands: Sequence[str]
) -> tuple[dict[str, list[float]], dict[str, dict[str, float]]]:
    """Losses by scheme and seed, and the noise of its gradients."""
    losses: dict[str, list[float]] = {}
    noise: dict[str, dict[str, float]] = {}
    windows = corpus.validation_windows(min(8, settings.windows), settings.context)
    reference = None
    for name in (FLOAT, *names):
        scheme = SCHEMES.get(name)
        runs = [trained(scheme, settings, seed, corpus) for seed in range(settings.seeds)]
        losses[name] = [loss for _, loss in runs]
        if reference is None:
            reference = runs[0][0]
        if scheme is not None and operands:
            noise[name] = ratios(scheme, reference, windows, operands)
        print(f"{name}: {', '.join(f'{loss:.4f}' for loss in losses[name])}", flush=True)
    return losses, noise


def main() -> None:
    """Train, print and plot."""
    given = options()
    settings, names, operands = QUICK, ["Fp8CurrentTraining"], list(OPERANDS[:1])
    if not given.quick:
        settings = Settings(**{name: getattr(given, name) for name in vars(Settings())})
        names, operands = given.schemes, given.operands
    losses, noise = run(settings, names, Corpus.of_standard_library(), operands)
    print(table(losses, noise))
    if given.plot is not None:
        plot(losses, noise, given.plot)


if __name__ == "__main__":
    main()
