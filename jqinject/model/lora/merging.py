"""`merge_lora`: puts low-rank updates into the weights."""

import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.dot import READS_WHOLE, FrozenParam
from jqinject.model.frozen_weights import float_param, put_in_place
from jqinject.model.inspect.measured_report import sqnr_db
from jqinject.model.lora.adapter_plan import dense_update
from jqinject.model.quantizing.parameter_sites import parameter_site
from jqinject.model.quantizing.rules import matches_path
from jqinject.model.walk import ModelIndex, Path, check_module, is_finite, place_name
from jqinject.nn.freeze_layer import frozen_param
from jqinject.program import HELD, Adapter, QuantizedProgram, change_class, listed, program_class_of
from jqinject.quant_tensor import as_array, is_concrete

Model = TypeVar("Model", bound=nnx.Module)
MOST_TOLD = 8


def merge_lora(model: Model, path: str = ".*", *, rngs: nnx.Rngs | None = None) -> Model:
    """Put adapters into the weights, in place: w becomes `w + (alpha / rank) A B`, and the adapter is removed.

    - An update inside the quantizer (`lora(..., update="inside")`): the model computes the same bits as before. The
      frozen one holds the same integers and scales, and sums their products in its own order.
    - Beside a float weight: the same up to rounding in the weight's dtype.
    - Beside a quantized weight: this is dequantized, updated and quantized again by its rule, with new scales. It is
      rounded a second time: the error of the format is in the output twice, and updates below half a step are lost. A
      `LossyMergeWarning` tells how much.

    Memory: one float weight at a time.

    Warns:
        LossyMergeWarning: weights were quantized again, each with `10 log10(sum(w**2) / sum((w - q)**2))` of the
            updated w and what is stored of it, q, and the error's root mean square by that of the update.

    Args:
        model: a model that `jqinject.lora` made, or one that holds such models.
        path: a regular expression for the whole path of a weight, or of the module that holds it.
        rngs: for weight quantizers that draw random numbers.

    Returns:
        The model itself; a float one without quantizers is of its former class again.

    Raises:
        TypeError: `model` is not an NNX module.
        ValueError: no adapter matches; a weight whose rows are looked up too, without the update. Nothing is changed
            then.

    Example:
        >>> from jqinject.model.lora.adapting import lora
        >>> from jqinject.model.quantizing.rules import Rule
        >>> x = jnp.ones((3, 8))
        >>> model = lora(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), Rule(), rank=2, inputs=x, rngs=nnx.Rngs(1))
        >>> type(merge_lora(model)) is nnx.Linear
        True
    """
    check_module(model, "merge_lora")
    index = ModelIndex(model)
    adapters = list(_adapters(index))
    chosen = [
        place
        for place in adapters
        if matches_path(path, place.name) or matches_path(path, place_name(place.adapter.weight_path[:-1]))
    ]
    if not chosen:
        names = listed(tuple(place.name for place in adapters))
        raise ValueError(
            f"merge_lora: no adapter matches {path!r}; here are {names or 'none'}.\n"
            "  cure: a regular expression for the whole path of a weight"
        )
    looked_up = [f"{at.name} ({', '.join(at.adapter.lookups)})" for at in chosen if at.adapter.lookups]
    if looked_up:
        raise ValueError(
            f"merge_lora: rows of {', '.join(looked_up)} are looked up too, without the update, which would change.\n"
            "  cure: keep these adapters; merge_lora(model, path) takes a pattern that leaves them out"
        )
    _warn_of_loss(
        {place_name((*place.at, place.name)): _merge(ModelIndex(model), place, rngs) for place in chosen}
    )
    return model


class _Place(NamedTuple):
    """An adapter of a model.

    Attributes:
        at: path of the model that runs the contraction as a program.
        owner: that model.
        name: the weight's path in it.
        adapter: the adapter.
    """

    at: Path
    owner: QuantizedProgram
    name: str
    adapter: Adapter

    def remove(self) -> None:
        """Take the adapter away; a model without quantizers is of its former class again."""
        quantizers = self.owner.op_quant
        assert quantizers.adapters is not None
        del quantizers.adapters[self.name]
        if quantizers.adapters_by_path():
            return
        del quantizers.adapters
        if not (len(quantizers) or quantizers.tied):
            delattr(self.owner, HELD)
            change_class(self.owner, program_class_of(type(self.owner)))


