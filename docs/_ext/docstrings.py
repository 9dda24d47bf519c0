"""Docstrings as Sphinx wants them. They have Google's sections, and Markdown within: code in single backticks, tables.

Stars, bars and underscores mean themselves, as in `max |x|` or `2 ** bits`.
"""

import re

TABLE = re.compile(r"^ *\|.*\|$")
DOCTEST = re.compile(r"^ *(>>>|\.\.\.)( |$)")
CODE = re.compile(r"(`+)(.+?)\1", flags=re.DOTALL)
DIRECTIVE = re.compile(r"^ *(\.\. |   ?\* - |:\w+:)")
SPECIAL = re.compile(r"([*|\\]|(?<=\w)_(?!\w))")
CODE_LINE = "\0"  # begins a line that is code, until all prose is escaped


def as_rst(lines: list[str]) -> list[str]:
    """The lines of a docstring, as Napoleon takes them."""
    return _inline(_indented_code(_tables(_joined_names(lines))))


def _indented_code(lines: list[str]) -> list[str]:
    """Text that is indented by four after an empty line is code, as in Markdown."""
    out: list[str] = []
    before, code = 0, None
    for at, line in enumerate(lines):
        if not line.strip():
            out.append(line)
            continue
        depth = len(line) - len(line.lstrip())
        if code is not None and depth < code:
            code = None
        if (
            code is None
            and at
            and not lines[at - 1].strip()
            and depth >= before + 4
            and not DOCTEST.match(line)
        ):
            code = depth
            out += [f"{' ' * before}::", ""]
        if code is None:
            before = depth
        out.append(f"{CODE_LINE}{line}" if code is not None else line)
    return out


def _joined_names(lines: list[str]) -> list[str]:
    """Several arguments that share a description, on one line however many they are."""
    out: list[str] = []
    for line in lines:
        if (
            out
            and out[-1].rstrip().endswith(",")
            and re.match(r"^ +(\w+, )*\w+(,$|: )", line)
            and _names(out[-1])
        ):
            out[-1] = f"{out[-1].rstrip()} {line.strip()}"
        else:
            out.append(line)
    return out


def _names(line: str) -> bool:
    return re.match(r"^ +(\w+, )*\w+,\s*$", line) is not None


def _tables(lines: list[str]) -> list[str]:
    out: list[str] = []
    inside = False
    for line in lines:
        if not TABLE.match(line):
            inside = False
            out.append(line)
            continue
        cells = [cell.strip() or "\\ " for cell in line.strip().strip("|").split("|")]
        if all(set(cell) <= {"-", ":"} for cell in cells):
            continue
        margin = " " * (len(line) - len(line.lstrip()))
        if not inside:
            out += [f"{margin}.. list-table::", f"{margin}   :header-rows: 1", ""]
        inside = True
        out += [f"{margin}   * - {cells[0]}", *(f"{margin}     - {cell}" for cell in cells[1:])]
    return out


def _inline(lines: list[str]) -> list[str]:
    out: list[str] = []
    prose: list[str] = []
    example = False
    for line in lines:
        example = (example or bool(DOCTEST.match(line))) and bool(line.strip())
        if example or line.startswith(CODE_LINE):
            out += _escaped(prose)
            prose = []
            out.append(line.removeprefix(CODE_LINE))
        else:
            prose.append(line)
    return out + _escaped(prose)


def _escaped(prose: list[str]) -> list[str]:
    if not prose:
        return []
    text, at, parts = "\n".join(prose), 0, []
    for code in CODE.finditer(text):
        parts += [_plain(text[at : code.start()]), f"``{code[2]}``"]
        if text[code.end() : code.end() + 1].isalnum():
            parts.append("\\ ")
        at = code.end()
    return "".join([*parts, _plain(text[at:])]).split("\n")


def _plain(text: str) -> str:
    return "\n".join(
        line if DIRECTIVE.match(line) else SPECIAL.sub(r"\\\1", line) for line in text.split("\n")
    )
