"""Pure numerics on arrays: no modules, no state, JAX only."""

from jqinject.ops.accumulator_bounds import get_upper_bound_on_l1_norm as get_upper_bound_on_l1_norm
from jqinject.ops.accumulator_bounds import (
    get_upper_bound_on_zero_centered_l1_norm as get_upper_bound_on_zero_centered_l1_norm,
)
from jqinject.ops.accumulator_bounds import integer_budget as integer_budget
from jqinject.ops.accumulator_bounds import within_budget as within_budget
from jqinject.ops.clamps import scalar_clamp_min_ste as scalar_clamp_min_ste
from jqinject.ops.clamps import scalar_clamp_ste as scalar_clamp_ste
from jqinject.ops.clamps import signed_clamp_min_ste as signed_clamp_min_ste
from jqinject.ops.clamps import tensor_clamp as tensor_clamp
from jqinject.ops.clamps import tensor_clamp_ste as tensor_clamp_ste
from jqinject.ops.fake_quant import fake_quantize as fake_quantize
from jqinject.ops.float8_cast import FLOAT8_DTYPES as FLOAT8_DTYPES
from jqinject.ops.float8_cast import to_float8 as to_float8
from jqinject.ops.float_grid import FloatGrid as FloatGrid
from jqinject.ops.float_grid import quantize_on_grid as quantize_on_grid
from jqinject.ops.grid import NF4 as NF4
from jqinject.ops.grid import Codebook as Codebook
from jqinject.ops.grid import Grid as Grid
from jqinject.ops.grid import IntGrid as IntGrid
from jqinject.ops.grid import TableGrid as TableGrid
from jqinject.ops.grid import half_integers as half_integers
from jqinject.ops.grid import normal_table as normal_table
from jqinject.ops.groups import join_groups as join_groups
from jqinject.ops.groups import split_groups as split_groups
from jqinject.ops.minifloat import max_available_float as max_available_float
from jqinject.ops.minifloat import max_float as max_float
from jqinject.ops.minifloat import max_mantissa as max_mantissa
from jqinject.ops.minifloat import to_float_grid as to_float_grid
from jqinject.ops.packing import to_bfloat16_stochastically as to_bfloat16_stochastically
from jqinject.ops.power import by_reciprocal as by_reciprocal
from jqinject.ops.power import divide as divide
from jqinject.ops.power import exp2 as exp2
from jqinject.ops.power import log2 as log2
from jqinject.ops.power import max_int as max_int
from jqinject.ops.power import min_int as min_int
from jqinject.ops.ste import abs_binary_sign_grad as abs_binary_sign_grad
from jqinject.ops.ste import binary_sign_ste as binary_sign_ste
from jqinject.ops.ste import ceil_ste as ceil_ste
from jqinject.ops.ste import dpu_round_ste as dpu_round_ste
from jqinject.ops.ste import floor_ste as floor_ste
from jqinject.ops.ste import round_half_to_zero_ste as round_half_to_zero_ste
from jqinject.ops.ste import round_ste as round_ste
from jqinject.ops.ste import round_to_zero_ste as round_to_zero_ste
from jqinject.ops.ste import stochastic_round_ste as stochastic_round_ste
from jqinject.ops.ste import straight_through as straight_through
from jqinject.ops.ste import ternary_sign_ste as ternary_sign_ste
from jqinject.ops.ste import with_gradient_of as with_gradient_of
