"""What the captured graphs of a pipeline stage read and return.

Hidden states are exchanged between graph replays, not inside the graphs: a graph is padded to a fixed
size, while the stages exchange exactly the plan's tokens, even if their executors differ.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from windlass.kernels.storages import Held, held
from windlass.runner.cuda.graphs import Backend, CudaBackend, Graph, StagedInputs
from windlass.runner.device_sampler import DeviceSampler
from windlass.runner.eager import RunnerParts
from windlass.runner.executor import PASSED_ON, PendingStep, SampledStep
from windlass.runner.inputs import StepInputs


class GraphStage:
    """Owns the hidden states that the graphs of a stage after the first read."""

    def __init__(self, parts: RunnerParts, max_tokens: int, backend: Backend | None = None) -> None:
        """`max_tokens`: of the largest graph. `backend`: for a stage that does not sample."""
        sampling, self._pipeline = parts.sampling, parts.pipeline
        self.sampler = sampling if isinstance(sampling, DeviceSampler) else None
        self.backend = backend or CudaBackend() if self.sampler is None else self.sampler.backend
        self.is_last = self._pipeline.is_last
        self._pooler = parts.pooler
        self._device = parts.slots.device
        self._hidden: Tensor | None = None
        if not self._pipeline.is_first:
            self._hidden = self._pipeline.empty(max_tokens).zero_()  # padding rows read it, too

    @property
    def is_whole(self) -> bool:
        """Whether the stage computes all layers."""
        return self._hidden is None and self.is_last

    def storages(self) -> Iterator[Held]:
        return held("tables", self._hidden)

    def staged_inputs(self, size: int) -> StagedInputs:
        """Input buffers: one on the host for every plan that may be in flight."""
        return StagedInputs(
            self.backend, size, device=self._device, num_host=max(2, self._pipeline.num_stages)
        )

    def inputs(self, ids: Tensor) -> Tensor:
        """The network's inputs: token ids, or a copy of the hidden states, which layers overwrite."""
        return ids if self._hidden is None else self._hidden[: len(ids)].clone()

    def run(self, graph: Graph, inputs: StepInputs) -> PendingStep:
        """Replay a graph whose other inputs are in place."""
        count = inputs.shape.num_tokens
        if self._hidden is not None:
            self._pipeline.receive_into(self._hidden[:count])
        graph.replay()
        if self.sampler is not None:
            tokens, logits, *sampled = graph.outputs
            vectors = None
            if inputs.shape.pools:
                vectors = self._pooler.start(inputs, sampled[0], gathered=True)
            return SampledStep(inputs, self.sampler.collect(inputs, tokens, logits), vectors)
        (hidden,) = graph.outputs
        self._pipeline.send(hidden[:count].clone())  # the next replay overwrites it
        return PASSED_ON
