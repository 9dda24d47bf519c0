"""A call of a model as it runs: its jaxpr, and the contractions of the compiled program, read from its text."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from flax import nnx

from jqinject.dot import is_low_bit_cache
from jqinject.model.inspect import model_weights, weight_flow
from jqinject.nn import QuantEmbed
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.program import Call, SplitCall, intercept, jaxpr, name_in_scope, scopes

NAME = re.compile(scopes.WEIGHT + r"([\w.\-]*)")
PARTS = re.compile(r"jqinject_parts\((\d+)\)")
DEFINITION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\w+)\[", re.MULTILINE)
CONTRACTION = re.compile(
    r"^\s*(?:ROOT )?%?[\w.\-]+ = \(?(?P<out>\w+)\[[^=]*?"
    r"(?P<op>\bdot|\bconvolution|\bcustom-call)\((?P<operands>[^)]*)\)(?P<rest>.*)$",
    re.MULTILINE,
)
OPERAND = re.compile(r"%?([\w.\-]+)\s*$")
TARGET = re.compile(r'custom_call_target="([^"]*)"')
PRODUCT = re.compile(r"matmul|gemm|dot|conv", re.IGNORECASE)


@dataclass(frozen=True)
class CompiledContraction:
    """One contraction of a compiled program.

    Attributes:
        name: of the layer that it is in; outside of layers, of the parameter that it contracts; as `name_in_scope`
            writes it.
        operands: dtypes of its operands, in XLA's notation.
        output: dtype of its output.
        parts: into how many partial sums it is split: a sum too long for the output dtype is computed in parts.
    """

    name: str
    operands: tuple[str, ...]
    output: str
    parts: int = 1

    @property
    def kind(self) -> str:
        """See `kind_of`."""
        return weight_flow.kind_of(self.operands)

    def __str__(self) -> str:
        summed = f"{' x '.join(self.operands)} -> {self.output}"
        return summed if self.parts == 1 else f"{summed} in {self.parts} parts"


class RunningProgram:
    """A call of a model, traced as the model runs it.

    Args:
        model: an NNX module in evaluation mode, concrete or abstract; a copy of it is traced.
        call: of the model, with arrays, or anything else with a shape and a dtype.

    Attributes:
        reasons: path of a layer -> why the table of contractions chose floats for a payload.
    """

    def __init__(self, model: nnx.Module, call: Call) -> None:
        split = SplitCall(model, call)
        self.reasons: dict[str, str] = {}
        self._inputs = [*jax.tree.leaves(split.state, is_leaf=is_low_bit_cache), *split.arrays]

        def run(state: object, arrays: list[jax.Array]) -> list[jax.Array]:
            copy, copied_call = split.merged(state, arrays)
            for path, node in nnx.iter_modules(copy):
                if isinstance(node, model_weights.LAYERS):
                    name = ".".join(map(str, path))
                    for method in ("__call__", "attend") if isinstance(node, QuantEmbed) else ("__call__",):
                        intercept(node, partial(_under_name, path), method)
                    if isinstance(node, QuantWeightLayer):
                        intercept(node, partial(_noting_reason, self.reasons, name), "_choice")
            return jax.tree.leaves(copied_call(copy))

        self._traced = jax.jit(run).trace(split.state, split.arrays)

    def kinds(self, flows: Sequence[weight_flow.Flow]) -> dict[str, frozenset[str]]:
        """How the jaxpr contracts each weight: "int", "fp8" or "float".

        Args:
            flows: of the inputs. A cache in low bits is one of them, and several arrays of the jaxpr.
        """
        arrays = [flow for flow, x in zip(flows, self._inputs, strict=True) for _ in jax.tree.leaves(x)]
        kinds: dict[str, frozenset[str]] = {}
        for contraction in weight_flow.WeightFlow(jaxpr.Body.of(self._traced.jaxpr), arrays).contractions:
            for name in contraction.sources if contraction.kind != "none" else ():
                kinds[name] = kinds.get(name, frozenset()) | {contraction.kind}
        return kinds

    def compiled(self, entries: Mapping[str, str]) -> dict[str, list[CompiledContraction]]:
        """Compile the program for this machine, and read the contractions of its layers and of parameters.

        Args:
            entries: path of a layer, or of a parameter that the model contracts by itself -> the name to list it under.
        """
        names = {name_in_scope(path): entry for path, entry in entries.items()}
        contractions: dict[str, list[CompiledContraction]] = {entry: [] for entry in names.values()}
        for contraction in _read(self._traced.lower().compile().as_text() or ""):
            if contraction.name in names:
                contractions[names[contraction.name]].append(contraction)
        return contractions


def _under_name(
    path: tuple[object, ...], layer: object, call: Callable[..., object], *args: object, **kwargs: object
) -> object:
    """Call a layer under a named scope, which the program's text keeps."""
    with scopes.weight_scope(path):
        return call(*args, **kwargs)


def _noting_reason(
    reasons: dict[str, str], name: str, layer: object, call: Callable[..., Any], *args: object
) -> Any:
    """Note why the table of contractions chose floats."""
    choice = call(*args)
    if choice is not None and choice.why:
        reasons[name] = choice.why
    return choice


def _read(text: str) -> Iterator[CompiledContraction]:
    dtypes = dict(DEFINITION.findall(text))
    for line in CONTRACTION.finditer(text):
        target, parts = TARGET.search(line["rest"]), PARTS.search(line["rest"])
        # Of custom calls those that are a library's matrix product or convolution.
        if line["op"] != "custom-call" or (target and PRODUCT.search(target[1])):
            # The types of operands may have commas in brackets.
            operands = re.sub(r"[\[{][^\]}]*[\]}]", "", line["operands"]).split(",")[:2]
            names = [OPERAND.search(operand) for operand in operands]
            yield CompiledContraction(
                "".join(NAME.findall(line["rest"])[-1:]),
                tuple(dtypes.get(operand[1], "?") for operand in names if operand),
                line["out"],
                int(parts[1]) if parts else 1,
            )
