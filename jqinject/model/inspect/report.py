"""`report`: what each layer contracts, the size of its weight, and its quantization error."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import optax
from flax import nnx

from jqinject.dot.tensors.choice import NOT_KEPT
from jqinject.model.frozen_weights import op_of_weight
from jqinject.model.inspect import measured_report, page, site_table, training_bytes
from jqinject.model.inspect.coverage import Coverage
from jqinject.model.inspect.layer_numbers import LayerNumbers
from jqinject.model.inspect.model_weights import LAYERS
from jqinject.model.inspect.site_table import SiteRow, SiteTable
from jqinject.model.walk import ModelIndex, check_module, modules_of, uncalibrated
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.program import CALL, Call, Method, checked_method

COLUMNS = ("layer", "class", "input x weight", "contracts", "program", "bytes", "operations")
#: Python's names of such numbers in JSON, which does not have them -> texts.
NOT_FINITE = {"Infinity": "inf", "-Infinity": "-inf", "NaN": "nan"}
#: The first cell of the line of totals.
TOTAL = "all layers"
COLUMNS_EXPLAINED = {
    "input x weight": "The grids of both; int4 in groups of 32: with a scale for each 32; int8 per row: for each row.",
    "contracts, program": "What the compiled program multiplies, and its types in XLA's notation (s8: 8-bit integers).",
    "bytes, operations": "Of the weight with its scales; multiply-adds of this call.",
    site_table.LOW_BITS: site_table.LEGEND[site_table.LOW_BITS],
}
MEASURED_EXPLAINED = {
    "alone dB, here dB, weight dB": (
        "Signal-to-quantization-noise ratio: of the layer's output when only it is quantized and its input is the "
        f"float model's; of its output in the quantized model ({TOTAL}: of the model's output); of its weight."
    ),
    "clipped w/in/out": (
        "Share of the elements of weight, input and output that lie outside what their quantizer can represent."
    ),
    "only quantized, only float": (
        "The ratio of the model's output, in dB, when this layer is quantized and no other; when all but it are."
    ),
}


@dataclass(frozen=True)
class ContractionReport(page.Shown):
    """A row for every layer, and for every parameter that the model contracts by itself.

    `str()` and `rich.print` show it as a table.

    Attributes:
        layers: the rows.
        coverage: the site table, and which weights are quantized; see `jqinject.coverage`.
        output_sqnr_db: signal-to-quantization-noise ratio of the model's output (all its floating-point arrays
            together), in decibels; None without numbers.
        uncalibrated: paths of activation quantizers whose static range never saw data.
        training: bytes of a training step; None without an optimizer.

    Example:
        >>> import jax
        >>> from flax import nnx
        >>> from jqinject import report
        >>> from jqinject.nn import QuantLinear
        >>> x = jax.random.normal(jax.random.key(0), (32, 16))
        >>> measured = report(QuantLinear(16, 8, weight_bit_width=2, rngs=nnx.Rngs(0)), x, numbers=True)
        >>> 0 < measured.output_sqnr_db < 12, measured.as_dict()["layers"][0]["operations"]
        (True, 4096)
    """

    layers: tuple[SiteRow, ...]
    coverage: Coverage
    output_sqnr_db: float | None = None
    uncalibrated: tuple[str, ...] = ()
    training: training_bytes.TrainingBytes | None = None

    def __getitem__(self, path: str) -> SiteRow:
        """The row of a layer or of a parameter, by path; a parameter of a layer has the layer's row."""
        by_parameter = {row.parameter: row for row in self.layers}
        return (by_parameter | {row.path: row for row in self.layers})[path]

    def __iter__(self) -> Iterator[SiteRow]:
        return iter(self.layers)

    @property
    def weight_bytes(self) -> int:
        """Of all the layers."""
        return sum(row.weight_bytes for row in self.layers)

    @property
    def operations(self) -> int:
        """Of all the layers."""
        return sum(row.operations for row in self.layers)

    def most_sensitive(self, n: int = 5) -> tuple[SiteRow, ...]:
        """The layers whose quantization hurts the model's output most: give these more bits first.

        Args:
            n: how many, at most.

        Returns:
            The layers with the lowest `numbers.only_quantized`, lowest first; ties are broken by the higher
            `numbers.only_float`.

        Raises:
            ValueError: the report has no numbers.
        """
        if self.output_sqnr_db is None:
            raise ValueError(
                "most_sensitive needs numbers, and this report has none.\n  cure: report(model, ..., numbers=True)"
            )
        numbers = ((row, row.numbers) for row in self.layers if row.numbers is not None)
        ratios = (
            (-math.inf if math.isnan(x.only_quantized) else x.only_quantized, -(x.only_float or 0.0), row)
            for row, x in numbers
            if x.only_quantized is not None
        )
        return tuple(row for *_, row in sorted(ratios, key=lambda entry: entry[:2])[:n])

    def as_dict(self) -> dict[str, Any]:
        """The whole report as dicts, lists, strings, numbers and None, ready for JSON.

        An infinite ratio becomes the string "inf" or "-inf", a nan the string "nan".
        """
        return {
            **json.loads(json.dumps(asdict(self)), parse_constant=NOT_FINITE.__getitem__),
            "coverage": self.coverage.as_dict(),
            "weight_bytes": self.weight_bytes,
            "operations": self.operations,
        }

    def html(self, path: str | Path | None = None) -> str:
        """The report as one self-contained HTML page: table, histograms, histories.

        Args:
            path: file to write it to, or None.

        Returns:
            The page.
        """
        title = "jqinject report"
        text = page.document(title, self._repr_html_(f"<h1>{title}</h1>"))
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def legend(self) -> tuple[tuple[str, str], ...]:
        """See `Shown`."""
        explained = COLUMNS_EXPLAINED | ({} if self.output_sqnr_db is None else MEASURED_EXPLAINED)
        return tuple(explained.items())

    def table(self) -> page.Table:
        """See `Shown`: a line for each layer, those of measured numbers only if it has them; and one of totals."""
        measured = self.output_sqnr_db is not None
        lines = [(*_cells(row), *(_measured(row) if measured else ()), row.note) for row in self.layers]
        # The model's output ratio goes in the column "here dB": a layer's output in the quantized model.
        output = ("", _cell(self.output_sqnr_db), "", "", "", "") if measured else ()
        counts = (f"{self.weight_bytes:,}", f"{self.operations:,}")
        names = (*COLUMNS, *(site_table.MEASURED if measured else ()), page.NOTE)
        return names, [*lines, (TOTAL, "", "", "", "", *counts, *output, "")]

    def notes(self) -> tuple[str, ...]:
        """See `Shown`: the coverage comes last."""
        unseen = ", ".join(self.uncalibrated)
        return (
            *([f"static ranges that never saw data: {unseen}"] if unseen else ()),
            *(self.training.lines if self.training is not None else ()),
            *(
                f"contraction of activations: {row.name} ({row.operation}): {row.formats or 'float x float'}, "
                f"{row.operations:,} operations{f'; {row.note}' if row.note else ''}"
                for row in self.coverage.activations
            ),
            *(
                f"cache: {row.name}: {row.weight}, {row.weight_bytes:,} bytes of {row.float_bytes:,}"
                for row in self.coverage.caches
            ),
            *self.coverage.summary,
        )

    def body(self) -> str:
        """See `Shown`: with charts of measured numbers."""
        return super().body() + page.charts(self.layers)


