"""Exports a quantized model as a StableHLO program or an ONNX file."""

from jqinject.export._onnx import onnx as onnx
from jqinject.export._stablehlo import stablehlo as stablehlo
