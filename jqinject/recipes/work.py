"""What passes work on: the float model, the model quantized so far, and the data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.model import calibrate, quantize
from jqinject.model.calibration import BatchCalls, CallBatch
from jqinject.model.lora.adapter_plan import dense_update
from jqinject.model.quantizing.rules import Rule, checked_rules
from jqinject.model.walk import ModelIndex
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.program import (
    CALL,
    HELD,
    Call,
    Method,
    OpQuantizers,
    arguments_of,
    checked_method,
    dotted,
    find_sites,
)
from jqinject.proxy import QuantProxyFromInjector
from jqinject.quant_tensor import as_array, on_integers
from jqinject.recipes.journal import Journal
from jqinject.recipes.online import Online, transformed_input
from jqinject.recipes.quantized_parameter import QuantizedParameter, adapters_of, quantized_parameters
from jqinject.recipes.stream.site import ContractionSite
from jqinject.recipes.stream.stream import QuantizeInput, Stream


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
        model: the float model as earlier passes left it; its function is that of the model that was given.
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
        online: path of a parameter -> the transform before the inputs of its sites, for which it is stored.
        explaining: whether nothing is run that only an application needs: ranges are not calibrated.
    """

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
    online: dict[str, Online] = field(default_factory=dict)
    explaining: bool = False
    _quantized: nnx.Module | None = None

    @classmethod
    def of_float(
        cls,
        model: nnx.Module,
        rules: Rule | Iterable[Rule],
        batches: Iterable[Any] | None,
        method: Method,
        call: CallBatch | None,
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
        calls = BatchCalls(model, method, call, caller)
        data = [] if batches is None else list(batches)
        work = cls(
            model=nnx.clone(model, graph=True),
            rules=checked_rules(rules),
            batches=data,
            calls=[] if batches is None else list(calls.of(data)),
            inputs=None,
            method=method,
            call=call,
        )
        work.model.eval()
        found = checked_method(model, method, caller) if data and call is None else None
        if found == CALL:
            args, kwargs = arguments_of(data[0])
            work.inputs = kwargs or args
        elif isinstance(found, str):
            work.methods = {found: data[0]}
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
        made = cls(floating, (), (), list(calls), None, progress=progress)
        made._quantized = quantized
        return made

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
            self._quantized = self.quantized_by(self.rules_with_transforms)
            self._fill_transforms()
            self._calibrate()
        return self._quantized

    def quantized_by(self, rules: Sequence[Rule]) -> nnx.Module:
        """The float model quantized by rules, its ranges not calibrated.

        Args:
            rules: of the work, or others in their place.
        """
        idle = self.allow_idle or bool(self.online)
        return quantize(self.model, rules, inputs=self.inputs, methods=self.methods, allow_idle=idle)

    @property
    def rules_with_transforms(self) -> tuple[Rule, ...]:
        """The rules, after one for each parameter that is stored for a transform of its input."""
        if not self.online:
            return self.rules
        model = ModelIndex(self.model)
        online = [one.rule(name, model, self.rules) for name, one in self.online.items()]
        return (*online, *self.rules)

    def _fill_transforms(self) -> None:
        """Give the transforms before the inputs of sites their numbers.

        Raises:
            ValueError: an input has no quantizer that holds the transform; the text names the site.
        """
        held = None if not self.online else self.input_quantizers
        for site in [] if held is None else self.float_stream(self.calls[:1]).sites:
            online = self.online.get(site_path(site))
            if held is None or online is None:
                continue
            transform = held.transform_of(site)
            if transform is not None:
                online.fill(transform)
            else:
                raise ValueError(
                    f"{site.name} ({site_path(site)}): its weights are stored for a transform of its input, and the "
                    "quantized model has none there.\n  cure: leave out the pass that kept it, or quantize with inputs"
                )

    def quantize_with(self, model: nnx.Module) -> None:
        """Go on with a quantized model that a pass has made.

        Args:
            model: of the float model and the rules; its ranges need not be calibrated.
        """
        self._quantized = model
        self._fill_transforms()
        self._calibrate()

    def _updates(self) -> dict[Any, jax.Array]:
        """The low-rank updates beside parameters of the quantized model, as arrays by path."""
        adapters = adapters_of(self.quantized)
        shapes = {name: each.value.shape for name, each in self.parameters().items()} if adapters else {}
        return {each.weight_path: dense_update(each, shapes[name]) for name, each in adapters.items()}

    def _calibrate(self) -> None:
        assert self._quantized is not None
        self._quantized.eval()
        if not self.explaining and any(
            has_open_range(node) for _, node in ModelIndex(self._quantized).places
        ):
            calibrate(
                self._quantized, self.batches, method=self.method, call=self.call, progress=self.progress
            )

    @property
    def current(self) -> nnx.Module:
        """The quantized model once there is one, else the float model."""
        return self.quantized if self.is_quantized else self.model

    def copied(self) -> Work:
        """The work as it is now, which later passes do not change."""
        kept = None if self._quantized is None else nnx.clone(self._quantized, graph=True)
        model = nnx.clone(self.model, graph=True)
        return replace(self, model=model, _quantized=kept, online=dict(self.online))

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
            transform_input=self._transform_input,
            updates=self._updates() if self.is_quantized else None,
            on_host=self.on_host,
        )

    @property
    def input_quantizers(self) -> InputQuantizers:
        """The quantizers of the inputs of the quantized model's sites."""
        return InputQuantizers(self.quantized, self.calls[0], self.online)

    @property
    def _transform_input(self) -> QuantizeInput | None:
        return partial(transformed_input, self.online) if self.online else None

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
            transform_input=self._transform_input,
            updates=self._updates(),
            on_host=self.on_host,
        )


