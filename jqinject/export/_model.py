"""Steps shared by both exporters: check the arguments, and make a serving copy of the model."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core.state.record import flat_parts
from jqinject.model.freezing import settle_ranges
from jqinject.model.static_ranges import check_calibrated
from jqinject.model.walk import ModelIndex
from jqinject.ops.devices.processes import on_host, spans_processes
from jqinject.quant_tensor import QuantTensor, as_array


def serving_copy(model: Any, name: str, allow_uncalibrated: bool) -> Any:
    """A copy of a model, in evaluation mode.

    Args:
        model: an NNX module; it is not changed.
        name: the calling function's name, for the error text.
        allow_uncalibrated: go on even if static ranges of activations never saw data.

    Raises:
        TypeError: it is not an NNX module.
        ValueError: a static range that never saw data.
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"{name} takes an NNX module, got {type(model).__name__}.\n"
            f"  cure: {name}(model, input), the model first"
        )
    if not allow_uncalibrated:
        check_calibrated(ModelIndex(model), name)
    copy = nnx.clone(model, graph=True)
    copy.eval()
    _bring_home(copy)
    settle_ranges(ModelIndex(copy).modules)
    return copy


def _bring_home(model: Any) -> None:
    """Gather arrays that span processes: every process exports the whole program."""
    for _, variable in flat_parts(nnx.state(model, graph=True)):
        held = variable.get_value()
        if spans_processes(held):
            variable.set_value(jnp.asarray(on_host(held)))


def input_specs(inputs: tuple[Any, ...], name: str) -> tuple[Any, ...]:
    """Shapes and dtypes of the inputs, arrays or pytrees of them.

    Raises:
        TypeError: an input has no shape and dtype, or is a QuantTensor.
    """

    def spec(x: Any) -> jax.ShapeDtypeStruct:
        if not isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
            raise TypeError(
                f"{name} takes arrays or jax.ShapeDtypeStructs as inputs, got {type(x).__name__}.\n"
                "  cure: jnp.asarray(x); the value of a QuantTensor, and a quantizer at the model's input"
            )
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    return jax.tree.map(spec, inputs, is_leaf=_is_quant_tensor)


def plain(output: Any) -> Any:
    """An output with arrays instead of QuantTensors, which other programs do not know."""
    return jax.tree.map(as_array, output, is_leaf=_is_quant_tensor)


def checked_path(path: str | os.PathLike[str], name: str) -> Path:
    """A path to write to.

    Raises:
        FileNotFoundError: its folder does not exist.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"{name}: there is no folder {str(path.parent)!r} to write {path.name!r} to.\n  cure: make it first"
        )
    return path


def needed(package: str, extra: str, name: str) -> Any:
    """Import an optional package.

    Raises:
        ImportError: it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{name} needs the package {error.name!r}, which is not installed.\n"
            f'  cure: pip install "jqinject[{extra}]"',
            name=error.name,
        ) from error


def _is_quant_tensor(x: Any) -> bool:
    return isinstance(x, QuantTensor)
