"""Exports a quantized model as a StableHLO program, an ONNX file or a LiteRT file."""

from jqinject.export._litert import tflite as tflite
from jqinject.export._onnx import onnx as onnx
from jqinject.export._stablehlo import stablehlo as stablehlo
