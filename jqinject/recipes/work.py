"""What passes work on: the float model, the model quantized so far, and the data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import jax
from flax import nnx

from jqinject.model import calibrate, calibration, quantize, walk
from jqinject.model.lora.adapter_plan import dense_update
from jqinject.model.quantizing.rules import Rule, checked_rules
from jqinject.program import CALL, Call, Method
from jqinject.proxy import QuantProxyFromInjector
from jqinject.recipes.journal import Journal
from jqinject.recipes.online import InputQuantizers, Online
from jqinject.recipes.quantized_parameter import QuantizedParameter, adapters_of, quantized_parameters
from jqinject.recipes.stream.stream import QuantizeInput, Stream

T = TypeVar("T")


@dataclass
class Work:
    """The state that a recipe's passes change.

    Attributes:
        model: the float model as earlier passes left it; its function is that of the model that was given.
        rules: which quantizer each site gets.
        batches: the calibration data.
        calls: of the model, one for each batch.
        methods: what `quantize` traces the model with; none if batches are called by a function of the user's.
        method, call: how batches become calls, as for `jqinject.calibrate`.
        allow_idle: whether rules may take nothing, as a pass put others before them.
        on_host: whether values between sites are kept in the host's memory.
        progress: whether progress bars are shown.
        journal: remembers what passes have computed.
        online: path of a parameter -> the transform before the inputs of its sites, for which it is stored.
        explaining: whether nothing is run that only an application needs: ranges are not calibrated, and passes that
            take long return what they would do.
    """

    model: nnx.Module
    rules: tuple[Rule, ...]
    batches: Sequence[object]
    calls: Sequence[Call]
    methods: Mapping[Method, object] = field(default_factory=dict)
    method: Method = CALL
    call: calibration.CallBatch | None = None
    on_host: bool = False
    progress: bool = True
    allow_idle: bool = False
    journal: Journal = field(default_factory=Journal)
    online: dict[str, Online] = field(default_factory=dict)
    explaining: bool = False
    _quantized: nnx.Module | None = None

    @classmethod
    def of_float(
        cls,
        model: nnx.Module,
        rules: Rule | Iterable[Rule],
        batches: Iterable[object] | None,
        method: Method,
        call: calibration.CallBatch | None,
        caller: str,
    ) -> Work:
        """The work on a float model.

        Args:
            model: it is not changed.
            rules: as for `jqinject.quantize`.
            batches: the data; None for passes that read none.
            method, call: how batches become calls.
            caller: the calling function's name, for error texts.
        """
        batch_calls = calibration.BatchCalls(model, method, call, caller)
        data = [] if batches is None else list(batches)
        checked = checked_rules(rules)
        calls = [] if batches is None else list(batch_calls.of(data))
        methods: dict[Method, object] = {}
        if call is None and calls and isinstance(calls[0].method, str):
            methods[calls[0].method] = calls[0].kwargs or calls[0].args
        work = cls(nnx.clone(model, graph=True), checked, data, calls, methods, method, call)
        work.model.eval()
        return work

    @classmethod
    def of_quantized(cls, model: nnx.Module, calls: Iterable[Call], *, progress: bool) -> Work:
        """The work on a model that is quantized already; the float model is the same one with its quantizers off.

        Args:
            model: quantized, its ranges calibrated; it is not changed (`write_to`).
            calls: of the model.
            progress: whether progress bars are shown.
        """
        floating, quantized = nnx.clone(model, graph=True), nnx.clone(model, graph=True)
        for copy in (floating, quantized):
            copy.eval()
        for _, node in nnx.iter_modules(floating, graph=True):
            if isinstance(node, QuantProxyFromInjector):
                node.observing = True
        return cls(floating, (), (), list(calls), progress=progress, _quantized=quantized)

    def write_to(self, model: nnx.Module) -> None:
        """Give a model the parameters, scales and statistics of the quantized model.

        Args:
            model: that the work was made of (`of_quantized`).
        """
        ours = self.parameters()
        for name, theirs in quantized_parameters(model).items():
            if ours[name].proxy.committed:
                theirs.proxy.commit(theirs.holder)
        nnx.update(model, nnx.state(self.quantized, graph=True))

    @property
    def is_quantized(self) -> bool:
        """Whether a pass has asked for the quantized model."""
        return self._quantized is not None

    @property
    def quantized(self) -> nnx.Module:
        """The quantized model: made from the float model when it is first asked for, its ranges calibrated."""
        if self._quantized is None:
            index = walk.ModelIndex(self.model)
            first = [before.rule(name, index, self.rules) for name, before in self.online.items()]
            return self.quantize_with(self.quantized_by((*first, *self.rules)))
        return self._quantized

    def quantized_by(self, rules: Sequence[Rule]) -> nnx.Module:
        """The float model quantized by rules, its ranges not calibrated.

        Args:
            rules: of the work, or others in their place.
        """
        idle = self.allow_idle or bool(self.online)
        return quantize(self.model, rules, methods=self.methods, allow_idle=idle)

    def quantize_with(self, model: nnx.Module) -> nnx.Module:
        """Go on with a quantized model.

        Args:
            model: of the float model and the rules; its ranges need not be calibrated.

        Returns:
            The model, its ranges calibrated.
        """
        self._quantized = model
        model.eval()
        if not self.explaining and walk.uncalibrated(walk.ModelIndex(model)):
            calibrate(model, self.batches, method=self.method, call=self.call, progress=self.progress)
        return model

    def _updates(self) -> dict[str, jax.Array]:
        """The low-rank updates beside parameters of the quantized model, as arrays by path."""
        adapters = adapters_of(self.quantized)
        shapes = {name: x.value.shape for name, x in self.parameters().items()} if adapters else {}
        return {name: dense_update(adapter, shapes[name]) for name, adapter in adapters.items()}

    def refuse_quantized(self, by: str, cure: str) -> None:
        """Refuse a pass over the float model after one that has asked for the quantized model.

        Args:
            by: the pass and what it does.
            cure: passes in the right order.

        Raises:
            ValueError: there is a quantized model.
        """
        if self.is_quantized:
            raise ValueError(
                f"{by}, and a pass before it has made the quantized model.\n  cure: Recipe({cure}), in this order"
            )

    def copied(self) -> Work:
        """The work as it is now, which later passes do not change."""
        model, quantized = nnx.clone((self.model, self._quantized), graph=True)
        return replace(self, model=model, _quantized=quantized, online=dict(self.online))

    def parameters(self) -> dict[str, QuantizedParameter]:
        """The parameters that have a quantizer, by path."""
        return quantized_parameters(self.quantized)

    def stream(
        self, quantize_input: QuantizeInput | None = None, calls: Sequence[Call] | None = None
    ) -> Stream:
        """The data through the float model, and through it with what passes put in the place of parameters.

        Args:
            quantize_input: what is contracted instead of an input then; None for the input itself.
            calls: of the model; all by default.
        """
        return Stream(
            self.model,
            self.calls if calls is None else calls,
            quantize_input=quantize_input,
            online=self.online,
            updates=self._updates() if self.is_quantized else {},
            on_host=self.on_host,
        )

    def bar(self, items: Iterable[T], what: str) -> Iterator[T]:
        """Some items, with a progress bar that advances as they are taken, if bars are shown.

        Args:
            items: the items.
            what: the label.
        """
        return calibration.with_progress(items, what, shown=self.progress)

    @property
    def input_quantizers(self) -> InputQuantizers:
        """The quantizers of the inputs of the quantized model's sites."""
        return InputQuantizers(self.quantized, self.calls[0])
