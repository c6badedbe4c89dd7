"""The seam between logits and tokens: sampling, verification, logprobs and grammar masks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from windlass.core.types import RowResult, StepPlan
from windlass.kernels.batch import StepBatch
from windlass.kernels.storages import Held
from windlass.runner.executor import CompletedSamples, Samples
from windlass.runner.grammar import Matchers
from windlass.runner.inputs import StepInputs
from windlass.runner.sampler import Sampler
from windlass.runner.slots import SlotTables
from windlass.runner.verify import settle, verify


class Sampling(Protocol):
    """Owns the sampling state of all slots, and stores the last sampled token of each."""

    grammars: Matchers | None  # None: no structured outputs

    def storages(self) -> Iterator[Held]: ...

    def apply(self, plan: StepPlan) -> None:
        """Forget freed slots and initialise admitted ones."""
        ...

    def finish(
        self, inputs: StepInputs, logits: Tensor, batch: StepBatch, indices: Tensor
    ) -> Samples:
        """Sample and verify from the logits of the sampled positions, `indices` of the batch."""
        ...


class HostSampling:
    """Samples on the host, or with torch operations that the host waits for."""

    def __init__(self, sampler: Sampler, slots: SlotTables) -> None:
        self.sampler = sampler
        self._slots = slots

    @property
    def grammars(self) -> Matchers | None:
        return self.sampler.grammars

    @grammars.setter
    def grammars(self, grammars: Matchers | None) -> None:
        self.sampler.grammars = grammars

    def storages(self) -> Iterator[Held]:
        return self.sampler.storages()

    def apply(self, plan: StepPlan) -> None:
        for slot in plan.freed:
            self.sampler.forget(slot)
        for new in plan.admitted:
            self.sampler.admit(new)

    def finish(
        self, inputs: StepInputs, logits: Tensor, batch: StepBatch, indices: Tensor
    ) -> Samples:
        del batch, indices
        return CompletedSamples(self.results(inputs, logits.float()))

    def results(self, inputs: StepInputs, logits: Tensor) -> list[RowResult]:
        """Sample and verify from float32 logits."""
        return self._store(inputs, verify(self.sampler, logits, inputs.requests))

    def accept(self, inputs: StepInputs, tokens: list[int]) -> list[RowResult]:
        """Verify against the argmax of each sampled position; for steps whose rows are all greedy."""
        return self._store(inputs, settle(self.sampler, tokens, inputs.requests))

    def _store(self, inputs: StepInputs, results: list[RowResult]) -> list[RowResult]:
        last = [result.tokens[-1] for result in results]
        self._slots.set_last([each.slot for each in inputs.requests], last)
        return results
