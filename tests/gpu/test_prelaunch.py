"""Steps that are pre-launched before they are planned, on a GPU: tokens do not change."""

from __future__ import annotations

from collections import Counter
from itertools import cycle
from pathlib import Path

import pytest
import torch

from tests.gpu.test_engine import CONFIG, agreement, folder
from tests.gpu.test_speculation import make
from tests.speculative import test_heads
from tests.speculative.test_speculation import verify_all
from windlass import LLM, SamplingParams
from windlass.core.speculation import governor
from windlass.runner.cuda.verify import VerifyGraphs
from windlass.runner.drafter import DrafterInputs
from windlass.speculative import medusa

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
__all__ = ["folder", "verify_all"]

PROMPT = [(7 * j) % 1000 for j in range(21)]
LENGTHS = (30, 75, 120)
DRAFT_LENGTHS = {"constant": [3], "changing": [3, 3, 2, 2, 3, 0, 3, 1]}


def generate(llm: LLM, count: int) -> list[list[int]]:
    """Generate `count` outputs of different lengths in one batch."""
    params = [
        SamplingParams(max_tokens=length, ignore_eos=True, temperature=0.0, deterministic=True)
        for length in LENGTHS[-count:]
    ]
    return [result.outputs[0].token_ids for result in llm.generate([PROMPT] * count, params)]


@pytest.mark.usefixtures("verify_all")
@pytest.mark.parametrize("lengths", DRAFT_LENGTHS)
@pytest.mark.parametrize("count", [1, 3])
def test_prelaunch_does_not_change_tokens(
    folder: Path, tmp_path: Path, monkeypatch, lengths: str, count: int
) -> None:
    want = generate(make(folder), 3)[-count:]
    truth = torch.tensor([*PROMPT, *want[-1], *[0] * 20], device="cuda")

    def draft(_self: object, found: DrafterInputs, depth: int, _siblings: int = 0) -> torch.Tensor:
        """Draft the correct tokens, except for every fifth position."""
        after = found.batch.positions[found.last.long()].long()[:, None] + 2
        positions = (after + torch.arange(depth, device="cuda")).clamp(max=len(truth) - 1)
        correct = truth[positions]
        return torch.where(positions % 5 == 3, correct ^ 1, correct).to(torch.int32)

    counts: Counter[str] = Counter()
    prelaunch, undo = VerifyGraphs._prelaunch_next, VerifyGraphs._undo_prelaunch

    def counting_prelaunch(*args: object) -> object:
        prelaunched = prelaunch(*args)  # type: ignore[arg-type]
        counts["prelaunched"] += prelaunched is not None
        return prelaunched

    def counting_undo(*args: object) -> None:
        counts["undone"] += 1
        undo(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(VerifyGraphs, "_prelaunch_next", counting_prelaunch)
    monkeypatch.setattr(VerifyGraphs, "_undo_prelaunch", counting_undo)
    monkeypatch.setattr(medusa.MedusaDrafter, "draft", draft)
    for name, value in {"CONFIG": CONFIG, "VOCAB": 1000, "DIM": CONFIG["head_dim"]}.items():
        monkeypatch.setattr(test_heads, name, value)
    llm = make(folder, spec="medusa", spec_model=str(test_heads.medusa(tmp_path / "head")))
    turns = cycle(DRAFT_LENGTHS[lengths])
    monkeypatch.setattr(governor.Governor, "draft_length", lambda *_: next(turns))
    for _ in range(3):  # a graph that is captured on first use is not pre-launched that time
        assert generate(llm, count) == want
    assert counts["prelaunched"] > 20
    assert counts["undone"] < counts["prelaunched"] / 2
    assert counts["undone"] > 0 or lengths == "constant"
    stats = llm.engine.stats()
    assert stats.num_accepted_tokens > stats.num_draft_tokens / 3


@pytest.mark.usefixtures("verify_all")
def test_siblings_replace_rejected_drafts(folder: Path, tmp_path: Path, monkeypatch) -> None:
    prompts = [[(7 * i + j) % 1000 for j in range(5 + 9 * i)] for i in range(10)]
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.0)
    off = make(folder, dtype="float16")  # fewer near ties than in bfloat16
    want = [off.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts]
    truth = torch.zeros(200, dtype=torch.int64, device="cuda")

    def draft(_self: object, found: DrafterInputs, depth: int, siblings: int = 0) -> torch.Tensor:
        """Draft a wrong first token; one of its two siblings, in turn, is correct."""
        after = found.batch.positions[found.last.long()].long() + 2
        correct = truth[after]
        turn = after % 2
        wrong = (correct ^ 1)[:, None].expand(-1, depth)
        both = torch.stack(
            (
                torch.where(turn == 0, correct, correct ^ 2),
                torch.where(turn == 1, correct, correct ^ 2),
            ),
            1,
        )
        return torch.cat((wrong, both[:, :siblings]), 1).to(torch.int32)

    monkeypatch.setattr(medusa.MedusaDrafter, "draft", draft)
    for name, value in {"CONFIG": CONFIG, "VOCAB": 1000, "DIM": CONFIG["head_dim"]}.items():
        monkeypatch.setattr(test_heads, name, value)
    head = str(test_heads.medusa(tmp_path / "head"))
    llm = make(folder, dtype="float16", spec="medusa", spec_model=head, spec_alternatives=2)
    monkeypatch.setattr(governor.Governor, "draft_length", lambda *_: 3)
    got = []
    for prompt, output in zip(prompts, want, strict=True):
        truth[: len(prompt) + len(output)] = torch.tensor([*prompt, *output], device="cuda")
        got.append(llm.generate([prompt], params)[0].outputs[0].token_ids)
    assert agreement(got, want) >= 0.6, "random weights have near ties"
    stats = llm.engine.stats()
    assert stats.num_accepted_tokens > 0.5 * stats.num_drafts
