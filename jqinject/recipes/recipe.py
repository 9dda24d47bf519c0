"""A recipe: passes over a model, one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from flax import nnx

from jqinject.model.quantizing.rules import Rule, checked_rules
from jqinject.model.running.batches import BatchCalls, CallBatch, check_batches
from jqinject.program import CALL, Method, checked_method
from jqinject.recipes.work import Work

Model = TypeVar("Model", bound=nnx.Module)


class Pass(Protocol):
    """One step of a recipe: it changes the work and says what it did.

    It raises before it changes anything that `apply` could not throw away: the user's model is never touched.
    """

    def __call__(self, work: Work) -> Iterable[Any]:
        """Do it; what it did to each site, as records with a readable `str`."""
        ...


@dataclass(frozen=True)
class Step:
    """What one pass did.

    Attributes:
        name: the pass, as it was written.
        sites: what it did to each site.
    """

    name: str
    sites: tuple[Any, ...]

    def __str__(self) -> str:
        return "\n".join([self.name, *(f"  {site}" for site in self.sites)])


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
class Result(Generic[Model]):
    """What `Recipe.apply` returns.

    Attributes:
        model: the quantized model, in evaluation mode.
        report: what each pass did.
    """

    model: Model
    report: Report


class Recipe:
    """Passes over a model that compose: each sees what earlier ones left.

    Args:
        passes: the steps, in order.

    Attributes:
        passes: the steps.

    Example:
        >>> import jax
        >>> from jqinject import Rule
        >>> from jqinject.quant import Int8WeightPerChannelFloat
        >>> from jqinject.recipes import GPTQ, Recipe, Solve
        >>> model = nnx.Sequential(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(8, 4, rngs=nnx.Rngs(1)))
        >>> x = jax.random.normal(jax.random.key(2), (64, 16))
        >>> rule = Rule(weight_quant=Int8WeightPerChannelFloat.let(bit_width=4))
        >>> result = Recipe(Solve(GPTQ())).apply(model, rule, [x], progress=False)
        >>> first = result.report.steps[0].sites[0]
        >>> first.path, first.solved < first.nearest
        ('layers.0.kernel', True)
    """

    def __init__(self, *passes: Pass) -> None:
        for each in passes:
            if not callable(each) or isinstance(each, type) or hasattr(each, "statistics"):
                raise TypeError(f"Recipe takes passes, got {each!r:.80}.\n  cure: {_as_pass(each)}")
        self.passes = passes

    def __repr__(self) -> str:
        return f"Recipe({', '.join(map(repr, self.passes))})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recipe) and self.passes == other.passes

    def __hash__(self) -> int:
        return hash(self.passes)

    def apply(
        self,
        model: Model,
        rules: Rule | Iterable[Rule],
        batches: Iterable[Any],
        *,
        method: Method = CALL,
        call: CallBatch | None = None,
        on_host: bool = False,
        progress: bool = True,
    ) -> Result[Model]:
        """Quantize a float model by rules, with the passes of this recipe.

        Args:
            model: a float NNX module; it is not changed.
            rules: as for `jqinject.quantize`.
            batches: the model's arguments, as for `jqinject.calibrate`; they are kept in memory.
            method: the method that batches are arguments of.
            call: a function of the model and a batch, which calls the model; instead of `method`. The model is then
                quantized without tracing it: layers alone, not what it contracts by itself.
            on_host: keep values that wait between sites in the host's memory.
            progress: show progress bars, if `rich` is installed.

        Returns:
            The quantized model and a report.

        Raises:
            TypeError, ValueError: see `jqinject.quantize` and the passes; the text names the site. Nothing is changed.
        """
        check_batches(batches, "Recipe.apply")
        held = list(batches)
        calls = list(BatchCalls(model, method, call, "Recipe.apply").of(held))
        floating = nnx.clone(model, graph=True)
        floating.eval()
        work = Work(
            original=model,
            model=floating,
            rules=checked_rules(rules),
            batches=held,
            calls=calls,
            **_traced(model, held[0], method, call),
            method=method,
            call=call,
            on_host=on_host,
            progress=progress,
        )
        steps = []
        for each in self.passes:
            steps.append(Step(repr(each), tuple(each(work))))
        return Result(work.quantized, Report(tuple(steps)))  # pyright: ignore


def _as_pass(given: Any) -> str:
    """How to write what was probably meant."""
    written = f"{given.__name__}()" if isinstance(given, type) else f"{given!r:.80}"
    if hasattr(given, "statistics"):
        return (
            f"Solve({written}): a solver chooses the numbers of one weight, and Solve takes it to all of them"
        )
    return written if isinstance(given, type) else "Solve(GPTQ())"


def _traced(model: nnx.Module, batch: Any, method: Method, call: CallBatch | None) -> dict[str, Any]:
    """The call that shows `quantize` what the model contracts by itself."""
    found = None if call is not None else checked_method(model, method, "Recipe.apply")
    if not isinstance(found, str):
        return {"inputs": None}
    return {"inputs": batch} if found == CALL else {"inputs": None, "methods": {found: batch}}
