"""Engines with a host tier on a GPU: conversations of far more KV than the device holds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.test_engine import CONFIG, GREEDY, WINDOWS, agreement, folder
from windlass import LLM, SamplingParams
from windlass.core.types import TierStats

__all__ = ["folder"]  # a fixture of test_engine.py

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TIER = {"kv_offload_gb": 0.25}
NUM_CONVERSATIONS, NUM_TURNS = 14, 3
EXACT = replace(GREEDY, deterministic=True, max_tokens=20)


def converse(
    folder: Path, params: SamplingParams = EXACT, **options: Any
) -> tuple[list[list[int]], tuple[TierStats, ...]]:
    """The tokens of all turns, and the stats of the tiers.

    A conversation grows to about 250 tokens, 16 blocks per group; the device has room for two or three.
    """
    options = {"num_blocks": 48, "max_num_seqs": 4, "max_num_batched_tokens": 128, **options}
    llm = LLM(str(folder), load_format="dummy", **options)
    histories = [
        [(7 * i + 3 * n) % 1000 for i in range(100 + 9 * n)] for n in range(NUM_CONVERSATIONS)
    ]
    found = []
    for turn in range(NUM_TURNS):
        for history, result in zip(histories, llm.generate(histories, params), strict=True):
            tokens = result.outputs[0].token_ids
            found.append(tokens)
            history += [*tokens, turn + 1, turn + 2]
    stats = llm.engine.stats()
    assert stats.num_used_blocks == 0
    return found, stats.tiers


def check(stats: tuple[TierStats, ...]) -> None:
    assert [tier.name for tier in stats] == ["host"]
    assert stats[0].num_saves > 0
    assert stats[0].num_loads > 0
    assert stats[0].num_failures == 0
    assert stats[0].num_hit_tokens > 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": False},
        {"enforce_eager": True},
        {"plain_kernels": True},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "int8"},
        {"spec": "ngram"},
    ],
    ids=str,
)
def test_the_host_tier_changes_no_token(folder: Path, options: dict[str, Any]) -> None:
    want, _ = converse(folder, **options)
    got, stats = converse(folder, **options, **TIER)
    assert got == want
    check(stats)


@pytest.mark.parametrize("case", WINDOWS)
def test_windows(case: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | WINDOWS[case]))
    options = {"num_blocks": 80 if case == "two groups" else 30}
    want, _ = converse(tmp_path, **options)
    got, stats = converse(tmp_path, **options, **TIER)
    assert got == want
    check(stats)


def test_captured_steps_with_the_host_tier(folder: Path) -> None:
    """Without batch invariance: near ties of random weights may differ, wrong blocks differ always."""
    params = replace(EXACT, deterministic=False)
    want, _ = converse(folder, params, num_blocks=400)
    got, stats = converse(folder, params, **TIER)
    check(stats)
    # A turn begins with the tokens of the turn before.
    assert agreement(got[:NUM_CONVERSATIONS], want[:NUM_CONVERSATIONS]) >= 0.8
    assert agreement(got, want) >= 0.6


def test_few_rows_of_host_memory(folder: Path) -> None:
    """Records are evicted from the host, too, also between a decision and its load."""
    want, _ = converse(folder)
    got, stats = converse(folder, kv_offload_gb=0.004)  # about 130 records
    assert got == want
    assert stats[0].num_evictions > 0


def test_staging_is_in_the_memory_report(folder: Path) -> None:
    llm = LLM(str(folder), load_format="dummy", num_blocks=48, **TIER)
    held = llm.engine.memory().held
    assert held is not None
    record_bytes = held.parts["KV cache"].num_bytes // (48 + 2)  # two blocks for the runner
    assert held.parts["KV offload"].num_bytes == 9 * (48 + 2) * record_bytes
