"""`calibrate`: static ranges of activations, from batches of data; and the calls that batches are arguments of."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx

from jqinject import program
from jqinject.core import QuantParam, QuantStat, StaticRange
from jqinject.model.quantizing.rule_policy import RulePolicy
from jqinject.model.walk import ModelIndex, check_module, is_finite, static_ranges
from jqinject.nn.base.slots import is_on
from jqinject.ops.processes import on_host
from jqinject.program import CALL, Call, Method, QuantizedProgram, listed
from jqinject.proxy import ActQuantProxyFromInjector, QuantProxyFromInjector


def with_progress(items: Iterable[T], what: str, *, shown: bool) -> Iterator[T]:
    """The items, with a bar that advances as they are taken.

    Args:
        items: any iterable; its length is shown where it is known.
        what: the label.
        shown: whether to show a bar at all.
    """
    if not shown or importlib.util.find_spec("rich") is None:
        yield from items
        return
    from rich.progress import track

    yield from track(items, description=what, transient=True)


T = TypeVar("T")
CallBatch = Callable[[Any, Any], object]


def check_batches(batches: object, caller: str) -> None:
    """Refuse a single batch, whose rows would be taken for batches.

    Args:
        batches: what a user gave.
        caller: the calling function's name, for the error text.

    Raises:
        TypeError: it is an array or a dict, or not iterable.
    """
    single = isinstance(batches, jax.Array | np.ndarray | Mapping)
    if single or not isinstance(batches, Iterable):
        raise TypeError(
            f"{caller} takes an iterable of batches, got {type(batches).__name__}.\n"
            "  cure: [x] for a single batch; list(x) where every x[i] is one"
        )


class BatchCalls:
    """Makes a call of each batch: of a method, or of the user's function of model and batch.

    Args:
        model: an NNX module.
        method: the method that batches are arguments of.
        call: a function of the model and a batch, or None.
        caller: the calling function's name, for error texts.

    Raises:
        TypeError: `model` is not an NNX module; `method` or `call` is not a function.
        ValueError: the model has no such method; both are given.
    """

    def __init__(self, model: nnx.Module, method: Method, call: CallBatch | None, caller: str) -> None:
        check_module(model, caller)
        if call is not None and method != CALL:
            raise ValueError(
                f"{caller}: give method={method!r:.80}, which batches are arguments of, or call=..., a function of the "
                "model and a batch; not both"
            )
        if call is not None and not callable(call):
            raise TypeError(
                f"{caller}: call must be a function of the model and a batch, got {type(call).__name__}"
            )
        self._method = program.checked_method(model, method, caller) if call is None else call
        self._whole = call is not None
        self._caller = caller

    def of(self, batches: Iterable[object], what: str = "", *, progress: bool = False) -> Iterator[Call]:
        """The calls, one for each batch.

        Args:
            batches: the batches.
            what: label of the progress bar.
            progress: whether to show one.

        Raises:
            TypeError: a batch has shapes without numbers.
            ValueError: a batch holds nan or inf, or there are no batches.
        """
        count = 0
        for count, batch in enumerate(with_progress(batches, what, shown=progress), 1):
            yield self._checked(batch, count - 1)
        if count == 0:
            raise ValueError(
                f"{self._caller} got no batch.\n  cure: give it an iterable that is not used up, of arrays"
            )

    def _checked(self, batch: object, index: int) -> Call:
        args, kwargs = ((batch,), {}) if self._whole else program.arguments_of(batch)
        for path, leaf in jax.tree.leaves_with_path((args, kwargs)):
            where = jax.tree_util.keystr(path[1:]) or "its array"
            if isinstance(leaf, jax.ShapeDtypeStruct):
                raise TypeError(
                    f"{self._caller} runs the model, and batch {index} has a shape without numbers in {where}.\n"
                    "  cure: batches of arrays"
                )
            if not is_finite(leaf):
                raise ValueError(
                    f"batch {index} has nan or inf in {where}, of shape {leaf.shape}: a range made from it would be of "
                    "no use.\n  cure: leave such samples out"
                )
        return Call(args, kwargs, self._method)


@dataclass(frozen=True)
class CalibrationReport:
    """What `calibrate` collected.

    Attributes:
        batches: the number of batches.
        quantizers: paths of the quantizers that saw data.
        missed: paths of quantizers with static ranges that no batch reached; they are unchanged.
    """

    batches: int
    quantizers: tuple[str, ...]
    missed: tuple[str, ...] = ()

    def __str__(self) -> str:
        said = f"calibrated {len(self.quantizers)} quantizers with {self.batches} batches"
        return f"{said}; no batch reached {listed(self.missed)}" if self.missed else said


def calibrate(
    model: nnx.Module,
    batches: Iterable[object],
    *,
    method: Method = CALL,
    call: CallBatch | None = None,
    quantized: bool = False,
    progress: bool = True,
) -> CalibrationReport:
    """Collect the ranges of activations from batches of data, without training.

    A quantizer's range is the mean of its ranges over all batches: `range = sum_i range_i / n`. Each quantizer declares
    how it finds the range of one batch (`calibration_impl`, `scaling_stats_op`), and any other way of averaging
    (`scaling_stats_momentum`, `zero_point_stats_momentum`, `momentum` of a `SimpleMovingAverage`,
    `amax_history_length`).

    The range depends on these batches alone: earlier statistics, learned values and calibrations are replaced. A scale
    or zero point that is learned after some training steps (`collect_stats_steps`) uses all batches, however many, and
    is learned from the next training step on.

    Apart from ranges, nothing changes: the model runs in evaluation mode, and weights, statistics of batch
    normalizations and random streams stay as they are. Afterwards the model is in evaluation mode.

    Args:
        model: a quantized NNX module: built of jqinject layers, or made by `quantize` or `OdmlQat`.
        batches: the model's arguments: arrays, tuples of positional arguments or dicts of keywords.
        method: the method that batches are arguments of: its name, or a function that takes the model first.
        call: a function of the model and a batch, which calls the model; instead of `method`.
        quantized: whether activations and weights are quantized while ranges are collected, as a device will run them;
            by default the ranges are those of the float model. Flax layers with a `QDotGeneral` or its kin contract in
            low bits either way.
        progress: show a progress bar, if `rich` is installed.

    Returns:
        A report.

    Raises:
        TypeError: `model` is not an NNX module; `batches` is a single batch, or not iterable.
        ValueError: the model has no such method; no batch; a batch with nan or inf; no quantizer with statistics, or
            none that a batch reaches; the model throws away what is collected, in copies of its layers; an abstract
            model. Nothing is changed then.

    Source: Brevitas's `calibration_mode`; Qwix's quantization statistics. Differs from Brevitas: scales that are never
    learned (`scaling_impl_type = "stats"`) take the mean too (there: the moving average of training); a second
    calibration replaces the first.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.nn import QuantLinear
        >>> from jqinject.quant import Int8ActPerTensorMinMax
        >>> layer = QuantLinear(4, 2, input_quant=Int8ActPerTensorMinMax, rngs=nnx.Rngs(0))
        >>> print(calibrate(layer, [jnp.ones((3, 4)), -jnp.ones((3, 4))], progress=False))
        calibrated 1 quantizers with 2 batches
        >>> layer.input_quant.tensor_quant.scaling_impl.averaging_impl.sum_of_max[...]
        Array(1., dtype=float32)
    """
    calls = BatchCalls(model, method, call, "calibrate")
    check_batches(batches, "calibrate")
    index = ModelIndex(model)
    ours = _observers(index)
    if not ours:
        raise ValueError(
            f"{type(model).__name__} has no activation quantizer with statistics that is on, so there is nothing to "
            "calibrate.\n"
            "  cure: give it input_quant=... or output_quant=... with a static range (Int8ActPerTensorMinMax); weights "
            "and dynamic ranges need no calibration"
        )
    if index.is_abstract:
        raise ValueError(
            f"calibrate runs the model, and {type(model).__name__} is abstract.\n"
            "  cure: quantize a model that was built for real, and load its weights"
        )
    copy = nnx.clone(model, graph=True)
    observers = _prepare(copy, quantized)
    step = program.compiled_call(_run)
    count, called = 0, None
    for count, called in enumerate(calls.of(batches, "calibrating", progress=progress), 1):
        try:
            step(copy, called)
        except Exception as error:
            error.add_note(f"while the model was called with batch {count - 1}; nothing was changed")
            raise
    for observer in observers.values():
        observer.end_calibration()
    _check_not_lost(copy, called, observers)
    reached, missed = _take_over(ours, observers)
    if not reached:
        names = listed(missed or tuple(ours))
        raise ValueError(
            f"calibrate ran {count} batches, and none reached a quantizer of activations: {names}.\n"
            "  cure: batches and a method that lead through these layers; current scaling needs no calibration"
        )
    model.eval()
    return CalibrationReport(count, reached, missed)


def _observers(index: ModelIndex) -> dict[str, StaticRange]:
    """The modules that collect statistics of activations, by path: static ranges, and the user's own components."""
    return {
        path: holder
        for path, holder in static_ranges(index).items()
        if holder.has_range() is not None
        or (isinstance(holder, ActQuantProxyFromInjector) and is_on(holder) and nnx.state(holder, QuantStat))
    }


