"""Every notebook runs from top to bottom in a fresh kernel, and is stored with the outputs of such a run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
LARGEST = 300_000  # bytes of a file


def code_cells(path: Path) -> list[nbformat.NotebookNode]:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(path: Path) -> list[nbformat.NotebookNode]:
    return [output for cell in code_cells(path) for output in cell.outputs]


@pytest.mark.slow
@notebooks
def test_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    command = [sys.executable, ROOT / "notebooks" / "execute.py", "--check", path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@notebooks
def test_notebook_is_stored_as_it_ran(path: Path) -> None:
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), (
        "run notebooks/execute.py"
    )
    assert not [output for output in outputs(path) if output.output_type == "error"]


@notebooks
def test_notebook_shows_something(path: Path) -> None:
    assert any("image/png" in output.get("data", {}) for output in outputs(path))
    assert path.stat().st_size < LARGEST


@notebooks
def test_notebook_needs_no_clone(path: Path) -> None:
    source = "\n".join(cell.source for cell in code_cells(path))
    assert "sys.path" not in source and not re.search(r"[\"']\.\.?/", source)


@notebooks
def test_notebook_names_no_folder_of_a_machine(path: Path) -> None:
    texts = [
        output.get("text", "") or str(output.get("data", {}).get("text/plain", ""))
        for output in outputs(path)
    ]
    assert not [text for text in texts if re.search(r"/(home|tmp|root|usr|work|Users)/|[A-Z]:\\\\", text)]
