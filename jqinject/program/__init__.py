"""Quantizers between the operations of a model: its traced program is run with quantizers inserted."""

from jqinject.program.class_swap import change_class as change_class
from jqinject.program.intercept import Around as Around
from jqinject.program.intercept import intercept as intercept
from jqinject.program.model import HELD as HELD
from jqinject.program.model import OpQuantizers as OpQuantizers
from jqinject.program.model import QuantizedProgram as QuantizedProgram
from jqinject.program.model import find_sites as find_sites
from jqinject.program.model import quantized_class as quantized_class
from jqinject.program.operations import OPERATIONS as OPERATIONS
from jqinject.program.operations import Kind as Kind
from jqinject.program.operations import Operation as Operation
from jqinject.program.operations import known_operations as known_operations
from jqinject.program.policy import Choice as Choice
from jqinject.program.policy import Policy as Policy
from jqinject.program.policy import Site as Site
from jqinject.program.policy import WeightUse as WeightUse
from jqinject.program.policy import other_axes as other_axes
from jqinject.program.quantizers import Quantizers as Quantizers
from jqinject.program.tracked_value import Tracked as Tracked
from jqinject.program.weights import dotted as dotted
