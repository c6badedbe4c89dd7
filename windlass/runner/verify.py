"""Verification of guesses: which of them the model would have said itself.

Sampling adds noise that depends only on the request's seed and the position. So every position of
a row is sampled as if it stood alone, and guesses are kept while they equal what was sampled. That
is rejection sampling with a draft distribution of one point: a guess is accepted with exactly its
probability, and what replaces it is distributed as the target is without it. Seed for seed, the
tokens are those without speculation. Which guesses are worth trying is decided in speculative/.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from windlass.core.types import Row, RowResult, SlotId
from windlass.runner.sampler import Sampler


class SampleRequest(NamedTuple):
    """What one sampled row wants to know: whether the model agrees with these guesses."""

    row: int  # in the plan
    slot: SlotId
    drafts: tuple[int, ...]

    @property
    def num_positions(self) -> int:
        return 1 + len(self.drafts)


def sample_requests(rows: Sequence[Row]) -> list[SampleRequest]:
    return [
        SampleRequest(
            i, row.slot, row.tokens[row.num_tokens - row.num_drafts :] if row.num_drafts else ()
        )
        for i, row in enumerate(rows)
        if row.sample
    ]


def positions_of(rows: Sequence[Row], requests: Sequence[SampleRequest]) -> np.ndarray:
    """Where in the packed step the logits are that each row needs: its last 1 + k positions."""
    ends = np.cumsum([row.num_tokens for row in rows])
    parts = [np.arange(ends[each.row] - each.num_positions, ends[each.row]) for each in requests]
    return np.concatenate(parts) if parts else np.arange(0)


def keep(sampled: list[int], drafts: Sequence[int]) -> list[int]:
    """The samples up to and with the first that differs from its guess: 1 + accepted."""
    for count, (token, guess) in enumerate(zip(sampled, drafts, strict=False), start=1):
        if token != guess:
            return sampled[:count]
    return sampled


def verify(sampler: Sampler, logits: Tensor, requests: Sequence[SampleRequest]) -> list[RowResult]:
    """Tokens of each row from its logits [1 + k of every row, vocabulary], in their order.

    Rows with plain wishes are drawn together; in others what a position may be depends on the
    guesses before it, so they go position by position. The sampler remembers what was accepted.
    """
    firsts = np.cumsum([0, *(each.num_positions for each in requests)]).tolist()
    together = [i for i, each in enumerate(requests) if sampler.is_plain(each.slot)]
    drawn = _draw_together(sampler, logits, [(firsts[i], requests[i]) for i in together])
    found = dict(zip(together, drawn, strict=True))
    return [
        found[i] if i in found else draw_in_turn(sampler, logits[firsts[i] : firsts[i + 1]], each)
        for i, each in enumerate(requests)
    ]


def settle(
    sampler: Sampler, sampled: list[int], requests: Sequence[SampleRequest]
) -> list[RowResult]:
    """Keep what was sampled, for every position of every row in turn, and remember it."""
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
    places = [first + ahead for first, each in requests for ahead in range(each.num_positions)]
    slots = [each.slot for _, each in requests for _ in range(each.num_positions)]
    ahead = [ahead for _, each in requests for ahead in range(each.num_positions)]
    chosen = logits if len(places) == len(logits) else logits[places]
    sampled, rows = sampler.draw(chosen, slots, ahead), [each for _, each in requests]
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
    """Guesses in the place of samples where they are typical: changes what is sampled.

    Typical is a guess of probability p >= min(epsilon, delta * exp(-H)), where H is the entropy of
    its position, epsilon the threshold and delta its square root: where the model is sure only what
    it is sure of, and where it is not, whatever is about as likely as the rest. Greedy rows keep
    their samples.
    """
    places: list[int] = []
    guesses: list[int] = []
    slots: list[int] = []
    at = 0
    for each in requests:
        if not sampler.is_greedy(each.slot):
            places += range(at, at + len(each.drafts))
            guesses += each.drafts
            slots += [each.slot] * len(each.drafts)
        at += each.num_positions
    if not places:
        return sampled
    chances = sampler.probabilities(logits[places], slots)
    entropy = torch.special.entr(chances).sum(dim=-1)
    least = (threshold**0.5 * torch.exp(-entropy)).clamp(max=threshold)
    own = chances.gather(-1, torch.tensor(guesses, device=chances.device)[:, None])[:, 0]
    kept = list(sampled)
    for place, guess, typical in zip(places, guesses, (own >= least).tolist(), strict=True):
        if typical:
            kept[place] = guess
    return kept


def draw_in_turn(sampler: Sampler, logits: Tensor, requests: SampleRequest) -> RowResult:
    """Sample on while the guesses are right: then the sampler's memory is that of the guesses."""
    tokens, scores = [], []
    for at in range(requests.num_positions):
        (token,), (score,) = sampler.sample(logits[at : at + 1], [requests.slot])
        tokens.append(token)
        scores += score or []
        if at < len(requests.drafts) and token != requests.drafts[at]:
            break
    return RowResult(tokens, scores or None)
