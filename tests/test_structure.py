"""The size of each room, and who reads what is private to JAX and Flax: a rise is a decision of its commit.

A figure below is what was reached. A change that needs more raises it here, where its reviewer sees it; one that needs
less lowers it.
"""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "jqinject"
FILES = sorted(PACKAGE.rglob("*.py"))
# Lines of code, without imports, docstrings, comments and blank lines.
CODE_LINES = {
    "": 197,
    "catalogue": 748,
    "core": 4567,
    "demo": 356,
    "dot": 4062,
    "export": 752,
    "formats": 3357,
    "inject": 1308,
    "model": 5357,
    "native": 253,
    "nn": 3518,
    "odml": 330,
    "ops": 1782,
    "optim": 270,
    "program": 3332,
    "proxy": 903,
    "quant": 1843,
    "quant_tensor": 1180,
    "recipes": 4681,
}
NUMBER_OF_FILES = 343
LONGEST_FILE, LONGEST_FUNCTION = 500, 60
# Only these files read what JAX and Flax do not document.
INTERNALS = {
    r"\.(eqns|invars|outvars|constvars|source_info)\b|jax\.extend\.core": {
        "export/_onnx.py",
        "ops/processes.py",
        "program/jaxpr.py",
    },
    r"\b_pytree_|_var_metadata|__code__": {"core/flax_internals.py"},
}


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def room(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


def documented(node: ast.AST) -> ast.stmt | None:
    """The docstring's statement, if the node has one."""
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    return node.body[0] if ast.get_docstring(node, clean=False) is not None else None


def code_lines(path: Path) -> int:
    """Count the lines that are neither imports, docstrings, comments nor blank."""
    apart: set[int] = set()
    for node in ast.walk(parsed(path)):
        lines = node if isinstance(node, ast.Import | ast.ImportFrom) else documented(node)
        if lines is not None:
            apart.update(range(lines.lineno, (lines.end_lineno or lines.lineno) + 1))
    text = path.read_text(encoding="utf-8").splitlines()
    return sum(
        1
        for number, line in enumerate(text, 1)
        if number not in apart and line.strip() and not line.strip().startswith("#")
    )


@pytest.mark.heavy
def test_rooms_do_not_grow_unseen():
    lines = Counter()
    for path in FILES:
        lines[room(path)] += code_lines(path)
    assert lines.keys() == CODE_LINES.keys()
    grown = {name: (count, CODE_LINES[name]) for name, count in lines.items() if count > CODE_LINES[name]}
    assert not grown, f"code lines of a room, and the most of them: {grown}"


def test_files_stay_few():
    assert len(FILES) <= NUMBER_OF_FILES


@pytest.mark.heavy
def test_no_file_and_no_function_outgrows_its_name():
    for path in FILES:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST_FILE, path
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef):
                doc = documented(node)
                described = (doc.end_lineno or doc.lineno) - doc.lineno + 1 if doc is not None else 0
                length = (node.end_lineno or node.lineno) - node.lineno + 1 - described
                assert length <= LONGEST_FUNCTION, f"{path}: {node.name}"


def test_file_names_are_unique():
    names = Counter(path.name for path in FILES if path.name != "__init__.py")
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("pattern", INTERNALS)
def test_internals_of_other_libraries_are_read_in_few_files(pattern):
    readers = {
        path.relative_to(PACKAGE).as_posix()
        for path in FILES
        if re.search(pattern, path.read_text(encoding="utf-8"))
    }
    assert readers <= INTERNALS[pattern]
