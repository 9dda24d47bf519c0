"""The check that an override has an effect: its name is known, and its wiring reads it."""

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from functools import partial
from itertools import combinations, product

from jqinject.inject import errors, specs
from jqinject.inject.explain import Reach, WiringPart, parts_of, reach_of
from jqinject.inject.injector import override
from jqinject.inject.names import arguments_asked, asked_at, requested_names

Choices = tuple[tuple[str, object], ...]
Condition = tuple[Choices, tuple[str, ...]]  # choices, and the further names that they need


def check_overrides(
    injector: specs.InjectorClass,
    overrides: Iterable[str],
    *,
    also_read: Set[str] = frozenset(),
    read: Set[str] | None = None,
    passed: Mapping[str, object] | None = None,
    where: str = "",
    prefix: str = "",
) -> None:
    """Refuse an override that has no effect: its name is unknown, or this wiring does not read it.

    >>> from jqinject.inject import ExtendedInjector
    >>> class Int8Weight(ExtendedInjector):
    ...     bit_width = 8
    >>> check_overrides(Int8Weight, {"bit_width": 4})
    >>> check_overrides(Int8Weight, {"bitwidth": 4}, where="QuantLinear(weight_...)", prefix="weight_")
    Traceback (most recent call last):
    TypeError: QuantLinear(weight_...): 'weight_bitwidth' would have no effect: nothing in 'Int8Weight' ...
      did you mean 'weight_bit_width'?

    Args:
        injector: the injector, with the overrides or without.
        overrides: the names (a mapping will do), without their prefix.
        also_read: more names that count as known and read: those that a proxy reads itself.
        read: the names that a resolution with the overrides traced; None checks only that the names are known.
        passed: the names passed to that resolution, as to `resolve`, to find which choices would read a name.
        where: the user's call, for the text.
        prefix: the user's prefix of the names, for the text.

    Raises:
        TypeError: names every such override, with the nearest known name, or the choices under which it is read.
    """
    at_hand = also_read if read is None else also_read | read
    requested = asked_at(injector, depth=0) | _declared_beside(injector, set(overrides)) | at_hand
    first = where or f"{injector.__name__}.let(...)"
    texts = [
        _unknown(injector, name, requested, first, prefix) for name in overrides if name not in requested
    ]
    if read is not None:
        reach = partial(reach_of, **(passed or {}))
        idle = [name for name in overrides if name in requested and name not in at_hand]
        texts += [_unread(injector, name, reach, first, prefix) for name in idle]
    if texts:
        raise TypeError("\n".join(texts))


def check_lets(injector: specs.InjectorClass, names: Iterable[str]) -> None:
    """Refuse names that `let` declared in an injector, or one nested in it, and that the wiring does not read.

    A later `let` may replace what an earlier one declared, so a name passes if the injector of its own `let` reads it.

    >>> from jqinject.inject import ExtendedInjector, this
    >>> class Operand(ExtendedInjector):
    ...     bits = 8
    >>> class Product(ExtendedInjector):
    ...     lhs = Operand
    ...     bits = this.lhs.bits
    >>> check_lets(Product.let(lhs=Operand.let(bit=4)), ["bits"])
    Traceback (most recent call last):
    TypeError: Product.lhs.let(...): 'bit' would have no effect: nothing in 'Operand' declares or asks for 'bit'
      did you mean 'bits'?

    Args:
        injector: the injector.
        names: the names that are read of it.

    Raises:
        TypeError: names every such name, with the nearest known one, or the choices under which it is read.
    """
    texts = [
        text for part in parts_of(injector, names) if part.entries for text in _idle_lets(injector, part)
    ]
    if texts:
        raise TypeError("\n".join(texts))


def _idle_lets(injector: specs.InjectorClass, part: WiringPart) -> Iterator[str]:
    first = ".".join((injector.__name__, *part.path)) + ".let(...)"
    read = set(part.names)
    for let_injector in _top_lets(part.scope.injector):  # the last one first
        names: Mapping[str, object] = let_injector.__made_by__[2]
        if not names.keys() <= read:
            read |= part.reach(let_injector).names
        requested = asked_at(let_injector, depth=0) | _declared_beside(let_injector, set(names)) | read
        for name in names:
            if name not in requested:
                yield _unknown(let_injector, name, requested, first, "")
            elif name not in read:
                yield _unread(let_injector, name, part.reach, first, "")


def _declared_beside(injector: specs.InjectorClass, overrides: set[str]) -> set[str]:
    """The names that class statements declare, or that `let` declares other than the overrides."""
    lets = _top_lets(injector)
    bodies = [cls for cls in injector.__deciders__ if cls not in lets]
    return {name for cls in bodies for name in cls.__declared__} | (set(injector.__overrides__) - overrides)


def _top_lets(injector: specs.InjectorClass) -> list[specs.InjectorClass]:
    recipe = injector.__made_by__
    if not recipe:
        return []
    below = recipe[1:3] if recipe[0] == "and" else recipe[1:2]
    own = [injector] if recipe[0] == "let" else []
    return own + [cls for part in below for cls in _top_lets(part)]


