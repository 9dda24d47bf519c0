"""The command line of the catalogue: `list`, `explain` and `show`.

The first two answer from the index; JAX is imported for overrides, for quantizers of your own, and for `show`.
"""

import argparse
import sys
import tempfile
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from jqinject.catalogue.index import FILTERS, GOALS, Entry, described, entry_of, find, goal_named
from jqinject.inject import DependencyError
from jqinject.terminal import table

COMMANDS = ("list", "explain", "show")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the commands."""
    command = argparse.ArgumentParser(prog="python -m jqinject", description=__doc__)
    commands = command.add_subparsers(dest="command", required=True)
    goals = "\n".join(f"  {name}\n    {goal.aim}" for name, goal in GOALS.items())
    listing = commands.add_parser(
        "list",
        help="the ready-made quantizers, filtered",
        epilog=f"goals:\n{goals}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    listing.add_argument("text", nargs="?", default="", help="part of the name")
    listing.add_argument("--goal", default="", help="those to begin with for a goal, listed below")
    for name in FILTERS:
        listing.add_argument(f"--{name}", default="", help=f"only those whose {name} starts so")
    explaining = commands.add_parser("explain", help="the wiring of one quantizer, with overrides")
    explaining.add_argument(
        "name", metavar="NAME", help="of jqinject.quant, or your own as package.module:Name"
    )
    explaining.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="names declared anew; none are needed"
    )
    showing = commands.add_parser("show", help="a web page on which a quantizer's choices are turned")
    showing.add_argument(
        "names",
        nargs="*",
        default=[],
        metavar="NAME",
        help="as of explain; without any, the first of every goal",
    )
    showing.add_argument("--goal", default="", help="those of a goal too, as of list")
    showing.add_argument("--out", type=Path, metavar="FILE", help="write the page there, and open no browser")
    showing.add_argument(
        "--no-browser", action="store_true", help="write the page to a temporary file, and open no browser"
    )
    return command


def main(arguments: Sequence[str]) -> int:
    """Run one of the commands.

    Args:
        arguments: the command line without the program's name.

    Returns:
        The exit status: 2 if an argument is wrong, with one line on stderr.
    """
    options = parser().parse_args(arguments)
    try:
        if options.command == "list":
            criteria = {name: vars(options)[name] for name in ("text", "goal", *FILTERS)}
            print(*_listed(find(**criteria), options.goal), sep="\n")
        elif options.command == "explain":
            print(explained(options.name, options.overrides))
        else:
            _show(options)
    except (ValueError, TypeError, DependencyError, OSError) as error:
        print(f"python -m jqinject {options.command}: {error}", file=sys.stderr)
        return 2
    return 0


def explained(name: str, overrides: Sequence[str]) -> str:
    """Return the text of `explain`.

    Args:
        name: a quantizer of `jqinject.quant`, or `package.module:Name`.
        overrides: texts `key=value`; a value is a Python literal, a component of `jqinject.core`, or a text.

    Raises:
        ValueError: no such quantizer; an override without `=`.
        TypeError: an override that nothing asks for.
        DependencyError: the quantizer cannot be assembled.

    Example:
        >>> text = explained("Int8WeightPerTensorFloat", ["bit_width=4"])
        >>> next(line for line in text.splitlines() if "bit_width =" in line)
        '│   ├── bit_width = 4  <- override by let'
    """
    if ":" not in name:
        entry = entry_of(name)
        if not overrides:
            return described(entry)
    from jqinject.catalogue.entries import explained_anew

    return explained_anew(name, overrides)


def _show(options: argparse.Namespace) -> None:
    """Write the page, print its path, and open it. Wrong arguments are refused before anything is measured."""
    if options.goal:
        goal_named(options.goal)
    for name in options.names:
        if ":" not in name:
            entry_of(name)
    out: Path | None = options.out
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise ValueError(
            f"--out {out}: no file can be written there; expected a file in a folder that exists"
        )
    from jqinject.catalogue.entries import quantizer_named
    from jqinject.catalogue.explorer import explorer_page, usual_quantizers

    usual = usual_quantizers(options.goal) if options.goal or not options.names else ()
    names = (*options.names, *usual)
    page = explorer_page(
        map(quantizer_named, names), lambda name: print(f"measuring {name}", file=sys.stderr)
    )
    if out is None:
        with tempfile.NamedTemporaryFile(prefix="jqinject-", suffix=".html", delete=False) as file:
            out = Path(file.name)
    out.write_text(page, encoding="utf-8")
    print(out)
    quiet = options.out is not None or options.no_browser
    if not quiet and not webbrowser.open(out.resolve().as_uri()):
        print("no browser could be opened; open the page in one", file=sys.stderr)


def _listed(entries: Sequence[Entry], goal: str) -> list[str]:
    """Return the table of quantizers, as wide as the terminal; on two lines each where their names leave no room."""
    if not entries:
        return ["no quantizer is of all these kinds"]
    rows = [(entry.name, *entry.facts.values()) for entry in entries]
    return [*([GOALS[goal].aim, ""] if goal else []), *table(("quantizer", *FILTERS), rows)]
