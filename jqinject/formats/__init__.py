"""Other libraries' checkpoints: what is in them, their numbers, and models with these.

`inspect_checkpoint` lists arrays (`python -m jqinject inspect`); `read_checkpoint` opens a quantized checkpoint, in any
of the layouts of `layouts`; `load` puts it into a model; `load_brevitas` does so with a Brevitas state dict; `save`
writes a frozen model. Only these three import JAX.
"""

import importlib as _importlib
import typing as _typing

from jqinject.formats.checkpoint import Checkpoint as Checkpoint
from jqinject.formats.checkpoint import read_checkpoint as read_checkpoint
from jqinject.formats.checkpoint_errors import CheckpointError as CheckpointError
from jqinject.formats.checkpoint_errors import MissingLibraryError as MissingLibraryError
from jqinject.formats.contents import Contents as Contents
from jqinject.formats.contents import StoredArray as StoredArray
from jqinject.formats.loading.loading_plan import Assignment as Assignment
from jqinject.formats.loading.loading_plan import IdleNameWarning as IdleNameWarning
from jqinject.formats.loading.loading_plan import LoadPlan as LoadPlan
from jqinject.formats.loading.name_tables import FUSED as FUSED
from jqinject.formats.loading.name_tables import TUNIX as TUNIX
from jqinject.formats.loading.name_tables import TUNIX_GEMMA3 as TUNIX_GEMMA3
from jqinject.formats.loading.parameter_names import Name as Name
from jqinject.formats.readers import inspect_checkpoint as inspect_checkpoint
from jqinject.formats.stored_matrix import InputFormat as InputFormat
from jqinject.formats.stored_matrix import NumberFormat as NumberFormat
from jqinject.formats.stored_matrix import Numbers as Numbers
from jqinject.formats.stored_matrix import StoredMatrix as StoredMatrix

if _typing.TYPE_CHECKING:
    from jqinject.formats.loading.brevitas import load_brevitas as load_brevitas
    from jqinject.formats.loading.load import DequantizedWarning as DequantizedWarning
    from jqinject.formats.loading.load import explain_load as explain_load
    from jqinject.formats.loading.load import load as load
    from jqinject.formats.saving.save import save as save
else:
    _LOAD = "jqinject.formats.loading.load"
    _LATER = {name: _LOAD for name in ("DequantizedWarning", "explain_load", "load")}
    _LATER["load_brevitas"] = "jqinject.formats.loading.brevitas"
    _LATER["save"] = "jqinject.formats.saving.save"

    def __getattr__(name: str) -> _typing.Any:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(_importlib.import_module(_LATER[name]), name)
