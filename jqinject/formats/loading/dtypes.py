"""The dtypes of a checkpoint's floats beside those of the model's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from jqinject.formats.checkpoint import Checkpoint
from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.loading.loading_plan import Assignment, LoadPlan


def rounded(plan: LoadPlan, dtypes: Mapping[str, np.dtype[Any]], checkpoint: Checkpoint) -> LoadPlan:
    """A plan whose labels say where floats are rounded to the dtype of a parameter.

    Args:
        plan: the plan.
        dtypes: of the parameters, by their paths.
        checkpoint: the checkpoint.

    Raises:
        CheckpointError: integers are for a parameter of floats.
    """

    def labelled(each: Assignment) -> Assignment:
        own = dtypes[each.path]
        name = each.sources[0][0]
        stored = None if each.is_low else checkpoint.tensors[name].dtype
        if stored is not None and own.kind not in "iub" and stored.kind in "iub":
            raise CheckpointError(
                f"{name} is {stored.name}, and {each.path} takes floats ({own.name}).\n"
                "  cure: settings that say what its integers mean; or ignore, if nothing needs it"
            )
        if stored is None or own.itemsize >= stored.itemsize:
            return each
        return replace(each, label=f"{stored.name}, rounded to {own.name}")

    return replace(plan, assignments=tuple(map(labelled, plan.assignments)))
