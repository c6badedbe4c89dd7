"""Sampling on CUDA without waiting for the device: sampling params and sampled tokens stay there.

Captured graphs sample every row by the params that kernels read by slot. Rows with penalties, token
lists, grammars or logprobs ("special" rows) are sampled again behind the graph, in one batch, before
the next step reads the tokens. What such a row may sample can depend on its last token (grammars,
bad words of several tokens). While that token is in flight, the second sampling is deferred: it is
launched when the token arrives, and the device computes the network meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windlass.core.sampling import SamplingParams
from windlass.core.types import RowResult, SlotInit, StepPlan, TokenLogprob
from windlass.kernels.batch import StepBatch
from windlass.kernels.storages import Held, held
from windlass.runner.cuda.graphs import Backend, CudaBackend, HostCopy
from windlass.runner.executor import CompletedSamples, Samples
from windlass.runner.grammar import Grammar, Matchers, open_grammar
from windlass.runner.inputs import StepInputs
from windlass.runner.logit_rules import LogitRules
from windlass.runner.sampler import Scores, score_rows
from windlass.runner.slots import SlotTables, to_device
from windlass.runner.verify import SampleRequest, keep


@dataclass(frozen=True, slots=True)
class SamplingKernels:
    """The kernels of sampling; kernels/triton has them, and their contracts."""

    sample: Callable[..., Tensor]
    change_logits: Callable[..., Tensor]
    count_tokens: Callable[..., None]
    keep_typical: Callable[..., None]


def _triton_kernels() -> SamplingKernels:
    from windlass.kernels.triton.logits import change_logits, count_tokens
    from windlass.kernels.triton.sample import sample
    from windlass.kernels.triton.typical import keep_typical

    return SamplingKernels(
        sample=sample,
        change_logits=change_logits,
        count_tokens=count_tokens,
        keep_typical=keep_typical,
    )


def _is_special(sampling: SamplingParams) -> bool:
    """Whether rows with these params are sampled again behind the graph."""
    return sampling.changes_logits or sampling.logprobs is not None


@dataclass(slots=True)
class _SpecialSlot:
    """The state of a slot whose logits change before sampling, or whose logprobs are requested."""

    sampling: SamplingParams
    num_prompt: int
    tokens: list[int]  # that the host has
    rules: LogitRules | None
    counts: Tensor | None  # [vocabulary]: 2 * count of generated tokens + whether in the prompt
    grammar: Grammar | None
    num_in_flight: int = 0  # sampled tokens that the host does not have yet

    @property
    def changes_logits(self) -> bool:
        return self.rules is not None

    @property
    def reads_last_token(self) -> bool:
        """Whether the allowed tokens depend on the last token itself, not only on its position."""
        if self.grammar is not None and self.grammar.reads(self.num_in_flight):
            return True
        return self.rules is not None and self.rules.has_bad_words

    def mask(self, position: int) -> NDArray[Any] | None:
        """A packed bitmask of the tokens allowed at a position; None allows all tokens."""
        if self.rules is None:
            return None
        banned = self.rules.continuations(self.tokens, position - self.num_prompt)
        allowed = None if self.grammar is None else self.grammar.allowed()
        if not banned:
            return allowed
        bits = np.full(self.rules.num_mask_bytes, 255, np.uint8)
        if allowed is not None:
            count = min(len(allowed), len(bits))
            bits[:count] = allowed[:count]
            bits[count:] = 0
        for ids in banned:
            np.bitwise_and.at(bits, ids >> 3, ~(1 << (ids & 7)).astype(np.uint8))
        # A grammar takes precedence over the other rules.
        return allowed if allowed is not None and not bits.any() else bits

    def accept(self, token: int) -> None:
        """Append a sampled token that was copied to the host."""
        self.tokens.append(token)
        if self.grammar is not None:
            self.grammar.take(token)


class _SpecialRow(NamedTuple):
    row: int  # index of its logits and of its token
    slot: int
    position: int  # of the token to sample
    state: _SpecialSlot


class DeviceSampler:
    """Owns sampling params and seeds on the device, and the states of special slots."""

    def __init__(
        self,
        slots: SlotTables,
        vocab_size: int,
        threshold: float | None = None,
        backend: Backend | None = None,
        kernels: SamplingKernels | None = None,
    ) -> None:
        """`threshold`: of typical acceptance; None: a draft token is accepted only if sampled."""
        self._slots = slots
        self.device = slots.device
        self._vocab_size = vocab_size
        self._threshold = threshold
        self.backend = backend or CudaBackend()
        self._kernels = kernels or _triton_kernels()
        self.grammars: Matchers | None = None
        count, device = slots.num_slots + 1, slots.device
        self._params = torch.zeros((count, 4), dtype=torch.float32, device=device)
        self._seeds = torch.zeros(count, dtype=torch.int64, device=device)
        self._penalties = torch.zeros((count, 3), dtype=torch.float32, device=device)
        self._tables = torch.zeros((count, 2), dtype=torch.int64, device=device)  # addresses
        self._special: dict[int, _SpecialSlot] = {}
        self._latest: DeviceSamples | None = None
        self._deferred: DeviceSamples | None = None

    def storages(self) -> Iterator[Held]:
        yield from held("tables", self._params, self._seeds, self._penalties, self._tables)
        for state in self._special.values():
            yield from held("tables", state.counts)
            if state.rules is not None:
                yield from state.rules.storages()

    # ---- slots ---------------------------------------------------------------------------------

    def apply(self, plan: StepPlan) -> None:
        """Forget freed slots, and copy the sampling params of admitted requests to the device."""
        if self._deferred is not None:  # its samples must be launched before the next step
            self._deferred.launch()
        for slot in plan.freed:
            self._special.pop(slot, None)
        for new in plan.admitted:
            self._special.pop(new.slot, None)
        if not plan.admitted:
            return
        params, seeds = [], []
        for new in plan.admitted:
            sampling = new.sampling
            inverse_temperature = 0.0 if sampling.greedy else 1.0 / sampling.temperature
            top_k = float(max(0, sampling.top_k))
            params.append((inverse_temperature, top_k, sampling.top_p, sampling.min_p))
            seeds.append(new.seed & (2**62 - 1))
        at = to_device(np.array([new.slot for new in plan.admitted]), self.device)
        self._params[at] = to_device(np.array(params, dtype=np.float32), self.device)
        self._seeds[at] = to_device(np.array(seeds), self.device)
        self._admit_special([new for new in plan.admitted if _is_special(new.sampling)])

    def _admit_special(self, admitted: list[SlotInit]) -> None:
        if not admitted:
            return
        tables = [self._admit(new) for new in admitted]
        penalties = [
            (each.repetition_penalty, each.frequency_penalty, each.presence_penalty)
            for each in (new.sampling for new in admitted)
        ]
        at = to_device(np.array([new.slot for new in admitted]), self.device)
        self._penalties[at] = to_device(np.array(penalties, dtype=np.float32), self.device)
        self._tables[at] = to_device(np.array(tables, dtype=np.int64), self.device)

    def _admit(self, new: SlotInit) -> tuple[int, int]:
        """Keep the state of a special slot; returns the addresses of its tables."""
        sampling, rules = new.sampling, None
        if sampling.changes_logits:
            rules = LogitRules(
                sampling, stop_ids=new.stop_ids, vocab_size=self._vocab_size, device=self.device
            )
        state = self._special[new.slot] = _SpecialSlot(
            sampling=sampling,
            num_prompt=new.num_prompt,
            tokens=list(new.tokens),
            rules=rules,
            counts=self._counts(new) if sampling.has_penalties else None,
            grammar=open_grammar(self.grammars, new),
        )
        bias = None if rules is None else rules.bias
        return tuple(0 if each is None else each.data_ptr() for each in (bias, state.counts))  # type: ignore[return-value]

    def _counts(self, new: SlotInit) -> Tensor:
        tokens = to_device(np.array(new.tokens, dtype=np.int64), self.device)
        counts = torch.zeros(self._vocab_size, dtype=torch.int32, device=self.device)
        counts[tokens[: new.num_prompt]] = 1
        output = tokens[new.num_prompt :]
        return counts.index_add_(0, output, torch.full_like(output, 2, dtype=torch.int32))

    # ---- sampling ------------------------------------------------------------------------------

    def draw(self, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Sample a token per row on the device and store it as the slot's last token."""
        last = self._slots.last
        return self._kernels.sample(logits, self._params, self._seeds, slots, positions, last)

    @property
    def uses_typical_acceptance(self) -> bool:
        """Whether draft tokens can be accepted that were not sampled."""
        return self._threshold is not None

    def keep_typical(self, logits: Tensor, slots: Tensor, drafts: Tensor, sampled: Tensor) -> None:
        """Replace samples, in place, by draft tokens (-1: none) that are likely enough."""
        assert self._threshold is not None
        self._kernels.keep_typical(logits, self._params, slots, drafts, sampled, self._threshold)

    def finish(
        self, inputs: StepInputs, logits: Tensor, batch: StepBatch, indices: Tensor
    ) -> Samples:
        slots, positions = batch.token_slots[indices], batch.positions[indices]
        drawn = self.draw(logits, slots, positions)
        if not inputs.shape.has_drafts:
            return self.collect(inputs, drawn, logits)
        if self.uses_typical_acceptance:
            drafts = [token for each in inputs.requests for token in (*each.drafts, -1)]
            on_device = to_device(np.array(drafts, dtype=np.int32), self.device)
            self.keep_typical(logits, slots, on_device, drawn)
        return CompletedSamples(self._verify(inputs, logits, drawn))

    def _verify(self, inputs: StepInputs, logits: Tensor, drawn: Tensor) -> list[RowResult]:
        """Accept the samples of all rows on the host; waits for the device."""
        sampled, first, results = drawn.tolist(), 0, []
        for each in inputs.requests:
            end = first + each.num_positions
            if each.slot in self._special:
                results.append(self.sample_in_turn(logits[first:end], each))
            else:
                own = sampled[first:end]
                target_tokens = tuple(own) if each.drafts else ()
                results.append(RowResult(keep(own, each.drafts), target_tokens=target_tokens))
            first = end
        last = [result.tokens[-1] for result in results]
        self._slots.set_last([each.slot for each in inputs.requests], last)
        return results

    def collect(self, inputs: StepInputs, tokens: Tensor, logits: Tensor) -> Samples:
        """Copy the tokens of a step to the host, after sampling its special rows again.

        `tokens` [rows and padding] or [rows and padding, 1 + drafts] and `logits` may be buffers of
        a captured graph: a deferred sampling reads them before the graph is replayed.
        """
        rows: list[_SpecialRow] = []
        if inputs.shape.special_sampling:
            for i, each in enumerate(inputs.requests):
                state = self._special.get(each.slot)
                if state is not None:
                    rows.append(_SpecialRow(i, each.slot, position=each.position, state=state))
        samples = DeviceSamples(
            self, count=inputs.shape.num_sampled, tokens=tokens, logits=logits, special=rows
        )
        previous, self._latest = self._latest, samples
        if any(row.state.reads_last_token and row.state.num_in_flight for row in rows):
            assert previous is not None
            self._deferred = samples
            samples.defer(previous)
        else:
            samples.launch()
        for row in rows:
            row.state.num_in_flight += 1
        return samples

    def launched(self, samples: DeviceSamples) -> None:
        """Note that a deferred sampling was launched."""
        if self._deferred is samples:
            self._deferred = None

    def arrived(self, samples: DeviceSamples) -> None:
        """Launch the sampling that was deferred until these samples arrived."""
        if self._deferred is not None and self._deferred.waits_for(samples):
            self._deferred.launch()

    @torch.inference_mode()
    def sample_special(self, rows: Sequence[_SpecialRow], logits: Tensor) -> Tensor:
        """Sample rows whose logits change, and count the tokens for penalties; does not wait."""
        masks, mask_rows = self._masks(rows)
        numbers = np.array(
            [
                [row.row for row in rows],
                [row.slot for row in rows],
                [row.position - 1 for row in rows],  # kernels get the position of the last token
                mask_rows,
            ],
            dtype=np.int32,
        )
        at, slots, positions, of_mask = to_device(numbers, self.device)
        scores = self._kernels.change_logits(
            logits,
            at,
            slots=slots,
            mask_rows=of_mask,
            tables=self._tables,
            penalties=self._penalties,
            masks=masks,
        )
        if any(
            row.state.grammar and row.state.rules and row.state.rules.bias is not None
            for row in rows
        ):
            # A grammar takes precedence over a bias that leaves none of its tokens.
            none = torch.zeros_like(self._tables)
            strict = self._kernels.change_logits(
                logits,
                at,
                slots=slots,
                mask_rows=of_mask,
                tables=none,
                penalties=self._penalties,
                masks=masks,
            )
            scores = torch.where(scores.amax(-1, keepdim=True) > float("-inf"), scores, strict)
        tokens = self.draw(scores, slots, positions)
        self._kernels.count_tokens(tokens, slots, self._tables)
        return tokens

    def _masks(self, rows: Sequence[_SpecialRow]) -> tuple[Tensor, list[int]]:
        """The masks of the rows that have one, [masks, words], and the mask of each row (-1: none)."""
        followed = [row.state.grammar.matcher for row in rows if row.state.grammar is not None]
        if followed and self.grammars is not None:
            self.grammars.prefetch(followed)
        found: list[NDArray[Any]] = []
        mask_rows = []
        for row in rows:
            mask = row.state.mask(row.position)
            mask_rows.append(-1 if mask is None else len(found))
            if mask is not None:
                found.append(mask)
        words = -(-self._vocab_size // 32)
        bits = np.zeros((max(1, len(found)), 4 * words), dtype=np.uint8)
        for i, mask in enumerate(found):
            bits[i, : len(mask)] = mask[: 4 * words]
        return to_device(bits.view(np.int32), self.device), mask_rows

    @torch.inference_mode()
    def sample_in_turn(self, logits: Tensor, request: SampleRequest) -> RowResult:
        """Sample and verify a special row position by position; waits for the device."""
        state = self._special[request.slot]
        tokens: list[int] = []
        scores: list[TokenLogprob] = []
        for at in range(request.num_positions):
            row = _SpecialRow(at, request.slot, position=request.position + at, state=state)
            drawn = self.sample_special([row], logits)
            (token,) = drawn.tolist()
            tokens.append(token)
            state.accept(token)
            if state.sampling.logprobs is not None:
                own = score_rows(logits[at : at + 1], drawn, state.sampling.logprobs)
                scores += own.tolist(tokens[-1:])
            if at < len(request.drafts) and token != request.drafts[at]:
                break
        self._slots.set_last([request.slot], tokens[-1:])
        return RowResult(tokens, scores or None)

    def is_special(self, slot: int) -> bool:
        """Whether a row of this slot is sampled again behind a graph."""
        return slot in self._special


class DeviceSamples:
    """The tokens of a step while they are copied to the host."""

    def __init__(
        self,
        sampler: DeviceSampler,
        count: int,
        tokens: Tensor,
        logits: Tensor,
        special: list[_SpecialRow],
    ) -> None:
        self._sampler = sampler
        self._tokens = tokens[:count]
        self._logits = logits
        self._special = special
        self._previous: DeviceSamples | None = None
        self._host_copy: HostCopy | None = None
        self._scores: tuple[list[_SpecialRow], list[HostCopy]] | None = None
        self._results: list[RowResult] | None = None

    def defer(self, previous: DeviceSamples) -> None:
        self._previous = previous

    def waits_for(self, samples: DeviceSamples) -> bool:
        return self._previous is samples

    @torch.inference_mode()
    def launch(self) -> None:
        """Sample the special rows and start the copies to the host."""
        if self._host_copy is not None:
            return
        if self._previous is not None:
            previous, self._previous = self._previous, None
            previous.wait()
        self._sampler.launched(self)
        changed = [row for row in self._special if row.state.changes_logits]
        if changed:
            drawn = self._sampler.sample_special(changed, self._logits)
            rows = to_device(np.array([row.row for row in changed]), drawn.device)
            self._first_tokens[rows] = drawn
        self._start_scores()
        self._host_copy = self._sampler.backend.copy_to_host(self._tokens)

    @property
    def _first_tokens(self) -> Tensor:
        return self._tokens if self._tokens.dim() == 1 else self._tokens[:, 0]

    def _start_scores(self) -> None:
        """Start the copies of the logprobs that rows request."""
        scored = [row for row in self._special if row.state.sampling.logprobs is not None]
        if not scored:
            return
        rows = to_device(np.array([row.row for row in scored]), self._tokens.device)
        wanted = [row.state.sampling.logprobs or 0 for row in scored]
        num_top = -1 if min(wanted) < 0 else max(wanted)
        found = score_rows(self._logits[rows], self._first_tokens[rows], num_top)
        self._scores = scored, [self._sampler.backend.copy_to_host(each) for each in found]

    def wait(self) -> list[RowResult]:
        if self._results is not None:
            return self._results
        self.launch()
        assert self._host_copy is not None
        found = self._host_copy.wait().tolist()
        if found and isinstance(found[0], list):
            results = [RowResult(each[:1], drafts=tuple(each[1:])) for each in found]
        else:
            results = [RowResult([token]) for token in found]
        for row in self._special:
            row.state.num_in_flight -= 1
            row.state.accept(results[row.row].tokens[0])
        if self._scores is not None:
            scored, arrivals = self._scores
            own = Scores(*(each.wait() for each in arrivals))
            tokens = [results[row.row].tokens[0] for row in scored]
            for row, score in zip(scored, own.tolist(tokens), strict=True):
                num_top = row.state.sampling.logprobs
                cut = (
                    score._replace(top=score.top[:num_top])
                    if num_top is not None and num_top >= 0
                    else score
                )
                results[row.row] = results[row.row]._replace(logprobs=[cut])
        self._results = results
        self._sampler.arrived(self)
        return results
