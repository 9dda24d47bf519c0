"""Writes the biases and ReLUs of an ONNX graph as runtimes look for them, so that they fuse integer operations.

jax2onnx writes a convolution, whose channels come last in JAX, as Transpose, Conv, Transpose, Add, and a ReLU as Max.
onnxruntime makes a QLinearConv or QGemm of a Conv or Gemm that has its bias as an input.
"""

import math
from typing import Any, TypeAlias

import numpy as np

#: `onnx_ir.Node`, of an optional library.
Node: TypeAlias = Any
#: `onnx_ir.Value`.
Value: TypeAlias = Any
#: `onnx.ModelProto`.
Proto: TypeAlias = Any
#: A module of the library.
Module: TypeAlias = Any

CHANNELS = 1  # the axis of the channels of a Conv's result
MOVING = ("Transpose", "Reshape")


def fused(proto: Proto, ir: Module, passes: Module) -> Proto:
    """Return the model with each bias as an input of its Conv or Gemm, and `Max(x, 0)` as `Relu(x)`.

    Args:
        proto: an `onnx.ModelProto`.
        ir: the module `onnx_ir`.
        passes: the module `onnx_ir.passes.common`.
    """
    model = ir.from_proto(proto)
    for node in list(model.graph):
        if node.op_type == "Add":
            _give_bias(node, ir)
        elif node.op_type == "Max":
            _write_relu(node, ir)
    passes.RemoveUnusedNodesPass()(model)
    passes.TopologicalSortPass()(model)
    return ir.to_proto(model)


def _give_bias(add: Node, ir: Module) -> None:
    """Move an added vector into the Conv or Gemm of dequantized numbers before it."""
    for result, added in (tuple(add.inputs), tuple(add.inputs)[::-1]):
        contraction = _contraction(result)
        vector = _vector(added, result)
        if contraction is not None and vector is not None:
            bias = _bias(contraction, vector, ir) if _is_quantized_next(add.outputs[0]) else None
            if bias is None and vector.const_value is not None:
                bias = _constant(vector, "vector", vector.const_value.numpy().reshape(-1), ir)
            contraction.resize_inputs(3)
            contraction.replace_input_with(2, vector if bias is None else bias)
            if contraction.op_type == "Gemm":
                contraction.attributes["beta"] = ir.AttrFloat32("beta", 1.0)
            _replace(add.outputs[0], result)
            return


def _contraction(value: Value) -> Node | None:
    """Return the Conv or Gemm that made a value that nothing else takes.

    None if it has a bias, or contracts floats: onnxruntime quantizes the operand of a float Gemm with a bias.
    """
    if len(value.uses()) != 1 or value.is_graph_output():
        return None
    node: Node = value.producer()
    kind = "Gemm"
    if _kind(node) == "Transpose" and node.attributes["perm"].as_ints()[-1] == CHANNELS:
        (value,), kind = node.inputs, "Conv"
        node = value.producer() if len(value.uses()) == 1 else None
    if _kind(node) != kind:
        return None
    free = all(bias is None or _is_zero(bias) for bias in node.inputs[2:])
    return node if free and all(_dequantized(x) is not None for x in node.inputs[:2]) else None


def _dequantized(value: Value) -> Node:
    """Return the DequantizeLinear that made a value, which may have been moved since; None if none did."""
    node: Node = value.producer()
    while _kind(node) in MOVING:
        node = node.inputs[0].producer()
    return node if _kind(node) == "DequantizeLinear" else None


def _is_quantized_next(value: Value) -> bool:
    """Whether a value goes on to QuantizeLinear alone."""
    while len(value.uses()) == 1 and not value.is_graph_output():
        ((node, _),) = value.uses()
        if node.op_type == "QuantizeLinear":
            return True
        if node.op_type not in (*MOVING, "Max", "Relu"):
            return False
        (value,) = node.outputs
    return False


def _vector(added: Value, result: Value) -> Value | None:
    """Return what is added to `result`, a vector along its last axis; None if anything else is."""
    shape, target = _sizes(added), _sizes(result)
    if not shape or not target or not shape[-1] == target[-1] == math.prod(shape):
        return None
    node: Node = added.producer()
    vector = node.inputs[0] if _kind(node) == "Reshape" else added
    return vector if vector.const_value is not None or _sizes(vector) == shape[-1:] else None


def _bias(contraction: Node, vector: Value, ir: Module) -> Value | None:
    """Return a float bias as int32, whose step is the product of the operands' scales; None if it does not fit."""
    data, weight = (_dequantized(x) for x in contraction.inputs[:2])
    scales = [node.inputs[1].const_value for node in (data, weight)]
    if vector.const_value is None or any(scale is None for scale in scales):
        return None
    shape = _sizes(weight.inputs[0])
    if scales[1].size > 1 and (shape is None or weight.attributes["axis"].as_int() != len(shape) - 1):
        return None  # scales along another axis than the outputs'
    step = scales[0].numpy() * scales[1].numpy()
    values = vector.const_value.numpy().reshape(-1)
    integers = np.rint(values / step)
    if step.size not in (1, values.size) or not np.all(np.abs(integers) < 2**31):
        return None
    operands = [
        _constant(vector, "integers", integers.astype(np.int32), ir),
        _constant(vector, "step", step.astype(np.float32).reshape(() if step.size == 1 else -1), ir),
    ]
    node = ir.node("DequantizeLinear", operands, attributes={"axis": 0} if step.size > 1 else {})
    contraction.prepend(node)
    return node.outputs[0]


def _constant(like: Value, name: str, array: np.ndarray, ir: Module) -> Value:
    value = ir.val(f"{like.name}_{name}", const_value=ir.tensor(array))
    like.graph.register_initializer(value)
    return value


def _write_relu(node: Node, ir: Module) -> None:
    """Write the maximum of a value and 0 as a Relu."""
    if len(node.inputs) != 2:
        return
    for x, least in (tuple(node.inputs), tuple(node.inputs)[::-1]):
        if _is_zero(least) and _sizes(least) == ():
            relu = ir.node("Relu", [x])
            node.append(relu)
            (out,) = relu.outputs
            out.type, out.shape = node.outputs[0].type, node.outputs[0].shape
            _replace(node.outputs[0], out)
            return


def _replace(value: Value, replacement: Value) -> None:
    """Use another value in the place of one; an output of the graph keeps its name."""
    if value.is_graph_output():
        value.name, replacement.name = f"{value.name}_before", value.name
    value.replace_all_uses_with(replacement, replace_graph_outputs=True)


def _kind(node: Node) -> str | None:
    return None if node is None else node.op_type


def _is_zero(value: Value) -> bool:
    return value.const_value is not None and not np.any(value.const_value.numpy())


def _sizes(value: Value) -> tuple[int, ...] | None:
    return None if value.shape is None else tuple(value.shape)
