"""The command line of the catalogue: `list` and `explain`.

It answers from the index; JAX is imported for overrides and for quantizers of your own alone.
"""

import argparse
import sys
from collections.abc import Sequence

from jqinject.catalogue.index import FILTERS, GOALS, Entry, described, entry_of, find
from jqinject.inject import DependencyError
from jqinject.terminal import table

COMMANDS = ("list", "explain")


def parser() -> argparse.ArgumentParser:
    """Return the parser of both commands."""
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
    return command


def main(arguments: Sequence[str]) -> int:
    """Run one of both commands.

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
        else:
            print(explained(options.name, options.overrides))
    except (ValueError, TypeError, DependencyError) as error:
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


def _listed(entries: Sequence[Entry], goal: str) -> list[str]:
    """Return the table of quantizers, as wide as the terminal; on two lines each where their names leave no room."""
    if not entries:
        return ["no quantizer is of all these kinds"]
    rows = [(entry.name, *entry.facts.values()) for entry in entries]
    return [*([GOALS[goal].aim, ""] if goal else []), *table(("quantizer", *FILTERS), rows)]
