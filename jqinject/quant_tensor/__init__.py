"""The value that flows between quantized layers: a float array that knows its integers."""

from typing import TypeAlias

import jax

from jqinject.quant_tensor.arithmetic import DifferentScalesWarning as DifferentScalesWarning
from jqinject.quant_tensor.arithmetic import concatenate as concatenate
from jqinject.quant_tensor.array_methods import as_array as as_array
from jqinject.quant_tensor.group_layout import Groups as Groups
from jqinject.quant_tensor.groupwise_tensors import (
    GroupwiseCodebookQuantTensor as GroupwiseCodebookQuantTensor,
)
from jqinject.quant_tensor.groupwise_tensors import GroupwiseFloatQuantTensor as GroupwiseFloatQuantTensor
from jqinject.quant_tensor.groupwise_tensors import GroupwiseIntQuantTensor as GroupwiseIntQuantTensor
from jqinject.quant_tensor.groupwise_tensors import GroupwiseQuantTensor as GroupwiseQuantTensor
from jqinject.quant_tensor.groupwise_tensors import grouped_integers as grouped_integers
from jqinject.quant_tensor.groupwise_tensors import grouped_minifloats as grouped_minifloats
from jqinject.quant_tensor.groupwise_tensors import in_groups as in_groups
from jqinject.quant_tensor.groupwise_tensors import in_pieces as in_pieces
from jqinject.quant_tensor.groupwise_tensors import is_grouped as is_grouped
from jqinject.quant_tensor.groupwise_tensors import is_quantized as is_quantized
from jqinject.quant_tensor.groupwise_tensors import on_integers as on_integers
from jqinject.quant_tensor.groupwise_tensors import on_minifloats as on_minifloats
from jqinject.quant_tensor.groupwise_tensors import on_table as on_table
from jqinject.quant_tensor.groupwise_tensors import smaller_groups as smaller_groups
from jqinject.quant_tensor.public_tensors import CodebookQuantTensor as CodebookQuantTensor
from jqinject.quant_tensor.public_tensors import FloatQuantTensor as FloatQuantTensor
from jqinject.quant_tensor.public_tensors import IntQuantTensor as IntQuantTensor
from jqinject.quant_tensor.quantized import CONTRACTED as CONTRACTED
from jqinject.quant_tensor.quantized import QuantTensor as QuantTensor
from jqinject.quant_tensor.shaping import adaptive_avg_pool as adaptive_avg_pool
from jqinject.quant_tensor.shaping import avg_pool as avg_pool
from jqinject.quant_tensor.shaping import expand_dims as expand_dims
from jqinject.quant_tensor.shaping import max_pool as max_pool
from jqinject.quant_tensor.shaping import pad as pad
from jqinject.quant_tensor.shaping import relu as relu
from jqinject.quant_tensor.shaping import repeat as repeat
from jqinject.quant_tensor.shaping import reshape as reshape
from jqinject.quant_tensor.shaping import squeeze as squeeze
from jqinject.quant_tensor.shaping import swapaxes as swapaxes
from jqinject.quant_tensor.shaping import transpose as transpose
from jqinject.quant_tensor.tensor_fields import Levels as Levels
from jqinject.quant_tensor.validity import BitWidth as BitWidth
from jqinject.quant_tensor.validity import ceil_log2 as ceil_log2
from jqinject.quant_tensor.validity import integer_bounds as integer_bounds
from jqinject.quant_tensor.validity import is_concrete as is_concrete
from jqinject.quant_tensor.validity import known_different as known_different
from jqinject.quant_tensor.validity import known_nonzero as known_nonzero
from jqinject.quant_tensor.validity import larger as larger
from jqinject.quant_tensor.validity import pre_round_integers as pre_round_integers
from jqinject.quant_tensor.validity import product_sum_bit_width as product_sum_bit_width
from jqinject.quant_tensor.validity import sum_bit_width as sum_bit_width

AnyQuantTensor: TypeAlias = QuantTensor
Operand: TypeAlias = jax.Array | QuantTensor
