"""The compiled library: where it is, whether this machine runs it, and its registration with XLA."""

import ctypes
import functools
import importlib.metadata
import os
from dataclasses import dataclass
from pathlib import Path

import jax

FILE = Path(__file__).with_name("kernels.so")
SOURCES = Path(__file__).with_name("kernels")
PACKAGE = __name__.partition(".")[0]
FUNCTIONS = (
    "int8_matmul",
    "int4_matmul",
    "group_matmul",
    "float_matmul",
    "fused_matmul",
    "row_amax",
    "three_bits",
)
FUNCTION = "jqinject_int8_matmul"
VARIABLE = "JQINJECT_NATIVE"
DOTS, TILES, FEW_ROWS, AVX2 = 1, 2, 4, 8
# A tile of AMX has 16 rows. With fewer, what should count is how the weight is read, once and in its stored layout;
# not measured.
FEW = 4
# With NEON: of integers, and of floats, for which dequantizing once pays with more.
MOST_ROWS, MOST_ROWS_OF_FLOATS = 16, 4

# Whether contractions use the kernels: `with use(False): ...` leaves everything to XLA, and JAX recompiles programs
# that were compiled under another value. The value may also be the path of another library.
use = jax.make_user_context(default_value=True)


@dataclass(frozen=True)
class Library:
    """The facts about a library.

    Attributes:
        target: the name of `int8_matmul` in XLA; None if the library is not used.
        reason: why it is not used, or that it is.
        rows: the maximum number of rows of integers on the left that it is used for; None for any.
        rows_of_floats: the same of floats.
    """

    target: str | None
    reason: str
    rows: int | None = None
    rows_of_floats: int | None = None

    def function(self, name: str) -> str:
        """Another of its functions, by its name in XLA."""
        assert self.target is not None, "asked before it is used"
        return self.target.replace(FUNCTION, f"jqinject_{name}", 1)


def library() -> Library:
    """The library that contractions use, or why they use none."""
    chosen = use.value
    if chosen is False:
        return Library(None, "switched off")
    return _found(str(_own_file()) if chosen is True else os.fspath(chosen), os.environ.get(VARIABLE, ""))


@functools.cache
def _own_file() -> Path:
    """The library beside this file, or the one that the installed package compiled from the same source.

    Python started in a clone's root imports the clone, whose folder has no library unless it was compiled there,
    although `pip install .` has compiled one from these very files.
    """
    if FILE.is_file():
        return FILE
    try:
        installed = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return FILE
    folder = "/".join(__name__.split(".")[:-1])
    sources, compiled = (
        Path(str(installed.locate_file(f"{folder}/{file.name}"))) for file in (SOURCES, FILE)
    )
    same = compiled.is_file() and _contents(sources) == _contents(SOURCES)
    return compiled if same else FILE


def _contents(sources: Path) -> dict[str, bytes]:
    """The kernels' sources by name."""
    return {file.name: file.read_bytes() for file in sources.glob("*.[ch]")}


@functools.cache
def _found(path: str, variable: str) -> Library:
    if variable == "0":
        return Library(None, f"switched off by {VARIABLE}=0")
    if variable and not Path(variable).is_file():
        return Library(None, f"there is no file {variable}, which {VARIABLE} names")
    path = variable or path
    if not Path(path).is_file():
        return Library(None, "not compiled: python -m jqinject.native.build")
    try:
        features, target = _loaded(path)
    except OSError as error:
        return Library(None, f"the library does not load: {error}\n  cure: python -m jqinject.native.build")
    if features & FEW_ROWS:
        reason = f"in use up to {MOST_ROWS} rows, without AVX-512 or AVX2: {path}"
        return Library(target, reason, MOST_ROWS, MOST_ROWS_OF_FLOATS)
    if features & AVX2:
        return Library(target, f"in use, with AVX2: {path}")
    if not features & DOTS:
        return Library(None, "this processor has neither AVX-512 VNNI nor AVX2")
    if features & TILES:
        return Library(target, f"in use up to {FEW} rows, XLA's own with AMX tiles above: {path}", FEW)
    return Library(target, f"in use: {path}")


@functools.cache
def _loaded(path: str) -> tuple[int, str]:
    """The processor's instruction sets, and the library's name in XLA."""
    loaded = ctypes.CDLL(path)
    ending = "" if path == str(FILE) else f":{path}"
    for name in FUNCTIONS:
        function = jax.ffi.pycapsule(loaded[f"jqinject_{name}"])
        jax.ffi.register_ffi_target(f"jqinject_{name}{ending}", function, platform="cpu")
    return loaded.jqinject_cpu_features(), FUNCTION + ending
