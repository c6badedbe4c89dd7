"""Verification of draft tokens.

Sampling noise depends only on the request's seed and the position, so every position of a row is
sampled on its own, and draft tokens are accepted while they equal the samples. This is rejection
sampling with a one-point draft distribution: a draft token is accepted with exactly its target
probability, and its replacement follows the target distribution without it. Seed for seed, the
output is the same as without speculation. speculative/ decides which draft tokens to verify.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from windlass.core.types import Row, RowResult, SlotId
from windlass.runner.sampler import Sampler


class SampleRequest(NamedTuple):
    """The positions to sample for one row: after its last token and after each draft token."""

    row: int  # index in the plan
    slot: SlotId
    drafts: tuple[int, ...]
    position: int  # of the first token to sample

    @property
    def num_positions(self) -> int:
        return 1 + len(self.drafts)


def sample_requests(rows: Sequence[Row]) -> list[SampleRequest]:
    """The sample requests of the rows that sample."""
    requests = []
    for i, row in enumerate(rows):
        if row.sample:
            count = row.num_tokens - row.num_drafts
            drafts = row.tokens[count:] if row.num_drafts else ()
            requests.append(SampleRequest(i, row.slot, drafts=drafts, position=row.start + count))
    return requests


def keep(sampled: list[int], drafts: Sequence[int]) -> list[int]:
    """The samples up to the first that differs from its draft token: 1 + accepted."""
    for count, (token, draft) in enumerate(zip(sampled, drafts, strict=False), start=1):
        if token != draft:
            return sampled[:count]
    return sampled


def verify(sampler: Sampler, logits: Tensor, requests: Sequence[SampleRequest]) -> list[RowResult]:
    """Sample and verify all rows; `logits` are [1 + k per row, vocabulary].

    Rows without draft tokens are sampled in one batch, as are rows without penalties or grammars.
    For the others a position depends on the tokens before it, so they are sampled position by
    position. Updates the sampler state.
    """
    firsts = list(accumulate((each.num_positions for each in requests), initial=0))
    plain = [i for i, each in enumerate(requests) if sampler.is_plain(each.slot)]
    special = sorted(set(range(len(requests))).difference(plain))
    undrafted = [i for i in special if not requests[i].drafts]
    drawn = _draw_together(sampler, logits, [(firsts[i], requests[i]) for i in plain])
    found = dict(zip(plain, drawn, strict=True))
    if undrafted:
        rows = logits if len(undrafted) == len(logits) else logits[[firsts[i] for i in undrafted]]
        tokens, scores = sampler.sample(rows, [requests[i].slot for i in undrafted])
        for i, token, score in zip(undrafted, tokens, scores, strict=True):
            found[i] = RowResult([token], score)
    for i in special:
        if i not in found:
            found[i] = sample_in_turn(sampler, logits[firsts[i] : firsts[i + 1]], requests[i])
    return [found[i] for i in range(len(requests))]


def settle(
    sampler: Sampler, sampled: list[int], requests: Sequence[SampleRequest]
) -> list[RowResult]:
    """Accept the samples of all rows and update the sampler state."""
    results, at = [], 0
    for each in requests:
        sampled_tokens = sampled[at : at + each.num_positions]
        tokens = keep(sampled_tokens, each.drafts)
        sampler.accept([each.slot] * len(tokens), tokens)
        results.append(
            RowResult(tokens, target_tokens=tuple(sampled_tokens) if each.drafts else ())
        )
        at += each.num_positions
    return results


def _draw_together(
    sampler: Sampler, logits: Tensor, requests: list[tuple[int, SampleRequest]]
) -> list[RowResult]:
    if not requests:
        return []
    indices = [first + ahead for first, each in requests for ahead in range(each.num_positions)]
    slots = [each.slot for _, each in requests for _ in range(each.num_positions)]
    positions = [
        each.position + ahead for _, each in requests for ahead in range(each.num_positions)
    ]
    chosen = logits if len(indices) == len(logits) else logits[indices]
    sampled, rows = sampler.draw(chosen, slots, positions), [each for _, each in requests]
    if sampler.threshold is not None:
        sampled = keep_typical(sampler, sampler.threshold, chosen, sampled, rows)
    return settle(sampler, sampled, rows)


def keep_typical(
    sampler: Sampler,
    threshold: float,
    logits: Tensor,
    sampled: list[int],
    requests: Sequence[SampleRequest],
) -> list[int]:
    """Typical acceptance (Medusa): replace samples by draft tokens that are likely enough.

    A draft token is accepted if p >= min(epsilon, delta * exp(-H)), where H is the entropy of its
    position, epsilon the threshold and delta its square root. This changes the output distribution.
    Greedy rows keep their samples.
    """
    indices: list[int] = []
    drafts: list[int] = []
    slots: list[int] = []
    at = 0
    for each in requests:
        if not sampler.is_greedy(each.slot):
            indices += range(at, at + len(each.drafts))
            drafts += each.drafts
            slots += [each.slot] * len(each.drafts)
        at += each.num_positions
    if not indices:
        return sampled
    chances = sampler.probabilities(logits[indices], slots)
    entropy = torch.special.entr(chances).sum(dim=-1)
    floor = (threshold**0.5 * torch.exp(-entropy)).clamp(max=threshold)
    own = chances.gather(-1, torch.tensor(drafts, device=chances.device)[:, None])[:, 0]
    kept = list(sampled)
    for index, draft, typical in zip(indices, drafts, (own >= floor).tolist(), strict=True):
        if typical:
            kept[index] = draft
    return kept


def sample_in_turn(sampler: Sampler, logits: Tensor, request: SampleRequest) -> RowResult:
    """Sample position by position while draft tokens are accepted."""
    tokens, scores = [], []
    for at in range(request.num_positions):
        (token,), (score,) = sampler.sample(logits[at : at + 1], [request.slot])
        tokens.append(token)
        scores += score or []
        if at < len(request.drafts) and token != request.drafts[at]:
            break
    return RowResult(tokens, scores or None)
