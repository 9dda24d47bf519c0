"""API reference pages: an entry for every public name of a room, from its docstring.

A page in `docs/reference` has a line `<!-- names of jqinject.nn -->`. When Sphinx reads the page, the entries take its
place, in the order and the groups of the room's `__init__.py`. So no page has to be written for a new name, and
`public_names` is what the tests hold against the finished inventory.
"""

import ast
import importlib
import inspect
import re
import sys
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

from docstrings import as_rst

PACKAGE = "jqinject"
ROOMS = """
nn quant core proxy inject dot model program recipes quant_tensor ops odml export native checkpoint_policies
catalogue formats optim
""".split()  # noqa: SIM905
LINK = re.compile(r"\]\(((?:\.\./)+)(README\.md|CONTRIBUTING\.md|CHANGELOG\.md|notebooks/\w+\.ipynb)\)")
# Files of the project outside the documentation that are pages of it.
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINE = re.compile(r"^<!-- names of ([\w.]+) -->$", flags=re.MULTILINE)


@cache
def public_names(room: str) -> dict[str, str]:
    """Names that a room offers, each with its submodule: `X as X` or `*` in its `__init__.py`, or defined there."""
    module = importlib.import_module(room)
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    found: dict[str, str] = {}
    typed = [node for block in tree.body if isinstance(block, ast.If) for node in block.body]
    for node in [*tree.body, *typed]:
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            found |= public_names(str(node.module))
        elif isinstance(node, ast.ImportFrom):
            found |= {
                alias.name: str(node.module)
                for alias in node.names
                if alias.asname == alias.name and not _is_module(module, alias.name)
            }
        elif isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            found[node.name] = room
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            found |= {name: room for name in names if not name.startswith("_")}
    return found


@cache
def all_public_names() -> dict[str, str]:
    """Every public name, and the name under which it is described: the front door's where that has it."""
    front = {name: f"{PACKAGE}.{name}" for name in public_names(PACKAGE)}
    found = {full: full for full in front.values()}
    for room in [*ROOMS, "core._protocols"]:
        for name in public_names(f"{PACKAGE}.{room}"):
            full = f"{PACKAGE}.{room}.{name}"
            found[full] = front[name] if _same(name, room) else full
    return found


def entries(room: str) -> str:
    """The entries of a room, as MyST text."""
    groups: dict[str, list[str]] = {}
    for name, source in public_names(room).items():
        groups.setdefault(_group(room, source), []).append(name)
    module = importlib.import_module(room)
    parts = ["```{eval-rst}\n.. py:module:: " + room + "\n```"]
    for group, names in groups.items():
        if len(groups) > 1:
            parts.append(f"## {group.rpartition('.')[2].replace('_', ' ').strip().capitalize()}")
            summary = (importlib.import_module(group).__doc__ or "").partition("\n\n")[0]
            parts.append(" ".join(summary.split()))
        body = "\n\n".join(_entry(room, name, getattr(module, name)) for name in names)
        parts.append(f"````{{eval-rst}}\n{body}\n````")
    return "\n\n".join(parts)


def _entry(room: str, name: str, thing: Any) -> str:
    full = f"{room}.{name}"
    described = all_public_names()[full]
    if described != full:
        role = "class" if isinstance(thing, type) else "func"
        kind = "class" if role == "class" else "function"
        return f".. py:{kind}:: {name}\n\n   The same as :py:{role}:`{described}`."
    if _is_injector(thing):
        return f".. py:class:: {name}\n\n{textwrap.indent(_declared(full, thing), '   ')}"
    if isinstance(thing, type):
        return f".. autoclass:: {full}\n   :members:"
    if inspect.isroutine(thing) or (callable(thing) and hasattr(thing, "__wrapped__")):
        return f".. autofunction:: {full}"
    return f".. py:data:: {name}\n\n{textwrap.indent(_comment(public_names(room)[name], name), '   ')}"


def _comment(source: str, name: str) -> str:
    """What the source says beside a constant: the comment above it or behind it, or the text below it."""
    path = Path(str(importlib.import_module(source).__file__))
    lines = path.read_text(encoding="utf-8").splitlines()
    start = next((at for at, line in enumerate(lines) if re.match(rf"{name}\b.*=", line)), None)
    if start is None:
        return f"Defined in ``{source}``."
    above = start
    while lines[above - 1].startswith("#"):
        above -= 1
    said = [line.lstrip("# ") for line in lines[above:start]]
    if "  # " in lines[start]:
        said.append(lines[start].partition("  # ")[2])
    below = "\n".join(lines[start + 1 :])
    text = re.match(r'"""(.*?)"""', below, flags=re.DOTALL)
    if text:
        said.append(text[1])
    return "\n".join(as_rst(said)) or f"Defined in ``{source}``."


def _declared(full: str, injector: type) -> str:
    """The docstring of an injector, read without asking the injector for anything."""
    from sphinx.ext.napoleon import GoogleDocstring

    lines = as_rst((inspect.getdoc(injector) or "").splitlines())
    text = str(GoogleDocstring(lines))
    from jqinject.catalogue import entry_of
    from jqinject.dot import Scheme

    if full.startswith(f"{PACKAGE}.quant.") and not issubclass(injector, Scheme):
        entry = entry_of(injector.__name__)
        page = f"../catalogue/{entry.kind}.html#{entry.name.lower()}"
        text += f"\n\n{entry.format}, {entry.granularity}, {entry.scaling}; `in the catalogue <{page}>`__"
    return text


