"""Options of running one model on several devices, and their validation. Does not import torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from windlass.errors import ConfigError
from windlass.settings import at_least, flag, option

Role = Literal["both", "prefill", "decode"]
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
    prefill_replicas: int = option(
        0,
        "Number of the replicas of --data-parallel-size that only compute prompts; the others generate "
        "the outputs. 0: every replica does both.",
    )
    min_prefill_tokens: int = option(
        256,
        "With --prefill-replicas: a replica that generates computes prompts with fewer uncached tokens "
        "itself.",
    )
    kv_transfer_gb: float = option(
        1.0,
        "GiB of memory of each replica of --prefill-replicas for the KV blocks that it hands over; they "
        "stay until newer ones take their place.",
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
    nnodes: int = option(
        1,
        "Number of machines (nodes) that share the model. Start windlass serve on each, with the same "
        "options and its own --node-rank.",
    )
    node_rank: int = option(
        0, "Number of this machine, from 0; node 0 has the HTTP server, the others only ranks."
    )
    master_addr: str = option("127.0.0.1", "Address of node 0 at which the others reach it.")
    master_port: int = option(29500, "Port of node 0 to which the others connect.")
    node_timeout: float = option(
        600.0, "Seconds to wait for the other machines, at the start and after a failure."
    )
    cluster_secret_file: str | None = option(
        None,
        "File with a secret that all machines share, at least 16 characters; needed unless "
        "--master-addr is a loopback address.",
    )
    cluster_secret: str | None = option(
        None,
        "The secret itself. Prefer --cluster-secret-file or $WINDLASS_CLUSTER_SECRET, which the process "
        "list does not show.",
        secret=True,
    )

    def __post_init__(self) -> None:
        at_least(self, 1, "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
        at_least(self, 1, "nnodes", "master_port")
        at_least(self, 0, "node_rank", "prefill_replicas", "min_prefill_tokens")
        if self.prefill_replicas and self.prefill_replicas >= self.data_parallel_size:
            raise ConfigError(
                f"--prefill-replicas {self.prefill_replicas} leaves none of the replicas of "
                f"--data-parallel-size {self.data_parallel_size} for the outputs. Start at least one more."
            )
        if self.prefill_replicas and self.num_ranks > 1:
            raise ConfigError(
                "--prefill-replicas works with replicas of one device, and --tensor-parallel-size times "
                f"--pipeline-parallel-size is {self.num_ranks}."
            )
        if not 0.0 < self.kv_transfer_gb < math.inf:
            raise ConfigError(f"--kv-transfer-gb must be above 0, got {self.kv_transfer_gb:g}.")
        if self.node_rank >= self.nnodes:
            raise ConfigError(
                f"--node-rank {self.node_rank} must be below --nnodes {self.nnodes}: machines are "
                "numbered from 0."
            )
        if self.num_ranks % self.nnodes:
            raise ConfigError(
                f"--nnodes {self.nnodes} does not divide the {self.num_ranks} ranks of the model "
                "(--tensor-parallel-size times --pipeline-parallel-size). Make it a multiple: "
                f"for example --pipeline-parallel-size {self.nnodes}."
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
        self._check_nodes()

    def _check_nodes(self) -> None:
        names = ("node_rank", "master_addr", "master_port", "node_timeout")
        for name in (*names, "cluster_secret", "cluster_secret_file"):
            default = type(self).__dataclass_fields__[name].default
            if self.nnodes == 1 and getattr(self, name) != default:
                raise ConfigError(f"{flag(name)} does nothing without --nnodes.")
        if self.nnodes == 1:
            return
        if self.data_parallel_size > 1:
            raise ConfigError(
                f"--data-parallel-size {self.data_parallel_size} runs on one machine, and --nnodes is "
                f"{self.nnodes}. Start one server per machine behind a load balancer."
            )
        if self.master_port > 65535:
            raise ConfigError(f"--master-port must be at most 65535, got {self.master_port}.")
        if not 0.0 < self.node_timeout < math.inf:
            raise ConfigError(f"--node-timeout must be above 0, got {self.node_timeout:g}.")
        if self.cluster_secret is not None and self.cluster_secret_file is not None:
            raise ConfigError(
                "--cluster-secret (or $WINDLASS_CLUSTER_SECRET) and --cluster-secret-file are both "
                "given. Use one."
            )
        tp, own = self.tensor_parallel_size, self.ranks_per_node
        if tp % own and own % tp:
            raise ConfigError(
                f"--nnodes {self.nnodes} gives each machine {own} ranks, which cuts some groups of "
                f"--tensor-parallel-size {tp} and not others. Choose sizes of which one divides the "
                "other."
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
        """Processes of one replica on each machine: machine n has the ranks from n times this."""
        return self.num_ranks // self.nnodes

    @property
    def node_ranks(self) -> range:
        """The ranks on this machine."""
        return range(
            self.node_rank * self.ranks_per_node, (self.node_rank + 1) * self.ranks_per_node
        )

    @property
    def roles(self) -> tuple[Role, ...]:
        """What each replica computes; those for prompts are the first."""
        prefill: list[Role] = ["prefill"] * self.prefill_replicas
        rest: list[Role] = ["decode" if prefill else "both"]
        return (*prefill, *rest * (self.data_parallel_size - len(prefill)))

    @property
    def transfer_bytes(self) -> int:
        """Memory for the KV blocks that one prefill replica hands over."""
        return int(self.kv_transfer_gb * 2**30)

    @property
    def processes_per_node(self) -> int:
        """Processes of all replicas on this machine."""
        return self.ranks_per_node * self.data_parallel_size
