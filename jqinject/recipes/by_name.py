"""The passes and solvers that a file may name."""

from __future__ import annotations

from jqinject.recipes.passes.allocate_bits import AllocateBits
from jqinject.recipes.passes.awq import AWQ
from jqinject.recipes.passes.correct_batch_norm import CorrectBatchNorm
from jqinject.recipes.passes.correct_biases import CorrectBiases
from jqinject.recipes.passes.equalize import Equalize
from jqinject.recipes.passes.fold_batch_norm import FoldBatchNorm
from jqinject.recipes.passes.fold_norms import FoldNorms
from jqinject.recipes.passes.learned_rotation import LearnedRotation
from jqinject.recipes.passes.low_rank import LowRank
from jqinject.recipes.passes.rotate import Rotate
from jqinject.recipes.passes.smooth_quant import SmoothQuant
from jqinject.recipes.passes.solve import Solve
from jqinject.recipes.passes.split_channels import SplitChannels
from jqinject.recipes.passes.tweak_norms import TweakNorms
from jqinject.recipes.solvers.auto_round import AutoRound
from jqinject.recipes.solvers.clip import Clip
from jqinject.recipes.solvers.corrections import QEP, MagR
from jqinject.recipes.solvers.gpfq import GPFQ, Qronos
from jqinject.recipes.solvers.gptq import GPTQ, RTN
from jqinject.recipes.solvers.half_quadratic import HQO
from jqinject.recipes.solvers.learned_rounding import LearnedRounding

PASSES = (
    *(
        AWQ,
        AllocateBits,
        CorrectBatchNorm,
        CorrectBiases,
        Equalize,
        FoldBatchNorm,
        FoldNorms,
        LearnedRotation,
    ),
    *(LowRank, Rotate, SmoothQuant, Solve, SplitChannels, TweakNorms),
)
SOLVERS = (GPFQ, GPTQ, HQO, QEP, RTN, AutoRound, Clip, LearnedRounding, MagR, Qronos)
BY_NAME: dict[str, type] = {kind.__name__: kind for kind in (*PASSES, *SOLVERS)}
