"""The names that an injector knows, and the check of those that its classes declare."""

from collections import Counter
from collections.abc import Set

from jqinject.inject import errors, specs

_LIBRARY = __name__.partition(".")[0]


def declared_names(injector: specs.InjectorClass) -> frozenset[str]:
    """The names that an injector declares, inherited ones included.

    >>> from jqinject.inject import ExtendedInjector
    >>> class Q(ExtendedInjector):
    ...     bit_width = 8
    >>> declared_names(Q.let(signed=True)) == {"bit_width", "signed"}
    True
    """
    return frozenset(injector.__dependencies__)


def requested_names(injector: specs.InjectorClass) -> frozenset[str]:
    """Every name that anything in the injector's graph declares or asks for, found without resolving anything.

    That is: declared names, the arguments of declared components, of `@value` functions, and of the classes
    that these declare with `@choices`, and the names that links point to. Classes that a function returns
    without `@choices` are known only once they are resolved: give `resolve` a `trace`.

    >>> from jqinject.inject import ExtendedInjector
    >>> class Clamp:
    ...     def __init__(self, low, high=1.0): ...
    >>> class Q(ExtendedInjector):
    ...     clamp = Clamp
    >>> sorted(requested_names(Q))
    ['clamp', 'high', 'low']
    """
    return declared_names(injector) | asked_at(injector, depth=0)


def asked_at(injector: specs.InjectorClass, depth: int) -> frozenset[str]:
    """The names that anything declared here asks of the injector `depth` levels around this one (0: of this one)."""
    requested: set[str] = set()
    for spec in injector.__dependencies__.values():
        if spec.kind == "NESTED":
            requested |= asked_at(spec.target, depth + 1)
        elif spec.kind == "LINK":
            requested |= _pointed_at(spec, depth)
        elif depth == 0:
            requested |= arguments_asked(spec)
    return frozenset(requested)


def _pointed_at(spec: specs.Spec, depth: int) -> set[str]:
    steps = spec.target.__expression__
    climbed = sum(1 for step in steps if step == specs.PARENT)
    return {steps[climbed][1]} if climbed == depth else set()


def arguments_asked(spec: specs.Spec) -> set[str]:
    """The names that a declared component or function asks for, including those of the classes it may return."""
    if spec.kind == "COMPONENT":
        return set(specs.arguments_of_class(spec.target).names)
    if spec.kind != "FUNCTION":
        return set()
    requested = set(specs.arguments_of_function(spec.target).names)
    if isinstance(spec.declared, specs.ValueFunction):
        for cls in spec.declared.choices or ():
            requested.update(specs.arguments_of_class(cls).names)
    return requested


def check_declarations(injector: specs.InjectorClass, *, also_requested: Set[str] = frozenset()) -> None:
    """Refuse a name in a class body that nothing asks for and that probably misspells a known one.

    A name that resembles no known one passes, since it may have another purpose; so do names that several classes of
    the injector declare, and those of this library's own classes.

    >>> from jqinject.inject import ExtendedInjector
    >>> class Int8Weight(ExtendedInjector):
    ...     bit_width = 8
    >>> check_declarations(Int8Weight.let(bit_widht=4))
    Traceback (most recent call last):
    TypeError: Int8Weight declares 'bit_widht', which would have no effect: nothing asks for it
      did you mean 'bit_width'?

    Args:
        injector: the injector.
        also_requested: more names that are asked for: what a resolution traced, what a proxy reads itself.

    Raises:
        TypeError: names every such declaration, with the known name that it resembles.
    """
    texts: list[str] = []
    for name in sorted(unasked_names(injector) - also_requested):
        index, cls = next((i, c) for i, c in enumerate(injector.__deciders__) if name in c.__declared__)
        behind = {
            overridden
            for decider in injector.__deciders__[index + 1 :]
            for overridden in decider.__declared__
        }
        near = errors.misspelling_of(name, asked_at(injector, depth=0) | also_requested | behind)
        if near:
            what = f"{cls.__name__} declares {name!r}, which would have no effect: nothing asks for it"
            texts.append(errors.lines(what, f"did you mean {near!r}?"))
    if texts:
        raise TypeError("\n".join(texts))


def unasked_names(injector: specs.InjectorClass) -> frozenset[str]:
    """The names that one class alone declares, not one of this library's, and that no declaration asks for."""
    declared = Counter(name for cls in injector.__deciders__ for name in cls.__declared__)
    own = {
        name
        for cls in injector.__deciders__
        if cls.__made_by__ or cls.__module__.partition(".")[0] != _LIBRARY
        for name in cls.__declared__
        if declared[name] == 1
    }
    return frozenset(own - asked_at(injector, depth=0)) if own else frozenset()