@runtime_checkable
class WithReference(Protocol):
    """A quantized model and the float model that it was made from: what a recipe returns."""

    @property
    def model(self) -> nnx.Module: ...
    @property
    def float_model(self) -> nnx.Module: ...


def report(
    model: nnx.Module | WithReference,
    *inputs: object,
    numbers: bool = False,
    reference: nnx.Module | None = None,
    optimizer: nnx.Optimizer[Any] | optax.GradientTransformation | None = None,
    method: Method = CALL,
    **keywords: object,
) -> ContractionReport:
    """Report each layer's actual contraction, its cost, why it is not quantized, and its quantization error.

    The model is traced in evaluation mode and compiled for this machine, and the compiled program is read: a product
    that a configuration requests but the backend lacks shows as "float". A CPU, for one, contracts 8-bit floats as
    floats.

    With `numbers`, a copy of the model also runs in evaluation mode: in float, quantized, and twice for each quantized
    layer and for each parameter that the model contracts by itself, whose calls are its contractions and look-ups. All
    outputs of these are kept in memory meanwhile, so a small batch is best.

    Args:
        model: an NNX module; it is not changed. Or what `Recipe.apply` returned: its model, measured against its
            `float_model`.
        inputs, keywords: the model's arguments, of any kind: pytrees of arrays or `jax.ShapeDtypeStruct`s, modules
            (which are not changed), flags, None.
        numbers: measure the quantization error of each layer and of the model; needs arrays.
        reference: measure it against this float model, with or without `numbers`: for a frozen model, and after a
            recipe, which puts the numbers that it chose in the place of float weights (`Result.float_model`). The
            weights that are frozen, or that a recipe chose, are compared with its weights; all else is the model's own.
        optimizer: an `nnx.Optimizer`, or an optax transformation: count the bytes of training too, in the program of
            the training mode, whose floating-point outputs are differentiated; nothing of it is run. See
            `TrainingBytes`.
        method: the method that they are arguments of: its name, or a function that takes the model first, as in
            `method=lambda model, x: model(x, numbers=3)`.

    Returns:
        A row for every jqinject or Flax layer with a weight, and for every parameter that the model contracts or
        looks up by itself, named by its path; with `numbers`, also for every other quantized jqinject layer, and for
        every quantized contraction of two activations, named by the operation. Besides, the static ranges that never
        saw data, the contractions of two activations, and the coverage; with `optimizer`, `training`.

    Raises:
        TypeError: `model` is not an NNX module; `numbers` with inputs or weights that are not concrete arrays;
            `optimizer` is none.
        ValueError: the model has no such method; `numbers` with a frozen model whose float weights are gone: names
            the layers and parameters; the same after a recipe without `reference`, or a reference whose parameters do
            not fit; `optimizer` for a model with nothing to train, or no floating-point output.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject import calibrate, freeze
        >>> from jqinject.nn import QuantLinear
        >>> from jqinject.quant import Int8ActPerTensorFloat
        >>> layer = QuantLinear(16, 8, input_quant=Int8ActPerTensorFloat, rngs=nnx.Rngs(0))
        >>> _ = calibrate(layer, [jnp.ones((4, 16))], progress=False)
        >>> measured = report(layer, jnp.ones((4, 16)), numbers=True)
        >>> measured.layers[0].numbers.saturation.weight, measured.most_sensitive(1)[0].layer
        (0.0, 'QuantLinear')
        >>> served = report(freeze(layer), jnp.ones((4, 16)))
        >>> served.layers[0].contraction, served.layers[0].program, served.layers[0].operations
        ('int', 's8 x s8 -> s32', 512)
    """
    if not isinstance(model, nnx.Module) and isinstance(model, WithReference):
        model, reference = model.model, model.float_model if reference is None else reference
    check_module(model, "report")
    call = Call(inputs, keywords, checked_method(model, method, "report"))
    return report_of(model, call, numbers or reference is not None, reference, optimizer)


