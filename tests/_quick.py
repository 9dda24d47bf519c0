"""Compiling quickly, for tests that are about structure and not about speed or the last bit."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def compiled_quickly() -> Iterator[None]:
    """Without the optimizations that take half the time of compiling."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
