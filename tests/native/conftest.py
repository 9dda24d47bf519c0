"""The compiled kernels in a folder of their own, used on one device."""

import os
import platform
import re
import shutil
import sys

import jax
import pytest

from jqinject import native
from jqinject.native.build import COMPILERS, build
from jqinject.native.library import DOTS, VARIABLE, library


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """The path of a library that was compiled now."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        pytest.skip("the kernels are for x86-64 Linux")
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
    monkeypatch.setattr("jqinject.native.library._loaded", lambda path: (DOTS, loaded(path)[1]))
    native.library._found.cache_clear()
    with native.use(runs):
        yield runs
    native.library._found.cache_clear()


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
