"""The quantizers of a program's sites, and how their state crosses loops and rematerialized parts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import jax
from flax import nnx

from jqinject.dot.geometry.dimensions import Dimensions
from jqinject.dot.schemes.product_transforms import declared
from jqinject.dot.tensors.backward_quantizer import GradientFormat
from jqinject.dot.tensors.labelled_tensor import LabelledTensor, quantized_along
from jqinject.inject import Binding, DependencyError
from jqinject.inject.errors import did_you_mean
from jqinject.program.moves import METADATA, arrays_of
from jqinject.program.operations import contraction_arguments
from jqinject.program.policy import Site
from jqinject.program.tracked_value import Tracked, WeightCall
from jqinject.proxy import (
    ActQuantProxyFromInjector,
    GradQuantProxyFromInjector,
    QuantProxyFromInjector,
    check_range,
    map_stack,
    transformed,
)
from jqinject.quant.enums import ScalingPerOutputType, chooses
from jqinject.quant_tensor import as_array, is_grouped, is_quantized, on_integers
from jqinject.quant_tensor.shaping import full_rank


class Quantizers:
    """The quantizers that the interpreter uses; these ones leave everything as it is, to find the sites alone.

    Args:
        depths: path of each parameter with a quantizer, as text -> its leading axes over which a loop runs.
        again: paths of the parameters of which a scheme takes another version backward.
    """

    def __init__(self, depths: Mapping[str, int] | None = None, again: frozenset[str] = frozenset()) -> None:
        self.depths, self.again = depths or {}, again

    def quantize(self, site: Site, x: jax.Array, token: jax.Array | None = None) -> Any:
        """`x`, quantized: a QuantTensor or an array.

        Args:
            site: the site.
            x: the tensor; of a gradient's quantizer, the output whose gradient it is.
            token: of a contraction that goes on with the gradient's payload.
        """
        return x

    def transformed(self, site: Site, x: jax.Array) -> jax.Array:
        """`x` through the transform before the quantizer of a site, and not quantized."""
        return x

    def gradient_format(self, name: str, y: jax.ShapeDtypeStruct) -> GradientFormat | None:
        """The numbers of the gradient of an output for a contraction that takes them backward; None for floats.

        Args:
            name: of the site of the gradient.
            y: the abstract value of the output.
        """

    def contract(self, site: Site, operands: Sequence[object], unrounded: jax.Array | None) -> jax.Array:
        """A contraction by a scheme.

        Args:
            site: the site.
            operands: two, arrays or a weight that is quantized; and further ones: how many rows each expert gets.
            unrounded: what a quantized weight was made from; None if it is not known or needed.
        """
        return site.equation.bind(list(map(as_array, operands)))[0]

    @property
    def mode(self) -> object:
        """Hashable; a tensor is quantized once for all operations that share a quantizer and a mode."""
        return None

    def run(self, call: WeightCall) -> Tracked:
        """The output of a contraction or a look-up."""
        return call.quantized()

    def record(self, site: Site, x: jax.Array, quantized: object) -> None:
        """Take note of what a quantizer did, also where its result is used again."""

    def chosen(self, name: str) -> Callable[[jax.Array, jax.Array], jax.Array] | None:
        """`Tracked.chosen` of a quantized parameter.

        Args:
            name: its path as text.
        """

    def has_state(self) -> bool:
        """Whether any quantizer has arrays."""
        return False

    def state(self, names: Iterable[str], stacked: Collection[str] = ()) -> Any:
        """The arrays that the quantizers at some sites may change: a pair, of the sites that are not stacked and of
        those that are.
        """
        return (), ()

    def restored(self, state: Any) -> Quantizers:
        """Quantizers like these, with that state."""
        return self

    def update(self, state: Any) -> None:
        """Adopt a state."""


class HeldQuantizers(Quantizers):
    """The quantizers that a model holds: by the names of their sites, and by the paths of parameters.

    Args:
        modules: name, or path of a parameter as text -> proxy; or what is applied to the input of an adapter.
        depths, again: as for `Quantizers`.
    """

    def __init__(
        self,
        modules: Mapping[str, nnx.Module],
        depths: Mapping[str, int] | None = None,
        again: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(depths, again)
        self._modules: Mapping[str, Any] = modules
        self._graphdef: Any = None
        self._has_state: bool | None = None

    def gradient_format(self, name: str, y: jax.ShapeDtypeStruct) -> GradientFormat | None:
        """See `Quantizers`."""
        proxy = self._modules.get(name)
        return proxy.gradient_format(y) if isinstance(proxy, GradQuantProxyFromInjector) else None

    def quantize(self, site: Site, x: jax.Array, token: jax.Array | None = None) -> Any:
        """`x` through its quantizer.

        Raises:
            ValueError: the model was quantized for a program that has no such site.
        """
        proxy = self._at(site)
        if not isinstance(proxy, QuantProxyFromInjector):  # a dropout, or the mark of a device compiler
            return proxy(x)
        if site.weight_path and site.name in self.depths:
            quantized = quantized_stack(proxy, x, self.depths[site.name])
            # Zero points between integers: no contraction may take the integers.
            return quantized if proxy.has_whole_zero_points else as_array(quantized)
        if proxy.is_quant_enabled:
            check_range(proxy, x, f"op_quant[{site.name!r}]")
        ready = proxy
        if site.is_stored and isinstance(proxy, ActQuantProxyFromInjector):
            return proxy.quantize_for_cache(x)
        if site.transform_axes and isinstance(proxy, ActQuantProxyFromInjector):
            ready = proxy.quantize_transformed
        if site.rows:
            return quantized_in_rows(ready, self.transformed(site, x), site.rows)
        if site.is_transformed:
            return ready(x)
        return proxy(x) if token is None else proxy(x, token)

    def transformed(self, site: Site, x: jax.Array) -> jax.Array:
        """See `Quantizers`."""
        return transformed(self._at(site), x) if site.transform_axes and not site.is_transformed else x

    def contract(self, site: Site, operands: Sequence[object], unrounded: jax.Array | None) -> jax.Array:
        """See `Quantizers`."""
        return contract_by(self._at(site), site, operands, unrounded)

    def proxy_at(self, name: str) -> Any:
        """The quantizer of a parameter, by its path, or of a tensor; None if absent."""
        return self._modules.get(name)

    def _at(self, site: Site) -> Any:
        if site.name not in self._modules:
            hint = did_you_mean(site.name, [name for name in self._modules if name not in self.depths])
            raise ValueError(
                f"{site.name} has no quantizer: the call runs operations that were not there when the model was "
                f"quantized{'; ' + hint if hint else '.'}\n"
                "  cure: quantize it with inputs that lead through them, in the mode that it is called in"
            )
        return self._modules[site.name]

    def has_state(self) -> bool:
        """See `Quantizers`."""
        if self._has_state is None:
            self._has_state = bool(jax.tree.leaves(self.state(self._modules)))
        return self._has_state

    def state(self, names: Iterable[str], stacked: Collection[str] = ()) -> Any:
        """The Variables of some quantizers, as two states."""
        modules = nnx.Dict({name: self._modules[name] for name in sorted(names) if name in self._modules})
        self._graphdef, *states = nnx.split(modules, lambda path, _: path[0] not in stacked, ..., graph=True)
        return tuple(states)

    def restored(self, state: Any) -> Quantizers:
        """Copies with that state."""
        same = copy.copy(self)
        same._modules = nnx.merge(self._graphdef, *state)
        return same

    def update(self, state: Any) -> None:
        """Write a state into the quantizers."""
        for part in state:
            for name, variables in part.items():
                nnx.update(self._modules[name], variables)


def contract_by(
    op: Any, site: Site, operands: Sequence[Any], unrounded: jax.Array | None = None
) -> jax.Array:
    """The contraction at a site, by the module that does it.

    Args:
        op: a `QDotGeneral` or another module of its kind.
        site, operands, unrounded: as for `Quantizers.contract`.
    """
    eqn, (lhs, rhs, *rest) = site.equation, operands
    arguments = {**contraction_arguments(eqn), "preferred_element_type": eqn.outputs[0].dtype}
    if site.weight != 0:
        return op(lhs, rhs, *rest, **arguments, unrounded=unrounded)
    dims = Dimensions.of(lhs.ndim, rhs.ndim, arguments["dimension_numbers"]).swapped()
    return dims.ordered(op(rhs, lhs, **arguments | {"dimension_numbers": dims.numbers}, unrounded=unrounded))


def quantized_stack(proxy: Any, weight: jax.Array, depth: int) -> Any:
    """A weight through its quantizer, or each weight of a stack through its own.

    Args:
        proxy: the quantizer, its Variables stacked likewise.
        weight: the weight.
        depth: the number of leading axes along which it is stacked.
    """
    if depth == 0:
        return proxy(weight)
    stack: Any = proxy, weight

    def one(layer: Any, _: object) -> tuple[Any, jax.Array | None, object]:
        quantizer, weight = layer
        quantized = quantizer(weight)
        # The integers that evaluation keeps are no part of the pytree.
        payload = quantized.payload if on_integers(quantized) else None
        return full_metadata(quantized), payload, nnx.state(quantizer, graph=True)

    quantized, payload, state = map_stack(one, stack, weight.shape[:depth])
    nnx.update(proxy, state)
    return quantized if payload is None else quantized.keeping(payload)


def full_metadata(x: Any) -> Any:
    """A quantized tensor whose scales have as many axes as it has, so that they can be stacked."""
    if is_grouped(x):
        return as_array(x) if x.as_it_lies is not None else x.moved(full_metadata(x.grouped), x.groups)
    if not is_quantized(x):
        return x
    scales = {name: full_rank(array, x.ndim) for name, array in arrays_of(x).items() if name in METADATA}
    return x.set(**scales)


def has_row_scales(quantizer: object) -> bool:
    """Whether an injector declares a scale for each row, the numbers along the last axis.

    Example:
        >>> from jqinject.quant import Int8DynamicActPerRowAbsMax, Int8ActPerTensorFloat, Int8DynamicActPerRowFloat
        >>> quantizers = Int8DynamicActPerRowAbsMax, Int8DynamicActPerRowFloat, Int8ActPerTensorFloat
        >>> [has_row_scales(quantizer) for quantizer in quantizers]
        [True, True, False]
    """
    return scales_of(quantizer) == "row"


def scales_of(quantizer: object) -> Literal["", "group", "row"]:
    """Whether an injector declares a scale for each group or row; "" for neither."""
    if isinstance(quantizer, Binding):
        return _declared_scales(quantizer)
    return _declared_scales(Binding(quantizer)) if isinstance(quantizer, type) else ""


@lru_cache(maxsize=256)
def _declared_scales(binding: Binding) -> Literal["", "group", "row"]:
    def said(name: str) -> object:
        try:
            return declared(binding, name)
        except DependencyError:  # made from what the injector does not declare
            return None

    if said("group_size") or chooses(said("scaling_per_output_type"), ScalingPerOutputType.GROUP):
        return "group"
    return "row" if said("shared_axes") == (-1,) or said("stats_reduce_dim") == -1 else ""


def quantized_in_rows(quantize: Callable[[jax.Array], Any], x: jax.Array, rows: tuple[int, ...]) -> Any:
    """An array quantized by a quantizer of rows, with one scale along some axes together.

    Args:
        quantize: the quantizer; it sees these axes as the last one.
        x: the array.
        rows: the axes.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.nn import QuantIdentity
        >>> from jqinject.quant import Int8DynamicActPerRowFloat
        >>> proxy = QuantIdentity(Int8DynamicActPerRowFloat).act_quant
        >>> quantized_in_rows(proxy, jnp.ones((2, 3, 4)), (0, 2)).scale.shape
        (1, 3, 1)
    """
    labels = tuple(("x", axis) for axis in range(x.ndim))
    labelled = quantized_along(
        quantize, LabelledTensor(x, labels), tuple(labels[axis] for axis in rows), True
    )
    return labelled.in_order(labels).tensor
