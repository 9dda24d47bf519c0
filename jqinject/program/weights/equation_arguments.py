"""What says which contraction of its kind an equation is."""

from __future__ import annotations

from typing import Any

CONVOLUTION = (
    "window_strides",
    "padding",
    "lhs_dilation",
    "rhs_dilation",
    "feature_group_count",
    "batch_group_count",
)


def arguments_of(eqn: Any) -> dict[str, Any]:
    """What says which contraction of its kind an equation is."""
    convolution = eqn.primitive.name == "conv_general_dilated"
    names = (*CONVOLUTION, "dimension_numbers") if convolution else ("dimension_numbers",)
    return {name: eqn.params[name] for name in names}
