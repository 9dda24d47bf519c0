"""A model in a small file: 8-bit integers with a scale for each output channel, by jqinject's own quantizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

import jqinject
from byte_lm.model import ByteLM, Size
from jqinject import Rule
from jqinject.quant import Int8WeightPerChannelAbsMax

CODES, SCALE, SIZE = "/codes", "/scale", "size"


def save(model: ByteLM, path: str | Path) -> None:
    """Write a model's weights as int8 codes and float32 scales, and its gains as float32.

    Args:
        model: float.
        path: of an `.npz` file.
    """
    quantized = jqinject.quantize(nnx.clone(model), Rule(weight_quant=Int8WeightPerChannelAbsMax))
    quantized.eval()
    arrays: dict[str, Any] = {SIZE: np.array(json.dumps(model.size.as_dict()))}
    for keys, value in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        *layer, name = map(str, keys)
        path_ = ".".join([*layer, name])
        found: Any = quantized
        for key in layer:
            found = found[int(key)] if key.isdigit() else getattr(found, key)
        if np.ndim(value[...]) < 2:
            arrays[path_] = np.asarray(value[...], np.float32)
            continue
        weight = found.quant_weight()
        arrays[path_ + CODES] = np.asarray(weight.int(), np.int8)
        arrays[path_ + SCALE] = np.asarray(weight.scale, np.float32)
    np.savez(Path(path), **arrays)


def load(path: str | Path, dtype: Any = jnp.float32) -> ByteLM:
    """The float model with the weights of a file.

    Args:
        path: of a file that `save` wrote.
        dtype: of the computation.
    """
    with np.load(Path(path)) as arrays:
        size = Size(**json.loads(str(arrays[SIZE])))
        state: dict[str, Any] = {}
        for name in (name for name in arrays.files if not name.endswith(SCALE) and name != SIZE):
            path_ = name.removesuffix(CODES)
            scale = arrays[path_ + SCALE] if name.endswith(CODES) else 1.0
            inner = state
            *layer, last = path_.split(".")
            for key in layer:
                inner = inner.setdefault(int(key) if key.isdigit() else key, {})
            inner[last] = np.asarray(arrays[name] * scale, np.float32)
    model = ByteLM(size, dtype=dtype, rngs=nnx.Rngs(0))
    jqinject.load_state(model, state)
    return model
