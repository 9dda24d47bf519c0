"""Contractions that a model's program does by itself, as a report runs them: recorded, in floats, or switched."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Container, Mapping
from functools import partial
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp

from jqinject.model.inspect.switching import Recorder, clipped_fields
from jqinject.program import Around, HeldQuantizers, Site, Tracked, WeightCall
from jqinject.quant_tensor import is_quantized

SLOTS = {"weight": "weight_quant", "input": "input_quant", "output": "output_quant"}


class Sites(NamedTuple):
    """What a report measures in a program.

    Attributes:
        entries: path of a parameter, or name of a contraction of two activations -> its entry.
        layers: the entries that are layers, which measure what they contract themselves.
    """

    entries: Mapping[str, str]
    layers: Container[str] = ()

    def entry_of(self, call: WeightCall) -> str | None:
        """The entry that a contraction belongs to; None if it is not measured here."""
        entry = self.entries.get(call.name)
        return None if entry is not None and entry in self.layers and call.module == entry else entry


class SiteRun:
    """Abstract: what a report does at each contraction with a parameter, and at each of two activations.

    Args:
        sites: see `Sites`.
        others: whether quantizers elsewhere are on.
    """

    def __init__(self, sites: Sites, others: bool) -> None:
        self.sites, self.others = sites, others

    @abstractmethod
    def run(self, entry: str, call: WeightCall, proxy_at: Callable[[str], Any]) -> Tracked:
        """The output that flows on."""

    @abstractmethod
    def chosen(self, entry: str, quantized: object, floats: object) -> Any:
        """What an operation that does not contract a parameter reads of it."""

    def weight(self, entry: str, site: str, proxy: object, x: object, quantized: object) -> None:
        """A parameter was quantized."""

    def gradient(self, entry: str, site: str) -> None:
        """The gradient of an output has a quantizer."""


@final
class FloatingSites(SiteRun):
    """Contracts floats, and records the quantized output for the same operands."""

    def __init__(self, sites: Sites, recorder: Recorder) -> None:
        super().__init__(sites, others=False)
        self._recorder = recorder

    def run(self, entry: str, call: WeightCall, proxy_at: Callable[[str], Any]) -> Tracked:
        """See `SiteRun`."""
        y, out = call.floating(), call.quantized()
        self._recorder.note(entry, "float", y, out.array)
        return _with_array(out, y)

    def chosen(self, entry: str, quantized: object, floats: object) -> Any:
        """See `SiteRun`."""
        return floats


@final
class QuantizedSites(SiteRun):
    """Runs the model as it is, and records outputs and quantizers.

    Attributes:
        slots: entry -> name of each of its quantizers in `op_quant` -> the slot that it would have in a layer.
        has_others: whether there are quantizers elsewhere.
    """

    def __init__(self, sites: Sites, recorder: Recorder) -> None:
        super().__init__(sites, others=True)
        self._recorder = recorder
        self.slots: dict[str, dict[str, str]] = defaultdict(dict)
        self.has_others = False

    def run(self, entry: str, call: WeightCall, proxy_at: Callable[[str], Any]) -> Tracked:
        """See `SiteRun`."""
        out = call.quantized()
        for heard in call.heard:
            self._hear(entry, heard.part, heard.site, proxy_at(heard.site), heard.x, heard.made)
        self._recorder.note(entry, "quantized", out.array)
        return out

    def chosen(self, entry: str, quantized: object, floats: object) -> Any:
        """See `SiteRun`."""
        return quantized

    def weight(self, entry: str, site: str, proxy: object, x: object, quantized: object) -> None:
        """See `SiteRun`."""
        if entry not in self.sites.layers:
            self._hear(entry, "weight", site, proxy, x, quantized)

    def gradient(self, entry: str, site: str) -> None:
        """See `SiteRun`."""
        self.slots[entry][site] = "grad_quant"

    def _hear(self, entry: str, part: str, site: str, proxy: Any, x: Any, quantized: Any) -> None:
        self.slots[entry][site] = SLOTS[part]
        if is_quantized(quantized):
            self._recorder.note(entry, part, *clipped_fields(proxy, x, quantized))


@final
class MixedSites(SiteRun):
    """Contracts quantized or in floats, selected by a traced bool for each entry."""

    def __init__(self, sites: Sites, on: Mapping[str, jax.Array], others: bool) -> None:
        super().__init__(sites, others)
        self._on = on

    def run(self, entry: str, call: WeightCall, proxy_at: Callable[[str], Any]) -> Tracked:
        """See `SiteRun`."""
        out = call.quantized()
        return _with_array(out, self.chosen(entry, out.array, call.floating()))

    def chosen(self, entry: str, quantized: Any, floats: Any) -> Any:
        """See `SiteRun`."""
        return jnp.where(self._on[entry], quantized, floats.astype(quantized.dtype))


def _with_array(out: Tracked, value: Any) -> Tracked:
    """An output with other numbers; contracted as floats next, for its scale is not theirs."""
    return out.with_value(value.astype(out.array.dtype))


@final
class Observing(Around):
    """Goes around `QuantizedProgram.quantizers`, so that a call of the program is observed."""

    def __init__(self, run: SiteRun) -> None:
        self._run = run

    def __call__(self, layer: object, call: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        """See `Around`."""
        return ObservedQuantizers(call(*args, **kwargs), self._run)


@final
class ObservedQuantizers(HeldQuantizers):
    """The quantizers of a program, of which a report measures or switches some.

    Args:
        quantizers: the quantizers.
        sites: what is done at a contraction.
    """

    def __init__(self, quantizers: HeldQuantizers, sites: SiteRun) -> None:
        vars(self).update(vars(quantizers))
        self._sites = sites
        self._entry = ""  # of the contraction that is running

    @property
    def mode(self) -> bool:
        """Whether a measured contraction is running: its quantizers are on where others are off."""
        return bool(self._entry)

    def run(self, call: WeightCall) -> Tracked:
        """See `Quantizers`."""
        entry = self._sites.sites.entry_of(call)
        if entry is None:
            return call.quantized()
        before, self._entry = self._entry, entry
        try:
            return self._sites.run(entry, call, self.proxy_at)
        finally:
            self._entry = before

    def chosen(self, name: str) -> Callable[[Any, Any], Any] | None:
        """See `Quantizers`."""
        entry = self._sites.sites.entries.get(name)
        return None if entry is None else partial(self._sites.chosen, entry)

    def quantize(self, site: Site, x: jax.Array, token: jax.Array | None = None) -> Any:
        """See `Quantizers`."""
        weight = self._sites.sites.entries.get(site.name) if site.is_weight else None
        if weight is None and not self._entry:
            if not self._sites.others:
                return self.transformed(site, x)
            if isinstance(self._sites, QuantizedSites):
                self._sites.has_others = True
        quantized = super().quantize(site, x, token)
        if weight is not None:
            self._sites.weight(weight, site.name, self.proxy_at(site.name), x, quantized)
        elif self._entry and site.name.endswith("_grad"):
            self._sites.gradient(self._entry, site.name)
        return quantized

    def has_state(self) -> bool:
        """Yes: of what is measured."""
        return True
