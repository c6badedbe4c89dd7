"""A program that prints what torch and the GPU driver report, as JSON. Runs in a process of its own.

A torch that crashes or hangs at its import then ends this program, not the caller. Imports nothing of Windlass.

Without a GPU driver, torch's libraries are loaded and its Python modules are not: its import takes seconds of CPU
time and would add nothing to the report.
"""

from __future__ import annotations

import ast
import ctypes
import json
import sys
import warnings
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def probe() -> dict[str, Any]:
    """Load torch and ask it for its GPUs."""
    driver_cuda = _driver_cuda()
    found: dict[str, Any] = {"driver_cuda": driver_cuda}
    try:
        extension = _extension() if driver_cuda is None else None
        return found | (_imported() if extension is None else _loaded(extension))
    except Exception as error:  # report any error that keeps torch from loading
        return found | {"error": f"{type(error).__name__}: {error}"}


def _extension() -> Path | None:
    """The library that torch's import loads first; None if the files are not a Linux wheel's."""
    spec = find_spec("torch") if sys.platform == "linux" else None
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0])
    paths = [folder / f"_C{suffix}" for suffix in EXTENSION_SUFFIXES]
    found = next((path for path in paths if path.is_file()), None)
    return found if (folder / "version.py").is_file() else None


def _loaded(extension: Path) -> dict[str, Any]:
    """Load torch's libraries, which finds a missing library or a libc that is too old; the import gives the error."""
    try:
        ctypes.CDLL(str(extension))
    except OSError:
        return _imported()
    version = _constants(extension.with_name("version.py"))
    return {"version": version["__version__"], "cuda": version["cuda"], "gpus": []}


def _constants(file: Path) -> dict[str, Any]:
    """The constants that a module assigns to names, read without running it."""
    found = {}
    for line in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(line, ast.Assign | ast.AnnAssign) and isinstance(line.value, ast.Constant):
            target = line.targets[0] if isinstance(line, ast.Assign) else line.target
            if isinstance(target, ast.Name):
                found[target.id] = line.value.value
    return found


def _imported() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "gpus": [],
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
        if available:
            found["gpus"] = [_gpu(torch, index) for index in range(torch.cuda.device_count())]
    if torch.version.cuda and not available and caught:
        found["cuda_error"] = str(caught[0].message).splitlines()[0]
    return found


def _gpu(torch: Any, index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "capability": [properties.major, properties.minor],
        "memory_bytes": properties.total_memory,
    }


def _driver_cuda() -> list[int] | None:
    """The newest CUDA version that the driver supports; None without a driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return [version.value // 1000, version.value % 1000 // 10]


if __name__ == "__main__":
    print(json.dumps(probe()))
