"""Pipeline stages: cuts of the layers, and networks that hold only a stage's layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.models import test_deepseek, test_dense_families, test_networks
from tests.models.comparison import CPU, TINY, logits_of, make_parts, save_tiny
from tests.models.test_granite_hybrid import HYBRID
from tests.quant.ranks import Spy
from windlass.config import ModelConfig
from windlass.core.kv_layout import KVGroup, KVLayout
from windlass.errors import CheckpointError, ConfigError, ShardError, UnsupportedError
from windlass.models.card import load_hparams, open_checkpoint
from windlass.models.checkpoint import Checkpoint
from windlass.models.families.registry import read_hparams
from windlass.models.hparams import HParams
from windlass.models.loader import load
from windlass.models.network import make_network
from windlass.models.source import resolve
from windlass.models.stages import Stage, check_ranks, check_stages, cut_stages
from windlass.models.transformers_model import TransformersModel


@pytest.mark.parametrize(
    ("costs", "num_stages", "ends"),
    [
        ([1, 1, 1, 1], 1, [4]),
        ([1, 1, 1, 1], 2, [2, 4]),
        ([1, 1, 1, 1], 4, [1, 2, 3, 4]),
        ([2, 2, 2, 2, 2, 7], 2, [4, 6]),  # the head makes the last layer expensive
        ([1, 10, 10, 10], 2, [2, 4]),  # a dense layer before mixtures of experts
        ([1] * 10, 4, [2, 4, 7, 10]),
    ],
)
def test_the_most_expensive_stage_is_as_cheap_as_possible(
    costs: list[int], num_stages: int, ends: list[int]
) -> None:
    stages = cut_stages(costs, num_stages)
    assert [stage.stop for stage in stages] == ends
    assert [stage.start for stage in stages] == [0, *ends[:-1]]
    assert [stage.is_first for stage in stages] == [True] + [False] * (num_stages - 1)
    assert [stage.is_last for stage in stages] == [False] * (num_stages - 1) + [True]


def test_more_stages_than_layers_are_refused() -> None:
    hparams = read_hparams({**TINY, "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-6})
    with pytest.raises(ConfigError, match=r"size 5: the model has 3 layers.*Use 1 to 3"):
        check_stages(hparams, 5)
    foreign = replace(hparams, transformers=TransformersModel.__new__(TransformersModel))
    with pytest.raises(UnsupportedError, match="runs through transformers' code"):
        check_stages(foreign, 2)


def test_ranks_that_cannot_share_the_heads_are_refused_before_they_start() -> None:
    hparams = read_hparams({**TINY, "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-6})
    check_ranks(hparams, tp=hparams.num_heads, pp=1)
    with pytest.raises(ShardError, match=r"size 64: the model has 6 query heads.*work: 1, 2, 3, 6"):
        check_ranks(hparams, tp=64, pp=1)
    with pytest.raises(ConfigError, match=r"size 5: the model has 3 layers"):
        check_ranks(hparams, tp=1, pp=5)


CASES = {
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "moe": test_networks.CASES["qwen3-moe"],
    "mla": (
        "DeepseekV2",
        {**test_deepseek.MLA, **test_deepseek.EXPERTS, **test_deepseek.CASES["V2 Lite"][1]},
    ),
    "states": ("GraniteMoeHybrid", {**HYBRID, "num_local_experts": 4}),
    **{
        name: test_dense_families.CASES[name]
        for name in ("cohere2", "exaone4-windows", "gpt2", "granite", "olmo2")
    },
}


def opened(name: str, folder: Path) -> tuple[HParams, Checkpoint]:
    family, changes = CASES[name]
    save_tiny(family, {**changes}, folder)
    config = ModelConfig(model=str(folder))
    files = resolve(config)
    return load_hparams(files, config), open_checkpoint(files, config)


@pytest.mark.parametrize("name", CASES)
def test_stages_give_the_logits_of_the_whole_network(name: str, tmp_path: Path) -> None:
    hparams, checkpoint = opened(name, tmp_path)
    ids = torch.randint(3, 97, (20,), generator=torch.Generator().manual_seed(2)).tolist()
    want = logits_of(hparams, checkpoint, ids, chunks=[7, 1, 12])
    for num_stages in (2, hparams.num_layers):
        stages = cut_stages([1] * hparams.num_layers, num_stages)
        got = logits_of(hparams, checkpoint, ids, chunks=[7, 1, 12], stages=stages)
        assert torch.equal(got, want)


def test_a_stage_reads_only_its_own_tensors(tmp_path: Path) -> None:
    hparams, checkpoint = opened("tied", tmp_path)
    parts = make_parts(hparams)
    read = []
    for stage in cut_stages([1] * 3, 3):
        spy = Spy(checkpoint)
        load(make_network(hparams, replace(parts, stage=stage)), spy, CPU)
        read.append(set(spy.reads))
    first, second, last = read
    assert all(name.startswith("model.layers.1.") for name in second)
    assert "model.embed_tokens.weight" in first
    assert "model.embed_tokens.weight" in last, "the head of tied embeddings"
    assert "model.norm.weight" in last - first
    assert first | second | last == set(checkpoint.names())


class Renamed:
    """A checkpoint with one tensor more, or with one tensor less."""

    def __init__(self, checkpoint: Checkpoint, *, more: str = "", less: str = "") -> None:
        self._checkpoint = checkpoint
        self._names = (set(checkpoint.names()) | {more}) - {"", less}

    def names(self) -> set[str]:
        return self._names


def test_missing_and_unknown_tensors_of_a_stage_are_errors(tmp_path: Path) -> None:
    hparams, checkpoint = opened("tied", tmp_path)
    stage = Stage(1, 2, 3)

    def check(**changes: str) -> None:
        network = make_network(hparams, replace(make_parts(hparams), stage=stage))
        load(network, Renamed(checkpoint, **changes), CPU)  # type: ignore[arg-type]

    with pytest.raises(CheckpointError, match=r"lacks 1 tensors.*layers\.1\.mlp\.down_proj"):
        check(less="model.layers.1.mlp.down_proj.weight")
    for name in ("model.layers.1.extra.weight", "model.layers.3.mlp.down_proj.weight"):
        with pytest.raises(CheckpointError, match=f"unknown to the network: {name}"):
            check(more=name)


def test_a_stage_keeps_the_tables_of_all_groups_and_an_equal_share_of_each() -> None:
    def group(layer: int) -> KVGroup:
        window = None if layer % 6 == 5 else 8
        return KVGroup(
            kind="window" if window else "full",
            layers=(layer,),
            page=(2, 1, 4, 8),
            item_bytes=2,
            window=window,
        )

    whole = KVLayout.of([group(layer) for layer in range(24)], 4)
    stages = [whole.stage(range(start, start + 12)) for start in (0, 12)]
    for stage in stages:
        assert [each.kind for each in stage.groups] == [each.kind for each in whole.groups]
        assert stage.num_layers == 12
        assert stage.block_bytes == whole.block_bytes // 2
    only_windows = whole.stage(range(0, 5))
    assert len(only_windows.groups) == len(whole.groups)
    assert any(not each.layers for each in only_windows.groups)
    assert [only_windows.place(layer)[0] for layer in range(5)] == [
        whole.place(layer)[0] for layer in range(5)
    ]
