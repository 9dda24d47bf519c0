"""Tables and texts as wide as the terminal. Knows no array library."""

import shutil
import textwrap
from collections.abc import Collection, Sequence

LEAST = 13  # characters of the last column, whose words are wrapped


def columns() -> int:
    """How many characters fit on a line: of the terminal, or `COLUMNS`; else 80."""
    return shutil.get_terminal_size().columns


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Collection[str] = (),
    width: int | None = None,
) -> list[str]:
    """The lines of a table. The words of its last column are wrapped, and nothing is cut off.

    Where the other columns leave no room for that, the first has a line of its own in every row.

    Args:
        header: the names of the columns.
        rows: their cells.
        right: the names of the columns of numbers.
        width: characters on a line; None for those of the terminal.

    Example:
        >>> print(*table(("layer", "bytes", "why"), [("fc", "1,024", "no rule names it")], right=["bytes"]), sep="\\n")
        layer  bytes  why
        fc     1,024  no rule names it
    """
    width = columns() if width is None else width
    *widths, last = (max(len(row[column]) for row in (header, *rows)) for column in range(len(header)))
    left = width - sum(widths) - 2 * len(widths)
    lines: list[str] = []
    for row in (header, *rows):
        cells = [
            cell.rjust(size) if name in right else cell.ljust(size)
            for name, cell, size in zip(header, row, widths, strict=False)
        ]
        if left >= min(last, LEAST):
            wrapped = textwrap.wrap(row[-1], left) or [""]
            if header[-1] in right:
                wrapped[0] = wrapped[0].rjust(min(last, left))
            lines.append("  ".join([*cells, wrapped[0]]).rstrip())
            lines += [" " * (sum(widths) + 2 * len(widths)) + more for more in wrapped[1:]]
        else:
            rest = "  ".join([*cells[1:], row[-1]])
            lines += [row[0], *textwrap.wrap(rest, width, initial_indent="    ", subsequent_indent="      ")]
    return lines


def blocks(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Collection[str] = (),
    width: int | None = None,
) -> list[str]:
    """The lines of a table with many columns: where they do not fit, of several, each with the first column.

    Args:
        header, rows, right, width: see `table`.

    Example:
        >>> print(*blocks(("layer", "bytes", "noise"), [("fc", "1,024", "20 dB")], width=14), sep="\\n")
        layer  bytes
        fc     1,024
        <BLANKLINE>
        layer  noise
        fc     20 dB
    """
    width = columns() if width is None else width
    sizes = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    groups: list[list[int]] = [[]]
    for column in range(1, len(header)):
        if groups[-1] and sizes[0] + sum(2 + sizes[index] for index in (*groups[-1], column)) > width:
            groups.append([])
        groups[-1].append(column)
    lines: list[str] = []
    for group in groups:
        chosen = [[row[column] for column in (0, *group)] for row in (header, *rows)]
        lines += [*([""] if lines else []), *table(chosen[0], chosen[1:], right=right, width=width)]
    return lines


def wrapped(text: str, *, hang: str = "", width: int | None = None) -> str:
    """A text whose lines fit; those that go on begin with `hang`.

    Example:
        >>> print(wrapped("- one two three", hang="  ", width=10))
        - one two
          three
    """
    width = columns() if width is None else width
    lines = (
        textwrap.wrap(line, width, subsequent_indent=hang, break_long_words=False, break_on_hyphens=False)
        for line in text.splitlines()
    )
    return "\n".join("\n".join(line) for line in lines)


def wrapped_tree(text: str, width: int | None = None) -> str:
    """A tree whose lines fit where they can: what follows `  <- ` goes on in the next line.

    Example:
        >>> print(wrapped_tree("root\\n├── a_long_name = 1  <- Somewhere\\n└── b = 2  <- Elsewhere", 20))
        root
        ├── a_long_name = 1
        │     <- Somewhere
        └── b = 2
              <- Elsewhere
    """
    width = columns() if width is None else width
    lines: list[str] = []
    for line in text.splitlines():
        head, arrow, tail = line.rpartition("  <- ")
        if len(line) <= width or not arrow:
            lines.append(line)
            continue
        branches = len(line) - len(line.lstrip("│├└─ "))
        below = line[:branches].replace("├──", "│  ").replace("└──", "   ")
        lines += [head, f"{below}  <- {tail}"]
    return "\n".join(lines)
