"""Proposers with KV of their own, and KV tiers: a loaded prefix gives the drafts of a cached one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.test_features import add_tokenizer
from tests.runner.test_deterministic import CONFIG
from tests.speculative import test_heads, test_mtp
from tests.speculative.test_speculation import verify_all
from windlass import LLM, SamplingParams
from windlass.core.speculation import governor
from windlass.core.types import Draft, EngineStats
from windlass.runner.kv_tiers import KVTiers

__all__ = ["verify_all"]

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
# The first prompt comes again, after the others have evicted its blocks from a cache of 24.
PROMPTS = [[(7 * i + n) % 50 for i in range(40)] for n in (1, 2, 3, 1)]
Found = tuple[list[list[int]], list[tuple[int, ...]], EngineStats]


def dummy(folder: Path) -> dict[str, Any]:
    sizes = {"head_dim": test_heads.DIM, "intermediate_size": test_heads.WIDE}
    (folder / "config.json").write_text(json.dumps(CONFIG | sizes))
    return {"load_format": "dummy"}


def with_draft_model(folder: Path) -> dict[str, Any]:
    return {**dummy(folder), "spec": "draft", "spec_model": str(folder)}


def with_eagle(folder: Path) -> dict[str, Any]:
    head = test_heads.eagle(folder / "head")
    return {**dummy(folder), "spec": "eagle", "spec_model": str(head)}


def with_mtp(folder: Path) -> dict[str, Any]:
    test_mtp.save(next(iter(test_mtp.CASES)), folder)
    add_tokenizer(folder)
    return {"spec": "mtp"}


PROPOSERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "draft": with_draft_model,
    "eagle": with_eagle,
    "mtp": with_mtp,
}


@pytest.fixture
def drafts(verify_all: None, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """All drafts that were verified. Prefixes are loaded whatever that costs."""
    del verify_all
    found: list[tuple[int, ...]] = []
    choose = governor.Governor.choose

    def recorded(self: Any, slots: Any, given: Sequence[Draft], *rest: Any) -> list[int]:
        found.extend(tuple(draft.tokens) for draft in given if draft.tokens)
        return choose(self, slots, given, *rest)

    monkeypatch.setattr(governor.Governor, "choose", recorded)
    monkeypatch.setattr(KVTiers, "record_s", lambda *_: 0.0)
    return found


def run(folder: Path, drafts: list[tuple[int, ...]], **options: Any) -> Found:
    """The tokens of the prompts, one after the other, and the drafts of the last one."""
    sizes = {"max_num_seqs": 1, "block_size": 4, "max_model_len": 64, "spec_tokens": 3}
    if "spec" not in options:
        del sizes["spec_tokens"]
    llm = LLM(str(folder), device="cpu", dtype="float32", **sizes, **options)
    tokens = []
    for prompt in PROMPTS:
        drafts.clear()
        (result,) = llm.generate([prompt], GREEDY)
        tokens.append(list(result.outputs[0].token_ids))
    stats = llm.engine.stats()
    llm.engine.close()
    return tokens, drafts.copy(), stats


@pytest.mark.parametrize("spec", PROPOSERS)
def test_a_loaded_prefix_gives_the_drafts_of_a_cached_one(
    spec: str, drafts: list[tuple[int, ...]], tmp_path: Path
) -> None:
    options = PROPOSERS[spec](tmp_path)
    plain = {name: value for name, value in options.items() if not name.startswith("spec")}
    want, _, _ = run(tmp_path, drafts, **plain, num_blocks=200)
    cached, on_device, before = run(tmp_path, drafts, **options, num_blocks=200)
    found, after_load, stats = run(tmp_path, drafts, **options, num_blocks=24, kv_offload_gb=0.01)
    assert cached == found == want
    assert before.prefix_hits == stats.prefix_hits > 0
    (host,) = stats.tiers
    assert host.num_hit_tokens == stats.prefix_hits
    assert host.num_failures == 0
    assert len(on_device) >= 3
    assert after_load == on_device


def test_a_restart_finds_the_records_of_the_same_head(
    drafts: list[tuple[int, ...]], tmp_path: Path
) -> None:
    options = {**with_eagle(tmp_path), "num_blocks": 200}
    disk = {"prefix_cache_dir": str(tmp_path / "cache")}
    want, cold, _ = run(tmp_path, drafts, **options)
    assert run(tmp_path, drafts, **options, **disk)[:2] == (want, cold)
    found, warm, stats = run(tmp_path, drafts, **options, **disk)
    assert (found, warm) == (want, cold)
    assert stats.tiers[1].num_loads > 0
    other = test_heads.eagle(tmp_path / "other", draft_vocab=90)
    found, _, stats = run(tmp_path, drafts, **options | {"spec_model": str(other)}, **disk)
    assert found == want
    assert stats.tiers[1].num_loads == 0
