"""What the 8-bit float quantizers of a model saw, step by step."""

from collections import defaultdict
from dataclasses import dataclass, field

import jax
import numpy as np
from flax import nnx

from jqinject.proxy import QuantProxyFromInjector


def quantizers_of(model: nnx.Module) -> dict[str, QuantProxyFromInjector]:
    """The quantizers with an amax history, by path."""
    return {
        ".".join(map(str, path)): node
        for path, node in nnx.iter_modules(model)
        if isinstance(node, QuantProxyFromInjector) and node.amax_history is not None
    }


@dataclass
class Record:
    """Amax and scale of every quantizer at every step; call it after each step.

    The arrays of the model are only kept, not read, so that the steps need not wait for one another.
    """

    model: nnx.Module
    _amaxes: dict[str, list[jax.Array]] = field(default_factory=lambda: defaultdict(list))
    _scales: dict[str, list[jax.Array]] = field(default_factory=lambda: defaultdict(list))

    def __call__(self) -> None:
        """Remember the newest amax of every quantizer, and the scale that it quantized with."""
        for name, proxy in quantizers_of(self.model).items():
            self._amaxes[name].append(proxy.amax_history.newest)
            self._scales[name].append(proxy.tensor_quant.scaling_impl.scale.get_value())

    @property
    def amaxes(self) -> dict[str, np.ndarray]:
        """Quantizer -> the largest magnitude of every step."""
        return {name: np.array(amaxes) for name, amaxes in self._amaxes.items()}

    @property
    def scales(self) -> dict[str, np.ndarray]:
        """Quantizer -> the scale of every step."""
        return {name: np.array(scales) for name, scales in self._scales.items()}

    @property
    def saturated(self) -> float:
        """The share of the tensors quantized whose largest number did not fit the format, and was clipped."""
        largest = {name: proxy.tensor_quant.grid.largest for name, proxy in quantizers_of(self.model).items()}
        scales = self.scales
        clipped = [amaxes > scales[name] * largest[name] * (1 + 1e-5) for name, amaxes in self.amaxes.items()]
        return float(np.mean(clipped)) if clipped else 0.0
