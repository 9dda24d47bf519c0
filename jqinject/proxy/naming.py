"""Notes on errors: which quantizer of which layer failed, and which of its parts are the user's own."""

from __future__ import annotations

from typing import Any

from jqinject.core import PackableResult, QuantResult, components_in
from jqinject.proxy.ranges import name_of

_LIBRARY = __name__.partition(".")[0]


def is_ours(cls: type) -> bool:
    """Whether a class is of this library."""
    return cls.__module__.partition(".")[0] == _LIBRARY


def checked_quantizer(quantizer: Any, name: str) -> Any:
    """What an injector assembles as `tensor_quant`: a component, or None for no quantization.

    Args:
        quantizer: what was assembled.
        name: the injector's.

    Raises:
        TypeError: it is something else.
    """
    if quantizer is not None and (isinstance(quantizer, type) or not callable(quantizer)):
        shown = f"the class {quantizer.__name__}" if isinstance(quantizer, type) else f"{quantizer!r:.80}"
        raise TypeError(
            f"{name}: tensor_quant must be a component that quantizes, or None for no quantization, got {shown}.\n"
            "  cure: leave it to the quantizer, and override what it is made of (bit_width, scaling_impl, ...); or "
            "declare a class of your own whose instances return a QuantResult"
        )
    return quantizer


def packable(result: Any, quantizer: Any) -> PackableResult:
    """What a quantizer returned, as a result that becomes a QuantTensor; four values of a user's own as integers.

    Args:
        result: the result.
        quantizer: what returned it.

    Raises:
        TypeError: it is not a result.
    """
    if isinstance(result, PackableResult):
        return result
    if isinstance(result, tuple | list) and len(result) == 4:
        return QuantResult(*result)
    got = f"{type(result).__name__} of {len(result)}" if isinstance(result, tuple | list) else _shown(result)
    raise TypeError(
        f"tensor_quant = {type(quantizer).__name__} must return a QuantResult (value, scale, zero_point, bit_width), "
        f"got {got}.\n  cure: return QuantResult(value, scale, jnp.zeros(()), bit_width)"
    )


def note_quantizer(error: Exception, proxy: Any) -> None:
    """Add to an error which quantizer was at work."""
    note = f"in {name_of(proxy)}{_own_parts(proxy.tensor_quant)}"
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def _own_parts(quantizer: Any) -> str:
    """The components among a quantizer's that are not the library's, with the names they stand under."""
    found: dict[str, None] = {}
    if quantizer is not None and not is_ours(type(quantizer)):
        found[f"tensor_quant = {type(quantizer).__name__}"] = None
    for component in components_in(quantizer):
        for name, part in vars(component).items():
            if callable(part) and not isinstance(part, type) and not _foreign(type(part)):
                found[f"{name} = {type(part).__name__}"] = None
    return f", with your {', '.join(found)}" if found else ""


def _foreign(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in (
        _LIBRARY,
        "builtins",
        "functools",
        "jax",
        "jaxlib",
        "flax",
        "numpy",
    )


def _shown(result: Any) -> str:
    shape = getattr(result, "shape", None)
    return f"{type(result).__name__}" + (f" of shape {shape}" if shape is not None else "")
