"""The number formats: quantizers for weights and inputs, and what they cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jqinject.quant as q
from jqinject import Rule

GROUP = 128
FLOAT32 = 32


@dataclass(frozen=True)
class Format:
    """Quantizers for the weights and the inputs of a model's products.

    Attributes:
        name: as in the table.
        bits: of a weight's code.
        shared_bits: of what a group shares: its scale and its zero point, as they are stored.
        group: inputs of an output channel that share them; None for all.
        weight, input: the quantizers; no quantizer of inputs leaves them float.
    """

    name: str
    bits: int
    shared_bits: int
    group: int | None
    weight: Any
    input: Any = None

    def rule(self, path: str) -> Rule:
        """For the layers whose path matches."""
        return Rule(path, weight_quant=self.weight, input_quant=self.input)

    def effective_bits(self, shapes: Iterable[tuple[int, int]]) -> float:
        """The mean bits of a weight with its share of scales and zero points.

        Args:
            shapes: of the matrices, (inputs, outputs).

        Example:
            >>> FORMATS["MXFP4"].effective_bits([(64, 10), (32, 10)])
            4.25
        """
        weights = groups = 0
        for inputs, outputs in shapes:
            weights += inputs * outputs
            groups += outputs * (1 if self.group is None else -(-inputs // self.group))
        return self.bits + groups * self.shared_bits / weights


def _in_groups(bits: int) -> Format:
    """Integers with a float32 scale and a zero point for each group; inputs stay float."""
    weight = q.ShiftedUint8WeightGroupQuantFloat.let(bit_width=bits, group_size=GROUP)
    return Format(f"W{bits}A16", bits, FLOAT32 + bits, GROUP, weight)


FORMATS = {
    each.name: each
    for each in (
        _in_groups(4),
        _in_groups(3),
        _in_groups(2),
        Format(
            "W4A4",
            4,
            FLOAT32,
            None,
            q.Int8WeightPerChannelFloat.let(bit_width=4),
            q.Int8DynamicActPerRowFloat.let(bit_width=4),
        ),
        Format("MXFP4", 4, 8, 32, q.MXFloat4e2m1Weight, q.MXFloat4e2m1Act),
        Format("NVFP4", 4, 8, 16, q.NVFP4Weight, q.NVFP4Act),
    )
}
