"""Host memory that a CUDA device reads by itself, exactly as large as asked for.

torch's own pinned memory comes in powers of two: a thousand adapters of 80 MiB would take 125 GiB.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from windlass.errors import OutOfMemory


def pinned(count: int, dtype: torch.dtype) -> Tensor:
    """Room for so many numbers; it is ordinary memory again when the tensor is gone."""
    tensor = torch.empty(count, dtype=dtype)
    driver, at = torch.cuda.cudart(), tensor.data_ptr()
    error = int(driver.cudaHostRegister(at, tensor.nbytes, 0))
    if error:
        raise OutOfMemory(
            f"{tensor.nbytes:,} bytes of host memory could not be pinned for an adapter (CUDA error "
            f"{error}). Lower --max-cpu-loras, or raise the limit of locked memory."
        )
    weakref.finalize(tensor, driver.cudaHostUnregister, at).atexit = False
    return tensor
