"""Compiles the kernels: `python -m jqinject.native.build`. Installing the package does so too.

Only uses the standard library, because it also runs when the package is built and nothing is installed.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE / "kernels"
NAME = "kernels.so"
FLAGS = ("-O2", "-std=gnu11", "-fPIC", "-pthread", "-fvisibility=hidden")
MACHINES = ("x86_64", "AMD64", "aarch64", "arm64")
COMPILERS = ("cc", "gcc", "clang")


class BuildError(RuntimeError):
    """The kernels cannot be compiled here; the text says why."""


def build(folder: Path | str = HERE, flags: Sequence[str] = ()) -> Path:
    """Compile the kernels into a folder.

    The library runs on every processor of the machine's kind, and uses the instructions that the processor has.

    Args:
        folder: the folder for the library; by default that of this file, where it is looked up.
        flags: further ones for the compiler.

    Returns:
        The library's path.

    Raises:
        BuildError: not Linux on x86-64 or ARM64, no C compiler, or the compiler failed.
        FileNotFoundError: the folder does not exist.
    """
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        raise BuildError(
            f"the kernels are for Linux on x86-64 and ARM64, this is {sys.platform} on {platform.machine()}"
        )
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {str(folder)!r} to compile into")
    compiler = [*_compiler(), *FLAGS, *flags]
    # Made in a temporary folder and renamed: another process may have the old library open.
    with tempfile.TemporaryDirectory(prefix=f"{NAME}.", dir=folder) as build_folder:
        objects = {source: f"{build_folder}/{source.stem}.o" for source in sorted(SOURCES.glob("*.c"))}
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            commands = ([*compiler, "-c", str(source), "-o", to] for source, to in objects.items())
            list(threads.map(_run, commands))
        fresh = Path(build_folder, NAME)
        _run([*compiler, "-shared", *objects.values(), "-o", str(fresh)])
        return fresh.replace(folder / NAME)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"the C compiler {command[0]!r} does not run: {error.strerror}") from None
    if done.returncode:
        said = done.stderr.strip() or f"exit status {done.returncode}"
        raise BuildError(f"{shlex.join(command)} failed:\n{said}")


def _compiler() -> list[str]:
    """The command of a C compiler: $CC, or the first one found."""
    if os.environ.get("CC"):
        return shlex.split(os.environ["CC"])
    for name in COMPILERS:
        if shutil.which(name):
            return [name]
    raise BuildError(
        f"there is no C compiler: none of {', '.join(COMPILERS)} is on the path, and $CC is not set"
    )


if __name__ == "__main__":
    try:
        print(build(*sys.argv[1:2]))
    except (BuildError, FileNotFoundError) as error:
        sys.exit(f"jqinject.native.build: {error}")
