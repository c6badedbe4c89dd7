"""Sampling on CUDA: wishes lie on the device by slot, tokens stay there, and no step waits for them.

What the kernels do not know (penalties, forbidden words, grammars, scores) is drawn by the plain sampler from
the same logits, for those rows alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from windlass.core.sampling import SamplingParams
from windlass.core.types import RowResult, SlotInit, TokenLogprob
from windlass.runner.sampler import Sampler
from windlass.runner.slots import SlotTables, to_device
from windlass.runner.verify import SampleRequest, sample_in_turn


def _needs_host_sampler(params: SamplingParams) -> bool:
    scored = params.logprobs is not None or params.prompt_logprobs is not None
    return scored or params.changes_logits


class DeviceSampler:
    """Owns the wishes and seeds by slot on the device, and who needs the plain sampler."""

    def __init__(self, slots: SlotTables, plain: Sampler) -> None:
        count, device = slots.num_slots + 1, slots.device
        self._slots = slots
        self._plain = plain
        self._special: set[int] = set()
        self.params = torch.zeros((count, 4), dtype=torch.float32, device=device)
        self.seeds = torch.zeros(count, dtype=torch.int64, device=device)

    def admit(self, admissions: list[SlotInit]) -> None:
        """Send the wishes of requests that got a slot."""
        if not admissions:
            return
        rows, seeds = [], []
        for new in admissions:
            params = new.sampling
            inverse_temperature = 0.0 if params.greedy else 1.0 / params.temperature
            rows.append(
                (inverse_temperature, float(max(0, params.top_k)), params.top_p, params.min_p)
            )
            seeds.append(new.seed & (2**62 - 1))
            if _needs_host_sampler(params):
                self._special.add(new.slot)
                self._plain.admit(new)
        device = self.params.device
        at = to_device(np.array([new.slot for new in admissions]), device)
        self.params[at] = to_device(np.array(rows, dtype=np.float32), device)
        self.seeds[at] = to_device(np.array(seeds), device)

    def forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if slot in self._special:
                self._special.discard(slot)
                self._plain.forget(slot)

    def special(self, slots: Sequence[int]) -> list[int]:
        """Which of the rows with these slots must be drawn by the plain sampler."""
        if not self._special:
            return []
        return [i for i, slot in enumerate(slots) if slot in self._special]

    def draw(self, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """A token for every row, on the device, remembered as the slot's last."""
        from windlass.kernels.triton.sample import sample

        return sample(logits, self.params, self.seeds, slots, positions, self._slots.last)

    @property
    def uses_typical_acceptance(self) -> bool:
        """Whether guesses may be kept that were not sampled."""
        return self._plain.threshold is not None

    def keep_typical(self, logits: Tensor, slots: Tensor, guesses: Tensor, sampled: Tensor) -> None:
        """Put guesses (-1: none) that are likely enough in the place of samples."""
        from windlass.kernels.triton.typical import keep_typical

        assert self._plain.threshold is not None
        keep_typical(logits, self.params, slots, guesses, sampled, self._plain.threshold)

    def resample(
        self, logits: Tensor, tokens: Tensor, slots: Sequence[int], special: list[int]
    ) -> dict[int, list[TokenLogprob] | None]:
        """Draw the special rows again, in place; waits for them. Returns scores by row."""
        chosen = [slots[i] for i in special]
        drawn, scores = self._plain.sample(logits[special].float(), chosen)
        fresh = torch.tensor(drawn, dtype=torch.int32, device=tokens.device)
        tokens[special] = fresh
        self._slots.last[chosen] = fresh
        return dict(zip(special, scores, strict=True))

    def resample_row(self, logits: Tensor, requests: SampleRequest) -> RowResult:
        """Draw one special row again, guess by guess; waits for it."""
        result = sample_in_turn(self._plain, logits.float(), requests)
        self._slots.last[requests.slot] = result.tokens[-1]
        return result
