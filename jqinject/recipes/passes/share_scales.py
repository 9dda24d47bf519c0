"""`ShareGlobalScales`: one float32 scale for the NVFP4 weights that contract one input."""

import re
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from jqinject.core import _protocols
from jqinject.model.inspect.site_table import shared_inputs
from jqinject.model.quantizing.rules import Rule
from jqinject.model.walk import ModelIndex
from jqinject.quant.minifloat.blocks import Fp8e4m3ConstScales
from jqinject.recipes.online import rule_of
from jqinject.recipes.quantized_parameter import QuantizedParameter, quantized_parameters
from jqinject.recipes.stream.flat_program import Note
from jqinject.recipes.work import Work

#: The largest number of e4m3.
LARGEST = np.float32(448)


def storable(largest: float) -> float:
    """Return a largest scale near a given one, whose quotient by 448 is the reciprocal of a float32: files store that.

    Args:
        largest: of a group, float32, above 0.

    Example:
        >>> factor = np.float32(storable(0.3)) / np.float32(448)
        >>> float(factor) == float(1 / np.float32(1 / factor)), abs(storable(0.3) - 0.3) < 1e-7
        (True, True)
    """
    divisor = LARGEST / np.float32(largest)
    for _ in range(64):
        product = LARGEST * (1 / divisor)
        if product / LARGEST == 1 / divisor:
            return float(product)
        divisor = np.nextafter(divisor, np.float32(0))
    return largest


@dataclass(frozen=True)
class ShareGlobalScales:
    """Gives the NVFP4 weights that contract one input one global scale.

    A weight in NVFP4 is `e2m1 * scale * global`: an e4m3 scale for each group, and one float32 number. Engines fuse
    projections of one input (queries, keys and values; gate and up) into one matrix, which has one global scale:
    `global = max(a) / 448`, with the largest scale `a` of each of these weights, up to rounding to a number that files
    store exactly. The weights are found in the program of the float model, without names of layers. All layers of a
    stack share too.

    It comes before `Solve`, and after passes that change the float model: a scale that is solved for keeps its e4m3
    number, which another global scale would round again.

    Raises:
        ValueError: when an earlier pass has asked for the quantized model.

    Source: llm-compressor, which takes the least of the stored divisors, `1 / global`. Engines that are given several
    take one of them for all, and warn.

    Example:
        >>> from jqinject.recipes import RTN, Recipe, Solve
        >>> Recipe(ShareGlobalScales(), Solve(RTN())).passes[0]
        ShareGlobalScales()
    """

    def __call__(self, work: Work) -> list[Note]:
        """See `Pass`."""
        work.refuse_quantized("ShareGlobalScales changes rules", "ShareGlobalScales(), Solve(...)")
        parameters = quantized_parameters(work.quantized_by(work.rules))
        index, notes, rules = ModelIndex(work.model), list[Note](), list[Rule]()
        for group in shared_inputs(work.model, list({call.name: call for call in work.calls}.values())):
            taken = {path: rule_of(path, group[path], index, work.rules) for path in group}
            own = [path for path in group if path in parameters and _is_nvfp4(parameters[path])]
            fixed = [path for path in own if "scale_quant" not in taken[path][0].quantizer("weight_quant")]
            notes += [
                Note(path, "", reason="its quantizer has no scale_quant that can be shared") for path in fixed
            ]
            shared = [path for path in own if path not in fixed]
            if len(shared) < 2:
                continue
            largest = storable(max(_largest_scale(parameters[path]) for path in shared))
            rules += [_with_scale(*taken[path][:2], largest) for path in shared]
            notes.append(Note(", ".join(shared), "", f"one global scale, {largest / LARGEST:.6g}"))
        work.rules = (*rules, *work.rules)
        work.allow_idle = work.allow_idle or bool(rules)  # these rules took something before
        return notes


def _is_nvfp4(parameter: QuantizedParameter) -> bool:
    grid, scales = _protocols.grid_of(parameter.proxy.tensor_quant), parameter.proxy.scale_dtype
    return grid is not None and grid.dtype == jnp.float4_e2m1fn and scales == jnp.float8_e4m3fn


def _largest_scale(parameter: QuantizedParameter) -> float:
    return float(jnp.max(parameter.quantized(parameter.value).scale))


def _with_scale(rule: Rule, path: str, largest: float) -> Rule:
    """A rule for one path, with a constant scale of the scales of groups."""
    slots: dict[str, Any] = {**dict(rule.quantizers), **dict(rule.overrides)}
    slots["weight_scale_quant"] = Fp8e4m3ConstScales.let(scaling_init=largest)
    return Rule(re.escape(path), op=rule.op, contraction=rule.contraction, **slots)
