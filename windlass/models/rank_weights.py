"""The weights that each rank of a model on several devices holds, before any is read.

Counts networks of meta tensors that are built with a rank's process group, so the layers' own shards
decide. Layers that are stored alike are counted once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor, nn

from windlass.errors import ConfigError
from windlass.layers.embedding import TiedEmbedding
from windlass.layers.stored import StoredWeight
from windlass.models.decoder import Decoder
from windlass.models.hparams import HParams
from windlass.models.loader import outline
from windlass.models.network import Parts, make_network
from windlass.parallel.mesh import Mesh
from windlass.quant.shard import Shard

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

    def check(self, hparams: HParams) -> None:
        """Raise ConfigError if the model has too few layers or experts for this shape."""
        if self.pp > hparams.num_layers:
            raise ConfigError(
                f"--pipeline-parallel-size {self.pp}: the model has {hparams.num_layers} layers, and "
                "every stage needs one."
            )
        if not self.expert_parallel:
            return
        if hparams.moe is None:
            raise ConfigError(
                f"--enable-expert-parallel: {hparams.architecture} has no experts. Omit the flag."
            )
        num_experts = hparams.moe.routing.num_experts
        if self.tp > num_experts:
            raise ConfigError(
                f"--enable-expert-parallel with --tensor-parallel-size {self.tp}: the model has "
                f"{num_experts} experts, and every rank needs one."
            )

    def stages(self, num_layers: int) -> list[range]:
        """The layers of each pipeline stage."""
        ranks = (CountedRank(stage, self.pp) for stage in range(self.pp))
        shards = [Shard.uneven(num_layers, rank, unit=1) for rank in ranks]
        return [range(shard.start, shard.stop) for shard in shards]


@dataclass(frozen=True, slots=True)
class CountedRank:
    """A rank of a group whose other ranks do not exist: its network is counted, and never run."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        raise AssertionError(f"a counted network does not run: {x.shape}")

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

    def stage_bytes(self, layers: range) -> int:
        """Bytes of the weights of a pipeline stage of these layers."""
        model, head = self.decoder.model, self.decoder.lm_head
        ends: list[nn.Module] = []
        if layers.start == 0:
            ends.append(model.embed_tokens)
            if model.embed_positions is not None:
                ends.append(model.embed_positions)
            if isinstance(model.embed_tokens, TiedEmbedding):
                ends.append(head)
        if layers.stop == len(self.same_as):
            ends += [model.norm, head]
        return count_bytes(ends) + sum(count_bytes([self.layer(index)]) for index in layers)


def count_bytes(modules: Iterable[nn.Module]) -> int:
    """Bytes of the modules' weights; shared ones count once."""
    inner = list(dict.fromkeys(child for module in modules for child in module.modules()))
    plain = {id(item): item.nbytes for child in inner for item in child.parameters(recurse=False)}
    packed = sum(child.gemm_bytes for child in inner if isinstance(child, StoredWeight))
    return sum(plain.values()) + packed


def rank_network(hparams: HParams, parts: Parts, shape: RankShape, rank: int = 0) -> RankNetwork:
    """Build the network of one tensor-parallel rank, all stages together.

    Raises ShardError if a weight cannot be divided among so many ranks.
    """
    shape.check(hparams)
    if hparams.transformers is not None:
        raise ConfigError(
            f"{hparams.architecture} runs through transformers, and several devices cannot share it."
        )
    mesh = Mesh(tp=CountedRank(rank, shape.tp))
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
    stages = shape.stages(hparams.num_layers)
    return [[network.stage_bytes(layers) for network in networks] for layers in stages]


def fullest_rank(hparams: HParams, parts: Parts, shape: RankShape) -> RankNetwork:
    """The network of the tensor-parallel rank with the most weights: they differ in the vocabulary."""
    first = rank_network(hparams, parts, shape)
    (rows,) = first.decoder.lm_head.outputs.values()
    counts = [replace(rows, rank=rank).count for rank in range(shape.tp)]
    most = counts.index(max(counts))
    return first if most == 0 else rank_network(hparams, parts, shape, most)


def rank_hparams(hparams: HParams, tp: int, layers: range) -> HParams:
    """The hyper-parameters of what one rank keeps in its KV cache."""
    heads = Shard.replicated(hparams.num_kv_heads, CountedRank(0, tp), unit=1).count
    windows = hparams.sliding_windows[layers.start : layers.stop]
    return replace(hparams, num_layers=len(layers), sliding_windows=windows, num_kv_heads=heads)
