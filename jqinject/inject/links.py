"""`this`: a declaration that points to another name.

`this.other` is another name of the same injector, `this.table["k"].x` reads on from there, `this.sub.x` is a
name of the nested injector `sub`, and `(this << 1).x` is a name of the injector around a nested one.
"""

from typing import TYPE_CHECKING, Any

from jqinject.inject.dependencies_library import DependencyError, This

Step = tuple[str, Any]
PARENT: Step = (".", "__parent__")


class Link(This):
    """The type of `this` and of everything read from it: a path, compared by value, safe to copy and pickle."""

    def __init__(self, expression: tuple[Step, ...]) -> None:
        self.__expression__ = expression

    def __getattr__(self, attrname: str) -> "Link":
        if attrname.startswith("__") and attrname.endswith("__"):
            raise AttributeError(f"a link (`this`) has no {attrname!r}")
        return Link((*self.__expression__, (".", attrname)))

    def __getitem__(self, item: object) -> "Link":
        return Link((*self.__expression__, ("[]", item)))

    def __lshift__(self, num: int) -> "Link":
        if isinstance(num, bool) or not isinstance(num, int) or num <= 0:
            raise ValueError(f"`this << n` climbs n nested injectors: n is a positive int, got {num!r}")
        if any(step != PARENT for step in self.__expression__):
            raise ValueError(f"climb first, then read: write (this << {num}).name, got {self!r} << {num}")
        return Link(self.__expression__ + (PARENT,) * num)

    def __iter__(self) -> Any:
        raise TypeError(f"{self!r} is a link, not a sequence: it is followed when the injector is resolved")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, This) and self.__expression__ == other.__expression__

    def __hash__(self) -> int:
        return hash(tuple(repr(step) for step in self.__expression__))

    def __repr__(self) -> str:
        return show(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return Link, (self.__expression__,)


if TYPE_CHECKING:
    this: Any  # a name of any type
else:
    this = Link(())


def show(link: This) -> str:
    """A link as it is written.

    >>> show((this << 1).scale["k"])
    "(this << 1).scale['k']"
    """
    steps = link.__expression__
    climbed = sum(1 for step in steps if step == PARENT)
    start = f"(this << {climbed})" if climbed else "this"
    rest = (f".{symbol}" if kind == "." else f"[{symbol!r}]" for kind, symbol in steps[climbed:])
    return start + "".join(rest)


def check_link(where: str, link: This) -> None:
    """Refuse a link that names nothing: bare `this`, bare `this << 1`, or an item that is not a name."""
    for step in link.__expression__:
        if step == PARENT:
            continue
        if not isinstance(step[1], str):
            raise DependencyError(
                f"{where} = {show(link)}: the first step of a link is a name, as in this.name"
            )
        return
    raise DependencyError(
        f"{where} = {show(link)} points to no name. Write this.other, this.sub.x or (this << 1).x."
    )
