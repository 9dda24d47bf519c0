"""Losses of learned bit widths: the mean bit width of a model, weighted by cost.

Add one to a training loss, with a factor, and the model gives up the bits that matter least:

    loss = WeightBitWidthWeightedBySize()

    def loss_fn(model, x, y):
        return cross_entropy(model(x), y) + 0.05 * loss(model)

They are functions of the model alone, or of the model and its arguments: nothing is collected on the side, and nothing
must be reset. If they call the model, its state stays as it is; under `jax.jit` only the bit widths of that call
remain.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike

from jqinject.core import QuantStat, _protocols
from jqinject.model import frozen_weights, walk
from jqinject.nn import QuantConv, QuantLinear
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.program import CALL, Call, Method, checked_method, intercept
from jqinject.proxy import ActQuantProxyFromInjector, QuantProxyFromInjector, stack_of
from jqinject.quant_tensor import on_integers, on_minifloats

MEGA = 1e7  # Brevitas's unit of operations
Weighted = tuple[ArrayLike, float]


def _refusal(what: str, cure: str) -> ValueError:
    return ValueError(f"there are no {what} to penalize.\n  cure: {cure}")


def _learns_bits(proxy: QuantProxyFromInjector) -> bool:
    nodes = nnx.iter_modules(proxy, graph=True)
    return proxy.is_quant_enabled and any(_protocols.is_learned(node) for _, node in nodes)


@dataclass(frozen=True)
class WeightBitWidthWeightedBySize:
    """The mean bit width of the weights with a learned width, weighted by their number of elements.

    `sum(size * bit_width) / sum(size)` over the layers, and over the parameters that the model contracts by itself; a
    shared quantizer counts once for each layer.

    Source: Brevitas's `loss.WeightBitWidthWeightedBySize` and, for floats, `loss.WeightFloatBitWidthWeightedBySize`.

    Example:
        >>> from jqinject.nn import QuantLinear
        >>> layer = QuantLinear(4, 2, weight_bit_width_impl_type="parameter", rngs=nnx.Rngs(0))
        >>> float(WeightBitWidthWeightedBySize()(layer))
        8.0
    """

    def __call__(self, model: nnx.Module) -> jax.Array:
        """The mean bit width of a model, a differentiable float32 scalar.

        Raises:
            ValueError: no weight has a learned bit width.
        """
        weights = frozen_weights.quantized_weights(walk.ModelIndex(model))
        learned = [holder for holder in weights if _learns_bits(holder.weight_quant)]
        sizes = [float(math.prod(holder.weight_shape)) for holder in learned]
        if not sum(sizes):
            cure = "weight_bit_width_impl_type='parameter' on the layers whose bits are to be learned"
            raise _refusal("weights with a learned bit width", cure)
        bits = [jnp.mean(frozen_weights.through_quantizer(holder).bit_width) for holder in learned]
        return jnp.average(jnp.stack(bits), weights=jnp.array(sizes, jnp.float32))


class BitWidthOfCalls(ABC):
    """Abstract: the mean bit width of what some modules return when a model is called.

    Attributes:
        what: is penalized, for error texts.
        cure: of a model that has none of it.
    """

    what: ClassVar[str]
    cure: ClassVar[str]

    @abstractmethod
    def counts(self, node: object) -> bool:
        """Whether the calls of a module count."""

    @abstractmethod
    def cost(self, module: Any, y: Any) -> Weighted | None:
        """The bits of what a module returned and its weight in the mean; None if it does not count."""

    def __call__(
        self, model: nnx.Module, *args: object, method: Method = CALL, **kwargs: object
    ) -> jax.Array:
        """The mean bit width, a differentiable float32 scalar.

        Args:
            model: the model.
            args: its positional arguments.
            method: the method that they are arguments of: its name, or a function that takes the model first.
            kwargs: its keyword arguments.

        Raises:
            ValueError: nothing is returned that counts.
        """
        call = Call(args, kwargs, checked_method(model, method, "bit width loss"))
        copy = nnx.clone(model, graph=True)
        calls: list[None] = []

        def noting(module: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            """Add what a call costs to the module's `noted`: a Variable, which leaves traces as state does."""
            y = call(*args, **kwargs)
            bits_and_size = self.cost(module, y)
            if bits_and_size is not None:
                calls.append(None)
                bits, size = jnp.asarray(bits_and_size[0], jnp.float32), jnp.float32(bits_and_size[1])
                module.noted.set_value(module.noted.get_value() + jnp.stack([size * bits, size]))
            return y

        nodes: list[Any] = [node for _, node in nnx.iter_modules(copy, graph=True) if self.counts(node)]
        for node in nodes:
            node.noted = _Noted(jnp.zeros((*_stack(node), 2), jnp.float32))
            intercept(node, noting)
        call(copy)
        if not calls:
            raise _refusal(self.what, self.cure)
        noted: Any = sum(jnp.sum(node.noted.get_value().reshape(-1, 2), axis=0) for node in nodes)
        return noted[0] / noted[1]


