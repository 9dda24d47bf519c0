"""A call of a model as it runs: its jaxpr, and the contractions of the compiled program, read from its text."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
from flax import nnx

from jqinject.dot import is_low_bit_cache
from jqinject.model.inspect import model_weights, weight_flow
from jqinject.nn import QuantEmbed
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.program import Call, SplitCall, intercept, jaxpr, name_in_scope, scopes

DEFINITION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\w+)\[", re.MULTILINE)
# Of custom calls those that are a library's matrix product or convolution. The innermost mark is the last.
CONTRACTION = re.compile(
    r"^\s*(?:ROOT )?%?[\w.\-]+ = \(?(?P<out>\w+)\[[^=]*?"
    r'(?:\bdot|\bconvolution|\bcustom-call(?=.*custom_call_target="[^"]*(?i:matmul|gemm|dot|conv)))'
    r"\((?P<operands>[^)]*)\)(?=(?:.*?jqinject_parts\((?P<parts>\d+)\))?)"
    rf"(?:.*{scopes.WEIGHT}(?P<name>[\w.\-]*))?",
    re.MULTILINE,
)
# The type of an operand, before its name, may have commas in brackets.
OPERAND = re.compile(r"(?:^|[%\s])([\w.\-]+)\s*(?=,|$)")


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

    def compiled(self, entries: Mapping[str, str]) -> dict[str, dict[str, str]]:
        """Compile the program for this machine, and read the contractions of its layers and of parameters.

        Args:
            entries: path of a layer, or of a parameter that the model contracts by itself -> the name to list it under.

        Returns:
            That name -> dtypes of the operands and of the output, in XLA's notation -> see `kind_of`.
        """
        names = {name_in_scope(path): entry for path, entry in entries.items()}
        contractions: dict[str, dict[str, str]] = {entry: {} for entry in names.values()}
        text = self._traced.lower().compile().as_text() or ""
        dtypes = dict(DEFINITION.findall(text))
        for line in CONTRACTION.finditer(text):
            operands = [dtypes.get(name, "?") for name in OPERAND.findall(line["operands"])[:2]]
            # A sum too long for the dtype of the output is computed in parts.
            parts = f" in {line['parts']} parts" if line["parts"] not in (None, "1") else ""
            entry = names.get(line["name"] or "")
            if entry is not None:
                program = f"{' x '.join(operands)} -> {line['out']}{parts}"
                contractions[entry][program] = weight_flow.kind_of(operands)
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
