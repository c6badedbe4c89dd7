"""Samples tokens from logits, each row with its request's sampling params.

Keeps the sampling state of each slot: token counts for penalties, tokens for bad words, the grammar.
The mathematics is in filters.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from windlass.core.sampling import SamplingParams
from windlass.core.types import SlotInit, TokenLogprob
from windlass.kernels.ops import Ops
from windlass.kernels.storages import Held, held
from windlass.runner import filters
from windlass.runner.grammar import Grammar, Matchers, open_grammar
from windlass.runner.logit_rules import LogitRules

Draw = Callable[[Tensor, Tensor, Tensor], Tensor]  # as filters.draw


@dataclass(slots=True)
class SlotState:
    """The sampling params and state of one slot."""

    sampling: SamplingParams
    seed: int
    num_prompt: int
    tokens: list[int]
    rules: LogitRules | None  # None: the logits are not changed
    counts: Tensor | None = None  # [vocabulary] of generated tokens; None: no penalties
    seen: Tensor | None = None
    grammar: Grammar | None = None
    special: bool = field(init=False)  # penalties, biases or a grammar change its logits
    scored: bool = field(init=False)  # log probabilities are requested

    def __post_init__(self) -> None:
        self.special = self.rules is not None
        self.scored = self.sampling.logprobs is not None


class Sampler:
    """Owns the sampling state of all slots."""

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        threshold: float | None = None,
        draw: Draw = filters.draw,
    ) -> None:
        """`threshold`: of typical acceptance; None: a draft token is accepted only if sampled."""
        self.threshold = threshold
        self._draw = draw
        self._vocab_size = vocab_size
        self._device = device
        self.grammars: Matchers | None = None  # None: no structured outputs
        self._slots: dict[int, SlotState] = {}

    def storages(self) -> Iterator[Held]:
        for state in self._slots.values():
            yield from held("tables", state.counts, state.seen)
            if state.rules is not None:
                yield from state.rules.storages()

    def admit(self, new: SlotInit) -> None:
        """Initialise a slot from a request and the tokens that it generated before a preemption."""
        params = new.sampling
        counts = seen = None
        if params.has_penalties:
            tokens = torch.tensor(new.tokens, device=self._device)
            counts = torch.bincount(tokens[new.num_prompt :], minlength=self._vocab_size)
            seen = torch.bincount(tokens, minlength=self._vocab_size) > 0
        rules = None
        if params.changes_logits:
            rules = LogitRules(
                params, stop_ids=new.stop_ids, vocab_size=self._vocab_size, device=self._device
            )
        self._slots[new.slot] = SlotState(
            sampling=params,
            seed=new.seed,
            num_prompt=new.num_prompt,
            tokens=list(new.tokens),
            rules=rules,
            counts=counts,
            seen=seen,
            grammar=open_grammar(self.grammars, new),
        )

    def forget(self, slot: int) -> None:
        self._slots.pop(slot, None)

    def tokens(self, slot: int) -> list[int]:
        return self._slots[slot].tokens

    def sample(
        self, logits: Tensor, slots: Sequence[int]
    ) -> tuple[list[int], list[list[TokenLogprob] | None]]:
        """Sample a token per row of logits [rows, vocabulary]; also logprobs if requested."""
        states = [self._slots[slot] for slot in slots]
        scores = logits
        if any(state.special for state in states):
            changed = [
                self._change(row, state, state.rules) if state.rules is not None else row
                for row, state in zip(logits, states, strict=True)
            ]
            scores = torch.stack(changed)
        tokens = self._choose(scores, states, [len(state.tokens) for state in states])
        for state, token in zip(states, tokens, strict=True):
            self._record(state, token)
        return tokens, self._logprobs(logits, states, tokens)

    def is_plain(self, slot: int) -> bool:
        """Whether a token depends only on logits, seed and position, without logprobs."""
        state = self._slots[slot]
        return not state.special and not state.scored

    def draw(self, logits: Tensor, slots: Sequence[int], positions: Sequence[int]) -> list[int]:
        """Sample the tokens at `positions` of plain slots. Changes no state.

        Call `accept` with the accepted tokens.
        """
        return self._choose(logits, [self._slots[slot] for slot in slots], positions)

    def probabilities(self, logits: Tensor, slots: Sequence[int]) -> Tensor:
        """The sampling distributions of plain, non-greedy slots."""
        params = self._params([self._slots[slot] for slot in slots])
        return filters.apply_temperature(logits, params).softmax(dim=-1)

    def is_greedy(self, slot: int) -> bool:
        return self._slots[slot].sampling.greedy

    def _choose(
        self, scores: Tensor, states: list[SlotState], positions: Sequence[int]
    ) -> list[int]:
        if all(state.sampling.greedy for state in states):
            return scores.argmax(dim=-1).tolist()
        keys = [filters.key(m.seed, at) for m, at in zip(states, positions, strict=True)]
        return self._draw(scores, self._params(states), torch.tensor(keys)).tolist()

    def all_greedy(self, slots: Sequence[int]) -> bool:
        """Whether every row takes the argmax of its logits, without logprobs."""
        states = [self._slots[slot] for slot in slots]
        return all(m.sampling.greedy and not m.special and not m.scored for m in states)

    def accept(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """Record tokens that were sampled outside this class."""
        for slot, token in zip(slots, tokens, strict=True):
            self._record(self._slots[slot], token)

    def _change(self, logits: Tensor, state: SlotState, rules: LogitRules) -> Tensor:
        """Apply bias, penalties, bad words and grammar to the logits of one row."""
        params = state.sampling
        scores = rules.add_bias(logits)
        if state.counts is not None and state.seen is not None:
            scores = filters.penalise(
                scores,
                state.counts,
                seen=state.seen,
                repetition=params.repetition_penalty,
                frequency=params.frequency_penalty,
                presence=params.presence_penalty,
            )
        rules.mask_continuations(scores, state.tokens, state.num_prompt)
        if state.grammar is not None:
            scores = state.grammar.mask(scores, logits)
        return scores

    def _params(self, states: list[SlotState]) -> Tensor:
        """The params tensor of filters.draw."""
        params = [state.sampling for state in states]
        return torch.tensor(
            [
                (0.0 if p.greedy else p.temperature, max(0, p.top_k), p.top_p, p.min_p)
                for p in params
            ],
            dtype=torch.float64,
        )

    def _record(self, state: SlotState, token: int) -> None:
        state.tokens.append(token)
        if state.grammar is not None:
            state.grammar.take(token)
        if state.counts is not None and state.seen is not None:
            state.counts[token] += 1
            state.seen[token] = True

    def _logprobs(
        self, logits: Tensor, states: list[SlotState], tokens: list[int]
    ) -> list[list[TokenLogprob] | None]:
        found: list[list[TokenLogprob] | None] = [None] * len(tokens)
        for i, state in enumerate(states):
            count = state.sampling.logprobs
            if count is not None:
                found[i] = score_tokens(logits[i : i + 1], [tokens[i]], count)
        return found


def draw_with(ops: Ops) -> Draw:
    """The native sampling function if operations are native, else the reference."""
    return ops.native.sample if ops.is_native and ops.native is not None else filters.draw


class Scores(NamedTuple):
    """Log probabilities of one token per row, as tensors."""

    own: Tensor  # [rows]
    rank: Tensor  # [rows]: 1 is the most likely
    top: Tensor  # [rows, num_top]
    top_ids: Tensor  # [rows, num_top]

    def tolist(self, tokens: Sequence[int]) -> list[TokenLogprob]:
        """Convert for the given tokens; waits for the device."""
        columns = [each.tolist() for each in self]
        return [
            TokenLogprob(
                token=token, logprob=own, rank=rank, top=list(zip(top_ids, top, strict=True))
            )
            for token, own, rank, top, top_ids in zip(tokens, *columns, strict=True)
        ]


def score_rows(logits: Tensor, tokens: Tensor, num_top: int) -> Scores:
    """Score one token per row, and the `num_top` most likely tokens (-1: all)."""
    logprobs = logits.float().log_softmax(dim=-1)
    own = logprobs.gather(-1, tokens[:, None].long())
    ranks = (logprobs > own).sum(dim=-1) + 1
    num_top = logits.shape[-1] if num_top < 0 else min(num_top, logits.shape[-1])
    top, ids = logprobs.topk(num_top, dim=-1)
    return Scores(own[:, 0], ranks, top=top, top_ids=ids)


def score_tokens(logits: Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Log probability and rank of one token per row, and the `num_top` most likely tokens."""
    return score_rows(logits, torch.tensor(tokens, device=logits.device), num_top).tolist(tokens)
