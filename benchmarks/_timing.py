"""Interleaved timing: every callable has its turn in a round, in shuffled order; the machine's drift hits all alike.

Uses the standard library alone (and `rich` for tables where it is installed), so that the same file runs in
an interpreter that holds another framework.
"""

import gc
import importlib.util
import platform
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles


@dataclass(frozen=True)
class Timing:
    """Seconds of one callable, one entry a round; rounds of several timings belong together."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle of all rounds."""
        return median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Between these two lies the middle half of the rounds."""
        if len(self.seconds) < 2:
            return self.seconds[0], self.seconds[0]
        low, _, high = quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    def minus(self, other: "Timing") -> "Timing":
        """The difference round by round: what this costs on top of the other."""
        return Timing(tuple(a - b for a, b in zip(self.seconds, other.seconds, strict=True)))

    def over(self, other: "Timing") -> "Timing":
        """The ratio round by round."""
        return Timing(tuple(a / b for a, b in zip(self.seconds, other.seconds, strict=True)))

    def show(self, factor: float = 1e3, digits: int = 3) -> str:
        """`median [lower quartile, upper quartile]`, in milliseconds by default."""
        low, high = self.quartiles
        return f"{self.median * factor:.{digits}f} [{low * factor:.{digits}f}, {high * factor:.{digits}f}]"


def interleaved(
    callables: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 3,
    in_a_row: int = 1,
    seed: int = 0,
) -> dict[str, Timing]:
    """Time several callables in one process.

    A callable must wait for its own result. The garbage collector rests while a round is timed.

    Args:
        callables: name -> what to time.
        rounds: how many turns each has.
        warmup: untimed rounds before (compilation, caches).
        in_a_row: how often a callable is timed in its turn. More than once: after a call that is not timed, so that its
            data is in the processor's caches as far as it fits.
        seed: of the order within a round.
    """
    for _ in range(warmup):
        for call in callables.values():
            call()
    order = list(callables)
    shuffle = random.Random(seed).shuffle
    seconds: dict[str, list[float]] = {name: [] for name in order}
    enabled = gc.isenabled()
    try:
        for _ in range(rounds):
            shuffle(order)
            gc.collect()
            gc.disable()
            callables[order[-1]]()  # the collection emptied the processor's caches; nobody is to pay for that
            for name in order:
                call = callables[name]
                if in_a_row > 1:
                    call()
                for _ in range(in_a_row):
                    start = time.perf_counter()
                    call()
                    seconds[name].append(time.perf_counter() - start)
            if enabled:
                gc.enable()
    finally:
        if enabled:
            gc.enable()
    return {name: Timing(tuple(seconds[name])) for name in callables}


def processor() -> str:
    """The name of this machine's processor, as far as it tells."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text(encoding="utf-8").splitlines() if about.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor() or platform.machine()


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, with rich if it is installed, else in plain text."""
    if importlib.util.find_spec("rich") is not None:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        table = Table(title=title, title_justify="left")
        for number, column in enumerate(columns):
            table.add_column(escape(column), justify="right" if number else "left", no_wrap=True)
        for row in rows:
            table.add_row(*map(escape, row))
        Console(width=max(110, 17 * len(columns))).print(table)
        return
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    print(f"\n{title}")
    for row in [columns, *rows]:
        cells = [
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells))
