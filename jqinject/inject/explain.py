"""`explain`: the wiring of an injector as a tree that shows who decided what; missing names are shown, not raised."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from html import escape
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from jqinject.inject.binding import Binding
from jqinject.inject.dependencies_library import DependencyError
from jqinject.inject.errors import brief, did_you_mean, lines
from jqinject.inject.injector import InjectorMeta
from jqinject.inject.names import asked_at
from jqinject.inject.resolver import Resolution, Scope, rewired, scope_of
from jqinject.inject.specs import PARENT, Arguments, InjectorClass, Spec, link_text

NodeKind = Literal["value", "component", "computed", "link", "injector", "default", "missing", "circle"]

_ARROW = "<-"


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One name and its result.

    Attributes:
        name: the name.
        kind: `"value"` (plain), `"component"`, `"computed"` (by `@value`), `"link"`, `"injector"` (nested),
            `"default"` (of a constructor or function), `"missing"` or `"circle"`.
        value: the value; for a component, its class (explaining builds a component only if a `@value` function or a
            link reads from it).
        origin: the class in the MRO that decided it, or `"given"`, `"override by let"`, `"default"`; None if missing.
        children: what it is made from: the constructor's arguments, or the name a link points to.
        via: the arguments of the `@value` function that decided it, if one did.
        error: why it cannot be resolved; empty if it can.
    """

    name: str
    kind: NodeKind
    value: Any = None
    origin: type | str | None = None
    children: tuple["Node", ...] = ()
    via: tuple["Node", ...] = ()
    error: str = ""

    def walk(self) -> Iterator["Node"]:
        """This node and every one below, each once, nearest first."""
        visited = {id(self)}
        waiting: deque[Node] = deque([self])
        while waiting:
            node = waiting.popleft()
            yield node
            for below in (*node.children, *node.via):
                if id(below) not in visited:
                    visited.add(id(below))
                    waiting.append(below)

    def errors(self) -> list["Node"]:
        """The nodes that cannot be resolved; empty if the whole tree can be."""
        return [node for node in self.walk() if node.error]

    def __getitem__(self, name: str) -> "Node":
        for node in self.walk():
            if node.name == name:
                return node
        names = {node.name for node in self.walk()}
        raise KeyError(lines(f"no {name!r} in the wiring of {self.name!r}", did_you_mean(name, names)))

    def __contains__(self, name: object) -> bool:
        return any(node.name == name for node in self.walk())

    def __iter__(self) -> Iterator["Node"]:
        return iter((*self.children, *self.via))

    def __str__(self) -> str:
        return "\n".join(_draw(self, "", "", set()))

    def _repr_html_(self) -> str:
        """The tree with parts to fold, for notebooks."""
        style = (
            "font-family: ui-monospace, monospace; font-size: 13px; line-height: 1.5; overflow-wrap: anywhere"
        )
        return f'<div style="{style}">{_folded(self, "", 0, set())}</div>'


def _title(node: Node) -> str:
    origin = node.origin.__name__ if isinstance(node.origin, type) else node.origin
    decided = f"  {_ARROW} {origin}" if origin else ""
    if node.kind in ("missing", "circle"):
        return f"{node.name}: {node.kind.upper()}: {'; '.join(node.error.splitlines())}"
    failed = f"  ERROR: {'; '.join(line.strip() for line in node.error.splitlines())}" if node.error else ""
    if node.kind == "component":
        return f"{node.name}: {brief(node.value)}{decided}{failed}"
    if node.error:
        return f"{node.name}{decided}{failed}"
    return f"{node.name} = {brief(node.value)}{decided}"


def _folded(node: Node, mark: str, depth: int, drawn: set[int]) -> str:
    """A node in HTML: one that is made from others can be opened; the two outermost levels are open."""
    below = [*((child, "") for child in node.children), *((child, "@value ") for child in node.via)]
    title = escape(f"{mark}{_title(node)}")
    if not below or id(node) in drawn:
        return f"<div>{title}{'  (shared, see above)' if below else ''}</div>"
    drawn.add(id(node))
    inside = "".join(_folded(child, kind, depth + 1, drawn) for child, kind in below)
    opened = " open" if depth < 2 else ""
    return (
        f'<details{opened}><summary>{title}</summary><div style="margin-left: 1.4em">{inside}</div></details>'
    )


