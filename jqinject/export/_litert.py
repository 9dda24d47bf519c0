"""`tflite`: exports a model to a LiteRT file, through LiteRT's own converter."""

import os
from collections.abc import Sequence

import numpy as np
from flax import nnx
from jax import export

from jqinject.export._fuse import Module
from jqinject.export._model import PyTree, checked_path, needed
from jqinject.export._stablehlo import has_composites, stablehlo
from jqinject.program import CALL, Call, Method
from jqinject.proxy import QuantProxyFromInjector

EXTRA = "litert"


def tflite(
    model: nnx.Module,
    *inputs: PyTree,
    path: str | os.PathLike[str] | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    method: Method = CALL,
    **keywords: PyTree,
) -> bytes:
    """Export the model in evaluation mode to a LiteRT (`.tflite`) file.

    A model that `jqinject.odml.OdmlConversion` made, with its composites `quant.fake_quant`, becomes operations on
    signed integers, of 8 or 16 bits and weights of 4 or 8, between a QUANTIZE at each input and a DEQUANTIZE at each
    output. A float model becomes float operations. The integers are those of the model, up to one step of an output:
    LiteRT rounds products of scales to 31 bits. Convolutions of 16-bit activations have biases in 64 bits, as
    LiteRT's runtime reads them.

        qat = OdmlQat().quantize(float_model, x)  # train it, or jqinject.calibrate(qat, batches)
        jqinject.export.tflite(OdmlConversion().quantize(qat, x), x, path="model.tflite")

    Args:
        model: an NNX module; it is not changed.
        inputs, keywords: the model's arguments, as for `stablehlo`; every size is a number. A path may come last among
            `inputs`, instead of `path`.
        path: the file to write, or None.
        input_names: of the inputs' arrays in the file's signature `serving_default`; `in_0`, `in_1`, ... by default.
        output_names: of the outputs' arrays; `out_0`, `out_1`, ... by default.
        method: the method that they are arguments of: its name, or a function that takes the model first.

    Returns:
        The bytes of the file.

    Raises:
        TypeError: `model` is not an NNX module, or there are no arrays among its arguments.
        ValueError: a symbolic size; quantizers that are not marked for devices; a convolution of 16-bit activations
            with 4-bit weights; as many names as there are arrays were not given; LiteRT's converter refuses the
            program; whatever `stablehlo` refuses.
        FileNotFoundError: the file's folder does not exist.
        ImportError: LiteRT's converter is not installed.
    """
    if path is None and inputs and isinstance(inputs[-1], str | os.PathLike):
        *inputs, path = inputs  # type: ignore[assignment]
    target = None if path is None else checked_path(path, "tflite")
    _refuse_symbolic(Call(tuple(inputs), keywords))
    converter = needed("litert_converter.mlir._mlir_libs.converter_api_ext", EXTRA, "tflite")
    program = stablehlo(model, *inputs, method=method, **keywords).exported
    _refuse_unmarked(model, program)
    names = (
        _names(input_names, program.in_avals, "input_names", "in"),
        _names(output_names, program.out_avals, "output_names", "out"),
    )
    file = _converted(converter, program, *names)
    if 'dtype = "i16"' in program.mlir_module():
        file = _with_wide_biases(file)
    if target is not None:
        target.write_bytes(file)
    return file


def _converted(converter: Module, program: export.Exported, inputs: list[str], outputs: list[str]) -> bytes:
    """Return the program as a file, with the signature `serving_default`."""
    ir, passes = (needed(f"litert_converter.mlir.{name}", EXTRA, "tflite") for name in ("ir", "passmanager"))
    config = converter.ConvertToTFLConfig()
    config.strict_qdq_mode = True  # what is marked, and nothing else, becomes integers
    context = ir.Context()
    converter.prepare_mlir_context(context)
    with context:
        module = ir.Module.parse(program.mlir_module())
        converter.set_signature(module.operation, "serving_default", inputs, outputs)
        try:
            converter.run_convert_to_tfl_passes(module, passes.PassManager(), config)
            return converter.export_flatbuffer_to_bytes(module.operation)
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"tflite: LiteRT's converter refuses the program: {error}\n"
                "  cure: write the model with operations that LiteRT has; jqinject.export.stablehlo(model, ...).text "
                "is what it was given"
            ) from error


