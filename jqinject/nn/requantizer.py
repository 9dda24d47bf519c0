"""`Requantizer`: how new float values of a frozen weight become low-bit numbers, as its first ones did.

Freezing takes a weight's quantizer away. What is static in it stays in the metadata of the `FrozenParam`: wiring and
declarations, no arrays. The state has no path more, and no call reads it; `jqinject.refresh` does.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.typing import PathParts

from jqinject.nn.base.parameter_site import ParameterSite
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.ops.cut import Cut
from jqinject.proxy import WeightQuantProxyFromInjector

#: Metadata of a `FrozenParam`: its `Requantizer`.
REQUANTIZER = "requantizer"


class Axes(NamedTuple):
    """What is static in how a weight is stored.

    Attributes:
        summed: the axes that contractions sum over, stored last.
        of_sums: the axes along which a contraction of integers needs sums; None if it needs none.
        cut: the groups, if they cross shards; else None.
    """

    summed: tuple[int, ...]
    of_sums: tuple[int, ...] | None
    cut: Cut | None = None

    @property
    def uncut(self) -> tuple[int, ...]:
        """The axes that no slices are cut along: sums are taken over them."""
        return (*self.summed, *(self.of_sums or ()))


def zeros_without_memory(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray | jax.Array:
    """Zeros, or equal random keys, in the memory of one number; for shape and dtype."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), shape)
    return np.broadcast_to(np.zeros((), dtype), shape)


#: Name (empty unless it is one of a record), shape and dtype of an array.
ArrayFacts = tuple[str, tuple[int, ...], np.dtype]
#: Path, kind (None for an array without one) and arrays of a Variable.
VariableFacts = tuple[PathParts, type[nnx.Variable[object]] | None, tuple[ArrayFacts, ...]]


@final
@dataclass(frozen=True, repr=False)
class Requantizer:
    """How float values of a frozen weight are quantized: static, compared by value.

    Attributes:
        graphdef: of the weight's proxy, in evaluation mode.
        dropped: what the proxy learned or collected, which freezing dropped.
        axes: how the weight is stored.
        ndim: the axes of one weight; a weight with more of them is a stack.
    """

    graphdef: nnx.GraphDef[WeightQuantProxyFromInjector]
    dropped: tuple[VariableFacts, ...]
    axes: Axes
    ndim: int

    @classmethod
    def of(cls, layer: QuantWeightLayer[object] | ParameterSite, axes: Axes) -> Self:
        """That of a layer or a site (or a stack of layers) whose weight is about to be frozen."""
        proxy = nnx.clone(layer.weight_quant, graph=True)
        proxy.set_attributes(use_running_average=True, deterministic=True, raise_if_not_found=False)
        graphdef, state = nnx.split(proxy, graph=True)
        dropped = []
        for path, leaf in nnx.to_flat_state(state):
            kind, value = (
                (type(leaf), leaf.get_raw_value()) if isinstance(leaf, nnx.Variable) else (None, leaf)
            )
            arrays = value.items() if isinstance(value, dict) else [("", value)]
            dropped.append((path, kind, tuple((name, tuple(x.shape), x.dtype) for name, x in arrays)))
        return cls(graphdef, tuple(dropped), axes, layer.weight_ndim)

    @cached_property
    def _hash(self) -> int:
        return hash((self.graphdef, self.dropped, self.axes, self.ndim))

    def __hash__(self) -> int:  # NNX hashes the metadata of all Variables in each call of a compiled function
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        return Requantizer, (self.graphdef, self.dropped, self.axes, self.ndim)

    def proxy(self) -> WeightQuantProxyFromInjector:
        """The proxy, with zeros in the place of what freezing dropped."""
        state: dict[PathParts, object] = {}
        for path, kind, arrays in self.dropped:
            zeros = {name: zeros_without_memory(shape, dtype) for name, shape, dtype in arrays}
            value = zeros.get("", zeros)
            state[path] = value if kind is None else kind(value)
        return nnx.merge(self.graphdef, nnx.from_flat_state(state))
