"""What an injector and its quantizer say about the numbers that they make, and who is named when one fails.

Notes on errors name the quantizer, its layer, and the parts that are the user's own. Overrides given where an injector
is used are checked: each must be read.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jqinject.core import Packable, Quantized, check, components_in
from jqinject.inject import Binding, ExtendedInjector, check_overrides
from jqinject.ops import IntGrid

_LIBRARY = __name__.partition(".")[0]
_FOREIGN = (_LIBRARY, "builtins", "functools", "jax", "jaxlib", "flax", "numpy")  # not parts of a user's own


def is_ours(cls: type) -> bool:
    """Whether a class is of this library."""
    return cls.__module__.partition(".")[0] == _LIBRARY


def packable(result: object, quantizer: object, signed: bool | None) -> Packable:
    """What a quantizer returned, as a result that becomes a QuantTensor; four values of a user's own as integers.

    Args:
        result: the result.
        quantizer: what returned it.
        signed: whether the integers of four values have a sign; known for whatever quantizes integers.

    Raises:
        TypeError: it is not a result.
    """
    if isinstance(result, Packable):
        return result
    if isinstance(result, tuple | list) and len(result) == 4:
        value, scale, zero_point, bit_width = result
        return Quantized(value, scale, zero_point, IntGrid(bit_width, bool(signed)))
    shape = getattr(result, "shape", len(result) if isinstance(result, tuple | list) else None)
    size = "" if shape is None else f" of {shape}" if isinstance(shape, int) else f" of shape {shape}"
    raise TypeError(
        f"tensor_quant = {type(quantizer).__name__} must return a Quantized, or (value, scale, zero_point, bit_width), "
        f"got {type(result).__name__}{size}.\n  cure: return Quantized(value, scale, None, IntGrid(bit_width))"
    )


def note_quantizer(error: Exception, where: str, quantizer: object) -> None:
    """Add to an error which quantizer was at work, and where it is."""
    note = f"in {where}{_own_parts(quantizer)}"
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def _own_parts(quantizer: object) -> str:
    """The components among a quantizer's that are not the library's, with the names they stand under."""
    parts: dict[str, None] = {}
    if quantizer is not None and not is_ours(type(quantizer)):
        parts[f"tensor_quant = {type(quantizer).__name__}"] = None
    for component in components_in(quantizer):
        for name, part in vars(component).items():
            is_part = callable(part) and not isinstance(part, type)
            if is_part and type(part).__module__.partition(".")[0] not in _FOREIGN:
                parts[f"{name} = {type(part).__name__}"] = None
    return f", with your {', '.join(parts)}" if parts else ""


METADATA = frozenset({"narrow_range", "float_to_int_impl_type"})  # what proxies report about quantizers


def check_names(
    binding: Binding, names: Iterable[str], keywords: Mapping[str, object], where: tuple[str, str], **how: Any
) -> None:
    """Reject overrides that are unknown, or that nothing reads.

    Args:
        binding: the injector with its overrides.
        names: everything overridden: by keywords, by `let`, in a binding.
        keywords: those of them given as keywords.
        where: what the user called and the prefix of these.
        how: see `jqinject.inject.check_overrides`.
    """
    by_keyword = [name for name in names if name in keywords]
    check_overrides(binding.injector, by_keyword, where=where[0], prefix=where[1], **how)
    check_overrides(binding.injector, [name for name in names if name not in keywords], **how)


# The names from which metadata are read, each with what counts if it is not declared.
SAID = {
    **dict.fromkeys(("signed", "narrow_range", "float_to_int_impl_type", "requires_input_scale")),
    "quantize_zero_point": True,
}


@dataclass(frozen=True)
class QuantMetadata:
    """The numbers of a quantizer as its injector declares them, read when it is assembled; static in a proxy.

    Attributes:
        signed: whether they have a sign; None if the injector does not say.
        narrow_range: whether one of them is left out.
        rounding_mode: the name of the rounding.
        group_size: elements that share a scale; None if there are no groups.
        group_dim: the axis that is cut into groups.
        requires_input_scale: of a bias: whether its scale comes in with the input.
        requires_quant_input: of a weight: whether its quantizer is called with the format of the layer's input.
        whole_zero_points: whether zero points are integers.
    """

    signed: bool | None
    narrow_range: bool | None
    rounding_mode: str | None
    group_size: int | None = None
    group_dim: int | None = None
    requires_input_scale: bool = False
    whole_zero_points: bool = True
    requires_quant_input: bool = False


def quant_metadata_of(binding: Binding, handed: Mapping[str, Any]) -> QuantMetadata:
    """What an injector declares of its integers; None for what it does not declare.

    Args:
        binding: the injector.
        handed: what an assembly is handed.
    """
    said = binding.once(_plain_metadata)
    if said is None:
        names = filter(binding.declares, SAID)
        said = _metadata(binding.injector, {name: binding.resolve(name, **handed) for name in names})
    return said


def _plain_metadata(injector: type[ExtendedInjector]) -> QuantMetadata | None:
    """What an injector declares whatever the layer; None if something is computed."""
    specs = {name: injector.__dependencies__[name] for name in SAID if name in injector}
    if any(spec.kind != "PLAIN" for spec in specs.values()):
        return None
    return _metadata(injector, {name: spec.target for name, spec in specs.items()})


def _metadata(injector: type[ExtendedInjector], declared: Mapping[str, object]) -> QuantMetadata:
    said = {**SAID, **declared}
    for name in ("signed", "narrow_range"):
        flag = said[name]
        unsaid = flag is None and (name == "signed" or name not in declared)
        # 'False' would count as true, and None as false.
        said[name] = None if unsaid else check.flag(flag, injector.__name__, name)
    rounding = said["float_to_int_impl_type"]
    # Zero points of a `scale_shift_zero_point_impl` are what it makes of a distance.
    shifted = "scale_shift_zero_point_impl" in injector
    return QuantMetadata(
        said["signed"],
        said["narrow_range"],
        rounding_mode=None if rounding is None else str(rounding).upper(),
        requires_input_scale=bool(said["requires_input_scale"]),
        whole_zero_points=not shifted and bool(said["quantize_zero_point"]),
    )
