"""A recipe: passes over a model, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from flax import nnx

from jqinject.model.calibration import CallBatch, check_batches
from jqinject.model.inspect.coverage import coverage_of
from jqinject.model.quantizing.rules import Rule
from jqinject.program import CALL, Method
from jqinject.recipes.files import read, write
from jqinject.recipes.journal import Journal, identity_of
from jqinject.recipes.report import Explanation, Model, Report, Result, Step
from jqinject.recipes.work import Work


class Pass(Protocol):
    """One step of a recipe: it changes the work and says what it did.

    It raises before it changes anything that `apply` could not throw away: the user's model is never touched. It may
    have a method `explain(work)`, which returns what it would do as such records, and runs nothing that takes long;
    without one, `Recipe.explain` carries it out on a copy, with its single batch.
    """

    def __call__(self, work: Work) -> Iterable[Any]:
        """Do it; what it did to each site, as records with a readable `str`."""
        ...


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

    def save(self, path: str | Path) -> None:
        """Write the recipe to a JSON file, for `Recipe.load`.

        Args:
            path: of the file.

        Raises:
            TypeError: a pass holds something else than numbers, text and dataclasses of such parts.
        """
        write(self.passes, path)

    @classmethod
    def load(cls, path: str | Path) -> Recipe:
        """The recipe in a JSON or TOML file; `is` names the pass or the solver, other keys are its arguments.

        Args:
            path: of the file; a suffix `.toml` means TOML.

        Raises:
            ValueError: it is not a recipe; an unknown pass, solver or argument; the text says where.
        """
        return cls(*read(path))

    def apply(
        self,
        model: Model,
        rules: Rule | Iterable[Rule],
        batches: Iterable[Any],
        *,
        method: Method = CALL,
        call: CallBatch | None = None,
        evaluate: Callable[[Any], float] | None = None,
        floor: float | None = None,
        on_host: bool = False,
        progress: bool = True,
        checkpoint: str | Path | None = None,
    ) -> Result[Model]:
        """Quantize a float model by rules, with the passes of this recipe.

        Args:
            model: a float NNX module; it is not changed.
            rules: as for `jqinject.quantize`.
            batches: the model's arguments, as for `jqinject.calibrate`; they are kept in memory.
            method: the method that batches are arguments of.
            call: a function of the model and a batch, which calls the model; instead of `method`. The model is then
                quantized without tracing it: layers alone, not what it contracts by itself.
            evaluate: a function of a model, whose result, larger for better models, is noted after each pass.
            floor: a pass after which the result is below it is undone, and no further one runs. Passes before the one
                that quantizes are measured by the float model.
            on_host: keep values that wait between sites in the host's memory.
            progress: show progress bars, if `rich` is installed.
            checkpoint: a folder in which passes keep what they computed for each site. A run that was stopped, even
                killed, goes on from there with the same recipe, model, rules and batches, and has the same result to
                the bit. Delete it afterwards.

        Returns:
            The quantized model and a report.

        Raises:
            TypeError, ValueError: see `jqinject.quantize` and the passes; the text names the site. Or the checkpoint is
                of another run; the text says what differs. Nothing is changed.
        """
        check_batches(batches, "Recipe.apply")
        if floor is not None and evaluate is None:
            raise TypeError(
                "Recipe.apply: a floor needs evaluate, a function of a model that returns a number.\n"
                "  cure: evaluate=lambda model: accuracy(model)"
            )
        work = Work.of_float(model, rules, batches, method, call, "Recipe.apply")
        work.on_host, work.progress = on_host, progress
        if checkpoint is not None:
            identity = identity_of(self.passes, model, work.rules, work.batches, (method, call))
            work.journal = Journal.opened(checkpoint, identity)
        steps: list[Step] = []
        for place, each in enumerate(self.passes):
            before = work.copied() if floor is not None else work
            work.journal.begin(place)
            sites = tuple(each(work))
            score = None if evaluate is None else float(evaluate(work.current))
            undone = floor is not None and score is not None and not score >= floor
            steps.append(Step(repr(each), sites, score, undone))
            if undone:
                work = before
                break
        return Result(work.quantized, Report(tuple(steps)), work.model)  # pyright: ignore

    def explain(
        self,
        model: nnx.Module,
        rules: Rule | Iterable[Rule],
        batch: Any,
        *,
        method: Method = CALL,
        call: CallBatch | None = None,
    ) -> Explanation:
        """What the recipe would do to a model, before it does.

        Passes that take long (`Solve`, `AllocateBits`) tell their sites without running anything; those that rescale a
        float model do so on a copy, by this batch, so that later passes see what they leave. What is folded, what stays
        online and what is left alone is as in `apply`; factors and errors may be others with more data.

        Args:
            model: a float NNX module; it is not changed.
            rules: as for `apply`.
            batch: one of those for `apply`.
            method, call: as for `apply`.

        Returns:
            The records of each pass, and the weights that stay float. `str()` shows them.

        Raises:
            TypeError, ValueError: as `apply` does before it runs; the text names the site.

        Example:
            >>> from jqinject import Rule
            >>> from jqinject.quant import Int8WeightPerChannelFloat
            >>> from jqinject.recipes import RTN, Recipe, Solve
            >>> import jax.numpy as jnp
            >>> model = nnx.Sequential(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 4, rngs=nnx.Rngs(1)))
            >>> rule = Rule("layers.0", weight_quant=Int8WeightPerChannelFloat)
            >>> print(Recipe(Solve(RTN())).explain(model, rule, jnp.ones((2, 16))))
            Solve(solver=RTN(), quantize_inputs=True)
              layers.0.dot_general0 (layers.0.kernel): 8 x 16, Int8WeightPerChannelFloat, float inputs
            left in float
              layers.1.kernel (32 numbers): no rule matches its path
        """
        work = Work.of_float(model, rules, [batch], method, call, "Recipe.explain")
        work.progress, work.explaining = False, True
        steps: list[Step] = []
        for each in self.passes:
            planned = getattr(each, "explain", each)
            steps.append(Step(repr(each), tuple(planned(work))))
        return Explanation(tuple(steps), coverage_of(work.quantized, work.calls, work.rules))


def _as_pass(given: Any) -> str:
    """How to write what was probably meant."""
    written = f"{given.__name__}()" if isinstance(given, type) else f"{given!r:.80}"
    if hasattr(given, "statistics"):
        return (
            f"Solve({written}): a solver chooses the numbers of one weight, and Solve takes it to all of them"
        )
    return written if isinstance(given, type) else "Solve(GPTQ())"
