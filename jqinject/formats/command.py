"""`python -m jqinject inspect CHECKPOINT`: what is in a checkpoint."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jqinject.formats.readers import KINDS, inspect_checkpoint


def parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    made = argparse.ArgumentParser(
        prog="python -m jqinject inspect",
        description="What is in a checkpoint: names, formats, shapes and bytes of its arrays, and how much of it is "
        "in low bits. Its numbers are not read.",
    )
    made.add_argument("checkpoint", metavar="CHECKPOINT", help=KINDS)
    return made


def main(arguments: Sequence[str]) -> int:
    """Print what is in a checkpoint.

    Args:
        arguments: the command line without the program's name and `inspect`.

    Returns:
        The exit status: 2 if the checkpoint cannot be read, with the reason on stderr.
    """
    given = parser().parse_args(arguments)
    try:
        print(inspect_checkpoint(given.checkpoint))
    except (ValueError, OSError, ImportError) as error:
        print(f"python -m jqinject inspect: {error}", file=sys.stderr)
        return 2
    return 0
