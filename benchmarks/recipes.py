"""Algorithms after training side by side: bits per byte of a small language model in low bits.

    python benchmarks/recipes.py --quick
    python benchmarks/recipes.py --json outputs/recipes.json
    python benchmarks/recipes.py --tracks natural --formats W3A16 --methods RTN GPTQ

The model (`examples/byte_lm`, 1.1 million parameters) was trained on the source text of Python's standard library by
`examples/train_byte_lm.py`; it is kept in `benchmarks/data`. The linear layers of its blocks are quantized, its
embedding and its head stay float. Nothing is downloaded: the text is that of the Python that runs this.

Three tracks: `natural`; `planted`, where 2 % of the channels of the norms are 30 times as large and the weights that
read them are divided by 30; `digits`, a small convolutional classifier. Planted outliers flatter the methods that find
a factor for each channel (SmoothQuant, AWQ), since such a factor undoes them exactly.

For each format and method: the mean score, the difference to the float model with a 95 % interval (seeds and windows
drawn again, window by window), the bits of a weight with its share of scales and zero points as they are stored, and
the seconds to make the model, compilation included. Seeds are those of the calibration windows and of training.
With `--json` each trial is written as it is done, and a later run does only what is missing.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from _timing import print_table
from recipe_trials.formats import FORMATS
from recipe_trials.intervals import difference, interval
from recipe_trials.methods import METHODS
from recipe_trials.orderings import ORDERINGS
from recipe_trials.records import FLOAT, Records, Trial, versions
from recipe_trials.tracks import Track, digits_track, language_track

TRACKS = ("natural", "planted", "digits")
QUICK = {"seeds": 1, "windows": 32, "calibration": 16, "qat_steps": 20, "tracks": ["natural", "planted"]}
QUICK_METHODS = [name for name in METHODS if name != "AutoRound"]


def tracks(options: argparse.Namespace) -> Iterator[Track]:
    """The tracks that were asked for."""
    for name in options.tracks:
        if name == "digits":
            yield digits_track(16 * options.calibration)
        else:
            yield language_track(name == "planted", options.windows, options.calibration)


def float_trial(track: Track) -> Trial:
    """The float model's scores."""
    start = time.perf_counter()
    scores = track.scores(track.model)
    return Trial(track.name, FLOAT, FLOAT, 0, rounded(scores), time.perf_counter() - start, 32.0)


def one_trial(track: Track, format_: str, method: str, seed: int, qat_steps: int) -> Trial:
    """Quantize a model and score it."""
    start = time.perf_counter()
    model = METHODS[method].make(track, FORMATS[format_], seed, qat_steps)
    seconds = time.perf_counter() - start
    bits = FORMATS[format_].effective_bits(track.shapes) + beside(model) / track.weights
    return Trial(track.name, format_, method, seed, rounded(track.scores(model)), seconds, bits)


def beside(model: nnx.Module) -> int:
    """The bits of low-rank products beside the weights."""
    return sum(8 * x.nbytes for x in jax.tree.leaves(nnx.state(model, nnx.LoRAParam)))


def rounded(scores: np.ndarray) -> tuple[float, ...]:
    """As they are written to the file."""
    return tuple(round(float(x), 5) for x in scores)


def collect(records: Records, options: argparse.Namespace) -> None:
    """Do all trials that are missing: one seed of everything, then the next."""
    made = list(tracks(options))
    for track in made:
        print(f"{track.name}: {track.text}", flush=True)
        if (track.name, FLOAT, FLOAT, 0) not in records.trials:
            records.add(float_trial(track))
    for seed in range(options.seeds):
        for track in made:
            for format_ in options.formats:
                for method in options.methods:
                    known = METHODS[method]
                    if not known.serves(format_) or (seed and not known.has_seed):
                        continue
                    if (track.name, format_, method, seed) in records.trials:
                        continue
                    trial = one_trial(track, format_, method, seed, options.qat_steps)
                    records.add(trial)
                    print(
                        f"seed {seed}, {track.name}, {format_}, {method}: {np.mean(trial.scores):.4f} {track.unit}, "
                        f"{trial.seconds:.1f} s",
                        flush=True,
                    )


def show(records: Records, options: argparse.Namespace) -> None:
    """Print a table for each track, and the orderings."""
    for track in options.tracks:
        floats = records.scores((track, FLOAT, FLOAT))
        if floats is None:
            continue
        unit = "% wrong" if track == "digits" else "bits/byte"
        rows = [["float", "", str(interval(floats)), "", "32", "", ""]]
        for format_ in options.formats:
            for method in options.methods:
                found = records.of(track, format_, method)
                if not found:
                    continue
                scores = np.array([trial.scores for trial in found])
                seconds = np.median([trial.seconds for trial in found])
                gap = difference(scores, floats)
                numbers = [f"{scores.mean():.3f}", str(gap), f"{found[0].bits:.2f}", f"{seconds:.1f}"]
                rows.append([format_, method, *numbers, str(len(found))])
        flattered = " (outliers flatter SmoothQuant and AWQ)" if track == "planted" else ""
        columns = ["format", "method", unit, "- float [95 %]", "bits", "s", "seeds"]
        print_table(f"jqinject: {track}{flattered}", columns, rows)
    rows = []
    for ordering in ORDERINGS:
        verdict, gap = ordering.verdict(records.scores)
        rows.append([ordering.text, verdict, "" if gap is None else str(gap)])
    print_table("expected orderings", ["ordering", "", "worse - better [95 %]"], rows)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few minutes: one seed, few windows")
    parser.add_argument("--tracks", nargs="+", choices=TRACKS)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--methods", nargs="+", choices=METHODS)
    parser.add_argument("--seeds", type=int)
    parser.add_argument(
        "--windows", type=int, help="of 256 bytes that a model is scored on; a multiple of 16"
    )
    parser.add_argument("--calibration", type=int, help="windows of 256 bytes that recipes see")
    parser.add_argument("--qat-steps", type=int, help="of training with the quantizers in the loop")
    parser.add_argument("--json", type=Path, help="where trials are kept")
    options = parser.parse_args()
    full = {"seeds": 3, "windows": 128, "calibration": 32, "qat_steps": 100, "tracks": list(TRACKS)}
    methods = QUICK_METHODS if options.quick else list(METHODS)
    for name, default in {**(QUICK if options.quick else full), "methods": methods}.items():
        if getattr(options, name) is None:
            setattr(options, name, default)
    settings = {name: getattr(options, name) for name in ("windows", "calibration", "qat_steps")}
    records = Records.at(options.json, settings)
    print(", ".join(f"{name} {found}" for name, found in versions().items()))
    collect(records, options)
    show(records, options)
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
