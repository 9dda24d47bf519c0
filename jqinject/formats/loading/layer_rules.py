"""How the layers of a model are quantized, so that they take a checkpoint's matrices: rules, inputs, orders, caches.

Scales of a quantized cache (`k_scale`, `v_scale`) go into the quantizers of keys and values.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias, TypeVar

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject import quant
from jqinject.core.memory.memory import Memory
from jqinject.core.scaling.of_memory import ParameterFromRuntimeStatsScaling
from jqinject.core.transforms import Permutation, Sized
from jqinject.formats.checkpoint import Checkpoint
from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.loading.loading_plan import PROXIES, Assignment, CacheScale
from jqinject.formats.stored_matrix import E4M3, InputFormat, StoredMatrix
from jqinject.inject import ExtendedInjector
from jqinject.model import Rule
from jqinject.model.quantizing.rules import COUNTERPARTS
from jqinject.model.walk import ModelIndex, place_name
from jqinject.nn import QuantMultiHeadAttention, QuantScaledDotProductAttention
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.proxy import ActQuantProxyFromInjector
from jqinject.quant.minifloat.blocks import Fp8e4m3ConstScales
from jqinject.quant_tensor import on_integers, on_minifloats

Injector: TypeAlias = type[ExtendedInjector]
Model = TypeVar("Model", bound=nnx.Module)
LARGEST = 448.0
BELOW_ZERO = 128  # a signed zero point, counted from the lowest integer
DYNAMIC = {
    # (kind, whether it is symmetric, what shares a scale): the quantizer
    ("int", True, "token"): quant.Int8DynamicActPerRowAbsMax,
    ("int", True, "tensor"): quant.Int8DynamicActPerTensorAbsMax,
    ("int", True, "group"): quant.Int8DynamicActPerGroupFloat,
    ("int", False, "token"): quant.ShiftedUint8DynamicActPerRowFloat,
    ("int", False, "tensor"): quant.ShiftedUint8DynamicActPerTensorFloat,
    ("float", True, "token"): quant.Fp8e4m3OCPDynamicActPerRowFloat,
    ("float", True, "tensor"): quant.Fp8e4m3OCPDynamicActPerTensorFloat,
    ("float", True, "group"): quant.Fp8e4m3OCPDynamicActPerGroupFloat,
}
STATIC = {"int": quant.Int8ActPerTensorFloat, "float": quant.Fp8e4m3OCPActPerTensorFloat}


def input_quantizer(inputs: InputFormat | None, name: str) -> Injector | None:
    """Return the injector of a layer's input; None for float inputs.

    Args:
        inputs: what the checkpoint says.
        name: of the matrix, for errors.

    Raises:
        CheckpointError: there is no such quantizer.
    """
    if inputs is None:
        return None
    injector = _dynamic(inputs) if inputs.dynamic else _static(inputs)
    if injector is None:
        raise CheckpointError(f"{name}: there is no quantizer for its input, {inputs}")
    return injector


def _dynamic(inputs: InputFormat) -> Injector | None:
    if inputs.kind == "float" and inputs.bits == 4:
        if inputs.global_scale is None:
            return quant.NVFP4Act
        # Scales of groups have the factor `1 / global_scale`.
        largest = LARGEST / float(inputs.global_scale[0])
        return quant.NVFP4Act.let(scale_quant=Fp8e4m3ConstScales.let(scaling_init=largest))
    # Minifloats have no zero point, whatever the checkpoint says of symmetry.
    symmetric = inputs.symmetric or (inputs.kind == "float" and inputs.strategy != "group")
    base = DYNAMIC.get((inputs.kind, symmetric, inputs.strategy)) if inputs.bits == 8 else None
    return base if base is None or inputs.strategy != "group" else base.let(group_size=inputs.group_size)


def _static(inputs: InputFormat) -> Injector | None:
    if inputs.scale is None or inputs.bits != 8 or inputs.strategy != "tensor":
        return None
    largest, distance = _range(inputs)
    if distance is None:
        return STATIC[inputs.kind].let(collected_range=largest)
    return quant.ShiftedUint8ActPerTensorFloat.let(
        signed=not inputs.unsigned, collected_range=largest, collected_zero_point=distance
    )


def _range(inputs: InputFormat) -> tuple[float, float | None]:
    """Return the range of a static input as its quantizer collects it; and, with a zero point, how far below 0 it
    begins."""
    assert inputs.scale is not None, "static"
    scale = np.float32(inputs.scale[0])
    if inputs.kind == "float" or inputs.zero_point is None:
        return _times(scale, LARGEST if inputs.kind == "float" else BELOW_ZERO), None
    steps = 2 * BELOW_ZERO - 1 if inputs.unsigned else BELOW_ZERO
    return _times(scale, steps), (float(inputs.zero_point[0]) + BELOW_ZERO) * float(scale)


def _times(scale: np.float32, steps: float) -> float:
    """Return the float32 range whose quotient by `steps` is the scale to the bit; else the nearest one."""
    product = scale * np.float32(steps)
    nearby = (product, *(np.nextafter(product, np.float32(end)) for end in (0, np.inf)))
    return float(next((x for x in nearby if x / np.float32(steps) == scale), product))


def set_ranges(
    proxy: ActQuantProxyFromInjector, inputs: Sequence[InputFormat], depth: tuple[int, ...]
) -> None:
    """Give each layer of a stack the static range of its own input.

    Args:
        proxy: of the input, whose Variables have the axes of the stack in front.
        inputs: static formats, one for each layer.
        depth: sizes of the stack.
    """
    ranges, distances = zip(*map(_range, inputs), strict=True)
    for name, numbers in (("scaling_impl", ranges), ("zero_point_impl", distances)):
        memory = vars(proxy.tensor_quant).get(name)
        if isinstance(memory, Memory) and memory.kind == "collected" and None not in numbers:
            assert memory.value is not None
            value = memory.value.get_value()
            by_layer = np.asarray(numbers, np.float32).reshape((*depth, *(1,) * (value.ndim - len(depth))))
            memory.commit(jnp.broadcast_to(jnp.asarray(by_layer), value.shape))


def static_format(proxy: ActQuantProxyFromInjector) -> InputFormat | None:
    """Return a static range with one scale, of 8 bits, as a file says it; None for any other.

    Args:
        proxy: of activations, whose scale does not depend on them.
    """
    sample = proxy.sample()
    scale, zero = (np.asarray(x, np.float32).reshape(-1) for x in (sample.scale, sample.zero_point))
    is_float = on_minifloats(sample)
    is_byte = np.dtype(sample.q_dtype) == E4M3.dtype or (on_integers(sample) and int(sample.bit_width) == 8)
    if not is_byte or scale.size != 1 or zero.size > 1:
        return None
    static = InputFormat("float" if is_float else "int", 8, dynamic=False, scale=scale)
    if is_float or (sample.signed and not proxy.has_zero_point):
        return static
    zero = zero if sample.signed else zero - BELOW_ZERO
    is_integer = np.all(zero == np.round(zero))
    unsigned = replace(static, symmetric=False, zero_point=zero, unsigned=not sample.signed)
    return unsigned if is_integer else None


@dataclass(frozen=True)
class Ordered:
    """The `kind` of a `Sized` that permutes channels by the order of a checkpoint; compared by value.

    Attributes:
        order: int32, as bytes.
    """

    order: bytes = field(repr=False)

    def __call__(self, channels: int) -> Permutation:
        """Make the permutation."""
        permutation = Permutation(channels)
        permutation.order.set_value(jnp.asarray(np.frombuffer(self.order, np.int32)))
        return permutation


def rules_of(model: nnx.Module, low_bits: list[Assignment], caches: Mapping[str, InputFormat]) -> list[Rule]:
    """Return a rule for each matrix: of its layer, if this is one that quantizers go into; else of the parameter. And
    one for each cache, by name.

    Raises:
        CheckpointError: the checkpoint quantizes an input in a way that no quantizer here does.
    """
    layers, rules = _layers(model), []
    for assignment in low_bits:
        module, _, _ = assignment.path.rpartition(".")
        inputs = input_quantizer(input_of(assignment.matrices), assignment.path)
        order = column_order(assignment)
        if order is not None:
            declared = Sized(Ordered(order.astype(np.int32).tobytes()), order.size)
            inputs = (inputs or quant.NoneActQuant).let(pre_transform=declared)
        pattern = re.escape(module if module in layers else assignment.path)
        rules.append(Rule(pattern, weight_quant=quant.Int8WeightPerChannelFloat, input_quant=inputs))
    by_name = {name: input_quantizer(inputs, name) for name, inputs in caches.items()}
    return rules + [Rule(re.escape(name), cache_quant=quantizer) for name, quantizer in by_name.items()]


def shown_by_calls(
    model: nnx.Module, low_bits: list[Assignment], caches: Sequence[CacheScale]
) -> tuple[str, ...]:
    """Return the paths of matrices that no layer contracts, and of caches: a call of the model shows how it does."""
    layers = _layers(model)
    paths = [part.path for part in low_bits if part.path.rpartition(".")[0] not in layers]
    return (*paths, *(cache.target for cache in caches if not cache.is_proxy))


def _layers(model: nnx.Module) -> set[str]:
    """Return the paths of the layers that quantizers go into."""
    return {place_name(path) for path, node in ModelIndex(model).places if type(node) in COUNTERPARTS}


def input_of(matrices: Sequence[StoredMatrix]) -> InputFormat | None:
    """Return how the input of a parameter is quantized: by the widest range of its matrices."""

    def width(inputs: InputFormat | None) -> float:
        if inputs is None or inputs.scale is None:  # of two levels: the range is divided by the global scale
            return -np.inf if inputs is None or inputs.global_scale is None else -inputs.global_scale.min()
        return inputs.scale.max()

    return max((matrix.input_format for matrix in matrices), key=width)


def set_ranges_of_stacks(model: nnx.Module, low_bits: list[Assignment]) -> None:
    """Give each layer of a stack its own static input range; until now all have the widest."""
    stacks = {assignment.path.rpartition(".")[0]: assignment for assignment in low_bits if assignment.depth}
    for path, node in ModelIndex(model).places if stacks else ():
        assignment = stacks.get(place_name(path))
        proxy = node.input_quant if isinstance(node, QuantWeightLayer) else None
        if assignment is None or not isinstance(proxy, ActQuantProxyFromInjector):
            continue
        inputs = [input_of(matrices) for matrices in assignment.layers(assignment.matrices)]
        static = [layer for layer in inputs if layer is not None and layer.scale is not None]
        if len(static) == len(inputs):
            set_ranges(proxy, static, assignment.depth)


def keeps_payload(assignment: Assignment, may_permute: bool) -> bool:
    """Return whether the codes of a parameter can stay: their blocks are consecutive columns, in some order.

    Args:
        assignment: the parameter.
        may_permute: whether its input can be permuted.
    """
    matrices = assignment.matrices
    if not all(matrix.by_rows for matrix in matrices):
        # Rows that lie in turn are neither cut nor joined nor reordered, and are an axis of the parameter.
        single = len(matrices) == math.prod(assignment.depth) and not assignment.heads
        uncut = single and all(rows is None for _, rows in assignment.sources)
        is_axis = assignment.axes.outputs in assignment.axes.target
        return all(matrix.in_turn for matrix in matrices) and uncut and is_axis
    if all("group_of_column" not in matrix.arrays for matrix in matrices):
        return True
    return may_permute and column_order(assignment) is not None


def column_order(assignment: Assignment) -> np.ndarray | None:
    """Return the order of columns in which all groups of a parameter are consecutive (GPTQ's activation order).

    None if groups are consecutive, or no single order makes them so.
    """
    first, *others = (matrix.order() for matrix in assignment.matrices)
    is_shared = not assignment.depth and all(np.array_equal(order, first) for order in others)  # pyright: ignore
    return first if is_shared else None


def cache_proxies(model: nnx.Module) -> dict[str, ActQuantProxyFromInjector]:
    """Return the quantizers of keys and values that a model's attention layers have, by path."""
    return {
        place_name((*path, name)): proxy
        for path, node in ModelIndex(model).places
        if isinstance(node, QuantMultiHeadAttention | QuantScaledDotProductAttention)
        for name in PROXIES.values()
        if (proxy := getattr(node, name)) is not None and proxy.is_quant_enabled
    }


def cache_formats(checkpoint: Checkpoint, scales: Sequence[CacheScale]) -> dict[str, InputFormat]:
    """Return how each target quantizes keys or values.

    Args:
        checkpoint: the checkpoint.
        scales: what its scales are for.

    Raises:
        CheckpointError: the checkpoint does not say what the scales are, or says something that no cache can do; a
            scale is none.
    """
    if not scales:
        return {}
    form = checkpoint.cache_format
    if form is None or form.dynamic or form.strategy != "tensor" or form.bits != 8 or not form.symmetric:
        raise CheckpointError(
            f"{scales[0].sources[0]} is a scale of a cache, and the settings (kv_cache_scheme) say {form}; known are 8 "
            "bits without zero points and one static scale of the tensor.\n"
            "  cure: ignore=['.*_scale'], for float caches"
        )
    return {
        cache.target: replace(form, scale=np.max([_scale(checkpoint, name) for name in cache.sources], 0))
        for cache in scales
    }


def _scale(checkpoint: Checkpoint, name: str) -> np.ndarray:
    scale = np.asarray(checkpoint.array(name), np.float32).reshape(-1)
    if scale.size != 1 or not np.isfinite(scale).all() or scale[0] <= 0:
        raise CheckpointError(f"{name} is {scale.tolist()}, expected one scale above 0")
    return scale


def with_cache_scales(
    model: Model, scales: Sequence[CacheScale], formats: Mapping[str, InputFormat]
) -> Model:
    """Return a model whose attention layers' quantizers of keys and values have a checkpoint's scales.

    Args:
        model: it is not changed.
        scales: what the checkpoint's scales are for.
        formats: of each target.

    Raises:
        CheckpointError: a quantizer is dynamic, or of other numbers.
    """
    of_proxies = [cache for cache in scales if cache.is_proxy]
    model = nnx.clone(model, graph=True) if of_proxies else model
    proxies = cache_proxies(model)
    for cache in of_proxies:
        proxy, stated = proxies[cache.target], formats[cache.target]
        form = None if proxy.is_dynamic else static_format(proxy)
        scaling = vars(proxy.tensor_quant).get("scaling_impl")
        learns_range = isinstance(scaling, ParameterFromRuntimeStatsScaling)
        if form is None or form.kind != stated.kind or not form.symmetric or not learns_range:
            raise CheckpointError(
                f"{cache.target} is {proxy.binding.base.__name__}, and {cache.sources[0]} is the static scale of "
                f"{'8-bit minifloats' if stated.kind == 'float' else 'int8'}.\n"
                f"  cure: {STATIC[stated.kind].__name__} there, or ignore=['.*_scale'] to keep the quantizer"
            )
        set_ranges(proxy, [stated], ())
    return model
