"""Finds and explains the ready-made quantizers: `python -m jqinject list`, `explain NAME`, `catalogue FOLDER`."""

from jqinject.catalogue.entries import Entry as Entry
from jqinject.catalogue.entries import all_entries as all_entries
from jqinject.catalogue.entries import entry_of as entry_of
from jqinject.catalogue.entries import find as find
from jqinject.catalogue.pages import write_catalogue as write_catalogue
