"""What all quantized layers share: a signature that `inspect` reads, the list of their overrides, what they return."""

import html
import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    Literal,
    Protocol,
    Self,
    SupportsIndex,
    TypeAlias,
    TypeVar,
    overload,
)

from flax import nnx

from jqinject.core.flax_internals import flax_layer, flax_parameters, init_flax
from jqinject.inject import Node, errors, explain, requested_names
from jqinject.nn.base.slots import RETURN, LayerFacts, Option, Slot, binding_of, hold_proxies, slots_of
from jqinject.proxy import QuantProxyFromInjector
from jqinject.quant import QuantizerLike, override_names
from jqinject.terminal import table

OWN_NAME = "a name of your own injector"


@dataclass(frozen=True)
class Override:
    """One name of a quantizer, and the keyword of a layer that declares it anew.

    Attributes:
        keyword: the keyword, as in `weight_bit_width`.
        name: the injector's name, as in `bit_width`.
        type: what may be given, as an annotation; empty for a name of a user's own injector.
        default: what the injector has now, in a few characters; for a component its class.
        meaning: what it says.
        read: whether the quantizer reads it as it is wired now. Another is read once other names are changed, such as
            `scaling_init` with `scaling_impl_type="const"`.
    """

    keyword: str
    name: str
    type: str
    default: str
    meaning: str
    read: bool


class Overrides(tuple[Override, ...]):
    """The overrides that a layer takes: a sequence, found by keyword too; printed as a table of those that are read.

    >>> from jqinject.nn import QuantLinear
    >>> from jqinject.quant import Int8WeightPerChannelFloat
    >>> found = QuantLinear.overrides(weight_quant=Int8WeightPerChannelFloat)
    >>> found["weight_bit_width"].type, found["weight_bit_width"].default, found["weight_scaling_init"].read
    ('int', '8', False)
    """

    @overload
    def __getitem__(self, key: SupportsIndex | str) -> Override: ...
    @overload
    def __getitem__(self, key: slice) -> tuple[Override, ...]: ...
    def __getitem__(self, key: SupportsIndex | str | slice) -> Override | tuple[Override, ...]:
        if not isinstance(key, str):
            return super().__getitem__(key)
        row = next((row for row in self if row.keyword == key), None)
        if row is None:
            raise KeyError(
                errors.lines(f"no override {key!r}", errors.did_you_mean(key, [row.keyword for row in self]))
            )
        return row

    def _table(self) -> list[tuple[str, str, str, str]]:
        shown = [(row.keyword, row.type, row.default, row.meaning) for row in self if row.read]
        return [("keyword", "type", "now", "meaning"), *shown]

    def _rest(self) -> str:
        count = sum(not row.read for row in self)
        return f"{count} more are read once others are changed: those with `read=False`" if count else ""

    def __str__(self) -> str:
        header, *rows = self._table()
        return "\n".join([*table(header, rows, width=sys.maxsize), self._rest()]).rstrip()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head, *body = (
            "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)
            for row, tag in zip(self._table(), ("th", *("td",) * len(self)), strict=False)
        )
        rows = "".join(f"<tr>{row}</tr>" for row in body)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table><p>{html.escape(self._rest())}</p>"


def overrides_of(layer: type, slots: Sequence[Slot], quantizers: Mapping[str, object]) -> Overrides:
    """The overrides of the quantizers that a layer would have.

    Args:
        layer: the class of the layer.
        slots: its places for quantizers.
        quantizers: argument -> quantizer; one that is missing is the argument's default.

    Raises:
        TypeError: an argument that is not a quantizer of the layer.
    """
    arguments = list(dict.fromkeys(slot.argument for slot in slots))
    for name in quantizers:
        if name not in arguments:
            hint = errors.did_you_mean(name, arguments)
            raise TypeError(
                errors.lines(f"{layer.__name__}.overrides() takes {', '.join(arguments)}, got {name!r}", hint)
            )
    defaults = inspect.signature(layer).parameters
    rows: dict[str, Override] = {}
    for slot in slots:
        default = defaults[slot.argument].default if slot.argument in defaults else None
        injector = _injector(layer, slot.argument, quantizers.get(slot.argument, default))
        for row in () if injector is None else _rows(injector, slot, slots):
            rows.setdefault(row.keyword, row)
    return Overrides(rows.values())


def _injector(layer: type, argument: str, quantizer: object) -> object:
    if isinstance(quantizer, QuantProxyFromInjector):
        quantizer = quantizer.binding
    if quantizer is None or quantizer is inspect.Parameter.empty:
        return None
    binding = binding_of(quantizer)
    if binding is None:
        raise TypeError(
            f"{layer.__name__}.overrides({argument}=...) takes an injector (a class that derives from "
            f"ExtendedInjector), a proxy or None, got {errors.brief(quantizer)}"
        )
    return binding.injector


