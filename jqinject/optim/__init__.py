"""Optimizers whose states take 4 or 8 bits a number, as `optax.GradientTransformation`s.

`adamw8bit` and its kin are compositions of optax's own: `low_bit_states` stores what another transformation keeps, in
blocks that share a scale, and `round_stochastically` rounds bfloat16 parameters so that small updates are not lost.
"""

from jqinject.optim.aliases import adam8bit as adam8bit
from jqinject.optim.aliases import adamw4bit as adamw4bit
from jqinject.optim.aliases import adamw8bit as adamw8bit
from jqinject.optim.aliases import adamw_fp8 as adamw_fp8
from jqinject.optim.aliases import lion8bit as lion8bit
from jqinject.optim.aliases import sgd8bit as sgd8bit
from jqinject.optim.block_format import BlockFloat8 as BlockFloat8
from jqinject.optim.block_format import BlockFormat as BlockFormat
from jqinject.optim.block_format import BlockTable as BlockTable
from jqinject.optim.block_format import StoredBlocks as StoredBlocks
from jqinject.optim.block_format import dynamic_table as dynamic_table
from jqinject.optim.block_format import linear_table as linear_table
from jqinject.optim.low_bit_states import LowBitMoment as LowBitMoment
from jqinject.optim.low_bit_states import low_bit_states as low_bit_states
from jqinject.optim.rounded_updates import round_stochastically as round_stochastically
