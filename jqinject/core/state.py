"""The Variables of quantizers, and warnings of state that never saw data or that nothing keeps.

| class        | holds                                | who changes it                                    |
|--------------|--------------------------------------|---------------------------------------------------|
| `QuantParam` | learned scale, zero point, bit width | the optimizer; the forward pass once, to fill it  |
| `QuantStat`  | running statistics, step counters    | the forward pass in training mode                 |
| `GradStat`   | amax history and scale of a gradient | `jqinject.value_and_grad`, once per step          |
| `GradSlot`   | zeros; its cotangent carries an amax | nothing; it exists to be differentiated           |
| `Frozen`     | integers or 8-bit floats of a weight | `jqinject.freeze`, a `Freezer` that converts      |

`QuantParam` is an `nnx.Param`: optimizers and `nnx.grad` see it. `QuantStat` is not an `nnx.BatchStat`, so that filters
for batch normalization skip it. Floats are float32, never weakly typed, so that reassembling a quantizer does not
retrace a compiled step. Counters are float32 too, because NNX's tree mode differentiates all that a model holds. They
are exact to 2^24 and stay there: a mean of that many batches is final, and nothing is collected or delayed for longer.

A record is one Variable with several arrays, because NNX handles every Variable at each call of a compiled function:

    class Mean(nnx.Module):
        counter, total = Part(), Part()

        def __init__(self):
            self.record = QuantStat({"counter": float_array(0.0), "total": float_array(0.0)})

A part is read and written like a Variable: `mean.counter.get_value()`, `mean.counter.set_value(...)`,
`mean.counter[...]`. Its state path is `record.counter`; a memory also loads `counter`.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.ops.processes import on_host
from jqinject.quant_tensor import is_concrete


class QuantParam(nnx.Param[jax.Array]):
    """A learned quantizer parameter: trained like a weight.

    Example:
        >>> issubclass(QuantParam, nnx.Param)
        True
    """


class _ArrayOrRecord(nnx.Variable[Any]):
    """Abstract: an array, or a dict of arrays (see `jqinject.core.state`).

    For a record, `variable["counter"]` is a part, `variable[...]` the dict, and `sharding` applies to every part: NNX
    reads it before constructing one for an array.
    """

    def __getitem__(self, index: object) -> Any:
        arrays = self.get_raw_value()
        return arrays if isinstance(arrays, dict) and index is Ellipsis else super().__getitem__(index)

    def set_raw_value(self, value: object, **options: Any) -> None:
        """As of an `nnx.Variable`; of a record, `nnx.as_pure` makes an `nnx.State`."""
        super().set_raw_value(dict(value) if isinstance(value, nnx.State) else value, **options)

    @property
    def sharding(self) -> Any:
        """Of the array, or a dict of those of the parts."""
        arrays = self.get_raw_value()
        if isinstance(arrays, dict):
            return {name: getattr(part, "sharding", None) for name, part in arrays.items()}
        return arrays.sharding


class QuantStat(_ArrayOrRecord):
    """A running statistic or counter of a quantizer: changed by the forward pass in training mode, never
    trained.

    Example:
        >>> issubclass(QuantStat, (nnx.Param, nnx.BatchStat))
        False
    """


class GradStat(_ArrayOrRecord):
    """A statistic of a gradient: changed once per step by `jqinject.value_and_grad`, never by a forward pass.

    Example:
        >>> issubclass(GradStat, (nnx.Param, QuantStat))
        False
    """


class GradSlot(nnx.Variable[jax.Array]):
    """Where a backward pass reports: the cotangent of this Variable.

    Its value is always zero and need not be stored.
    """


class Frozen(nnx.Variable[Any]):
    """The low-bit numbers of a weight, their scale or zero point: served, never trained.

    Example:
        >>> issubclass(Frozen, (nnx.Param, QuantStat))
        False
    """


def float_array(value: object, shape: tuple[int, ...] = ()) -> jax.Array:
    """A float32 array filled with a number: one transfer, no compilation.

    Example:
        >>> float_array(1.0, (2,))
        Array([1., 1.], dtype=float32)
    """
    return jnp.asarray(np.full(shape, value, dtype=np.float32))


def all_counted(counter: Any) -> bool:
    """Whether a counter (of every layer of a stack) is above 0; True if traced or abstract."""
    return not has_numbers(counter) or bool(np.all(on_host(counter) > 0))


def has_numbers(array: jax.Array) -> bool:
    """Whether an array can be read: neither traced nor abstract."""
    return isinstance(array, jax.Array | np.ndarray) and is_concrete(array)


@dataclass(frozen=True, eq=False, repr=False)
class RecordPart:
    """One array of a record, read and written like a Variable.

    Args:
        record: the Variable, which holds a dict.
        name: the array's.
    """

    record: nnx.Variable[Any]
    name: str

    def get_value(self) -> jax.Array:
        """The array."""
        return self.record.get_raw_value()[self.name]

    def set_value(self, value: object) -> None:
        """Replace the array."""
        self.record.set_value({**self.record.get_raw_value(), self.name: value})

    def __getitem__(self, index: object) -> jax.Array:
        return self.get_value()[index]

    def __setitem__(self, index: object, value: object) -> None:
        self.set_value(self.get_value().at[index].set(value))

    shape = property(lambda self: self.get_value().shape, doc="The array's.")
    dtype = property(lambda self: self.get_value().dtype, doc="The array's.")
    size = property(lambda self: self.get_value().size, doc="The array's.")

    def __repr__(self) -> str:
        return f"RecordPart({self.name}={self.get_value()!r})"


class Part:
    """A module attribute that is the part of that name in its `record`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, module: Any, owner: type) -> Any:
        return self if module is None else RecordPart(module.record, self.name)


