"""Host memory for adapters, exactly as large as asked for, and how a CUDA device reads it by itself.

torch's own pinned memory comes in powers of two: a thousand adapters of 80 MiB would take 125 GiB.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref

import torch
from torch import Tensor

from windlass.errors import OutOfMemory

_OWN = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_HUGE_PAGES: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # where the system has them


def room(count: int, dtype: torch.dtype) -> Tensor:
    """Zeros, in pages of their own: large ones, since thousands of small ones take longer to come
    and to be pinned than to be filled."""
    pages = mmap.mmap(-1, max(1, count * dtype.itemsize), flags=_OWN)
    if _HUGE_PAGES is not None:
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(_HUGE_PAGES)
    return torch.frombuffer(pages, dtype=dtype, count=count)


def pin(tensor: Tensor) -> None:
    """Let the device read a tensor; it is ordinary memory again when the tensor is gone."""
    driver, at = torch.cuda.cudart(), tensor.data_ptr()
    error = int(driver.cudaHostRegister(at, tensor.nbytes, 0))
    if error:
        raise OutOfMemory(
            f"{tensor.nbytes:,} bytes of host memory could not be pinned for an adapter (CUDA error "
            f"{error}). Lower --max-cpu-loras, or raise the limit of locked memory."
        )
    weakref.finalize(tensor, driver.cudaHostUnregister, at).atexit = False
