"""How batch statistics are averaged, and for how long: the static part."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

EVERY_STEP = 2**25  # no counter reaches it


class DefaultMomentum(float):
    """A default momentum, which calibration replaces by the mean."""


DEFAULT_MOMENTUM = DefaultMomentum(0.1)


@dataclass(frozen=True)
class Collection:
    """How a statistic is collected: static, compared by value.

    Attributes:
        steps: training calls with a finite statistic before the parameter takes over.
        momentum: weight of the newest statistic in the running one; None for the cumulative mean.
        shape: shape of statistic, buffer and parameter.
        shape_name: its name in error messages.
        named: whether the user chose the momentum; otherwise calibration takes the cumulative mean.
        calibrates: whether this is a calibration: as many steps as batches.
    """

    steps: int
    momentum: float | None
    shape: tuple[int, ...]
    shape_name: str
    named: bool
    calibrates: bool = False

    @cached_property
    def limit(self) -> int:
        """The current number of steps."""
        return EVERY_STEP if self.calibrates else self.steps

    @cached_property
    def weight(self) -> float | None:
        """The current weight of the newest statistic; None for the cumulative mean."""
        return self.momentum if self.named or not self.calibrates else None
