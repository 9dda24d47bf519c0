"""`grad` and `value_and_grad` that also collect the statistics of gradient quantizers."""

import contextlib
import functools
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any, ParamSpec, TypedDict, TypeVar, Unpack, overload

from flax import nnx

from jqinject.core import GradSlot
from jqinject.core._protocols import StepStatistic
from jqinject.model.train import steps
from jqinject.model.train.steps import amax_scalings
from jqinject.program import OpQuantizers

ArgNum = int | nnx.DiffState
Given = ParamSpec("Given")
Value = TypeVar("Value")
#: A function of a user, or one derived from it: its result is whatever that returns.
Function = Callable[..., Any]


class GradOptions(TypedDict, total=False):
    """The keywords of `grad` and `value_and_grad`."""

    argnums: ArgNum | Sequence[ArgNum]
    has_aux: bool
    holomorphic: bool
    allow_int: bool
    reduce_axes: Sequence[Hashable]
    graph: bool | None
    graph_updates: bool | None


@overload
def value_and_grad(
    f: Callable[Given, Value], **options: Unpack[GradOptions]
) -> Callable[Given, tuple[Value, Any]]: ...
@overload
def value_and_grad(
    f: None = None, **options: Unpack[GradOptions]
) -> Callable[[Callable[Given, Value]], Callable[Given, tuple[Value, Any]]]: ...
def value_and_grad(f: Function | None = None, **options: Unpack[GradOptions]) -> Function:
    """`nnx.value_and_grad` that also updates the statistics of 8-bit float quantizers.

    One call is one step: forward amaxes are collected by maximum over all uses in it (layers that share a quantizer,
    the steps of a scan, micro-batches inside `f`); backward ones leave the backward pass as cotangents of the
    quantizers' slots, also by maximum; then every history rolls once. Between `begin_step` and `end_step`, calls only
    collect. The scale used in a step is fixed before the step, so splitting a step into micro-batches does not change
    it.

    The model must be a positional argument, differentiated or not. NNX loses what the forward pass of a module writes
    if `nnx.scan` or `nnx.vmap` only broadcasts it (`in_axes=None`); carry it through a scan (`nnx.Carry`), like any
    module with statistics. Plain `nnx.grad` corrupts nothing: the statistics of gradients stay as they are, which a
    `jqinject.LostStateWarning` reports when the program is traced, and forward ones advance at every use.

    The same warning names the gradient quantizers of a model in training mode that `f` reaches past its arguments (a
    closure variable, a global, an attribute): what their backward pass sees is lost.

    Args:
        f: a function of models and arrays that returns a scalar, or `(scalar, aux)` with `has_aux`; without it, a
            decorator is returned.
        options: `argnums`, `has_aux`, `holomorphic`, `allow_int`, `reduce_axes`, `graph`, `graph_updates`, as for
            `nnx.value_and_grad`. Of a model, a number among `argnums` stands for its `nnx.Param`s, in NNX's tree mode
            too; of one with adapters (`jqinject.lora`), for its `nnx.LoRAParam`s.

    Returns:
        A function that returns the value and the gradients of the parameters, like that of `nnx.value_and_grad`.

    Raises:
        ValueError: (when called) statistics of a model in the positional arguments were filtered away. The models are
            unchanged then.
        TypeError: (when called) a model with gradient quantizers is a keyword argument.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.nn import QuantIdentity
        >>> from jqinject.quant import Fp8e4m3ActPerTensorCurrent, Fp8e4m3GradPerTensorCurrent
        >>> identity = QuantIdentity(Fp8e4m3ActPerTensorCurrent, grad_quant=Fp8e4m3GradPerTensorCurrent)
        >>> value_and_grad(lambda x, m: m(x))(jnp.float32(5.0), identity)
        (Array(5., dtype=float32), Array(1., dtype=float32))
        >>> float(identity.act_quant.amax_history.newest), float(identity.grad_quant.amax_history.newest)
        (5.0, 1.0)
    """
    if f is None:
        return lambda f: _reporting(f, **options)
    return _reporting(f, **options)


