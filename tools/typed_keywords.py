"""Writes `jqinject/nn/base/keywords.pyi`: the further keywords of every layer, with their types.

    python tools/typed_keywords.py

A test compares the file with what this makes of the ready-made quantizers.
"""

import ast
import enum
import inspect
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from flax import nnx

import jqinject.nn
from jqinject.catalogue import entries, examples
from jqinject.core.flax_internals import flax_layer, flax_parameters
from jqinject.inject import requested_names
from jqinject.model.quantizing.rules import RULE_SLOTS
from jqinject.nn.base.quant_layer import QuantLayer, declared_arguments, keywords_of
from jqinject.nn.base.slots import Slot
from jqinject.quant import enums
from jqinject.quant.override_names import NAMES

STUB = Path(str(jqinject.nn.__file__)).parent / "base" / "keywords.pyi"
KINDS = {"weight": "weight", "bias": "bias", "activation": "act", "gradient": "grad", "accumulator": "trunc"}
HEAD = """# Written by `python tools/typed_keywords.py`: the keywords of layers, of Flax and of quantizers.
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Optional, TypeAlias, TypedDict, Union

import jax
import numpy as np
from flax import nnx
from flax.typing import Axes, ConvGeneralDilatedT, DotGeneralT, Dtype, EinsumT, Initializer, PaddingLike
from flax.typing import PrecisionLike, PromoteDtypeFn
from jax.typing import DTypeLike

from jqinject.inject import ExtendedInjector
from jqinject.nn.base import ContractionKind, SchemeLike
from jqinject.proxy import QuantProxyFromInjector
from jqinject.quant import QuantizerLike, enums

Component: TypeAlias = Callable[..., Any] | nnx.Module | None
Array: TypeAlias = float | jax.Array | np.ndarray
DType: TypeAlias = DTypeLike | None
AxisName: TypeAlias = str | tuple[str, ...] | None
Injector: TypeAlias = type[ExtendedInjector]
Axis: TypeAlias = int
Size: TypeAlias = int
"""
OF_CELLS: Mapping[str, type[nnx.Module]] = {"QuantLSTM": nnx.LSTMCell, "QuantRNN": nnx.SimpleCell}
# What Flax's annotations call something -> what the stub calls it.
RENAMED = {
    r"\btp\.Type\b": "type",
    r"\btp\.|\brnglib\.": "",
    r"\bArray\b": "jax.Array",
    r"\bvariablelib\.Variable": "nnx.Variable[Any]",
}


class _Layer(NamedTuple):
    """What the stub says of a layer.

    Attributes:
        slots: its places for quantizers.
        own: its arguments.
        types: keyword of its Flax layer, or declared argument -> annotation.
    """

    slots: Sequence[Slot]
    own: frozenset[str]
    types: Mapping[str, str]


def stub() -> str:
    """The text of the stub."""
    groups: dict[str, str] = {}
    layers = [_keywords(name, layer, groups) for name, layer in _layers().items()]
    return "\n".join([HEAD, *_enums(), "", *groups.values(), *layers])


def _layers() -> dict[str, _Layer]:
    layers: dict[str, _Layer] = {}
    layer: Any
    for name, layer in sorted(vars(jqinject.nn).items()):
        if not (inspect.isclass(layer) and issubclass(layer, QuantLayer)) or layer.__name__ != name:
            continue
        arguments = inspect.signature(layer.__init__).parameters
        if any(p.kind is p.VAR_KEYWORD for p in arguments.values()):
            parent = OF_CELLS.get(name) or flax_layer(layer)
            types = _flax_types(parent or nnx.Module)
            types |= {declared.argument: declared.annotation for declared in declared_arguments(layer)}
            types = {keyword: annotation for keyword, annotation in types.items() if keyword not in arguments}
            own = frozenset(inspect.signature(layer).parameters)
            layers[name] = _Layer(layer.override_slots(), own, types)
    return {**layers, "Rule": _Layer(RULE_SLOTS, frozenset(), {})}


def _flax_types(parent: type[nnx.Module]) -> dict[str, str]:
    """Keyword of a Flax layer -> its annotation as Flax writes it."""
    types: dict[str, str] = {}
    for cls in parent.__mro__:
        if "__init__" in vars(cls) and cls is not object:
            (function,) = ast.parse(textwrap.dedent(inspect.getsource(cls.__init__))).body
            assert isinstance(function, ast.FunctionDef)
            for argument in function.args.kwonlyargs:
                if argument.annotation is not None and argument.arg in flax_parameters(parent):
                    types.setdefault(argument.arg, _renamed(ast.unparse(argument.annotation)))
    return types


def _renamed(annotation: str) -> str:
    for pattern, name in RENAMED.items():
        annotation = re.sub(pattern, name, annotation)
    return annotation


def _enums() -> Iterable[str]:
    for name, choices in sorted(vars(enums).items()):
        if inspect.isclass(choices) and issubclass(choices, enum.StrEnum) and len(choices):
            texts = [repr(text) for member in choices for text in (member.value, member.name)]
            yield f"{name}: TypeAlias = enums.{name} | Literal[{', '.join(texts)}]"


def _keywords(name: str, layer: _Layer, groups: dict[str, str]) -> str:
    bases: list[str] = []
    fields: dict[str, str] = {}
    for slot in {slot.prefix: slot for slot in layer.slots}.values():
        keywords = keywords_of(slot, layer.slots, names_of(slot))
        group = (
            "".join(word.capitalize() for word in slot.prefix.split("_")) + f"{_kind(slot).capitalize()}Names"
        )
        types = {slot.prefix + override: NAMES[override][0] for override in names_of(slot)}
        if layer.own.isdisjoint(types) and len(keywords) == len(types):
            groups.setdefault(group, _class(group, (), types))
            bases.append(group)
        else:
            fields |= {k: NAMES[override][0] for override, k in keywords.items() if k not in layer.own}
    return _class(f"{name}Keywords", bases, {**layer.types, **fields})


def _class(name: str, bases: Sequence[str], types: Mapping[str, str]) -> str:
    rows = [f"    {keyword}: {types[keyword]}" for keyword in sorted(types)] or ["    ..."]
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
    names: dict[str, frozenset[str]] = {}
    for quantizer in entries.ready_made().values():
        kind = examples.kind_of(quantizer)
        names[kind] = names.get(kind, frozenset()) | requested_names(quantizer)
    return names


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
    print(STUB)
