"""What `QDotGeneral`, `QEinsum` and `QConvGeneralDilated` share: AQT's modes and stored operands."""

import enum
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jax.typing import DTypeLike

from jqinject.core import Frozen, component, state
from jqinject.dot.frozen.frozen_form import PER_AXIS, FrozenForm
from jqinject.dot.frozen.frozen_numbers import ScaleForms, frozen_numbers
from jqinject.dot.frozen.frozen_param import FrozenParam
from jqinject.dot.geometry.dimensions import Labels
from jqinject.dot.schemes.contraction import NO_STATE_IN_SWITCHED, NO_STATE_OF_FUNCTIONS, Contraction
from jqinject.dot.schemes.scheme import SchemeLike, SchemeSpec, checked_scheme
from jqinject.dot.schemes.scheme_dot import contract_by_scheme
from jqinject.dot.tensors.labelled_tensor import LabelledTensor
from jqinject.dot.tensors.six_operands import Plan
from jqinject.ops import FloatGrid, IntGrid
from jqinject.quant_tensor import FloatQuantTensor, IntQuantTensor, Operand, is_quantized, on_integers


class QuantMode(enum.Enum):
    """What happens to one operand of a quantized contraction."""

    #: It is quantized at every call.
    TRAIN = "train"
    #: It is quantized at every call, and the `Freezer` stores it.
    CONVERT = "convert"
    #: The `Freezer`'s stored operand is used instead.
    SERVE = "serve"


class Freezer(component.InnerModule):
    """Hold one operand as a `FrozenParam`: `set` stores it, `get` returns it.

    Given shapes, the parameter exists from the start as zeros, sharded by `metadata`, also under `nnx.eval_shape`;
    otherwise the first `set` makes it.

    Attributes:
        value: the parameter; None if nothing is stored.

    Args:
        shape: of the operand; None takes it from the first `set`.
        dtype: of the payload.
        scale_shape: of the scale.
        summed: the summed axes of the operand; they are stored last, as backends prefer.
        metadata: of the parameter, such as `{"out_sharding": ("model", None)}`.

    Example:
        >>> weight = IntQuantTensor.from_int(jnp.array([[1, -2]], jnp.int8), jnp.array([[0.5]]))
        >>> freezer = Freezer()
        >>> freezer.set(FrozenParam.of(weight, has_zero_point=False))
        >>> freezer.get()[...]
        Array([[ 0.5, -1. ]], dtype=float32)
    """

    value: FrozenParam | None

    def __init__(
        self,
        shape: tuple[int, ...] | None = None,
        dtype: DTypeLike = jnp.int8,
        scale_shape: tuple[int, ...] = (),
        summed: tuple[int, ...] = (),
        *,
        metadata: Mapping[str, object] | None = None,
    ) -> None:
        self.metadata = tuple((metadata or {}).items())
        self.value = nnx.data(None)
        if shape is not None:
            zeros = _zeros(tuple(shape), jnp.dtype(dtype), tuple(scale_shape))
            self.set(_sharded(FrozenParam.of(zeros, tuple(summed), has_zero_point=False), self.metadata))

    def set(self, operand: FrozenParam) -> None:
        """Store an operand.

        Raises:
            ValueError: it differs in shape or dtype from what is held.
        """
        stored = self.value
        if stored is not None and _facts(stored) != _facts(operand):
            raise ValueError(
                f"Freezer holds {_described(stored)} and was given {_described(operand)}.\n  cure: a module of its own "
                "for every layer; one that several layers share can only be used in QuantMode.TRAIN"
            )
        if stored is not None and stored.form == operand.form:
            stored.set_value(operand.numbers)
        else:
            metadata = dict(self.metadata) if stored is None else stored.get_metadata()
            self.value = FrozenParam.holding(operand.numbers, operand.form, metadata)

    def get(self) -> FrozenParam:
        """Return what is stored.

        Raises:
            ValueError: nothing was stored and no shapes were given.
        """
        if self.value is None:
            raise ValueError(
                "QuantMode.SERVE before CONVERT: there is nothing stored to serve.\n  cure: call it once in "
                "QuantMode.CONVERT, load a frozen checkpoint into a module made with its shapes, or "
                "jqinject.freeze(model)"
            )
        return self.value


def _zeros(
    shape: tuple[int, ...], dtype: DTypeLike, scale_shape: tuple[int, ...]
) -> IntQuantTensor | FloatQuantTensor:
    """Zeros with scales of 1."""
    payload, scale = jnp.zeros(shape, dtype), jnp.ones(scale_shape, jnp.float32)
    if not jnp.issubdtype(dtype, jnp.integer):
        return FloatQuantTensor.stored(payload, scale, None, FloatGrid.of_dtype(dtype), jnp.float32)
    grid = IntGrid(jnp.iinfo(dtype).bits, signed=bool(jnp.issubdtype(dtype, jnp.signedinteger)))
    return IntQuantTensor.stored(payload, scale, None, grid, jnp.float32)


