"""How the statistics of batches are averaged, and for how long: what is static about it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

EVERY_STEP = 2**31 - 2  # the counter, an int32, goes one further


class DefaultMomentum(float):
    """A momentum that no user named: calibration takes the mean in its place."""


DEFAULT_MOMENTUM = DefaultMomentum(0.1)


@dataclass(frozen=True)
class Collection:
    """How a statistic is collected: static, equal by value.

    Attributes:
        steps: training calls with a finite statistic before the parameter takes over.
        momentum: weight of the newest statistic in the running one; None for the cumulative mean.
        shape: shape of statistic, buffer and parameter.
        shape_name: what the user calls it.
        named: whether somebody chose the momentum; calibration takes the cumulative mean otherwise.
        calibrates: whether it is a calibration's: as many steps as there are batches.
    """

    steps: int
    momentum: float | None
    shape: tuple[int, ...]
    shape_name: str
    named: bool
    calibrates: bool = False

    @cached_property
    def limit(self) -> int:
        """The number of steps that are collected now."""
        return EVERY_STEP if self.calibrates else self.steps

    @cached_property
    def weight(self) -> float | None:
        """The weight of the newest statistic now; None for the cumulative mean."""
        return self.momentum if self.named or not self.calibrates else None
