"""`explain` of quantizers with overrides, and of a user's own: what the index does not hold."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Sequence
from typing import Any

import jqinject.core
from jqinject.catalogue.entries import quantizer_named
from jqinject.catalogue.pages import described
from jqinject.catalogue.write_index import entry_made
from jqinject.inject import ExtendedInjector
from jqinject.inject.show import brief


def explained_anew(name: str, overrides: Sequence[str]) -> str:
    """The text of `explain`, made from the classes. See `jqinject.catalogue.catalogue_command.explained`."""
    quantizer = _imported(name) if ":" in name else quantizer_named(name)
    given = dict(_override(text) for text in overrides)
    changed = ", ".join(f"{name}={brief(value)}" for name, value in given.items())
    return described(entry_made(name, quantizer, given), changed)


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
