"""Sampling on CUDA without synchronisation: sampling params and sampled tokens stay on the device.

Rows with penalties, bad words, grammars or logprobs, which the kernels do not support, are sampled
by the host sampler from the same logits.
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
    """Owns sampling params and seeds on the device, and the set of slots for the host sampler."""

    def __init__(self, slots: SlotTables, host: Sampler) -> None:
        count, device = slots.num_slots + 1, slots.device
        self._slots = slots
        self._host = host
        self._special: set[int] = set()
        self.params = torch.zeros((count, 4), dtype=torch.float32, device=device)
        self.seeds = torch.zeros(count, dtype=torch.int64, device=device)

    def admit(self, admissions: list[SlotInit]) -> None:
        """Copy the sampling params of admitted requests to the device."""
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
                self._host.admit(new)
        device = self.params.device
        at = to_device(np.array([new.slot for new in admissions]), device)
        self.params[at] = to_device(np.array(rows, dtype=np.float32), device)
        self.seeds[at] = to_device(np.array(seeds), device)

    def forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if slot in self._special:
                self._special.discard(slot)
                self._host.forget(slot)

    def special(self, slots: Sequence[int]) -> list[int]:
        """Indices of the rows that the host sampler must sample."""
        if not self._special:
            return []
        return [i for i, slot in enumerate(slots) if slot in self._special]

    def draw(self, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Sample a token per row on the device and store it as the slot's last token."""
        from windlass.kernels.triton.sample import sample

        return sample(logits, self.params, self.seeds, slots, positions, self._slots.last)

    @property
    def uses_typical_acceptance(self) -> bool:
        """Whether draft tokens can be accepted that were not sampled."""
        return self._host.threshold is not None

    def keep_typical(self, logits: Tensor, slots: Tensor, drafts: Tensor, sampled: Tensor) -> None:
        """Replace samples, in place, by draft tokens (-1: none) that are likely enough."""
        from windlass.kernels.triton.typical import keep_typical

        assert self._host.threshold is not None
        keep_typical(logits, self.params, slots, drafts, sampled, self._host.threshold)

    def resample(
        self, logits: Tensor, tokens: Tensor, slots: Sequence[int], special: list[int]
    ) -> dict[int, list[TokenLogprob] | None]:
        """Sample the special rows on the host, in place; synchronises. Returns logprobs by row."""
        chosen = [slots[i] for i in special]
        drawn, scores = self._host.sample(logits[special].float(), chosen)
        fresh = torch.tensor(drawn, dtype=torch.int32, device=tokens.device)
        tokens[special] = fresh
        self._slots.last[chosen] = fresh
        return dict(zip(special, scores, strict=True))

    def resample_row(self, logits: Tensor, request: SampleRequest) -> RowResult:
        """Verify one special row on the host, position by position; synchronises."""
        result = sample_in_turn(self._host, logits.float(), request)
        self._slots.last[request.slot] = result.tokens[-1]
        return result
