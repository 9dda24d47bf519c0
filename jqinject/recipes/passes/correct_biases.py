"""Bias correction: biases take back what quantization does to the mean of what they are added to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.model.calibration import with_progress
from jqinject.model.walk import ModelIndex
from jqinject.ops.processes import on_host
from jqinject.program import dotted
from jqinject.recipes.stream.site import LeftOut, Path
from jqinject.recipes.stream.stream import Batch, Visit
from jqinject.recipes.transforms.biases import Bias, Biases
from jqinject.recipes.work import Work, site_path

Inputs = Literal["float", "quantized"]


@dataclass(frozen=True)
class Corrected:
    """What was done to the bias of one site.

    Attributes:
        name: the site's.
        path: the bias's.
        shift: root mean square of what quantization did to the mean output, relative to that of the output.
        added: whether the bias is new.
    """

    name: str
    path: str
    shift: float
    added: bool = False

    def __str__(self) -> str:
        new = ", which is new" if self.added else ""
        return f"{self.name}: mean output had moved by {self.shift:.3g} of the output, taken back by {self.path}{new}"


@dataclass(frozen=True)
class CorrectBiases:
    """Corrects each bias for the shift that quantization causes in the mean of what it is added to.

        bias = bias of the float model + mean over batches of (mean of the float output - mean of the quantized output)

    channel by channel, of every site whose weight or input is quantized. The quantized output is that of the quantized
    weight and, where a rule quantizes it, the quantized input. Which parameter is the bias is seen in the program: the
    one that is added to the site's output, in a layer or in the model's own code, with stacks that run in a loop. A
    bias that is added at several sites takes the mean of their shifts. The float model stays as it is; a second
    correction gives what the first gave.

    Args:
        inputs: what the quantized output is made of: the float model's inputs of the site ("float"), so that sites do
            not see each other's errors, or those that reach the site in the quantized model whose earlier biases are
            corrected ("quantized"); a bias of several sites is then corrected at the first.
        add: give layers of Flax without a bias one, as Brevitas does. Other sites without a bias, and with False all,
            stay as they are, and the report names them.

    Raises:
        ValueError: (when applied) the outputs of a site are not finite; the text names it.

    Source: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", 2019; Brevitas's
    `bias_correction_mode`.

    Example:
        >>> from flax import nnx
        >>> from jqinject import Rule
        >>> from jqinject.quant import Int8WeightPerChannelFloat
        >>> from jqinject.recipes import Recipe
        >>> x = jax.random.normal(jax.random.key(0), (64, 8)) + 1
        >>> rule = Rule(weight_quant=Int8WeightPerChannelFloat.let(bit_width=3))
        >>> model = nnx.Linear(8, 2, rngs=nnx.Rngs(0))
        >>> corrected = Recipe(CorrectBiases()).apply(model, rule, [x], progress=False).model
        >>> bool(jnp.allclose(corrected(x).mean(axis=0), model(x).mean(axis=0), atol=1e-5))
        True
    """

    inputs: Inputs = "float"
    add: bool = True

    def __post_init__(self) -> None:
        if self.inputs not in ("float", "quantized"):
            raise ValueError(
                f"CorrectBiases: inputs is {self.inputs!r}, must be 'float' or 'quantized'.\n  cure: inputs='float'"
            )

    def __call__(self, work: Work) -> list[Any]:
        """See `Pass`."""
        added = add_biases(work) if self.add else frozenset()
        stream = work.stream(quantize_inputs=self.inputs == "quantized")
        shifts = _Shifts(work, self.inputs)
        found: list[Corrected | LeftOut] = []
        for visit in with_progress(stream, "biases", shown=work.progress):
            done = shifts.take(visit)
            if isinstance(done, Corrected):
                done = replace(done, added=done.path in added)
            found += [] if done is None else [done]
        shifts.put()
        return [*found, *(one for one in stream.left_out if dotted(one.path) in shifts.parameters)]


class _Shifts:
    """The shifts of the mean outputs of sites, by the biases that take them back.

    Args:
        work: of the recipe.
        inputs: see `CorrectBiases`.
    """

    def __init__(self, work: Work, inputs: Inputs) -> None:
        self.work, self.inputs = work, inputs
        self.parameters = work.parameters()
        self._quantizers = work.input_quantizers
        self._found: dict[int, Biases] = {}
        self._sums: dict[Path, np.ndarray] = {}
        self._counts: dict[Path, np.ndarray] = {}

    def take(self, visit: Visit) -> Corrected | LeftOut | None:
        """Measure the shift of one site, and let the stream go on with the corrected output; None for a float site."""
        site, parameter = visit.site, self.parameters.get(site_path(visit.site))
        if parameter is None and not self._quantizers.is_on(site):
            return None
        weight = visit.original if parameter is None else parameter.nearest(parameter.value)
        if self.inputs == "quantized":
            visit.put(weight)
        bias = self._bias(visit, visit.stream.batches[0])
        if bias is None:
            return LeftOut(
                site.name, site.path, "no parameter is added to its output, which keeps its shifted mean"
            )
        shift, size = self._measured(visit, weight, bias)
        if not np.isfinite(shift).all():
            raise ValueError(
                f"{site.name} ({site_path(site)}): its outputs hold nan or inf.\n"
                "  cure: find the batch with jnp.isfinite; a nan may also come from an earlier operation of the model"
            )
        own = np.unique(bias.places)
        self._count(bias.path, shift, own)
        if self.inputs == "quantized":
            visit.correction = self._correction(visit, bias.path)
        return Corrected(site.name, dotted(bias.path), float(np.sqrt(np.mean(np.square(shift[own])) / size)))

    def put(self) -> None:
        """Put the corrected biases into the quantized model."""
        quantized, floats = (ModelIndex(model).by_name for model in (self.work.quantized, self.work.model))
        for path, total in self._sums.items():
            original = floats[dotted(path)].get_value()
            shift = (total / np.maximum(self._counts[path], 1)).reshape(original.shape)
            corrected = original.astype(jnp.float32) + jnp.asarray(shift)
            held = quantized[dotted(path)]
            held.set_value(jax.device_put(corrected.astype(original.dtype), held.get_value().sharding))

    def _bias(self, visit: Visit, batch: Batch) -> Bias | None:
        traced = batch.traced
        if id(traced) not in self._found:
            inputs = zip(traced.flat.inputs, traced.program.inputs, strict=True)
            given = {slot: (x.weight_path, tuple(x.value.shape)) for slot, x in inputs if x.is_weight}
            self._found[id(traced)] = Biases(traced.flat, given)
        (made,) = traced.flat.steps[visit.site_in(batch).step].outputs
        return self._found[id(traced)].of(made)

    def _measured(self, visit: Visit, weight: Any, bias: Bias) -> tuple[np.ndarray, float]:
        """The shift for each number of a bias, and the mean square of the site's output."""
        total, squares, batches = np.zeros(bias.size, np.float32), 0.0, len(visit.stream.batches)
        quantize = self._quantizers.quantize if self.inputs == "float" else None
        for batch, wanted, made in visit.outputs(quantize, weight):
            own = self._bias(visit, batch)
            assert own is not None, "batches of other shapes go through the same operations"
            wanted, made = wanted.astype(jnp.float32), made.astype(jnp.float32)
            total += on_host(own.means(wanted - made)) / batches
            squares += float(jnp.mean(jnp.square(wanted))) / batches
        return total, max(squares, float(np.finfo(np.float32).tiny))

    def _count(self, path: Path, shift: np.ndarray, own: np.ndarray) -> None:
        total = self._sums.setdefault(path, np.zeros_like(shift))
        counts = self._counts.setdefault(path, np.zeros_like(shift))
        if self.inputs == "quantized":
            own = own[counts[own] == 0]  # the model goes on with what the first site was given
        total[own] += shift[own]
        counts[own] += 1

    def _correction(self, visit: Visit, path: Path) -> Callable[[Batch, jax.Array], jax.Array]:
        total = jnp.asarray(self._sums[path])

        def correction(batch: Batch, made: jax.Array) -> jax.Array:
            bias = self._bias(visit, batch)
            assert bias is not None, "it was found before"
            return bias.spread(total, made)

        return correction


