"""The weights of a model and the grids that they are quantized to, read from the model itself. Next: `site_table`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.core import QuantParam, QuantStat, _protocols, transforms
from jqinject.dot import FrozenParam
from jqinject.inject import Binding
from jqinject.model.frozen_weights import KernelInOp, WeightHolder, op_of_weight, quantized_op
from jqinject.model.inspect.weight_flow import ARGUMENT, Flow
from jqinject.model.walk import ARRAYS, ModelIndex, Path, PlainArray, bytes_of
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.ops import FloatGrid, Grid, IntGrid, cut, groups
from jqinject.program import HELD, OpQuantizers, Site, dotted
from jqinject.proxy import QuantProxyFromInjector, stack_of
from jqinject.quant_tensor import is_grouped, is_quantized, on_integers

LAYERS = (QuantWeightLayer, nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.Conv, nnx.ConvTranspose)
ModelArray = nnx.Variable[Any] | PlainArray
# Variables that a call writes: what is contracted of them comes from activations.
WRITTEN = (nnx.Cache, nnx.Intermediate, nnx.BatchStat, nnx.RngState)


@dataclass(frozen=True)
class OperandGrid:
    """The grid of an operand.

    Attributes:
        text: such as "int8", "float8_e4m3fn", "int4 in groups of 32", "int8 per row".
        bits: of one code; None if they are learned, or if only the scheme knows.
        is_integer: whether its codes are integers, as far as it is known.
    """

    text: str
    bits: float | None = None
    is_integer: bool = True

    @property
    def is_low(self) -> bool:
        """Whether it has at most 8 bits, or learned ones."""
        return self.bits is None or self.bits <= 8


#: Of an operand that is not quantized.
FLOAT = OperandGrid("", 32.0)


class ModelWeights:
    """The weights of a model, by their paths as text.

    Attributes:
        model: the model.
        nodes: path -> every module, Variable and array.
        quantizers: between the operations of the model; None if it has none.
        sites: the quantizers of parameters that the model contracts by itself, by path.
        between: the quantizers of tensors between operations, by name.
        at_sites: weight -> name of the site that quantizes it at its contraction, for a policy that does so.

    Args:
        model: an NNX module, concrete or abstract.
    """

    def __init__(self, model: nnx.Module) -> None:
        self.model = model
        self.nodes = ModelIndex(model).nodes
        quantizers: OpQuantizers | None = vars(model).get(HELD)
        self.quantizers = quantizers
        self.sites: Mapping[str, WeightHolder] = {} if quantizers is None else quantizers.weight_sites()
        self.between: Mapping[str, nnx.Module] = {} if quantizers is None else quantizers.held
        self._stacks = {} if quantizers is None else dict(quantizers.stacks)
        self.at_sites: dict[str, str] = {}
        self._grids: dict[tuple[object, ...], OperandGrid] = {}

    @cached_property
    def all(self) -> Mapping[str, ModelArray]:
        """Every array that may be contracted: a Variable, or an array without one."""
        arrays = ((path, node) for path, node in self.nodes.items() if _is_array(node))
        named = ((self.name_of(path), node) for path, node in arrays)
        return {name: node for name, node in named if name}

    def layer_of(self, name: str) -> object:
        """The module that holds a weight; None if a container does."""
        return self.nodes.get(tuple(name.split("."))[:-1])

    def entry_of(self, name: str) -> str:
        """What a report lists a weight under: its layer, or its own path."""
        return name.rpartition(".")[0] if isinstance(self.layer_of(name), LAYERS) else name

    def holder_of(self, name: str) -> WeightHolder | None:
        """What holds the quantizer of a weight; None where nothing may."""
        layer = self.layer_of(name)
        if isinstance(layer, QuantWeightLayer) and name.rpartition(".")[2] == layer.weight_name:
            return layer
        return self.sites.get(name)

    def stored_bytes(self, name: str) -> int:
        """The bytes of a weight as the model stores it, scales included; 0 of no array of the model."""
        node, op = self.all.get(name), quantized_op(self.layer_of(name))
        value = node.get_value() if isinstance(node, PlainArray) else None
        value = node.get_raw_value() if isinstance(node, nnx.Variable) else value
        return bytes_of((value, None if op is None else op.rhs_freezer))

    def flow_of(self, path: tuple[object, ...]) -> Flow:
        """The flow of an input of a call's program, by its path: the model's state begins with 0."""
        if path[:1] != (0,):
            return ARGUMENT
        name = self.name_of(tuple(map(str, path[1:])))
        return Flow(sources=frozenset({name} if name else ()))

    def name_of(self, path: Path) -> str:
        """The path, as text, of the weight that an array of the state stores; "" for other arrays, such as scales."""
        places = (path[:end] for end in range(len(path), -1, -1))
        variable = next((x for x in places if isinstance(self.nodes.get(x), nnx.Variable | PlainArray)), None)
        if variable is None:
            return ""
        above = [self.nodes.get(variable[:end]) for end in range(len(variable))]
        if HELD in variable or any(isinstance(node, QuantProxyFromInjector) for node in above):
            return ""
        # The float weight that a frozen layer still has.
        if variable[-1] == "master" and isinstance(above[-1], QuantWeightLayer | KernelInOp):
            return ""
        node, below = self.nodes[variable], path[len(variable) :]
        if isinstance(node, FrozenParam):
            return ".".join(variable) if below in ((), ("value",)) else ""
        return "" if isinstance(node, WRITTEN) else ".".join(variable)

    # --- how they are quantized

    def grid_of(self, name: str) -> OperandGrid:
        """The grid of a weight."""
        node, op, holder = self.all.get(name), op_of_weight(self.layer_of(name)), self.holder_of(name)
        if isinstance(node, FrozenParam):
            form = node.form
            return _grid(form.grid, None if form.groups is None else form.groups.size, form.block_width)
        if op is not None and name.rpartition(".")[2] == "kernel":
            return _of_scheme(op, 1)
        if holder is not None:
            return self.grid_from(holder.weight_quant, holder.weight_shape, len(stack_of((holder,))))
        return self.grid_at(self.at_sites.get(name, ""), 1)

    def input_grid(self, name: str) -> OperandGrid:
        """The grid to which a layer quantizes its own input."""
        layer, op = self.layer_of(name), op_of_weight(self.layer_of(name))
        if op is not None:
            return _of_scheme(op, 0)
        own = isinstance(layer, QuantWeightLayer)
        return self.grid_from(layer.input_quant, stacked=len(stack_of((layer,)))) if own else FLOAT

    def transform_of_input(self, name: str, site: str) -> str:
        """What the other operand of a weight goes through before it is quantized, as text; "" for nothing.

        Args:
            name: path of the weight.
            site: of the other operand, if it is quantized between operations.
        """
        layer = self.layer_of(name)
        own = layer.input_quant if isinstance(layer, QuantWeightLayer) else None
        proxy = self.between.get(site) if site else own
        attributes = {} if proxy is None else vars(proxy)
        transform, back = (
            attributes.get("pre_transform"),
            " and back" * attributes.get("undo_transform", False),
        )
        return "" if transform is None else f"the input goes through {name_of_transform(transform)}{back}"

    def range_of_loop(self, site: str, steps: int) -> str:
        """What a report says of the range of an operand inside a loop; "" where each step has its own, or none is kept.

        Args:
            site: of the operand, if it is quantized between operations.
            steps: how many there are.
        """
        proxy = self.between.get(site)
        keeps = isinstance(proxy, QuantProxyFromInjector) and bool(nnx.state(proxy, (QuantStat, QuantParam)))
        if steps == 1 or not keeps or site in self._stacks:
            return ""
        return f"the {steps} steps of a loop share one input range, the largest of each batch"

    def grid_at(self, site: str, operand: int = 0) -> OperandGrid:
        """The grid of what a site between operations quantizes; "quantized" if it came so from a layer.

        Args:
            site: its name; "" for none.
            operand: of a contraction by a scheme, which operand: 0 for the left one, 1 for the right one.
        """
        if site == "quantized":
            return OperandGrid("quantized")
        quantizer = self.between.get(site)
        if quantizer is None or isinstance(quantizer, QuantProxyFromInjector):
            return self.grid_from(quantizer, stacked=self._stacks.get(site, 0))
        return _of_scheme(quantizer, operand)

    def note_sites(self, sites: Iterable[Site]) -> None:
        """Remember the sites that quantize a weight at its contraction."""
        self.at_sites |= {
            dotted(site.weight_path): site.name
            for site in sites
            if site.weight_path and site.name in self.between and site.is_weight != bool(site.contraction)
        }

    def grid_from(
        self, proxy: QuantProxyFromInjector | None, shape: tuple[int, ...] = (), stacked: int = 0
    ) -> OperandGrid:
        """The grid that a quantizer rounds to.

        Args:
            proxy: the quantizer, or None.
            shape: of the weight, with the axes of a stack; not needed for an activation.
            stacked: the number of these.
        """
        if proxy is None or not proxy.is_quant_enabled:
            return FLOAT
        key = proxy.binding, shape[stacked:]  # what affects the grid
        if key not in self._grids:
            self._grids[key] = _grid_from(proxy, *key[1:], stacked)
        return self._grids[key]


def _is_array(node: object) -> bool:
    if isinstance(node, FrozenParam):
        return True
    return isinstance(node, nnx.Variable | PlainArray) and isinstance(node.get_value(), ARRAYS)


def _grid(grid: Grid, group_size: int | None, width: int = 1, scales: str = "") -> OperandGrid:
    """A grid, with how many elements share a scale; None without groups."""
    bits = None if grid.is_learned else grid.bit_width
    name = f"{'int' if grid.signed else 'uint'}{' (learned)' if bits is None else bits}"
    if group_size is not None:
        scales = f" in blocks of {group_size} x {width}" if width > 1 else f" in groups of {group_size}"
    text = f"{name if grid.is_integer else grid}{scales}"
    return OperandGrid(text, None if bits is None else float(bits), grid.is_integer)


def _of_scheme(op: Any, operand: int) -> OperandGrid:
    """The grid of an operand of a contraction by a scheme, as its injector declares it."""
    if not op.quantizes[operand]:
        return FLOAT
    binding: Binding = op.scheme[("fprop_lhs", "fprop_rhs")[operand]]
    names = ("q_dtype", "bit_width", "group_size")
    dtype, bits, size = (binding.resolve(name) if binding.declares(name) else None for name in names)
    size = size if isinstance(size, int) else None
    if dtype is not None:
        return _grid(FloatGrid.of_dtype(dtype), size)
    if isinstance(bits, int) and not binding.declares("exponent_bit_width"):
        return _grid(IntGrid(bits), size)
    return OperandGrid("scheme")


def _grid_from(proxy: Any, shape: tuple[int, ...], stacked: int) -> OperandGrid:
    form = _protocols.number_format(proxy.tensor_quant)
    size, width = proxy.quant_metadata.group_size, _protocols.block_width(proxy.tensor_quant)
    if size is not None and shape:
        size = min(size, shape[proxy.quant_metadata.group_dim])
    if form is not None:
        return _grid(form, size, width)
    graphdef, state = nnx.split(proxy, graph=True)

    def run(state: nnx.State[Any, Any]) -> Any:
        for _ in range(stacked):
            state = jax.tree.map(lambda x: x[0], state)
        copy = nnx.merge(graphdef, state)
        if copy.role == "weight":
            return copy(jnp.zeros(shape))
        return copy.sample() if size is not None or not copy.is_dynamic else copy.trial(jnp.zeros((2, 3)))

    sample = jax.eval_shape(run, state)
    sample = sample.grouped if is_grouped(sample) else sample
    if not is_quantized(sample):
        return OperandGrid(type(sample).__name__)
    has_scales = on_integers(sample) and proxy.role != "weight" and sample.scale.size > 1
    scales = (" per row" if proxy.is_dynamic else " per channel") if has_scales else ""
    return _grid(sample.grid, size, width, scales)


def name_of_transform(transform: object) -> str:
    """A transform in a report: with its arguments if it is a value, else its class; of a chain, its parts."""
    if isinstance(transform, transforms.Chain):
        return ", ".join(map(name_of_transform, transform.parts))
    return type(transform).__name__ if isinstance(transform, nnx.Module) else repr(transform)


def note_of_shards(layer: object) -> str:
    """The note for a weight whose groups cross the borders of its shards; empty for any other."""
    if not isinstance(layer, QuantWeightLayer) or layer.frozen is not None or layer.weight_quant is None:
        return ""
    size, axis = layer.weight_quant.quant_metadata.group_size, layer.weight_quant.quant_metadata.group_dim
    weight = layer.weight.get_value()
    if size is None or axis is None or not isinstance(weight, jax.Array):
        return ""
    length, shard = weight.shape[axis], weight.sharding.shard_shape(weight.shape)[axis]
    pieces = cut.cut_in_place(weight, groups.fitting_size(size, length), axis % weight.ndim)
    if pieces is None:
        return ""
    return (
        f"groups of {pieces.size} cross its shards of {shard} along axis {axis}: integers are contracted in pieces of "
        f"{pieces.piece}"
    )
