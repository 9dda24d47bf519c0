"""Type checkers refuse the wrong lines of user code, and no other."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pyright", reason="pyright is one of the tools of the extra `dev`")

pytestmark = pytest.mark.lengthy
HERE = Path(__file__).parent
ROOT = HERE.parent.parent
CODE = sorted(HERE.glob("*_code.py"))
MARK = re.compile(r"# wrong: .+$")


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, str]]:
    """File -> line -> what pyright says of it."""
    folder = tmp_path_factory.mktemp("pyright")
    for path in CODE:
        shutil.copy(path, folder)
    settings = {"extraPaths": [str(ROOT)], "typeCheckingMode": "standard", "reportUnusedExpression": "none"}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    command = [sys.executable, "-m", "pyright", "-p", str(folder)]
    command += ["--pythonpath", sys.executable, "--outputjson"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    found: dict[str, dict[int, str]] = {}
    for said in json.loads(run.stdout)["generalDiagnostics"]:
        if said["severity"] == "error":
            line = said["range"]["start"]["line"] + 1
            found.setdefault(Path(said["file"]).name, {})[line] = said["message"]
    return found


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    return enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)


@pytest.mark.parametrize("path", CODE, ids=lambda path: path.name)
def test_exactly_the_wrong_lines_are_refused(path: Path, reported: dict[str, dict[int, str]]) -> None:
    marked = {line for line, text in _lines(path) if MARK.search(text)}
    said = reported.get(path.name, {})
    assert {line: text for line, text in said.items() if line not in marked} == {}
    assert [text for line, text in _lines(path) if line in marked and line not in said] == []


def test_the_messages_name_what_is_wrong(reported: dict[str, dict[int, str]]) -> None:
    said = reported["wrong_code.py"]
    by_text = {text: said.get(line, "") for line, text in _lines(HERE / "wrong_code.py")}
    named = next(message for text, message in by_text.items() if "wieght_bit_width" in text)
    assert named == 'No parameter named "wieght_bit_width"'


def test_mypy_asks_for_no_annotation_of_a_layer(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="mypy is one of the tools of the extra `dev`")
    code = tmp_path / "model.py"
    code.write_text(
        "from flax import nnx\n"
        "from jqinject.nn import QuantConv, QuantLinear\n\n\n"
        "class Model(nnx.Module):\n"
        "    def __init__(self, rngs: nnx.Rngs, packed: bool) -> None:\n"
        "        self.conv = QuantConv(3, 4, (3, 3), rngs=rngs)\n"
        "        self.fc = QuantLinear(4, 4, return_quant_tensor=packed, rngs=rngs)\n"
        "        self.name: int = 'fc'\n",
        encoding="utf-8",
    )
    options = ["--follow-imports=silent", "--cache-dir", str(tmp_path / "cache"), "--no-error-summary"]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    command = [sys.executable, "-m", "mypy", *options, str(code)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    (error,) = run.stdout.splitlines()
    assert "model.py:9: error: Incompatible types in assignment" in error