def _draw(node: Node, head: str, indent: str, drawn: set[int]) -> Iterator[str]:
    below = [*((child, "") for child in node.children), *((child, "@value ") for child in node.via)]
    if below and id(node) in drawn:
        yield f"{head}{_title(node)}  (shared, see above)"
        return
    drawn.add(id(node))
    yield head + _title(node)
    for index, (child, mark) in enumerate(below):
        last = index == len(below) - 1
        branch, beyond = ("└── ", "    ") if last else ("├── ", "│   ")
        yield from _draw(child, f"{indent}{branch}{mark}", indent + beyond, drawn)


Path = list[tuple[Scope, str]]
Nodes = tuple[Node, ...]
Origin = type | str


@runtime_checkable
class HasBinding(Protocol):
    """An object that was built from an injector and remembers it: a proxy."""

    binding: Binding


#: The name of an injector's own explanation: a function of the injector that returns a `Node`.
EXPLAINED_BY = "explained_by"
#: What proxies read of an injector besides its quantizer; `explain` shows below that.
BESIDE = ("pre_transform", "undo_transform")


def explain(
    injector: InjectorClass | Binding | HasBinding,
    /,
    module: object = None,
    name: str | None = None,
    **names: object,
) -> Node:
    """The wiring of a name as a tree: components, arguments, values, and the class that decided each.

    >>> from jqinject.inject import ExtendedInjector, explain
    >>> class Scaling:
    ...     def __init__(self, scaling_init, threshold=1.0): ...
    >>> class Base(ExtendedInjector):
    ...     tensor_quant = Scaling
    ...     scaling_init = 0.1
    >>> tree = explain(Base.let(scaling_init=0.5))
    >>> print(tree)
    tensor_quant: Scaling  <- Base
    ├── scaling_init = 0.5  <- override by let
    └── threshold = 1.0  <- default
    >>> tree["scaling_init"].value, [node.name for node in tree.walk()]
    (0.5, ['tensor_quant', 'scaling_init', 'threshold'])

    Args:
        injector: an injector, a binding, or an object with a `binding` (a proxy).
        module: the layer that a proxy would pass as `module`.
        name: the name to explain; by default `tensor_quant`, and of a `Scheme` (of any injector that declares
            `explained_by`, a function of itself that returns a `Node`) its six operands, printed as a table.
        names: more names to pass, as to `resolve`.

    Returns:
        The node of `name`. `tree[name]` finds a node, `tree.walk()` visits all, `tree.errors()` lists those that
        cannot be resolved, `str(tree)` draws it. Components are not built, unless a `@value` function or a link
        reads one.

    Raises:
        TypeError: the first argument is none of the three.
    """
    subject = _injector(injector)
    if name is None and EXPLAINED_BY in subject:
        return getattr(subject, EXPLAINED_BY)(subject)
    if module is not None:
        names["module"] = module
    root = scope_of(subject, names)
    explainer = _Explainer(root)
    tree = explainer.node(root, name or "tensor_quant", [])
    read_by_proxies = (
        () if name else tuple(explainer.node(root, extra, []) for extra in BESIDE if extra in root.specs)
    )
    return replace(tree, children=(*tree.children, *read_by_proxies)) if read_by_proxies else tree


class Reach(NamedTuple):
    """The names that the wiring of a name reads.

    Attributes:
        names: the names of the injector itself that are read.
        missing: the names that are needed but declared nowhere.
        works: whether the name can be resolved, or could be if the missing names were given.
    """

    names: frozenset[str]
    missing: tuple[str, ...]
    works: bool


class WiringPart(NamedTuple):
    """One injector of a wiring: the outermost one, or one nested in it.

    Attributes:
        scope: its names during one access.
        entries: the names that are read from outside of it.
        names: all its names that are read.
        path: what leads to it from the outermost injector, as in `("forward", "lhs")`.
    """

    scope: Scope
    entries: frozenset[str]
    names: frozenset[str]
    path: tuple[str, ...]

    def reach(self, injector: InjectorClass) -> Reach:
        """The names that would be read of another injector in the same place."""
        scope = Scope(injector, self.scope.given, self.scope.outer, self.scope.title)
        explainer = _Explainer(scope)
        nodes = [explainer.node(scope, name, []) for name in sorted(self.entries)]
        return _reach(explainer, scope, nodes)


