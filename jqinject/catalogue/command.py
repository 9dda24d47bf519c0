"""The command line of the catalogue: `list`, `explain`, `catalogue`."""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jqinject.core
from jqinject.catalogue.entries import FILTERS, Entry, entry_for, find, quantizer_named
from jqinject.catalogue.examples import example_of
from jqinject.catalogue.pages import described, write_catalogue
from jqinject.inject import DependencyError, ExtendedInjector

COMMANDS = ("list", "explain", "catalogue")


def parser() -> argparse.ArgumentParser:
    """The arguments of the three commands."""
    made = argparse.ArgumentParser(prog="python -m jqinject", description=__doc__)
    commands = made.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="the ready-made quantizers, filtered")
    listing.add_argument("text", nargs="?", default="", help="part of the name")
    for name in FILTERS:
        listing.add_argument(f"--{name}", default="", help=f"only those whose {name} starts so")
    explaining = commands.add_parser("explain", help="the wiring of one quantizer, with overrides")
    explaining.add_argument(
        "name", metavar="NAME", help="of jqinject.quant, or your own as package.module:Name"
    )
    explaining.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="names declared anew; none are needed"
    )
    pages = commands.add_parser("catalogue", help="write pages of all quantizers")
    pages.add_argument("folder", type=Path, help="where to")
    pages.add_argument("--golden", type=Path, help="a manifest of reference cases to name")
    return made


def main(arguments: Sequence[str]) -> int:
    """Run one of the commands.

    Args:
        arguments: the command line without the program's name.

    Returns:
        The exit status: 2 if an argument is wrong, with one line on stderr.
    """
    given = parser().parse_args(arguments)
    try:
        if given.command == "list":
            asked = {name: getattr(given, name) for name in FILTERS}
            _print_table(find(text=given.text, **asked))
        elif given.command == "explain":
            print(explained(given.name, given.overrides))
        else:
            written = write_catalogue(given.folder, golden=given.golden)
            print(f"{len(written)} files in {given.folder}")
    except (ValueError, TypeError, DependencyError, OSError) as error:
        print(f"python -m jqinject {given.command}: {error}", file=sys.stderr)
        return 2
    return 0


def explained(name: str, overrides: Sequence[str]) -> str:
    """The text of `explain`.

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
    quantizer = _imported(name) if ":" in name else quantizer_named(name)
    given = dict(_override(text) for text in overrides)
    example = example_of(quantizer, given)
    return described(entry_for(name, quantizer, given), example, given)


def _imported(name: str) -> type[ExtendedInjector]:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name} cannot be imported: {error}") from None
    if not (isinstance(found, type) and issubclass(found, ExtendedInjector)):
        raise ValueError(f"{name} is not a quantizer: expected a class derived from ExtendedInjector")
    return found


def _override(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (equals and name.isidentifier()):
        raise ValueError(f"an override is name=value, got {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, getattr(jqinject.core, value, value)


def _print_table(found: Sequence[Entry]) -> None:
    if not found:
        print("no quantizer is of all these kinds")
        return
    rows = [("quantizer", *FILTERS), *((e.name, *(getattr(e, name) for name in FILTERS)) for e in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