def report_of(
    model: nnx.Module,
    call: Call,
    numbers: bool,
    reference: nnx.Module | None = None,
    optimizer: nnx.Optimizer[Any] | optax.GradientTransformation | None = None,
) -> ContractionReport:
    """See `report`."""
    floats = measured_report.measurable(model, call, reference) if numbers else None
    sites = SiteTable(model, [call])
    quantized = [row for row in sites.rows if row.formats and row.operation not in ("", site_table.CACHE)]
    switched = {row.site: row.path for row in quantized}
    measured, ratio = ({}, None) if floats is None else measured_report.measure(floats, call, switched)
    training = None if optimizer is None else training_bytes.training_bytes(model, call, optimizer, switched)
    unseen, rows = uncalibrated(ModelIndex(model)), tuple(_rows(sites, measured))
    return ContractionReport(rows, Coverage(sites.rows), ratio, unseen, training)


def _rows(sites: SiteTable, measured: Mapping[str, LayerNumbers]) -> Iterator[SiteRow]:
    """A row for each layer with a weight, each parameter that is read, and whatever else is measured.

    Args:
        sites: of one call.
        measured: entry -> its numbers.
    """
    modules = modules_of(sites.weights.model)
    layers = {path: node for path, node in modules.items() if isinstance(node, LAYERS) or path in measured}
    uses: dict[str, list[SiteRow]] = {path: [] for path in layers}
    for row in sites.rows:
        if row.path in layers or (row.parameter and row.operation) or row.path in measured:
            uses.setdefault(row.path, []).append(row)
    compiled = sites.calls[0].compiled(
        {path: path for path in layers} | {row.site: row.path for row in sites.rows}
    )
    for path, own in uses.items():
        layer, contractions = layers.get(path), compiled.get(path, {})
        # A layer that the compiler could do without has none; parameters are not named in the compiled program.
        traced = () if layer is not None else (row.contraction for row in own if row.contraction != "none")
        kinds = sorted({*(contractions.values() or traced)})
        is_weight = isinstance(layer, LAYERS) or any(row.parameter for row in own)
        why = _why_float(path, layer, own, kinds, sites) if is_weight else ""
        yield replace(
            own[0] if own else SiteRow(path, layer=type(layer).__name__),
            layer=" and ".join(dict.fromkeys(row.layer for row in own)) or type(layer).__name__,
            formats=", ".join(dict.fromkeys(row.formats for row in own if row.formats)),
            contraction=" and ".join(kinds) or "none",
            program=", ".join(contractions),
            note=site_table.joined(why, *(row.note for row in own)),
            weight_bytes=sum({row.parameter: row.weight_bytes for row in own}.values()),
            operations=sum(row.operations for row in own),
            numbers=measured.get(path),
        )


