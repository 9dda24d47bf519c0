"""The value that flows between quantized layers: a float array that knows its integers."""

from .base import QuantTensor as QuantTensor
from .base import as_array as as_array
from .bit_width import BitWidth as BitWidth
from .bit_width import ceil_log2 as ceil_log2
from .bit_width import larger as larger
from .bit_width import product_sum_bit_width as product_sum_bit_width
from .bit_width import sum_bit_width as sum_bit_width
from .concatenate import concatenate as concatenate
from .concrete import is_concrete as is_concrete
from .concrete import known_different as known_different
from .concrete import known_nonzero as known_nonzero
from .float_quant_tensor import FloatQuantTensor as FloatQuantTensor
from .int_quant_tensor import IntQuantTensor as IntQuantTensor
from .pooling import adaptive_avg_pool as adaptive_avg_pool
from .pooling import avg_pool as avg_pool
from .pooling import max_pool as max_pool
from .pooling import relu as relu
from .shaping import expand_dims as expand_dims
from .shaping import pad as pad
from .shaping import repeat as repeat
from .shaping import reshape as reshape
from .shaping import squeeze as squeeze
from .shaping import swapaxes as swapaxes
from .shaping import transpose as transpose
from .validity import holds_integers as holds_integers
from .validity import integer_bounds as integer_bounds
