"""Speculation on a real GPU: the same tokens with and without, for batch-invariant requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import test_families
from tests.gpu.test_engine import CONFIG, agreement, folder
from tests.speculative import test_heads, test_speculation, test_speculators
from tests.speculative.test_speculation import verify_all
from windlass import LLM, SamplingParams
from windlass.speculative import ngram
from windlass.text.request_builder import RequestBuilder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
__all__ = ["folder", "verify_all"]

PROMPTS = [[(7 * i + j) % 1000 for j in range(3 + 9 * i)] for i in range(20)]
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"seed": 3, "top_k": 20, "top_p": 0.9, "temperature": 0.7},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.3},
    "logprobs": {"seed": 3, "logprobs": 2},
}


class Oracle(test_speculation.Oracle):
    vocab = 1000


def make(folder: Path, **options: Any) -> LLM:
    options = {"num_blocks": 400, "max_num_seqs": 16, "max_num_batched_tokens": 64, **options}
    return LLM(str(folder), load_format="dummy", **options)


def tokens(llm: LLM, params: SamplingParams) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in llm.generate(PROMPTS, params)]


def sampling(**options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=40, ignore_eos=True, **options)


@pytest.mark.usefixtures("verify_all", "fixed_tilings")
@pytest.mark.parametrize("kind", SAMPLING)
@pytest.mark.parametrize("graphs", ["captured", "eager"])
def test_drafts_leave_the_tokens_unchanged(
    folder: Path, monkeypatch, kind: str, graphs: str
) -> None:
    options = {"enforce_eager": graphs == "eager"}
    batch_invariant = sampling(**SAMPLING[kind], deterministic=True)
    want = tokens(make(folder, **options), batch_invariant)
    truth = [[*prompt, *got] for prompt, got in zip(PROMPTS, want, strict=True)]
    monkeypatch.setattr(Oracle, "truth", truth, raising=False)
    monkeypatch.setattr(ngram, "NgramProposer", Oracle)
    llm = make(folder, spec="ngram", spec_tokens=5, **options)
    assert tokens(llm, batch_invariant) == want
    stats = llm.engine.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert agreement(tokens(llm, sampling(**SAMPLING[kind])), want) >= 0.6, (
        "near ties of random weights"
    )


@pytest.mark.usefixtures("verify_all", "fixed_tilings")
@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle with norms"])
@pytest.mark.parametrize("engine", ["captured", "eager", "preempted", "fp8 KV", "few tokens"])
def test_heads_leave_the_tokens_unchanged(
    folder: Path, tmp_path: Path, monkeypatch, kind: str, engine: str
) -> None:
    options: dict[str, Any] = {
        "captured": {},
        "eager": {"enforce_eager": True},
        "preempted": {"num_blocks": 40, "max_model_len": 400},
        "fp8 KV": {"kv_cache_dtype": "fp8"},
        "few tokens": {"spec_tokens": 1},
    }[engine]
    monkeypatch.setattr(test_heads, "CONFIG", CONFIG)
    monkeypatch.setattr(test_heads, "VOCAB", CONFIG["vocab_size"])
    monkeypatch.setattr(test_heads, "DIM", CONFIG["head_dim"])
    monkeypatch.setattr(test_speculators, "VOCAB", CONFIG["vocab_size"])
    monkeypatch.setattr(test_speculators, "SIZE", CONFIG["hidden_size"])
    spec = kind.split()[0]
    head = {"medusa": test_heads.medusa, "eagle": test_heads.eagle}[spec](tmp_path / "head")
    if spec != kind:
        norms = {"norm_before_residual": True, "fc_norm": True, "norm_output": True}
        head = test_speculators.speculators(tmp_path / "other", head, **norms)
    on = make(folder, spec=spec, spec_model=str(head), **options)
    plain = {key: value for key, value in options.items() if key != "spec_tokens"}
    off = make(folder, **plain)
    for options in ({"temperature": 0.0}, {"seed": 3, "logprobs": 1}):
        batch_invariant = sampling(**options, deterministic=True)
        assert tokens(on, batch_invariant) == tokens(off, batch_invariant)
    assert on.engine.stats().num_draft_tokens > 100
    assert agreement(tokens(on, sampling(seed=1)), tokens(off, sampling(seed=1))) >= 0.6


@pytest.mark.usefixtures("verify_all", "fixed_tilings")
@pytest.mark.parametrize("engine", ["captured", "eager", "fp8 KV"])
def test_an_mtp_layer_leaves_the_tokens_unchanged(tmp_path: Path, engine: str) -> None:
    case = test_families.COMMON | test_families.CASES["deepseek-v3"]
    (tmp_path / "config.json").write_text(json.dumps(case | {"num_nextn_predict_layers": 1}))
    options: dict[str, Any] = {
        "captured": {},
        "eager": {"enforce_eager": True},
        "fp8 KV": {"kv_cache_dtype": "fp8"},
    }[engine]
    on, off = make(tmp_path, spec="mtp", **options), make(tmp_path, **options)
    for given in ({"temperature": 0.0}, {"seed": 3}):
        assert agreement(tokens(on, sampling(**given)), tokens(off, sampling(**given))) >= 0.6
    assert on.engine.stats().num_draft_tokens > 100


@pytest.mark.usefixtures("fixed_tilings")
@pytest.mark.parametrize(
    "options", [{}, {"spec": "ngram"}, {"enforce_eager": True}], ids=["graphs", "ngram", "eager"]
)
def test_predictions_leave_the_tokens_unchanged(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    params = sampling(temperature=0.0, deterministic=True)
    want = tokens(make(folder), params)
    llm = make(folder, **options)
    predictions = [tuple(each) for each in want]  # ids beyond 255 are no text
    monkeypatch.setattr(RequestBuilder, "encode_predictions", lambda *_: predictions)
    before = llm.engine.stats().num_accepted_tokens
    assert tokens(llm, params) == want
    assert llm.engine.stats().num_accepted_tokens > before
