"""From logits to tokens: each row by its own request's wishes.

Keeps what sampling needs to remember per slot (counts for penalties, the last tokens for forbidden
words). The mathematics is in filters.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from windlass.core.sampling import SamplingParams
from windlass.core.types import SlotInit, TokenLogprob
from windlass.kernels.ops import Ops
from windlass.runner import filters
from windlass.runner.grammar import Grammar, Matchers, open_grammar
from windlass.runner.logit_rules import LogitRules

Draw = Callable[[Tensor, Tensor, Tensor], Tensor]  # as filters.draw


@dataclass(slots=True)
class _Memory:
    """What one slot's request has seen and wants."""

    sampling: SamplingParams
    seed: int
    num_prompt: int
    tokens: list[int]
    rules: LogitRules | None  # None: the logits stay as they are
    counts: Tensor | None = None  # [vocabulary] of generated tokens; None: no penalties
    seen: Tensor | None = None
    grammar: Grammar | None = None
    special: bool = field(init=False)  # whether its logits are changed before temperature
    scored: bool = field(init=False)  # whether log probabilities are wanted

    def __post_init__(self) -> None:
        self.special = self.rules is not None
        self.scored = self.sampling.logprobs is not None


class Sampler:
    """Owns the memory of all slots."""

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        threshold: float | None = None,
        draw: Draw = filters.draw,
    ) -> None:
        """`threshold` of typical acceptance, where guesses may be kept that were not sampled."""
        self.threshold = threshold
        self._draw = draw
        self._vocab_size = vocab_size
        self._device = device
        self.grammars: Matchers | None = None  # None: outputs may have any form
        self._slots: dict[int, _Memory] = {}

    def admit(self, new: SlotInit) -> None:
        """Remember a request's wishes, and what it has generated before a preemption."""
        params = new.sampling
        counts = seen = None
        if params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty:
            tokens = torch.tensor(new.tokens, device=self._device)
            counts = torch.bincount(tokens[new.num_prompt :], minlength=self._vocab_size)
            seen = torch.bincount(tokens, minlength=self._vocab_size) > 0
        rules = None
        if params.changes_logits:
            rules = LogitRules(
                params, stop_ids=new.stop_ids, vocab_size=self._vocab_size, device=self._device
            )
        self._slots[new.slot] = _Memory(
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

    def num_prompt_scores(self, slot: int) -> int | None:
        """How many alternatives of each prompt token are scored; None: the prompt is not."""
        memory = self._slots.get(slot)
        return memory.sampling.prompt_logprobs if memory is not None else None

    def tokens(self, slot: int) -> list[int]:
        return self._slots[slot].tokens

    def num_prompt(self, slot: int) -> int:
        return self._slots[slot].num_prompt

    def sample(
        self, logits: Tensor, slots: Sequence[int]
    ) -> tuple[list[int], list[list[TokenLogprob] | None]]:
        """One token for each row of logits [rows, vocabulary], and its scores where asked for."""
        memories = [self._slots[slot] for slot in slots]
        scores = logits
        if any(memory.special for memory in memories):
            changed = [
                self._change(row, memory, memory.rules) if memory.rules is not None else row
                for row, memory in zip(logits, memories, strict=True)
            ]
            scores = torch.stack(changed)
        tokens = self._choose(scores, memories, [len(memory.tokens) for memory in memories])
        for memory, token in zip(memories, tokens, strict=True):
            self._remember(memory, token)
        return tokens, self._logprobs(logits, memories, tokens)

    def is_plain(self, slot: int) -> bool:
        """Whether a token depends on the logits, the seed and the position alone, and is not scored."""
        memory = self._slots[slot]
        return not memory.special and not memory.scored

    def draw(self, logits: Tensor, slots: Sequence[int], ahead: Sequence[int]) -> list[int]:
        """Tokens `ahead` of the next one, for plain slots, as if all before were known.

        Nothing is remembered: `accept` says what came of it.
        """
        memories = [self._slots[slot] for slot in slots]
        places = [len(memory.tokens) + on for memory, on in zip(memories, ahead, strict=True)]
        return self._choose(logits, memories, places)

    def probabilities(self, logits: Tensor, slots: Sequence[int]) -> Tensor:
        """What plain slots that are not greedy draw from, row by row."""
        params = self._params([self._slots[slot] for slot in slots])
        return filters.apply_temperature(logits, params).softmax(dim=-1)

    def is_greedy(self, slot: int) -> bool:
        return self._slots[slot].sampling.greedy

    def _choose(self, scores: Tensor, memories: list[_Memory], places: list[int]) -> list[int]:
        if all(memory.sampling.greedy for memory in memories):
            return scores.argmax(dim=-1).tolist()
        keys = [filters.key(m.seed, place) for m, place in zip(memories, places, strict=True)]
        return self._draw(scores, self._params(memories), torch.tensor(keys)).tolist()

    def all_greedy(self, slots: Sequence[int]) -> bool:
        """Whether each row's token is that of its largest logit, and nothing else is asked for."""
        memories = [self._slots[slot] for slot in slots]
        return all(m.sampling.greedy and not m.special and not m.scored for m in memories)

    def accept(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """Remember tokens that were chosen elsewhere."""
        for slot, token in zip(slots, tokens, strict=True):
            self._remember(self._slots[slot], token)

    def _change(self, logits: Tensor, memory: _Memory, rules: LogitRules) -> Tensor:
        """Scores of one row: its logits with the request's bias, penalties, lists and grammar."""
        params = memory.sampling
        scores = rules.add_bias(logits)
        if memory.counts is not None and memory.seen is not None:
            scores = filters.penalise(
                scores,
                memory.counts,
                memory.seen,
                params.repetition_penalty,
                params.frequency_penalty,
                params.presence_penalty,
            )
        rules.mask_continuations(scores, memory.tokens, memory.num_prompt)
        if memory.grammar is not None:
            scores = memory.grammar.rule_out(scores, logits)
        return scores

    def _params(self, memories: list[_Memory]) -> Tensor:
        """As filters.draw reads them."""
        params = [memory.sampling for memory in memories]
        return torch.tensor(
            [
                (0.0 if w.greedy else w.temperature, max(0, w.top_k), w.top_p, w.min_p)
                for w in params
            ],
            dtype=torch.float64,
        )

    def _remember(self, memory: _Memory, token: int) -> None:
        memory.tokens.append(token)
        if memory.grammar is not None:
            memory.grammar.take(token)
        if memory.counts is not None and memory.seen is not None:
            memory.counts[token] += 1
            memory.seen[token] = True

    def _logprobs(
        self, logits: Tensor, memories: list[_Memory], tokens: list[int]
    ) -> list[list[TokenLogprob] | None]:
        found: list[list[TokenLogprob] | None] = [None] * len(tokens)
        for i, memory in enumerate(memories):
            count = memory.sampling.logprobs
            if count is not None:
                found[i] = score_tokens(logits[i : i + 1], [tokens[i]], count)
        return found


def draw_with(ops: Ops) -> Draw:
    """What draws where these operations compute: the native library's, or the plain version."""
    if not ops.is_native:
        return filters.draw
    from windlass.kernels.native.ops import sample

    return sample


def score_tokens(logits: Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Log probability and rank of one token per row of logits, and the `num_top` likeliest."""
    logprobs = logits.float().log_softmax(dim=-1)
    picked = torch.tensor(tokens, device=logits.device)
    own = logprobs.gather(-1, picked[:, None])
    ranks = (logprobs > own).sum(dim=-1) + 1
    num_top = logits.shape[-1] if num_top < 0 else min(num_top, logits.shape[-1])
    values, ids = logprobs.topk(num_top, dim=-1)
    return [
        TokenLogprob(token, logprob, rank, list(zip(top_ids, top_values, strict=True)))
        for token, logprob, rank, top_ids, top_values in zip(
            tokens, own[:, 0].tolist(), ranks.tolist(), ids.tolist(), values.tolist(), strict=True
        )
    ]
