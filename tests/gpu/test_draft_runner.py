"""Draft model, early exit and lookahead on a real GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.test_engine import CONFIG, agreement, folder
from tests.gpu.test_speculation import make, sampling, tokens, verify_all

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
__all__ = ["folder", "verify_all"]

ENGINES: dict[str, dict[str, Any]] = {
    "captured": {},
    "eager": {"enforce_eager": True},
    "preempted": {"num_blocks": 40, "max_model_len": 400},
    "fp8 KV": {"kv_cache_dtype": "fp8"},
}


def method(kind: str, small: Path) -> dict[str, Any]:
    own = {"draft": {"spec_model": str(small)}, "self": {"spec_exit_layer": 2}}
    return {"spec": kind, **own.get(kind, {})}


@pytest.mark.usefixtures("verify_all", "fixed_tilings")
@pytest.mark.parametrize("kind", ["draft", "self", "lookahead"])
@pytest.mark.parametrize("engine", ENGINES)
def test_drafts_leave_the_tokens_unchanged(
    folder: Path, tmp_path: Path, kind: str, engine: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 1}))
    on = make(folder, **method(kind, tmp_path), **ENGINES[engine])
    off = make(folder, **ENGINES[engine])
    for options in ({"temperature": 0.0}, {"seed": 3, "logprobs": 1}):
        batch_invariant = sampling(**options, deterministic=True)
        assert tokens(on, batch_invariant) == tokens(off, batch_invariant)
    assert on.engine.stats().num_draft_tokens > 100
    assert agreement(tokens(on, sampling(seed=1)), tokens(off, sampling(seed=1))) >= 0.6


@pytest.mark.usefixtures("verify_all", "fixed_tilings")
def test_an_identical_draft_model_is_nearly_always_accepted(folder: Path) -> None:
    """Overlapping draft steps see each other's tokens, keys and values."""
    llm = make(folder, spec="draft", spec_model=str(folder))
    for options in ({"temperature": 0.0}, {"seed": 5}):
        tokens(llm, sampling(**options))
    stats = llm.engine.stats()
    assert stats.num_draft_tokens > 500
    assert stats.num_accepted_tokens > 0.9 * stats.num_draft_tokens, "near ties of random weights"


def test_the_exit_layer_is_measured(folder: Path) -> None:
    chosen = make(folder, spec="self").report.choices[-1]
    assert "of 4 layers (" in chosen.value + chosen.reason
    assert "% agreement" in chosen.value + chosen.reason


@pytest.mark.usefixtures("verify_all", "fixed_tilings")
@pytest.mark.parametrize("engine", ["captured", "eager"])
@pytest.mark.parametrize("kind", ["draft", "self"])
def test_typical_acceptance_accepts_likely_tokens(
    folder: Path, tmp_path: Path, kind: str, engine: str
) -> None:
    """With random weights hardly any token is below a low threshold."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 1}))
    settings = {**method(kind, tmp_path), **ENGINES[engine]}
    exact = make(folder, **settings)
    lenient = make(folder, **settings, spec_acceptance="typical", spec_threshold=1e-6)
    rates = []
    for llm in (exact, lenient):
        tokens(llm, sampling(seed=3, temperature=0.7))
        stats = llm.engine.stats()
        rates.append(stats.num_accepted_tokens / max(1, stats.num_draft_tokens))
    assert rates[1] > 0.95 > 0.9 > rates[0] > 0
    batch_invariant = sampling(temperature=0.0, deterministic=True)
    assert tokens(lenient, batch_invariant) == tokens(exact, batch_invariant)
