"""Finds what can be permuted together: values and parameters of a program whose channels can stand in another order.

A permutation of channels commutes with more than a rotation: with everything that is done to numbers one by one, and
with reductions over the channels. Numbers that channels are multiplied by, or added to, are permuted with them.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from jqinject.recipes.stream.flat_program import ContractionSite, FlatProgram, FlatStep, Slot
from jqinject.recipes.transforms.regions import RotatedRegion, by_region
from jqinject.recipes.transforms.rotations import REDUCTIONS, RULES, RotationWalk, is_uniform, region_of

#: Operations on numbers one by one.
ELEMENTWISE = (
    *(
        "abs",
        "sign",
        "floor",
        "ceil",
        "round",
        "neg",
        "real",
        "is_finite",
        "not",
        "nextafter",
        "rem",
        "clamp",
    ),
    *("exp", "exp2", "expm1", "log", "log1p", "sqrt", "rsqrt", "cbrt", "square", "integer_pow", "pow"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh", "logistic"),
    *("erf", "erfc", "erf_inv", "add", "add_any", "sub", "mul", "div", "max", "min", "select_n"),
    *("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor"),
)


def permuted_regions(flat: FlatProgram) -> Iterator[tuple[ContractionSite, RotatedRegion | str]]:
    """Each site with what a permutation of its inputs permutes, or why nothing can; the first site of each region.

    Args:
        flat: the program.
    """
    return by_region(flat, partial(region_of, walk=PermutationWalk))


class PermutationWalk(RotationWalk):
    """Follows a permutation of blocks of channels from a value through a program, as far as it reaches.

    Args:
        flat, slot, axis, block: as for `RotationWalk`.

    Raises:
        Refused: an operation does not commute with the permutation.
    """

    done = "a permutation"

    def __init__(self, flat: FlatProgram, slot: Slot, axis: int, block: int) -> None:
        super().__init__(flat, slot, axis, block, PERMUTED)

    def _ends(self, slot: Slot) -> None:
        if slot in self.flat.ends or slot not in self.flat.discrete or slot not in self.flat.made_by:
            super()._ends(slot)  # truth values that are computed have an order of channels too

    def _each(self, step: FlatStep) -> None:
        label = self._label((*step.inputs, *step.outputs))
        for slot in (*step.inputs, *step.outputs):
            if slot in step.outputs or not is_uniform(self.flat, slot, label.axis):
                self._give(slot, label)

    def _reduce(self, step: FlatStep) -> None:
        label = self.labels.get(step.inputs[0])
        if label is None or label.axis not in step.params["axes"]:
            self._move(step)


#: What operations do with a permutation, by name; any other operation commutes with none.
PERMUTED: Mapping[str, Callable[[PermutationWalk, FlatStep], None]] = {
    **RULES,
    **dict.fromkeys(ELEMENTWISE, PermutationWalk._each),
    **dict.fromkeys(REDUCTIONS, PermutationWalk._reduce),
}