def _group(room: str, source: str) -> str:
    below = source.removeprefix(f"{room}.").split(".")
    return source if source == room or not source.startswith(f"{room}.") else f"{room}.{below[0]}"


def _same(name: str, room: str) -> bool:
    package, module = importlib.import_module(PACKAGE), importlib.import_module(f"{PACKAGE}.{room}")
    return getattr(package, name, package) is getattr(module, name)


def _is_module(module: Any, name: str) -> bool:
    return inspect.ismodule(getattr(module, name, None))


def _is_injector(thing: Any) -> bool:
    from jqinject.inject import ExtendedInjector

    return isinstance(thing, type) and issubclass(thing, ExtendedInjector)


def _fill(_app: Any, _name: str, source: list[str]) -> None:
    source[0] = LINE.sub(lambda match: entries(match[1]), source[0])
    source[0] = LINK.sub(_page_link, source[0])


def _page_link(match: re.Match[str]) -> str:
    """Rewrite a link that leaves the documentation to lead to the page made of that file."""
    return f"]({match[1].removeprefix('../')}{PAGES.get(match[2], match[2])})"


def _copy_notebooks(app: Any, _config: Any) -> None:
    """Copy the notebooks to where Sphinx looks for pages; links to the documentation become relative to it."""
    pages = Path(app.srcdir) / "notebooks"
    pages.mkdir(exist_ok=True)
    for notebook in sorted(Path(app.srcdir).parent.glob("notebooks/*.ipynb")):
        text = notebook.read_text(encoding="utf-8").replace("](../docs/", "](../")
        copy = pages / notebook.name
        if not copy.exists() or copy.read_text(encoding="utf-8") != text:
            copy.write_text(text, encoding="utf-8")


def _check(app: Any, env: Any) -> None:
    """Every public name has an entry, or Sphinx warns."""
    from sphinx.util import logging

    described = env.get_domain("py").objects
    for name in all_public_names():
        if name not in described:
            logging.getLogger(__name__).warning("the public name %s has no entry in the API reference", name)


def _markdown(_app: Any, _what: str, _name: str, _thing: Any, _options: Any, lines: list[str]) -> None:
    lines[:] = as_rst(lines)


def _skip(_app: Any, _what: str, _name: str, thing: Any, skip: bool, _options: Any) -> bool | None:
    """Functions of other libraries that a class uses as its methods have their own documentation."""
    origin = getattr(thing, "__module__", None)
    foreign = isinstance(origin, str) and not origin.startswith(PACKAGE)
    return True if foreign and callable(thing) else None


def _signature(_app: Any, what: str, _name: str, thing: Any, *_: Any) -> tuple[str, str] | None:
    """Names and short defaults; the types are in the list of parameters.

    NNX modules are made by their metaclass; what they take is what `__init__` takes.
    """
    if what not in ("class", "function", "method") or (what == "class" and issubclass(thing, BaseException)):
        return None
    from sphinx.util.inspect import signature, stringify_signature

    try:
        full = signature(thing.__init__ if what == "class" else thing, bound_method=what == "class")
    except (TypeError, ValueError):
        return None
    parameters = [parameter for parameter in full.parameters.values() if parameter.name != "self"]
    short = [
        parameter.replace(annotation=inspect.Parameter.empty, default=_Shown.of(parameter.default))
        for parameter in parameters
    ]
    return stringify_signature(full.replace(parameters=short), show_return_annotation=False), ""


class _Shown:
    """A default, whose repr is a name where it has one."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text

    @classmethod
    def of(cls, default: Any) -> Any:
        if default is inspect.Parameter.empty or isinstance(default, str | int | float | tuple | None):
            return default
        name = getattr(default, "__name__", None) or getattr(default, "name", None)
        return cls(name if isinstance(name, str) else "...")


def _resolve(app: Any, env: Any, node: Any, contnode: Any) -> Any:
    """References to the file that defines a name lead to the room that offers it."""
    if node.get("refdomain") != "py" or not node.get("reftarget", "").startswith(PACKAGE):
        return None
    module, _, name = node["reftarget"].rpartition(".")
    domain = env.get_domain("py")
    for full, described in all_public_names().items():
        if full.endswith(f".{name}"):
            role = node["reftype"] if node["reftype"] != "obj" else "class"
            return domain.resolve_xref(env, node["refdoc"], app.builder, role, described, node, contnode)
    # A type in a signature that only a file of ours has stays text.
    return contnode if module in sys.modules and hasattr(sys.modules[module], name) else None


def setup(app: Any) -> dict[str, bool]:
    """For Sphinx."""
    app.connect("config-inited", _copy_notebooks)
    app.connect("source-read", _fill)
    app.connect("autodoc-process-docstring", _markdown, priority=400)
    app.connect("autodoc-skip-member", _skip)
    app.connect("autodoc-process-signature", _signature)
    app.connect("env-check-consistency", _check)
    app.connect("missing-reference", _resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
