"""Other libraries' checkpoints: what is in them, and their numbers.

`inspect_checkpoint` lists the arrays of a checkpoint (`python -m jqinject inspect`). `read_checkpoint` opens a quantized one,
in the layouts of `layouts`, as `StoredMatrix`es.
"""

from jqinject.formats.checkpoint import Checkpoint as Checkpoint
from jqinject.formats.checkpoint import read_checkpoint as read_checkpoint
from jqinject.formats.contents import Contents as Contents
from jqinject.formats.contents import StoredArray as StoredArray
from jqinject.formats.errors import CheckpointError as CheckpointError
from jqinject.formats.errors import MissingLibraryError as MissingLibraryError
from jqinject.formats.readers import inspect_checkpoint as inspect_checkpoint
from jqinject.formats.stored_matrix import InputFormat as InputFormat
from jqinject.formats.stored_matrix import NumberFormat as NumberFormat
from jqinject.formats.stored_matrix import Numbers as Numbers
from jqinject.formats.stored_matrix import StoredMatrix as StoredMatrix
