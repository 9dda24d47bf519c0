"""Resolution: from a declared name to the object, in one pass that only changes its own scratch space.

A `Resolution` is one access. It holds a `Scope` for the injector (and one for every nested injector entered);
a scope remembers what was built in this access, so that all consumers of a name share it. Declarations are only
read, so any number of threads resolve at once, and no lock is held while components are built. What `@choices` chose
from plain names is remembered for the injector: every access would choose the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from jqinject.inject import errors
from jqinject.inject.dependencies_library import DependencyError, This
from jqinject.inject.names import asked_at
from jqinject.inject.specs import (
    PARENT,
    Arguments,
    InjectorClass,
    Spec,
    Step,
    ValueFunction,
    check_link,
    is_component,
    link_text,
    spec_of,
)


class _Mark:
    """A private marker object in a scope's cache."""


_ABSENT: Final = _Mark()
_BUILDING: Final = _Mark()


class Scope:
    """The names of one injector during one access, and their results so far."""

    __slots__ = ("cache", "given", "injector", "inner", "outer", "specs", "title")

    def __init__(self, injector: Any, names: Mapping[str, object], outer: "Scope | None", title: str) -> None:
        self.injector = injector
        self.given = names
        self.outer = outer
        self.title = title
        specs: Mapping[str, Spec] = injector.__dependencies__
        self.specs = (
            {**specs, **dict(zip(names, map(spec_of, names, names.values()), strict=True))}
            if names
            else specs
        )
        self.cache: dict[str, object] = {}
        self.inner: dict[str, Scope] = {}

    def nested(self, name: str) -> "Scope":
        """The scope of the nested injector declared as `name`: one per access."""
        scope = self.inner.get(name)
        if scope is None:
            injector = self.specs[name].target
            title = f"{injector.__name__!r} (nested in {self.title} as {name!r})"
            scope = self.inner[name] = Scope(injector, {}, self, title)
        return scope


def scope_of(injector: object, names: Mapping[str, object]) -> Scope:
    """A fresh scope of an injector, inside the scopes of any injectors around it."""
    if not isinstance(injector, InjectorClass):
        raise TypeError(
            f"names are resolved from a class that derives from ExtendedInjector, got {injector!r}"
        )
    around = injector.__around__
    outer = scope_of(*around) if around else None
    return Scope(injector, names, outer, repr(injector.__name__))


@dataclass(slots=True, eq=False)
class ResolvedName:
    """One name under construction: the chain of frames is the path that errors show."""

    scope: Scope
    name: str
    spec: Spec

    def __str__(self) -> str:
        if self.spec.kind == "COMPONENT":
            return f"{self.name} ({self.spec.target.__name__})"
        if self.spec.kind == "LINK":
            return f"{self.name} (= {link_text(self.spec.target)})"
        return f"{self.name} (@value)" if self.spec.kind == "FUNCTION" else self.name


