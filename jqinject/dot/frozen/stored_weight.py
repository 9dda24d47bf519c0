"""Modules whose Variables are the numbers of a frozen weight."""

from __future__ import annotations

from jqinject.core.component import InnerModule
from jqinject.dot.frozen.frozen_form import FrozenForm


class StoredWeight(InnerModule):
    """Abstract: a module whose Variables are the numbers of the frozen weight of the module that holds it.

    Attributes:
        form: of the weight.
    """

    form: FrozenForm