def has_open_range(node: Any) -> bool:
    """Whether a module is a proxy whose range is collected from data, and has none yet."""
    ask = getattr(type(node), "has_range", None)
    return ask is not None and node.has_range() is False


def _beside_of(model: nnx.Module, call: Call) -> dict[str, str]:
    """The name of the quantizer of each contraction's other operand, by the contraction's name in its method.

    An input that several contractions read goes through one quantizer, which the first of them names.

    Args:
        model: quantized.
        call: of it.
    """
    held = vars(model).get(HELD)
    if not isinstance(held, OpQuantizers) or not len(held.held):
        return {}
    found = find_sites(model, held.policy, [call])
    return {use.name.removeprefix(f"{call.name}:"): use.beside for use in found.uses if use.beside}


class InputQuantizers:
    """The quantizers of the inputs of sites, in a quantized model.

    Args:
        model: quantized, in evaluation mode.
        call: of it.
        online: path of a parameter -> the transform before the inputs of its sites.
    """

    def __init__(self, model: nnx.Module, call: Call, online: Mapping[str, Online] = {}) -> None:
        self._online, self._beside = online, _beside_of(model, call)
        places = ModelIndex(model).places
        self._layers = {path: node for path, node in places if isinstance(node, QuantWeightLayer)}
        self._held: dict[str, Any] = {}
        self._stacks: dict[str, int] = {}
        for _, node in places:
            if isinstance(node, OpQuantizers):
                self._held |= dict(node.held.items())
                self._stacks |= dict(node.stacks)

    def of(self, site: ContractionSite) -> Any:
        """The quantizer of a site's input; None if it has none."""
        layer = self._layer(site)
        stacked = layer is not None and len(layer.weight_shape) - layer.weight_ndim
        depth = self._stacks.get(self._name_between(site), 0) if layer is None else stacked
        return _at_turn(self.held_for(site), site.turn[:depth])

    def held_for(self, site: ContractionSite) -> Any:
        """The quantizer that the model holds for a site's input, of a stack that of all layers; None if it has none."""
        layer = self._layer(site)
        return self._held.get(self._name_between(site)) if layer is None else layer.input_quant

    def transform_of(self, site: ContractionSite) -> Any:
        """The transform that the model holds before a site's input; None if it holds none.

        Args:
            site: of the model.
        """
        proxy = self.held_for(site)
        return None if proxy is None else proxy.pre_transform

    def _name_between(self, site: ContractionSite) -> str:
        """The name of the quantizer of the input of a contraction that is no layer of ours."""
        return self._beside.get(site.operand.rpartition("_")[0], site.operand)

    def _layer(self, site: ContractionSite) -> Any:
        layer = self._layers.get(tuple(map(str, site.path[:-1])))
        return layer if layer is not None and layer.weight_name == str(site.path[-1]) else None

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
        if not on_integers(found) or isinstance(found.bit_width, jax.Array):
            return None
        return found.bit_width, found.signed

    def quantize(self, site: ContractionSite, x: jax.Array) -> jax.Array:
        """A site's input as the quantized model sees it, in float."""
        proxy = self.of(site)
        if proxy is not None and (self.is_on(site) or proxy.pre_transform is not None):
            return jnp.asarray(as_array(proxy(x)))
        return transformed_input(self._online, site, x)

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
