"""Options of running one model on several devices, and their validation. Does not import torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from windlass.errors import ConfigError
from windlass.settings import at_least, flag, option, refuse_unused

Role = Literal["both", "prefill", "decode"]
DistributedBackend = Literal["auto", "nccl", "gloo"]
CombineRule = Literal["auto", "all-reduce", "all-to-all"]


def split_address(option: str, address: str) -> tuple[str, int]:
    """The host and the port of HOST:PORT; an IPv6 address stands in brackets."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{option} must be HOST:PORT, got {address!r}.")
    return host.removeprefix("[").removesuffix("]"), int(port)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Several devices, or processes on CPUs, for one model."""

    tensor_parallel_size: int = option(
        1, "Tensor parallelism: devices, or processes on a CPU, that share every layer.", "-tp"
    )
    pipeline_parallel_size: int = option(
        1, "Pipeline parallelism: stages, each with some of the layers.", "-pp"
    )
    data_parallel_size: int = option(
        1,
        "Data parallelism: replicas of the engine behind one server, each with its own devices and KV cache.",
        "-dp",
    )
    prefill_replicas: int = option(
        0,
        "Number of the replicas of --data-parallel-size that only compute prompts; the others generate "
        "the outputs. 0: every replica does both.",
    )
    role: Role = option(
        "both",
        "prefill: this server also computes prompts for decode servers on other hosts, which connect to "
        "--prefill-listen. decode: this server generates outputs, and --prefill-servers compute its long "
        "prompts. both: neither.",
    )
    prefill_listen: str = option(
        "127.0.0.1:29600",
        "With --role prefill: HOST:PORT at which decode servers reach this server.",
    )
    prefill_servers: tuple[str, ...] = option(
        (), "With --role decode: HOST:PORT[,HOST:PORT] of the prefill servers; repeatable."
    )
    min_prefill_tokens: int = option(
        256,
        "With --prefill-replicas or --role decode: an engine that generates computes prompts with fewer "
        "uncached tokens itself.",
    )
    kv_transfer_gb: float = option(
        1.0,
        "GiB of memory of each engine of --prefill-replicas or --role prefill for the KV blocks that it "
        "hands over; they stay until newer ones take their place.",
    )
    kv_transfer_timeout: float = option(
        10.0,
        "With --role decode: seconds for the KV blocks of one prompt; those that have not arrived are "
        "computed here.",
    )
    enable_sequence_parallel: bool = option(
        False,
        "Divide the tokens of long prompts among the devices of --tensor-parallel-size between the layers' "
        "GEMMs, instead of computing norms, residuals and MLA's latents on every device.",
    )
    sequence_parallel_min_tokens: int | None = option(
        None,
        "With --enable-sequence-parallel: prompt tokens from which a step is split. Default: 1024 on GPUs, "
        "where smaller steps are captured, and 256 on a CPU.",
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
        "--master-addr, --prefill-listen or --prefill-servers are loopback addresses.",
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
        for name in ("kv_transfer_gb", "kv_transfer_timeout"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{flag(name)} must be above 0 and finite, got {getattr(self, name):g}."
                )
        self._check_role()
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
        self._check_sequence_parallel()
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

    def _check_sequence_parallel(self) -> None:
        size, least = self.tensor_parallel_size, self.sequence_parallel_min_tokens
        if self.enable_sequence_parallel and size == 1:
            raise ConfigError(
                "--enable-sequence-parallel divides prompts among the devices of "
                "--tensor-parallel-size, which is 1. Set it to at least 2."
            )
        if least is not None and not self.enable_sequence_parallel:
            raise ConfigError(
                "--sequence-parallel-min-tokens does nothing without --enable-sequence-parallel."
            )
        if least is not None and least < size**2:
            raise ConfigError(
                f"--sequence-parallel-min-tokens {least} leaves some of the {size} devices of "
                f"--tensor-parallel-size without a token. Set it to at least {size**2}."
            )

    def _check_role(self) -> None:
        role = f"--role {self.role}"
        if self.role != "prefill":
            refuse_unused(self, "--role prefill", "prefill_listen")
            if not self.prefill_replicas:
                refuse_unused(self, "--prefill-replicas or --role prefill", "kv_transfer_gb")
        if self.role != "decode":
            refuse_unused(self, "--role decode", "prefill_servers", "kv_transfer_timeout")
            if not self.prefill_replicas:
                refuse_unused(self, "--prefill-replicas or --role decode", "min_prefill_tokens")
        if self.role == "both":
            return
        if self.nnodes > 1:
            raise ConfigError(
                f"{role} hands KV blocks over through memory that all ranks of an engine share, and --nnodes "
                f"is {self.nnodes}. Use devices of one machine for each engine."
            )
        if self.prefill_replicas:
            raise ConfigError(
                f"{role} and --prefill-replicas are two ways to compute prompts elsewhere. Use one."
            )
        if self.role == "prefill":
            split_address("--prefill-listen", self.prefill_listen)
            if self.data_parallel_size > 1:
                raise ConfigError(
                    f"--role prefill has one engine, and --data-parallel-size is "
                    f"{self.data_parallel_size}. Start a prefill server for each device."
                )
        elif not self.prefill_addresses:
            raise ConfigError("--role decode needs --prefill-servers HOST:PORT.")
        for address in self.prefill_addresses:
            split_address("--prefill-servers", address)
        if len({*self.prefill_addresses}) < len(self.prefill_addresses):
            raise ConfigError(
                f"--prefill-servers names a server twice: {', '.join(self.prefill_addresses)}."
            )

    def _check_nodes(self) -> None:
        if self.nnodes == 1:
            refuse_unused(
                self, "--nnodes", "node_rank", "master_addr", "master_port", "node_timeout"
            )
            if self.role == "both":
                needed = "--nnodes, --role prefill or --role decode"
                refuse_unused(self, needed, "cluster_secret", "cluster_secret_file")
        if self.cluster_secret is not None and self.cluster_secret_file is not None:
            raise ConfigError(
                "--cluster-secret (or $WINDLASS_CLUSTER_SECRET) and --cluster-secret-file are both "
                "given. Use one."
            )
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
        """What each replica computes, those for prompts first, and then the prefill servers."""
        prefill: list[Role] = ["prefill"] * self.prefill_replicas
        servers: list[Role] = ["prefill"] * len(self.prefill_addresses)
        rest: list[Role] = ["decode" if prefill or servers else "both"]
        return (*prefill, *rest * (self.data_parallel_size - len(prefill)), *servers)

    @property
    def prefill_addresses(self) -> list[str]:
        """HOST:PORT of each of --prefill-servers."""
        return [each for text in self.prefill_servers for each in text.split(",") if each]

    @property
    def hands_over(self) -> bool:
        """Whether engines hand KV blocks to others, or take them."""
        return self.prefill_replicas > 0 or self.role != "both"

    @property
    def transfer_bytes(self) -> int:
        """Memory for the KV blocks that one rank of a prefill engine hands over."""
        return int(self.kv_transfer_gb * 2**30) // self.num_ranks

    @property
    def processes_per_node(self) -> int:
        """Processes of all replicas on this machine."""
        return self.ranks_per_node * self.data_parallel_size
