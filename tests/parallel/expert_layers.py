"""Mixture-of-experts layers of tiny models in every format, loaded by some ranks in threads."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.models.comparison import save_tiny
from tests.models.test_networks import CASES
from tests.quant.ranks import CPU, Spy, in_threads, thread_groups
from windlass.config import EngineConfig
from windlass.core.moe import ExpertPlacement
from windlass.layers.moe import MoE
from windlass.models.card import load_hparams, open_checkpoint
from windlass.models.checkpoint import Checkpoint, StoredTensor
from windlass.models.decoder import _mlp
from windlass.models.hparams import HParams
from windlass.models.loader import load
from windlass.models.network import Parts, Weights
from windlass.models.source import resolve
from windlass.parallel.mesh import Mesh
from windlass.quant.shard import Region
from windlass.runner.load import make_blueprint

SIZES = {"hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 32}


@dataclass
class OneLayer:
    """The tensors of one MLP of a checkpoint."""

    checkpoint: Checkpoint
    prefix: str

    def names(self) -> Collection[str]:
        return [name for name in self.checkpoint.names() if name.startswith(self.prefix)]

    def stored(self, name: str) -> StoredTensor:
        return self.checkpoint.stored(name)

    def read(
        self, name: str, shape: tuple[int, ...], region: Region = (), *, raw: bool = False
    ) -> Tensor:
        return self.checkpoint.read(name, shape, region, raw=raw)


@dataclass(frozen=True)
class Ranked:
    """The layer of one rank, and what its load read."""

    layer: MoE
    reads: Spy


class Holder(Weights):
    """The MLP of one decoder layer under its names in a checkpoint."""

    def __init__(self, layer: int, hparams: HParams, parts: Parts) -> None:
        super().__init__()
        self.model = nn.Module()
        mlps = [nn.Module() for _ in range(layer + 1)]
        mlps[layer].mlp = _mlp(layer, hparams, parts)
        self.model.layers = nn.ModuleList(mlps)


@dataclass(frozen=True)
class Layers:
    """Makes one mixture-of-experts layer of a model for any mesh."""

    hparams: HParams
    checkpoint: Checkpoint
    parts: Parts
    index: int

    @classmethod
    def of(cls, model: Path, index: int = 0, **options: Any) -> Layers:
        config = EngineConfig.of(model=str(model), **options)
        files = resolve(config.model)
        hparams = load_hparams(files, config.model)
        checkpoint = open_checkpoint(files, config.model)
        parts = make_blueprint(config, hparams, checkpoint).parts
        return cls(hparams, checkpoint, parts, index)

    def load(self, mesh: Mesh, placement: ExpertPlacement | None = None) -> Ranked:
        placements = {} if placement is None else {self.index: placement}
        parts = replace(self.parts, mesh=mesh, placements=placements)
        with torch.device("meta"):
            holder = Holder(self.index, self.hparams, parts)
        reads = Spy(OneLayer(self.checkpoint, f"model.layers.{self.index}.mlp."))
        load(holder, reads, CPU)
        layer = holder.get_submodule(f"model.layers.{self.index}.mlp")
        assert isinstance(layer, MoE)
        return Ranked(layer, reads)

    def ranks(self, size: int, placement: ExpertPlacement | None = None) -> list[Ranked]:
        """The layers of ranks that divide the experts."""
        return [self.load(Mesh(tp=group, ep=group), placement) for group in thread_groups(size)]

    def inputs(self, tokens: int) -> Tensor:
        generator = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, self.hparams.hidden_size, generator=generator)
        return x.to(self.parts.dtype)


def outputs(ranks: list[Ranked], x: Tensor) -> list[Tensor]:
    """The result of every rank."""

    def call(rank: Ranked) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with torch.inference_mode():
                return rank.layer.output(x)

        return run

    return in_threads([call(rank) for rank in ranks])


def write_mxfp4(folder: Path, target: Path) -> Path:
    """Replace gpt-oss' experts by random MXFP4 blocks."""
    stored = load_file(folder / "model.safetensors")
    packed = {
        key: value for key, value in stored.items() if not key.endswith("experts.gate_up_proj")
    }
    packed = {key: value for key, value in packed.items() if not key.endswith("experts.down_proj")}
    generator = torch.Generator().manual_seed(5)
    for key in stored.keys() - packed.keys():
        experts, inputs, num_out = stored[key].shape
        shape = (experts, num_out, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(120, 124, shape, dtype=torch.uint8, generator=generator)
        packed |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
    target.mkdir()
    save_file(packed, target / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    quantization = {"quantization_config": {"quant_method": "mxfp4"}}
    (target / "config.json").write_text(json.dumps(config | quantization))
    return target


def write_model(name: str, folder: Path, **changes: Any) -> Path:
    family, own = CASES[name]
    save_tiny(family, {**own, **changes}, folder)
    return folder
