"""What bit widths of weights cost, and how much may be spent."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jqinject.inject.errors import did_you_mean
from jqinject.recipes.stream.flat_program import FlatProgram
from jqinject.recipes.stream.site import ContractionSite

Seconds = Mapping[str, Sequence[float]] | Callable[[str, int], float]
"""Measured times: path of a parameter -> seconds with each width, in their order; or a function of both."""


@dataclass(frozen=True)
class Budget:
    """What each choice costs, and the most that may be spent.

    Attributes:
        name: of the argument that set it.
        unit: of the costs.
        costs: of each parameter with each width, `(parameters, widths)`.
        most: the largest sum of costs.
        shown: what a cost is divided by to be what the argument says.
    """

    name: str
    unit: str
    costs: np.ndarray
    most: float
    shown: float = 1.0

    @property
    def least(self) -> float:
        """The smallest value of the argument that an assignment fits."""
        return float(self.costs.min(axis=1).sum()) / self.shown

    def check(self) -> None:
        """Refuse a budget that nothing fits.

        Raises:
            ValueError: with the smallest that something fits.
        """
        if self.costs.min(axis=1).sum() > self.most:
            given, least = self.most / self.shown, self.least
            raise ValueError(
                f"AllocateBits: no assignment fits the budget {self.name}={given:g}: the cheapest widths take "
                f"{least:g} {self.unit}.\n  cure: {self.name}={_above(least)}, or smaller widths among bits="
            )


def _above(least: float) -> str:
    """A number as text, no smaller when it is read."""
    return repr(math.ceil(least)) if least > 1000 else repr(least)


def multiply_adds(flat: FlatProgram, site: ContractionSite) -> int:
    """The multiply-adds of a site in one call.

    Args:
        flat: the program.
        site: one of its sites.
    """
    operand = jax.ShapeDtypeStruct(site.places.shape, np.float32)
    columns = jax.eval_shape(site.matrices.weight.matrices, operand).shape[-1]
    return math.prod(flat.steps[site.step].contraction.outputs[0].shape) * columns


def float_bits(flat: FlatProgram, site: ContractionSite) -> int:
    """The bits of a number of a site's input that is not quantized."""
    return 8 * np.dtype(flat.steps[site.step].contraction.inputs[1 - site.place].dtype).itemsize


def seconds_of(seconds: Seconds, paths: Sequence[str], bits: Sequence[int]) -> np.ndarray:
    """Measured times as a table, `(parameters, widths)`.

    Args:
        seconds: a table or a function.
        paths: of the parameters.
        bits: the widths.

    Raises:
        ValueError: a parameter has no times, or not one for each width; a time is negative or not finite.
    """
    rows = []
    for path in paths:
        if callable(seconds):
            row = [float(seconds(path, each)) for each in bits]
        elif path not in seconds:
            hint = did_you_mean(path, list(seconds))
            raise ValueError(
                f"AllocateBits: seconds has no times for {path}{'; ' + hint if hint else '.'}\n"
                f"  cure: seconds={{{path!r}: ({', '.join(f'<with {each} bits>' for each in bits)}), ...}}"
            )
        else:
            row = [float(each) for each in seconds[path]]
        if len(row) != len(bits) or not all(0 <= each < math.inf for each in row):
            raise ValueError(
                f"AllocateBits: the seconds of {path} must be {len(bits)} numbers of at least 0, one for each of bits="
                f"{tuple(bits)}, got {tuple(row)}"
            )
        rows.append(row)
    return np.array(rows, np.float64).reshape(len(paths), len(bits))
