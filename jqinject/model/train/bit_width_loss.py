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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike

from jqinject.core import QuantStat, _protocols
from jqinject.model import frozen_weights, walk
from jqinject.nn import QuantConv, QuantLinear
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.program import CALL, Call, Method, checked_method, intercept, quantized_stack
from jqinject.proxy import ActQuantProxyFromInjector, QuantProxyFromInjector, stack_of
from jqinject.quant_tensor import on_integers, on_minifloats

MEGA = 1e7  # Brevitas's unit of operations
Weighted = tuple[ArrayLike, float]
Cost = Callable[[object, Any], Weighted | None]


def _mean(costs: list[Weighted], what: str, cure: str) -> jax.Array:
    total = sum(size for _, size in costs)
    if not total:
        raise ValueError(f"there are no {what} to penalize.\n  cure: {cure}")
    weighted = [jnp.float32(size) * jnp.asarray(bits, jnp.float32) for bits, size in costs]
    return jnp.sum(jnp.stack(weighted)) / jnp.float32(total)


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
        costs = [
            (_mean_bits(holder), float(math.prod(holder.weight_shape)))
            for holder in frozen_weights.quantized_weights(walk.ModelIndex(model))
            if _learns_bits(holder.weight_quant)
        ]
        cure = "weight_bit_width_impl_type='parameter' on the layers whose bits are to be learned"
        return _mean(costs, "weights with a learned bit width", cure)


def _mean_bits(holder: frozen_weights.WeightHolder) -> ArrayLike:
    """The bit width of a weight; of a parameter in a stack, the mean of its layers'."""
    if isinstance(holder, QuantWeightLayer):
        return holder.quant_weight().bit_width
    quantized = quantized_stack(
        nnx.clone(holder.weight_quant, graph=True), holder.weight[...], holder.stacked
    )
    return jnp.mean(jnp.asarray(quantized.bit_width, jnp.float32))


@dataclass(frozen=True)
class ActivationBitWidthWeightedBySize:
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
            ValueError: no quantized activation has a learned bit width.
        """

        def counts(node: object) -> bool:
            return isinstance(node, ActQuantProxyFromInjector) and _learns_bits(node)

        def cost(_: object, y: Any) -> Weighted:
            return y.bit_width, _per_example(y)

        costs = _watch(model, counts, cost, args, kwargs, method)
        cure = "bit_width_impl_type='parameter' on the quantizers whose bits are to be learned"
        return _mean(costs, "activations with a learned bit width", cure)


@dataclass(frozen=True)
class QuantLayerOutputBitWidthWeightedByOps:
    """The mean bit width of the outputs of layers that return a QuantTensor, weighted by their operations.

    Operations are multiplications and additions for one example, `2 * size of the output * inputs of one output`.

    Args:
        layer_types: the classes of layers to count.

    Source: Brevitas's `loss.QuantLayerOutputBitWidthWeightedByOps`.
    """

    layer_types: tuple[type, ...] = (QuantLinear, QuantConv)

    def __call__(
        self, model: nnx.Module, *args: object, method: Method = CALL, **kwargs: object
    ) -> jax.Array:
        """The mean bit width of outputs, a differentiable float32 scalar.

        Args:
            model: the model.
            args: its positional arguments.
            method: the method that they are arguments of: its name, or a function that takes the model first.
            kwargs: its keyword arguments.

        Raises:
            ValueError: no layer returned a QuantTensor.
        """

        def counts(node: object) -> bool:
            return isinstance(node, self.layer_types)

        def cost(layer: Any, y: object) -> Weighted | None:
            if not (on_integers(y) or on_minifloats(y)):
                return None
            operations = 2.0 * math.prod(layer.weight_shape) / layer.out_channels  # for each output element
            return y.bit_width, _per_example(y) * operations / MEGA

        costs = _watch(model, counts, cost, args, kwargs, method)
        cure = "return_quant_tensor=True on layers with quantized input and weight"
        return _mean(costs, "outputs of layers that are QuantTensors", cure)


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


def _watch(
    model: nnx.Module,
    counts: Callable[[object], bool],
    cost: Cost,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    method: Method,
) -> list[Weighted]:
    """What the calls of the wanted modules cost when a copy of the model is called: their mean bits, weighted."""
    call = Call(args, kwargs, checked_method(model, method, "bit width loss"))
    copy = nnx.clone(model, graph=True)
    calls: list[None] = []

    def noting(layer: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Add what a call costs to the module's `noted`: a Variable, which leaves traces as state does."""
        y = call(*args, **kwargs)
        bits_and_size = cost(layer, y)
        if bits_and_size is not None:
            calls.append(None)
            bits, size = jnp.asarray(bits_and_size[0], jnp.float32), jnp.float32(bits_and_size[1])
            layer.noted.set_value(layer.noted.get_value() + jnp.stack([size * bits, size]))
        return y

    nodes: list[Any] = [node for _, node in nnx.iter_modules(copy, graph=True) if counts(node)]
    for node in nodes:
        node.noted = _Noted(jnp.zeros((*_stack(node), 2), jnp.float32))
        intercept(node, noting)
    call(copy)
    if not calls:
        return []
    noted: Any = sum(jnp.sum(node.noted.get_value().reshape(-1, 2), axis=0) for node in nodes)
    return [(noted[0] / noted[1], 1.0)]
