"""What a GPU lacks that some kernels need, each with the reason that the start-up table shows.

Kernels were measured on an H200 (compute capability 9.0). Others compile for every NVIDIA GPU from
8.0 on; docs/gpus.md says which.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_TRITON = (8, 0)  # first with bf16 tensor cores and asynchronous copies
_FP8 = (8, 9)  # first with e4m3 conversions and tensor cores
_PDL = (9, 0)
_HOPPER = 9  # the one major version with warpgroup_mma
_KIB = 1024
# Shared memory that a program may have, by compute capability; others of a major version have as
# much as the first.
_SHARED_BYTES = {
    (8, 0): 163 * _KIB,
    (8, 6): 99 * _KIB,
    (8, 7): 163 * _KIB,
    (8, 9): 99 * _KIB,
    (9, 0): 227 * _KIB,
    (10, 0): 227 * _KIB,
    (12, 0): 99 * _KIB,
}
_ROCM_SHARED_BYTES = 64 * _KIB


@dataclass(frozen=True, slots=True)
class Gpu:
    """A kind of GPU. Each `lacks_` method returns why kernels cannot use a feature, or None."""

    capability: tuple[int, int]
    is_rocm: bool = False

    @property
    def name(self) -> str:
        if self.is_rocm:
            return "a ROCm device"
        return f"a GPU of compute capability {self.capability[0]}.{self.capability[1]}"

    @property
    def arch(self) -> str:
        return "ROCm" if self.is_rocm else f"sm_{self.capability[0]}{self.capability[1]}"

    @property
    def shared_bytes(self) -> int:
        """Shared memory that one program may have."""
        if self.is_rocm:
            return _ROCM_SHARED_BYTES
        major = self.capability[0]
        return _SHARED_BYTES.get(self.capability) or _SHARED_BYTES.get((major, 0), 48 * _KIB)

    def lacks_triton(self) -> str | None:
        """For every Triton kernel."""
        if self.is_rocm or self.capability >= _TRITON:
            return None
        return f"the Triton kernels need compute capability 8.0, this is {self.name}"

    def lacks_fp8(self) -> str | None:
        """For e4m3 conversions and tensor cores."""
        if self.is_rocm:
            return "the fp8 kernels are written for NVIDIA GPUs, this is a ROCm device"
        if self.capability >= _FP8:
            return None
        return f"fp8 tensor cores need compute capability 8.9, this is {self.name}"

    def lacks_ptx(self) -> str | None:
        """For instructions of NVIDIA GPUs in a kernel."""
        return "it has NVIDIA instructions (PTX), this is a ROCm device" if self.is_rocm else None

    def lacks_pdl(self) -> str | None:
        """For programmatic dependent launch and prefetches into the L2 cache."""
        if not self.is_rocm and self.capability >= _PDL:
            return None
        return f"PDL needs compute capability 9.0, this is {self.name}"

    def lacks_warpgroups(self) -> str | None:
        """For Hopper's warpgroup_mma."""
        if not self.is_rocm and self.capability[0] == _HOPPER:
            return None
        return f"warpgroup_mma needs compute capability 9.0 (Hopper), this is {self.name}"


MEASURED = Gpu((9, 0))


def current_gpu(device: torch.device | None = None) -> Gpu | None:
    """The kind of a device, or of the current one; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    return Gpu(torch.cuda.get_device_capability(device), torch.version.hip is not None)


def gpu_of(device: torch.device) -> Gpu:
    """The kind of a device. Without a GPU (plans, Triton's interpreter): that of the measurements."""
    return (current_gpu(device) if device.type == "cuda" else None) or MEASURED
