"""Quantizers between the operations of a model: its traced program is run with quantizers inserted."""

from jqinject.program.call import CALL as CALL
from jqinject.program.call import Call as Call
from jqinject.program.call import Method as Method
from jqinject.program.call import SplitCall as SplitCall
from jqinject.program.call import arguments_of as arguments_of
from jqinject.program.call import checked_method as checked_method
from jqinject.program.call import compiled as compiled
from jqinject.program.call import with_copied_modules as with_copied_modules
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
from jqinject.program.policy import other_axes as other_axes
from jqinject.program.quantizers import Quantizers as Quantizers
from jqinject.program.tracked_value import Tracked as Tracked
