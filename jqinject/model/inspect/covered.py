"""What tables and pages read of a coverage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from jqinject.model.inspect.coverage_rows import ActivationContraction


@dataclass(frozen=True)
class WeightSize:
    """The bytes of a matrix.

    Attributes:
        parameter: its path.
        float_bytes: in floats.
        low_bytes: of its numbers as they are quantized, scales aside; as `float_bytes` if they are not.
    """

    parameter: str
    float_bytes: int
    low_bytes: int


class Covered(Protocol):
    """The data of a coverage: see `Coverage`."""

    @property
    def activations(self) -> tuple[ActivationContraction, ...]: ...
    @property
    def matrices(self) -> int: ...
    @property
    def quantized_matrices(self) -> int: ...
    @property
    def sizes(self) -> tuple[WeightSize, ...]: ...
    @property
    def share_of_bytes(self) -> float: ...
    @property
    def share_of_operations(self) -> float | None: ...
    @property
    def summary(self) -> tuple[str, ...]: ...
    def table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]: ...