def _why_float(
    path: str, layer: object, uses: Sequence[SiteRow], kinds: Sequence[str], sites: SiteTable
) -> str:
    """Why a layer or a parameter is contracted in floats; "" if it is not."""
    row = next((row for row in uses if row.operation not in ("", "take")), None)
    if row is None or not kinds:
        looks_up = any(row.operation == "take" for row in uses)
        return "looks up rows" if looks_up else "was not called, or the compiler could do without"
    if "float" not in kinds:
        return ""
    op, why = op_of_weight(layer), next((row.why for row in uses if row.why), "")
    grid = sites.weights.grid_of(row.parameter)
    if why:
        return why
    before = None if op is None or op.countdown is None else op.scheme.before
    if op is not None and before is not None:
        return (
            f"{before.as_before} in its first {op.scheme.delay} calls in training, then by {op.scheme.name}"
        )
    if not row.input and op is not None:
        return "the input has no bits in the configuration"
    if not row.input:
        cure = " by this layer: give it input_quant=..." if isinstance(layer, QuantWeightLayer) else ""
        return f"the input is not quantized{cure}"
    if "fp8" in row.contraction:
        return "no 8-bit floats: this backend has no such product and takes floats"
    if not grid.is_integer:
        return f"no backend contracts this weight ({row.weight}): it is dequantized first"
    if isinstance(layer, QuantWeightLayer) and op is None:
        reason = sites.calls[0].reasons.get(path, NOT_KEPT)
        return "contraction='float'" if layer.contraction == "float" else reason
    return "contracted dequantized, somewhere at least: the operands have no payloads in common there"


def _cell(number: float | None, form: str = ".1f") -> str:
    return "-" if number is None else format(number, form)


def _cells(row: SiteRow) -> tuple[str, ...]:
    counts = (f"{row.weight_bytes:,}", f"{row.operations:,}")
    return row.path or "the model", row.layer, row.formats, row.contraction, row.program, *counts


def _measured(row: SiteRow) -> tuple[str, ...]:
    if row.numbers is None:
        return ("-",) * len(site_table.MEASURED)
    numbers, clipped = row.numbers, row.numbers.saturation
    return (
        _cell(numbers.isolated_sqnr_db),
        _cell(numbers.accumulated_sqnr_db),
        _cell(numbers.weight_sqnr_db),
        " ".join(_cell(share, ".2%") for share in (clipped.weight, clipped.input, clipped.output)),
        _cell(numbers.only_quantized),
        _cell(numbers.only_float),
    )
