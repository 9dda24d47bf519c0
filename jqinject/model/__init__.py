"""Whole models: loading and re-assembly."""

from jqinject.model.loading import load_state as load_state
from jqinject.model.reassembly import reassemble as reassemble
from jqinject.model.report import LoadReport as LoadReport
from jqinject.model.report import ReassemblyReport as ReassemblyReport
