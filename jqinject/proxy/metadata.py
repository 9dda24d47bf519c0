"""What an injector and its quantizer say about the numbers that they make."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jqinject.core.facts import block_width, groups_of, has_zero_point, is_dynamic, needs_input_format
from jqinject.inject import Binding
from jqinject.ops.devices.cut import cut_in_place
from jqinject.ops.groups import fitting_size
from jqinject.proxy.naming import is_ours
from jqinject.quant_tensor import in_groups


@dataclass(frozen=True)
class QuantMetadata:
    """The numbers of a quantizer as its injector declares them, read when it is assembled; static in a proxy.

    Attributes:
        signed: whether they have a sign; None if the injector does not say.
        narrow_range: whether one of them is left out.
        rounding_mode: the name of the rounding.
        group_size: elements that share a scale; None if there are no groups.
        group_dim: the axis that is cut into groups.
        block_width: how many groups beside each other share a scale.
        has_zero_point: whether their zero point may differ from 0, as the quantizer says.
        requires_input_scale: of a bias: whether its scale comes in with the input.
        requires_quant_input: of a weight: whether its quantizer is called with the format of the layer's input.
        is_dynamic: whether the scale is that of the tensor at hand, as the quantizer says.
        whole_zero_points: whether zero points are integers.
    """

    signed: bool | None
    narrow_range: bool | None
    rounding_mode: str | None
    group_size: int | None = None
    group_dim: int | None = None
    block_width: int = 1
    has_zero_point: bool = True
    requires_input_scale: bool = False
    whole_zero_points: bool = True
    requires_quant_input: bool = False
    is_dynamic: bool = False

    def with_facts(self, quantizer: Any, binding: Binding, layers: tuple[Any, ...]) -> "QuantMetadata":
        """The same with the facts of the quantizer; for the groups of a user's own quantizer that does not state them,
        the injector's declaration counts.

        Raises:
            ValueError: it is not declared whether the integers have a sign.
        """
        groups = groups_of(quantizer)
        if groups is None and binding.declares("group_size") and not is_ours(type(quantizer)):
            groups = (_resolved(binding, "group_size", layers), _resolved(binding, "group_dim", layers))
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
            block_width=block_width(quantizer),
            has_zero_point=has_zero_point(quantizer),
            requires_quant_input=needs_input_format(quantizer),
            is_dynamic=is_dynamic(quantizer),
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

    def fact(name: str) -> Any:
        return _resolved(binding, name, layers) if binding.declares(name) else None

    signed, narrow_range, rounding = fact("signed"), fact("narrow_range"), fact("float_to_int_impl_type")
    return QuantMetadata(
        signed=None if signed is None else _truth(binding, "signed", signed),
        narrow_range=_truth(binding, "narrow_range", narrow_range)
        if binding.declares("narrow_range")
        else None,
        rounding_mode=None if rounding is None else str(rounding).upper(),
        requires_input_scale=bool(fact("requires_input_scale")),
        whole_zero_points=_whole_zero_points(binding, fact),
    )


def _resolved(binding: Binding, name: str, layers: tuple[Any, ...]) -> Any:
    return binding.resolve(name, module=layers[0] if len(layers) == 1 else layers)


def _whole_zero_points(binding: Binding, fact: Callable[[str], Any]) -> bool:
    """Whether zero points are integers; those of a `scale_shift_zero_point_impl` are what it makes of a distance."""
    if binding.declares("scale_shift_zero_point_impl"):
        return False
    return not binding.declares("quantize_zero_point") or bool(fact("quantize_zero_point"))


def _truth(binding: Binding, name: str, given: Any) -> bool:
    if not isinstance(given, bool | np.bool_):  # 'False' would count as true, and None as false
        raise TypeError(
            f"{binding.base.__name__}: {name} must be True or False, got {given!r} of type {type(given).__name__}.\n"
            f"  cure: {name} = True or {name} = False"
        )
    return bool(given)
