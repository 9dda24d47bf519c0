"""Frozen parameters of Linen modules, which a bridge hands to Linen as floats."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from flax import nnx

from jqinject.dot import FrozenParam


@contextlib.contextmanager
def dequantized_for_linen(model: Any) -> Iterator[None]:
    """Let bridges to Linen hold dequantized parameters while a private copy of a model is called.

    A bridge tells Linen's collections by the types of Variables, and knows `nnx.Param` alone. In a program each is one
    equation that dequantizes, which the interpreter recognizes.

    Args:
        model: a private copy.
    """
    held = [
        (container, key, frozen)
        for _, module in nnx.iter_modules(model, graph=True)
        if isinstance(module, nnx.bridge.ToNNX)
        for container, key, frozen in _frozen_in(vars(module))
    ]
    for container, key, frozen in held:
        container[key] = nnx.Param(frozen[...])
    yield
    for container, key, frozen in held:
        container[key] = frozen


def _frozen_in(container: Any) -> list[tuple[Any, Any, FrozenParam]]:
    found: list[tuple[Any, Any, FrozenParam]] = []
    for key, value in list(container.items()):
        if isinstance(value, FrozenParam):
            found.append((container, key, value))
        elif isinstance(value, dict | nnx.Dict):
            found += _frozen_in(value)
    return found
