"""Host memory of exactly the requested size, pinned for CUDA copies.

torch rounds pinned allocations up to powers of two: a thousand adapters of 80 MiB would take 125 GiB.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref

import torch
from torch import Tensor

from windlass.errors import OutOfMemory
from windlass.machine.posix import map_private

_HUGE_PAGES: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # None: not on this system


def allocate(count: int, dtype: torch.dtype) -> Tensor:
    """Allocate zeros in their own memory mapping, with huge pages where the system has them.

    Faulting in and pinning thousands of small pages takes longer than filling them.
    """
    num_bytes = max(1, count) * dtype.itemsize  # an adapter may change no layer of a stage
    pages = map_private(num_bytes)
    if _HUGE_PAGES is not None:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(_HUGE_PAGES)
    return torch.frombuffer(pages, dtype=dtype)[:count]


def pin(tensor: Tensor) -> None:
    """Pin a tensor's memory. It is unpinned when the tensor is freed."""
    driver, address = torch.cuda.cudart(), tensor.data_ptr()
    error = int(driver.cudaHostRegister(address, tensor.nbytes, 0))
    if error:
        raise OutOfMemory(
            f"{tensor.nbytes:,} bytes of host memory could not be pinned for an adapter (CUDA error "
            f"{error}). Lower --max-cpu-loras, or raise the limit of locked memory."
        )
    weakref.finalize(tensor, driver.cudaHostUnregister, address).atexit = False
