"""`onnx`: exports a model to ONNX with QuantizeLinear and DequantizeLinear, through jax2onnx and plugins for it."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
from flax import nnx

from jqinject import native
from jqinject.export._fuse import Module, Proto, fused
from jqinject.export._marks import MARK, OPERATOR, POOLS, Rule, evaluate, mark_quantizers, rules
from jqinject.export._matmul_nbits import DOMAIN, check_block, has_four_bits, paths_by_form, products
from jqinject.export._model import ExportedCall, PyTree, checked_path, needed, serving_copy
from jqinject.program import CALL, Call, Method, checked_method, jaxpr

#: jax2onnx's state while it writes a graph.
Context: TypeAlias = Any
#: JAX's own equation, as jax2onnx passes it.
JaxprEquation: TypeAlias = Any

SHOWN = 5  # kinds of operators in a repr


class OnnxModel:
    """An `onnx.ModelProto` with a short repr; what it has and does, this has and does.

    Attributes:
        proto: the `onnx.ModelProto`, for functions that ask for that class.
    """

    def __init__(self, proto: Proto) -> None:
        self.proto = proto

    def __getattr__(self, name: str) -> object:
        if name == "proto" or name.startswith("__"):  # while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self.proto, name)

    def SerializeToString(self, **options: bool) -> bytes:
        """The bytes of the file."""
        return self.proto.SerializeToString(**options)

    def save(self, path: str | Path) -> None:
        """Write the file.

        Args:
            path: where to.
        """
        Path(path).write_bytes(self.SerializeToString())

    def __eq__(self, model: object) -> bool:
        return self.proto == (model.proto if isinstance(model, OnnxModel) else model)

    __hash__ = None  # type: ignore[assignment]  # as a ModelProto

    def __repr__(self) -> str:
        graph = self.proto.graph
        kinds = Counter(node.op_type for node in graph.node).most_common()
        more = f", {len(kinds) - SHOWN} more kinds" if len(kinds) > SHOWN else ""
        operators = ", ".join(f"{count} {kind}" for kind, count in kinds[:SHOWN])
        opset = next(
            (entry.version for entry in self.proto.opset_import if entry.domain in ("", "ai.onnx")), "?"
        )
        inputs, outputs = ([entry.name for entry in ends] for ends in (graph.input, graph.output))
        return (
            f"<ONNX model {graph.name!r}, opset {opset}: {', '.join(inputs)} -> {', '.join(outputs)}; "
            f"{len(graph.node)} nodes ({operators}{more}), {self.proto.ByteSize():,} bytes>"
        )


def onnx(
    model: nnx.Module,
    *inputs: object,
    path: str | os.PathLike[str] | None = None,
    opset: int = 20,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    method: Method = CALL,
    allow_uncalibrated: bool = False,
    block: int | None = None,
    accuracy_level: int = 0,
    **keywords: object,
) -> OnnxModel:
    """Export the model in evaluation mode to ONNX, in QDQ form.

    Whatever is quantized in the model is quantized in the file:

    - Integer weights and biases, frozen or not: stored integers and DequantizeLinear, per tensor or per channel. The
      integers are int8 or uint8 up to 8 bits, int16 or uint16 up to 16 bits from opset 21 on, else int32.
    - An integer quantizer of activations with a settled range (constant, learned, collected): only QuantizeLinear and
      DequantizeLinear with constants, plus Max and Min if it has fewer bits than the stored dtype, or a narrow range.
    - One whose scale depends on the data or varies along several axes, or whose zero point is not an integer: the
      computation, in floats.
    - Weights in one of ONNX's 8-bit float types (e4m3fn, e5m2 and their fnuz kin; opset 19): stored as these and
      DequantizeLinear. Other minifloats: their values, in floats.
    - Minifloat quantizers of activations: the computation, in floats. onnxruntime 1.31 refuses a product of two
      dequantized 8-bit floats.

    A bias is an input of a Conv or Gemm of quantized operands, and the maximum with 0 is a Relu, so that runtimes
    contract integers. Where the result is quantized next, a float bias is stored as int32, in steps of the product of
    both scales, to which runtimes round it.

    A quantizer that does not round to nearest is computed in floats, and its result then stored in integers. Layers
    contract the dequantized floats, whatever their `contraction`; the runtime decides whether to contract integers. The
    outputs equal the model's up to the order of float summation; where that moves a value across a rounding boundary,
    they may differ by one step of that quantizer.

        proto = jqinject.export.onnx(model, jnp.zeros((1, 8, 8, 1)), path="model.onnx")

    Args:
        model: an NNX module, quantized or not, frozen or not; it is not changed.
        inputs, keywords: the model's arguments: arrays, or `jax.ShapeDtypeStruct`s, whose shape may have symbolic sizes
            (`jax.export.symbolic_shape("batch, 8")`), or pytrees of them. Everything else (flags, None, modules)
            becomes a part of the program.
        path: the file to write, or None.
        opset: version of ONNX's operators, at least 13, the first with scales per channel. From 21 on, onnxruntime 1.31
            refuses some models with signed activations.
        input_names: of the inputs' arrays; `in_0`, `in_1`, ... by default.
        output_names: of the outputs' arrays.
        method: the method that they are arguments of: its name, or a function that takes the model first.
        allow_uncalibrated: go on even if static ranges of activations never saw data.
        block: write contractions with frozen weights in integers of 3 or 4 bits as onnxruntime's `MatMulNBits`, which
            dequantizes packed weights in registers, in 4 bits and a float32 scale for each block. A block is as large
            as the weight's groups allow, at most this: 16, 32, 64, 128 or 256; scales of whole channels are repeated.
            None dequantizes weights in groups.
        accuracy_level: the attribute of `MatMulNBits`: 0 contracts in float32, 4 lets onnxruntime round inputs to
            8-bit integers.

    Returns:
        An `OnnxModel`: an `onnx.ModelProto` whose repr is a line; `.proto` is that itself.

    Raises:
        TypeError: `model` is not an NNX module, or there are no arrays among its arguments.
        ValueError: the model has no such method; the call changes a module among its arguments; a static range that
            never saw data, named by path; the opset is below 13; the model has an operation that jax2onnx cannot
            convert to valid ONNX: contractions in float16 or of integers (Flax layers with `QDotGeneral` or its kin);
            with `block`, a weight in 3 or 4 bits that is contracted and fits no block, named by path, or no such
            weight at all.
        FileNotFoundError: the file's folder does not exist.
        ImportError: jax2onnx is not installed.

    Differs from jax2onnx: pools have one to three spatial axes, as runtimes expect; reversed scans (bidirectional
    layers) become forward scans between two reversals.
    """
    call = Call(inputs, keywords, checked_method(model, method, "onnx"))
    check_block(block, accuracy_level)
    copy = serving_copy(model, "onnx", allow_uncalibrated)
    more = {} if block is None else products(block, accuracy_level, paths_by_form(copy))
    mark_quantizers(copy, lambda weight: bool(more) and has_four_bits(weight.form))
    exported = ExportedCall(copy, call, "onnx")
    if opset < 13:
        raise ValueError(f"onnx: opset must be at least 13, where scales per channel begin, got {opset}")
    target = None if path is None else checked_path(path, "onnx")
    packages = ("jax2onnx", "onnx", "onnx_ir", "onnx_ir.passes.common")
    jax2onnx, package, ir, passes = (needed(name, "export", "onnx") for name in packages)
    register(needed("jax2onnx.plugins.plugin_system", "export", "onnx"))
    with native.use(False):  # other runtimes do not have these kernels
        program = _program(exported, {**rules(opset), **POOLS, **more})
    kind = type(model).__name__
    try:
        proto = jax2onnx.to_onnx(
            lambda *xs: evaluate(program, xs, {}, computes=False),
            inputs=exported.specs,
            model_name=kind,
            opset=opset,
            input_names=input_names,
            output_names=output_names,
        )
    except NotImplementedError as error:
        raise ValueError(
            f"onnx: {kind} has an operation that jax2onnx has no ONNX for: {error}\n"
            "  cure: jqinject.export.stablehlo(model, ...), which has all of JAX's operations"
        ) from error
    if more:
        proto.opset_import.add(domain=DOMAIN, version=1)
    proto = fused(proto, ir, passes)
    _check_valid(proto, package, kind)
    if target is not None:
        package.save_model(proto, target)
    return OnnxModel(proto)


def _check_valid(proto: Proto, package: Module, kind: str) -> None:
    """Raise if ONNX's own checker refuses jax2onnx's result."""
    try:
        package.checker.check_model(proto, full_check=True)
    except (package.checker.ValidationError, package.shape_inference.InferenceError) as error:
        raise ValueError(
            f"onnx: what jax2onnx made of {kind} is not valid: {error}\n"
            "  cure: a model in float32 without QDotGeneral and its kin, as jax2onnx writes contractions of float32; "
            "or jqinject.export.stablehlo(model, ...)"
        ) from error


def _program(exported: ExportedCall, replaced: Mapping[str, Rule]) -> jaxpr.Body:
    """The call's program, from arrays to arrays, with quantized numbers in ONNX's form."""

    def run(state: PyTree, *arrays: jax.Array) -> list[jax.Array]:
        return jax.tree.leaves(exported(state, arrays))

    # NNX's transformations need Variables of their own trace: the state is first an argument, then a constant.
    marked = jaxpr.Body.of(jax.make_jaxpr(run)(exported.state, *exported.specs))
    leaves = jax.tree.leaves(exported.state)
    unmarked = jax.make_jaxpr(lambda *xs: evaluate(marked, [*leaves, *xs], replaced))
    return jaxpr.Body.of(unmarked(*exported.specs))


def register(plugins: Module) -> None:
    """Register jqinject's operations with jax2onnx; may be called repeatedly.

    Args:
        plugins: the module `jax2onnx.plugins.plugin_system`.
    """
    for primitive, write in ((OPERATOR, _write), (MARK, _mark)):
        plugin = type(primitive.name, (plugins.PrimitiveLeafPlugin,), {"lower": write})
        plugins.register_primitive(jaxpr_primitive=primitive.name)(plugin)


def _mark(self: object, ctx: Context, eqn: JaxprEquation) -> None:
    # Remaining marks are inside loop bodies, where no grid is known: keep the computed value.
    ctx.bind_value_for_var(eqn.outvars[0], ctx.get_value_for_var(eqn.invars[1]))


def _write(self: object, ctx: Context, eqn: JaxprEquation) -> None:
    operands = [ctx.get_value_for_var(variable) for variable in eqn.invars]
    (result,), operator = eqn.outvars, eqn.params["operator"]
    value = ctx.get_value_for_var(result, name_hint=ctx.fresh_name(operator))
    attributes = dict(eqn.params["attributes"])
    written = getattr(ctx.builder, operator)(*operands, _outputs=[value.name], **attributes)
    written.type, written.shape = value.type, value.shape
    ctx.bind_value_for_var(result, written)
