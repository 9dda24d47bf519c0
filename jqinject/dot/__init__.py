"""Quantized contractions."""

from .output import contraction_bit_width as contraction_bit_width
from .output import contraction_output as contraction_output
