"""Weights by rank: the same bytes as networks that are built with the groups of all ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.quant.ranks import FakeGroup
from windlass.config import EngineConfig
from windlass.errors import ConfigError, ShardError
from windlass.models.card import load_hparams, open_checkpoint
from windlass.models.hparams import HParams
from windlass.models.loader import outline
from windlass.models.network import Parts, make_network
from windlass.models.rank_weights import (
    RankShape,
    fullest_rank,
    rank_kv_layout,
    rank_weights,
)
from windlass.models.source import resolve
from windlass.models.stages import Stage
from windlass.parallel.mesh import Mesh
from windlass.runner.load import load_network, make_blueprint

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 200,  # 12.5 units of 16 rows: ranks differ
    "max_position_embeddings": 64,
    "torch_dtype": "float32",
}
DENSE = SIZES | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
MOE = SIZES | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}
MLA = SIZES | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 8,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
MODELS = {
    "dense": (DENSE, {}),
    "tied": (DENSE | {"tie_word_embeddings": True}, {}),
    "tied, packed": (
        DENSE | {"tie_word_embeddings": True},
        {"quantization": "int8", "quantize_head": True},
    ),
    "moe": (MOE, {"quantization": "fp8"}),
    "mla": (MLA, {"quantization": "fp8"}),
}


def opened(folder: Path, config: dict[str, Any], **options: Any) -> tuple[HParams, Parts]:
    (folder / "config.json").write_text(json.dumps(config))
    settings = EngineConfig.of(
        model=str(folder), load_format="dummy", device="cpu", num_threads=1, **options
    )
    files = resolve(settings.model)
    hparams = load_hparams(files, settings.model)
    checkpoint = open_checkpoint(files, settings.model)
    return hparams, make_blueprint(settings, hparams, checkpoint).parts


def real_bytes(hparams: HParams, parts: Parts, group: FakeGroup) -> int:
    network = make_network(hparams, replace(parts, mesh=Mesh(tp=group)))
    outline(network)
    return network.weight_bytes


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_ranks_hold_what_their_networks_hold(name: str, tp: int, tmp_path: Path) -> None:
    config, options = MODELS[name]
    hparams, parts = opened(tmp_path, config, **options)
    (counted,) = rank_weights(hparams, parts, RankShape(tp=tp))
    real = [real_bytes(hparams, parts, FakeGroup(rank, tp)) for rank in range(tp)]
    assert counted == real
    fullest = fullest_rank(hparams, parts, RankShape(tp=tp))
    assert fullest.stage_bytes(Stage(0, 3, 3)) == max(real)
    assert tp == 1 or len(set(real)) > 1  # the vocabulary


def test_weights_are_counted_without_dynamo(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torch.cat of meta tensors imports it, which would take a second of every pipeline stage's start."""
    hparams, parts = opened(tmp_path, DENSE | {"attention_bias": True})
    cat = torch.cat

    def checked(tensors: list[torch.Tensor], **options: Any) -> torch.Tensor:
        assert not any(each.is_meta for each in tensors)
        return cat(tensors, **options)

    monkeypatch.setattr(torch, "cat", checked)
    assert fullest_rank(hparams, parts, RankShape(tp=2)).stages(2)


@pytest.mark.parametrize("name", MODELS)
def test_stages_hold_what_their_networks_hold(name: str, tmp_path: Path) -> None:
    config, options = MODELS[name]
    hparams, parts = opened(tmp_path, config, **options)
    counted = rank_weights(hparams, parts, RankShape(tp=2, pp=2))
    stages = fullest_rank(hparams, parts, RankShape(tp=2)).stages(2)
    real = [
        [real_bytes(hparams, replace(parts, stage=stage), FakeGroup(rank, 2)) for rank in (0, 1)]
        for stage in stages
    ]
    assert counted == real


def token_bytes(hparams: HParams, tp: int, layers: range = range(3)) -> int:
    return rank_kv_layout(hparams, tp, 16, torch.float16).stage(layers).token_bytes


def test_kv_heads_are_replicated_beyond_their_number(tmp_path: Path) -> None:
    hparams, _ = opened(tmp_path, DENSE)
    one_head = 3 * 2 * 16 * 2
    assert [token_bytes(hparams, tp) for tp in (1, 2, 4, 8)] == [2 * one_head, *[one_head] * 3]
    assert token_bytes(hparams, 2, range(1, 3)) == 2 / 3 * one_head


def test_latents_are_on_every_rank(tmp_path: Path) -> None:
    hparams, _ = opened(tmp_path, MLA)
    assert [token_bytes(hparams, tp) for tp in (1, 4)] == [3 * 48 * 2] * 2


def test_wrong_sizes_are_refused(tmp_path: Path) -> None:
    hparams, parts = opened(tmp_path, DENSE)
    with pytest.raises(ShardError, match=r"cannot be cut into 3 shards.*work: 1, 2, 4, 8\."):
        rank_weights(hparams, parts, RankShape(tp=3))
    with pytest.raises(ConfigError, match="the model has 3 layers"):
        rank_weights(hparams, parts, RankShape(pp=4))
    with pytest.raises(ConfigError, match="are 128 ranks; at most 64"):
        RankShape(tp=16, pp=8)
    with pytest.raises(ConfigError, match="must be at least 1, got 0 and 1"):
        RankShape(tp=0)


def test_weights_that_do_not_fit_name_the_number_of_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hparams, parts = opened(tmp_path, DENSE)
    ((whole,),) = rank_weights(hparams, parts, RankShape())

    def full(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("windlass.runner.load.load", full)
    config = EngineConfig.of(
        model=str(tmp_path), load_format="dummy", device="cpu", num_threads=1, memory_share=1.0
    )
    checkpoint = open_checkpoint(resolve(config.model), config.model)
    for memory, end in ((0.9 * whole, "2: --tensor-parallel-size 2 "), (1, "not even 64 such")):
        monkeypatch.setattr("windlass.runner.load.whole_bytes", lambda _, m=memory: int(m))
        with pytest.raises(ConfigError, match=f"the weights do not fit.*{end}"):
            load_network(config, hparams, checkpoint)