BIASED = (nnx.Linear, nnx.Conv, nnx.ConvTranspose, nnx.LinearGeneral)
"""Layers that add a bias to their outputs' last axes if they have one."""


def add_biases(work: Work) -> frozenset[str]:
    """Give the layers whose weight is quantized a bias of 0, in the float model and in the quantized one.

    Args:
        work: of a recipe.

    Returns:
        The paths of the new biases.
    """
    quantized = set(work.parameters())
    found: dict[tuple[str, ...], Any] = {}
    for path, layer in ModelIndex(work.model).places:
        if isinstance(layer, BIASED) and dotted((*path, "kernel")) in quantized:
            shape = _bias_shape(layer)
            if layer.bias is None and shape is not None:
                found[tuple(map(str, path))] = shape
    for model in (work.model, work.quantized):
        for path, layer in ModelIndex(model).places:
            shape = found.get(tuple(map(str, path)))
            if shape is not None and layer.bias is None:
                layer.bias = nnx.Param(jnp.zeros(shape, layer.param_dtype))
                layer.use_bias = True
    return frozenset(dotted((*path, "bias")) for path in found)


def _bias_shape(layer: Any) -> tuple[int, ...] | None:
    """The shape of a layer's bias, with the axes that it is stacked along; None if it is not known."""
    out = layer.out_features if isinstance(layer.out_features, tuple) else (layer.out_features,)
    if isinstance(layer, nnx.LinearGeneral):
        if layer.batch_axis:
            return None
        inner = len(layer.axis) + len(out)
    else:
        inner = 2 if isinstance(layer, nnx.Linear) else 2 + len(layer.kernel_size)
    shape = layer.kernel.get_value().shape
    return (*shape[: len(shape) - inner], *out)
