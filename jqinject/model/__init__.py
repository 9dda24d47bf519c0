"""Whole models: loading, re-assembly, and training steps whose statistics are right."""

from jqinject.model.autodiff import grad as grad
from jqinject.model.autodiff import value_and_grad as value_and_grad
from jqinject.model.loading import load_state as load_state
from jqinject.model.reassembly import reassemble as reassemble
from jqinject.model.report import LoadReport as LoadReport
from jqinject.model.report import ReassemblyReport as ReassemblyReport
from jqinject.model.steps import begin_step as begin_step
from jqinject.model.steps import end_step as end_step
