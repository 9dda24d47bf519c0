"""The main job, from digits to table."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from flax import nnx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jqinject.demo import data, display, measures, train_classifier
from jqinject.demo.network import Classifier
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
    digits = data.load(seed)
    floats = Classifier(None, rngs=nnx.Rngs(seed))
    columns = (TextColumn("{task.description:<20}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    rows, models = [], []
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("float", total=train_classifier.steps_of(digits, float_epochs))
        train_classifier.train(
            floats, digits, float_epochs, FLOAT_LEARNING_RATE, seed, lambda: progress.advance(task)
        )
        reference = train_classifier.accuracy(floats, digits)
        for recipe in recipes:
            model = Classifier(recipe, rngs=nnx.Rngs(seed))
            load_state(model, nnx.state(floats, nnx.Param))
            models.append(model)
            rows.append(_measured(model, recipe, digits, reference, seed, progress))
        by_rule = [_by_rule(floats, recipe, digits, reference, seed, progress) for recipe in rule_recipes]
    display.print_table(console, rows, measures.float_bytes(floats))
    display.print_rule_table(console, by_rule, measures.float_bytes(floats))
    console.print(f"\nWhat the {recipes[-1].name} weights of conv2 are made of (jqinject.explain):\n")
    console.print(
        str(explain(models[-1].conv2.weight_quant, module=models[-1].conv2)),
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    display.save_picture(out, rows)
    console.print(f"\nPicture: {out}")
    return DemoResults(rows, by_rule)


def _measured(
    model: Classifier,
    recipe: DemoRecipe,
    digits: data.Digits,
    reference: float,
    seed: int,
    progress: Progress,
) -> display.Row:
    task = progress.add_task(recipe.name, total=1 + train_classifier.steps_of(digits, recipe.epochs))
    train_classifier.calibrate(model, digits, seed)
    loaded = train_classifier.accuracy(model, digits)
    sqnr = measures.weight_sqnr(model)
    progress.advance(task)
    trained = None
    if recipe.epochs:
        train_classifier.train(
            model, digits, recipe.epochs, QUANT_LEARNING_RATE, seed + 1, lambda: progress.advance(task)
        )
        trained = train_classifier.accuracy(model, digits)
    return display.Row(
        name=recipe.name,
        weight_bits=recipe.weight_bits,
        act_bits=recipe.act_bits,
        float_accuracy=reference,
        loaded_accuracy=loaded,
        trained_accuracy=trained,
        bytes=measures.quantized_bytes(model, recipe),
        sqnr=sqnr,
    )


def _by_rule(
    floats: Classifier,
    recipe: RuleRecipe,
    digits: data.Digits,
    reference: float,
    seed: int,
    progress: Progress,
) -> display.RuleRow:
    task = progress.add_task(recipe.name, total=1 + train_classifier.steps_of(digits, recipe.epochs))
    model = quantize(floats, recipe.rule)
    calibrate(model, (images for images, _ in train_classifier.batches(digits, 1, seed)), progress=False)
    progress.advance(task)
    if recipe.epochs:
        train_classifier.train(
            model, digits, recipe.epochs, QUANT_LEARNING_RATE, seed + 1, lambda: progress.advance(task)
        )
    freeze(model)
    return display.RuleRow(
        name=recipe.name,
        weight_bits=recipe.weight_bits,
        epochs=recipe.epochs,
        float_accuracy=reference,
        accuracy=train_classifier.accuracy(model, digits),
        bytes=measures.frozen_bytes(model),
    )
