"""What passes work on: the float model, the model quantized so far, and the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.model import calibrate, quantize
from jqinject.model.lora.factors import dense_update
from jqinject.model.quantizing.rules import Rule
from jqinject.model.running.batches import CallBatch
from jqinject.model.walk import ModelIndex
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.program import CALL, Call, Method, OpQuantizers, dotted
from jqinject.quant_tensor import IntQuantTensor, as_array
from jqinject.recipes.journal import Journal
from jqinject.recipes.quantized_parameter import QuantizedParameter, quantized_parameters
from jqinject.recipes.stream.site import ContractionSite
from jqinject.recipes.stream.stream import Stream


@dataclass(frozen=True)
class LooksIntoEverything:
    """A policy of a trace in which every module is looked into."""

    follows_parameters = True

    def is_leaf(self, module: Any) -> bool:
        """No module is taken whole."""
        return False


@dataclass
class Work:
    """The state that a recipe's passes change.

    Attributes:
        original: the float model as it was given.
        model: the float model as earlier passes left it; its function is the original's.
        rules: which quantizer each site gets.
        batches: the calibration data.
        calls: of the model, one for each batch.
        inputs: the arguments that `quantize` traces the model with; None to trace only `methods`.
        methods: name -> arguments of another method that it traces.
        method, call: how batches become calls, as for `jqinject.calibrate`.
        allow_idle: whether rules may take nothing, as a pass put others before them.
        on_host: whether values between sites are kept in the host's memory.
        progress: whether progress bars are shown.
        journal: remembers what passes have computed.
        explaining: whether nothing is run that only an application needs: ranges are not calibrated.
    """

    original: nnx.Module
    model: nnx.Module
    rules: tuple[Rule, ...]
    batches: Sequence[Any]
    calls: Sequence[Call]
    inputs: Any
    methods: Any = None
    method: Method = CALL
    call: CallBatch | None = None
    on_host: bool = False
    progress: bool = True
    allow_idle: bool = False
    journal: Journal = field(default_factory=Journal)
    explaining: bool = False
    _quantized: nnx.Module | None = None

    @classmethod
    def of_quantized(
        cls, model: nnx.Module, quantized: nnx.Module, calls: Sequence[Call], *, progress: bool
    ) -> Work:
        """The work on a model that is quantized already.

        Args:
            model: the float model, in evaluation mode.
            quantized: the quantized model, likewise, its ranges calibrated.
            calls: of the model.
            progress: whether progress bars are shown.
        """
        made = cls(model, model, (), (), calls, None, progress=progress)
        made._quantized = quantized
        return made

    @property
    def is_quantized(self) -> bool:
        """Whether a pass has asked for the quantized model."""
        return self._quantized is not None

    @property
    def quantized(self) -> nnx.Module:
        """The quantized model: made from the float model when it is first asked for, its ranges calibrated."""
        if self._quantized is None:
            self._quantized = quantize(
                self.model,
                self.rules,
                inputs=self.inputs,
                methods=self.methods,
                allow_idle=self.allow_idle,
            )
            self._calibrate()
        return self._quantized

    def quantize_with(self, model: nnx.Module) -> None:
        """Go on with a quantized model that a pass has made.

        Args:
            model: of the float model and the rules; its ranges need not be calibrated.
        """
        self._quantized = model
        self._calibrate()

    def _updates(self) -> dict[Any, jax.Array]:
        """The low-rank updates beside parameters of the quantized model, as arrays by path."""
        held = [node for _, node in ModelIndex(self.quantized).places if isinstance(node, OpQuantizers)]
        adapters = {name: each for node in held for name, each in node.adapters_by_path().items()}
        shapes = {name: each.value.shape for name, each in self.parameters().items()} if adapters else {}
        return {each.weight_path: dense_update(each, shapes[name]) for name, each in adapters.items()}

    def _calibrate(self) -> None:
        assert self._quantized is not None
        self._quantized.eval()
        if not self.explaining and any(
            has_open_range(node) for _, node in ModelIndex(self._quantized).places
        ):
            calibrate(self._quantized, self.batches, method=self.method, call=self.call, progress=False)

    @property
    def current(self) -> nnx.Module:
        """The quantized model once there is one, else the float model."""
        return self.quantized if self.is_quantized else self.model

    def copied(self) -> Work:
        """The work as it is now, which later passes do not change."""
        kept = None if self._quantized is None else nnx.clone(self._quantized, graph=True)
        model = nnx.clone(self.model, graph=True)
        return replace(self, model=model, _quantized=kept)

    def parameters(self) -> dict[str, QuantizedParameter]:
        """The parameters that have a quantizer, by path."""
        return quantized_parameters(self.quantized)

    def float_stream(self, calls: Sequence[Call] | None = None) -> Stream:
        """The data through the float model alone.

        Args:
            calls: of the model; all by default.
        """
        chosen = self.calls if calls is None else calls
        return Stream(
            self.model,
            chosen,
            LooksIntoEverything(),  # pyright: ignore
            updates=self._updates() if self.is_quantized else None,
            on_host=self.on_host,
        )

    @property
    def input_quantizers(self) -> InputQuantizers:
        """The quantizers of the inputs of the quantized model's sites."""
        return InputQuantizers(self.quantized)

    def stream(self, quantize_inputs: bool = True) -> Stream:
        """The data through the float model, and through it with the inputs of its sites quantized.

        Args:
            quantize_inputs: whether they are; quantizers of weights alone otherwise.
        """
        held = self.input_quantizers
        return Stream(
            self.model,
            self.calls,
            LooksIntoEverything(),  # pyright: ignore
            quantize_input=held.quantize if quantize_inputs else None,
            updates=self._updates(),
            on_host=self.on_host,
        )


