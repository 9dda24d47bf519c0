"""The compiled kernels in a folder of their own, used on one device."""

import os
import platform
import re
import shutil
import sys
from pathlib import Path

import jax
import pytest

from jqinject import native
from jqinject.native.build import COMPILERS, MACHINES, build
from jqinject.native.library import AVX2, DOTS, FEW_ROWS, VARIABLE, library

TESTED = "TESTED_KERNELS"
"""The variable that names a library to test instead: in CI the installed one, and one compiled with sanitizers."""


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """The path of a library that was compiled now."""
    if os.environ.get(TESTED):
        return Path(os.environ[TESTED])
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        pytest.skip("the kernels are for Linux on x86-64 and ARM64")
    if not os.environ.get("CC") and not any(map(shutil.which, COMPILERS)):
        pytest.skip("there is no C compiler")
    return build(tmp_path_factory.mktemp("native"))


@pytest.fixture(scope="session")
def runs(compiled):
    """The path of a library that this processor runs."""
    variable = os.environ.pop(VARIABLE, None)
    with native.use(str(compiled)):
        found = library()
    if variable is not None:
        os.environ[VARIABLE] = variable
    if found.target is None:
        pytest.skip(found.reason)
    return str(compiled)


@pytest.fixture
def kernel(runs, monkeypatch):
    """Contractions go through the kernel, though there is perhaps AMX for many rows; its path."""
    loaded = native.library._loaded
    known = DOTS | FEW_ROWS | AVX2
    monkeypatch.setattr(
        "jqinject.native.library._loaded", lambda path: (loaded(path)[0] & known, loaded(path)[1])
    )
    native.library._found.cache_clear()
    with native.use(runs):
        yield runs
    native.library._found.cache_clear()


@pytest.fixture(params=["avx2", "few"])
def fewer_vectors(request, runs, monkeypatch, tmp_path):
    """The kernels of processors without AVX-512, and without AVX2, from a copy of the library; which, and its path."""
    copy = str(shutil.copy(runs, tmp_path / "copy.so"))
    monkeypatch.setenv("JQINJECT_VECTORS", request.param)
    with native.use(copy):
        found = library()
        if found.target is None:
            pytest.skip(found.reason)
        yield request.param, copy


@pytest.fixture
def both(kernel):
    """Runs a function compiled with the kernel and without: (how often it calls the kernel, both results)."""

    def run(function, *args):
        def compiled_anew(*args):
            return function(*args)

        with_kernel = jax.jit(compiled_anew).lower(*args)
        calls = len(re.findall(r'custom_call @"?jqinject_\w+_matmul', with_kernel.as_text()))
        with native.use(False):
            without = jax.jit(compiled_anew).lower(*args)
        assert not any(f"jqinject_{name}" in without.as_text() for name in native.library.FUNCTIONS)
        return calls, with_kernel.compile()(*args), without.compile()(*args)

    return run
