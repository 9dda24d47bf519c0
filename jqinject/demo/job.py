"""The main job, from digits to table."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from flax import nnx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from jqinject.demo import classifier, display
from jqinject.demo.recipes import RECIPES, RULE_RECIPES, DemoRecipe, RuleRecipe
from jqinject.inject import explain
from jqinject.model import calibrate, freeze, load_state, quantize

FLOAT_EPOCHS = 30
FLOAT_LEARNING_RATE = 3e-3
QUANT_LEARNING_RATE = 1e-3


class DemoResults(NamedTuple):
    """The rows of both tables: classes of quantizers, and rules for the float model."""

    rows: list[display.Row]
    by_rule: list[display.RuleRow]


def run(
    seed: int,
    out: Path,
    console: Console,
    *,
    recipes: Sequence[DemoRecipe] = RECIPES,
    rule_recipes: Sequence[RuleRecipe] = RULE_RECIPES,
    float_epochs: int = FLOAT_EPOCHS,
) -> DemoResults:
    """Train the float classifier, load it into quantized ones, quantize it by rules, train the models whose recipe says
    so, and show the results.

    Args:
        seed: of the split, the initial weights and the order of batches.
        out: the file of the picture.
        console: the console for the tables.
        recipes: how to build quantized models.
        rule_recipes: how to quantize the float model.
        float_epochs: epochs of the float model.

    Returns:
        The rows of the tables.
    """
    digits = classifier.load(seed)
    floats = classifier.Classifier(None, rngs=nnx.Rngs(seed))
    columns = (TextColumn("{task.description:<20}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    rows, models = [], []
    with Progress(*columns, console=console) as progress:
        job = _Job(digits, seed, progress)
        task = job.task("float", float_epochs, 0)
        job.train(floats, float_epochs, task, FLOAT_LEARNING_RATE, seed)
        reference = classifier.accuracy(floats, digits)
        for recipe in recipes:
            model = classifier.Classifier(recipe, rngs=nnx.Rngs(seed))
            load_state(model, nnx.state(floats, nnx.Param))
            models.append(model)
            rows.append(job.measured(model, recipe, reference))
        by_rule = [job.by_rule(floats, recipe, reference) for recipe in rule_recipes]
    display.print_table(console, rows, classifier.float_bytes(floats))
    display.print_rule_table(console, by_rule, classifier.float_bytes(floats))
    console.print(f"\nWhat the {recipes[-1].name} weights of conv2 are made of (jqinject.explain):\n")
    wiring = explain(models[-1].conv2.weight_quant, module=models[-1].conv2)
    console.print(str(wiring), markup=False, highlight=False, soft_wrap=True)
    display.save_picture(out, rows)
    console.print(f"\nPicture: {out}")
    return DemoResults(rows, by_rule)


class _Job(NamedTuple):
    """What all models of the job are trained with."""

    digits: classifier.Digits
    seed: int
    progress: Progress

    def task(self, name: str, epochs: int, more: int = 1) -> TaskID:
        """A bar for some epochs and further steps."""
        total = more + classifier.steps_of(self.digits, epochs)
        return self.progress.add_task(name, total=total)

    def train(self, model: object, epochs: int, task: TaskID, rate: float, seed: int) -> None:
        """Train a model, step by step of a bar."""
        classifier.train(model, self.digits, epochs, rate, seed, lambda: self.progress.advance(task))

    def measured(self, model: classifier.Classifier, recipe: DemoRecipe, reference: float) -> display.Row:
        """The row of a classifier whose float weights are loaded."""
        task = self.task(recipe.name, recipe.epochs)
        classifier.calibrate(model, self.digits, self.seed)
        loaded = classifier.accuracy(model, self.digits)
        sqnr = classifier.weight_sqnr(model)
        self.progress.advance(task)
        trained = None
        if recipe.epochs:
            self.train(model, recipe.epochs, task, QUANT_LEARNING_RATE, self.seed + 1)
            trained = classifier.accuracy(model, self.digits)
        size = classifier.quantized_bytes(model, recipe)
        bits = recipe.weight_bits, recipe.act_bits
        return display.Row(recipe.name, *bits, reference, loaded, trained, size, sqnr)

    def by_rule(self, floats: classifier.Classifier, recipe: RuleRecipe, reference: float) -> display.RuleRow:
        """The row of the float model quantized by a rule."""
        task = self.task(recipe.name, recipe.epochs)
        model = quantize(floats, recipe.rule)
        batches = classifier.batches(self.digits, 1, self.seed)
        calibrate(model, (images for images, _ in batches), progress=False)
        self.progress.advance(task)
        if recipe.epochs:
            self.train(model, recipe.epochs, task, QUANT_LEARNING_RATE, self.seed + 1)
        freeze(model)
        accuracy, size = classifier.accuracy(model, self.digits), classifier.frozen_bytes(model)
        return display.RuleRow(recipe.name, recipe.weight_bits, recipe.epochs, reference, accuracy, size)
