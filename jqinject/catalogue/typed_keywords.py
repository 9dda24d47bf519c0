"""Writes `jqinject/nn/base/override_keywords.pyi`: the further keywords of every layer, with their types.

    python -m jqinject.catalogue.typed_keywords

A test compares the file with what this makes of the ready-made quantizers.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jqinject.nn
from jqinject.catalogue.entries import ready_made
from jqinject.catalogue.examples import kind_of
from jqinject.inject import requested_names
from jqinject.model.quantizing.rules import RULE_SLOTS
from jqinject.nn.base import override_keywords
from jqinject.nn.base.quant_layer import QuantLayer, keywords_of
from jqinject.nn.base.slots import Slot
from jqinject.quant import enums
from jqinject.quant.override_names import NAMES

STUB = Path(str(override_keywords.__file__)).with_suffix(".pyi")
KINDS = {"weight": "weight", "bias": "bias", "activation": "act", "gradient": "grad", "accumulator": "trunc"}
HEAD = """# Written by `python -m jqinject.catalogue.typed_keywords`: what layers take beside their own arguments.
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, TypedDict

import jax
import numpy as np
from flax import nnx
from flax.typing import Dtype, Initializer, PromoteDtypeFn
from jax.typing import DTypeLike

from jqinject.inject import ExtendedInjector
from jqinject.proxy import QuantProxyFromInjector
from jqinject.quant import enums

Component: TypeAlias = Callable[..., Any] | nnx.Module | None
Array: TypeAlias = float | jax.Array | np.ndarray
DType: TypeAlias = DTypeLike | None
AxisName: TypeAlias = str | tuple[str, ...] | None
Injector: TypeAlias = type[ExtendedInjector]
"""
CELLS = """
class CellKeywords(TypedDict, total=False):
    dtype: Dtype | None
    param_dtype: Dtype
    carry_init: Initializer | None
    activation_fn: Callable[..., Any]
    kernel_init: Initializer
    recurrent_kernel_init: Initializer
    bias_init: Initializer
    promote_dtype: PromoteDtypeFn
    keep_rngs: bool
    kernel_metadata: Mapping[str, Any]
    recurrent_kernel_metadata: Mapping[str, Any]
    bias_metadata: Mapping[str, Any]

class LSTMCellKeywords(CellKeywords, total=False):
    gate_fn: Callable[..., Any]

class SimpleCellKeywords(CellKeywords, total=False):
    residual: bool
"""
OF_CELLS = {"QuantLSTM": "LSTMCellKeywords", "QuantRNN": "SimpleCellKeywords"}


def stub() -> str:
    """The text of the stub."""
    groups: dict[str, str] = {}
    layers = [_layer(name, *layer, groups) for name, layer in _layers().items()]
    return "\n".join([HEAD, *_enums(), CELLS, *groups.values(), *layers])


def _layers() -> dict[str, tuple[Sequence[Slot], frozenset[str]]]:
    """Layer -> its places for quantizers, and its own arguments."""
    found: dict[str, tuple[Sequence[Slot], frozenset[str]]] = {}
    for name, layer in sorted(vars(jqinject.nn).items()):
        if not (inspect.isclass(layer) and issubclass(layer, QuantLayer)) or layer.__name__ != name:
            continue
        parameters = inspect.signature(layer).parameters.values()
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            found[name] = layer.override_slots(), frozenset(p.name for p in parameters)
    return {**found, "Rule": (RULE_SLOTS, frozenset())}


def _enums() -> Iterable[str]:
    for name, found in sorted(vars(enums).items()):
        if inspect.isclass(found) and issubclass(found, enum.StrEnum) and len(found):
            texts = [repr(text) for member in found for text in (member.value, member.name)]
            yield f"{name}: TypeAlias = enums.{name} | Literal[{', '.join(texts)}]"


def _layer(name: str, slots: Sequence[Slot], own: frozenset[str], groups: dict[str, str]) -> str:
    bases, fields = ([OF_CELLS[name]] if name in OF_CELLS else []), {}
    for slot in {slot.prefix: slot for slot in slots}.values():
        keywords = keywords_of(slot, slots, names_of(slot))
        group = (
            "".join(word.capitalize() for word in slot.prefix.split("_")) + f"{_kind(slot).capitalize()}Names"
        )
        whole = {slot.prefix + known: known for known in names_of(slot)}
        if own.isdisjoint(whole) and len(keywords) == len(whole):
            groups.setdefault(group, _class(group, (), whole))
            bases.append(group)
        else:
            fields |= {keyword: known for known, keyword in keywords.items() if keyword not in own}
    return _class(f"{name}Overrides", bases, fields)


def _class(name: str, bases: Sequence[str], fields: Mapping[str, str]) -> str:
    types = {keyword: NAMES[fields[keyword]][0] for keyword in sorted(fields)}
    rows = [f"    {keyword}: {annotation}" for keyword, annotation in types.items()] or ["    ..."]
    inherited = ", ".join([*(bases or ["TypedDict"]), "total=False"])
    return "\n".join([f"class {name}({inherited}):", *rows, ""])


def _kind(slot: Slot) -> str:
    return KINDS[slot.proxy_class.role]


def names_of(slot: Slot) -> frozenset[str]:
    """The names of all ready-made quantizers for a place, those left out that are passed by layers."""
    return frozenset(names_by_kind()[_kind(slot)] & NAMES.keys())


@cache
def names_by_kind() -> Mapping[str, frozenset[str]]:
    """Kind of quantizer -> every name that the ready-made ones declare or ask for."""
    found: dict[str, frozenset[str]] = {}
    for quantizer in ready_made().values():
        kind: Any = kind_of(quantizer)
        found[kind] = found.get(kind, frozenset()) | requested_names(quantizer)
    return found


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
    print(STUB)