def keywords_of(slot: Slot, slots: Sequence[Slot], names: Iterable[str]) -> dict[str, str]:
    """The keyword of each name of a quantizer: that with the longest prefix of the layer takes a keyword."""
    longer = tuple(rival.prefix for rival in slots if len(rival.prefix) > len(slot.prefix))
    keywords = {slot.prefix + name: name for name in sorted(set(names) - override_names.PASSED)}
    return {name: keyword for keyword, name in keywords.items() if not keyword.startswith(longer)}


def _rows(injector: Any, slot: Slot, slots: Sequence[Slot]) -> list[Override]:
    """Those that are read first, each kind by name."""
    read = {node.name: node for node in explain(injector).walk()}
    rows = []
    for name, keyword in keywords_of(slot, slots, requested_names(injector)).items():
        type_, meaning = override_names.NAMES.get(name, ("", OWN_NAME))
        node = read.get(name)
        now = _declared(injector, name) if node is None else _now(node)
        rows.append(Override(keyword, name, type_, now, meaning, node is not None))
    return sorted(rows, key=lambda row: not row.read)


def _now(node: Node) -> str:
    return "of the layer" if node.error else errors.brief(node.value)


def _declared(injector: Any, name: str) -> str:
    spec = injector.__dependencies__.get(name)
    if spec is None:
        return ""
    return "computed" if spec.kind == "FUNCTION" else errors.brief(spec.target)


if TYPE_CHECKING:
    from typing_extensions import TypeVar as DefaultedTypeVar

    # The default is for mypy, which takes the result from `__init__`: it would ask for an annotation of each layer.
    Out = DefaultedTypeVar("Out", covariant=True, default=Any)
else:
    Out = Any
Arguments: TypeAlias = Mapping[str, Any]
InArrays = TypeVar("InArrays", covariant=True)
InQuantTensors = TypeVar("InQuantTensors", covariant=True)


# What `return_quant_tensor` is, for type checkers: it decides what a layer returns.
Off: TypeAlias = Literal[False]
On: TypeAlias = Literal[True]


#: What a constructor calls its further keywords if the declared arguments are among them.
MORE = "more"


class ConstructorSignature:
    """The signature of a class of layers: that of its constructor, with what its further keywords may be."""

    def __get__(self, layer: object, owner: object) -> inspect.Signature:
        if layer is not None:
            raise AttributeError("__signature__")  # of an instance: that of its `__call__`
        constructor = inspect.signature(owner.__init__)
        _, *own = constructor.parameters.values()
        names = {p.name for p in own}
        parent = flax_layer(owner)
        inherited = {} if parent is None else flax_parameters(parent)
        keywords = [p for p in inherited.values() if p.kind is p.KEYWORD_ONLY and p.name not in names]
        first = next((at for at, p in enumerate(own) if p.kind is p.KEYWORD_ONLY), len(own))
        own[first:first] = keywords
        if own[-1].name == MORE:
            own[-1:-1] = [
                inspect.Parameter(
                    declared.argument,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=declared.default,
                    annotation=declared.annotation,
                )
                for declared in declared_arguments(owner)
                if declared.argument not in names
            ]
        return constructor.replace(parameters=own)


@cache
def declared_arguments(layer: Any) -> tuple[Slot | Option, ...]:
    """Return the arguments that a class of layers declares as slots and options, each once."""
    declared = (*layer.override_slots(), *layer.options)
    return tuple({argument.argument: argument for argument in declared}.values())


