"""Layers of recurrent cells, in one direction or two, over whole sequences."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.nn.base.quant_layer import Out, QuantLayer
from jqinject.nn.base.slots import Slot
from jqinject.nn.base.weight_axes import check_features
from jqinject.nn.recurrent import _sequence
from jqinject.nn.recurrent._cell import QuantRecurrentCell
from jqinject.quant_tensor import as_array, concatenate, expand_dims, on_integers


@dataclass(frozen=True)
class UniformInit:
    """Numbers drawn uniformly from [-bound, bound)."""

    bound: float

    def __call__(self, key: Any, shape: Any, dtype: Any = float, **more: Any) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -self.bound, self.bound)


class QuantRecurrentStack(QuantLayer[Out]):
    """Abstract: layers of recurrent cells over whole sequences.

    Attributes:
        layers: layer -> direction -> the cell.
    """

    layers: Any
    cell_class: ClassVar[type[QuantRecurrentCell]]

    @classmethod
    def override_slots(cls) -> tuple[Slot, ...]:
        """Those of the cells."""
        return cls.cell_class.override_slots()

    def _build(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int,
        bidirectional: bool,
        quantizers: Mapping[str, Any],
        shared: Sequence[str],
        shares_input_weights: bool,
        more: Mapping[str, Any],
    ) -> None:
        """Make the cells.

        Args:
            input_size, hidden_size, num_layers, bidirectional: the user's.
            quantizers: argument -> what was given for it.
            shared: of these, those of which the first cell's serves all cells.
            shares_input_weights: whether the two directions have the kernels of the input in common.
            more: further keywords of the cells, overrides included.
        """
        if num_layers < 1:
            raise ValueError(f"{type(self).__name__}: num_layers has to be at least 1, got {num_layers}")
        if shares_input_weights and not bidirectional:
            raise ValueError(
                f"{type(self).__name__}(shared_input_hidden_weights=True) shares the weights of the input between two "
                "directions.\n  cure: bidirectional=True"
            )
        draw = UniformInit(1.0 / math.sqrt(hidden_size))
        initial = {"kernel_init": draw, "recurrent_kernel_init": draw, "bias_init": draw}
        arguments = {**initial, **more, **quantizers}
        layers = []
        for layer in range(num_layers):
            features = input_size if layer == 0 else hidden_size * (2 if bidirectional else 1)
            cells: list[Any] = []
            for _ in range(2 if bidirectional else 1):
                taken = self._input_layers(cells[0]) if cells and shares_input_weights else {}
                cells.append(self._cell(features, hidden_size, {**arguments, "input_layers": taken}))
                arguments = _sharing(arguments, shared, cells[-1])
            layers.append(nnx.List(cells))
        self.layers = nnx.List(layers)

    @abstractmethod
    def _cell(self, features: int, hidden_size: int, arguments: Mapping[str, Any]) -> Any:
        """One direction of one layer."""

    @abstractmethod
    def _input_layers(self, forward: Any) -> Mapping[str, Any]:
        """Layer of the backward cell -> the layer of the forward cell that it takes."""

    def _run(
        self, inputs: Any, batch_first: bool, initial: tuple[Any, ...]
    ) -> tuple[Any, list[Any], list[Any]]:
        """All layers.

        Args:
            inputs: those of the call.
            batch_first: where time is.
            initial: the states of all layers and directions, each an array or None.

        Returns:
            The outputs of the last layer, and by layer and direction the last hidden and cell states.
        """
        if inputs.ndim != 3:
            axes = "(batch, time, features)" if batch_first else "(time, batch, features)"
            raise ValueError(f"{type(self).__name__} takes {axes}, got shape {tuple(inputs.shape)}")
        check_features(self, inputs, {-1: self.layers[0][0].in_features}, argument="input_size")
        count = sum(len(cells) for cells in self.layers)
        for given in initial:
            if given is not None and given.shape[0] != count:
                raise ValueError(
                    f"{type(self).__name__}: an initial state has one row for each layer and direction, here {count}, "
                    f"got shape {tuple(given.shape)}"
                )
        outputs, memories, index = [], [], 0
        for number, cells in enumerate(self.layers):
            sequences = []
            for direction, cell in enumerate(cells):
                states = tuple(None if given is None else given[index] for given in initial)
                made = _sequence.run(
                    cell,
                    inputs,
                    states,
                    time_axis=1 if batch_first else 0,
                    reverse=direction == 1,
                    quantize_input=number == 0,
                )
                sequences.append(made.outputs)
                outputs.append(_row(made.output))
                memories.append(None if made.memory is None else _row(made.memory))
                index += 1
            inputs = sequences[0] if len(sequences) == 1 else concatenate(sequences, axis=-1)
        return inputs, outputs, memories

    def _joined(self, states: list[Any]) -> Any:
        return states[0] if len(states) == 1 else concatenate(states, axis=0)


def _sharing(arguments: dict[str, Any], shared: Sequence[str], cell: Any) -> dict[str, Any]:
    """Arguments of the cells after one, which share some of its quantizers."""
    known = dict(arguments)
    for name in shared:
        known[name] = getattr(cell, name)
        prefix = name.removesuffix("quant")
        known = {key: value for key, value in known.items() if key == name or not key.startswith(prefix)}
    return known


def _row(state: Any) -> Any:
    """A state with an axis for layers and directions in front."""
    return expand_dims(state, 0) if on_integers(state) else jnp.expand_dims(state, 0)


def returned(tensor: Any, as_quant_tensor: bool) -> Any:
    """A result as the user wants it."""
    return tensor if as_quant_tensor and on_integers(tensor) else as_array(tensor)
