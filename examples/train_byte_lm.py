"""Train the byte-level language model that `benchmarks/recipes.py` quantizes, on the standard library's source text.

    python examples/train_byte_lm.py --checkpoint benchmarks/data/byte_lm.npz

Nothing is downloaded. It takes some 20 minutes of one core. A run that was stopped goes on from its last state
(`--state`), also with another number of steps. Bits per byte are printed of the float model and of the checkpoint,
whose weights are 8-bit integers with a scale for each output channel. The shipped checkpoint took

    python examples/train_byte_lm.py --steps 5000 --until 2250
    python examples/train_byte_lm.py --steps 3250 --checkpoint benchmarks/data/byte_lm.npz
"""

import argparse
import time
from pathlib import Path

import jax
from byte_lm import ByteLM, Corpus, Size, Training, bits_of_windows, load, save
from byte_lm.training import Schedule
from flax import nnx


def main() -> None:
    """Train, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in vars(Size()).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in vars(Schedule()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    parser.add_argument("--state", type=Path, default=Path("outputs/byte_lm.state"), help="of the training")
    parser.add_argument("--checkpoint", type=Path, default=Path("outputs/byte_lm.npz"))
    parser.add_argument("--until", type=int, help="stop after this many steps of the schedule")
    parser.add_argument("--every", type=int, default=250, help="steps between lines, and states")
    options = vars(parser.parse_args())
    size = Size(**{name: options[name] for name in vars(Size())})
    schedule = Schedule(**{name: options[name] for name in vars(Schedule())})
    corpus = Corpus.of_standard_library()
    model = ByteLM(size, rngs=nnx.Rngs(schedule.seed))
    parameters = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    print(f"{parameters:,} parameters; {corpus}", flush=True)
    for path in (options["state"], options["checkpoint"]):
        path.parent.mkdir(parents=True, exist_ok=True)
    training = Training(model, schedule, corpus)
    if options["state"].exists():
        training.resume(options["state"])
    windows = corpus.validation_windows(64, schedule.context)
    start, before = time.perf_counter(), training.done

    def after(done: int, loss: jax.Array) -> None:
        if done % options["every"] and done not in (schedule.steps, options["until"]):
            return
        seconds = (time.perf_counter() - start) / (done - before)
        bits = bits_of_windows(model, windows).mean()
        print(
            f"step {done}: loss {float(loss):.3f}, {bits:.3f} bits/byte, {1e3 * seconds:.0f} ms a step",
            flush=True,
        )
        training.save(options["state"])

    training.run(options["until"], after)
    save(model, options["checkpoint"])
    windows = corpus.validation_windows(256, schedule.context)
    found = [bits_of_windows(each, windows).mean() for each in (model, load(options["checkpoint"]))]
    print(f"bits/byte: {found[0]:.4f}, {found[1]:.4f} from {options['checkpoint']}")


if __name__ == "__main__":
    main()
