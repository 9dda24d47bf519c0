"""The README is true: its examples run in order, CI runs its commands, its links lead somewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", "CONTRIBUTING.md"]


def blocks(page: str, language: str) -> list[str]:
    """Return the fenced blocks of one language, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.lengthy
@pytest.mark.parametrize("page", ["README.md", "docs/models.md", "docs/lora.md"])
def test_examples_run(page: str, tmp_path: Path) -> None:
    examples = blocks(page, "python")
    assert examples, f"{page} has no python example"
    script = tmp_path / "readme_examples.py"
    script.write_text("\n".join(examples), encoding="utf-8")
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_readme_commands_are_those_of_ci() -> None:
    commands = "\n".join(blocks("README.md", "bash"))
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert 'pip install ".[test]" && python -m pytest -q' in commands
    assert 'pip install ".[demo]" && python -m jqinject' in commands
    assert "-m pytest -q\n" in ci


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = [target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)]
    local = [target for target in targets if target and "://" not in target]
    missing = [target for target in local if not (ROOT / target).exists()]
    assert not missing, f"{page} links to files that do not exist: {missing}"
