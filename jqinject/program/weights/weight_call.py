"""One contraction or look-up of a program, as a report runs it: with its quantizers, and in floats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jqinject.program.tracked_value import Tracked


class Heard(NamedTuple):
    """What one quantizer of a contraction did.

    Attributes:
        part: "input" or "output".
        site: its name.
        x: what it was given.
        made: what it made of it.
    """

    part: str
    site: str
    x: Any
    made: Any


@dataclass(frozen=True)
class WeightCall:
    """One contraction with a parameter, one look-up in it, or one contraction of two activations.

    Attributes:
        name: the parameter's path as text; of two activations, the operation's name.
        module: path of the module that it is in.
        quantized: runs it as the model's quantizers have it; to be called once.
        floating: runs it on the float parameter, without quantizers: the output as an array.
        heard: what its quantizers did, after `quantized`.
    """

    name: str
    module: str
    quantized: Callable[[], Tracked]
    floating: Callable[[], Any]
    heard: list[Heard] = field(default_factory=list)
