"""How a tensor lies in a parameter where no rule says it."""

from __future__ import annotations

import math

from jqinject.formats.checkpoint import Checkpoint
from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.loading.layout_axes import AxesOfLayout


def guessed_axes(path: str, source: tuple[int, ...], shape: tuple[int, ...], name: str) -> AxesOfLayout:
    """How a tensor lies in a parameter, by their shapes and the parameter's name.

    Args:
        path, shape: of the parameter.
        name, source: of the tensor, and its shape.

    Raises:
        CheckpointError: it may lie in several ways, or in none.
    """
    leaf = path.rpartition(".")[2]
    if not shape and source == (1,):
        return AxesOfLayout((), (), ())
    if len(source) == 1:
        return AxesOfLayout.of(
            f"({' '.join(map(_letter, range(len(shape))))}) -> {' '.join(map(_letter, range(len(shape))))}"
        )
    out, into = source[0], math.prod(source[1:])
    if len(source) != 2:
        raise CheckpointError(f"{name} has {len(source)} axes.\n  cure: names with axes, for {path}")
    fits = []
    if shape == (into, out):
        fits.append("out in -> in out")
    if shape == (out, into):
        fits.append("out in -> out in")
    if len(shape) == 3 and shape[0] == into:
        fits.append("(heads dim) in -> in heads dim")
    if len(shape) == 3 and shape[-1] == out:
        fits.append("out (heads dim) -> heads dim out")
    known = {"kernel": "out in -> in out", "embedding": "out in -> out in", "weight": "out in -> out in"}.get(
        leaf
    )
    if known in fits and len(shape) == 2:
        return AxesOfLayout.of(known)
    if math.prod(source) != math.prod(shape):
        raise CheckpointError(
            f"{name}, {source}, does not fit {path}, {shape}: {math.prod(source)} numbers for {math.prod(shape)}.\n"
            "  cure: a model of the checkpoint's sizes; a Name that joins or divides tensors"
        )
    if len(fits) != 1:
        what = "does not fit" if not fits else "may be transposed in"
        raise CheckpointError(
            f"{name}, {source}, {what} {path}, {shape}.\n"
            f"  cure: names={{{name!r}: ({path!r}, 'out in -> in out')}}, which says how its axes lie"
        )
    return AxesOfLayout.of(fits[0])


def axes_of_tree(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> str | None:
    """How an array of a JAX model's tree lies in a parameter of its shape; None where nothing says so."""
    matrix = checkpoint.matrices.get(name)
    if matrix is None or matrix.parameter_shape != shape:
        return None
    return matrix.axes


def _letter(at: int) -> str:
    return "abcdefgh"[at]
