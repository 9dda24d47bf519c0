"""A value of a program, with facts about its quantization."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.dot import FrozenForm, LowBitCache
from jqinject.program.moves import AxesInParameter, StoredNumbers
from jqinject.quant_tensor import as_array

if TYPE_CHECKING:
    from jqinject.program.low_rank_product import LowRankProduct


#: The path of a parameter, Variable or module in a model.
Path = tuple[Any, ...]
#: Runs an operation on arrays.
Evaluate = Callable[[list[jax.Array]], list[jax.Array]]


class Origin(enum.Enum):
    """Where a value comes from."""

    ACTIVATION = enum.auto()
    WEIGHT = enum.auto()
    CONSTANT = enum.auto()


class StatePlace(NamedTuple):
    """Which state of the model's layers a value is. See `kept_state`.

    Attributes:
        label: path of the Variable, as text.
        places: where these numbers are in the whole state, if the program has moved it: an index for each of them.
    """

    label: str
    places: np.ndarray | None = None


@dataclass(eq=False)
class Tracked:
    """A value of a program.

    Attributes:
        value: the array, or the QuantTensor that it was quantized to.
        origin: whether it depends on the inputs, is a weight, or neither.
        pending: the quantizer that its producer chose; the next operation decides whether to apply it.
        quantized: whether it is already quantized.
        site: the name of the site that quantized it; "" if that was elsewhere.
        fusible: whether it comes from a contraction, so constants may be added before it is quantized.
        fixed_range: the range of its values, if known.
        weight_path: the path of the parameter whose numbers these are, at most moved or cast; for an activation,
            numbers that were looked up in it.
        axes: where the axes of that parameter are now; only while sites are looked for.
        form: how the parameter is stored, of an array of a frozen one.
        stored: the numbers of a frozen parameter behind the value, if it is one as a whole.
        cache: the name of the array that the program is given and whose numbers these are, at most moved or written
            into; empty for others.
        cache_ndim: how many axes that array has.
        transform: the transform that its numbers have been through before a cache took them, as its quantizer declares
            it; None for any others.
        unrounded: what a quantized parameter was made from, moved as it is, if a scheme rounds it again backward, or a
            report runs.
        chosen: what an operation that takes arrays reads of a quantized parameter, given the quantized and the
            unrounded numbers; None for the quantized ones.
        low_rank: the update of that parameter, moved as it is; None without an adapter.
        masked: of a value with some elements replaced by constants, `where(mask, x, -1e30)`: from a quantizer to the
            value quantized before that; None for any other.
        state: which state of the model it is.
        sources: the names of the last operations that it comes from; see `Occurrence`.
        twins: quantizer -> this value quantized by it, for the operations that share it.
    """

    value: Any
    origin: Origin = Origin.CONSTANT
    pending: object = None
    quantized: bool = False
    site: str = ""
    fusible: bool = False
    fixed_range: tuple[float, float] | None = None
    weight_path: Path = ()
    axes: AxesInParameter | None = None
    form: FrozenForm | None = None
    stored: StoredNumbers | None = None
    cache: str = ""
    cache_ndim: int = 0
    transform: object = None
    unrounded: jax.Array | None = None
    chosen: Callable[[jax.Array, jax.Array | None], jax.Array] | None = None
    low_rank: LowRankProduct | None = None
    masked: Callable[[Callable[[Tracked], Tracked]], Tracked] | None = None
    state: StatePlace | None = None
    sources: frozenset[str] = frozenset()
    twins: dict[Any, Tracked] = field(default_factory=dict)

    @property
    def array(self) -> jax.Array:
        """The numbers as an array."""
        array = self.value.dequantized() if isinstance(self.value, LowBitCache) else as_array(self.value)
        return array if self.chosen is None else self.chosen(array, self.unrounded)

    @property
    def floats(self) -> jax.Array:
        """The numbers without the quantizer of the parameter, as far as they are known."""
        return self.array if self.unrounded is None else self.unrounded

    @property
    def passed(self) -> Any:
        """What enters and leaves a part of the program: a cache in low bits as it is, else the array."""
        return self.value if isinstance(self.value, LowBitCache) else self.array

    @property
    def is_activation(self) -> bool:
        """Whether it depends on the inputs."""
        return self.origin is Origin.ACTIVATION

    @property
    def is_weight(self) -> bool:
        """Whether it is a parameter, at most reshaped or cast."""
        return self.origin is Origin.WEIGHT

    @property
    def is_float(self) -> bool:
        """Whether it can be quantized."""
        return jnp.issubdtype(dtype_of(self.value), jnp.floating)

    def with_value(self, value: object) -> Tracked:
        """The same facts for another value that holds the same numbers."""
        tracked = replace(self, value=value, masked=None, state=None, stored=None, twins={})
        if shape_of(tracked) != shape_of(self):
            tracked.low_rank = tracked.unrounded = tracked.chosen = None
        return tracked


def plain(value: object, inputs: Sequence[Tracked]) -> Tracked:
    """The output of an operation, with no facts but its origin."""
    activation = any(x.is_activation for x in inputs)
    transform = next((x.transform for x in inputs if x.transform is not None), None)
    return Tracked(value, Origin.ACTIVATION if activation else Origin.CONSTANT, transform=transform)


def joined(value: object, inputs: Sequence[Tracked]) -> Tracked:
    """The output of an operation that moves the numbers of its inputs without changing them."""
    floats = [x for x in inputs if x.is_float] or list(inputs)
    activations = [x for x in floats if x.is_activation]
    if len(floats) == 1:
        if floats[0].is_activation or not any(x.is_activation for x in inputs):
            return floats[0].with_value(value)
        return plain(value, inputs)
    out = plain(value, inputs)
    if activations:
        out.pending = activations[-1].pending
        out.quantized = all(x.quantized for x in activations)
        ranges = {x.fixed_range for x in floats}
        out.fixed_range = ranges.pop() if len(ranges) == 1 else None
    return out


def shape_of(x: Tracked) -> tuple[int, ...]:
    """The shape of a tracked value."""
    return tuple(x.value.shape) if hasattr(x.value, "shape") else ()


def dtype_of(value: Any) -> np.dtype:
    """The dtype of an array, a QuantTensor or a number."""
    return value.dtype if hasattr(value, "dtype") else jnp.result_type(value)


@dataclass(frozen=True)
class WeightCall:
    """One contraction with a parameter, one look-up in it, or one contraction of two activations.

    Attributes:
        name: the parameter's path as text; of two activations, the operation's name.
        module: path of the module that it is in.
        quantized: runs it as the model's quantizers have it; to be called once.
        floating: runs it on the float parameter, without quantizers: the output as an array.
    """

    name: str
    module: str
    quantized: Callable[[], Tracked]
    floating: Callable[[], jax.Array]
