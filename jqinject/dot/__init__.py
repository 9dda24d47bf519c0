"""Quantized contractions."""

from .float8 import contracts_in_float8 as contracts_in_float8
from .float8 import float8_dot_general as float8_dot_general
from .output import contraction_bit_width as contraction_bit_width
from .output import contraction_output as contraction_output
