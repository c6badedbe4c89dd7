"""Whole models whose experts are divided among ranks: logits in threads, tokens in processes."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models import test_deepseek, test_networks
from tests.models.comparison import logits_of, make_parts, save_tiny
from tests.models.test_deepseek import run
from tests.quant.ranks import in_threads, thread_groups
from tests.runner import test_windows
from windlass.build import Built
from windlass.config import EngineConfig, ModelConfig
from windlass.core.moe import ExpertPlacement
from windlass.errors import ConfigError
from windlass.models.card import load_hparams, open_checkpoint
from windlass.models.source import resolve
from windlass.parallel.mesh import Mesh

V3 = {**test_deepseek.MLA, **test_deepseek.EXPERTS, **test_deepseek.V3}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    name: test_networks.CASES[name]
    for name in ("mixtral", "qwen2-moe", "qwen3-moe", "gpt-oss", "granite-moe", "glm-4.5-moe")
} | {"deepseek-v3": ("DeepseekV3", V3)}
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
    return test_windows.make(folder, **given, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [("deepseek-v3", {"expert_combine": "all-to-all"}), ("mixtral", {})],
)
def test_processes_generate_the_tokens_of_one(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    save_tiny(*FAMILIES[name], tmp_path)
    want = run(make(tmp_path), PROMPTS)
    built = make(tmp_path, 2, enable_expert_parallel=True, **options)
    assert run(built, PROMPTS) == want
    assert any(choice.what == "expert parallelism" for choice in built.report.choices)
    del built
    gc.collect()
    assert multiprocessing.active_children() == []


def test_what_it_needs_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"--tensor-parallel-size, which is 1\. Set it to at least 2"
    ):
        EngineConfig.of(model="x", enable_expert_parallel=True)
    with pytest.raises(ConfigError, match="nothing without --enable-expert-parallel"):
        EngineConfig.of(model="x", expert_combine="all-to-all")


def test_a_dense_model_is_refused(tmp_path: Path) -> None:
    save_tiny(*test_networks.CASES["qwen3"], tmp_path)
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM has no experts"):
        make(tmp_path, 2, enable_expert_parallel=True)
