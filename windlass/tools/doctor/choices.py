"""The choices of an engine with default options on this machine, with reasons."""

from __future__ import annotations

from windlass.config import EngineConfig
from windlass.core.card import Choice
from windlass.machine.topology import share_cpus
from windlass.tools.doctor.findings import Findings, NativeKernels


def choose(found: Findings) -> list[Choice]:
    """The choices of an engine with default options; the model decides about kernels of single layers."""
    has_gpu = bool(found.torch.gpus)
    share = EngineConfig().limits("cuda" if has_gpu else "cpu").memory_share
    threads = share_cpus(found.cpu.topology)
    return [
        Choice(
            "device",
            "cuda" if has_gpu else "cpu",
            "torch sees a GPU" if has_gpu else "torch sees no CUDA device",
        ),
        _kernels(found),
        _executors(found),
        Choice("threads", str(threads.num_threads), threads.reason),
        Choice(
            "memory share",
            f"{share:g}",
            "of the GPU's memory" if has_gpu else "of the free memory, for the KV cache",
        ),
    ]


def _kernels(found: Findings) -> Choice:
    native = found.native
    if found.torch.gpus:
        if found.packages.triton is None:
            return Choice("kernels", "torch", "Triton is missing")
        return Choice("kernels", "Triton", f"version {found.packages.triton}")
    if native.simd is not None:
        return Choice("kernels", f"native, {native.simd}", _with_level(native.origin or "", native))
    if native.problem is not None:
        return Choice("kernels", "none", native.problem)
    if native.compiler is not None:
        value = "native" if native.level is None else f"native, {native.level}"
        why = f"compiled at first use, by {native.compiler}"
        return Choice("kernels", value, _with_level(why, native))
    return Choice("kernels", "torch", native.compiler_problem or "")


def _with_level(reason: str, native: NativeKernels) -> str:
    """The reason, and what the next instruction level needs."""
    if native.next_level is None:
        return reason
    needs = ", ".join(native.lacks)
    return f"{reason}; {native.next_level} needs {needs}, which this CPU lacks"


def _executors(found: Findings) -> Choice:
    if found.torch.gpus:
        graphs = "CUDA graphs (decode, verification, mixed), then eager"
        return Choice("executors", graphs, "--enforce-eager disables graphs")
    native = found.native
    if native.problem is None and (native.simd or native.compiler):
        return Choice("executors", "recorded program, then eager", "packed and 16-bit weights")
    return Choice("executors", "eager", "a recorded program needs native kernels")
