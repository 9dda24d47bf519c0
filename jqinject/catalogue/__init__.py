"""Finds and explains the ready-made quantizers: `python -m jqinject list`, `explain NAME`, `show`.

`index` and `catalogue_command` import no JAX. `entries` and `examples` read the quantizers
themselves, `variants` measures them with other choices, and `explorer` makes a page of these.
"""

from jqinject.catalogue.index import Entry as Entry
from jqinject.catalogue.index import all_entries as all_entries
from jqinject.catalogue.index import entry_of as entry_of
from jqinject.catalogue.index import find as find
