"""What a rule with a scheme asks of an operation outside of layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jqinject.dot.schemes.weight_operand import (
    RAGGED,
    quantizes_backward,
    ragged_input_quantizer,
    rounds_weight_again,
    weight_quantizer,
    why_not_stored,
)
from jqinject.program import Choice, Site, dotted


def by_scheme(scheme: Any, operation: str, weight_path: tuple[Any, ...]) -> Choice | None:
    """The quantizers of an operation by a scheme; None of a look-up, which is no contraction.

    Args:
        scheme: the scheme.
        operation: the operation's name.
        weight_path: of the parameter that it contracts; empty if there is none.

    Raises:
        ValueError: a ragged contraction, by a scheme that does more than it can.
    """
    if operation == "take":
        return None
    if not weight_path:
        return Choice(scheme=scheme)
    parameter = weight_quantizer(scheme, operation)
    if operation != RAGGED or quantizes_backward(scheme):
        return Choice(scheme=scheme, parameter=parameter, rounds_again=rounds_weight_again(scheme))
    try:
        return Choice(parameter, ragged_input_quantizer(scheme), parameter=parameter)
    except ValueError as error:
        raise ValueError(f"{dotted(weight_path)}: {error}") from None


def unstored_weights(sites: Iterable[Site]) -> tuple[tuple[str, str], ...]:
    """The parameters that schemes quantize within contractions, and why they cannot be stored for serving."""
    within = (site for site in sites if site.contraction and site.weight_path and not site.is_weight)
    known = {dotted(site.weight_path): why_not_stored(site.quantizer, site.contraction) for site in within}
    return tuple((name, why) for name, why in known.items() if why)
