"""Sliding windows: blocks behind them are freed, and the tokens stay those of transformers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.comparison import save_tiny
from tests.models.test_networks import CASES as NETWORKS
from tests.steps import generate
from windlass.build import Built, build_engine
from windlass.build_rank import Source
from windlass.config import EngineConfig
from windlass.core.kv_layout import KVLayout
from windlass.core.sampling import SamplingParams
from windlass.models.card import load_hparams
from windlass.models.source import resolve
from windlass.runner import device

CASES = ["mistral-window", "qwen2-window"]
WINDOW, CHUNK, SIZE = 8, 16, 4
PROMPT = [3 + 5 * i % 89 for i in range(50)]
# The recorded CPU program, torch's kernels, and the reference.
PATHS: dict[str, dict[str, Any]] = {
    "program": {},
    "eager": {"enforce_eager": True},
    "float32": {"dtype": "float32"},
    "plain": {"plain_kernels": True},
}


def make(folder: Path, **options: Any) -> Built:
    given = {"max_num_batched_tokens": CHUNK, "max_num_seqs": 4, "block_size": SIZE}
    config = EngineConfig.of(model=str(folder), device="cpu", **(given | options))
    files = resolve(config.model)
    return build_engine(config, Source(files, load_hparams(files, config.model), ()))


def run(built: Built, prompts: list[list[int]], **sampling: Any) -> tuple[list[list[int]], int]:
    """The tokens of greedy requests, and the most blocks that were used at once."""
    engine, params = built.engine, SamplingParams(temperature=0.0, max_tokens=40, **sampling)
    used: list[int] = []
    engine.watch_plans(lambda _: used.append(engine.stats().num_used_blocks))
    return generate(engine, prompts, params), max(used)


def transformers_tokens(model: torch.nn.Module, prompt: list[int], count: int = 40) -> list[int]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", CASES)
def test_freeing_blocks_changes_no_token(
    case: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_tiny(*NETWORKS[case], tmp_path)
    built = make(tmp_path, num_blocks=200, **PATHS[path])
    (tokens,), num_used = run(built, [PROMPT])
    if path in ("float32", "plain"):
        assert tokens == transformers_tokens(model, PROMPT)
    groups = built.report.capacity.layout.groups
    kept = sum(group.window is None for group in groups) * -(-(len(PROMPT) + 40) // SIZE)
    windowed = sum(group.window is not None for group in groups)
    assert windowed
    assert (num_used - kept) * SIZE <= windowed * (WINDOW + CHUNK + SIZE)
    many = [PROMPT[: 50 - 7 * i] for i in range(4)]
    got, _ = run(built, many)
    monkeypatch.setattr(device, "kv_layout", keep_all(device.kv_layout))
    whole = make(tmp_path, num_blocks=200, **PATHS[path])
    assert whole.report.capacity.layout.groups[0].kind == "full"
    (want,), num_used = run(whole, [PROMPT])
    assert num_used * SIZE >= len(PROMPT) + 39
    assert tokens == want
    assert got == run(whole, many)[0]


def keep_all(kv_layout: Any) -> Any:
    def without_windows(*args: Any, **kwargs: Any) -> KVLayout:
        return kv_layout(*args, **kwargs).without_windows()

    return without_windows


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_cached_prefix_gives_the_same_tokens(
    case: str, deterministic: bool, tmp_path: Path
) -> None:
    save_tiny(*NETWORKS[case], tmp_path)
    built = make(tmp_path, num_blocks=200, dtype="float32")
    first, _ = run(built, [PROMPT], deterministic=deterministic)
    hits = built.engine.stats().prefix_hits
    # A shorter prefix ends before the window of the sealed blocks: only some groups have it.
    again, _ = run(built, [PROMPT], deterministic=deterministic)
    assert built.engine.stats().prefix_hits - hits == 48
    longer, _ = run(built, [PROMPT + first[0][:9]], deterministic=deterministic)
    assert again == first
    assert longer[0][:31] == first[0][9:]


@pytest.mark.parametrize("case", CASES)
def test_a_small_pool_serves_requests_longer_than_it(case: str, tmp_path: Path) -> None:
    save_tiny(*NETWORKS[case], tmp_path)
    layout = make(tmp_path, num_blocks=200).report.capacity.layout
    few = layout.blocks_for(90, 2 * CHUNK)
    built = make(tmp_path, num_blocks=few, max_model_len=90)
    assert few < len(layout.groups) * 23
    prompts = [PROMPT, PROMPT[:30], PROMPT[:17]]
    got, most = run(built, prompts)
    assert most <= few
    assert got == run(make(tmp_path, num_blocks=200), prompts)[0]


def test_speculation_with_its_own_kv_keeps_all_blocks(tmp_path: Path) -> None:
    save_tiny(*NETWORKS["mistral-window"], tmp_path / "target")
    save_tiny(*NETWORKS["llama2"], tmp_path / "draft")
    open_target = partial(
        make,
        tmp_path / "target",
        num_blocks=200,
        load_format="dummy",
        max_num_batched_tokens=256,
    )
    (want,), _ = run(open_target(), [PROMPT])
    draft = {"spec": "draft", "spec_model": str(tmp_path / "draft")}
    for options, kind in (
        (draft, "full"),
        ({"spec": "ngram"}, "window"),
        ({"spec": "self"}, "window"),
    ):
        built = open_target(**options)
        assert [group.kind for group in built.report.capacity.layout.groups] == [kind]
        assert run(built, [PROMPT])[0] == [want]
