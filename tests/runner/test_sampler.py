"""Sampling params have their documented effect, alone and in a batch."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from windlass.core.sampling import SamplingParams
from windlass.core.types import SlotInit
from windlass.runner import filters
from windlass.runner.sampler import Sampler, score_tokens

VOCAB = 40
CPU = torch.device("cpu")


def sampler_with(*params: SamplingParams, prompt: tuple[int, ...] = (1, 2)) -> Sampler:
    sampler = Sampler(VOCAB, CPU)
    for slot, sampling in enumerate(params):
        stops = frozenset(sampling.stop_token_ids)
        sampler.admit(
            SlotInit(
                f"r{slot}", slot, list(prompt), len(prompt), sampling, stops, sampling.seed or 0
            )
        )
    return sampler


def one(logits: torch.Tensor, **options) -> int:
    return sampler_with(SamplingParams(**options)).sample(logits[None], [0])[0][0]


def random_logits(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def test_greedy_takes_the_argmax() -> None:
    logits = random_logits()[0]
    assert one(logits, temperature=0) == int(logits.argmax())


def test_a_seed_gives_the_same_token_alone_and_in_any_batch() -> None:
    logits = random_logits(8)
    seeded = SamplingParams(temperature=1.5, top_p=0.9, seed=42)
    others = [SamplingParams(temperature=1.0, seed=i) for i in range(7)]
    alone = sampler_with(seeded).sample(logits[:1], [0])[0][0]
    mixed = sampler_with(seeded, *others).sample(logits, list(range(8)))[0][0]
    backwards = sampler_with(*others, seeded)
    last = backwards.sample(logits.flip(0), list(range(8)))[0][7]
    assert alone == mixed == last


def test_samples_follow_the_distribution() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    want = logits.softmax(0)
    draws = 4000
    params = torch.tensor([(1.0, 0, 1.0, 0.0)] * draws).double()
    keys = torch.tensor([filters.key(7, position) for position in range(draws)])
    counts = torch.bincount(filters.draw(logits.expand(draws, 4), params, keys), minlength=4)
    chi_square = ((counts - draws * want) ** 2 / (draws * want)).sum()
    assert chi_square < 16.3  # 3 degrees of freedom, p = 0.001


@pytest.mark.parametrize("top_k", [1, 3, 39])
def test_top_k_keeps_exactly_k(top_k: int) -> None:
    kept = filters.truncate(
        random_logits(2), torch.tensor([top_k, 0]), torch.ones(2), torch.zeros(2)
    )
    assert kept.isfinite().sum(-1).tolist() == [top_k, VOCAB]


def test_top_p_keeps_the_smallest_sufficient_set() -> None:
    probs = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    for p, count in [(0.4, 1), (0.5, 1), (0.51, 2), (0.8, 2), (0.81, 3), (1.0, 4)]:
        kept = filters.truncate(probs.log(), torch.tensor([0]), torch.tensor([p]), torch.zeros(1))
        assert int(kept.isfinite().sum()) == count, p


def test_min_p_is_relative_to_the_highest_probability() -> None:
    probs = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    kept = filters.truncate(probs.log(), torch.tensor([0]), torch.ones(1), torch.tensor([0.31]))
    assert kept.isfinite().tolist() == [[True, True, False, False]]


def test_rows_are_truncated_by_their_own_params() -> None:
    logits = random_logits(3)
    params = [
        SamplingParams(temperature=5.0, top_k=1, seed=1),
        SamplingParams(temperature=0),
        SamplingParams(temperature=5.0, top_p=1e-9, seed=1),
    ]
    tokens, _ = sampler_with(*params).sample(logits, [0, 1, 2])
    assert tokens == logits.argmax(-1).tolist()


def test_bias_allowed_tokens_and_bad_words() -> None:
    logits = random_logits()[0]
    best = int(logits.argmax())
    assert one(logits, temperature=0, logit_bias={5: 100}) == 5
    assert one(logits, temperature=0, logit_bias={best: -100}) != best
    assert one(logits, temperature=0, allowed_token_ids=[9]) == 9
    assert one(logits, temperature=0, bad_token_ids=((best,),)) != best


def test_a_bad_word_of_two_tokens_is_masked_at_its_last_token() -> None:
    sampler = sampler_with(SamplingParams(temperature=0, bad_token_ids=((3, 4),)))
    logits = torch.zeros(1, VOCAB)
    logits[0, 4] = 1.0
    assert sampler.sample(logits, [0])[0] == [4], "4 alone is allowed"
    logits[0, 3] = 2.0
    assert sampler.sample(logits, [0])[0] == [3]
    logits[0, 3] = 0.5
    assert sampler.sample(logits, [0])[0] == [3], "4 would complete the word"


def test_min_tokens_masks_stop_tokens() -> None:
    sampler = sampler_with(SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[5]))
    logits = torch.zeros(1, VOCAB)
    logits[0, 5] = 9.0
    tokens = [sampler.sample(logits, [0])[0][0] for _ in range(3)]
    assert 5 not in tokens[:2]
    assert tokens[2] == 5


def test_penalties_follow_their_definitions() -> None:
    scores = torch.tensor([2.0, -2.0, 1.0, 0.0])
    counts = torch.tensor([3, 1, 0, 0])
    seen = torch.tensor([True, True, True, False])
    got = filters.penalise(scores, counts, seen, 2.0, 0.5, 0.25)
    assert got.tolist() == [1.0 - 1.5 - 0.25, -4.0 - 0.5 - 0.25, 0.5, 0.0]


def test_frequency_counts_the_output_and_repetition_also_the_prompt() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 1] = 1.0, 1.2
    repeat = sampler_with(SamplingParams(temperature=0, repetition_penalty=2.0), prompt=(1, 3))
    assert repeat.sample(logits, [0])[0] == [7], "1 is in the prompt"
    often = sampler_with(SamplingParams(temperature=0, frequency_penalty=0.6), prompt=(1, 3))
    assert [often.sample(logits, [0])[0][0] for _ in range(2)] == [1, 7]


def test_penalties_after_a_preemption_count_generated_tokens() -> None:
    sampler = Sampler(VOCAB, CPU)
    sampling = SamplingParams(temperature=0, presence_penalty=2.0)
    sampler.admit(SlotInit("r", 0, [1, 7], 1, sampling, frozenset(), 0))
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = 1.0
    assert sampler.sample(logits, [0])[0] != [7]


def test_logprobs_are_those_of_the_unchanged_logits() -> None:
    logits = random_logits()
    sampler = sampler_with(SamplingParams(temperature=0, logit_bias={5: 100}, logprobs=3))
    tokens, scores = sampler.sample(logits, [0])
    want = logits.log_softmax(-1)[0]
    assert tokens == [5]
    assert scores[0] is not None
    assert scores[0][0].logprob == pytest.approx(float(want[5]), abs=1e-5)
    assert scores[0][0].rank == int((want > want[5]).sum()) + 1
    assert [t for t, _ in scores[0][0].top] == want.topk(3).indices.tolist()


def test_all_logprobs_on_demand() -> None:
    assert len(score_tokens(random_logits(), [0], -1)[0].top) == VOCAB
    assert score_tokens(random_logits(), [0], 0)[0].top == []


def test_a_reused_slot_has_no_old_state() -> None:
    sampler = sampler_with(SamplingParams(temperature=0, logit_bias={5: 100}))
    sampler.forget(0)
    sampler.admit(SlotInit("next", 0, [1], 1, SamplingParams(temperature=0), frozenset(), 0))
    logits = random_logits()
    assert sampler.sample(logits, [0])[0] == [int(logits.argmax())]


class CountOps(TorchDispatchMode):
    """Counts tensor operations."""

    def __init__(self) -> None:
        super().__init__()
        self.num_ops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_ops += 1
        return func(*args, **(kwargs or {}))


def num_ops_per_token(num_entries: int) -> int:
    sampling = SamplingParams(
        temperature=0,
        logit_bias=dict.fromkeys(range(num_entries), 1.0),
        allowed_token_ids=list(range(num_entries + 1)),
        bad_token_ids=tuple((token, token + 1) for token in range(num_entries)),
        stop_token_ids=list(range(num_entries)),
        min_tokens=9,
    )
    sampler = sampler_with(sampling)
    with CountOps() as counted:
        sampler.sample(random_logits(), [0])
    return counted.num_ops


def test_work_per_token_does_not_grow_with_token_lists() -> None:
    assert num_ops_per_token(30) == num_ops_per_token(2)


def test_token_lists_are_read_at_admission_only() -> None:
    sampling = SamplingParams(
        temperature=0, logit_bias={5: 50.0}, allowed_token_ids=(5, 6), bad_token_ids=((5, 5),)
    )
    sampler = sampler_with(sampling)
    sampling.logit_bias.clear()
    for name in ("allowed_token_ids", "bad_token_ids"):
        object.__setattr__(sampling, name, None)
    logits = random_logits()
    assert [sampler.sample(logits, [0])[0][0] for _ in range(3)] == [5, 6, 5]


def plain_rules(scores: torch.Tensor, sampling: SamplingParams, output: list[int]) -> torch.Tensor:
    """The definition of the lists, entry by entry."""
    scores = scores.clone()
    for token in range(VOCAB):
        if sampling.allowed_token_ids is not None and token not in sampling.allowed_token_ids:
            scores[token] = -torch.inf
        scores[token] += sampling.logit_bias.get(token, 0.0)
    for *start, last in sampling.bad_token_ids:
        if not start or output[-len(start) :] == start:
            scores[last] = -torch.inf
    if len(output) < sampling.min_tokens:
        for token in sampling.stop_token_ids:
            scores[token] = -torch.inf
    return scores


@pytest.mark.parametrize("seed", range(20))
def test_token_lists_match_their_definition(seed: int) -> None:
    random = Random(seed)

    def some(count: int) -> list[int]:
        return [random.randrange(VOCAB) for _ in range(count)]

    sampling = SamplingParams(
        temperature=0,
        logit_bias={token: random.uniform(-3, 3) for token in some(8)},
        allowed_token_ids=some(20) if seed % 2 else None,
        bad_token_ids=tuple(tuple(some(random.randrange(1, 4))) for _ in range(60)),
        stop_token_ids=some(4),
        min_tokens=3,
    )
    sampler, output = sampler_with(sampling), []
    for step in range(6):
        logits = random_logits(seed=100 * seed + step)
        expected = int(plain_rules(logits[0], sampling, output).argmax())
        assert sampler.sample(logits, [0])[0] == [expected]
        output.append(expected)