def _with_wide_biases(file: bytes) -> bytes:
    """Return a file whose convolutions of 16-bit activations have biases in 64 bits.

    LiteRT's runtime reads such biases in 64 bits, and its converter writes them in 32.

    Raises:
        ValueError: such a convolution has 4-bit weights.
    """
    schema = needed("ai_edge_litert.schema_py_generated", EXTRA, "tflite")
    kinds, types = schema.BuiltinOperator, schema.TensorType
    # Where an operation has its activation, and its bias.
    places = {kind: (0, 2) for kind in (kinds.CONV_2D, kinds.DEPTHWISE_CONV_2D, kinds.CONV_3D)}
    places[kinds.TRANSPOSE_CONV] = 2, 3
    model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(file, 0))
    for graph in model.subgraphs:
        for operation in graph.operators:
            code = model.operatorCodes[operation.opcodeIndex]
            at = places.get(max(code.builtinCode, code.deprecatedBuiltinCode))
            if at is None or len(operation.inputs) <= at[1]:
                continue
            activation, bias = (graph.tensors[operation.inputs[place]] for place in at)
            if activation.type == types.INT16 and graph.tensors[operation.inputs[1]].type == types.INT4:
                raise ValueError(
                    "tflite: the program has a convolution of 16-bit activations with 4-bit weights; expected weights "
                    "of 8 bits, as LiteRT's runtime takes others for these.\n"
                    "  cure: Rule(op='conv_general_dilated', weight_quant=Int8Weight, output_quant=Int16Act) first"
                )
            if (activation.type, bias.type) == (types.INT16, types.INT32):
                narrow = np.asarray(model.buffers[bias.buffer].data, np.uint8).view(np.int32)
                wide = schema.BufferT()
                wide.data = narrow.astype(np.int64).view(np.uint8)
                bias.type, bias.buffer = types.INT64, len(model.buffers)
                model.buffers.append(wide)
    builder = needed("flatbuffers", EXTRA, "tflite").Builder(len(file))
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def _names(stated: Sequence[str] | None, arrays: Sequence[object], argument: str, prefix: str) -> list[str]:
    names = [f"{prefix}_{place}" for place in range(len(arrays))] if stated is None else list(stated)
    if len(names) != len(arrays):
        raise ValueError(
            f"tflite: {argument} names {len(names)} arrays, and the program has {len(arrays)}: {names}"
        )
    return names


def _refuse_symbolic(call: Call) -> None:
    for array in call.arrays:
        symbolic = [size for size in array.shape if not isinstance(size, int)]
        if symbolic:
            raise ValueError(
                f"tflite: the size {symbolic[0]} of an input of shape {tuple(array.shape)} is symbolic, and integer "
                "operations of LiteRT have fixed sizes.\n"
                "  cure: export with a number, jax.ShapeDtypeStruct((1, ...), dtype); a file for each batch size"
            )


def _refuse_unmarked(model: nnx.Module, program: export.Exported) -> None:
    """Refuse quantizers that would become float operations."""
    if has_composites(program):
        return
    for path, node in nnx.iter_modules(model, graph=True):
        if isinstance(node, QuantProxyFromInjector):
            raise ValueError(
                f"tflite: {'.'.join(map(str, path))} quantizes, and is not marked for devices: its rounding would be "
                "float operations.\n  cure: converted = jqinject.odml.OdmlConversion().quantize(model, x), of a model "
                "that jqinject.odml.OdmlQat quantized"
            )
