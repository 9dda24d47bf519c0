"""Bias correction: biases take back what quantization does to the mean of what they are added to."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.model.walk import ModelIndex
from jqinject.ops.processes import on_host
from jqinject.program import dotted
from jqinject.recipes.solvers.solver import Checked
from jqinject.recipes.stream.flat_program import Note
from jqinject.recipes.stream.stream import Visit
from jqinject.recipes.transforms.gains_and_biases import bias_of
from jqinject.recipes.work import Work

Inputs = Literal["float", "quantized"]


@dataclass(frozen=True)
class CorrectBiases(Checked):
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

    def __call__(self, work: Work) -> list[Note]:
        """See `Pass`."""
        added = add_biases(work) if self.add else set[str]()
        shifts = _Shifts(work, self.inputs, added)
        stream = work.stream(shifts.quantizers.quantize if self.inputs == "quantized" else None)
        done = [record for visit in work.bar(stream, "biases") for record in shifts.take(visit)]
        shifts.put()
        return [*done, *(site for site in stream.flat.left_out if site.path in shifts.parameters)]


class _Shifts:
    """The shifts of the mean outputs of sites, by the biases that take them back.

    Args:
        work: of the recipe.
        inputs: see `CorrectBiases`.
        added: paths of the biases that are new.
    """

    def __init__(self, work: Work, inputs: Inputs, added: set[str]) -> None:
        self.work, self.inputs, self.added = work, inputs, added
        self.parameters = work.parameters()
        self.quantizers = work.input_quantizers
        self._sums: dict[str, np.ndarray] = {}  # of shifts, and how many, for each number of a bias

    def take(self, visit: Visit) -> list[Note]:
        """Measure the shift of a site, and let the stream go on with the corrected output; nothing of a float site."""
        site, parameter = visit.site, self.parameters.get(visit.site.path)
        if parameter is None and not self.quantizers.is_on(site):
            return []
        weight = visit.original if parameter is None else parameter.nearest(parameter.value)
        if self.inputs == "quantized":
            visit.put(weight)
        outputs = ((batch, visit.site_in(batch).step.outputs[0]) for batch in visit.stream.batches)
        biases = {batch: bias for batch, slot in outputs if (bias := bias_of(batch.flat, slot)) is not None}
        bias = biases.get(visit.stream.batches[0])
        if bias is None:
            reason = "no parameter is added to its output, which keeps its shifted mean"
            return [Note(site.name, site.path, reason=reason)]
        shift, squares = np.zeros(bias.size, np.float32), 0.0
        quantize = self.quantizers.quantize if self.inputs == "float" else None
        for batch, own in biases.items():
            floats, quantized = (x.astype(jnp.float32) for x in visit.outputs(batch, weight, quantize))
            shift += on_host(own.means(floats - quantized)) / len(biases)
            squares += float(jnp.mean(jnp.square(floats))) / len(biases)
        if not np.isfinite(shift).all():
            raise ValueError(
                f"{site.name} ({site.path}): its outputs hold nan or inf.\n"
                "  cure: find the batch with jnp.isfinite; a nan may also come from an earlier operation of the model"
            )
        total, counts = self._sums.setdefault(bias.path, np.zeros((2, bias.size), np.float32))
        numbers = places = np.unique(bias.places)
        if self.inputs == "quantized":
            numbers = numbers[counts[numbers] == 0]  # the model goes on with what the first site got
        total[numbers] += shift[numbers]
        counts[numbers] += 1
        if self.inputs == "quantized":
            correction = jnp.array(total)
            # A batch whose program adds no bias here, as the model branches on its shape, goes on as it is.
            visit.correction = lambda batch, output: (
                biases[batch].spread(correction, output) if batch in biases else jnp.zeros_like(output)
            )
        size = max(squares, float(np.finfo(np.float32).tiny))
        relative = np.sqrt(np.mean(np.square(shift[places])) / size)
        new = ", which is new" if bias.path in self.added else ""
        what = f"mean output had moved by {relative:.3g} of the output, taken back by the bias{new}"
        return [Note(site.name, bias.path, what)]

    def put(self) -> None:
        """Put the corrected biases into the quantized model."""
        quantized, floats = (ModelIndex(model).by_name for model in (self.work.quantized, self.work.model))
        for path, (total, counts) in self._sums.items():
            original = floats[path].get_value()
            shift = (total / np.maximum(counts, 1)).reshape(original.shape)
            corrected = (original.astype(jnp.float32) + jnp.asarray(shift)).astype(original.dtype)
            variable = quantized[path]
            variable.set_value(jax.device_put(corrected, variable.get_value().sharding))


#: Layers that add a bias to their outputs' last axes if they have one.
BIASED = (nnx.Linear, nnx.Conv, nnx.ConvTranspose, nnx.LinearGeneral)


def add_biases(work: Work) -> set[str]:
    """Give the layers whose weight is quantized a bias of 0, in the float model and in the quantized one.

    Args:
        work: of a recipe.

    Returns:
        The paths of the new biases.
    """
    parameters, added = work.parameters(), set[str]()
    layers = ModelIndex(work.quantized).nodes
    for path, layer in ModelIndex(work.model).places:
        kernel = parameters.get(dotted((*path, "kernel")))
        if kernel is None or not isinstance(layer, BIASED) or layer.bias is not None:
            continue
        if not (isinstance(layer, nnx.LinearGeneral) and layer.batch_axis):
            out = layer.out_features if isinstance(layer.out_features, tuple) else (layer.out_features,)
            zeros = jnp.zeros((*kernel.value.shape[: kernel.depth], *out), layer.param_dtype)
            for holder in (layer, layers[path]):
                holder.bias, holder.use_bias = nnx.Param(zeros), True
            added.add(dotted((*path, "bias")))
    return added
