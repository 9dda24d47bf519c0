"""What hatchling runs as it builds the package: compiles the kernels of `jqinject.native` where it can.

Else, and wherever there is no C compiler, the package is pure Python and contracts by XLA. `CC=false` asks for that.
"""

from __future__ import annotations

import importlib.util
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path("jqinject", "native")


class CompiledKernels(BuildHookInterface):
    """Puts the library into the wheel, or for an editable install beside its source."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, before hatchling collects the files.

        Args:
            version: "standard" or "editable".
            build_data: what hatchling builds by; changed in place.
        """
        compiler = _compiler(Path(self.root))
        editable = version == "editable"
        if not editable:
            # Out of the source tree.
            self.folder = tempfile.TemporaryDirectory(prefix="jqinject-native-")
        try:
            library = compiler.build(Path(self.root, NATIVE) if editable else self.folder.name)
        except compiler.BuildError as error:
            reason = str(error).partition("\n")[0].rstrip(":")
            self.app.display_warning(f"jqinject is built without compiled kernels: {reason}")
            return
        if editable:
            return
        build_data["force_include"][str(library)] = str(NATIVE / library.name)
        build_data["pure_python"] = False
        # It calls nothing of Python's: one wheel for every version.
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Clean up, after the wheel is written."""
        if version != "editable":
            self.folder.cleanup()


def _compiler(root: Path) -> ModuleType:
    """`jqinject/native/build.py` by itself: what the package needs is not installed here."""
    spec = importlib.util.spec_from_file_location("jqinject_native_build", root / NATIVE / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