def _unknown(injector: specs.InjectorClass, name: str, requested: Set[str], first: str, prefix: str) -> str:
    inner = _nested_in(injector, name)
    return errors.lines(
        f"{first}: {prefix + name!r} would have no effect: nothing in {injector.__name__!r} declares or asks for "
        f"{name!r}",
        f"it is a name of {' and '.join(inner[:2])}, nested in it: declare it there" if inner else "",
        "" if inner else errors.did_you_mean(name, requested - {name}, prefix),
    )


def _nested_in(injector: specs.InjectorClass, name: str) -> list[str]:
    """The paths of nested injectors that know a name."""
    paths: list[str] = []
    for inner, spec in injector.__dependencies__.items():
        if spec.kind == "NESTED":
            paths += [inner] if name in requested_names(spec.target) else []
            paths += [f"{inner}.{path}" for path in _nested_in(spec.target, name)]
    return paths


def _unread(
    injector: specs.InjectorClass,
    name: str,
    reach: Callable[[specs.InjectorClass], Reach],
    first: str,
    prefix: str,
) -> str:
    conditions = _conditions(injector, name, reach)
    said = f"{name!r} is read when {_listed(conditions)}" if conditions else _who_asks(injector, name)
    cure = f"leave {prefix + name} out"
    if conditions:
        choices, missing = conditions[0]
        added = [f"{prefix}{choice}={_shown(option)}" for choice, option in choices]
        cure = f"give {', '.join([*added, *(f'{prefix}{argument}=...' for argument in missing)])}, or {cure}"
    return errors.lines(
        f"{first}: {prefix + name!r} would have no effect: {injector.__name__!r} never reads {name!r} as it is wired "
        "here",
        said,
        f"cure: {cure}",
    )


def _conditions(
    injector: specs.InjectorClass, name: str, reach: Callable[[specs.InjectorClass], Reach]
) -> list[Condition]:
    """The choices, one or two at a time, with which the wiring would read a name; preferably without further names."""
    options = _options(injector)
    for count in (1, 2):
        conditions: list[Condition] = []
        for choices in _combined(options, count):
            reached = reach(override(injector, dict(choices)))
            if reached.works and name in reached.names:
                conditions.append((choices, reached.missing))
        if conditions:
            return [condition for condition in conditions if not condition[1]] or conditions
    return []


def _combined(options: Mapping[str, list[object]], count: int) -> Iterator[Choices]:
    for names in combinations(options, count):
        for values in product(*(options[name] for name in names)):
            yield tuple(zip(names, values, strict=True))


def _options(injector: specs.InjectorClass) -> dict[str, list[object]]:
    """The declared choices between a few values (enums, booleans), each with its other possible values."""
    alternatives: dict[str, list[object]] = {}
    for cls in injector.__deciders__:
        for name, spec in cls.__declared__.items():
            if name in alternatives or spec.kind != "PLAIN":
                continue
            present = injector.__dependencies__[name].target
            if isinstance(spec.target, enum.Enum):
                alternatives[name] = [member for member in type(spec.target) if member != present]
            elif isinstance(spec.target, bool):
                alternatives[name] = [flag for flag in (True, False) if flag is not present]
    return alternatives


def _listed(conditions: list[Condition]) -> str:
    """Write conditions as text; those that differ in only one value are merged."""
    grouped: dict[tuple[Choices, str], list[str]] = {}
    for choices, _ in conditions:
        name, option = choices[-1]
        grouped.setdefault((choices[:-1], name), []).append(_shown(option))
    texts = [
        " and ".join([*(f"{n} = {_shown(v)}" for n, v in before), f"{name} = {' or '.join(several)}"])
        for (before, name), several in grouped.items()
    ]
    return "; or ".join(texts[:4])


def _shown(option: object) -> str:
    return repr(str(option.value)) if isinstance(option, enum.StrEnum) else errors.brief(option)


def _who_asks(injector: specs.InjectorClass, name: str) -> str:
    """For a name that no choice leads to: the unused declaration that would ask for it."""
    asking = {
        asker: sorted(_classes_asking(spec, name))
        for asker, spec in sorted(injector.__dependencies__.items())
        if spec.kind in ("COMPONENT", "FUNCTION") and name in arguments_asked(spec)
    }
    if not asking:
        return "jqinject.explain(injector, module=layer) shows the names that are read"
    shown = [
        f"{' or '.join(classes[:3])} as {asker!r}" if classes else repr(asker)
        for asker, classes in asking.items()
    ]
    return f"{name!r} is asked for by {' and '.join(shown[:4])}, not used here"


def _classes_asking(spec: specs.Spec, name: str) -> set[str]:
    """The declared component, or those that a function chooses from, if they ask for a name."""
    chosen = (spec.declared.choices or ()) if isinstance(spec.declared, specs.ValueFunction) else ()
    classes = chosen if spec.kind == "FUNCTION" else (spec.target,)
    return {cls.__name__ for cls in classes if name in specs.arguments_of_class(cls).names}
