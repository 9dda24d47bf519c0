"""The transform before the quantizers of both operands of a product: `pre_transform`, and signs drawn before it."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from jqinject.core.transforms import Hadamard, Transform, along
from jqinject.dot.geometry.dimensions import Label, Labels
from jqinject.dot.tensors.labelled_tensor import LabelledTensor
from jqinject.inject import Binding

#: The operands of the three products.
PAIRS = (("fprop_lhs", "fprop_rhs"), ("dgrad_grad", "dgrad_rhs"), ("wgrad_grad", "wgrad_lhs"))
#: The flags of a scheme that draw signs, and an operand of their product.
SIGNS = {"dgrad_random_signs": "dgrad_grad", "wgrad_random_signs": "wgrad_grad"}


def transform_of(quantizer: object) -> Any:
    """Return what an injector declares before its quantizer, and does not undo: a transform, or its declaration.

    Args:
        quantizer: an injector, or a binding of one; anything else has no transform.

    Returns:
        None without a transform, and where `undo_transform` takes it back from what is quantized.

    Example:
        >>> from jqinject.quant import Int8ActPerTensorFloat
        >>> transform_of(Int8ActPerTensorFloat.let(pre_transform=Hadamard(8))).block_size
        8
    """
    transform, is_undone = _transform_and_undo(quantizer)
    return None if is_undone else transform


def undone_transform_of(quantizer: object) -> Transform | None:
    """Return the transform that an injector declares before its quantizer, and undoes by `undo_transform`.

    Args:
        quantizer: as for `transform_of`.

    Returns:
        None without one, and where only its declaration is known, as it holds numbers.

    Example:
        >>> from jqinject.quant import TurboQuant4Act
        >>> len(undone_transform_of(TurboQuant4Act).parts), transform_of(TurboQuant4Act)
        (2, None)
    """
    transform, is_undone = _transform_and_undo(quantizer)
    return transform if is_undone and isinstance(transform, Transform) else None


def _transform_and_undo(quantizer: object) -> tuple[object, bool]:
    if isinstance(quantizer, type):
        quantizer = Binding(quantizer)
    return _declared(quantizer) if isinstance(quantizer, Binding) else (None, False)


@lru_cache(maxsize=256)
def _declared(binding: Binding) -> tuple[object, bool]:
    return declared(binding, "pre_transform"), bool(declared(binding, "undo_transform"))


def declared(binding: Binding, name: str) -> Any:
    """Return what an injector declares by a name; None if it does not."""
    return binding.resolve(name) if binding.declares(name) else None


def transformed_label(summed: Labels) -> Label:
    """The axis that a transform goes along: the last one that both operands sum over."""
    return sorted(summed)[-1]


def transformed(operand: object, x: LabelledTensor, summed: Labels) -> LabelledTensor:
    """An operand as its quantizer sees it: through its transform; unchanged without one.

    Args:
        operand: of a resolved scheme.
        x: its float array.
        summed: the axes that its product sums over.
    """
    transform = transform_of(operand)
    if transform is None or not summed:
        return x
    return LabelledTensor(along(transform, x.tensor, (x.axis(transformed_label(summed)),)), x.labels)


def check_transforms(scheme: Mapping[str, object], name: str) -> None:
    """Refuse a transform that the other operand of a product lacks, that does not cancel, or that tiles cut.

    Args:
        scheme: what a scheme says, by name.
        name: of the scheme.

    Raises:
        TypeError: there is such a transform, or random signs without one, which alone do not change what is rounded.
    """
    for pair in PAIRS:
        transforms = {operand: transform_of(scheme[operand]) for operand in pair}
        first, second = transforms.values()
        if first is None and second is None:
            continue
        said = ", ".join(f"{name}.{operand} {_in_words(part)}" for operand, part in transforms.items())
        if first != second:
            raise TypeError(
                f"the operands of a product go through the same transform, which then cancels: {said}.\n"
                f"  cure: pre_transform = {second if first is None else first!r} of both, each "
                "with a quantizer of its own"
            )
        if not isinstance(first, Hadamard):
            raise TypeError(
                f"of transforms a product takes those that cancel and hold no numbers: {said}.\n"
                "  cure: pre_transform = jqinject.core.transforms.Hadamard(16, signs)"
            )
    if scheme["tile_size"] is not None and transform_of(scheme["fprop_lhs"]) is not None:
        raise TypeError(
            f"{name}: tile_size cuts what the pre_transform of fprop_lhs and fprop_rhs goes along.\n"
            "  cure: tile_size = None; scales for parts of a sum come from groups (group_size) of the quantizers"
        )
    for flag, operand in SIGNS.items():
        if scheme[flag] and transform_of(scheme[operand]) is None:
            raise TypeError(
                f"{name}.{flag} draws signs for a transform, and {operand} declares no pre_transform.\n"
                f"  cure: {flag} = False, or pre_transform = jqinject.core.transforms.Hadamard(32) of both operands"
            )


def _in_words(transform: object) -> str:
    return "has no pre_transform" if transform is None else f"declares {transform!r}"
