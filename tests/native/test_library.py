"""Compiling, finding and switching off the library, and building the package with and without it."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jqinject import native
from jqinject.dot.geometry.dimensions import Dimensions
from jqinject.dot.kernels.integer import integer_contraction
from jqinject.native.build import NAME, BuildError, build
from jqinject.native.library import AVX2, DOTS, FEW_ROWS, FUNCTION, TILES

ROOT = Path(__file__).parents[2]
MATMUL = (((1,), (1,)), ((), ()))


# --- compiling


def test_nothing_to_compile_with(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    _on_linux(monkeypatch)
    with pytest.raises(
        BuildError, match=r"no C compiler: none of cc, gcc, clang is on the path, and \$CC is not"
    ):
        build(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("compiler", "text"),
    [
        (f"{sys.executable} -c 'raise SystemExit(3)'", r"\.o failed:\nexit status 3$"),
        (f"{sys.executable} -c 'raise SystemExit(\"no space\")'", r"failed:\nno space$"),
        ("/nowhere/cc", r"^the C compiler '/nowhere/cc' does not run: No such file or directory$"),
    ],
)
def test_a_compiler_that_fails(monkeypatch, tmp_path, compiler, text):
    monkeypatch.setenv("CC", compiler)
    _on_linux(monkeypatch)
    with pytest.raises(BuildError, match=text):
        build(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("system", "machine"), [("darwin", "arm64"), ("linux", "riscv64"), ("win32", "AMD64")]
)
def test_other_machines(monkeypatch, tmp_path, system, machine):
    monkeypatch.setattr("sys.platform", system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    with pytest.raises(
        BuildError, match=f"the kernels are for Linux on x86-64 and ARM64, this is {system} on {machine}"
    ):
        build(tmp_path)


def test_an_unknown_folder(monkeypatch, tmp_path):
    _on_linux(monkeypatch)
    with pytest.raises(FileNotFoundError, match=r"there is no folder '.*missing' to compile into"):
        build(tmp_path / "missing")


def _on_linux(monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")


def test_the_old_library_stays_whole_while_a_new_one_is_made(compiled, monkeypatch, tmp_path):
    """Whoever has the old file open keeps it; a failure leaves it where it is."""
    path = build(tmp_path, SOON)
    assert path == tmp_path / NAME
    with path.open("rb") as old:
        content, number = old.read(), path.stat().st_ino
        assert build(tmp_path, SOON) == path and path.stat().st_ino != number
        old.seek(0)
        assert old.read() == content
    monkeypatch.setenv("CC", "false")
    with pytest.raises(BuildError):
        build(tmp_path)
    assert path.read_bytes() == content
    assert [entry.name for entry in tmp_path.iterdir()] == [NAME]


def python(*arguments, cwd, **variables):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command(compiled, tmp_path):
    done = python("-m", "jqinject.native.build", str(tmp_path), cwd=tmp_path)
    assert done.stdout.strip() == str(tmp_path / NAME), done.stderr
    script = ROOT / "jqinject" / "native" / "build.py"  # by itself, as where the package is built
    done = python(script, cwd=tmp_path, CC="/nowhere/cc")
    assert done.returncode == 1 and "jqinject.native.build: the C compiler '/nowhere/cc' does" in done.stderr
    done = python(script, "missing", cwd=tmp_path)
    assert done.returncode == 1 and "there is no folder 'missing'" in done.stderr


# --- finding and switching off

SOON = ("-O0",)
"""Flags for a library that is not fast, but compiled soon."""
ONE_DEVICE = {"XLA_FLAGS": "--xla_force_host_platform_device_count=1", "JAX_PLATFORMS": "cpu"}
SHOW = """
import jax, jax.numpy as jnp, numpy as np
import jqinject
from jqinject import native
from jqinject.dot import dot_general
from jqinject.quant.aqt import config_v4
print(native.status())
x = jax.random.normal(jax.random.key(0), (3, 70))
call = jax.jit(lambda x: dot_general(x, x, (((1,), (1,)), ((), ())), config=config_v4(rng_type=None)))
print("jqinject_int8_matmul" in call.lower(x).as_text())
print(np.asarray(call(x)).tobytes().hex())
"""


def test_the_variable(runs, tmp_path):
    """Of another process: it names a library, or switches off."""
    used = python("-c", SHOW, cwd=tmp_path, JQINJECT_NATIVE=runs, **ONE_DEVICE).stdout.split("\n")
    assert used[0].startswith("in use") and used[0].endswith(f": {runs}") and used[1] == "True"
    off = python("-c", SHOW, cwd=tmp_path, JQINJECT_NATIVE="0", **ONE_DEVICE).stdout.split("\n")
    assert off[:2] == ["switched off by JQINJECT_NATIVE=0", "False"]
    assert used[2] == off[2] != ""


def test_the_variable_is_read_at_every_call(kernel, monkeypatch):
    with native.use(kernel):
        assert native.status().startswith("in use") and native.status().endswith(f": {kernel}")
        monkeypatch.setenv("JQINJECT_NATIVE", "0")
        assert native.status() == "switched off by JQINJECT_NATIVE=0"
        monkeypatch.setenv("JQINJECT_NATIVE", "/nowhere.so")
        assert native.status() == "there is no file /nowhere.so, which JQINJECT_NATIVE names"
    with native.use(False):
        assert native.status() == "switched off"


@pytest.mark.lengthy
def test_a_clone_uses_the_library_of_the_installed_package(compiled, tmp_path):
    """Python started in the clone's root imports the clone, and finds what was compiled from the same source."""
    clone, site = tmp_path / "clone", tmp_path / "site"
    for root in (clone, site):
        shutil.copytree(
            ROOT / "jqinject", root / "jqinject", ignore=shutil.ignore_patterns("*.so", "__pycache__")
        )
    information = site / "jqinject-0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: jqinject\nVersion: 0\n")
    show = "from jqinject import native; from jqinject.native.library import library; print(library().reason)"
    library = build(site / "jqinject" / "native", SOON)
    settings = {"cwd": clone, "PYTHONPATH": str(site), "JQINJECT_NATIVE": "", **ONE_DEVICE}
    found = python("-c", show, **settings)
    assert str(library) in found.stdout or "neither AVX-512 VNNI" in found.stdout, found.stderr
    with (site / "jqinject" / "native" / "kernels" / "threads.c").open("a") as source:
        source.write("/* another version */\n")
    assert python("-c", show, **settings).stdout == "not compiled: python -m jqinject.native.build\n"


