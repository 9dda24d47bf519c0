"""Other libraries' checkpoints: what is in them, their numbers, and models with these.

`inspect_checkpoint` lists arrays (`python -m jqinject inspect`), without JAX; `read_checkpoint` opens a quantized
checkpoint, in any of the layouts of `layouts`; `load` puts it into a model; `load_brevitas` does so with a Brevitas
state dict; `attention_from_torch` and `recurrent_state_from_torch` turn float states of torch into Flax's; `save`
writes a frozen model.
"""

import importlib as _importlib
import typing as _typing

from jqinject.formats.checkpoint_errors import CheckpointError as CheckpointError
from jqinject.formats.checkpoint_errors import MissingLibraryError as MissingLibraryError
from jqinject.formats.contents import Contents as Contents
from jqinject.formats.contents import StoredArray as StoredArray
from jqinject.formats.contents import inspect_checkpoint as inspect_checkpoint

if _typing.TYPE_CHECKING:
    from jqinject.formats.checkpoint import Checkpoint as Checkpoint
    from jqinject.formats.checkpoint import read_checkpoint as read_checkpoint
    from jqinject.formats.loading.brevitas import load_brevitas as load_brevitas
    from jqinject.formats.loading.load import DequantizedWarning as DequantizedWarning
    from jqinject.formats.loading.load import explain_load as explain_load
    from jqinject.formats.loading.load import load as load
    from jqinject.formats.loading.loading_plan import Assignment as Assignment
    from jqinject.formats.loading.loading_plan import IdleNameWarning as IdleNameWarning
    from jqinject.formats.loading.loading_plan import LoadPlan as LoadPlan
    from jqinject.formats.loading.parameter_names import FUSED as FUSED
    from jqinject.formats.loading.parameter_names import TUNIX as TUNIX
    from jqinject.formats.loading.parameter_names import TUNIX_GEMMA3 as TUNIX_GEMMA3
    from jqinject.formats.loading.parameter_names import Name as Name
    from jqinject.formats.saving.save import UnsharedScaleWarning as UnsharedScaleWarning
    from jqinject.formats.saving.save import save as save
    from jqinject.formats.stored_matrix import InputFormat as InputFormat
    from jqinject.formats.stored_matrix import Matrix as Matrix
    from jqinject.formats.stored_matrix import StoredMatrix as StoredMatrix
    from jqinject.formats.torch_state import attention_from_torch as attention_from_torch
    from jqinject.formats.torch_state import recurrent_state_from_torch as recurrent_state_from_torch
else:
    _PLACES = {
        "checkpoint": ("Checkpoint", "read_checkpoint"),
        "loading.brevitas": ("load_brevitas",),
        "loading.load": ("DequantizedWarning", "explain_load", "load"),
        "loading.loading_plan": ("Assignment", "IdleNameWarning", "LoadPlan"),
        "loading.parameter_names": ("FUSED", "TUNIX", "TUNIX_GEMMA3", "Name"),
        "saving.save": ("UnsharedScaleWarning", "save"),
        "stored_matrix": ("InputFormat", "Matrix", "StoredMatrix"),
        "torch_state": ("attention_from_torch", "recurrent_state_from_torch"),
    }
    _PLACE_OF = {name: f"{__name__}.{place}" for place, names in _PLACES.items() for name in names}

    def __getattr__(name: str) -> object:
        if name not in _PLACE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(_importlib.import_module(_PLACE_OF[name]), name)
