"""Records the arguments and outputs of single layers of a model, over batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.model.running.recorder import Recorder
from jqinject.program import Around, Call, compiled_call, intercept, with_copied_modules
from jqinject.quant_tensor import as_array

GIVEN, RETURNED = "given", "returned"
Layers = Callable[[nnx.Module], dict[str, Any]]


class Record(NamedTuple):
    """One call of a layer.

    Attributes:
        given: its arguments, (positional, by keyword).
        returned: its output, as an array.
    """

    given: Any
    returned: np.ndarray


class LayerRecords:
    """Runs a model on batches and records the calls of one of its layers; compiled once for all layers.

    Args:
        model: in the mode to run it in; read at each run, never changed.
        layers: finds the layers of a model, by path.
        calls: of the model.
    """

    def __init__(self, model: nnx.Module, layers: Layers, calls: list[Call]) -> None:
        self._model = model
        self._calls = calls
        self._recorder = Recorder()
        self._around = {path: _Recording(path, self._recorder, i) for i, path in enumerate(layers(model))}

        def run(model: Any, call: Call, chosen: jax.Array) -> None:
            copy = nnx.clone(model, graph=True)
            for path, layer in layers(copy).items():
                self._around[path].chosen = chosen
                intercept(layer, self._around[path])
            call(copy)

        self._run = compiled_call(run)

    def order(self) -> list[str]:
        """The layers that run, in execution order."""
        self._play(-1)
        return self._recorder.layers(RETURNED)

    def of(self, path: str) -> list[Record]:
        """Every call of a layer, with the current parameters."""
        around = self._around[path]
        self._play(around.index)
        found = zip(self._recorder.of(path, GIVEN), self._recorder.of(path, RETURNED), strict=True)
        records = [Record(around.rebuilt(given), np.asarray(y, np.float32)) for given, (y,) in found]
        self._recorder.clear()
        return records

    def _play(self, chosen: int) -> None:
        self._recorder.clear()
        for call in with_copied_modules(self._calls):
            self._run(self._model, call, jnp.int32(chosen))
        self._recorder.finish(nnx.state(self._model), [call.arrays for call in self._calls])


class _Recording(Around):
    """Records a layer's arguments and output, if it is the chosen one."""

    def __init__(self, path: str, recorder: Recorder, index: int) -> None:
        self._path = path
        self._recorder = recorder
        self.index = index
        self.chosen: Any = None
        self._structure: Any = None
        self._dtypes: list[Any] = []

    def __call__(self, layer: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See `Around`."""
        y = call(*args, **kwargs)
        leaves, self._structure = jax.tree.flatten((args, kwargs))
        arrays = [jnp.asarray(leaf) for leaf in leaves]
        self._dtypes = [array.dtype for array in arrays]
        out = as_array(y).astype(jnp.float32)

        def note() -> None:
            self._recorder.note(self._path, GIVEN, *arrays)
            self._recorder.note(self._path, RETURNED, out)

        jax.lax.cond(self.chosen == self.index, note, lambda: None)
        return y

    def rebuilt(self, leaves: tuple[np.ndarray, ...]) -> Any:
        """The arguments of a call, from the arrays in them."""
        typed = [jnp.asarray(leaf, dtype) for leaf, dtype in zip(leaves, self._dtypes, strict=True)]
        return jax.tree.unflatten(self._structure, typed)