@overload
def grad(f: Callable[Given, Any], **options: Unpack[GradOptions]) -> Callable[Given, Any]: ...
@overload
def grad(
    f: None = None, **options: Unpack[GradOptions]
) -> Callable[[Callable[Given, Any]], Callable[Given, Any]]: ...
def grad(f: Function | None = None, **options: Unpack[GradOptions]) -> Function:
    """`nnx.grad` that also updates the statistics of 8-bit float quantizers. See `value_and_grad`.

    Args:
        f: as for `value_and_grad`.
        options: as for `nnx.grad`; see `value_and_grad`.

    Returns:
        A function that returns the gradients of the parameters, or `(gradients, aux)` with `has_aux`.

    Raises:
        ValueError, TypeError: as for `value_and_grad`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.nn import QuantLinear
        >>> from jqinject.quant import Fp8e5m2GradPerTensorDelayed
        >>> fc = QuantLinear(2, 1, grad_quant=Fp8e5m2GradPerTensorDelayed, rngs=nnx.Rngs(0))
        >>> grad(lambda fc, x: fc(x).sum() * 3)(fc, jnp.ones((4, 2)))["bias"].get_value()
        Array([12.], dtype=float32)
        >>> float(fc.grad_quant.amax_history.newest)
        3.0
    """
    if f is None:
        return lambda f: grad(f, **options)
    with_value = _reporting(f, **options)

    @functools.wraps(f)
    def gradients_alone(*args: object, **kwargs: object) -> object:
        value, gradients = with_value(*args, **kwargs)
        return (gradients, value[1]) if options.get("has_aux", False) else gradients

    return gradients_alone


def _reporting(f: Function, argnums: ArgNum | Sequence[ArgNum] = 0, **options: Any) -> Function:
    chosen = tuple(argnums) if isinstance(argnums, Sequence) else (argnums,)

    @functools.wraps(f)
    def run(*args: object, **kwargs: object) -> object:
        _refuse_keywords(f, kwargs)
        per_argument = [amax_scalings([arg]) for arg in args]
        scalings = {id(scaling): scaling for of_one in per_argument for scaling in of_one}.values()
        with_slots = [
            number for number, of_one in enumerate(per_argument) if any(s.slot is not None for s in of_one)
        ]
        differentiated, extra = _differentiated(chosen, args, with_slots)
        own = [scaling for scaling in scalings if not scaling.in_step]
        open_before = [scaling for scaling in scalings if scaling.in_step]
        for scaling in own:
            scaling.begin_step()
        steps.set_slots(open_before, adding=False)  # nnx.grad differentiates floats
        try:
            transformed = _value_and_grad(_listening(f, len(args)), (*differentiated, *extra), **options)
            with _naming_cut_slots():
                value, gradients = transformed(*args, **kwargs)
            by_number = dict(zip(map(_number, (*differentiated, *extra)), gradients, strict=True))
            cotangents = [by_number[number] for number in with_slots]
            steps.deliver([args[number] for number in with_slots], cotangents)
        except BaseException:
            for scaling in own:
                scaling.abandon_step()
            raise
        finally:
            steps.set_slots(open_before, adding=True)
        steps.close_steps(own)
        of_parameters = tuple(
            steps.without_slots(of) if _number(which) in with_slots else of
            for which, of in zip(differentiated, gradients, strict=False)
        )
        return value, of_parameters if isinstance(argnums, Sequence) else of_parameters[0]

    return run


