"""Whole models whose experts are divided among ranks: logits in threads, tokens in processes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models import test_deepseek, test_gemma4, test_llama4, test_networks
from tests.models.comparison import logits_of, make_parts, save_tiny
from tests.models.test_deepseek import COUNT, run
from tests.parallel.ranks import rank_processes
from tests.quant.ranks import in_threads, thread_groups
from tests.runner import test_windows
from windlass.build import Built
from windlass.config import EngineConfig, ModelConfig
from windlass.core.expert_load import ExpertLoad, read_load, write_placements
from windlass.core.moe import ExpertPlacement
from windlass.errors import ConfigError
from windlass.layers.moe import Experts
from windlass.models.card import load_hparams, open_checkpoint
from windlass.models.source import resolve
from windlass.parallel.mesh import Mesh
from windlass.runner.load import make_blueprint

V3 = {**test_deepseek.MLA, **test_deepseek.EXPERTS, **test_deepseek.V3}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    name: test_networks.CASES[name]
    for name in ("mixtral", "qwen2-moe", "qwen3-moe", "gpt-oss", "granite-moe", "glm-4.5-moe")
}
FAMILIES |= {
    "deepseek-v3": ("DeepseekV3", V3),
    "llama4": ("Llama4", {**test_llama4.SCOUT, "num_local_experts": 8}),
    "gemma4": ("Gemma4", {**test_gemma4.EXPERTS, "num_experts": 8}),
}
IDS = torch.randint(3, 97, (37,), generator=torch.Generator().manual_seed(2)).tolist()
PROMPTS = [IDS[:6], IDS[3:30], [7] * 11]


def divided_logits(folder: Path, size: int, placement: ExpertPlacement | None) -> list[Tensor]:
    """The logits of every rank; all-to-all combines the chunk of 30 tokens, all-reduce the others."""
    config = ModelConfig(model=str(folder))
    files = resolve(config)
    spec, checkpoint = load_hparams(files, config), open_checkpoint(files, config)
    assert spec.moe is not None
    layers = {} if placement is None else dict.fromkeys(range(spec.num_layers), placement)

    def call(mesh: Mesh) -> Callable[[], Tensor]:
        parts = replace(make_parts(spec, mesh=mesh), placements=layers, expert_combine="all-to-all")
        return lambda: logits_of(spec, checkpoint, IDS, chunks=[5, 1, 1, 30], parts=parts)

    return in_threads([call(Mesh(tp=group, ep=group)) for group in thread_groups(size)])


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    model = save_tiny(*FAMILIES[name], tmp_path)
    with torch.inference_mode():
        want = model(torch.tensor([IDS])).logits[0]
    num_experts = 6 if name in ("mixtral", "gpt-oss", "granite-moe") else 8
    odd, even = range(1, num_experts, 2), range(0, num_experts, 2)
    for placement in (None, ExpertPlacement((tuple(odd), tuple(even)))):
        found = divided_logits(tmp_path, 2, placement)
        assert len(found) == 2
        for got in found:
            torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_four_ranks_with_fewer_kv_heads_and_an_uneven_division(tmp_path: Path) -> None:
    changes = {**FAMILIES["qwen3-moe"][1], "num_attention_heads": 4, "num_experts": 10}
    model = save_tiny("Qwen3Moe", changes, tmp_path)
    with torch.inference_mode():
        want = model(torch.tensor([IDS])).logits[0]
    for got in divided_logits(tmp_path, 4, None):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def make(folder: Path, size: int = 1, **options: Any) -> Built:
    given = {"num_blocks": 64, "dtype": "float32", "tensor_parallel_size": size}
    return test_windows.make(folder, **(given | options))


def counts(load: ExpertLoad, num_layers: int, top_k: int) -> list[int]:
    """Tokens in each layer; every one chose as many experts."""
    assert len(load.layers) == num_layers
    assert all(sum(each) % top_k == 0 for each in load.layers.values())
    return [sum(each) // top_k for each in load.layers.values()]


def test_processes_generate_the_tokens_of_one(tmp_path: Path) -> None:
    """Mixtral by all-reduce, with recorded load that all-to-all and a balanced placement do not change."""
    save_tiny(*FAMILIES["mixtral"], tmp_path)
    one, two, path = (str(tmp_path / name) for name in ("one.json", "two.json", "placement.json"))
    built = make(tmp_path, record_expert_load=one)
    want = run(built, PROMPTS)
    built.engine.update_expert_load()
    load = read_load(one)
    tokens = sum(map(len, PROMPTS)) + len(PROMPTS) * (COUNT - 1)
    sampled = len(PROMPTS) * COUNT  # the last layer computes no others
    assert counts(load, num_layers=3, top_k=2) == [tokens, tokens, sampled]
    assert built.engine.stats().experts.rank_imbalance == {}  # type: ignore[union-attr]
    write_placements(path, load.balanced(2))
    for options in ({}, {"expert_placement": path, "expert_combine": "all-to-all"}):
        ranks = make(tmp_path, 2, enable_expert_parallel=True, record_expert_load=two, **options)
        assert run(ranks, PROMPTS) == want
        ranks.engine.update_expert_load()
        assert read_load(two) == load
        assert any(choice.what == "expert parallelism" for choice in ranks.report.choices)
        placements = load.balanced(2) if options else load.spread(2)
        stats = ranks.engine.stats().experts
        assert stats is not None
        assert stats.rank_imbalance == load.imbalance(placements)
        del ranks
        gc.collect()
        assert rank_processes() == []


def test_shared_experts_in_processes(tmp_path: Path) -> None:
    save_tiny(*FAMILIES["deepseek-v3"], tmp_path)
    want = run(make(tmp_path), PROMPTS)
    options = {"enable_expert_parallel": True, "expert_combine": "all-to-all"}
    assert run(make(tmp_path, 2, **options), PROMPTS) == want


def test_stages_of_ranks_with_their_own_experts(tmp_path: Path) -> None:
    """Two stages of two ranks; the load of all stages is recorded."""
    save_tiny(*FAMILIES["mixtral"], tmp_path)
    one, four = (str(tmp_path / name) for name in ("one.json", "four.json"))
    built = make(tmp_path, record_expert_load=one)
    want = run(built, PROMPTS)
    built.engine.update_expert_load()
    options = {"pipeline_parallel_size": 2, "record_expert_load": four}
    ranks = make(tmp_path, 2, enable_expert_parallel=True, **options)
    assert run(ranks, PROMPTS) == want
    ranks.engine.update_expert_load()
    got, alone = read_load(four).layers, read_load(one).layers
    assert got.keys() == alone.keys()
    # The last layer computes the sampled tokens, and in a pipeline also one of a chunk without any.
    assert [got[layer] for layer in (0, 1)] == [alone[layer] for layer in (0, 1)]


def test_the_recorded_program_counts_tokens(tmp_path: Path) -> None:
    changes = {**FAMILIES["qwen3-moe"][1], "hidden_size": 64, "moe_intermediate_size": 32}
    save_tiny("Qwen3Moe", changes, tmp_path)
    path = str(tmp_path / "load.json")
    built = make(tmp_path, dtype="auto", record_expert_load=path)
    run(built, PROMPTS)
    built.engine.update_expert_load()
    tokens = sum(map(len, PROMPTS)) + len(PROMPTS) * (COUNT - 1)
    assert counts(read_load(path), num_layers=3, top_k=3)[:2] == [tokens, tokens]


def test_load_is_counted_only_if_it_is_asked_for(tmp_path: Path) -> None:
    save_tiny(*FAMILIES["qwen3-moe"], tmp_path)
    built = make(tmp_path)
    assert built.engine.stats().experts is None
    layers = [each for each in built.weights.network.modules() if isinstance(each, Experts)]
    assert [each.load for each in layers] == [None] * 3


def test_what_it_needs_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"--tensor-parallel-size, which is 1\. Set it to at least 2"
    ):
        EngineConfig.of(model="x", enable_expert_parallel=True)
    with pytest.raises(ConfigError, match="nothing without --enable-expert-parallel"):
        EngineConfig.of(model="x", expert_combine="all-to-all")
    with pytest.raises(ConfigError, match="nothing without --enable-expert-parallel"):
        EngineConfig.of(model="x", expert_placement="x.json")


def choose(folder: Path, **options: Any) -> None:
    """Make the choices that precede the reading of weights."""
    config = EngineConfig.of(model=str(folder), device="cpu", **options)
    files = resolve(config.model)
    hparams = load_hparams(files, config.model)
    make_blueprint(config, hparams, open_checkpoint(files, config.model))


DIVIDED = {"tensor_parallel_size": 2, "enable_expert_parallel": True}


def test_a_dense_model_is_refused(tmp_path: Path) -> None:
    save_tiny(*test_networks.CASES["qwen3"], tmp_path)
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM has no experts"):
        choose(tmp_path, **DIVIDED)
    with pytest.raises(ConfigError, match="--record-expert-load: Qwen3ForCausalLM has no experts"):
        choose(tmp_path, record_expert_load="x.json")


def test_bad_files_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    save_tiny(*FAMILIES["qwen3-moe"], tmp_path)
    with pytest.raises(ConfigError, match="its folder does not exist"):
        choose(tmp_path, record_expert_load=str(tmp_path / "gone" / "load.json"))
    path = str(tmp_path / "placement.json")
    write_placements(path, ExpertLoad({1: (1,) * 8}).balanced(4))
    with pytest.raises(ConfigError, match="over 4 ranks, but --tensor-parallel-size is 2"):
        choose(tmp_path, **DIVIDED, expert_placement=path)
