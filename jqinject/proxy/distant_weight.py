"""Holders of a proxy whose weight is a Variable elsewhere in the model."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from flax import nnx

from jqinject.core.construction.component import InnerModule


class DistantWeight(InnerModule):
    """Abstract: holds the proxy of a weight that another module holds, so that the weight keeps its one path."""

    @property
    @abstractmethod
    def weight(self) -> nnx.Variable[Any]:
        """The weight."""

    @abstractmethod
    def beside_weight(self) -> Any:
        """A module with the same facts that holds the weight, for as long as an assembly takes."""


def beside_weights(layers: tuple[Any, ...]) -> tuple[Any, ...]:
    """Layers as an assembly needs them: each holds its weight."""
    return tuple(layer.beside_weight() if isinstance(layer, DistantWeight) else layer for layer in layers)