def _prepare(copy: nnx.Module, quantized: bool) -> dict[str, StaticRange]:
    copy.eval()
    index = ModelIndex(copy)
    for node in index.modules:
        if isinstance(node, QuantProxyFromInjector) and not quantized:
            node.observing = True
    observers = _observers(index)
    for observer in observers.values():
        observer.begin_calibration()
    return observers


def _check_not_lost(copy: nnx.Module, call: Call | None, observers: dict[str, StaticRange]) -> None:
    """Refuse ranges that were collected in copies of layers, which the model throws away."""
    missed = tuple(path for path, observer in observers.items() if observer.has_range() is False)
    if not missed or call is None or isinstance(copy, QuantizedProgram):
        return
    thrown = program.throws_away(copy, RulePolicy(()), [call])
    lost = tuple(path for path in missed if any(state.startswith(f"{path}.") for state in thrown))
    if lost:
        raise ValueError(
            f"{type(copy).__name__} throws away what is collected in {listed(lost)}: copies of these layers are called "
            "inside a transformation (jax.checkpoint, jax.lax.scan). Nothing was changed.\n"
            "  cure: quantize(float_model, rules, inputs=(x,)), which runs the model as a program and keeps it; "
            "or nnx.remat and nnx.scan instead"
        )


def _run(model: object, call: Call) -> None:
    call(model)


def _take_over(
    ours: dict[str, StaticRange], theirs: dict[str, StaticRange]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Write the collected statistics into the model.

    Returns:
        Paths of the ranges that saw data, and of those that did not.
    """
    reached, missed = [], []
    for path, holder in ours.items():
        has_range = theirs[path].has_range()
        if has_range is False:
            missed.append(path)
            continue
        before, after = (nnx.state(side, (QuantStat, QuantParam)) for side in (holder, theirs[path]))
        arrays = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
        changed = any(not np.array_equal(on_host(old), on_host(new)) for old, new in arrays)
        nnx.update(holder, after)
        if has_range or changed:
            reached.append(path)
    return tuple(reached), tuple(missed)