def product(x, y):
    return integer_contraction(x, y, Dimensions.of(2, 2, (((1,), (1,)), ((), ()))), jnp.dtype(jnp.int32))


def test_a_program_that_is_divided_or_exported_has_no_kernel(kernel):
    x, y = jnp.ones((16, 4), jnp.int8), jnp.ones((8, 4), jnp.int8)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    divided = jax.device_put(x, NamedSharding(mesh, P("data")))
    assert native.library.FUNCTION in jax.jit(product).lower(x, y).as_text()
    assert "custom_call" not in jax.jit(product).lower(divided, y).as_text()
    assert "custom_call" not in jax.export.export(jax.jit(product))(x, y).mlir_module()
    # Where the user divides, every device has matrices of its own.
    own = jax.shard_map(product, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    assert native.library.FUNCTION in jax.jit(own).lower(divided, y).as_text()
    np.testing.assert_array_equal(jax.jit(own)(divided, y), jax.jit(product)(divided, y))


def test_what_the_kernel_takes(kernel):
    bytes_, other = jnp.ones((3, 4), jnp.int8), jnp.ones((3, 4), jnp.uint8)
    assert native.takes(bytes_, bytes_, jnp.int32, rows=3)
    assert not native.takes(bytes_, other, jnp.int32, rows=3) and not native.takes(
        other, other, jnp.int32, rows=3
    )
    assert not native.takes(bytes_, bytes_, jnp.int16, rows=3)
    assert not native.takes(bytes_, bytes_[:0], jnp.int32, rows=3)
    with native.use(False):
        assert not native.takes(bytes_, bytes_, jnp.int32, rows=3)


def test_a_file_that_is_no_library(monkeypatch, tmp_path):
    broken = tmp_path / "kernels.so"
    broken.write_bytes(b"nothing to run")
    x = jnp.ones((3, 4), jnp.int8)
    with native.use(str(broken)):
        assert native.status().startswith(f"the library does not load: {broken}: ")
        assert native.status().endswith("\n  cure: python -m jqinject.native.build")
        assert not native.takes(x, x, jnp.int32, rows=3)


@pytest.mark.parametrize(
    ("features", "most", "text"),
    [
        (DOTS, 10**6, "in use: "),
        (DOTS | TILES, 4, "in use up to 4 rows, XLA's own with AMX tiles above: "),
        (AVX2, 10**6, "in use, with AVX2: "),
        (FEW_ROWS, 16, "in use up to 16 rows, without AVX-512 or AVX2: "),
        (TILES, 0, "this processor has neither AVX-512 VNNI nor AVX2"),
        (0, 0, "this processor has neither AVX-512 VNNI nor AVX2"),
    ],
)
def test_what_the_processor_has_decides(kernel, monkeypatch, tmp_path, features, most, text):
    library = tmp_path / "library.so"
    library.touch()
    monkeypatch.setattr("jqinject.native.library._loaded", lambda path: (features, "target"))
    x = jnp.ones((1, 4), jnp.int8)
    with native.use(str(library)):
        assert native.status().removesuffix(str(library)) == text
        assert native.takes(x, x, jnp.int32, rows=most) == (most > 0)
        assert native.takes(x, x, jnp.int32, rows=most + 1) == (features in (DOTS, AVX2))


def test_what_was_compiled_is_compiled_again(kernel):
    """One jitted function, on and off and on."""
    traced = []

    @jax.jit
    def product(x):
        taken = native.takes(x, x, jnp.int32, rows=3)
        traced.append(taken)
        return (
            native.int8_matmul(x, x)
            if taken
            else jax.lax.dot_general(x, x, MATMUL, preferred_element_type=int)
        )

    x = jnp.arange(-60, 60, dtype=jnp.int8).reshape(3, 40)
    with_kernel = product(x)
    with native.use(False):
        without = product(x)
    again = product(x)
    assert traced == [True, False]
    np.testing.assert_array_equal(with_kernel, without)
    np.testing.assert_array_equal(with_kernel, again)


def test_two_libraries(kernel, tmp_path):
    """Each has a name of its own with XLA."""
    other = str(build(tmp_path, SOON))
    x = jnp.arange(-60, 60, dtype=jnp.int8).reshape(3, 40)
    first = jax.jit(lambda x: native.int8_matmul(x, x)).lower(x)
    with native.use(other):
        second = jax.jit(lambda x: native.int8_matmul(x, x)).lower(x)
        assert f"@{FUNCTION}:{other}" in second.as_text().replace('"', "")
    assert f"@{FUNCTION}:{kernel}" in first.as_text().replace('"', "")
    np.testing.assert_array_equal(first.compile()(x), second.compile()(x))


# --- building the package


def _builder():
    return pytest.importorskip("hatchling.build", reason="builds the package: pip install hatchling")


def test_the_wheel_holds_the_library(compiled, monkeypatch, tmp_path):
    builder = _builder()
    monkeypatch.chdir(ROOT)
    before = set((ROOT / "jqinject" / "native").iterdir())
    name = builder.build_wheel(str(tmp_path))
    with zipfile.ZipFile(tmp_path / name) as wheel:
        names = set(wheel.namelist())
        metadata = next(entry for entry in names if entry.endswith("/WHEEL"))
        assert "Root-Is-Purelib: false" in wheel.read(metadata).decode()
        assert wheel.read(f"jqinject/native/{NAME}")[:4] == b"\x7fELF"
    assert name.endswith("-py3-none-linux_x86_64.whl")
    sources = ("kernels/int8_tiles.c", "kernels/xla_ffi.h", "build.py")
    assert {f"jqinject/native/{source}" for source in sources} <= names
    assert not any("hatch_build" in entry for entry in names)
    assert {entry for entry in (ROOT / "jqinject" / "native").iterdir() if entry.suffix == ".so"} <= before


def test_without_a_compiler_the_wheel_is_pure(monkeypatch, tmp_path, capfd):
    builder = _builder()
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("CC", "/nowhere/cc")
    _on_linux(monkeypatch)
    name = builder.build_wheel(str(tmp_path))
    with zipfile.ZipFile(tmp_path / name) as wheel:
        assert not any(".so" in entry for entry in wheel.namelist())
    assert name.endswith("-py3-none-any.whl")
    assert "built without compiled kernels: the C compiler '/nowhere/cc' does not run" in "".join(
        capfd.readouterr()
    )


@pytest.mark.heavy
def test_the_sdist_can_compile(monkeypatch, tmp_path):
    builder = _builder()
    monkeypatch.chdir(ROOT)
    name = builder.build_sdist(str(tmp_path))
    with tarfile.open(tmp_path / name) as sdist:
        names = {entry.partition("/")[2] for entry in sdist.getnames()}
    assert {
        "hatch_build.py",
        "jqinject/native/kernels/int8_tiles.c",
        "jqinject/native/kernels/xla_ffi.h",
    } <= names
    assert not any(".so" in entry for entry in names)