def has_open_range(node: Any) -> bool:
    """Whether a module is a proxy whose range is collected from data, and has none yet."""
    ask = getattr(type(node), "has_range", None)
    return ask is not None and node.has_range() is False


class InputQuantizers:
    """The quantizers of the inputs of sites, in a quantized model.

    Args:
        model: quantized, in evaluation mode.
    """

    def __init__(self, model: nnx.Module) -> None:
        places = ModelIndex(model).places
        self._layers = {path: node for path, node in places if isinstance(node, QuantWeightLayer)}
        self._held: dict[str, Any] = {}
        for _, node in places:
            if isinstance(node, OpQuantizers):
                self._held |= dict(node.held.items())

    def of(self, site: ContractionSite) -> Any:
        """The quantizer of a site's input; None if it has none."""
        layer = self._layers.get(tuple(map(str, site.path[:-1])))
        if layer is not None and layer.weight_name == str(site.path[-1]):
            depth = len(layer.weight_shape) - layer.weight_ndim
            return _at_turn(layer.input_quant, site.turn[:depth])
        return self._held.get(site.operand)

    def is_on(self, site: ContractionSite) -> bool:
        """Whether a site's input is quantized."""
        proxy = self.of(site)
        return proxy is not None and getattr(proxy, "is_quant_enabled", True)

    def integers(self, site: ContractionSite, x: jax.Array) -> tuple[int, bool] | None:
        """Bits and sign of the integers that a site's input becomes; None if it becomes none.

        Args:
            site: of the model.
            x: an input.
        """
        if not self.is_on(site):
            return None
        found = self.of(site)(x)
        if not isinstance(found, IntQuantTensor) or isinstance(found.bit_width, jax.Array):
            return None
        return found.bit_width, found.signed

    def quantize(self, site: ContractionSite, x: jax.Array) -> jax.Array:
        """A site's input as the quantized model sees it, in float."""
        if not self.is_on(site):
            return x
        proxy = self.of(site)
        return jnp.asarray(as_array(proxy(x)))

    def bits(self, site: ContractionSite) -> int | None:
        """How many bits a number of a site's input has; None if it is not quantized."""
        proxy = self.of(site)
        width = None if proxy is None else proxy.bit_width()
        return None if width is None else int(np.max(np.asarray(width)))


def _at_turn(proxy: Any, turn: tuple[int, ...]) -> Any:
    """The quantizer of one layer of a stack, in the turns of the loops that run them; itself without a stack."""
    if proxy is None or not turn:
        return proxy
    graphdef, state = nnx.split(proxy, graph=True)
    return nnx.merge(graphdef, jax.tree.map(lambda stacked: stacked[turn], state))


def site_path(site: ContractionSite) -> str:
    """The path of a site's parameter, as text."""
    return dotted(site.path)
