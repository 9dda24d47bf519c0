"""Which contractions a compiled program has, and for which layer: read from the program's text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

# Not with a colon, after which XLA's text has another field.
MARK = "jqinject_layer({})"
MARKED = re.compile(r"jqinject_layer\(([^)]*)\)")
DEFINITION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\w+)\[", re.MULTILINE)
CONTRACTION = re.compile(
    r"^\s*(?:ROOT )?%?[\w.\-]+ = \(?(?P<out>\w+)\[[^=]*?"
    r"(?P<op>\bdot|\bconvolution|\bcustom-call)\((?P<operands>[^)]*)\)(?P<rest>.*)$",
    re.MULTILINE,
)
OPERAND = re.compile(r"%?([\w.\-]+)\s*$")
INTEGERS = re.compile(r"[su]\d+")


@dataclass(frozen=True)
class Contraction:
    """One contraction of a compiled program.

    Attributes:
        layer: path of the layer it belongs to.
        operands: dtypes of its operands, in XLA's words.
        output: dtype of its output.
    """

    layer: str
    operands: tuple[str, ...]
    output: str

    @property
    def kind(self) -> str:
        """ "int", "fp8" or "float"."""
        if self.operands and all(INTEGERS.fullmatch(dtype) for dtype in self.operands):
            return "int"
        return "fp8" if self.operands and all(dtype.startswith("f8") for dtype in self.operands) else "float"

    def __str__(self) -> str:
        return f"{' x '.join(self.operands)} -> {self.output}"


def contractions(
    model: nnx.Module, inputs: tuple[Any, ...], layers: Mapping[str, nnx.Module]
) -> list[Contraction]:
    """The contractions of `model(*inputs)`, compiled for this machine, that belong to some layers.

    Args:
        model: an NNX module; a copy of it is traced.
        inputs: arrays, or anything else with a shape and a dtype.
        layers: path -> layer of the model.
    """
    graphdef, state = nnx.split(model, graph=True)

    def run(state: Any, *inputs: Any) -> Any:
        copy = nnx.merge(graphdef, state)
        for path, node in nnx.iter_modules(copy):
            name = ".".join(map(str, path))
            if name in layers:
                _call_under_name(node, MARK.format(name))
        return copy(*inputs)

    text = jax.jit(run).lower(state, *inputs).compile().as_text()
    return list(_read(text or ""))


def _call_under_name(layer: Any, name: str) -> None:
    """Let an instance be called under a name that the program's text keeps."""
    kind = type(layer)
    call: Callable[..., Any] = kind.__call__

    def named(self: Any, *args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(name):
            return call(self, *args, **kwargs)

    # The instance is of a copy that nobody else has: its class can be another, the class itself stays as it is.
    layer.__class__ = type(kind.__name__, (kind,), {"__call__": named})


def _read(text: str) -> Iterator[Contraction]:
    dtypes = dict(DEFINITION.findall(text))
    for found in CONTRACTION.finditer(text):
        layers = MARKED.findall(found["rest"])
        target = re.search(r'custom_call_target="([^"]*)"', found["rest"])
        if not layers or (found["op"] == "custom-call" and not _multiplies(target)):
            continue
        names = [OPERAND.search(operand) for operand in _split(found["operands"])]
        operands = tuple(dtypes.get(name[1], "?") for name in names[:2] if name)
        yield Contraction(layers[-1], operands, found["out"])


def _split(operands: str) -> list[str]:
    """The operands, whose types may have commas in brackets."""
    return re.sub(r"[\[{][^\]}]*[\]}]", "", operands).split(",")


def _multiplies(target: re.Match[str] | None) -> bool:
    """Whether a custom call is a library's product of matrices or convolution."""
    return target is not None and re.search(r"matmul|gemm|dot|conv", target[1], re.IGNORECASE) is not None