@dataclass(slots=True, eq=False)
class Resolution:
    """One access. `trace` collects the names asked of the outermost injector."""

    root: Scope
    trace: set[str] | None = None
    path: list[ResolvedName] = field(default_factory=list[ResolvedName])

    def get(self, scope: Scope, name: str) -> Any:
        """The result of `name` in `scope`: built at the first request of this access, then shared."""
        ready = scope.cache.get(name, _ABSENT)
        if ready is _BUILDING:
            raise self._cycle(scope, name)
        if ready is not _ABSENT:
            return ready
        if self.trace is not None and scope is self.root:
            self.trace.add(name)
        spec = scope.specs.get(name)
        if spec is None:
            raise self._missing(scope, name)
        chosen = scope.injector.__chosen__.get(name)
        if chosen is not None and spec.kind == "FUNCTION" and chosen.read.isdisjoint(scope.given):
            spec = chosen
            if self.trace is not None and scope is self.root:
                self.trace |= chosen.read
        if spec.kind == "PLAIN":
            return spec.target
        frame = ResolvedName(scope, name, spec)
        self.path.append(frame)
        scope.cache[name] = _BUILDING
        result: Any = _ABSENT
        try:
            result = self._make(scope, name, spec, frame)
        finally:
            self.path.pop()
            if result is _ABSENT:
                del scope.cache[name]
            else:
                scope.cache[name] = result
        return result

    def _make(self, scope: Scope, name: str, spec: Spec, frame: ResolvedName) -> Any:
        while True:
            frame.spec = spec
            if spec.kind == "COMPONENT":
                return self._call(scope, spec)
            if spec.kind == "LINK":
                return self.follow(scope, spec.target)
            if spec.kind == "NESTED":
                self._trace_nested(scope, spec.target)
                return spec.target.__nested__(scope.injector, scope.given)
            result = self._call(scope, spec)
            chooses = isinstance(spec.declared, ValueFunction) and spec.declared.choices is not None
            if not (chooses or isinstance(result, type | This)):
                return result
            following = rewired(name, result)
            if chooses:
                self._remember(scope, name, spec.arguments.names, following)
            if following.kind == "PLAIN":
                return result
            spec = following

    def _remember(self, scope: Scope, name: str, arguments: tuple[str, ...], chosen: Spec) -> None:
        """Remember what a function of `@choices` chose, if every access of the injector would choose it."""
        read, choices = {*arguments}, scope.injector.__chosen__
        for argument in arguments:
            declared = scope.specs.get(argument)
            if declared is not None and declared.kind != "PLAIN":
                before = choices.get(argument)
                if declared.kind != "FUNCTION" or before is None or before.kind != "PLAIN":
                    return
                read |= before.read
        if read.isdisjoint(scope.given):
            chosen.read = frozenset(read)
            choices[name] = chosen

    def _trace_nested(self, scope: Scope, injector: InjectorClass) -> None:
        """Count everything that a handed-out injector points to as read: it may be read at any time."""
        if self.trace is None:
            return
        depth, around = 1, scope
        while around is not self.root and around.outer is not None:
            depth, around = depth + 1, around.outer
        self.trace.update(asked_at(injector, depth))

    def _call(self, scope: Scope, spec: Spec) -> Any:
        try:
            arguments = spec.arguments
        except DependencyError as error:
            raise DependencyError(errors.lines(str(error), f"needed by: {self.chain()}")) from None
        values = self.arguments(scope, arguments) if arguments.named else {}
        try:
            return arguments.call(spec.target, values) if arguments.positional else spec.target(**values)
        except Exception as error:
            error.add_note(f"while building {self.chain()} in the injector {scope.title}")
            raise

    def arguments(self, scope: Scope, arguments: Arguments) -> dict[str, object]:
        """The names that a callable asks for; those with a default only if they are declared."""
        cache, specs = scope.cache, scope.specs
        if self.trace is not None and scope is self.root:
            self.trace.update(arguments.names)
        values: dict[str, object] = {}
        for name, required in arguments.named:
            spec = specs.get(name)
            if spec is None:
                if required:
                    values[name] = self.get(scope, name)  # raises, with the path
            elif spec.kind == "PLAIN":
                values[name] = spec.target
            else:
                ready = cache.get(name, _BUILDING)
                values[name] = self.get(scope, name) if ready is _BUILDING else ready
        return values

    def follow(self, scope: Scope, link: This) -> Any:
        """The target of a link. Steps into nested injectors stay in this access, so that everything is shared."""
        where = self._enter(scope, link.__expression__)
        if isinstance(where, Scope):
            outer = where.outer
            if outer is not None:
                self._trace_nested(outer, where.injector)
            return where.injector.__nested__(outer.injector, outer.given) if outer else where.injector
        return where

    def _enter(self, scope: Scope, steps: tuple[Step, ...]) -> Any:
        """The end of a link: a value, or the scope of a nested injector."""
        rest = list(steps)
        while rest and rest[0] == PARENT:
            if scope.outer is None:
                raise DependencyError(
                    errors.lines(
                        f"`this << n` climbs out of {scope.title}, which is not nested in another injector",
                        f"needed by: {self.chain()}",
                        "cure: one << less, or read the name through the injector that declares this one",
                    )
                )
            scope = scope.outer
            rest.pop(0)
        where: Any = scope
        while rest:
            kind, symbol = rest.pop(0)
            if not isinstance(where, Scope):
                where = self._read(where, kind, symbol)
            else:
                where = self._entered(where, symbol) if rest else self.get(where, symbol)
        return where

    def _entered(self, scope: Scope, name: str) -> Any:
        """A name on the way of a link; nested injectors and links are entered, not read."""
        spec = scope.specs.get(name)
        if spec is None or spec.kind not in ("NESTED", "LINK"):
            return self.get(scope, name)
        if self.trace is not None and scope is self.root:
            self.trace.add(name)
        if spec.kind == "NESTED":
            return scope.nested(name)
        if scope.cache.get(name) is _BUILDING:
            raise self._cycle(scope, name)
        before = scope.cache.get(name, _ABSENT)
        self.path.append(ResolvedName(scope, name, spec))
        scope.cache[name] = _BUILDING
        try:
            return self._enter(scope, spec.target.__expression__)
        finally:
            self.path.pop()
            del scope.cache[name]
            if before is not _ABSENT:
                scope.cache[name] = before

    def _read(self, where: Any, kind: str, symbol: Any) -> Any:
        try:
            return getattr(where, symbol) if kind == "." else where[symbol]
        except Exception as error:
            error.add_note(f"while following {self.chain()} in the injector {self.root.title}")
            raise

    def chain(self) -> str:
        """The path to the name under construction, outermost first."""
        return " -> ".join(str(frame) for frame in self.path)

    def _cycle(self, scope: Scope, name: str) -> DependencyError:
        starts = [i for i, frame in enumerate(self.path) if frame.scope is scope and frame.name == name]
        circle = [str(frame) for frame in self.path[starts[-1] :]] if starts else []
        return DependencyError(
            errors.lines(
                f"{scope.title} has a circular dependency: {' -> '.join([*circle, name])}",
                f"met while building {self.chain()}" if starts and starts[-1] > 0 else "",
                "cure: one of these names has to be a plain value, or to ask for another name",
            )
        )

    def _missing(self, scope: Scope, name: str) -> DependencyError:
        top = not self.path
        requested = self.path[0].name if self.path else name
        near = errors.did_you_mean(name, scope.specs)
        error = errors.MissingNameError if top else DependencyError
        return error(
            errors.lines(
                f"{scope.title} has no name {name!r}",
                f"needed by: {self.chain()} -> {name}" if self.path else "",
                near,
                "" if top and near else self._cure(scope, name, requested),
            )
        )

    def _cure(self, scope: Scope, name: str, requested: str) -> str:
        declare = f"cure: declare it, as in {scope.injector.__name__}.let({name}=...)"
        if scope is not self.root:
            return declare
        access = f"resolve({scope.injector.__name__}, {requested!r}, {name}=...)"
        return f"{declare}, or give it for one access: {access}"


def rewired(name: str, result: object) -> Spec:
    """Classify the result of a `@value` function: a component, a link, or a plain value."""
    if isinstance(result, type) and is_component(name, result):
        return Spec("COMPONENT", result, result)
    if isinstance(result, This):
        check_link(f"what @value {name!r} returned", result)
        return Spec("LINK", result, result)
    return Spec("PLAIN", result, result)


def resolve(injector: object, name: str, /, *, trace: set[str] | None = None, **names: object) -> Any:
    """The result of a name of an injector, with more names given for this access only.

    The given names count as if they were declared last (as by `let`), but no new injector is made.

    >>> from jqinject.inject import ExtendedInjector, resolve, value
    >>> class Q(ExtendedInjector):
    ...     @value
    ...     def channels(module):
    ...         return len(module)
    >>> resolve(Q, "channels", module=[1, 2, 3])
    3

    Args:
        injector: the injector class.
        name: the name to resolve.
        trace: a set that collects every name asked of the injector, with or without a default.
        names: names for this access.

    Raises:
        DependencyError: a missing name or a circle; an exception of a component keeps its own type.
    """
    root = scope_of(injector, names)
    return Resolution(root, trace).get(root, name)