@dataclass(frozen=True)
class ActivationBitWidthWeightedBySize(BitWidthOfCalls):
    """The mean bit width of the activations with a learned width, weighted by their number of elements per example.

    The model is run on a batch, since the size of an activation is not known before. Every use of a quantizer counts.

    Source: Brevitas's `loss.ActivationBitWidthWeightedBySize` and, for floats,
    `loss.ActivationFloatBitWidthWeightedBySize`. Layers that run within `nnx.scan` count as
    often as it runs.

    Example:
        >>> from jqinject.nn import QuantIdentity
        >>> from jqinject.quant import Int8ActPerTensorFloat
        >>> identity = QuantIdentity(act_quant=Int8ActPerTensorFloat, bit_width_impl_type="parameter")
        >>> float(ActivationBitWidthWeightedBySize()(identity, jnp.ones((3, 4))))
        8.0
    """

    what = "activations with a learned bit width"
    cure = "bit_width_impl_type='parameter' on the quantizers whose bits are to be learned"

    def counts(self, node: object) -> bool:
        """See `BitWidthOfCalls`."""
        return isinstance(node, ActQuantProxyFromInjector) and _learns_bits(node)

    def cost(self, module: object, y: Any) -> Weighted:
        """See `BitWidthOfCalls`."""
        return y.bit_width, _per_example(y)


@dataclass(frozen=True)
class QuantLayerOutputBitWidthWeightedByOps(BitWidthOfCalls):
    """The mean bit width of the outputs of layers that return a QuantTensor, weighted by their operations.

    Operations are multiplications and additions for one example, `2 * size of the output * inputs of one output`.

    Args:
        layer_types: the classes of layers to count.

    Source: Brevitas's `loss.QuantLayerOutputBitWidthWeightedByOps`.
    """

    layer_types: tuple[type, ...] = (QuantLinear, QuantConv)
    what = "outputs of layers that are QuantTensors"
    cure = "return_quant_tensor=True on layers with quantized input and weight"

    def counts(self, node: object) -> bool:
        """See `BitWidthOfCalls`."""
        return isinstance(node, self.layer_types)

    def cost(self, module: Any, y: Any) -> Weighted | None:
        """See `BitWidthOfCalls`."""
        if not (on_integers(y) or on_minifloats(y)):
            return None
        operations = 2.0 * math.prod(module.weight_shape) / module.out_channels  # for each output element
        return y.bit_width, _per_example(y) * operations / MEGA


def _per_example(result: Any) -> float:
    return float(math.prod(result.value.shape[1:]))


class _Noted(QuantStat):
    """What the calls of a module cost: the sums of size times bits and of the sizes, float32, (2,)."""


def _stack(node: nnx.Module) -> tuple[int, ...]:
    """The leading axes of a stack of modules, over which a loop runs."""
    if isinstance(node, QuantWeightLayer):
        return tuple(stack_of((node,)))
    learned = [module for _, module in nnx.iter_modules(node, graph=True) if _protocols.is_learned(module)]
    return tuple(next((x.shape for module in learned for x in jax.tree.leaves(nnx.state(module))), ()))
