"""Solvers: one injector for each role, which turns choices by enum into components. A base of every quantizer."""

from jqinject.quant.solver.roles import ActQuantSolver as ActQuantSolver
from jqinject.quant.solver.roles import BiasQuantSolver as BiasQuantSolver
from jqinject.quant.solver.roles import GradQuantSolver as GradQuantSolver
from jqinject.quant.solver.roles import TruncQuantSolver as TruncQuantSolver
from jqinject.quant.solver.roles import WeightQuantSolver as WeightQuantSolver
