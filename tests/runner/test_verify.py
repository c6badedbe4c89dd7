"""Verification gives the tokens and logprobs that sampling without draft tokens gives."""

from __future__ import annotations

from random import Random

import torch

from tests.steps import make_inputs
from windlass.core.sampling import SamplingParams
from windlass.core.types import Row, RowResult, SlotInit, StepPlan
from windlass.runner import filters
from windlass.runner.sampler import Sampler
from windlass.runner.slots import SlotTables
from windlass.runner.verify import SampleRequest, keep, verify

VOCAB = 12
CPU = torch.device("cpu")
PROMPT = [1, 2, 3]
CASES = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.3},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1, "temperature": 0.7},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.4},
    "frequency": {"frequency_penalty": 1.0, "presence_penalty": 0.5},
    "bad words": {"bad_token_ids": ((4,), (5, 6), (7, 7))},
    "min_tokens": {"min_tokens": 5, "stop_token_ids": (0, 1, 2, 3)},
    "bias": {"logit_bias": {3: 2.0, 4: -100.0}},
    "allowed": {"allowed_token_ids": (1, 5, 6, 7)},
    "logprobs": {"logprobs": 2},
    "scored greedy": {"temperature": 0.0, "logprobs": 0},
}


def model(tokens: list[int]) -> torch.Tensor:
    """Logits that depend on the last two tokens."""
    seed = 31 * tokens[-1] + tokens[-2]
    return 2 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))


def sampler_with(params: list[SamplingParams]) -> Sampler:
    sampler = Sampler(VOCAB, CPU)
    for slot, sampling in enumerate(params):
        stops = frozenset(sampling.stop_token_ids)
        sampler.admit(SlotInit(str(slot), slot, list(PROMPT), len(PROMPT), sampling, stops, slot))
    return sampler


def one_by_one(params: list[SamplingParams], count: int) -> list[list[RowResult]]:
    sampler = sampler_with(params)
    slots = range(len(params))
    steps = []
    for _ in range(count):
        logits = torch.stack([model(sampler.tokens(slot)) for slot in slots])
        tokens, scores = sampler.sample(logits, slots)
        steps.append([RowResult([t], s) for t, s in zip(tokens, scores, strict=True)])
    return steps


def test_draft_tokens_change_neither_tokens_nor_logprobs() -> None:
    rng = Random(1)
    params = [SamplingParams(seed=0, **case) for case in CASES.values()]
    count = 40
    truth = [list(each) for each in zip(*one_by_one(params, count + 8), strict=True)]
    sampler = sampler_with(params)
    lengths = set()
    while open_slots := [
        slot for slot in range(len(params)) if len(sampler.tokens(slot)) < len(PROMPT) + count
    ]:
        requests, logits, starts = [], [], []
        for slot in open_slots:
            known = list(sampler.tokens(slot))
            done = len(known) - len(PROMPT)
            right = [each.tokens[0] for each in truth[slot][done : done + rng.randrange(5)]]
            drafts = [t if rng.random() < 0.8 else (t + 1) % VOCAB for t in right]
            requests.append(SampleRequest(len(requests), slot, tuple(drafts), len(known)))
            logits += [model(known + drafts[:i]) for i in range(len(drafts) + 1)]
            starts.append(done)
        results = verify(sampler, torch.stack(logits), requests)
        for (_, slot, _, _), start, result in zip(requests, starts, results, strict=True):
            want = truth[slot][start : start + len(result.tokens)]
            assert result.tokens == [each.tokens[0] for each in want]
            scores = [score for each in want for score in each.logprobs or ()]
            assert (result.logprobs or []) == scores
            known = sampler.tokens(slot)[len(PROMPT) :]
            assert known == [each.tokens[0] for each in truth[slot][: len(known)]]
            lengths.add(len(result.tokens))
    assert lengths == {1, 2, 3, 4, 5}


