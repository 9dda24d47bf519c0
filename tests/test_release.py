"""What a release consists of: one version everywhere, a whole source distribution, few extras."""

import re
import tomllib
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder

import jqinject

ROOT = Path(__file__).parents[1]


def test_one_version_everywhere():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## \[(.*?)\]", changelog, re.MULTILINE)
    assert jqinject.__version__ == next(heading for heading in headings if heading != "Unreleased")
    cited = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {jqinject.__version__}\n" in cited
    released = re.search(rf"^## \[{re.escape(jqinject.__version__)}\] - (.*)$", changelog, re.MULTILINE)
    assert released is not None
    dated = re.search(r"^date-released: (.*)$", cited, re.MULTILINE)
    assert (dated[1] if dated else "not released yet") == released[1]


def test_the_source_distribution_is_whole_and_lean():
    files = {
        found.distribution_path: Path(found.path)
        for found in SdistBuilder(str(ROOT)).recurse_included_files()
    }
    for name in [
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "CITATION.cff",
        "hatch_build.py",
        "conftest.py",
        "jqinject/py.typed",
        "jqinject/native/kernels/int8_tiles.c",
        "jqinject/catalogue/index.jsonl",
        "jqinject/catalogue/explorer.html",
        "jqinject/model/inspect/page.css",
        "docs/catalogue/weight.md",
        "tests/test_release.py",
        "benchmarks/orderings.py",
    ]:
        assert name in files, name
    for folder in ("notebooks", "examples", "docs", "tests/quant"):
        assert any(name.startswith(folder + "/") for name in files), folder
    assert not [name for name in files if name.endswith((".so", ".pyc"))]
    # The peers' numbers, which are most of the repository, stay out.
    arrays = [name for name in files if name.endswith(".npz") and not name.startswith("tests/formats/data/")]
    assert arrays == ["benchmarks/data/byte_lm.npz"]
    assert sum(path.stat().st_size for path in files.values()) < 16e6  # a quarter of it when compressed


def test_extras_refer_to_extras():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    assert {"demo", "export", "formats", "test", "dev"} <= extras.keys()
    for name, wanted in extras.items():
        for group in re.findall(r"jqinject\[(.*?)\]", " ".join(wanted)):
            assert set(group.split(",")) <= extras.keys(), name


@pytest.mark.parametrize("name", ["gguf", "safetensors"])
def test_tests_have_the_formats(name):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    assert name in extras["formats"] and "jqinject[formats]" in extras["test"]
