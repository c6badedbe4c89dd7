"""Chooses device, dtype, threads and KV cache size, each with its reason."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Literal

import psutil
import torch

from windlass.config import AUTO, CacheConfig, EngineConfig, ModelConfig
from windlass.core.card import Capacity, Choice
from windlass.core.kv_layout import KVLayout
from windlass.errors import ConfigError
from windlass.kernels.gpu import gpu_of
from windlass.machine.cgroup import memory_limit
from windlass.machine.device import check_cpu_replicas
from windlass.machine.topology import (
    CpuShare,
    CpuSlot,
    bind_process,
    process_topology,
    share_cpus,
    threads_as_set,
)
from windlass.models.hparams import HParams
from windlass.models.network import kv_layout
from windlass.parallel.mesh import Mesh
from windlass.parallel.place import Place
from windlass.parallel_config import ParallelConfig


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """The chosen device, and why."""

    type: Literal["cpu", "cuda"]
    reason: str

    @property
    def device(self) -> torch.device:
        return torch.device(self.type)

    @property
    def choice(self) -> Choice:
        return Choice("device", self.type, self.reason)


def choose_device(config: ModelConfig) -> DeviceChoice:
    """A GPU if there is one, unless configured otherwise."""
    has_cuda = torch.cuda.is_available()
    if config.device == "cpu":
        return DeviceChoice("cpu", "as set")
    if has_cuda:
        return DeviceChoice("cuda", "as set" if config.device == "cuda" else "torch sees one")
    if config.device == "cuda":
        raise ConfigError("--device cuda: torch sees no CUDA device. Use --device cpu.")
    return DeviceChoice("cpu", "torch sees no CUDA device")


def choose_dtype(
    config: ModelConfig, hparams: HParams, device: torch.device
) -> tuple[torch.dtype, Choice]:
    """The checkpoint's dtype on a GPU; float32 on a CPU, also for 16-bit weights."""
    if config.dtype != "auto":
        name, reason = str(config.dtype), "as set"
    elif device.type == "cpu":
        name, reason = "float32", "16-bit accumulation is slow on CPUs; weights may have fewer bits"
    elif hparams.dtype in ("bfloat16", "float16"):
        name, reason = hparams.dtype, "dtype of the checkpoint"
    else:
        name, reason = "bfloat16", "half the bytes of float32, the same range"
    return getattr(torch, name), Choice("dtype", name, reason)


@dataclass(frozen=True, slots=True)
class KVFormat:
    """The dtype and layout of the KV cache, and why."""

    dtype: torch.dtype
    layout: KVLayout
    choice: Choice


_KV_DTYPES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}


def kv_dtype(requested: str) -> torch.dtype | None:
    """The KV cache dtype; None: the compute dtype."""
    return _KV_DTYPES.get(requested)


def choose_kv_format(
    requested: str,
    hparams: HParams,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    triton: bool,
    native: bool = False,
    mesh: Mesh | None = None,
) -> KVFormat:
    """Choose the dtype of the KV cache. `dtype`: of the computation.

    `native`: the native CPU kernels are in use, not the float32 reference.
    """

    def layout_of(kind: torch.dtype) -> KVLayout:
        return kv_layout(hparams, block_size, dtype=kind, mesh=mesh)

    halved = native and dtype == torch.float32
    own = torch.float16 if halved else dtype
    usual, name = layout_of(own), str(own).removeprefix("torch.")
    if requested == "auto":
        reason = "half the bytes of float32" if halved else "dtype of the computation"
        return KVFormat(own, usual, Choice("KV format", name, reason))
    if usual.has_state:
        raise ConfigError(
            f"--kv-cache-dtype {requested}: a model with recurrent states keeps the KV of its attention "
            "layers unquantised, since its states need most of the memory. Use --kv-cache-dtype auto."
        )
    if usual.mixes_pages:
        raise ConfigError(
            f"--kv-cache-dtype {requested}: the layers of {hparams.architecture} have heads of different "
            "sizes, whose keys and values are kept unquantised. Use --kv-cache-dtype auto."
        )
    kind = _KV_DTYPES[requested]
    is_fp8 = kind != torch.int8
    why = gpu_of(device).lacks_fp8() if is_fp8 and triton else None
    if why is not None:
        raise ConfigError(f"--kv-cache-dtype {requested}: {why}. Use --kv-cache-dtype int8.")
    layout = layout_of(kind)
    reason = f"as set: {usual.block_bytes / layout.block_bytes:.2f}x the tokens of {name}"
    if is_fp8 and device.type == "cpu":
        reason += "; int8 is faster on a CPU and more accurate"
    shown = "fp8 (e4m3)" if is_fp8 else "int8"
    choice = Choice("KV format", f"{shown}, a scale per token and head", reason)
    return KVFormat(kind, layout, choice)


