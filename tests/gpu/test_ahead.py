"""Steps that are launched before they are planned, on a real GPU: the tokens stay what they are."""

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
from windlass.runner.cuda_verify import CudaVerifyRunner
from windlass.runner.drafter import DrafterInputs
from windlass.speculative import governor, medusa

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
__all__ = ["folder", "verify_all"]

PROMPT = [(7 * j) % 1000 for j in range(21)]
LENGTHS = (30, 75, 120)
DEPTHS = {"alike": [3], "changing": [3, 3, 2, 2, 3, 0, 3, 1]}


def said(llm: LLM, count: int) -> list[list[int]]:
    """So many answers at once, which end one after another."""
    wishes = [
        SamplingParams(max_tokens=length, ignore_eos=True, temperature=0.0, deterministic=True)
        for length in LENGTHS[-count:]
    ]
    return [result.outputs[0].token_ids for result in llm.generate([PROMPT] * count, wishes)]


@pytest.mark.usefixtures("verify_all")
@pytest.mark.parametrize("depths", DEPTHS)
@pytest.mark.parametrize("count", [1, 3])
def test_launches_before_the_plan_leave_the_tokens_as_they_are(
    folder: Path, tmp_path: Path, monkeypatch, depths: str, count: int
) -> None:
    want = said(make(folder), 3)[-count:]
    truth = torch.tensor([*PROMPT, *want[-1], *[0] * 20], device="cuda")

    def draft(_self: object, found: DrafterInputs, depth: int, _others: int = 0) -> torch.Tensor:
        """The right tokens, but for every fifth."""
        after = found.batch.positions[found.last.long()].long()[:, None] + 2
        places = (after + torch.arange(depth, device="cuda")).clamp(max=len(truth) - 1)
        return torch.where(places % 5 == 3, truth[places] ^ 1, truth[places]).to(torch.int32)

    counts: Counter[str] = Counter()
    go_ahead, take_back = CudaVerifyRunner._prelaunch_next, CudaVerifyRunner._undo_prelaunch

    def counted(*args: object) -> object:
        ahead = go_ahead(*args)  # type: ignore[arg-type]
        counts["ahead"] += ahead is not None
        return ahead

    def taken_back(*args: object) -> None:
        counts["in vain"] += 1
        take_back(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(CudaVerifyRunner, "_prelaunch_next", counted)
    monkeypatch.setattr(CudaVerifyRunner, "_undo_prelaunch", taken_back)
    monkeypatch.setattr(medusa.MedusaDrafter, "draft", draft)
    for name, value in {"CONFIG": CONFIG, "VOCAB": 1000, "DIM": CONFIG["head_dim"]}.items():
        monkeypatch.setattr(test_heads, name, value)
    llm = make(folder, spec="medusa", spec_model=str(test_heads.medusa(tmp_path / "head")))
    turns = cycle(DEPTHS[depths])
    monkeypatch.setattr(governor.Governor, "draft_length", lambda *_: next(turns))
    for _ in range(3):  # what is recorded when first needed is not launched ahead that time
        assert said(llm, count) == want
    assert counts["ahead"] > 20
    assert counts["in vain"] < counts["ahead"] / 2
    assert counts["in vain"] > 0 or depths == "alike"
    stats = llm.engine.stats()
    assert stats.num_accepted_tokens > stats.num_draft_tokens / 3


@pytest.mark.usefixtures("verify_all")
def test_alternatives_take_the_place_of_wrong_guesses(
    folder: Path, tmp_path: Path, monkeypatch
) -> None:
    prompts = [[(7 * i + j) % 1000 for j in range(5 + 9 * i)] for i in range(10)]
    wish = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.0)
    off = make(folder)
    want = [off.generate([prompt], wish)[0].outputs[0].token_ids for prompt in prompts]
    truth = torch.zeros(200, dtype=torch.int64, device="cuda")

    def draft(_self: object, found: DrafterInputs, depth: int, siblings: int = 0) -> torch.Tensor:
        """A wrong first guess, of whose alternatives one is right, now this one and now that."""
        after = found.batch.positions[found.last.long()].long() + 2
        right = truth[after]
        turn = after % 2
        wrong = (right ^ 1)[:, None].expand(-1, depth)
        both = torch.stack(
            (torch.where(turn == 0, right, right ^ 2), torch.where(turn == 1, right, right ^ 2)), 1
        )
        return torch.cat((wrong, both[:, :siblings]), 1).to(torch.int32)

    monkeypatch.setattr(medusa.MedusaDrafter, "draft", draft)
    for name, value in {"CONFIG": CONFIG, "VOCAB": 1000, "DIM": CONFIG["head_dim"]}.items():
        monkeypatch.setattr(test_heads, name, value)
    head = str(test_heads.medusa(tmp_path / "head"))
    llm = make(folder, spec="medusa", spec_model=head, spec_alternatives=2)
    monkeypatch.setattr(governor.Governor, "draft_length", lambda *_: 3)
    got = []
    for prompt, answer in zip(prompts, want, strict=True):
        truth[: len(prompt) + len(answer)] = torch.tensor([*prompt, *answer], device="cuda")
        got.append(llm.generate([prompt], wish)[0].outputs[0].token_ids)
    assert agreement(got, want) >= 0.6, "near ties of random weights"
    stats = llm.engine.stats()
    assert stats.num_accepted_tokens > 0.5 * stats.num_drafts
