"""The transform that an injector declares before its quantizer: `pre_transform`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.core.transforms import Chain, Sized, SizedChain, Transform, along
from jqinject.inject import Binding

NAME = "pre_transform"


@runtime_checkable
class ContractsInput(Protocol):
    """A layer that contracts its input.

    Attributes:
        input_axes: the axes of the input that are contracted, in the order in which the weight has them.
    """

    @property
    def input_axes(self) -> tuple[int, ...]: ...


def has_transform(quantizer: Any) -> bool:
    """Whether an injector declares a transform before its quantizer.

    Example:
        >>> from jqinject.core.transforms import Hadamard
        >>> from jqinject.quant import Int8ActPerTensorFloat
        >>> has_transform(Int8ActPerTensorFloat.let(pre_transform=Hadamard())), has_transform(Int8ActPerTensorFloat)
        (True, False)
    """
    return transform_of(quantizer) is not None


def transform_of(quantizer: Any) -> Any:
    """What an injector declares before its quantizer: a transform, or the declaration of one; None without one.

    Example:
        >>> from jqinject.core.transforms import Hadamard
        >>> from jqinject.quant import Int8ActPerTensorFloat
        >>> transform_of(Int8ActPerTensorFloat.let(pre_transform=Hadamard(8))).block_size
        8
    """
    if quantizer is None or isinstance(quantizer, nnx.Module):
        return None
    return _declared(quantizer if isinstance(quantizer, Binding) else Binding(quantizer))


@lru_cache(maxsize=256)
def _declared(binding: Binding) -> Any:
    return binding.resolve(NAME) if binding.declares(NAME) else None


def declared_transform(
    binding: Binding, stack: tuple[int, ...], trace: set[str], given: Mapping[str, Any]
) -> Transform | None:
    """The transform that an injector declares; None without one.

    Args:
        binding: the injector.
        stack: sizes of the leading axes that the layer is stacked along; each layer's transform has its own numbers.
        trace: takes the names that are read.
        given: what an assembly is handed.

    Raises:
        TypeError: what is declared is no transform.
    """
    if not binding.declares(NAME):
        return None
    found = binding.resolve(NAME, trace=trace, **given)
    sized = isinstance(found, Sized | SizedChain)
    made = found.made() if sized else found
    if made is not None and (not isinstance(made, Transform) or (isinstance(made, nnx.Module) and not sized)):
        what = (
            "holds numbers, so each quantizer needs its own"
            if isinstance(made, nnx.Module)
            else "is no transform"
        )
        raise TypeError(
            f"{binding.base.__name__}: {NAME} = {found!r:.80} {what}.\n"
            "  cure: jqinject.core.transforms.Hadamard(), or Sized(ChannelScale, channels)"
        )
    if stack and isinstance(made, nnx.Module):
        for _, variable in nnx.iter_graph(made, graph=True):
            if isinstance(variable, nnx.Variable):
                value = variable.get_value()
                variable.set_value(jnp.broadcast_to(value, (*stack, *value.shape)))
    return made


def transformed(proxy: Any, x: jax.Array) -> jax.Array:
    """A tensor as the proxy's quantizer sees it.

    Args:
        proxy: of activations.
        x: the tensor.
    """
    return x if proxy.pre_transform is None else along(proxy.pre_transform, x, proxy.transform_axes)


def note_of_transform(proxy: Any) -> str:
    """What a report says of the transform before a quantizer; empty without one.

    Args:
        proxy: the quantizer, or what stands in its place; None without one.
    """
    transform = vars(proxy).get("pre_transform") if isinstance(proxy, nnx.Module) else None
    return "" if transform is None else f"the input goes through {name_of_transform(transform)}"


def name_of_transform(transform: Any) -> str:
    """A transform in a report: with its arguments if it is a value, else its class; of a chain, its parts."""
    if isinstance(transform, Chain):
        return ", ".join(map(name_of_transform, transform.parts))
    return type(transform).__name__ if isinstance(transform, nnx.Module) else repr(transform)