@dataclass(frozen=True, slots=True)
class ThreadChoice:
    """The number of CPU threads, and why. `cpus`: those of each thread; None: any."""

    count: int
    reason: str
    cpus: tuple[tuple[int, ...], ...] | None

    @property
    def choice(self) -> Choice:
        return Choice("threads", str(self.count), self.reason)


def claim_devices(config: EngineConfig, replica: int) -> None:
    """Show this process, and the ranks that it starts, only the GPUs of its replica.

    Must precede the first use of CUDA. Raises ConfigError if the replicas need more devices than there
    are.
    """
    parallel = config.parallel
    if parallel.data_parallel_size == 1:
        return
    option, ranks = f"--data-parallel-size {parallel.data_parallel_size}", parallel.ranks_per_node
    num_gpus = 0 if config.model.device == "cpu" else torch.cuda.device_count()
    if num_gpus == 0:
        check_cpu_replicas(parallel.data_parallel_size)
        return
    if parallel.processes_per_node > num_gpus:
        raise ConfigError(
            f"{option}: replicas of {ranks} GPUs need {parallel.processes_per_node} GPUs, and torch "
            f"sees {num_gpus}. Use at most {num_gpus // ranks} replicas, or --device cpu."
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(number) for number in range(num_gpus)]
    own = gpus[replica * ranks : (replica + 1) * ranks]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(own)


def claim_gpu(config: EngineConfig, place: Place) -> EngineConfig:
    """Make this rank's GPU the current device. Returns the config to build the rank with.

    Ranks that exchange tensors through host memory (gloo) may share a GPU. Their all-reduces cannot be
    captured, so tensor-parallel ranks run eagerly; stages exchange tensors between graph replays.
    """
    parallel = config.parallel
    backend = parallel.distributed_backend
    if choose_device(config.model).type != "cuda":
        if backend == "nccl":
            raise ConfigError("--distributed-backend nccl needs GPUs. Leave it out.")
        return config
    ranks, count = parallel.ranks_per_node, torch.cuda.device_count()
    if ranks > count and backend != "gloo":
        raise ConfigError(
            f"{ranks} ranks on this machine (--tensor-parallel-size times --pipeline-parallel-size, divided "
            f"by --nnodes) need a GPU each, and "
            f"torch sees {count}. Use at most {count}, or --distributed-backend gloo to share a GPU, "
            "which is slow."
        )
    torch.cuda.set_device(place.local_rank % count)
    if backend != "gloo" or parallel.tensor_parallel_size == 1:
        return config
    return replace(config, model=replace(config.model, enforce_eager=True))


_claimed: CpuSlot | None = None


def claim_cpus(config: ModelConfig, slot: CpuSlot) -> None:
    """Take this process' part of the cores. With several NUMA nodes, the process stays on its node.

    Must precede the first allocation of weights, since the kernel places memory on the node that writes it.
    """
    global _claimed
    _claimed = slot
    bind_process(_share(config, slot))


def claimed_cpus(parallel: ParallelConfig) -> CpuSlot:
    """The cores that this process has claimed; by default those of its engine's first process."""
    return _claimed or CpuSlot(0, parallel.processes_per_node)


def choose_threads(config: ModelConfig, slot: CpuSlot = CpuSlot()) -> ThreadChoice:  # noqa: B008 - frozen
    """The configured number, or this process' share of the cores. torch's operators use as many threads.

    torch has one setting per process. With several engines in a process, operators of torch (eager
    steps, sampling with logprobs) use the threads of the engine that was built last; the native kernels
    of each engine use its own pool.
    """
    share = _share(config, slot)
    torch.set_num_threads(share.num_threads)
    return ThreadChoice(share.num_threads, share.reason, share.thread_cpus)


def _share(config: ModelConfig, slot: CpuSlot) -> CpuShare:
    topology = process_topology()
    share = share_cpus(topology, slot)
    if config.num_threads == AUTO:
        return share
    return threads_as_set(topology, share, config.num_threads)