def _adapters(index: ModelIndex, *, inside: bool = False) -> Iterator[_Place]:
    """The adapters of a model; or those inside quantizers alone."""
    for at, owner in index.places:
        if isinstance(owner, QuantizedProgram):
            for name, adapter in owner.op_quant.adapters_by_path().items():
                if adapter.inside or not inside:
                    yield _Place(at, owner, name, adapter)


def merge_inside(index: ModelIndex) -> None:
    """Put the updates that are inside quantizers into the weights, in place; has no effect without any.

    The quantizers stay what they were in training.

    Args:
        index: of the model.
    """
    for place in list(_adapters(index, inside=True)):
        _merge(index, place, None)


def check_updates(index: ModelIndex) -> None:
    """Refuse updates inside quantizers that are not finite.

    Raises:
        ValueError: names the weights.
    """
    wrong = tuple(
        place_name((*place.at, place.name))
        for place in _adapters(index, inside=True)
        if not all(is_finite(x[...]) for x in (place.adapter.a, place.adapter.b))
    )
    if wrong:
        raise ValueError(
            f"freeze: the low-rank updates of {listed(wrong)} hold nan or inf.\n"
            "  cure: mend the training, or load a checkpoint"
        )


class LossyMergeWarning(UserWarning):
    """Weights in low bits were quantized again with their updates: the model is not the one that was trained."""


def _warn_of_loss(losses: Mapping[str, tuple[float, float] | None]) -> None:
    """Warn of the weights that were quantized again, with what `_loss` returned of each."""
    worst = sorted((*loss, name) for name, loss in losses.items() if loss is not None)
    if not worst:
        return
    shown = "\n".join(
        f"    {name}: {ratio:.1f} dB, {by:.3g} of the update" for ratio, by, name in worst[:MOST_TOLD]
    )
    more = f"\n    {len(worst) - MOST_TOLD} more, with less error" if len(worst) > MOST_TOLD else ""
    warnings.warn(
        f"merge_lora: {len(worst)} weights in low bits were quantized again with their updates (signal to error, and "
        f"the error by the update):\n{shown}{more}\n"
        "  cure: lora(..., update='inside') trains what is merged; or keep the adapters: freeze(model) serves them",
        LossyMergeWarning,
        stacklevel=3,
    )


def _merge(index: ModelIndex, place: _Place, rngs: nnx.Rngs | None) -> tuple[float, float] | None:
    """Put one adapter into its weight; returns what quantizing it again did, if it was and is known."""
    adapter, model = place.adapter, index.places[0][1]
    variable: Any = index.nodes[(*place.at, *map(str, adapter.weight_path))]
    value, site = variable.get_value(), place.owner.op_quant.weight_sites().get(place.name)
    place.remove()
    if adapter.inside:
        variable.set_value(adapter.added_to(value))
        return None
    merged = (value.astype(jnp.float32) + dense_update(adapter, value.shape)).astype(value.dtype)
    if not isinstance(variable, FrozenParam):
        variable.set_value(merged)
        if site is not None and site.weight_quant is not None:
            site.weight_quant.release(site)
            site.weight_quant.init_tensor_quant(site)
        return None
    param = float_param(variable, merged)
    put_in_place(index, variable, param)
    frozen = frozen_param(parameter_site(ModelIndex(place.owner), adapter.base, rngs))
    if variable.get_metadata(READS_WHOLE, False):
        frozen.set_metadata(**{READS_WHOLE: True})
    put_in_place(ModelIndex(model), param, frozen)
    return _loss(value, merged, frozen.get_value()) if is_concrete(merged) else None


def _loss(before: object, updated: object, stored: object) -> tuple[float, float]:
    """The signal to error of an updated weight in decibels, and the error's root mean square by the update's."""
    old, new, quantized = (np.asarray(as_array(x), np.float64) for x in (before, updated, stored))
    error = float(np.sqrt(np.mean(np.square(quantized - new))))
    update = float(np.sqrt(np.mean(np.square(new - old))))
    return sqnr_db([new], [quantized]), error / update if update else math.inf if error else 0.0
