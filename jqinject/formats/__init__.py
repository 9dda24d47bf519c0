"""Other libraries' checkpoint files: what is in them.

`contents` is the answer, `readers` asks the libraries, `command` is `python -m jqinject inspect`.
"""

from jqinject.formats.contents import Contents as Contents
from jqinject.formats.contents import StoredArray as StoredArray
from jqinject.formats.readers import MissingLibraryError as MissingLibraryError
from jqinject.formats.readers import inspect_checkpoint as inspect_checkpoint
