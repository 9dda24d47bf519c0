"""`coverage`: which weights of a model are quantized, how each is contracted, and why the others are not."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from flax import nnx

from jqinject.model.inspect import page, site_table
from jqinject.model.quantizing.rules import Rule
from jqinject.model.walk import check_module
from jqinject.program import CALL, Call, Method, checked_method

COLUMNS = ("parameter", "operation", "weight", "input", "contracts", "multiply-adds")


@dataclass(frozen=True)
class Coverage(page.Shown):
    """Which weights of a model are quantized. `str()` shows it as a table.

    A matrix is a parameter that is contracted or looked up, or one of at least two axes that no traced call reads; one
    that is only added or multiplied is none. Bytes are those of the float parameters.

    Attributes:
        rows: the site table.
    """

    rows: tuple[site_table.SiteRow, ...]

    @property
    def weights(self) -> tuple[site_table.SiteRow, ...]:
        """The contractions with a weight and the look-ups, in the program's order; empty without inputs."""
        return tuple(row for row in self.rows if row.parameter and row.operation)

    @property
    def activations(self) -> tuple[site_table.SiteRow, ...]:
        """The contractions of two activations."""
        return tuple(row for row in self.rows if not row.parameter and row.operation != site_table.CACHE)

    @property
    def caches(self) -> tuple[site_table.SiteRow, ...]:
        """What the model writes into caches in low bits."""
        return tuple(row for row in self.rows if row.operation == site_table.CACHE)

    @cached_property
    def missed(self) -> tuple[site_table.SiteRow, ...]:
        """The first use in floats of each matrix that is not quantized, largest first."""
        first = {row.parameter: row for row in reversed(self.rows) if row.why}
        return tuple(sorted(first.values(), key=lambda row: (-row.size, row.parameter)))

    @cached_property
    def _bytes(self) -> dict[str, int]:
        """The bytes of every matrix in floats."""
        return {row.parameter: row.float_bytes for row in self.rows if row.shape is not None}

    @property
    def matrices(self) -> int:
        """How many there are."""
        return len(self._bytes)

    @property
    def quantized_matrices(self) -> int:
        """How many are quantized wherever they are read."""
        return len(self._bytes.keys() - {row.parameter for row in self.missed})

    @property
    def weight_bytes(self) -> int:
        """The bytes of all matrices in floats."""
        return sum(self._bytes.values())

    @property
    def quantized_bytes(self) -> int:
        """The bytes in floats of those that are quantized."""
        return self.weight_bytes - sum(row.float_bytes for row in self.missed)

    @property
    def operations(self) -> int:
        """Multiply-adds with a weight."""
        return sum(row.operations for row in self.weights)

    @property
    def low_bit_operations(self) -> int:
        """Those of them whose operands both have at most 8 bits, contracted as such or dequantized."""
        return sum(row.operations for row in self.weights if row.is_low_bit)

    @property
    def share_of_bytes(self) -> float:
        """Of the weights that are quantized; 1 without weights."""
        return self.quantized_bytes / self.weight_bytes if self.weight_bytes else 1.0

    @property
    def share_of_operations(self) -> float | None:
        """Of the multiply-adds with a weight that are in low bits; None if none is known."""
        return self.low_bit_operations / self.operations if self.operations else None

    @property
    def line(self) -> str:
        """The shares in one line."""
        if not self.matrices:
            return "coverage: no matrix is contracted or looked up"
        share = self.share_of_operations
        counted = (
            "multiply-adds unknown" if share is None else f"{share:.1%} of the multiply-adds in low bits"
        )
        return (
            f"coverage: {self.quantized_matrices} of {self.matrices} matrices quantized, "
            f"{self.share_of_bytes:.1%} of the weight bytes, {counted}"
        )

    @property
    def summary(self) -> tuple[str, ...]:
        """The line, and below it every weight of more than 1,024 numbers that is not quantized."""
        big = [row for row in self.missed if row.size > site_table.BIG]
        lines = [
            f"not quantized: {row.parameter} ({row.size:,} numbers): {row.why}"
            + (f"; {row.rule}" if row.rule else "")
            for row in big
        ]
        small = len(self.missed) - len(big)
        rest = [f"not quantized: {small} more, of at most {site_table.BIG:,} numbers each"] if small else []
        return (self.line, *lines, *rest)

    def table(self) -> page.Table:
        """See `Shown`: the contractions."""
        return COLUMNS, [_cells(row) for row in (*self.weights, *self.activations, *self.caches)]

    def legend(self) -> tuple[tuple[str, str], ...]:
        """See `Shown`."""
        return tuple(site_table.LEGEND.items())

    def notes(self) -> tuple[str, ...]:
        """See `Shown`."""
        return self.summary

    def as_dict(self) -> dict[str, int]:
        """The counts."""
        return {
            "matrices": self.matrices,
            "quantized_matrices": self.quantized_matrices,
            "weight_bytes": self.weight_bytes,
            "quantized_bytes": self.quantized_bytes,
            "operations": self.operations,
            "low_bit_operations": self.low_bit_operations,
        }