def _value_and_grad(
    f: Function, argnums: tuple[ArgNum, ...], graph: bool | None = None, **options: Any
) -> Function:
    """`nnx.value_and_grad` that differentiates what a filter takes of a module, in tree mode too.

    There, and without graph updates, NNX differentiates all that a module holds, and refuses integers.
    """
    modes = ((graph, nnx.set_graph_mode), (options.get("graph_updates"), nnx.set_graph_updates))
    if all(mode.current_value() if option is None else option for option, mode in modes):
        return nnx.value_and_grad(f, argnums=argnums, graph=graph, **options)

    def run(*args: object, **kwargs: object) -> object:
        filters = {_number(which) % len(args): _filter_of(which) for which in argnums}
        parts = {
            number: nnx.split(args[number], taken, ..., graph=graph)
            for number, taken in filters.items()
            if isinstance(args[number], nnx.Pytree)
        }

        def on_parts(rests: dict[int, object], *args: object, **kwargs: object) -> object:
            merged = [
                nnx.merge(parts[number][0], arg, rests[number]) if number in parts else arg
                for number, arg in enumerate(args)
            ]
            return f(*merged, **kwargs)

        taken = [parts[number][1] if number in parts else arg for number, arg in enumerate(args)]
        rests = {number: rest for number, (_, _, rest) in parts.items()}
        numbers = tuple(number + 1 for number in filters)
        return nnx.value_and_grad(on_parts, argnums=numbers, graph=graph, **options)(rests, *taken, **kwargs)

    return run


def _filter_of(which: ArgNum) -> nnx.filterlib.Filter:
    return nnx.Param if isinstance(which, int) else which.filter


@contextlib.contextmanager
def _naming_cut_slots() -> Generator[None]:
    """Say what JAX cannot do with the slots of a stack."""
    try:
        yield
    except TypeError as error:
        if str(steps.MAXIMUM_ADDING) not in str(error):
            raise
        raise TypeError(
            "value_and_grad: a stack of layers whose quantizers keep a history of gradients (delayed scaling) is cut "
            "by index, and JAX has no gradient of that for the slots through which the backward pass reports.\n"
            "  cure: nnx.scan or jax.lax.scan over the stack; blocks in an nnx.List; or current scaling, such as "
            "Fp8e5m2GradPerTensorCurrent"
        ) from error


def _listening(f: Function, count: int) -> Function:
    """`f` with slots that add by maximum while it runs: those of its first arguments, not of its default values."""

    @functools.wraps(f)
    def listened(*args: object, **kwargs: object) -> object:
        listening: list[StepStatistic] = [s for s in amax_scalings(list(args[:count])) if s.slot is not None]
        for scaling in listening:
            assert scaling.slot is not None
            scaling.slot.set_value(steps.adding_by_maximum(scaling.slot.get_value()))
        try:
            return f(*args, **kwargs)
        finally:
            steps.set_slots(listening, adding=False)

    return listened


def _has_adapters(argument: object) -> bool:
    if not isinstance(argument, nnx.Module):
        return False
    modules = (module for _, module in nnx.iter_modules(argument, graph=True))
    return any(isinstance(module, OpQuantizers) and bool(module.adapters_by_path()) for module in modules)


def _number(which: ArgNum) -> int:
    return which if isinstance(which, int) else which.argnum


def _differentiated(
    chosen: Sequence[ArgNum], args: Sequence[object], with_slots: Sequence[int]
) -> tuple[list[ArgNum], list[ArgNum]]:
    """The user's `argnums` with slots added, and the arguments differentiated only for their slots.

    Of a model with adapters, named by its number alone, these are differentiated.
    """
    differentiated: list[ArgNum] = []
    for which in chosen:
        number = _number(which) % max(len(args), 1)
        of_adapters = isinstance(which, int) and bool(args) and _has_adapters(args[number])
        variables = nnx.LoRAParam if of_adapters else _filter_of(which)
        if number in with_slots:
            differentiated.append(nnx.DiffState(number, nnx.Any(variables, GradSlot)))
        else:
            differentiated.append(nnx.DiffState(number, variables) if of_adapters else which)
    taken = {*map(_number, differentiated)}
    return differentiated, [nnx.DiffState(number, GradSlot) for number in with_slots if number not in taken]


def _refuse_keywords(f: Function, kwargs: dict[str, object]) -> None:
    for name, argument in kwargs.items():
        if any(scaling.slot is not None for scaling in amax_scalings([argument])):
            raise TypeError(
                f"value_and_grad({getattr(f, '__name__', 'f')}): {name} has gradient quantizers and is a keyword "
                "argument, which is not differentiated.\n  cure: pass it as a positional argument"
            )