def parts_of(injector: InjectorClass, names: Iterable[str]) -> list[WiringPart]:
    """The injectors that the wiring of some names reads from, the outermost one first.

    >>> from jqinject.inject import ExtendedInjector, this
    >>> class Inner(ExtendedInjector):
    ...     bits, unread = 8, 1
    >>> class Outer(ExtendedInjector):
    ...     inner = Inner
    ...     bits = this.inner.bits
    >>> [(part.path, sorted(part.names)) for part in parts_of(Outer, ["bits"])]
    [((), ['bits', 'inner']), (('inner',), ['bits'])]
    """
    root = scope_of(injector, {})
    explainer = _Explainer(root)
    entries = [name for name in names if name in root.specs]
    for name in entries:
        explainer.node(root, name, [])
    explainer.entries.setdefault(root, set()).update(entries)
    return _inside(explainer, root, ())


def _inside(explainer: "_Explainer", scope: Scope, path: tuple[str, ...]) -> list[WiringPart]:
    entries, read = explainer.entries.get(scope, ()), explainer.read.get(scope, ())
    parts = [WiringPart(scope, frozenset(entries), frozenset(read), path)]
    for name, inner in scope.inner.items():
        parts += _inside(explainer, inner, (*path, name))
    return parts


def reach_of(injector: InjectorClass, name: str = "tensor_quant", **names: object) -> Reach:
    """The names of an injector that the wiring of one of them reads; components are not built.

    >>> from jqinject.inject import ExtendedInjector, this, value
    >>> class Q(ExtendedInjector):
    ...     kind, small, large = "small", 1, 2
    ...     @value
    ...     def tensor_quant(kind):
    ...         return this.small if kind == "small" else this.large
    >>> sorted(reach_of(Q).names), "large" in reach_of(Q.let(kind="large")).names
    (['kind', 'small', 'tensor_quant'], True)

    Args:
        injector: the injector.
        name: the name to resolve.
        names: more names to pass, as to `resolve`.
    """
    root = scope_of(injector, names)
    explainer = _Explainer(root)
    return _reach(explainer, root, [explainer.node(root, name, [])])


def _reach(explainer: "_Explainer", scope: Scope, nodes: list[Node]) -> Reach:
    errors = [error for node in nodes for error in node.errors()]
    missing = tuple(dict.fromkeys(node.name for node in errors if node.kind == "missing"))
    return Reach(frozenset(explainer.read.get(scope, ())), missing, not errors or bool(missing))


def _injector(subject: object) -> InjectorMeta:
    if isinstance(subject, InjectorMeta):
        return subject
    if isinstance(subject, HasBinding):
        subject = subject.binding
    if isinstance(subject, Binding):
        return subject.injector
    raise TypeError(
        f"explain takes an injector class, a binding or a proxy, got {brief(subject)}. For a layer, name the "
        "quantizer: explain(layer.weight_quant, module=layer)."
    )


def origin_of(scope: Scope, name: str) -> Origin:
    """The origin of a name: a class in the MRO, `"given"` or `"override by let"`."""
    if name in scope.given:
        return "given"
    for base in scope.injector.__deciders__:
        if name in base.__declared__:
            return "override by let" if base.__made_by__ else base
    return "default"


