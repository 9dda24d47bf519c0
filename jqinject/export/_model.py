"""Steps shared by both exporters: check the arguments, and make a serving copy of the model."""

import importlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike

from jqinject.core.state import flat_parts
from jqinject.model import freezing, walk
from jqinject.ops.processes import on_host, spans_processes
from jqinject.program import Call, SplitCall
from jqinject.quant_tensor import as_array, is_quantized

PyTree: TypeAlias = Any


def serving_copy(model: nnx.Module, name: str, allow_uncalibrated: bool) -> nnx.Module:
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
        walk.check_calibrated(walk.ModelIndex(model), name)
    copy = nnx.clone(model, graph=True)
    copy.eval()
    _bring_home(copy)
    freezing.freeze_ranges(walk.ModelIndex(copy).modules)
    return copy


def _bring_home(model: nnx.Module) -> None:
    """Gather arrays that span processes: every process exports the whole program."""
    for _, variable in flat_parts(nnx.state(model, graph=True)):
        value = variable.get_value()
        if spans_processes(value):
            variable.set_value(jnp.asarray(on_host(value)))


class ExportedCall:
    """A call of a model as a function of arrays alone: everything else in it is a part of the program.

    Args:
        model: a private copy.
        call: of it, with arrays or `jax.ShapeDtypeStruct`s.
        name: the calling function's name, for the error text.

    Attributes:
        specs: shapes and dtypes of the arrays.
        signature: the arguments of the program, (positional, by keyword): those of the call that hold arrays, with
            their shapes and dtypes, and None in the place of everything else.
        state: of the model and of modules among the arguments.

    Raises:
        TypeError: there are arguments, and no array among them; a QuantTensor.
    """

    def __init__(self, model: nnx.Module, call: Call, name: str) -> None:
        leaves = jax.tree.leaves((call.args, call.kwargs), is_leaf=is_quantized)
        wrong = [x for x in leaves if is_quantized(x)] or ([] if call.arrays or call.modules else leaves)
        if wrong:
            raise TypeError(
                f"{name} takes arrays or jax.ShapeDtypeStructs as inputs, got {type(wrong[0]).__name__}.\n"
                "  cure: jnp.asarray(x); the value of a QuantTensor, and a quantizer at the model's input"
            )
        self._name, self._split = name, SplitCall(model, call)
        self.state = self._split.state
        self.specs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in call.arrays]
        self.signature = _with_arrays_only(call, self.specs)

    def __call__(self, state: PyTree, arrays: Sequence[ArrayLike]) -> PyTree:
        """The outputs, with arrays instead of QuantTensors.

        Raises:
            ValueError: the call changes a module among its arguments, which the program could not return.
        """
        model, call = self._split.merged(state, arrays)
        before = [jax.tree.leaves(nnx.state(module, graph=True)) for module in call.modules]
        outputs = call(model)
        for module, leaves in zip(call.modules, before, strict=True):
            after = jax.tree.leaves(nnx.state(module, graph=True))
            if len(after) != len(leaves) or any(x is not y for x, y in zip(after, leaves, strict=True)):
                raise ValueError(
                    f"{self._name}: the call changes the {type(module).__name__} among its arguments, and the program "
                    "returns the outputs alone.\n  cure: method=..., a function that takes the model and arrays, makes "
                    f"the {type(module).__name__} of them, and returns what changed"
                )
        return jax.tree.map(as_array, outputs, is_leaf=is_quantized)  # other programs know no QuantTensors


def _with_arrays_only(
    call: Call, specs: Sequence[jax.ShapeDtypeStruct]
) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
    frame = replace(call.frame, others=(None,) * len(call.frame.others))
    bare = frame.filled(specs, [None] * len(call.modules))
    args = list(bare.args)
    while args and not jax.tree.leaves(args[-1]):
        args.pop()
    return tuple(args), {name: value for name, value in bare.kwargs.items() if jax.tree.leaves(value)}


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
