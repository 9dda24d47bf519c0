"""A quantized model outside of Python: as a StableHLO program, as an ONNX file."""

from jqinject.export._onnx import onnx as onnx
from jqinject.export._stablehlo import stablehlo as stablehlo
