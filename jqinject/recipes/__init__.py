"""Algorithms after training, as passes over a model that compose."""

from jqinject.recipes.allocation import cheapest_errors as cheapest_errors
from jqinject.recipes.passes.allocate_bits import AllocateBits as AllocateBits
from jqinject.recipes.passes.awq import AWQ as AWQ
from jqinject.recipes.passes.correct_batch_norm import CorrectBatchNorm as CorrectBatchNorm
from jqinject.recipes.passes.correct_biases import CorrectBiases as CorrectBiases
from jqinject.recipes.passes.equalize import Equalize as Equalize
from jqinject.recipes.passes.smooth_quant import SmoothQuant as SmoothQuant
from jqinject.recipes.passes.solve import NotSolved as NotSolved
from jqinject.recipes.passes.solve import Solve as Solve
from jqinject.recipes.passes.solve import Solved as Solved
from jqinject.recipes.recipe import Recipe as Recipe
from jqinject.recipes.recipe import Result as Result
from jqinject.recipes.solvers.auto_round import AutoRound as AutoRound
from jqinject.recipes.solvers.corrections import QEP as QEP
from jqinject.recipes.solvers.corrections import MagR as MagR
from jqinject.recipes.solvers.gpfq import GPFQ as GPFQ
from jqinject.recipes.solvers.gpfq import Qronos as Qronos
from jqinject.recipes.solvers.gptq import GPTQ as GPTQ
from jqinject.recipes.solvers.gptq import RTN as RTN
from jqinject.recipes.solvers.half_quadratic import HQO as HQO
from jqinject.recipes.solvers.learned_rounding import LearnedRounding as LearnedRounding
from jqinject.recipes.solvers.solver import Problem as Problem
from jqinject.recipes.solvers.solver import Sharing as Sharing
from jqinject.recipes.solvers.solver import Solution as Solution
from jqinject.recipes.solvers.solver import Solver as Solver
