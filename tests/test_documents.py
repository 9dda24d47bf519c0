"""The documents are true: their examples run, their names exist, their links lead somewhere, CI runs their commands."""

import importlib.util
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest

import jqinject

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
GENERATED = "catalogue"
PLACEHOLDERS = {"jqinject.room.file"}
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(
        page.relative_to(ROOT).as_posix()
        for page in DOCS.rglob("*.md")
        if GENERATED not in page.relative_to(DOCS).parent.parts
    ),
]


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    """Return the fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", text_of(page), flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def run_script() -> Iterator[Callable[[Path], str]]:
    """Runs a script in a process that all pages share, because starting one takes longer than most pages."""
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    with subprocess.Popen(
        [sys.executable, "-W", "error", str(ROOT / "tests" / "run_pages.py")],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdin and child.stdout

        def run(script: Path) -> str:
            print(script, file=child.stdin, flush=True)
            answer = child.stdout.readline()
            assert answer, f"the process that runs the pages ended at {script}"
            return json.loads(answer)

        yield run
        child.stdin.close()


@pytest.mark.lengthy
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_examples_run(page: str, tmp_path: Path, run_script: Callable[[Path], str]) -> None:
    script = tmp_path / "examples.py"
    script.write_text("\n".join(blocks(page, "python")), encoding="utf-8")
    failed = run_script(script)
    assert not failed, f"{page}:\n{failed}"


def test_every_guide_has_examples() -> None:
    silent = [page for page in PAGES if "/guides/" in page and not blocks(page, "python")]
    assert not silent


def test_readme_commands_are_those_of_ci() -> None:
    commands = "\n".join(blocks("README.md", "bash"))
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert 'pip install ".[test]" && python -m pytest -q' in commands
    assert 'pip install ".[demo]" && python -m jqinject' in commands
    assert "-m pytest -q\n" in ci
    assert "-m sphinx -W" in ci and "-m sphinx -W" in text_of("docs/architecture.md")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str) -> None:
    targets = [target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page))]
    local = [target for target in targets if target and "://" not in target]
    missing = [target for target in local if not ((ROOT / page).parent / target).exists()]
    assert not missing, f"{page} links to files that do not exist: {missing}"


@pytest.mark.parametrize("page", PAGES)
def test_names_exist(page: str) -> None:
    names = re.findall(r"(?<![\w/.\"-])jqinject\.[\w.]*\w", text_of(page))
    missing = sorted({name for name in names if not exists(name)} - PLACEHOLDERS)
    assert not missing, f"{page} speaks of {missing}"


@pytest.mark.parametrize("page", [page for page in PAGES if "/coming-from/" in page])
def test_the_other_side_of_each_table_exists(page: str) -> None:
    known = {name for room in rooms().ROOMS for name in vars(import_module(f"jqinject.{room}"))}
    cells = [row.split(" | ", 1)[1] for row in text_of(page).splitlines() if row.startswith("| ")][1:]
    names = {name for cell in cells for name in re.findall(r"`((?:[A-Z][a-z0-9]+){2,}\w*)\b", cell)}
    assert names and names <= known, names - known


def exists(name: str) -> bool:
    thing = jqinject
    for at, part in enumerate(name.split(".")[1:], 1):
        if not hasattr(thing, part):
            parent = ".".join(name.split(".")[:at])
            if not inspect.ismodule(thing) or importlib.util.find_spec(f"{parent}.{part}") is None:
                return False
            import_module(f"{parent}.{part}")
        thing = getattr(thing, part)
    return True


def rooms():
    """The extension that makes the API reference."""
    sys.path.insert(0, str(DOCS / "_ext"))
    try:
        return import_module("rooms")
    finally:
        sys.path.pop(0)


def test_every_room_has_a_page_in_the_reference() -> None:
    described = {room for page in PAGES for room in re.findall(r"<!-- names of (\S+) -->", text_of(page))}
    found = {name for _, name, _ in pkgutil.iter_modules(jqinject.__path__) if not name.startswith("_")}
    cure = "name the room in docs/_ext/rooms.py, docs/reference and docs/index.md"
    assert set(rooms().ROOMS) == found - {"demo", "terminal"}, cure
    assert described >= {"jqinject", *(f"jqinject.{room}" for room in rooms().ROOMS)}


@pytest.mark.parametrize("room", ["jqinject", *(f"jqinject.{name}" for name in rooms().ROOMS)])
def test_every_public_name_is_in_the_reference(room: str) -> None:
    module = import_module(room)
    own = {
        name
        for name, thing in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(thing) or inspect.isroutine(thing))
        and thing.__module__.startswith("jqinject")
    }
    entries = rooms().public_names(room)
    assert own - {*entries} == set()
    assert {*getattr(module, "__all__", ())} <= {*entries} | {"checkpoint_policies", "export", "odml"}