class _QuantLayer(nnx.Module):
    """Abstract: a layer with places for quantizers.

    Attributes:
        options: arguments other than quantizers that a constructor takes among its further keywords.
    """

    __signature__: Any = ConstructorSignature()
    options: ClassVar[tuple[Option, ...]] = (RETURN,)
    return_quant_tensor: bool = False
    _flax_forward: ClassVar[Any]  # read once: Flax's tools replace it for a while
    _init_flax = init_flax

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        parent = flax_layer(cls)
        if parent is not None and "_flax_forward" not in vars(cls):
            cls._flax_forward = staticmethod(parent.__call__)
        if "__call__" not in vars(cls):
            cls.__call__ = cls.__call__  # `nnx.capture` wraps what a class itself defines

    def _init_layer(self, arguments: Arguments) -> None:
        """Make the layer of Flax, then the quantizers.

        Args:
            arguments: the `locals()` of `__init__`, whose further keywords are called `more`.
        """
        self._init_declared(arguments, self._init_flax(arguments, arguments[MORE]))

    def _init_declared(self, arguments: Arguments, more: Arguments) -> None:
        """Make the quantizers.

        Args:
            arguments: the `locals()` of `__init__`.
            more: the further keywords that are not Flax's: declared arguments and overrides.
        """
        overrides, filled = dict(more), dict(arguments)
        for declared in declared_arguments(type(self)):
            if declared.argument not in filled:
                filled[declared.argument] = overrides.pop(declared.argument, declared.default)
        self._init_quantizers(filled, overrides, arguments["rngs"])

    def _init_quantizers(self, arguments: Arguments, overrides: Arguments, rngs: nnx.Rngs | None) -> None:
        """Make the proxies; to be called when the parameters are there, also on a Flax layer whose class was changed.

        Args:
            arguments: what the user gave for each slot, None if it is missing, and for options; `act_quant` is another
                name of `input_quant`.
            overrides: the user's further keywords.
            rngs: for quantizers that draw random numbers.
        """
        hold_proxies(self, arguments, overrides, rngs)
        if arguments.get(RETURN.argument, False):
            self.return_quant_tensor = True
            self._check_scale_to_return()

    def _facts(self) -> LayerFacts:
        """What the layer knows of its tensors when its quantizers are made."""
        return LayerFacts()

    def _check_scale_to_return(self) -> None:
        """Raise if no quantizer gives the QuantTensors that are to be returned their scale."""

    if not TYPE_CHECKING:

        def __class_getitem__(cls, returned: object) -> Any:
            """`QuantLinear[jax.Array]`, for annotations: the class itself."""
            return cls

    def _no_scale_to_return(self, needed: str, cure: str = "") -> ValueError:
        """An error for `return_quant_tensor` without a quantizer that gives the output its scale."""
        return ValueError(
            f"{type(self).__name__}(return_quant_tensor=True) needs {needed} to have a scale to return.\n"
            f"  cure: give it {cure or needed + '=...'}"
        )

    @classmethod
    def override_slots(cls) -> tuple[Slot, ...]:
        """The places for quantizers as the keywords of the layer name them."""
        return slots_of(cls)

    @classmethod
    def overrides(cls, **quantizers: QuantizerLike) -> Overrides:
        """What the layer's further keywords can declare anew: names, types, present values, meanings.

        A name that your own injector adds is listed without a type; declare it with `.let()`, which type checkers
        accept: `weight_quant=Mine.let(my_name=3)`.

        Args:
            quantizers: the quantizers that the layer would be given, such as `weight_quant=Int8WeightPerChannelFloat`;
                one that is missing is the default of its argument.

        Returns:
            A sequence of `Override`s, which prints as a table.

        Raises:
            TypeError: an argument that is not a quantizer of the layer.

        Example:
            >>> from jqinject.nn import QuantIdentity
            >>> from jqinject.quant import Int8ActPerTensorFloat
            >>> table = QuantIdentity.overrides(act_quant=Int8ActPerTensorFloat)
            >>> table["bit_width"].default, table["bit_width"].meaning
            ('8', 'bits of one number')
        """
        return overrides_of(cls, cls.override_slots(), quantizers)


class _QuantTensorLayer(_QuantLayer):
    options = (RETURN._replace(default=True),)


class Results(Generic[InArrays, InQuantTensors]):
    """Declares the types of a layer that returns arrays, and of the same layer that returns QuantTensors.

    Only type checkers read it, in the constructors below: `_results: Results[Layer[jax.Array], Layer[AnyQuantTensor]]`.
    """


if TYPE_CHECKING:

    class _HasResults(Protocol[InArrays, InQuantTensors]):
        @property
        def _results(self) -> Results[InArrays, InQuantTensors]: ...

    class QuantLayer(_QuantLayer, Generic[Out]):
        """Abstract: a layer with places for quantizers, that returns `Out`."""

        @overload
        def __new__(
            cls: type[_HasResults[InArrays, object]], *_: object, return_quant_tensor: Off = ..., **__: object
        ) -> InArrays: ...
        @overload
        def __new__(
            cls: type[_HasResults[object, InQuantTensors]], *_: object, return_quant_tensor: On, **__: object
        ) -> InQuantTensors: ...
        @overload
        def __new__(cls, *_: object, **__: object) -> Self: ...
        def __new__(cls, *_: object, **__: object) -> Any: ...

    class QuantTensorLayer(QuantLayer[Out]):
        """Abstract: a layer that returns QuantTensors by default."""

        @overload
        def __new__(
            cls: type[_HasResults[InArrays, object]], *_: object, return_quant_tensor: Off, **__: object
        ) -> InArrays: ...
        @overload
        def __new__(
            cls: type[_HasResults[object, InQuantTensors]],
            *_: object,
            return_quant_tensor: On = ...,
            **__: object,
        ) -> InQuantTensors: ...
        @overload
        def __new__(cls, *_: object, **__: object) -> Self: ...
        def __new__(cls, *_: object, **__: object) -> Any: ...

else:
    QuantLayer, QuantTensorLayer = _QuantLayer, _QuantTensorLayer
