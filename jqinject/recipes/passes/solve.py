"""`Solve`: puts every weight that a rule quantizes on its quantizer's grid, site by site."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.model.calibration import with_progress
from jqinject.program import dotted
from jqinject.recipes.quantized_parameter import QuantizedParameter
from jqinject.recipes.solvers.solver import Solver
from jqinject.recipes.solving import Solving
from jqinject.recipes.stream.stream import Stream, Visit
from jqinject.recipes.work import InputQuantizers, Work, site_path


@dataclass(frozen=True)
class Solved:
    """What a solver did to one site.

    Attributes:
        name: the site's.
        path: the parameter's.
        nearest: mean squared error of the site's output with rounding to nearest, relative to the output.
        solved: the same with the solver's numbers.
        unseen: how many matrices of the site no sample reached: experts without tokens. They are rounded to nearest.
    """

    name: str
    path: str
    nearest: float
    solved: float
    unseen: int = 0

    def __str__(self) -> str:
        unseen = f"; {self.unseen} matrices that no sample reached: rounded to nearest" if self.unseen else ""
        return f"{self.name} ({self.path}): error {self.solved:.3g}, rounded to nearest {self.nearest:.3g}{unseen}"


@dataclass(frozen=True)
class NotSolved:
    """A quantized parameter, or a part of one, that was rounded to nearest.

    Attributes:
        path: the parameter's.
        reason: why no solver chose its numbers.
    """

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: rounded to nearest: {self.reason}"


@dataclass(frozen=True)
class Solvable:
    """A site whose weights `Solve` would choose.

    Attributes:
        name: the site's.
        path: the parameter's.
        matrices: `(stack, rows, columns)` of what it contracts.
        quantizer: the class name of the weight's quantizer.
        input_bits: of its input while it is solved; None for float.
    """

    name: str
    path: str
    matrices: tuple[int, ...]
    quantizer: str
    input_bits: int | None

    def __str__(self) -> str:
        stack, rows, columns = self.matrices
        size = f"{rows} x {columns}" if stack == 1 else f"{stack} x {rows} x {columns}"
        inputs = "float inputs" if self.input_bits is None else f"inputs of {self.input_bits} bits"
        return f"{self.name} ({self.path}): {size}, {self.quantizer}, {inputs}"


@dataclass(frozen=True)
class Solve:
    """Chooses the low-bit numbers of every weight that a rule quantizes.

    Sites are taken in the order in which they run. The inputs of a site come from the model whose earlier sites are
    solved and whose inputs are quantized as the rules say. Numbers and scales are committed: they survive loading,
    cloning, freezing and training. A parameter that several sites contract is solved at the first. What no site
    contracts is rounded to nearest, with a warning and in the report.

    Args:
        solver: the algorithm.
        quantize_inputs: whether the inputs of sites are quantized as the rules say while weights are solved.

    Example:
        >>> from jqinject.recipes import GPTQ
        >>> Solve(GPTQ(act_order=True)).quantize_inputs
        True
    """

    solver: Solver
    quantize_inputs: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.solver, type) or not hasattr(self.solver, "statistics"):
            name = self.solver.__name__ if isinstance(self.solver, type) else "GPTQ"
            raise TypeError(f"Solve takes a solver, got {self.solver!r:.80}.\n  cure: Solve({name}())")

    def __call__(self, work: Work) -> list[Solved | NotSolved]:
        """See `Pass`.

        Raises:
            ValueError: calibration data that is not finite, or that a solver cannot use; the text names the site.

        Warns:
            UserWarning: parameters that no site solves.
        """
        parameters, shared = unshared(work.parameters())
        stream, inputs = work.stream(self.quantize_inputs), work.input_quantizers
        last = {site_path(site): site.name for site in stream.sites}
        found: list[Solved | NotSolved] = []
        begun: dict[str, Solving] = {}
        whole: dict[str, bool] = {}
        for visit in with_progress(stream, "solving", shown=work.progress):
            name = site_path(visit.site)
            if name not in parameters:
                continue
            if name not in begun:
                begun[name] = Solving(parameters[name], visit.original, stream.updates.get(visit.site.path))
            if begun[name].takes(visit.site):
                found.append(self._solved(visit, name, begun[name], work, inputs))
            if last[name] == visit.site.name:
                # Nothing is held of a parameter whose last site is solved but what the model holds.
                whole[name] = bool(begun[name].taken.all())
                begun.pop(name).finish()
        left = [*shared, *not_solved(parameters, whole, stream)]
        if left:
            warnings.warn("Solve:\n" + "\n".join(f"  {one}" for one in left), stacklevel=3)
        return [*found, *left]

    def explain(self, work: Work) -> list[Solvable | NotSolved]:
        """See `Pass`."""
        parameters, shared = unshared(work.parameters())
        stream, inputs = work.stream(self.quantize_inputs), work.input_quantizers
        found: list[Solvable | NotSolved] = []
        taken: dict[str, np.ndarray] = {}
        for site in stream.sites:
            name = site_path(site)
            if name not in parameters:
                continue
            parameter = parameters[name]
            assert parameter.grid is not None, "or it has raised"
            flags = taken.setdefault(name, np.zeros(parameter.value.size, bool))
            if site.places.all_in(flags):
                found.append(NotSolved(name, f"{site.name} contracts it too, after it is solved"))
                continue
            site.places.mark(flags)
            operand = jax.ShapeDtypeStruct(site.places.shape, jnp.float32)
            shape = jax.eval_shape(site.matrices.weight.matrices, operand).shape
            bits = inputs.bits(site) if self.quantize_inputs else None
            quantizer = parameter.proxy.binding.base.__name__
            found.append(Solvable(site.name, name, shape, quantizer, bits))
        whole = {name: bool(flags.all()) for name, flags in taken.items()}
        return [*found, *shared, *not_solved(parameters, whole, stream)]

    def _solved(self, visit: Visit, name: str, state: Solving, work: Work, inputs: InputQuantizers) -> Solved:
        try:
            integers = inputs.integers(visit.site, visit.operand)
            made = state.solve(visit, self.solver, work.journal, integers)
        except ValueError as error:
            raise ValueError(f"{visit.site.name} ({name}): {error}") from error
        return Solved(
            visit.site.name, name, float(made["nearest"]), float(made["solved"]), int(made["unseen"])
        )


def unshared(
    parameters: Mapping[str, QuantizedParameter],
) -> tuple[dict[str, QuantizedParameter], list[NotSolved]]:
    """The parameters whose quantizer is their own, and the others.

    Args:
        parameters: those that are quantized, by path.
    """
    own = {name: each for name, each in parameters.items() if each.proxy.served_layers == 1}
    why = "its layer shares the quantizer with others, whose scales cannot be kept for it alone"
    return own, [NotSolved(name, why) for name in parameters if name not in own]


def not_solved(
    parameters: Mapping[str, QuantizedParameter], whole: Mapping[str, bool], stream: Stream
) -> Iterator[NotSolved]:
    """The parameters of which some numbers were not solved.

    Args:
        parameters: those that are quantized, by path.
        whole: of those that sites were found for, whether these contract all of them.
        stream: that went through the model.
    """
    reasons = {dotted(one.path): f"{one.name}: {one.reason}" for one in stream.left_out}
    for name in parameters:
        reason = reasons.get(name, "no call of the calibration data contracts it")
        if name not in whole:
            yield NotSolved(name, reason)
        elif not whole[name]:
            yield NotSolved(name, f"a part of it; {reason}")