def free_bytes(device: torch.device) -> int:
    """Free memory on the device, within a container's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free, limit = psutil.virtual_memory().available, memory_limit()
    return free if limit is None else min(free, limit.free_bytes)


def whole_bytes(device: torch.device) -> int:
    """Total memory of the device or the machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return psutil.virtual_memory().total


def resident_bytes() -> int:
    """Resident memory of this process."""
    return psutil.Process().memory_info().rss


def other_processes_bytes(device: torch.device) -> int:
    """GPU memory that is neither free nor held by this process's allocator."""
    if device.type == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return max(0, total - free - torch.cuda.memory_reserved(device))


def size_cache(
    config: CacheConfig,
    layout: KVLayout,
    device: torch.device,
    share: float,
    wanted: int,
    *,
    beside: int = 0,
    reserved: int,
) -> Capacity:
    """The number of blocks: as configured, or from a share of the free memory, but no more than needed.

    `beside`: bytes per block of a proposer's own KV. `wanted`: blocks that `max_num_seqs` requests of maximum length can use. `reserved`: bytes of
    steps, graphs and copies of KV blocks.
    """
    size, bytes_per_block = layout.block_size, layout.block_bytes + beside
    each = gib(bytes_per_block)

    def capacity(count: int, why: str) -> Capacity:
        return Capacity(
            num_blocks=count,
            layout=layout,
            bytes_per_block=bytes_per_block,
            reason=f"{why}, {each} per block",
        )

    if config.num_blocks is not None:
        return capacity(config.num_blocks, "as set")
    if config.kv_cache_memory_bytes is not None:
        usable = config.kv_cache_memory_bytes
        why = f"--kv-cache-memory-bytes {gib(usable)}"
    else:
        usable, why = _usable(device, share, reserved)
    count = usable // bytes_per_block
    if count < 1:
        raise ConfigError(
            f"the KV cache cannot hold one block: {why}, and a block of {size} tokens takes {each}. "
            "Raise --kv-cache-memory-bytes to at least that, or free memory."
        )
    if wanted < count and config.kv_cache_memory_bytes is None:
        return capacity(wanted, f"all that --max-num-seqs x --max-model-len can use; {why}")
    return capacity(count, why)


def _usable(device: torch.device, share: float, reserved: int) -> tuple[int, str]:
    free = free_bytes(device)
    if device.type == "cpu":
        beside = f" without {gib(reserved)} for KV offload" if reserved else ""
        return int((free - reserved) * share), f"{share:g} of {gib(free)} free memory{beside}"
    total = whole_bytes(device)
    usable = int(total * share) - (total - free) - reserved
    return usable, (
        f"{share:g} of {gib(total)} on the device, less {gib(total - free)} in use and "
        f"{gib(reserved)} for steps, graphs and KV offload"
    )


def check_cache_fits(
    config: CacheConfig, capacity: Capacity, device: torch.device, reserved: int
) -> None:
    """Refuse a cache of a set size that is larger than the free memory, before it is allocated.

    Linux overcommits memory, and kills a process that uses too much.
    """
    if config.num_blocks is not None:
        setting = f"--num-blocks {config.num_blocks}"
    elif config.kv_cache_memory_bytes is not None:
        setting = f"--kv-cache-memory-bytes {gib(config.kv_cache_memory_bytes)}"
    else:
        return
    num_bytes, free = capacity.num_blocks * capacity.bytes_per_block, free_bytes(device)
    if num_bytes + reserved > free:
        beside = f" and {gib(reserved)} for steps, graphs and KV offload" if reserved else ""
        raise ConfigError(
            f"{setting} needs {gib(num_bytes)} for the KV cache{beside}, and {gib(free)} of memory "
            f"are free on {device.type}. Lower it, or omit it: then the cache takes a share of "
            "the free memory."
        )


def check_tables_fit(max_num_seqs: int, num_bytes: int) -> None:
    """Refuse more requests at once than the host has memory for block tables."""
    free = free_bytes(torch.device("cpu"))
    if num_bytes > free:
        raise ConfigError(
            f"--max-num-seqs {max_num_seqs} needs {gib(num_bytes)} for block tables, and "
            f"{gib(free)} of memory are free. Lower it; 32 to 512 are usual."
        )


def gib(num_bytes: int) -> str:
    """Format bytes: 720.0 KiB, 5.9 GiB."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
