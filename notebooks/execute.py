"""Runs notebooks from top to bottom in fresh kernels, and stores what they print and plot.

    python notebooks/execute.py [--check] [NOTEBOOK.ipynb ...]

Without names it takes all of them. With `--check` nothing is stored: a cell that raises ends the program with its
traceback. Notebooks run in an empty folder, on the CPU: they need an installed jqinject and no clone.
"""

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path

import nbclient
import nbformat

HERE = Path(__file__).resolve().parent
BACKEND = "module://matplotlib_inline.backend_inline"  # plots become outputs, whatever the caller's environment says
ABSOLUTE = re.compile(r"(?<![\w.:/])/(?:[\w.+~-]+/)+(?=[\w.+~-]+)")  # the folders of an absolute path
SECONDS = 300  # a cell may take


def executed(path: Path) -> nbformat.NotebookNode:
    """The notebook at `path` with its outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = nbclient.NotebookClient(
            notebook,
            timeout=SECONDS,
            kernel_name="python3",
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": folder}},
        )
        client.execute(env={**os.environ, "MPLBACKEND": BACKEND, "JAX_PLATFORMS": "cpu"})
    return notebook


def tidied(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The same without what depends on the machine: absolute paths, the kernel's version, the text beside a plot."""
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
        for output in cell.get("outputs", []):
            if output.output_type == "stream":
                output.text = ABSOLUTE.sub("", output.text)
            for kind, text in output.get("data", {}).items():
                if kind.startswith("text/"):
                    output.data[kind] = "a plot" if "image/png" in output.data else ABSOLUTE.sub("", text)
    return notebook


def main() -> None:
    """Run what the command line names."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("notebooks", nargs="*", type=Path)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    for path in options.notebooks or sorted(HERE.glob("*.ipynb")):
        try:
            notebook = tidied(executed(path))
        except nbclient.exceptions.CellExecutionError as error:
            sys.exit(f"{path.name}: {error}")
        if not options.check:
            nbformat.write(notebook, path)
        print(path.name, flush=True)


if __name__ == "__main__":
    main()
