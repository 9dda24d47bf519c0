"""What turns together, and why something cannot. Next: `turning`, which finds it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jqinject.recipes.stream.site import Path

GAIN = "it is multiplied by numbers that differ, such as a norm's gain, which FoldNorms takes out"


class Refused(Exception):
    """A value cannot be turned, and why."""


@dataclass(frozen=True)
class Turned:
    """Blocks of consecutive numbers along an axis are multiplied by the matrix.

    Attributes:
        axis: of the value.
        block: the size of the matrix.
        squared: whether the numbers are squares, of which only sums over whole blocks stay as they are.
    """

    axis: int
    block: int
    squared: bool = False


@dataclass
class TurnedRegion:
    """What turns together.

    Attributes:
        block: the size of the matrix.
        parameters: path -> the axis that turns.
        sinks: names of the sites whose inputs turn.
        normalized: whether a norm takes the values: they are those of a residual stream.
        keeps_sums: whether the matrix has to leave sums of the channels as they are: the program subtracts a mean.
        crosses: whether the values go through a product of two values.
    """

    block: int
    parameters: dict[Path, int] = field(default_factory=dict)
    sinks: set[str] = field(default_factory=set)
    normalized: bool = False
    keeps_sums: bool = False
    crosses: bool = False


def is_plain_convolution(operation: str, params: Any) -> bool:
    """Whether every output channel of a convolution sees every channel of the image.

    Args:
        operation: name of the primitive.
        params: of its equation.
    """
    return (
        operation == "conv_general_dilated"
        and params["feature_group_count"] == 1
        and params["batch_group_count"] == 1
    )
