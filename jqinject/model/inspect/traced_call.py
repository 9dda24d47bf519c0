"""A call of a model: its program as it was written, the one that runs, and its contractions in the compiled one.

The contractions of the compiled program are read from its text. Next: `site_table`.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike

from jqinject import program
from jqinject.dot import is_low_bit_cache
from jqinject.model.inspect.model_weights import LAYERS, ModelWeights
from jqinject.model.inspect.weight_flow import Flow, WeightFlow, kind_of
from jqinject.nn import QuantEmbed
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.program import Call, Policy, jaxpr, scopes

BIG = 1024
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


class TracedCall:
    """One call of a model: as it was written, with what quantizers reach in it, and as it runs.

    Args:
        model: in evaluation mode, concrete or abstract; copies of it are traced.
        call: of it, with arrays, or anything else with a shape and a dtype.
        policy: of the quantizers between its operations.
        weights: of the model.

    Attributes:
        flow: of the program as the model was written.
        uses: where the interpreter reaches weights: (equation, path of the parameter) -> use.
        products: equation -> contraction of activations.
        caches: the caches that are written in low bits: name -> what the model writes there, and the array.
        kinds: weight -> how the program that runs contracts it: "int", "fp8", "fp4" or "float".
        reasons: path of a layer -> why the table of contractions chose floats for a payload.
    """

    def __init__(self, model: nnx.Module, call: Call, policy: Policy, weights: ModelWeights) -> None:
        traced = program.program_of_call(model, policy, call)
        sites = program.sites_of_program(traced, policy, program.names_of(model, call))
        weights.note_sites(sites.sites.values())
        flows = [weights.flow_of(path) for path in traced.paths]
        self.flow = WeightFlow(traced.body, flows, _constant)
        self.uses = {(use.equation, program.dotted(use.weight_path)): use for use in sites.uses}
        self.products = {product.equation: product for product in sites.products}
        arrays = {x.cache: x.value for x in traced.inputs if x.cache}
        self.caches = {
            name: (site, arrays[name])
            for name, site in sites.sites.items()
            if site.cache_ndim and name in weights.between
        }
        self.reasons: dict[str, str] = {}
        self._running, inputs = self._run(model, call)
        self.kinds: dict[str, frozenset[str]] = {}
        # A cache in low bits is one input of the program as it was written, and several arrays of the one that runs.
        split = [flow for flow, x in zip(flows, inputs, strict=True) for _ in jax.tree.leaves(x)]
        for contraction in WeightFlow(jaxpr.Body.of(self._running.jaxpr), split).contractions:
            for name in contraction.sources if contraction.kind != "none" else ():
                self.kinds[name] = self.kinds.get(name, frozenset()) | {contraction.kind}

    def _run(self, model: nnx.Module, call: Call) -> tuple[Any, list[object]]:
        """The program that runs, traced, and its inputs."""
        split = program.SplitCall(model, call)

        def run(state: object, arrays: list[jax.Array]) -> list[jax.Array]:
            copy, copied_call = split.merged(state, arrays)
            for path, node in nnx.iter_modules(copy):
                if isinstance(node, LAYERS):
                    name, methods = program.dotted(path), program.METHODS
                    if isinstance(node, QuantWeightLayer):
                        # Not what else a layer of one's own contracts in its call.
                        methods = methods if isinstance(node, QuantEmbed) else ("_contracted",)
                        program.intercept(node, partial(_noting_reason, self.reasons, name), "_choice")
                    program.intercept(node, partial(_under_name, name), *methods)
            return jax.tree.leaves(copied_call(copy))

        inputs = [*jax.tree.leaves(split.state, is_leaf=is_low_bit_cache), *split.arrays]
        return jax.jit(run).trace(split.state, split.arrays), inputs

    def compiled(self, entries: Mapping[str, str]) -> dict[str, dict[str, str]]:
        """Compile the program for this machine, and read the contractions of its layers and of parameters.

        Args:
            entries: path of a layer, or of a parameter that the model contracts by itself -> the name to list it under.

        Returns:
            That name -> dtypes of the operands and of the output, in XLA's notation -> see `kind_of`.
        """
        names = {program.name_in_scope(path): entry for path, entry in entries.items()}
        contractions: dict[str, dict[str, str]] = {entry: {} for entry in names.values()}
        text = self._running.lower().compile().as_text() or ""
        dtypes = dict(DEFINITION.findall(text))
        for line in CONTRACTION.finditer(text):
            operands = [dtypes.get(name, "?") for name in OPERAND.findall(line["operands"])[:2]]
            # A sum too long for the dtype of the output is computed in parts.
            parts = f" in {line['parts']} parts" if line["parts"] not in (None, "1") else ""
            entry = names.get(line["name"])
            if entry is not None:
                types = f"{' x '.join(operands)} -> {line['out']}{parts}"
                contractions[entry][types] = kind_of(operands)
        return contractions


def _constant(value: ArrayLike) -> Flow:
    """The flow of a constant of a program: a large one is listed as a weight that the model does not have."""
    if np.size(value) <= BIG or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
        return Flow()
    name = f"a constant of the program, {jnp.result_type(value)}{list(np.shape(value))}"
    return Flow(sources=frozenset({name}))


def _under_name(
    name: str, layer: object, call: Callable[..., object], *args: object, **kwargs: object
) -> object:
    """Call a layer under a named scope, which the program's text keeps."""
    with jax.named_scope(scopes.WEIGHT + program.name_in_scope(name)):
        return call(*args, **kwargs)


def _noting_reason(
    reasons: dict[str, str], name: str, layer: object, call: Callable[..., Any], *args: object
) -> Any:
    """Note why the table of contractions chose floats."""
    choice = call(*args)
    if choice is not None and choice.why:
        reasons[name] = choice.why
    return choice
