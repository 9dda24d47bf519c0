"""A recipe: passes over a model, one after the other; what they did; and how a recipe is written to a file."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from flax import nnx

from jqinject.inject.errors import did_you_mean
from jqinject.model.calibration import CallBatch, check_batches
from jqinject.model.inspect.coverage import Coverage, coverage_of
from jqinject.model.quantizing.rules import Rule
from jqinject.program import CALL, Method
from jqinject.recipes.journal import Journal, identity_of
from jqinject.recipes.solvers.solver import Solver
from jqinject.recipes.work import Work

Model = TypeVar("Model", bound=nnx.Module)
#: Numbers, text, lists and tables, as JSON has them.
Data = None | bool | int | float | str | Sequence["Data"] | Mapping[str, "Data"]


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
class Explanation(Report):
    """What the passes of a recipe would do.

    Attributes:
        steps: in order.
        coverage: of the model quantized by the rules, before anything is solved: which weights are quantized, and why
            the others are not.
    """

    coverage: Coverage

    def __str__(self) -> str:
        left = [f"  {x.parameter} ({x.size:,} numbers): {x.why}" for x in self.coverage.missed]
        return "\n".join([super().__str__(), *(["left in float", *left] if left else [])])


@dataclass(frozen=True)
class Result(Generic[Model]):
    """What `Recipe.apply` returns.

    Attributes:
        model: the quantized model, in evaluation mode.
        report: what each pass did.
        float_model: the float model as passes that rescale it left it: its weights are those that solvers rounded.
            `jqinject.report(result, x)` measures against it.
    """

    model: Model
    report: Report
    float_model: Model


@runtime_checkable
class Pass(Protocol):
    """One step of a recipe: it changes the work and says what it did.

    It raises before it changes anything that `apply` could not throw away: the user's model is never touched.
    `Recipe.explain` carries it out on a copy, with a single batch; where `work.explaining` is true, a pass that takes
    long returns what it would do as such records, and runs nothing.
    """

    def __call__(self, work: Work) -> Iterable[object]:
        """Do it; what it did to each site, as records with a readable `str`."""
        ...


KIND = "is"
VERSION = 1


def kinds_by_name() -> dict[str, type[Pass]]:
    """The passes and solvers that a file may name: all that `jqinject.recipes` exports."""
    public = vars(import_module("jqinject.recipes"))
    kinds = (kind for kind in public.values() if isinstance(kind, type) and is_dataclass(kind))
    return {kind.__name__: kind for kind in kinds if issubclass(kind, Pass)}


def as_data(value: object) -> Data:
    """A pass, or what it is made of, as numbers, text, lists and dicts.

    Raises:
        TypeError: it is no dataclass of such parts: a pass of the user's own may hold a function.

    Example:
        >>> from jqinject.recipes import GPTQ
        >>> as_data(GPTQ(block_size=64))["is"], as_data(GPTQ(block_size=64))["block_size"]
        ('GPTQ', 64)
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [as_data(part) for part in value]
    if isinstance(value, Mapping) and KIND not in value and all(isinstance(name, str) for name in value):
        return {name: as_data(part) for name, part in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        parts = {name: as_data(vars(value)[name]) for name in _choices(type(value))}
        # TOML has no null: what is None is left out, as it is the default.
        return {KIND: type(value).__name__} | {name: part for name, part in parts.items() if part is not None}
    raise TypeError(
        f"{value!r:.80} cannot be written to a file: it is no number, text or dataclass of such parts.\n"
        "  cure: a frozen dataclass with the choices as fields"
    )


def from_data(data: Data, where: str) -> Any:
    """The reverse of `as_data`.

    Args:
        data: as `as_data` returns it.
        where: of the data, for messages.

    Raises:
        ValueError: an unknown class or field, or a value that the class refuses; the text says where.
    """
    if isinstance(data, list):
        return tuple(from_data(part, f"{where}[{place}]") for place, part in enumerate(data))
    if not isinstance(data, Mapping):
        return data
    parts = {key: from_data(part, f"{where}.{key}") for key, part in data.items() if key != KIND}
    if KIND not in data:
        return parts
    name, kinds = str(data[KIND]), kinds_by_name()
    _check_known(f"{where}: there is no pass or solver", name, kinds)
    for key in parts:
        _check_known(f"{where}: {name} has no choice", key, _choices(kinds[name]))
    try:
        return kinds[name](**parts)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error


def _check_known(without: str, name: str, names: Collection[str]) -> None:
    if name not in names:
        hint = did_you_mean(name, names)
        raise ValueError(f"{without} {name!r}{'; ' + hint if hint else '.'}")


def _choices(kind: type) -> list[str]:
    return [choice.name for choice in fields(kind) if choice.init]


@dataclass(frozen=True, init=False, repr=False)
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

    passes: tuple[Pass, ...]

    def __init__(self, *passes: Pass) -> None:
        for step in passes:
            if not callable(step) or isinstance(step, type | Solver):
                raise TypeError(f"Recipe takes passes, got {step!r:.80}.\n  cure: {_as_pass(step)}")
        object.__setattr__(self, "passes", passes)

    def __repr__(self) -> str:
        return f"Recipe({', '.join(map(repr, self.passes))})"

    def save(self, path: str | Path) -> None:
        """Write the recipe to a JSON file, for `Recipe.load`.

        Args:
            path: of the file.

        Raises:
            TypeError: a pass holds something else than numbers, text and dataclasses of such parts.
        """
        data = {"version": VERSION, "passes": as_data(self.passes)}
        Path(path).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Recipe:
        """The recipe in a JSON or TOML file; `is` names the pass or the solver, other keys are its arguments.

        Args:
            path: of the file; a suffix `.toml` means TOML.

        Raises:
            TypeError: it lists something else than passes.
            ValueError: it is not a recipe, or one of another version; an unknown pass, solver or argument; the text
                says where.
        """
        text, name = Path(path).read_text(encoding="utf-8"), Path(path).name
        try:
            data = tomllib.loads(text) if Path(path).suffix == ".toml" else json.loads(text)
        except ValueError as error:
            raise ValueError(f"{name} is not a recipe: {error}") from error
        if not isinstance(data, dict) or not isinstance(data.get("passes"), list):
            raise ValueError(
                f"{name} is not a recipe: it has no list of passes.\n  cure: Recipe.save writes one"
            )
        if data.get("version") != VERSION:
            raise ValueError(f"{name} has version {data.get('version')!r} of recipes, expected {VERSION}")
        return cls(*from_data(data["passes"], "passes"))

    def apply(
        self,
        model: Model,
        rules: Rule | Iterable[Rule],
        batches: Iterable[object],
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
        for place, step in enumerate(self.passes):
            before = work.copied() if floor is not None else work
            work.journal.begin(place)
            sites = tuple(step(work))
            current = work.quantized if work.is_quantized else work.model
            score = None if evaluate is None else float(evaluate(current))
            undone = floor is not None and score is not None and not score >= floor
            steps.append(Step(repr(step), sites, score, undone))
            if undone:
                work = before
                break
        return Result(work.quantized, Report(tuple(steps)), work.model)  # pyright: ignore

    def explain(
        self,
        model: nnx.Module,
        rules: Rule | Iterable[Rule],
        batch: object,
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
            Solve(solver=RTN(), quantize_inputs=True, fallback=None)
              layers.0.dot_general0 (layers.0.kernel): 8 x 16, Int8WeightPerChannelFloat, float inputs
            left in float
              layers.1.kernel (32 numbers): no rule matches its path
        """
        work = Work.of_float(model, rules, [batch], method, call, "Recipe.explain")
        work.progress, work.explaining = False, True
        steps = tuple(Step(repr(step), tuple(step(work))) for step in self.passes)
        return Explanation(steps, coverage_of(work.quantized, work.calls, work.rules))


def _as_pass(value: object) -> str:
    """How to write what was probably meant."""
    written = f"{value.__name__}()" if isinstance(value, type) else f"{value!r:.80}"
    if isinstance(value, Solver):
        return (
            f"Solve({written}): a solver chooses the numbers of one weight, and Solve takes it to all of them"
        )
    return written if isinstance(value, type) else "Solve(GPTQ())"
