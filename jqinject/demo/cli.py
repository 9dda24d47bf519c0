"""The command line; arguments are checked before any training."""

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

NEEDED = {"sklearn": "scikit-learn", "optax": "optax", "rich": "rich", "matplotlib": "matplotlib"}
PICTURES = (".png", ".pdf", ".svg", ".jpg")


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help lists the arguments)\n")


def _seed(text: str) -> int:
    try:
        seed = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a seed is a whole number, got {text!r}") from None
    if not 0 <= seed < 2**32 - 1:
        raise argparse.ArgumentTypeError(f"a seed lies between 0 and 4294967294, got {seed}")
    return seed


def _picture(text: str) -> Path:
    path = Path(text)
    folder = path.parent
    if path.suffix.lower() not in PICTURES:
        raise argparse.ArgumentTypeError(
            f"the picture's name ends in one of {', '.join(PICTURES)}, got {text!r}"
        )
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {str(folder)!r} to write the picture to")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"the picture cannot be written to {text!r}")
    return path


def parser() -> argparse.ArgumentParser:
    """The arguments of `python -m jqinject`."""
    arguments = _Parser(
        prog="python -m jqinject",
        description="Train a small classifier on scikit-learn's digits, load it into models quantized to 8 bits, "
        "4 bits, three values and two values, train these, quantize the float model itself by rules, to 8 bits after "
        "training and to 4-bit weights, and show what it cost.",
        epilog="python -m jqinject list, explain NAME and show are about the ready-made quantizers, "
        "inspect CHECKPOINT about a checkpoint: python -m jqinject list --help.",
    )
    arguments.add_argument(
        "--seed", type=_seed, default=0, help="seed of everything random (default: %(default)s)"
    )
    arguments.add_argument(
        "--out", type=_picture, metavar="FILE", help="the picture (default: jqinject_digits.png)"
    )
    return arguments


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the main job.

    Args:
        arguments: the command line without the program's name; None for that of the process.

    Returns:
        The exit status.
    """
    chosen = parser().parse_args(arguments)
    missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        print(
            f'python -m jqinject: needs {", ".join(missing)}: pip install "jqinject[demo]"', file=sys.stderr
        )
        return 1
    from rich.console import Console

    from jqinject.demo.job import run

    run(chosen.seed, chosen.out or _picture("jqinject_digits.png"), Console())
    return 0
