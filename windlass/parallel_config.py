"""Options of running one model on several devices, and their validation. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from windlass.errors import ConfigError
from windlass.settings import at_least, option

DistributedBackend = Literal["auto", "nccl", "gloo"]
CombineRule = Literal["auto", "all-reduce", "all-to-all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Several devices, or processes on CPUs, for one model."""

    tensor_parallel_size: int = option(
        1, "Number of devices, or of processes on a CPU, that share every layer.", "-tp"
    )
    pipeline_parallel_size: int = option(
        1, "Number of groups of devices that each hold some of the layers.", "-pp"
    )
    data_parallel_size: int = option(
        1,
        "Number of replicas of the engine behind one server, each with its own devices and KV cache.",
        "-dp",
    )
    enable_expert_parallel: bool = option(
        False,
        "Divide the experts of mixture-of-experts layers among the devices of "
        "--tensor-parallel-size, instead of splitting every expert.",
    )
    expert_combine: CombineRule = option(
        "auto",
        "How devices with different experts sum their results: all-reduce, all-to-all, or auto: "
        "all-to-all for many tokens.",
    )
    expert_placement: str | None = option(
        None, "File with the experts of each device, from windlass balance-experts."
    )
    record_expert_load: str | None = option(
        None, "File for the number of tokens that chose each expert."
    )
    distributed_backend: DistributedBackend = option(
        "auto",
        "How ranks exchange tensors: nccl between GPUs, gloo through host memory, which is slow and also "
        "works for ranks that share a GPU. auto: on GPUs nccl, and symmetric memory for small sums where "
        "the GPUs reach each other; shared memory on a CPU.",
    )
    nnodes: int = option(1, "Number of machines that share the model; this version supports one.")
    node_rank: int = option(0, "Number of this machine, from 0; the first one serves the API.")
    master_addr: str = option("127.0.0.1", "Address of the first machine.")
    master_port: int = option(29500, "Port on the first machine where the others connect.")

    def __post_init__(self) -> None:
        at_least(self, 1, "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
        at_least(self, 1, "nnodes", "master_port")
        at_least(self, 0, "node_rank")
        if self.node_rank >= self.nnodes:
            raise ConfigError(
                f"--node-rank {self.node_rank} must be below --nnodes {self.nnodes}: machines are "
                "numbered from 0."
            )
        if self.num_ranks % self.nnodes:
            raise ConfigError(
                f"--nnodes {self.nnodes} does not divide the {self.num_ranks} ranks of the model. "
                "Choose a --tensor-parallel-size that is a multiple of it."
            )
        if self.enable_expert_parallel and self.tensor_parallel_size == 1:
            raise ConfigError(
                "--enable-expert-parallel divides experts among the devices of "
                "--tensor-parallel-size, which is 1. Set it to at least 2."
            )
        if self.expert_combine != "auto" and not self.enable_expert_parallel:
            raise ConfigError("--expert-combine does nothing without --enable-expert-parallel.")
        if self.expert_placement is not None and not self.enable_expert_parallel:
            raise ConfigError("--expert-placement does nothing without --enable-expert-parallel.")
        if self.record_expert_load is not None and self.data_parallel_size > 1:
            raise ConfigError(
                "--record-expert-load: the replicas of --data-parallel-size would overwrite each "
                "other's file. Record the load of one replica."
            )
        for name in ("node_rank", "master_addr", "master_port"):
            default = type(self).__dataclass_fields__[name].default
            if self.nnodes == 1 and getattr(self, name) != default:
                raise ConfigError(f"--{name.replace('_', '-')} does nothing without --nnodes.")
        if self.nnodes > 1 and self.data_parallel_size > 1:
            raise ConfigError(
                f"--data-parallel-size {self.data_parallel_size} runs on one machine, and --nnodes is "
                f"{self.nnodes}. Start one server per machine behind a load balancer."
            )
        if self.nnodes > 1:
            raise ConfigError(
                f"--nnodes {self.nnodes}: the ranks of a model are on one machine in this version. Leave "
                "it out."
            )

    @property
    def counts_expert_load(self) -> bool:
        """Whether kernels count the tokens of each expert."""
        return self.enable_expert_parallel or self.record_expert_load is not None

    @property
    def num_ranks(self) -> int:
        """Processes of one replica, on all machines."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def last_stage(self) -> int:
        """The first rank of the last pipeline stage."""
        return self.num_ranks - self.tensor_parallel_size

    @property
    def ranks_per_node(self) -> int:
        """Processes of one replica on this machine."""
        return self.num_ranks // self.nnodes

    @property
    def processes_per_node(self) -> int:
        """Processes of all replicas on this machine."""
        return self.ranks_per_node * self.data_parallel_size