def state_parts(variable: nnx.Variable[jax.Array]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """A Variable's readable and writable items, by path below its own: itself, or the parts of a record."""
    arrays = variable.get_raw_value()
    if isinstance(arrays, dict):
        yield from (((name,), RecordPart(variable, name)) for name in arrays)
    else:
        yield (), variable


def kind_of(variable: object) -> type:
    """The class of a Variable, or of the record that it is a part of."""
    return type(variable.record if isinstance(variable, RecordPart) else variable)


def flat_parts(state: nnx.State[object, object]) -> list[tuple[tuple[Any, ...], Any]]:
    """The readable and writable items of an `nnx.State`, by path: Variables, parts of records, and arrays."""
    parts: list[tuple[tuple[object, ...], object]] = []
    for path, leaf in nnx.to_flat_state(state):
        below = state_parts(leaf) if isinstance(leaf, nnx.Variable) else [((), leaf)]
        parts.extend(((*path, *name), part) for name, part in below)
    return parts


UNSEEN = "its range never saw data: it is what it was initialized to, or that of the given tensor"
CURE = (
    "jqinject.calibrate(model, batches); or train it, or load a state with ranges (jqinject.load_state), before "
    "model.eval()"
)


class UncalibratedWarning(UserWarning):
    """A quantizer of activations whose range never saw data was used in evaluation, outside of compiled code."""


class LostStateWarning(UserWarning):
    """What quantizers record is discarded: by a part of a program, or by a backward pass without a listener."""


def warn_of_lost_amax(quantizer: str) -> None:
    """Warn that a backward pass discards the amax that a quantizer in training mode reports.

    Args:
        quantizer: its name.
    """
    warnings.warn(
        f"{quantizer} quantizes a gradient in training mode, and the amax that it sees is lost: the backward pass is "
        "not one of jqinject.value_and_grad (or grad), or the quantizer is not among its positional arguments (the "
        "model is reached some other way, its statistics were split off, or it was made during the call).\n"
        "  cure: pass the whole model, called once before, as a positional argument: "
        "jqinject.value_and_grad(loss_fn)(model, ...); or nnx.vjp between jqinject.begin_step(model) and "
        "jqinject.end_step(model, gradients=...); or put what is not trained into eval mode: model.eval()",
        LostStateWarning,
        stacklevel=1,  # the caller is JAX's transposition
    )
