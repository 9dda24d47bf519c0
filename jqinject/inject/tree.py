"""`Node`: one name in the wiring tree that `explain` returns, for programs and for printing."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

from jqinject.inject.errors import did_you_mean, lines
from jqinject.inject.show import brief

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
