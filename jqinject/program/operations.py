"""The table of operations: what quantization means for each, by its name in a program.

| kind | inputs are quantized | output is quantized | as in |
| --- | --- | --- | --- |
| `CONTRACTION` | yes | yes; a constant added to it belongs to it | matmul |
| `QUANTIZED` | yes | yes | softmax |
| `ARITHMETIC` | yes | yes; an added constant belongs to the contraction before it | add |
| `INPUT_ONLY` | yes | already is: it keeps the scale | max-pool |
| `OUTPUT_ONLY` | no | yes, else as the operation before it requests | relu |
| `JOINING` | if the output is not | yes | concatenate |
| `TRANSPARENT` | no | stays as the input is | reshape |
| `FLOAT` | no | no | sin |
| `SELECTING` | no | no; the mask does not count in the range of the operation that takes it | where |
| unknown | no | no; an error in strict mode | exp |
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jqinject.dot.geometry.dimensions import Dimensions
from jqinject.program import jaxpr, moves


class Kind(enum.Enum):
    """What quantization means for an operation."""

    CONTRACTION = enum.auto()
    QUANTIZED = enum.auto()
    ARITHMETIC = enum.auto()
    INPUT_ONLY = enum.auto()
    OUTPUT_ONLY = enum.auto()
    JOINING = enum.auto()
    TRANSPARENT = enum.auto()
    FLOAT = enum.auto()
    SELECTING = enum.auto()
    UNKNOWN = enum.auto()


@dataclass(frozen=True)
class Operation:
    """One row of the table.

    Attributes:
        name: its name in rules and statistics.
        kind: what quantization means for it.
        inputs: which operands are quantized; None for all.
        output_range: the range of its output, if known.
        masked: whether its input may be masked with numbers far below all others.
        fuses: whether, with a constant, it is part of the contraction before it, as its bias.
    """

    name: str
    kind: Kind
    inputs: tuple[int, ...] | None = None
    output_range: tuple[float, float] | None = None
    masked: bool = False
    fuses: bool = False


# A device's scale and zero point for outputs between 0 and 1: 1/256, -128; and between -1 and 1: 1/128, 0.
LOGISTIC_RANGE = (0.0, 255 / 256)
TANH_RANGE = (-1.0, 127 / 128)
UNKNOWN = Operation("", Kind.UNKNOWN)


def _rows(kind: Kind, *names: str, **more: Any) -> tuple[Operation, ...]:
    return tuple(Operation(name, kind, **more) for name in names)


OPERATIONS = {
    row.name: row
    for row in (
        *_rows(
            Kind.CONTRACTION, "dot_general", "einsum", "conv_general_dilated", "ragged_dot", inputs=(0, 1)
        ),
        *_rows(Kind.ARITHMETIC, "add", fuses=True),
        *_rows(Kind.ARITHMETIC, "subtract", "multiply", "truediv"),
        *_rows(
            Kind.QUANTIZED, "power", "negative", "maximum", "minimum", "mean", "sum", "gelu", "leaky_relu"
        ),
        *_rows(Kind.QUANTIZED, "resize", "repeat", "silu", inputs=(0,)),
        *_rows(Kind.QUANTIZED, "norm_op", "batch_norm_op", inputs=(0,)),
        *_rows(Kind.QUANTIZED, "softmax", inputs=(0,), output_range=LOGISTIC_RANGE, masked=True),
        *_rows(Kind.QUANTIZED, "sigmoid", inputs=(0,), output_range=LOGISTIC_RANGE),
        *_rows(Kind.QUANTIZED, "tanh", inputs=(0,), output_range=TANH_RANGE),
        *_rows(Kind.INPUT_ONLY, "avg_pool", "max_pool", "max", "take", inputs=(0,)),
        *_rows(Kind.OUTPUT_ONLY, "relu", "relu6", "clip", "pad", "floor", inputs=(0,)),
        *_rows(Kind.JOINING, "concatenate"),
        *_rows(Kind.FLOAT, "sin", "cos", "equal"),
        *_rows(Kind.SELECTING, "where"),
        *_rows(Kind.TRANSPARENT, *moves.MOVES, "reduce_precision", "optimization_barrier"),
    )
}

# Other names in programs: primitives, and functions that are compiled separately.
ALIASES = {
    "add_any": "add",
    "sub": "subtract",
    "mul": "multiply",
    "div": "truediv",
    **dict.fromkeys(("pow", "integer_pow", "square"), "power"),
    "neg": "negative",
    "max": "maximum",
    "min": "minimum",
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_window_max": "max_pool",
    "reduce_window_sum": "avg_pool",
    "gather": "take",
    "ragged_dot_general": "ragged_dot",
    "logistic": "sigmoid",
    "select_n": "where",
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), "equal"),
    "_pad": "pad",
    "_resize": "resize",
    "swish": "silu",
    "hard_tanh": "clip",
    "_where": "where",
}

# Separately compiled functions that are one operation; others are looked into.
FUNCTIONS = frozenset(
    {"relu", "relu6", "silu", "swish", "gelu", "leaky_relu", "hard_tanh", "sigmoid", "softmax"}
    | {"clip", "_pad", "_resize"}
)


def operation_of(name: str) -> Operation:
    """The row of a primitive, or of a separately compiled function; `UNKNOWN` for others."""
    return OPERATIONS.get(ALIASES.get(name, name), UNKNOWN)


def known_operations() -> tuple[str, ...]:
    """The names that a rule can use for an operation between layers."""
    return tuple(sorted(name for name, row in OPERATIONS.items() if row.kind is not Kind.TRANSPARENT))


#: The primitives that contract, and the parameters that say what.
ARGUMENTS = {
    "dot_general": ("dimension_numbers",),
    "conv_general_dilated": (
        *("window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers"),
        *("feature_group_count", "batch_group_count"),
    ),
    "ragged_dot_general": ("ragged_dot_dimension_numbers", "precision"),
}
CONTRACTIONS = tuple(ARGUMENTS)
Axes = tuple[int, ...]


def contracts(body: jaxpr.Body) -> bool:
    """Whether a body, or one within it, contracts anything."""
    return any(eqn.name in CONTRACTIONS for eqn in body.everywhere())


@dataclass(frozen=True)
class ContractedAxes:
    """The axes of one operand of a contraction.

    Attributes:
        summed: those that are summed, in the order of the other operand's; of a convolution the channels.
        free: those that the output and this operand alone have.
        reduced: all that are summed over: a convolution's window too.
        partners: summed and batch axes -> those of the other operand.
        results: batch and free axes -> those of the output; not of the images of a convolution, nor of ragged rows.
        batch: those that both operands and the output have, in the order of the other operand's.
        stack: of a ragged product, that along which its matrices are.
    """

    summed: Axes
    free: Axes
    reduced: Axes
    partners: Mapping[int, int]
    results: Mapping[int, int]
    batch: Axes = ()
    stack: Axes = ()


def operand_axes(eqn: jaxpr.Equation) -> tuple[ContractedAxes, ContractedAxes]:
    """The axes of both operands of a contraction."""
    ranks = [len(x.shape) for x in eqn.inputs[:2]]
    if eqn.name == "conv_general_dilated":
        numbers = eqn.params["dimension_numbers"]
        (image, channel, *_), (row, column, *_) = numbers.lhs_spec, numbers.rhs_spec
        # Windows run over the spatial axes, so an image has a scale per example, a kernel per filter.
        window = tuple(numbers.lhs_spec[1:]), tuple(axis for axis in range(ranks[1]) if axis != row)
        results = {row: numbers.out_spec[1]}
        return (
            ContractedAxes((channel,), (image,), window[0], {channel: column}, {}),
            ContractedAxes((column,), (row,), window[1], {column: channel}, results),
        )
    ragged = eqn.params.get("ragged_dot_dimension_numbers")
    numbers = eqn.params["dimension_numbers"] if ragged is None else ragged.dot_dimension_numbers
    dims = Dimensions.of(ranks[0], ranks[1], numbers)
    stack = () if ragged is None else tuple(ragged.rhs_group_dimensions)
    out = [label for label in dims.out if label not in {dims.rhs[axis] for axis in stack}]

    def side(dims: Dimensions, stack: Axes, has_results: bool) -> ContractedAxes:
        summed, batch = dims.lhs_contract, dims.lhs_batch
        free = tuple(axis for axis in dims.lhs_free if axis not in stack)
        partners = dict(zip((*summed, *batch), (*dims.rhs_contract, *dims.rhs_batch), strict=True))
        results = {axis: out.index(dims.lhs[axis]) for axis in (*batch, *free) if has_results}
        return ContractedAxes(summed, free, summed, partners, results, batch, stack)

    return side(dims, (), ragged is None), side(dims.swapped(), stack, True)


def multiplies_matrices(eqn: jaxpr.Equation) -> bool:
    """Whether a contraction is one of rows with a matrix, or in groups each with a matrix of its own.

    It is not if a convolution groups its batch, or a ragged product sums over its groups.
    """
    if eqn.name != "ragged_dot_general":
        return eqn.params.get("batch_group_count", 1) == 1
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (summed, batch), ragged = numbers.dot_dimension_numbers, numbers.lhs_ragged_dimensions
    axes = tuple(map(tuple, (*summed, *batch, ragged, numbers.rhs_group_dimensions)))
    return axes == ((1,), (1,), (), (), (0,), (0,))


def contraction_arguments(eqn: jaxpr.Equation) -> dict[str, Any]:
    """What says which contraction of its kind an equation is."""
    return {name: eqn.params[name] for name in ARGUMENTS[eqn.name]}
