"""Builds wheels: one for any platform, which has the CPU kernels as sources, or one for this platform.

With WINDLASS_BUILD_KERNELS=1 the wheel also has the kernels compiled for every instruction level of this
architecture (windlass/kernels/native/levels.py), and its tag names the platform. `make wheels` builds both.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.errors import BaseError

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))  # an isolated build does not have it

from windlass.errors import EngineError  # noqa: E402
from windlass.kernels.native import prebuilt  # noqa: E402

_VARIABLE = "WINDLASS_BUILD_KERNELS"
_SOURCES = (Path("windlass/kernels/native/src"), Path("windlass/lora/src"))


def _builds_kernels() -> bool:
    value = os.environ.get(_VARIABLE, "0")
    if value not in ("0", "1"):
        raise BaseError(f"{_VARIABLE} must be 0 or 1, not {value!r}")
    return value == "1"


class WindlassDistribution(Distribution):
    """Belongs to a platform if it has compiled kernels."""

    def has_ext_modules(self) -> bool:
        return _builds_kernels()


class BuildPackage(build_py):
    """Copies the package, and compiles its kernels if the variable says so."""

    def run(self) -> None:
        super().run()
        if self.editable_mode and _builds_kernels():
            raise BaseError(
                f"{_VARIABLE}=1 is for wheels: an editable installation compiles kernels on first use"
            )
        if not self.editable_mode:
            for sources in _SOURCES:
                self._build_kernels(sources)

    def _build_kernels(self, sources: Path) -> None:
        target = Path(self.build_lib) / sources.parent / prebuilt.FOLDER
        if target.exists():  # of an earlier build
            shutil.rmtree(target)
        if _builds_kernels():
            try:
                prebuilt.build_all(ROOT / sources, target, platform.machine())
            except EngineError as error:
                raise BaseError(str(error)) from error


class BuildWheel(bdist_wheel):
    """Tags wheels for every Python 3: the kernels do not use its C API."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    distclass=WindlassDistribution,
    cmdclass={"build_py": BuildPackage, "bdist_wheel": BuildWheel},
)
