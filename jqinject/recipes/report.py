"""What passes did, or would do, as data that is readable as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from flax import nnx

from jqinject.model.inspect.coverage import Coverage

Model = TypeVar("Model", bound=nnx.Module)


@dataclass(frozen=True)
class Step:
    """What one pass did.

    Attributes:
        name: the pass, as it was written.
        sites: what it did to each site.
        score: of the model after it, if the recipe was applied with `evaluate`.
        undone: whether the score was below the floor, so that the model is that before the pass.
    """

    name: str
    sites: tuple[Any, ...]
    score: float | None = None
    undone: bool = False

    def __str__(self) -> str:
        score = "" if self.score is None else f": {self.score:.6g}"
        undone = ", below the floor: undone, and the recipe stopped" if self.undone else ""
        return "\n".join([f"{self.name}{score}{undone}", *(f"  {site}" for site in self.sites)])


@dataclass(frozen=True)
class Report:
    """What the passes of a recipe did.

    Attributes:
        steps: in order.
    """

    steps: tuple[Step, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.steps))


@dataclass(frozen=True)
class Explanation:
    """What the passes of a recipe would do.

    Attributes:
        steps: in order.
        coverage: of the model quantized by the rules, before anything is solved: which weights are quantized, and why
            the others are not.
    """

    steps: tuple[Step, ...]
    coverage: Coverage

    def __str__(self) -> str:
        left = [f"  {one.parameter} ({one.size:,} numbers): {one.why}" for one in self.coverage.missed]
        return "\n".join([*map(str, self.steps), *(["left in float", *left] if left else [])])


@dataclass(frozen=True)
class Result(Generic[Model]):
    """What `Recipe.apply` returns.

    Attributes:
        model: the quantized model, in evaluation mode.
        report: what each pass did.
        float_model: the float model as passes that rescale it left it: its weights are those that solvers rounded. For
            `jqinject.report(model, x, numbers=True, reference=float_model)`.
    """

    model: Model
    report: Report
    float_model: Model
