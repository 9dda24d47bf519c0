"""The calls of a model that batches of data stand for."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.program import CALL, Call, Method, arguments_of, checked_method


def with_progress(items: Iterable[Any], what: str, *, shown: bool) -> Iterator[Any]:
    """The items, with a bar that advances as they are taken.

    Args:
        items: any iterable; its length is shown if it has one.
        what: the label.
        shown: whether to show a bar at all.
    """
    if not shown or importlib.util.find_spec("rich") is None:
        yield from items
        return
    from rich.progress import track

    total = len(items) if isinstance(items, Sized) else None
    yield from track(items, description=what, total=total, transient=True)


CallBatch = Callable[[Any, Any], Any]


def check_batches(batches: Any, caller: str) -> None:
    """Refuse a single batch, whose rows would be taken for batches.

    Args:
        batches: what a user gave.
        caller: the calling function's name, for the error text.

    Raises:
        TypeError: it is an array or a dict, or not iterable.
    """
    single = isinstance(batches, jax.Array | np.ndarray | Mapping)
    if single or not isinstance(batches, Iterable):
        raise TypeError(
            f"{caller} takes an iterable of batches, got {type(batches).__name__}.\n"
            "  cure: [x] for a single batch; list(x) where every x[i] is one"
        )


class BatchCalls:
    """Makes a call of each batch: of a method, or of the user's function of model and batch.

    Args:
        model: an NNX module.
        method: the method that batches are arguments of.
        call: a function of the model and a batch, or None.
        caller: the calling function's name, for error texts.

    Raises:
        TypeError: `model` is not an NNX module; `method` or `call` is not a function.
        ValueError: the model has no such method; both are given.
    """

    def __init__(self, model: Any, method: Method, call: CallBatch | None, caller: str) -> None:
        if not isinstance(model, nnx.Module):
            raise TypeError(f"{caller} takes an NNX module, got {type(model).__name__}")
        if call is not None and method != CALL:
            raise ValueError(
                f"{caller}: give method={method!r:.80}, which batches are arguments of, or call=..., a function of the "
                "model and a batch; not both"
            )
        if call is not None and not callable(call):
            raise TypeError(
                f"{caller}: call must be a function of the model and a batch, got {type(call).__name__}"
            )
        self._method = checked_method(model, method, caller) if call is None else call
        self._whole = call is not None
        self._caller = caller

    def of(self, batches: Iterable[Any], what: str = "", *, progress: bool = False) -> Iterator[Call]:
        """The calls, one for each batch.

        Args:
            batches: the batches.
            what: label of the progress bar.
            progress: whether to show one.

        Raises:
            TypeError: a batch has shapes without numbers.
            ValueError: a batch holds nan or inf, or there are no batches.
        """
        count = 0
        for count, batch in enumerate(with_progress(batches, what, shown=progress), 1):
            yield self._checked(batch, count - 1)
        if count == 0:
            raise ValueError(
                f"{self._caller} got no batch.\n  cure: give it an iterable that is not used up, of arrays"
            )

    def _checked(self, batch: Any, index: int) -> Call:
        args, kwargs = ((batch,), {}) if self._whole else arguments_of(batch)
        for path, leaf in jax.tree.leaves_with_path((args, kwargs)):
            where = jax.tree_util.keystr(path[1:]) or "its array"
            if isinstance(leaf, jax.ShapeDtypeStruct):
                raise TypeError(
                    f"{self._caller} runs the model, and batch {index} has a shape without numbers in {where}.\n"
                    "  cure: batches of arrays"
                )
            if not _is_finite(leaf):
                raise ValueError(
                    f"batch {index} has nan or inf in {where}, of shape {leaf.shape}: a range made from it would be of "
                    "no use.\n  cure: leave such samples out"
                )
        return Call(args, kwargs, self._method)


def _is_finite(leaf: Any) -> bool:
    if not (isinstance(leaf, jax.Array | np.ndarray) and jnp.issubdtype(leaf.dtype, jnp.floating)):
        return True
    if isinstance(leaf, jax.Array):  # checked in place: an array across processes is not whole in any of them
        return bool(jnp.isfinite(leaf).all())
    return bool(np.isfinite(leaf.astype(np.float32)).all())