def _cells(row: site_table.SiteRow) -> tuple[str, ...]:
    if row.operation == site_table.CACHE:
        return f"(cache) {row.name}", "cache write", row.weight, "-", "", "0"
    grids = (row.weight or "float", "-" if row.operation == "take" else row.input or "float")
    name = row.parameter or f"(activations) {row.name}"
    return name, row.operation, *grids, row.contraction if row.parameter else "", f"{row.operations:,}"


def coverage(model: nnx.Module, *inputs: object, method: Method = CALL, **keywords: object) -> Coverage:
    """Which weights of a model are quantized, how each is contracted, and why the others are not.

    The model is traced in evaluation mode and not run. Works on float, quantized, frozen and abstract models; without
    inputs only the model's own structure is looked at. In a loop multiply-adds count as often as it runs, or once if
    the length is unknown; of several branches, those of the one with the most.

    Args:
        model: an NNX module; it is not changed.
        inputs, keywords: its arguments, arrays or `jax.ShapeDtypeStruct`s, or anything else that it takes.
        method: the method that they are arguments of, as for `report`.

    Raises:
        TypeError: `model` is not an NNX module.
        ValueError: the model has no such method.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject import Rule, quantize
        >>> from jqinject.quant import Int8ActPerTensorFloat, Int8WeightPerChannelFloat
        >>> model = nnx.Sequential(nnx.Linear(32, 64, rngs=nnx.Rngs(0)), nnx.Linear(64, 8, rngs=nnx.Rngs(1)))
        >>> rule = Rule("layers.1", weight_quant=Int8WeightPerChannelFloat, input_quant=Int8ActPerTensorFloat)
        >>> x = jnp.ones((3, 32))
        >>> print(coverage(quantize(model, rule, inputs=x), x))
        parameter        operation    weight  input  contracts  multiply-adds
        layers.0.kernel  dot_general  float   float  float              6,144
        layers.1.kernel  dot_general  int8    int8   int                1,536
        weight, input: Their grids; int4 in groups of 32: with a scale for each 32; int8
          per row: for each row.
        contracts: In which numbers the program contracts them now; float: quantized
          ones are dequantized first.
        quantized, in low bits: A matrix in all its uses; multiply-adds whose operands
          have at most 8 bits each.
        coverage: 1 of 2 matrices quantized, 20.0% of the weight bytes, 20.0% of the multiply-adds in low bits
        not quantized: layers.0.kernel (2,048 numbers): it has no quantizer; Rule('layers.0.kernel', ...)
    """
    check_module(model, "coverage")
    function = checked_method(model, method, "coverage")
    return coverage_of(model, [Call(inputs, keywords, function)] if inputs or keywords else [])


def coverage_of(model: nnx.Module, calls: Sequence[Call], rules: Sequence[Rule] | None = None) -> Coverage:
    """See `coverage` and `SiteTable`."""
    return Coverage(site_table.SiteTable(model, calls, rules).rows)
