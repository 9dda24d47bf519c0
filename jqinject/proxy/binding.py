"""What a quantizer's declaration says, and the names that errors use.

Notes on errors: which quantizer of which layer failed, and which of its parts are the user's own.

An injector with the overrides given where it is used, and the check that each override is read.

What an injector and its quantizer say about the numbers that they make.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from jqinject.core import Packable, Quantized, components_in
from jqinject.core._protocols import groups_of, needs_input_format
from jqinject.inject import (
    Binding,
    ExtendedInjector,
    check_declarations,
    check_overrides,
    declared_names,
    overrides_given,
    reach_of,
    requested_names,
)
from jqinject.ops import IntGrid
from jqinject.ops.cut import cut_in_place
from jqinject.ops.groups import fitting_size
from jqinject.proxy.links import name_of
from jqinject.quant_tensor import in_groups

_LIBRARY = __name__.partition(".")[0]
_FOREIGN = (_LIBRARY, "builtins", "functools", "jax", "jaxlib", "flax", "numpy")  # not parts of a user's own


def is_ours(cls: type) -> bool:
    """Whether a class is of this library."""
    return cls.__module__.partition(".")[0] == _LIBRARY


def checked_quantizer(quantizer: Any, name: str) -> None:
    """Check what an injector assembles as `tensor_quant`: a component, or None for no quantization.

    Args:
        quantizer: what was assembled.
        name: the injector's.

    Raises:
        TypeError: it is something else.
    """
    if quantizer is not None and (isinstance(quantizer, type) or not callable(quantizer)):
        shown = f"the class {quantizer.__name__}" if isinstance(quantizer, type) else f"{quantizer!r:.80}"
        raise TypeError(
            f"{name}: tensor_quant must be a component that quantizes, or None for no quantization, got {shown}.\n"
            "  cure: leave it to the quantizer, and override what it is made of (bit_width, scaling_impl, ...); or "
            "declare a class of your own whose instances return a Quantized"
        )


def packable(result: Any, quantizer: Any, signed: bool) -> Packable:
    """What a quantizer returned, as a result that becomes a QuantTensor; four values of a user's own as integers.

    Args:
        result: the result.
        quantizer: what returned it.
        signed: whether the integers of four values have a sign.

    Raises:
        TypeError: it is not a result.
    """
    if isinstance(result, Packable):
        return result
    if isinstance(result, tuple | list) and len(result) == 4:
        value, scale, zero_point, bit_width = result
        return Quantized(value, scale, zero_point, IntGrid(bit_width, signed))
    got = f"{type(result).__name__} of {len(result)}" if isinstance(result, tuple | list) else _shown(result)
    raise TypeError(
        f"tensor_quant = {type(quantizer).__name__} must return a Quantized, or (value, scale, zero_point, bit_width), "
        f"got {got}.\n  cure: return Quantized(value, scale, None, IntGrid(bit_width))"
    )


def note_quantizer(error: Exception, proxy: Any) -> None:
    """Add to an error which quantizer was at work."""
    note = f"in {name_of(proxy)}{_own_parts(proxy.tensor_quant)}"
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def _own_parts(quantizer: Any) -> str:
    """The components among a quantizer's that are not the library's, with the names they stand under."""
    found: dict[str, None] = {}
    if quantizer is not None and not is_ours(type(quantizer)):
        found[f"tensor_quant = {type(quantizer).__name__}"] = None
    for component in components_in(quantizer):
        for name, part in vars(component).items():
            if (
                callable(part)
                and not isinstance(part, type)
                and type(part).__module__.partition(".")[0] not in _FOREIGN
            ):
                found[f"{name} = {type(part).__name__}"] = None
    return f", with your {', '.join(found)}" if found else ""


def _shown(result: Any) -> str:
    shape = getattr(result, "shape", None)
    return f"{type(result).__name__}" + (f" of shape {shape}" if shape is not None else "")


_METADATA = frozenset({"narrow_range", "float_to_int_impl_type"})  # what proxies report about quantizers
_GROUPS = frozenset({"group_size", "group_dim"})  # read for a user's own quantizer
_DECLARED = (
    "signed",
    "narrow_range",
    "float_to_int_impl_type",
    "requires_input_scale",
    "quantize_zero_point",
)
_NAMES = frozenset({"tensor_quant", "proxy_class", "signed"}) | _METADATA


def asks_for_layers(binding: Binding) -> bool:
    """Whether anything in the wiring asks for a layer, or for its parameters."""
    read = reach_of(binding.injector, module=(), tracked_parameter_list=()).names
    return not read.isdisjoint(("module", "tracked_parameter_list"))


@dataclass(frozen=True)
class DeclaredInjector:
    """An injector with its overrides.

    Attributes:
        binding: both as one.
        names: everything overridden: by keywords, by `let`, in a binding.
        overrides: those of them given as keywords.
        where: what the user called and the prefix of these.
    """

    binding: Binding
    names: tuple[str, ...]
    overrides: Mapping[str, Any]
    where: tuple[str, str]

    @classmethod
    def of(
        cls,
        injector: type[ExtendedInjector] | Binding,
        overrides: Mapping[str, Any] | None,
        offered: Mapping[str, Any] | None,
        where: tuple[str, str],
    ) -> DeclaredInjector:
        """See `QuantProxyFromInjector` for the arguments."""
        binding = injector if isinstance(injector, Binding) else Binding(injector)
        binding = binding.let(**overrides) if overrides else binding
        names = tuple(overrides_given(binding.injector))
        if offered:
            asked = requested_names(binding.injector) - set(names)
            taken = {name: value for name, value in offered.items() if name in asked}
            binding = binding.let(**taken) if taken else binding
        return cls(binding, names, overrides or {}, where)

    def check_known(self, traced: set[str]) -> None:
        """Reject unknown names.

        Args:
            traced: the names that were asked for so far.
        """
        self._check(_NAMES | traced, None, {})

    def check_read(self, proxy: Any, quantizer: Any, traced: set[str], handed: Mapping[str, Any]) -> None:
        """Reject names that neither the quantizer, as it is wired, nor the proxy reads.

        Args:
            proxy: the proxy.
            quantizer: what was assembled.
            traced: the names that were asked for meanwhile.
            handed: what the assembly was handed.
        """
        if self.names:
            read = traced | proxy.reads
            if self.binding.declares("proxy_class"):
                self.binding.resolve("proxy_class", trace=read)
            if quantizer is not None and not is_ours(type(quantizer)):
                read |= _METADATA | _GROUPS
            if not is_ours(type(proxy)) and "reads" not in vars(type(proxy)):
                read |= declared_names(self.binding.base)  # any of which it may read when it is called
            self._check(frozenset(), read, handed)
        check_declarations(self.binding.injector, known=_NAMES | traced)

    def _check(
        self, known: frozenset[str] | set[str], read: set[str] | None, handed: Mapping[str, Any]
    ) -> None:
        check = partial(check_overrides, self.binding.injector, known=known, read=read, given=handed)
        where, prefix = self.where
        check([name for name in self.names if name in self.overrides], where=where, prefix=prefix)
        check([name for name in self.names if name not in self.overrides])


@dataclass(frozen=True)
class QuantMetadata:
    """The numbers of a quantizer as its injector declares them, read when it is assembled; static in a proxy.

    Attributes:
        signed: whether they have a sign; None if the injector does not say.
        narrow_range: whether one of them is left out.
        rounding_mode: the name of the rounding.
        group_size: elements that share a scale; None if there are no groups.
        group_dim: the axis that is cut into groups.
        requires_input_scale: of a bias: whether its scale comes in with the input.
        requires_quant_input: of a weight: whether its quantizer is called with the format of the layer's input.
        whole_zero_points: whether zero points are integers.
    """

    signed: bool | None
    narrow_range: bool | None
    rounding_mode: str | None
    group_size: int | None = None
    group_dim: int | None = None
    requires_input_scale: bool = False
    whole_zero_points: bool = True
    requires_quant_input: bool = False

    def with_facts(self, quantizer: Any, binding: Binding, layers: tuple[Any, ...]) -> QuantMetadata:
        """The same with the facts of the quantizer; for the groups of a user's own quantizer that does not state them,
        the injector's declaration counts.

        Raises:
            ValueError: it is not declared whether the integers have a sign.
        """
        groups = groups_of(quantizer)
        if groups is None and binding.declares("group_size") and not is_ours(type(quantizer)):
            size = _resolved(binding, "group_size", layers)
            groups = None if size is None else (size, _resolved(binding, "group_dim", layers))
        if quantizer is not None and self.signed is None:
            raise ValueError(
                f"{binding.base.__name__} does not say whether its integers have a sign.\n"
                "  cure: declare `signed = True` (weights, most activations) or `signed = False` (after a ReLU)"
            )
        size, dim = (None, None) if groups is None else groups
        return replace(
            self,
            group_size=size,
            group_dim=dim,
            requires_quant_input=needs_input_format(quantizer),
        )

    def joined(self, packed: Any, shape: tuple[int, ...], proxy: Any) -> Any:
        """A tensor whose groups lie along two axes, or cross explicit shards, as a QuantTensor without those axes.

        Args:
            packed: the tensor.
            shape: without groups.
            proxy: whose quantizer made it.

        Raises:
            ValueError: the quantizer does not say that it makes groups.
        """
        size, dim = self.group_size, self.group_dim
        if size is None or dim is None:
            raise ValueError(
                f"{proxy.binding.base.__name__} made an array of shape {packed.shape} of one of shape {shape}, "
                f"and its {type(proxy.tensor_quant).__name__} does not say that it cuts the array into groups.\n"
                "  cure: scaling_per_output_type = 'tensor' or 'channel'; or of your own quantizer a property `groups` "
                "that returns (group_size, group_dim)"
            )
        fitting = fitting_size(size, shape[dim])
        cut = cut_in_place(packed.value, fitting, dim % len(shape)) if packed.ndim == len(shape) else None
        return in_groups(packed, fitting, dim, shape[dim], None if cut is None else cut.piece)


def quant_metadata_of(binding: Binding, layers: tuple[Any, ...]) -> QuantMetadata:
    """What an injector declares of its integers, for the layers that it serves; None for what it does not declare."""
    said: dict[str, Any] = {}
    for name in _DECLARED:
        if binding.declares(name):
            said[name] = _resolved(binding, name, layers)
    for name in ("signed", "narrow_range"):
        flag = said.get(name)
        unsaid = name not in said or (flag is None and name == "signed")
        if not (
            unsaid or isinstance(flag, bool | np.bool_)
        ):  # 'False' would count as true, and None as false
            raise TypeError(
                f"{binding.base.__name__}: {name} must be True or False, got {flag!r} of type {type(flag).__name__}.\n"
                f"  cure: {name} = True or {name} = False"
            )
        said[name] = None if unsaid else bool(flag)
    rounding = said.get("float_to_int_impl_type")
    # Zero points of a `scale_shift_zero_point_impl` are what it makes of a distance.
    shifted = binding.declares("scale_shift_zero_point_impl")
    return QuantMetadata(
        signed=said["signed"],
        narrow_range=said["narrow_range"],
        rounding_mode=None if rounding is None else str(rounding).upper(),
        requires_input_scale=bool(said.get("requires_input_scale")),
        whole_zero_points=not shifted and bool(said.get("quantize_zero_point", True)),
    )


def _resolved(binding: Binding, name: str, layers: tuple[Any, ...]) -> Any:
    return binding.resolve(name, module=layers[0] if len(layers) == 1 else layers)
