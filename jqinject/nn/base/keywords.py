"""Whose keywords are whose: of the Flax layer, of the quantizers, or of nobody."""

import functools
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from jqinject.inject.errors import did_you_mean, lines
from jqinject.nn.base.slots import Slot


@functools.cache
def arguments_of(layer: type) -> tuple[str, ...]:
    """The names that a class takes as arguments, those that it passes on to its bases included."""
    found: dict[str, None] = {}
    for cls in layer.__mro__:
        if "__init__" in vars(cls):
            parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
            found |= dict.fromkeys(p.name for p in parameters if p.kind is not p.VAR_KEYWORD)
            if all(p.kind is not p.VAR_KEYWORD for p in parameters):
                break
    return tuple(found)


def flax_arguments(parent: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """What the constructor of a Flax layer takes of a layer's own arguments, by name.

    Args:
        parent: the class of the Flax layer.
        given: the `locals()` of the layer's `__init__`, at its beginning.
    """
    return {name: given[name] for name in arguments_of(parent) if name in given}


def split_overrides(
    layer: Any, slots: Iterable[Slot], overrides: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Overrides by the argument whose quantizer they are for, without their prefixes.

    Raises:
        TypeError: a keyword that starts with no prefix of the layer; names the nearest argument.
    """
    ordered = sorted(slots, key=lambda slot: -len(slot.prefix))
    found: dict[str, dict[str, Any]] = {slot.argument: {} for slot in ordered}
    for keyword, override in overrides.items():
        for slot in ordered:
            if keyword.startswith(slot.prefix):
                found[slot.argument][keyword.removeprefix(slot.prefix)] = override
                break
        else:
            known = [*arguments_of(type(layer)), *found]
            prefixes = ", ".join(dict.fromkeys(slot.prefix for slot in ordered))
            hint = did_you_mean(keyword, known)
            raise TypeError(
                lines(
                    f"{type(layer).__name__} takes no argument {keyword!r}: overrides of quantizers start with one of "
                    f"{prefixes}",
                    hint
                    or f"{type(layer).__name__}.overrides() lists them; a name of your own: Mine.let({keyword}=...)",
                )
            )
    return found
