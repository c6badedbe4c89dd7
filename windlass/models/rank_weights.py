"""The weights that each rank of a model on several devices holds, before any is read.

Counts networks of meta tensors that are built with a rank's process group, so the layers' own shards
decide. Layers that are stored alike are counted once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from windlass.core.kv_layout import KVLayout
from windlass.errors import ConfigError, ShardError
from windlass.layers.embedding import TiedEmbedding
from windlass.layers.head import Head
from windlass.layers.stored import StoredWeight
from windlass.models.decoder import Decoder
from windlass.models.hparams import HParams
from windlass.models.loader import outline
from windlass.models.network import Parts, kv_layout, make_network
from windlass.models.stages import Stage, check_stages, cut_stages
from windlass.parallel.mesh import Mesh

MAX_RANKS = 64


@dataclass(frozen=True, slots=True)
class RankShape:
    """How many ranks share a model: `tp` of each layer, `pp` stages of layers."""

    tp: int = 1
    pp: int = 1
    expert_parallel: bool = False  # ranks hold whole experts, not a part of each

    def __post_init__(self) -> None:
        if self.tp < 1 or self.pp < 1:
            raise ConfigError(
                "--tensor-parallel-size and --pipeline-parallel-size must be at least 1, got "
                f"{self.tp} and {self.pp}."
            )
        if self.num_ranks > MAX_RANKS:
            raise ConfigError(
                f"--tensor-parallel-size {self.tp} x --pipeline-parallel-size {self.pp} are "
                f"{self.num_ranks} ranks; at most {MAX_RANKS} can share a model."
            )

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp

    @property
    def ep(self) -> int:
        """Ranks that divide the experts."""
        return self.tp if self.expert_parallel else 1

    def check(self, hparams: HParams) -> None:
        """Raise ConfigError if the model has too few layers or experts for this shape."""
        check_stages(hparams, self.pp)
        if not self.expert_parallel:
            return
        if hparams.moe is None:
            raise ConfigError(
                f"--enable-expert-parallel: {hparams.architecture} has no experts. Omit the flag."
            )
        if self.tp == 1:
            raise ConfigError(
                "--enable-expert-parallel divides experts among the ranks of --tensor-parallel-size, "
                "which is 1. Set it to at least 2."
            )
        num_experts = hparams.moe.routing.num_experts
        if self.tp > num_experts:
            raise ConfigError(
                f"--enable-expert-parallel with --tensor-parallel-size {self.tp}: the model has "
                f"{num_experts} experts, and every rank needs one."
            )


@dataclass(frozen=True, slots=True)
class CountedRank:
    """A rank of a group whose other ranks do not exist: its network is counted, and never run."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        raise AssertionError(f"a counted network does not run: {x.shape}")

    def reduce_scatter(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        raise AssertionError(f"a counted network does not run: {x.shape}, {counts}")

    def all_to_all(self, x: Tensor, *, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        raise AssertionError(f"a counted network does not run: {x.shape}, {sent}, {received}")

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        del widths
        raise AssertionError(f"a counted network does not run: {x.shape}")


@dataclass(frozen=True, slots=True)
class RankNetwork:
    """A tensor-parallel rank's network of meta tensors, in which equal layers exist once."""

    decoder: Decoder
    same_as: tuple[int, ...]  # for each layer, the index of the equal layer that exists

    def layer(self, index: int) -> nn.Module:
        return self.decoder.model.layers[self.same_as[index]]

    def stages(self, count: int) -> list[Stage]:
        """Cut the layers into pipeline stages of about as many bytes."""
        *costs, last = (self._layer_bytes(index) for index in range(len(self.same_as)))
        return cut_stages([*costs, last + count_bytes(self._end)], count)

    def stage_bytes(self, stage: Stage) -> int:
        """Bytes of the weights of a pipeline stage."""
        ends = (self._start if stage.is_first else []) + (self._end if stage.is_last else [])
        return count_bytes(ends) + sum(map(self._layer_bytes, stage.layers))

    def stage_copies(self, stage: Stage) -> int:
        """Bytes of 16-bit copies of a pipeline stage's weights, made or not."""
        ends = (self._start if stage.is_first else []) + (self._end if stage.is_last else [])
        layers = (count_copies([self.layer(index)]) for index in stage.layers)
        return count_copies(ends) + sum(layers)

    def _layer_bytes(self, index: int) -> int:
        return count_bytes([self.layer(index)])

    @property
    def _start(self) -> list[nn.Module]:
        model = self.decoder.model
        table = model.embed_tokens
        found = [self.decoder.lm_head if isinstance(table, TiedEmbedding) else table]
        return [module for module in (*found, model.embed_positions) if module is not None]

    @property
    def _end(self) -> list[nn.Module]:
        return [self.decoder.model.norm, self.head]

    @property
    def head(self) -> Head:
        assert self.decoder.lm_head is not None, "all stages together have the head"
        return self.decoder.lm_head


def count_bytes(modules: Iterable[nn.Module]) -> int:
    """Bytes of the modules' weights; shared ones count once."""
    inner = list(dict.fromkeys(child for module in modules for child in module.modules()))
    plain = {id(item): item.nbytes for child in inner for item in child.parameters(recurse=False)}
    packed = sum(child.gemm_bytes for child in inner if isinstance(child, StoredWeight))
    return sum(plain.values()) + packed


def count_copies(modules: Iterable[nn.Module]) -> int:
    """Bytes of 16-bit copies of the modules' weights, made or not; shared weights count once."""
    inner = dict.fromkeys(child for module in modules for child in module.modules())
    stored = (child for child in inner if isinstance(child, StoredWeight))
    return sum(gemm.copy_bytes for each in stored for gemm in each.gemms)


def rank_network(hparams: HParams, parts: Parts, shape: RankShape, rank: int = 0) -> RankNetwork:
    """Build the network of one tensor-parallel rank, all stages together.

    Raises ShardError if a weight cannot be divided among so many ranks.
    """
    shape.check(hparams)
    if hparams.transformers is not None:
        raise ConfigError(
            f"{hparams.architecture} runs through transformers, and several devices cannot share it."
        )
    mesh = Mesh(tp=CountedRank(rank, shape.tp), ep=CountedRank(rank % shape.ep, shape.ep))
    decoder = cast(Decoder, make_network(hparams, replace(parts, mesh=mesh)))
    layers = decoder.model.layers
    first: dict[object, int] = {}
    same_as = tuple(first.setdefault(_storage(layer), i) for i, layer in enumerate(layers))
    for index, found in enumerate(same_as):
        if index != found:
            layers[index] = nn.Identity()
    outline(decoder)
    return RankNetwork(decoder, same_as)


def _storage(layer: nn.Module) -> object:
    """What a layer stores: equal for layers with the same bytes."""
    stored = [
        (path, module.method.name, type(module.method), _params(module))
        for path, module in layer.named_modules()
        if isinstance(module, StoredWeight)
    ]
    plain = [(name, item.shape, item.dtype) for name, item in layer.named_parameters()]
    return tuple(stored), tuple(plain)


def _params(module: StoredWeight) -> object:
    """The stored tensors of a weight's first part, and the sizes of all."""
    name, shard = next(iter(module.outputs.items()))
    specs = module.method.params(name, shard.whole, module.inputs.whole)
    return tuple(specs.items()), tuple(module.parts.values()), module.num_in


def rank_weights(hparams: HParams, parts: Parts, shape: RankShape) -> list[list[int]]:
    """Bytes of each rank's weights, by stage and tensor-parallel rank."""
    networks = [rank_network(hparams, parts, shape, rank) for rank in range(shape.tp)]
    stages = networks[0].stages(shape.pp)
    return [[network.stage_bytes(stage) for network in networks] for stage in stages]


def fullest_rank(hparams: HParams, parts: Parts, shape: RankShape) -> RankNetwork:
    """The network of the tensor-parallel rank with the most weights.

    Ranks differ in their rows of the vocabulary, and in their experts if the number does not divide.
    """
    first = rank_network(hparams, parts, shape)
    (rows,) = first.head.outputs.values()
    counts = [replace(rows, rank=rank).count for rank in range(shape.tp)]
    differing = [counts.index(max(counts))]
    if hparams.moe is not None and hparams.moe.routing.num_experts % shape.ep:
        differing = list(range(shape.tp))
    others = [rank_network(hparams, parts, shape, rank) for rank in differing if rank]
    (whole,) = first.stages(1)
    return max([first, *others], key=lambda network: network.stage_bytes(whole))


def rank_kv_layout(hparams: HParams, tp: int, block_size: int, dtype: torch.dtype) -> KVLayout:
    """The KV that one of `tp` ranks keeps of all layers."""
    return kv_layout(hparams, block_size, dtype, Mesh(tp=CountedRank(0, tp)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDemand:
    """What every rank needs beside its weights."""

    kv_tokens: int
    block_size: int
    kv_dtype: torch.dtype
    other_bytes: int = 0  # of steps, graphs and the process

    def num_bytes(self, hparams: HParams, network: RankNetwork, shape: RankShape) -> int:
        """The bytes of the fullest rank, weights included."""
        layout = rank_kv_layout(hparams, shape.tp, self.block_size, self.kv_dtype)
        return self.other_bytes + max(
            network.stage_bytes(stage) + layout.stage(stage.layers).bytes_for(self.kv_tokens)
            for stage in network.stages(shape.pp)
        )


def smallest_fit(
    hparams: HParams, parts: Parts, demand: RankDemand, memory: int
) -> RankShape | None:
    """The fewest ranks of `memory` bytes each that hold a model; None: not even 64 do.

    Of shapes with as many ranks, the one with the most tensor-parallel ranks.
    """
    networks: dict[int, RankNetwork | None] = {}

    def network(tp: int) -> RankNetwork | None:
        if tp not in networks:
            try:
                networks[tp] = fullest_rank(hparams, parts, RankShape(tp=tp))
            except ShardError:
                networks[tp] = None
        return networks[tp]

    one = network(1)
    assert one is not None
    (whole,) = one.stages(1)
    for count in range(max(1, one.stage_bytes(whole) // max(1, memory)), MAX_RANKS + 1):
        for tp in (size for size in range(count, 0, -1) if count % size == 0):
            found = network(tp)
            if found is None or count // tp > hparams.num_layers:
                continue
            shape = RankShape(tp=tp, pp=count // tp)
            if demand.num_bytes(hparams, found, shape) <= memory:
                return shape
    return None
