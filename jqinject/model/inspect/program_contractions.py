"""The contractions of each layer, read from the compiled program's text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
from flax import nnx

from jqinject.model.inspect.weight_flow import operations_by
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.program import Around, Call, SplitCall, intercept, name_in_scope
from jqinject.program.jaxpr import Body

# A number, not the path: a path may contain characters with a meaning in XLA's text.
MARK = "jqinject_layer({})"
# A layer's mark, or that of a parameter that a program contracts.
MARKED = re.compile(r"jqinject_(layer\(\d+|weight\([^)]*)\)")
PARTS = re.compile(r"jqinject_parts\((\d+)\)")
DEFINITION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\w+)\[", re.MULTILINE)
CONTRACTION = re.compile(
    r"^\s*(?:ROOT )?%?[\w.\-]+ = \(?(?P<out>\w+)\[[^=]*?"
    r"(?P<op>\bdot|\bconvolution|\bcustom-call)\((?P<operands>[^)]*)\)(?P<rest>.*)$",
    re.MULTILINE,
)
OPERAND = re.compile(r"%?([\w.\-]+)\s*$")
INTEGERS = re.compile(r"[su]\d+")


@dataclass(frozen=True)
class CountedContraction:
    """One contraction of a compiled program.

    Attributes:
        layer: path of the layer it belongs to; outside of these, of the parameter that it contracts.
        operands: dtypes of its operands, in XLA's notation.
        output: dtype of its output.
        parts: into how many partial sums it is split: a sum too long for the output dtype is computed in parts.
    """

    layer: str
    operands: tuple[str, ...]
    output: str
    parts: int = 1

    @property
    def kind(self) -> str:
        """ "int", "fp8", "fp4" or "float"."""
        if self.operands and all(INTEGERS.fullmatch(dtype) for dtype in self.operands):
            return "int"
        for kind in ("fp8", "fp4"):
            if self.operands and all(dtype.startswith(f"f{kind[-1]}") for dtype in self.operands):
                return kind
        return "float"

    def __str__(self) -> str:
        summed = f"{' x '.join(self.operands)} -> {self.output}"
        return summed if self.parts == 1 else f"{summed} in {self.parts} parts"


@dataclass(frozen=True)
class CompiledProgram:
    """What a model runs when called.

    Attributes:
        contractions: of the compiled program.
        operations: path of a layer or parameter -> multiply-accumulates of its contractions.
        reasons: path of a layer -> why the table of contractions chose floats for a payload.
    """

    contractions: tuple[CountedContraction, ...]
    operations: dict[str, int]
    reasons: dict[str, str]


def program_of(
    model: nnx.Module, call: Call, layers: Sequence[str], parameters: Mapping[str, str]
) -> CompiledProgram:
    """Trace a call, compile it for this machine, and read the contractions of some layers and parameters.

    Args:
        model: an NNX module; a copy of it is traced.
        call: of the model, with arrays, or anything else with a shape and a dtype.
        layers: paths of layers of the model.
        parameters: path of a parameter that the model contracts by itself -> the name to list it under.
    """
    split = SplitCall(model, call)
    numbers = {name: number for number, name in enumerate(layers)}
    reasons: dict[str, str] = {}

    def run(state: Any, arrays: Any) -> Any:
        copy, copied_call = split.merged(state, arrays)
        for path, node in nnx.iter_modules(copy):
            name = ".".join(map(str, path))
            if name in numbers:
                intercept(node, _UnderName(MARK.format(numbers[name])))
                if isinstance(node, QuantWeightLayer):
                    intercept(node, _Reason(reasons, name), "_choice")
        return copied_call(copy)

    traced = jax.jit(run).trace(split.state, split.arrays)
    names = {f"layer({number}": name for name, number in numbers.items()}
    names |= {f"weight({name_in_scope(path)}": name for path, name in parameters.items()}
    operations = dict.fromkeys(names.values(), 0)
    for mark, count in operations_by(Body.of(traced.jaxpr), MARKED).items():
        if mark in names:
            operations[names[mark]] += count
    text = traced.lower().compile().as_text()
    return CompiledProgram(tuple(_read(text or "", names)), operations, reasons)


@final
class _UnderName(Around):
    """Calls a layer under a named scope, which the program's text keeps."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, layer: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(self.name):
            return call(*args, **kwargs)


@final
class _Reason(Around):
    """Notes why the table of contractions chose floats."""

    def __init__(self, reasons: dict[str, str], name: str) -> None:
        self.reasons, self.name = reasons, name

    def __call__(self, layer: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        choice = call(*args, **kwargs)
        if choice is not None and choice.why:
            self.reasons[self.name] = choice.why
        return choice


def _read(text: str, layers: Mapping[str, str]) -> Iterator[CountedContraction]:
    dtypes = dict(DEFINITION.findall(text))
    for found in CONTRACTION.finditer(text):
        marks = MARKED.findall(found["rest"])
        target = re.search(r'custom_call_target="([^"]*)"', found["rest"])
        if not marks or marks[-1] not in layers or (found["op"] == "custom-call" and not _multiplies(target)):
            continue
        names = [OPERAND.search(operand) for operand in _split(found["operands"])]
        operands = tuple(dtypes.get(name[1], "?") for name in names[:2] if name)
        parts = PARTS.search(found["rest"])
        yield CountedContraction(layers[marks[-1]], operands, found["out"], int(parts[1]) if parts else 1)


def _split(operands: str) -> list[str]:
    """The operands, whose types may have commas in brackets."""
    return re.sub(r"[\[{][^\]}]*[\]}]", "", operands).split(",")


def _multiplies(target: re.Match[str] | None) -> bool:
    """Whether a custom call is a library's matrix product or convolution."""
    return target is not None and re.search(r"matmul|gemm|dot|conv", target[1], re.IGNORECASE) is not None