def _sharded(operand: FrozenParam, metadata: tuple[tuple[str, object], ...]) -> FrozenParam:
    """The parameter with its numbers where NNX places Variables with this metadata, on a mesh."""
    numbers, form = operand.numbers, operand.form
    placed = {}
    for name, number in numbers.items():
        own: dict[str, Any] = {
            key: tuple(form.partition_specs(entry, numbers)[name])
            if key in PER_AXIS and isinstance(entry, tuple)
            else entry
            for key, entry in metadata
        }
        placed[name] = Frozen(number, **own).get_value()
    return FrozenParam.holding(placed, form)


def _facts(param: FrozenParam) -> tuple[Any, ...]:
    return param.form.stored, {name: number.shape for name, number in param.numbers.items()}


def _described(param: FrozenParam) -> str:
    stored, scale = param.form.stored, param.numbers["scale"]
    over = f", summed over axes {stored.summed}" if stored.summed else ""
    return f"{stored.dtype.name} numbers of shape {stored.shape} with scales of shape {scale.shape}{over}"


Axes = tuple[int, ...]


class QuantizedOp(Contraction):
    """The common base: a contraction by a scheme whose operands have modes and can be stored."""

    countdown: state.QuantStat | None
    lhs_quant_mode: QuantMode
    rhs_quant_mode: QuantMode

    def __init__(
        self,
        config: SchemeLike,
        *,
        lhs_quant_mode: QuantMode = QuantMode.TRAIN,
        rhs_quant_mode: QuantMode = QuantMode.TRAIN,
        lhs_freezer: Mapping[str, object] | Freezer | None = None,
        rhs_freezer: Mapping[str, object] | Freezer | None = None,
        lhs_shape: Sequence[int] | None = None,
        rhs_shape: Sequence[int] | None = None,
        dimension_numbers: object = None,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        scheme = self._fitted(SchemeSpec.of(checked_scheme(config)))
        if scheme.before is not None:
            scheme = scheme.replaced(before=self._fitted(scheme.before))
        super().__init__(scheme, type(self).__name__, rngs)
        self.countdown = nnx.data(state.QuantStat(state.float_array(scheme.delay)) if scheme.delay else None)
        self.lhs_quant_mode = _checked(lhs_quant_mode, "lhs_quant_mode")
        self.rhs_quant_mode = _checked(rhs_quant_mode, "rhs_quant_mode")
        self.lhs_freezer = _freezer(lhs_freezer)
        self.rhs_freezer = _freezer(rhs_freezer)
        if (lhs_shape, rhs_shape, dimension_numbers) != (None, None, None):
            self._complete_for(lhs_shape, rhs_shape, dimension_numbers)

    @classmethod
    def of_one_call(cls, config: SchemeLike, key: jax.Array | None, function: str) -> Self:
        """The module for one call of a function.

        Raises:
            TypeError: the configuration is not a scheme, or one that counts calls.
        """
        op = cls(config, rngs=None if key is None else nnx.Rngs(key))
        op.where, op.stateless = function, NO_STATE_OF_FUNCTIONS
        if op.scheme.delay:
            why, cure = op.stateless
            raise TypeError(
                f"{function}: {op.scheme.name} counts calls (quant_delay_steps), {why}.\n  cure: {cure}"
            )
        return op

    @classmethod
    def _fitted(cls, scheme: SchemeSpec) -> SchemeSpec:
        """A scheme, as it applies to the operation; refused if it does not fit, whatever its operands."""
        return scheme

    def _complete_for(
        self, lhs_shape: Sequence[int] | None, rhs_shape: Sequence[int] | None, numbers: object
    ) -> None:
        """Make the quantizers that keep state, for operands of these shapes."""
        if lhs_shape is None or rhs_shape is None:
            raise ValueError(
                f"{self.where}: {'lhs_shape' if lhs_shape is None else 'rhs_shape'} is missing beside the other.\n"
                "  cure: the shapes of both operands, with any number of rows: lhs_shape=(1, 64), rhs_shape=(64, 32)"
            )
        lhs, rhs = tuple(lhs_shape), tuple(rhs_shape)
        self.complete_by(lambda op: op(*op._arguments(jnp.zeros(lhs), jnp.zeros(rhs), numbers)))

    @staticmethod
    @abstractmethod
    def _arguments(lhs: jax.Array, rhs: jax.Array, numbers: object) -> tuple[object, ...]:
        """The arguments of a call.

        Args:
            lhs, rhs: the operands.
            numbers: what says which of their axes meet; None for those of Flax's layer with this op.
        """

    @property
    def quantizes(self) -> tuple[bool, bool]:
        """Whether the left and the right operand have a quantizer in the forward product."""
        return "fprop_lhs" in self.scheme.quantizers, "fprop_rhs" in self.scheme.quantizers

    def check_freezes(self) -> None:
        """Raise if the right operand cannot be stored for serving.

        Raises:
            ValueError: the forward contraction is tiled, so scales are not those of the whole operand, or the scheme
                is still to be switched to.
        """
        if self.scheme["tile_size"] is not None:
            raise ValueError(
                "an operand of a forward contraction that is cut into pieces (tile_size=) can't be stored for serving: "
                "its pieces have scales of their own.\n  cure: a forward contraction without tile_size, or a weight "
                "in groups, in a layer of jqinject.nn"
            )
        left = None if self.countdown is None else self.countdown.get_value()
        if isinstance(left, jax.Array) and not isinstance(left, Tracer) and int(left.max()) > 0:
            raise ValueError(
                f"{self.where}: {self.scheme.name} begins in {int(left.max())} calls in training "
                "(quant_delay_steps), so the weight was trained for another scheme.\n"
                "  cure: train on, or op.countdown[...] = 0"
            )

    def frozen_rhs(
        self, rhs: jax.Array, summed: Axes, stored_last: Axes
    ) -> tuple[dict[str, jax.Array], FrozenForm]:
        """The low-bit numbers of the right operand, as `frozen_numbers` returns them.

        Args:
            rhs: the operand.
            summed: the summed axes.
            stored_last: those that are stored last.

        Raises:
            ValueError: the scheme does not quantize it, or only as the contraction sees it.
        """
        labels = tuple(("rhs", axis) for axis in range(rhs.ndim))
        over = tuple(labels[axis] for axis in summed)
        return self._frozen("fprop_rhs", LabelledTensor(rhs, labels), over, stored_last)

    def _frozen(
        self, name: str, x: LabelledTensor, summed: Labels, stored_last: Axes
    ) -> tuple[dict[str, jax.Array], FrozenForm]:
        """The low-bit numbers of an operand of the forward product; see `frozen_rhs`."""
        self.check_freezes()
        proxy, quantized = self.quantized(name, x, summed)
        if proxy is None:
            raise ValueError(
                "Freezer: there is nothing to freeze, as the operand is not quantized (its bits are None).\n"
                "  cure: QuantMode.TRAIN for this side, or a configuration that quantizes it"
            )
        tensor = quantized.in_order(x.labels).tensor
        if not is_quantized(tensor):
            raise ValueError(
                f"{self.where}: {self.scheme.name}.{name} = {proxy.binding.base.__name__} is not stored for serving: "
                "it makes no QuantTensor with the axes of the operand.\n  cure: a quantizer of weights, such as "
                "Int8WeightPerChannelAbsMax"
            )
        shifted = proxy.has_zero_point and (not on_integers(tensor) or tensor.has_zero_point)
        forms = ScaleForms(proxy.scale_dtype, proxy.has_whole_zero_points, proxy.scale_factor)
        return frozen_numbers(tensor, stored_last, shifted, None, forms)

    def has_range(self) -> bool | None:
        """Whether every collected range saw data; None without ranges. See `core.StaticRange`."""
        seen_data = [saw for saw in (proxy.has_range() for proxy in self.proxies) if saw is not None]
        return all(seen_data) if seen_data else None

    def begin_calibration(self) -> None:
        """Restart the collection of ranges."""
        for proxy in self._collectors():
            proxy.begin_calibration()

    def end_calibration(self) -> None:
        """Use what was collected as the ranges."""
        for proxy in self._collectors():
            proxy.end_calibration()

    def _collectors(self) -> list[Any]:
        """The quantizers that collect ranges."""
        return [proxy for proxy in self.proxies if proxy.has_range() is not None]

    def _contract(
        self, plan: Plan, lhs: Operand, rhs: Operand, unrounded: jax.Array | None = None, *rest: jax.Array
    ) -> jax.Array:
        """The contraction of operands of `_seen`, each stored first where its mode says so."""
        if QuantMode.CONVERT in (self.lhs_quant_mode, self.rhs_quant_mode):
            of_left, of_right = plan.summed("fprop")
            lhs = self._served("lhs", LabelledTensor(lhs, plan.axes.lhs), of_left)
            rhs = self._served("rhs", LabelledTensor(rhs, plan.axes.rhs), of_right)
        return self._by_scheme(plan, lhs, rhs, unrounded, *rest)

    def _by_scheme(self, plan: Plan, *operands: Any) -> jax.Array:
        """The contraction by the scheme, or in its first calls in training by the one before it: one program for both.

        Args:
            plan, operands: as for `contract_by_scheme`.
        """
        if self.countdown is None:
            return contract_compiled(self, plan, *operands)
        left = self.countdown.get_value()
        if not self.use_running_average:
            self.countdown.set_value(jnp.maximum(left - 1, 0))
        key = None if self.stream is None or self.deterministic else self.stream()
        after = self.scheme
        assert after.before is not None, "a delay has one"
        branches = (
            lambda scheme=scheme: contract_by_scheme(self._in_same_mode(scheme, key), plan, *operands)
            for scheme in (after.before, after.replaced(before=None, quant_delay_steps=0))
        )
        return jax.lax.cond(left > 0, *branches)

    def _in_same_mode(self, scheme: SchemeSpec, key: jax.Array | None) -> Contraction:
        """A contraction by another scheme, which keeps no state, in the same mode."""
        rngs = None if key is None else nnx.Rngs(key)
        contraction = Contraction(scheme, self.where, rngs, stateless=NO_STATE_IN_SWITCHED)
        contraction.set_view(self.use_running_average, self.deterministic)
        return contraction

    def _seen(self, lhs: Operand, rhs: Operand) -> tuple[Operand, Operand]:
        """The operands of a call, each in its stored form where its mode, or the caller, serves that."""
        if self.lhs_quant_mode is QuantMode.SERVE:
            lhs = self.lhs_freezer.get().operand(lhs.dtype)
        if self.rhs_quant_mode is QuantMode.SERVE:
            rhs = self.rhs_freezer.get().operand(rhs.dtype)
        left, right = (x.operand() if isinstance(x, FrozenParam) else x for x in (lhs, rhs))
        return left, right

    def _served(self, side: str, x: LabelledTensor, summed: Labels) -> Operand:
        """An operand; in its stored form, after it is stored, where its mode says so."""
        if (self.lhs_quant_mode if side == "lhs" else self.rhs_quant_mode) is not QuantMode.CONVERT:
            return x.tensor
        freezer = self.lhs_freezer if side == "lhs" else self.rhs_freezer
        over = tuple(axis for axis, label in enumerate(x.labels) if label in summed)
        freezer.set(FrozenParam.holding(*self._frozen(f"fprop_{side}", x, summed, over)))
        return freezer.get().operand(x.tensor.dtype)

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        """Same arguments as the function it replaces."""


def contract_compiled(contraction: Contraction, plan: Plan, *operands: Any) -> jax.Array:
    """A contraction by a scheme, compiled where it would else run one operation after the other.

    That is a contraction of arrays, or of stored tensors, outside of `jit`, whose quantizers keep no state.

    Args:
        contraction, plan, operands: as for `contract_by_scheme`.
    """
    leaves = jax.tree.leaves(operands, is_leaf=lambda x: is_quantized(x) and not x.is_stored)
    runs_now = all(isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) for leaf in leaves)
    if not runs_now or contraction.record is not None or contraction.proxies:
        return contract_by_scheme(contraction, plan, *operands)
    facts = contraction.scheme, contraction.where, contraction.stateless, contraction.modes
    y, stream = _compiled(plan, *facts, contraction.stream, operands)
    if contraction.stream is not None:
        contraction.stream.count.set_value(stream.count.get_value())
    return y


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _compiled(
    plan: Plan,
    scheme: SchemeSpec,
    where: str,
    stateless: tuple[str, str] | None,
    modes: tuple[bool, bool],
    stream: nnx.RngStream | None,
    operands: tuple[Any, ...],
) -> tuple[jax.Array, nnx.RngStream | None]:
    """The contraction, and the stream that it has drawn from.

    Args:
        plan: as for `contract_by_scheme`.
        operands: likewise.
        scheme, where, stateless, modes, stream: of the module.
    """
    contraction = Contraction(scheme, where, stateless=stateless)
    contraction.set_view(*modes)
    contraction.stream = nnx.data(stream)
    return contract_by_scheme(contraction, plan, *operands), contraction.stream


def _checked(mode: object, name: str) -> QuantMode:
    if isinstance(mode, QuantMode):
        return mode
    raise TypeError(f"{name} must be QuantMode.TRAIN, QuantMode.CONVERT or QuantMode.SERVE, got {mode!r}")


def _freezer(freezer: Mapping[str, object] | Freezer | None) -> Freezer:
    return freezer if isinstance(freezer, Freezer) else Freezer(**(freezer or {}))
