"""A program that prints what torch and the GPU driver report, as JSON. Runs in a process of its own.

A torch that crashes or hangs at its import then ends this program, not the caller. Imports nothing of Windlass.
"""

from __future__ import annotations

import ctypes
import json
import warnings
from typing import Any


def probe() -> dict[str, Any]:
    """Import torch and ask it for its GPUs."""
    found: dict[str, Any] = {"driver_cuda": _driver_cuda()}
    try:
        import torch
    except Exception as error:  # whatever keeps torch from loading is what the user must know
        return found | {"error": f"{type(error).__name__}: {error}"}
    found |= {"version": torch.__version__, "cuda": torch.version.cuda, "gpus": []}
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