def test_draft_tokens_do_not_change_the_distribution() -> None:
    """20,000 draws of two tokens, where the second's distribution depends on the first."""
    size, draws, at_once = 8, 20_000, 2000
    sampling = SamplingParams(temperature=0.9, top_k=6, min_p=0.02)
    table = torch.randn(size + 1, size, generator=torch.Generator().manual_seed(5))
    one = torch.ones(size + 1)
    target = filters.truncate(table / 0.9, 6 * one.int(), one, 0.02 * one).softmax(-1)
    want = target[size][:, None] * target[:size]
    best, worst = int(target[size].argmax()), int(target[size].argmin())
    rng, counts = Random(3), torch.zeros(size, size)
    for batch in range(draws // at_once):
        sampler = Sampler(size, CPU)
        requests, logits = [], []
        for slot in range(at_once):
            seed = at_once * batch + slot
            sampler.admit(SlotInit("", slot, [0], 1, sampling, frozenset(), seed))
            draft = (best, worst, rng.randrange(size))[slot % 3]
            requests.append(SampleRequest(slot, slot, (draft,), 1))
            logits += [table[size], table[draft]]
        tokens = [each.tokens for each in verify(sampler, torch.stack(logits), requests)]
        short = [slot for slot in range(at_once) if len(tokens[slot]) == 1]
        seconds, _ = sampler.sample(table[[tokens[slot][0] for slot in short]], short)
        for slot, token in zip(short, seconds, strict=True):
            tokens[slot] = [*tokens[slot], token]
        for first, second in tokens:
            counts[first, second] += 1
    possible = want > 0
    assert not counts[~possible].any()
    chi_square = ((counts - draws * want) ** 2 / (draws * want))[possible].sum()
    freedom = int(possible.sum()) - 1
    # The 99.9 % point, as Wilson and Hilferty approximate it.
    assert chi_square < freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3


def test_typical_acceptance_depends_on_entropy_and_threshold() -> None:
    """With a flat distribution any draft token is typical, with a sharp one only its peak."""
    flat, sharp = torch.zeros(VOCAB), torch.zeros(VOCAB)
    sharp[3] = 9.0
    warm, cold = SamplingParams(seed=0), SamplingParams(seed=0, temperature=0.0)
    for threshold, sampling, logits, draft, kept in [
        (0.9, warm, flat, 7, True),
        (0.9, warm, sharp, 3, True),
        (0.9, warm, sharp, 7, False),
        (1e-6, warm, sharp, 7, True),
        (0.9, cold, flat, 7, False),
    ]:
        sampler = Sampler(VOCAB, CPU, threshold)
        for slot in range(20):
            sampler.admit(SlotInit("", slot, [1], 1, sampling, frozenset(), slot))
        requests = [SampleRequest(slot, slot, (draft,), 1) for slot in range(20)]
        found = verify(sampler, torch.stack([logits] * 40), requests)
        assert all(each.tokens[0] == draft for each in found) == kept
        assert [sampler.tokens(slot)[1:] for slot in range(20)] == [each.tokens for each in found]


def test_samples_are_accepted_up_to_the_first_mismatch() -> None:
    assert keep([4, 5, 6], (4, 5)) == [4, 5, 6]
    assert keep([4, 5, 6], (4, 9)) == [4, 5]
    assert keep([4, 5, 6], (9, 5)) == [4]
    assert keep([4], ()) == [4]


def test_logits_are_read_at_the_last_positions_of_sampled_rows() -> None:
    rows = [
        Row("chunk", 0, 0, 5, (1,) * 5, (), False),
        Row("drafted", 1, 9, 3, (7, 8, 9), (), True, 2),
        Row("prompt", 2, 0, 4, (1,) * 4, (), True),
        Row("decode", 3, 9, 1, (), (), True),
    ]
    inputs = make_inputs(StepPlan(rows), SlotTables(4, 4, 16, CPU))
    assert [each.drafts for each in inputs.requests] == [(8, 9), (), ()]
    assert [each.position for each in inputs.requests] == [10, 4, 10]
    assert inputs.sampled == [5, 6, 7, 11, 12]
