"""The weights of a model and the numbers that they are quantized to, read from the model itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core import Frozen, QuantParam, QuantStat
from jqinject.core._protocols import block_width, number_format
from jqinject.core.transforms import Chain
from jqinject.dot import FrozenParam
from jqinject.model.frozen_ops import op_of_weight, quantized_op
from jqinject.model.walk import ModelIndex, Path, PlainArray
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.program import HELD, Program
from jqinject.proxy import QuantProxyFromInjector, stack_of
from jqinject.quant_tensor import on_integers

# Variables that a call writes: what is contracted of them comes from activations.
WRITTEN = (nnx.Cache, nnx.Intermediate, nnx.BatchStat, nnx.RngState)


@dataclass(frozen=True)
class QuantizedFormat:
    """The numbers that a quantizer makes.

    Attributes:
        name: such as "int8", "uint4", "e4m3"; "int4 in 32s" with a scale for each group of 32.
        bits: of one number; None if it is learned, or if only the scheme knows.
    """

    name: str
    bits: float | None

    @property
    def is_low(self) -> bool:
        """Whether it has at most 8 bits, or learned ones."""
        return self.bits is None or self.bits <= 8


@dataclass(frozen=True)
class ModelWeight:
    """An array of a model that may be contracted.

    Attributes:
        path: in the model.
        shape: of the array.
        dtype: of the float array.
        kind: the class of its Variable; "array" if it has none.
        is_parameter: whether it is a float `nnx.Param`, or one that is frozen.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: Any
    kind: str
    is_parameter: bool

    @property
    def size(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Of the array in floats."""
        return self.size * np.dtype(self.dtype).itemsize


class ModelWeights:
    """The weights of a model, by their paths as text.

    Attributes:
        model: the model.
        nodes: path -> every module, Variable and array.
        at_sites: weight -> name of the site that quantizes it at its contraction, for a policy that does so.

    Args:
        model: an NNX module, concrete or abstract.
    """

    def __init__(self, model: nnx.Module) -> None:
        self.model = model
        self.nodes = dict(ModelIndex(model).places)
        self.at_sites: dict[str, str] = {}
        self._formats: dict[Any, QuantizedFormat] = {}

    @cached_property
    def all(self) -> Mapping[str, ModelWeight]:
        """Every array that may be a weight."""
        found = {}
        for path, node in self.nodes.items():
            if isinstance(node, nnx.Variable | PlainArray):
                name = self.name_of(path)
                if name:
                    found.setdefault(name, self._weight(name, node))
        return found

    def names(self, program: Program) -> list[str]:
        """What weight each input of a program is; "" for other inputs, such as scales."""
        return [self.name_of(tuple(map(str, path[1:]))) if path[:1] == (0,) else "" for path in program.paths]

    def name_of(self, path: Path) -> str:
        """The path, as text, of the weight that an array of the state stores; "" for other arrays."""
        held = next((path[:end] for end in range(len(path), -1, -1) if self._is_variable(path[:end])), None)
        if held is None or self._in_quantizer(held):
            return ""
        node, below = self.nodes[held], path[len(held) :]
        if isinstance(node, FrozenParam):
            return ".".join(held) if below in ((), ("value",)) else ""
        if isinstance(node, Frozen):
            return self._of_frozen(held)
        return "" if isinstance(node, WRITTEN) else ".".join(held)

    def _is_variable(self, path: Path) -> bool:
        return isinstance(self.nodes.get(path), nnx.Variable | PlainArray)

    def _in_quantizer(self, path: Path) -> bool:
        above = (self.nodes.get(path[:end]) for end in range(len(path)))
        return HELD in path or any(isinstance(node, QuantProxyFromInjector) for node in above)

    def _of_frozen(self, path: Path) -> str:
        """The weight of the layer that keeps its low-bit numbers there."""
        for end in range(len(path) - 1, -1, -1):
            layer, inner = self.nodes.get(path[:end]), path[end:]
            if layer is not None and quantized_op(layer) is not None:
                return ".".join((*path[:end], "kernel")) if inner[-1] == "value" else ""
        return ""

    def _weight(self, name: str, node: Any) -> ModelWeight:
        path = tuple(name.split("."))
        layer = self.nodes.get(path[:-1])
        kind = type(node).__name__ if isinstance(node, nnx.Variable) else "array"
        if isinstance(node, Frozen) and not isinstance(node, FrozenParam):
            array = _stored_kernel(layer)
            return (
                ModelWeight(path, tuple(array[0]), array[1], "Param", True)
                if isinstance(array, tuple)
                else (ModelWeight(path, tuple(array.shape), array.dtype, "Param", True))
            )
        value = node if isinstance(node, FrozenParam) else node.get_value()
        shape, dtype = tuple(getattr(value, "shape", ())), getattr(value, "dtype", np.dtype(np.float32))
        is_float = jnp.issubdtype(dtype, jnp.floating)
        return ModelWeight(path, shape, dtype, kind, isinstance(node, FrozenParam | nnx.Param) and is_float)

    # --- how they are quantized

    def format_of(self, name: str) -> QuantizedFormat | None:
        """The low-bit numbers of a weight; None if it is float."""
        path = tuple(name.split("."))
        node, layer = self.nodes.get(path), self.nodes.get(path[:-1])
        if isinstance(node, FrozenParam):
            return _of_form(node.form)
        if isinstance(layer, QuantWeightLayer) and path[-1] == layer.weight_name:
            if op_of_weight(layer) is not None:
                return self._of_op(layer, 1)
            return self.numbers_of(layer.weight_quant, layer.weight_shape, len(stack_of((layer,))))
        if layer is not None and path[-1] == "kernel" and quantized_op(layer) is not None:
            return self._of_op(layer, 1)
        site = self.sites.get(name)
        if site is None and name in self.at_sites:
            held = self.held[self.at_sites[name]]
            is_float = not isinstance(held, QuantProxyFromInjector) and not held.quantizes[1]
            return None if is_float else self.format_at(self.at_sites[name])
        return None if site is None else self.numbers_of(site.weight_quant, site.weight_shape, site.stacked)

    def is_frozen(self, name: str) -> bool:
        """Whether low-bit numbers are stored in the place of a weight."""
        path = tuple(name.split("."))
        return isinstance(self.nodes.get(path), FrozenParam)

    def input_format(self, name: str) -> QuantizedFormat | None:
        """The low-bit numbers that a layer makes of its own input; None if it makes none."""
        layer = self.nodes.get(tuple(name.split("."))[:-1])
        if isinstance(layer, QuantWeightLayer) and op_of_weight(layer) is None:
            return self.numbers_of(layer.input_quant, stacked=len(stack_of((layer,))))
        return None if layer is None or quantized_op(layer) is None else self._of_op(layer, 0)

    def transform_of_input(self, name: str, site: str) -> str:
        """What the other operand of a weight goes through before it is quantized, in words; "" for nothing.

        Args:
            name: path of the weight.
            site: of the other operand, if it is quantized between operations.
        """
        layer = self.nodes.get(tuple(name.split("."))[:-1])
        own = layer.input_quant if isinstance(layer, QuantWeightLayer) else None
        return note_of_transform(self.held.get(site) if site else own)

    def range_of_loop(self, site: str, steps: int) -> str:
        """What a report says of the range of an operand inside a loop; "" where each step has its own, or none is kept.

        Args:
            site: of the operand, if it is quantized between operations.
            steps: how many there are.
        """
        proxy = self.held.get(site)
        keeps = isinstance(proxy, QuantProxyFromInjector) and bool(nnx.state(proxy, (QuantStat, QuantParam)))
        if steps == 1 or not keeps or site in self._stacks:
            return ""
        return f"the {steps} steps of a loop share one input range, the largest of each batch"

    def format_at(self, site: str) -> QuantizedFormat | None:
        """The numbers of what a site between operations quantizes; "quantized" if they came so from a layer."""
        if not site:
            return None
        if site == "quantized":
            return QuantizedFormat("quantized", None)
        quantizer = self.held.get(site)
        if quantizer is None or isinstance(quantizer, QuantProxyFromInjector):
            return self.numbers_of(quantizer, stacked=self._stacks.get(site, 0))
        return QuantizedFormat("scheme", None)

    @property
    def sites(self) -> Mapping[str, Any]:
        """The quantizers of parameters that the model contracts by itself, by path."""
        held = vars(self.model).get(HELD)
        return {} if held is None else held.weight_sites()

    @property
    def held(self) -> Mapping[str, Any]:
        """The quantizers of tensors between operations, by name."""
        held = vars(self.model).get(HELD)
        return {} if held is None else held.held

    @property
    def _stacks(self) -> Mapping[str, int]:
        """Of the quantizers of tensors in loops over stacked layers, the number of leading axes, by name."""
        return dict(getattr(vars(self.model).get(HELD), "stacks", ()))

    def _of_op(self, layer: Any, operand: int) -> QuantizedFormat | None:
        op = quantized_op(layer)
        return QuantizedFormat("scheme", None) if op is not None and op.module.quantizes[operand] else None

    def numbers_of(self, proxy: Any, shape: tuple[int, ...] = (), stacked: int = 0) -> QuantizedFormat | None:
        """The numbers that a quantizer makes; None if it is off.

        Args:
            proxy: the quantizer, or None.
            shape: of the weight, with the axes of a stack; not needed for an activation.
            stacked: the number of these.
        """
        if proxy is None or not proxy.is_quant_enabled:
            return None
        key = proxy.binding, shape[stacked:]  # what affects the numbers
        if key not in self._formats:
            self._formats[key] = _made_by(proxy, *key[1:], stacked)
        return self._formats[key]


def _stored_kernel(layer: Any) -> tuple[tuple[int, ...], Any]:
    op = quantized_op(layer)
    assert op is not None, "its numbers are stored there"
    return op.module.rhs_freezer.get().shape, layer.kernel.dtype


def _of_form(form: Any) -> QuantizedFormat:
    """Of frozen numbers."""
    size = None if form.groups is None else form.groups.size
    if form.format is not None:
        return _named(str(form.format), form.format.bit_width, size)
    return _named(f"{'int' if form.signed else 'uint'}{form.bit_width}", form.bit_width, size)


def _named(name: str, bits: Any, group_size: int | None, width: int = 1) -> QuantizedFormat:
    groups = "" if group_size is None else f" in {group_size}s"
    if width > 1:
        groups = f" in {group_size} x {width}"
    return QuantizedFormat(name + groups, float(bits) if isinstance(bits, int | float) else None)


def _made_by(proxy: Any, shape: tuple[int, ...], stacked: int) -> QuantizedFormat:
    form = number_format(proxy.tensor_quant)
    size, width = proxy.quant_metadata.group_size, block_width(proxy.tensor_quant)
    if size is not None and shape:
        size = min(size, shape[proxy.quant_metadata.group_dim])
    if form is not None:
        return _named(str(form), getattr(form, "bit_width", None), size, width)
    graphdef, state = nnx.split(proxy, graph=True)

    def run(state: Any) -> Any:
        for _ in range(stacked):
            state = jax.tree.map(lambda x: x[0], state)
        copy = nnx.merge(graphdef, state)
        return copy(jnp.zeros(shape)) if proxy.role == "weight" else copy.sample()

    made = jax.eval_shape(run, state)
    made = getattr(made, "grouped", made)
    if not on_integers(made):
        return _named(str(getattr(made, "format", type(made).__name__)), None, size)
    sign = "int" if made.signed else "uint"
    bits = made.bit_width
    return _named(f"{sign}{bits}" if isinstance(bits, int) else f"{sign} (learned)", bits, size, width)


def note_of_transform(proxy: Any) -> str:
    """What a report says of the transform before a quantizer; empty without one.

    Args:
        proxy: the quantizer, or what stands in its place; None without one.
    """
    transform = vars(proxy).get("pre_transform") if isinstance(proxy, nnx.Module) else None
    return "" if transform is None else f"the input goes through {name_of_transform(transform)}"


def name_of_transform(transform: Any) -> str:
    """A transform in a report: with its arguments if it is a value, else its class; of a chain, its parts."""
    if isinstance(transform, Chain):
        return ", ".join(map(name_of_transform, transform.parts))
    return type(transform).__name__ if isinstance(transform, nnx.Module) else repr(transform)
