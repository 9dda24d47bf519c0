"""The warning of functions that change layers, and cannot change parameters that a model contracts by itself."""

from __future__ import annotations

import warnings
from typing import Any

from jqinject.model.frozen_weights import parameter_sites
from jqinject.model.static_ranges import listed
from jqinject.model.walk import ModelIndex


class SitesLeftWarning(UserWarning):
    """A function on layers left quantized parameters, which the model contracts by itself, as they are."""


def warn_of_sites_left(model: Any, caller: str, why: str) -> None:
    """Name the quantized parameters that a function leaves as they are.

    Args:
        model: a quantized NNX module.
        caller: the function's name.
        why: it does so.

    Warns:
        SitesLeftWarning: there are some.
    """
    found = [
        ".".join((*path, name))
        for path, _, name, site in parameter_sites(ModelIndex(model))
        if site.weight_quant is not None and site.weight_quant.is_quant_enabled
    ]
    if found:
        text = f"{caller} changes layers, and leaves {listed(tuple(found))} as they are: {why}"
        warnings.warn(text, SitesLeftWarning, stacklevel=3)
