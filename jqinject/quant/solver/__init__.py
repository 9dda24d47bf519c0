"""Solvers: injectors that turn choices by enum into components. The last base of a quantizer."""

from jqinject.quant.solver.act import ActQuantSolver as ActQuantSolver
from jqinject.quant.solver.bias import BiasQuantSolver as BiasQuantSolver
from jqinject.quant.solver.grad import GradQuantSolver as GradQuantSolver
from jqinject.quant.solver.trunc import TruncQuantSolver as TruncQuantSolver
from jqinject.quant.solver.weight import WeightQuantSolver as WeightQuantSolver
