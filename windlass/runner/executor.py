"""The interface of executors. The runner asks them in order; the first that accepts runs the step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Protocol

from windlass.core.types import RowResult, StepPlan, StepResult
from windlass.kernels.storages import Held
from windlass.lora.bank import Bank
from windlass.runner.drafter import Drafter
from windlass.runner.inputs import StepInputs, StepShape


class PendingStep(Protocol):
    """A step in flight. `wait` blocks until its tokens have arrived."""

    def wait(self) -> StepResult: ...


class CompletedStep:
    """A step whose result is already known."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        return self._result


# A pipeline stage before the last has no results.
PASSED_ON = CompletedStep(StepResult([]))


class Samples(Protocol):
    """Sampling results in row order, while they are being copied to the host."""

    def wait(self) -> list[RowResult]: ...


class CompletedSamples:
    """Samples that are already known."""

    def __init__(self, results: list[RowResult]) -> None:
        self._results = results

    def wait(self) -> list[RowResult]:
        return self._results


class Vectors(Protocol):
    """The vectors of pooled rows, by row, while they are being copied to the host."""

    def wait(self) -> Mapping[int, bytes]: ...


class SampledStep:
    """A step whose samples are being copied to the host."""

    def __init__(self, inputs: StepInputs, samples: Samples, vectors: Vectors | None) -> None:
        self._inputs = inputs
        self._samples = samples
        self._vectors = vectors

    def wait(self) -> StepResult:
        vectors = None if self._vectors is None else self._vectors.wait()
        return self._inputs.result(self._samples.wait(), vectors=vectors)


class Executor(ABC):
    """Computes steps of some shapes. Reasons of refusals are short and constant: metrics count them."""

    name: str
    max_mixed_tokens = 0  # of a mixed step that a captured graph covers
    splits_tokens = False  # whether it computes steps whose tokens are split over the ranks

    def max_draft_tokens(self, num_rows: int) -> int | None:
        """Max draft tokens per row in a step of `num_rows`; None: no limit."""
        del num_rows
        return None

    @abstractmethod
    def refuses(self, shape: StepShape) -> str | None:
        """The reason why this executor cannot compute a step of this shape; None if it can."""

    @abstractmethod
    def launch(self, inputs: StepInputs) -> PendingStep:
        """Start a step that `refuses` accepted. The runner has applied its plan to the slots."""

    @property
    def num_missing(self) -> int:
        """Graphs that `capture_next` has left to capture."""
        return 0

    def capture_next(self) -> bool:
        """Capture a graph that was left for later; False: there is none. No step may be in flight."""
        return False

    def storages(self) -> Iterator[Held]:
        """Its buffers, without the outputs of captured graphs: their memory is measured as a whole."""
        return iter(())

    def prepare(self, plan: StepPlan) -> None:
        """Called with every plan before it is applied, also if another executor runs it."""
        del plan

    def attach(self, drafter: Drafter) -> None:
        """Add a drafter, which runs in steps with a `draft_length`."""
        del drafter

    def attach_adapters(self, bank: Bank) -> None:
        """Prepare for rows with adapters, whose slots `bank` has added to the layers."""
        del bank