class _Explainer:
    """One explanation: nodes by scope and name, so that the tree shares what the wiring shares."""

    def __init__(self, root: Scope) -> None:
        self.nodes: dict[tuple[int, str], Node] = {}
        self.read: dict[Scope, set[str]] = {root: set()}  # also what links only pass through
        self.resolution = Resolution(root, self.read[root])
        self.entries: dict[Scope, set[str]] = {}  # what links read of nested injectors

    def node(self, scope: Scope, name: str, path: Path) -> Node:
        self.read.setdefault(scope, set()).add(name)
        if (scope, name) in path:
            circle = [step for _, step in path[path.index((scope, name)) :]]
            return Node(name, "circle", error=" -> ".join([*circle, name]))
        key = (id(scope), name)
        if key not in self.nodes:
            self.nodes[key] = self._make(scope, name, [*path, (scope, name)])
        return self.nodes[key]

    def _make(self, scope: Scope, name: str, path: Path) -> Node:
        spec = scope.specs.get(name)
        if spec is None:
            needed = " -> ".join(step for _, step in path)
            text = lines(
                f"{scope.title} has no name {name!r}",
                f"needed by: {needed}" if len(path) > 1 else "",
                did_you_mean(name, scope.specs),
            )
            return Node(name, "missing", error=text)
        origin = origin_of(scope, name)
        if spec.kind == "PLAIN":
            return Node(name, "value", spec.target, origin)
        if spec.kind == "NESTED":
            self._handed_out(scope, spec.target)
            return Node(name, "injector", spec.target, origin)
        if spec.kind == "FUNCTION":
            return self._computed(scope, name, spec, origin, path)
        return self._wired(scope, name, spec, origin, path, ())

    def _handed_out(self, scope: Scope, injector: InjectorClass) -> None:
        """Count everything that a handed-out injector points to as read: it may be read at any time."""
        around, depth = scope, 1
        while around is not None:
            self.read.setdefault(around, set()).update(asked_at(injector, depth))
            around, depth = around.outer, depth + 1

    def _wired(self, scope: Scope, name: str, spec: Spec, origin: Origin, path: Path, via: Nodes) -> Node:
        if spec.kind == "LINK":
            return self._link(scope, name, spec, origin, path, via)
        try:
            arguments = spec.arguments
        except DependencyError as error:
            return Node(name, "component", spec.target, origin, (), via, str(error))
        return Node(name, "component", spec.target, origin, self._arguments(scope, arguments, path), via)

    def _arguments(self, scope: Scope, arguments: Arguments, path: Path) -> Nodes:
        defaults = arguments.defaults or {}
        return tuple(
            self.node(scope, name, path)
            if required or name in scope.specs
            else Node(name, "default", defaults[name], "default")
            for name, required in arguments.named
        )

    def _computed(self, scope: Scope, name: str, spec: Spec, origin: Origin, path: Path) -> Node:
        via = self._arguments(scope, spec.arguments, path)
        broken = [node.name for node in _broken(via)]
        if broken:
            text = f"not computed, as it needs {', '.join(broken)}"
            return Node(name, "computed", None, origin, (), via, text)
        try:
            arguments = self.resolution.arguments(scope, spec.arguments)
            result = spec.arguments.call(spec.target, arguments)
            following = rewired(name, result)
        except Exception as error:
            return Node(name, "computed", None, origin, (), via, f"{type(error).__name__}: {error}")
        if following.kind == "PLAIN":
            return Node(name, "computed", result, origin, (), via)
        return self._wired(scope, name, following, origin, path, via)

    def _link(self, scope: Scope, name: str, spec: Spec, origin: Origin, path: Path, via: Nodes) -> Node:
        where, rest = scope, list(spec.target.__expression__)
        while rest[0] == PARENT:
            if where.outer is None:
                text = f"{link_text(spec.target)} climbs out of {where.title}, which is not nested in another"
                return Node(name, "link", None, origin, (), via, text)
            where = where.outer
            rest.pop(0)
        symbol = rest.pop(0)[1]
        while rest and symbol in where.specs and where.specs[symbol].kind == "NESTED":
            self.read.setdefault(where, set()).add(symbol)
            where, symbol = where.nested(symbol), rest.pop(0)[1]
            if not rest or where.specs.get(symbol, spec).kind != "NESTED":
                self.entries.setdefault(where, set()).add(symbol)
        target = self.node(where, symbol, path)
        broken = [node.name for node in _broken((target,))]
        if broken or not rest:
            text = f"{link_text(spec.target)} leads to {', '.join(broken)}" if broken else ""
            return Node(name, "link", target.value, origin, (target,), via, text)
        try:
            value = self.resolution.follow(scope, spec.target)
        except Exception as error:
            return Node(name, "link", None, origin, (target,), via, f"{type(error).__name__}: {error}")
        return Node(name, "link", value, origin, (target,), via)


def _broken(nodes: Nodes) -> list[Node]:
    """The first node in each subtree that cannot be resolved."""
    broken = (next((below for below in node.walk() if below.error), None) for node in nodes)
    return [node for node in broken if node is not None]
