"""SVDQuant: a low-rank product in float beside each weight, whose rest is quantized."""

import math
from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp

from jqinject.model.lora.adapter_plan import PlannedAdapter, dense_update, nearest_factors
from jqinject.model.lora.adapting import with_low_rank
from jqinject.program import Adapter
from jqinject.recipes.quantized_parameter import QuantizedParameter, adapters_of
from jqinject.recipes.solvers.solver import Checked, at_least
from jqinject.recipes.stream.flat_program import Note
from jqinject.recipes.work import Work


@dataclass(frozen=True)
class LowRank(Checked):
    """Takes a low-rank product in float out of each weight, `w = A B + rest`, and leaves the rest to the quantizer.

    `A B` is nearest to the weight in the sum of squares, matrix by matrix: experts and layers of a stack have their
    own. With more iterations, what the rounded rest got wrong goes into the product again, `A B` nearest to
    `w - Q(w - A B)`, and the best of them by `|w - A B - Q(w - A B)|^2` is kept. The product contracts the float input,
    beside the quantizers; it is an adapter like those of `jqinject.lora`, at `op_quant/adapters/<path>`: saved, frozen
    and served beside the weight, trainable (`nnx.LoRAParam`), and merged by `merge_lora`. All layers then run as parts
    of the model's program. It quantizes the model: passes that rescale channels come before it, `Solve` after it.

    Args:
        rank: of the products; that of the weight if it has less, and the rest is then 0 but for rounding.
        iterations: how often the product is found.

    Raises:
        ValueError: a rank or a number of iterations below 1; (when called) an earlier pass has quantized the model, or
            a weight whose contraction a product cannot follow.

    Source: Li et al., "SVDQuant: Absorbing Outliers by Low-Rank Components for 4-Bit Diffusion Models", 2024.

    Example:
        >>> LowRank(rank=16)
        LowRank(rank=16, iterations=1)
    """

    rank: Annotated[int, at_least(1)] = 32
    iterations: Annotated[int, at_least(1)] = 1

    def __call__(self, work: Work) -> list[Note]:
        """See `Pass`."""
        work.refuse_quantized("LowRank splits float weights", "SmoothQuant(), LowRank(), Solve(GPTQ())")
        if work.online:
            raise ValueError(
                f"LowRank: the weights {', '.join(work.online)} are stored for transforms that are kept online, which "
                "the update beside them would not see.\n  cure: leave out the pass that kept them, such as Rotate('R4')"
            )
        model, plans = with_low_rank(
            work.model, work.rules, rank=self.rank, methods=work.methods, allow_idle=work.allow_idle
        )
        work.quantize_with(model)
        adapters = adapters_of(model)
        return [
            self._split(parameter, adapters[name], plans[name])
            for name, parameter in work.parameters().items()
            if name in plans
        ]

    def _split(self, parameter: QuantizedParameter, adapter: Adapter, plan: PlannedAdapter) -> Note:
        """Find the product of one weight, and keep the best of several."""
        dtype, least = parameter.value.dtype, math.inf
        weight = target = parameter.value.astype(jnp.float32)
        factors = best = (adapter.a.get_value(), adapter.b.get_value())
        for _ in range(self.iterations):
            a, b = nearest_factors(target, plan, adapter.scale)
            factors = (a.astype(dtype), b.astype(dtype))
            _put(parameter, adapter, weight, factors)
            rounded = parameter.nearest(parameter.value)
            error, target = parameter.value.astype(jnp.float32) - rounded, weight - rounded
            if _size(error) < least:
                best, least = factors, _size(error)
        if factors is not best:
            _put(parameter, adapter, weight, best)
        tiny = jnp.finfo(jnp.float32).tiny
        rest = jnp.abs(parameter.value).max() / jnp.maximum(jnp.abs(weight).max(), tiny)
        before = _size(weight - parameter.nearest(weight.astype(dtype)))
        facts = {"rest": float(rest), "error": least / (before or 1.0)}
        what = (
            f"rank {plan.rank} beside it, the rest's largest number is {rest:.3g} of the weight's, "
            f"squared error {facts['error']:.3g} of that without"
        )
        return Note(parameter.name, "", what, facts)


def _put(
    parameter: QuantizedParameter, adapter: Adapter, weight: jax.Array, factors: tuple[jax.Array, jax.Array]
) -> None:
    """Let the model have a product and its rest."""
    for variable, factor in zip((adapter.a, adapter.b), factors, strict=True):
        variable.set_value(jax.device_put(factor, variable.get_value().sharding))
    rest = weight - dense_update(adapter, parameter.value.shape)
    parameter.holder.weight.set_value(rest.astype(parameter.value.dtype))
    parameter.proxy.init_tensor_quant(parameter.holder)


def _size(x: jax.Array) -> float:
    return float(jnp.square(x).sum())
