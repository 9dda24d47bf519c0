"""What holds for every test and doctest: eight CPU devices, strict dtypes, quick compilation without a cache; and how
much of it runs.

`python -m pytest` alone runs the tests that take no more than about a second, of each table the first row, on every
core: a few minutes. CI (`--tables=many`) runs the heavy ones too, and of long tables rows spread over them. With files,
directories or `--tables=whole` named, every test and every row runs.

The environment is set before JAX is imported, and only where it is not set already, so that
`JAX_PLATFORMS=cuda python -m pytest` runs the suite on another backend. This file lies beside `tests/` and
`jqinject/` because it serves both: the tests and the examples in the docstrings.
"""

import contextlib
import ctypes
import gc
import importlib
import os
from collections import defaultdict
from functools import lru_cache
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

# What is compiled stays: looking through it for garbage takes time and finds nothing.
gc.set_threshold(100_000, 50, 100)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
_FLAGS = {"--xla_force_host_platform_device_count": "8"}
if version("jaxlib").startswith("0.10."):
    # Programs this small compile sooner in one piece than cut up for several threads.
    _FLAGS["--xla_cpu_parallel_codegen_split_count"] = "1"
    # XLA's older way to make loops compiles sooner. Later releases do not know the flag and refuse to start.
    _FLAGS["--xla_cpu_use_fusion_emitters"] = "false"
    # These would be unrolled for every reduction over more than 32 numbers, which compiles for seconds.
    _FLAGS["--xla_disable_hlo_passes"] = "tree_reduction_rewriter"
_given = os.environ.get("XLA_FLAGS", "")
_added = [f"{flag}={value}" for flag, value in _FLAGS.items() if flag not in _given]
os.environ["XLA_FLAGS"] = " ".join([_given, *_added]).strip()
os.environ.setdefault("MPLBACKEND", "agg")

import jax
import pytest
from hypothesis import settings
from jax._src.interpreters import mlir  # noqa: TID251 (the public module has the function, but does not call it)

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_enable_compilation_cache", False)
# Tests run a program once: optimizing it takes longer than it does.
jax.config.update("jax_disable_most_optimizations", True)
# JAX makes an MLIR context for each program, which takes a quarter of the time of a small one. Here many share one.
_new_context, _programs = mlir.make_ir_context, count()


@lru_cache(maxsize=1)
def _context(_number: int) -> Any:
    return _new_context()


mlir.make_ir_context = lambda: _context(next(_programs) // PROGRAMS)

# A first example compiles, so time limits say nothing; in CI every run draws the same examples.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

PROGRAMS = 256  # lowered in one context, which keeps their constants
ROWS = 3  # of a table run in CI at least
ONE_OF = 32  # rows of a long table
LENGTHY = 3  # one of so many lengthy tests that `--tables=many` runs
MUCH = 2.0 * 2**30  # bytes: some hundred programs beside what is imported


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--tables`."""
    parser.addoption(
        "--tables",
        choices=("whole", "many", "sampled"),
        help="all rows of parametrized tests and all tests; rows spread over each table and some lengthy tests (CI); "
        "or one row of each table, and no heavy or lengthy tests (what a bare run takes)",
    )


def _is_everything(config: pytest.Config) -> bool:
    """Whether nothing was named, so that what runs is the whole suite."""
    return config.args_source == pytest.Config.ArgsSource.TESTPATHS


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """One process for what was named: starting others would take longer. None leaves it to xdist."""
    return None if _is_everything(config) else 0


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Decide which rows of tables run."""
    # Decided once, before workers are started, which are given files whatever was asked for.
    if config.option.tables is None:
        config.option.tables = "sampled" if _is_everything(config) else "whole"


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Import a file of the library by its name, before pytest does it by its path.

    pytest imports the file's package first, which may import the file, and then executes the file all the same: its
    classes would exist twice.
    """
    root = Path(__file__).parent
    if isinstance(collector, pytest.Module) and collector.path.is_relative_to(root / "jqinject"):
        path = collector.path.relative_to(root).with_suffix("")
        names = path.parts[:-1] if path.name == "__init__" else path.parts
        with contextlib.suppress(ImportError):  # pytest reports it
            importlib.import_module(".".join(names))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the rows, and the heavy and lengthy tests, that do not run."""
    if config.option.tables == "whole":
        return
    few = config.option.tables == "sampled"
    tables: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not few or not any(item.get_closest_marker(name) for name in ("heavy", "lengthy")):
            tables[item.nodeid.partition("[")[0]].append(item)
    chosen = [item for rows in tables.values() for item in (rows[:1] if few else _spread(rows))]
    lengthy = [item for item in chosen if item.get_closest_marker("lengthy") is not None]
    left = {item.nodeid for item in lengthy} - {item.nodeid for item in lengthy[::LENGTHY]}
    kept = {item.nodeid for item in chosen} - left
    left_out = [item for item in items if item.nodeid not in kept]
    items[:] = [item for item in items if item.nodeid in kept]
    if left_out:
        config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    """What collecting leaves behind, half of what the process holds, makes room for programs."""
    gc.collect()
    _return_memory()


def _spread(rows: list[Any]) -> list[Any]:
    """Rows at even distances, the first and the last among them."""
    wanted = max(ROWS, len(rows) // ONE_OF)
    if len(rows) <= wanted:
        return rows
    return [rows[place * (len(rows) - 1) // (wanted - 1)] for place in range(wanted)]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say that rows were left out."""
    if config.option.tables == "sampled":
        terminalreporter.write_line(
            "heavy tests were left out, and all rows of tables but the first; --tables=many runs what CI runs, "
            "--tables=whole everything"
        )
    elif config.option.tables == "many":
        terminalreporter.write_line(
            "of long tables one row of 32 ran, and one lengthy test of three; --tables=whole runs all"
        )


@pytest.fixture(scope="module", autouse=True)
def _programs_are_dropped() -> Any:
    """Compiled programs are kept for the next tests, until a process holds much memory."""
    yield
    if _resident_bytes() > MUCH:
        jax.clear_caches()
        gc.collect()
        _return_memory()


@pytest.fixture(autouse=True)
def _tables_have_one_line_a_row() -> Any:
    """A wide terminal, in tests alone; those of narrow terminals set their own."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "1000"
    yield
    if before is None:
        del os.environ["COLUMNS"]
    else:
        os.environ["COLUMNS"] = before


def _return_memory() -> None:
    """Give freed memory back to the system: the GNU C library keeps what programs took, several gigabytes in all."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _resident_bytes() -> int:
    """What this process holds in memory; 0 where the system does not tell as Linux does."""
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if pages.exists() else 0
