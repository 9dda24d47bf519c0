"""Drives Hadamard tables and products."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jqinject.core.transforms import Chain, ChannelScale, Hadamard
from jqinject.ops import hadamard
from tests.golden._config import reading

Arrays = dict[str, np.ndarray]


def qwix_rotation(case: dict[str, Any], inputs: Arrays) -> dict[str, Any]:
    """Qwix's rotation: a Hadamard matrix that is not normalized, with signs of its rows and of its columns."""
    with reading(case["config"], "qwix_hadamard") as given:
        given.choose("peer", {"qwix": None})
        given.take("seed")
        size, signed = given.take("size"), (given.take("row_sign_flip"), given.take("col_sign_flip"))
    matrix = inputs["matrix"]
    # The first row and column of Sylvester's matrix are 1; one sign is common to both.
    rows, columns = matrix[:, 0], matrix[0] * matrix[0, 0]
    assert signed[0] or (rows == rows[0]).all()
    assert signed[1] or (columns == columns[0]).all()
    scale = ChannelScale(size)
    scale.put(jnp.asarray(columns * np.sqrt(size)))
    transform = Chain((Hadamard(signs=tuple(int(sign) for sign in rows)), scale))
    return {
        "x_rotated": transform(jnp.asarray(inputs["x"])),
        "weight_rotated": transform.dual(jnp.asarray(inputs["weight"]).T).T,
    }


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
    identity = jnp.eye(size)
    return {
        "matrix": hadamard.transform(identity),
        "random_matrix": Hadamard(signs=tuple(int(sign) for sign in inputs["signs"]))(identity),
        "y": hadamard.transform(jnp.asarray(inputs["x"])),
        "y_transposed": hadamard.transform(jnp.asarray(inputs["x"]), inverse=True),
    }
