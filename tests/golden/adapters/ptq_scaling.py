"""Drives passes that rescale channels: SmoothQuant, AWQ, equalization, and Hadamard matrices."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jqinject.ops import hadamard
from jqinject.recipes.passes.smooth_quant import smooth_scales
from tests.golden._config import reading

Arrays = dict[str, np.ndarray]


def optimum(case: dict[str, Any], inputs: Arrays) -> dict[str, Any]:
    """ModelOpt's SmoothQuant, whose scales multiply the inputs."""
    with reading(case["config"], "modelopt") as given:
        given.choose("peer", {"nvidia-modelopt": None})
        given.choose("algorithm", {"smoothquant": None})
        given.choose("batches", {"2 of 32 rows": None})
        given.choose("alpha_step", {None: None})
        given.choose("block_size", {None: None})
        given.choose("bits", {8: None})
        given.take("seed")
        alpha = given.take("alpha")
    scales = smooth_scales(np.abs(inputs["x"]).max(axis=0), np.abs(inputs["weight"]).max(axis=0), alpha)
    x, weight = inputs["x"] / scales, inputs["weight"] * scales

    def rounded(numbers: np.ndarray, largest: np.ndarray) -> np.ndarray:
        return np.round(numbers / (largest / 127)) * (largest / 127)

    outputs = rounded(x, np.abs(x).max())[:4] @ rounded(weight, np.abs(weight).max(axis=1, keepdims=True)).T
    return {"pre_quant_scale": 1 / scales, "weight": weight, "y_first4": outputs}


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
