"""Drives Hadamard tables and products."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jqinject.ops import hadamard
from tests.golden._config import reading

Arrays = dict[str, np.ndarray]


def matrices(case: dict[str, Any], inputs: Arrays) -> dict[str, Any]:
    """Hadamard tables and products."""
    with reading(case["config"], "hadamard") as given:
        given.choose("peer", {"brevitas": None})
        size = given.take("size")
        if case["feature"].endswith("hadamard_table"):
            return {"table": hadamard.table(size)}
        if case.get("expect_error"):
            return {"table": hadamard.table_size(size)}
        assert given.take("table") == hadamard.table_size(size)
    return {
        "matrix": hadamard.matrix(size),
        "random_matrix": hadamard.with_signs(jnp.asarray(inputs["signs"])),
        "y": hadamard.transform(jnp.asarray(inputs["x"])),
        "y_transposed": hadamard.transform(jnp.asarray(inputs["x"]), inverse=True),
    }
