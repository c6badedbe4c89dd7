"""Computes steps on the CPU with one recorded native program: one native call per step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from windlass.core.card import Choice
from windlass.kernels.batch import AdapterRows, LogitsIndices, Span, StepBatch
from windlass.kernels.native.ops import NativeOps, prompt_spans
from windlass.kernels.native.program import Program, ProgramInputs, ProgramLimits, record
from windlass.kernels.native.record import Unrecordable
from windlass.kernels.storages import Held
from windlass.lora.bank import Bank
from windlass.runner import device as found
from windlass.runner.eager import RunnerParts
from windlass.runner.executor import PASSED_ON, CompletedStep, Executor, PendingStep
from windlass.runner.inputs import StepInputs, StepShape
from windlass.runner.sampling import HostSampling

_WHAT = "steps"
_NUM_REHEARSED = 2  # tokens


class ProgramExecutor(Executor):
    """Owns the recorded programs and their input arrays."""

    name = "program"

    def __init__(self, parts: RunnerParts, limits: ProgramLimits) -> None:
        """Record the program. Raises Unrecordable if an operation cannot be recorded."""
        self._parts = parts
        self._limits = limits
        self._program = self._recorded()
        self._adapted: Program | None = None  # for steps with LoRA rows
        self._inputs = ProgramInputs(limits, parts.slots.tables)

    @property
    def choice(self) -> Choice:
        size = f"{self._program.num_commands} commands, {found.gib(self._program.num_bytes)}"
        return Choice(_WHAT, f"one native call ({size})", "every operation is native")

    def storages(self) -> Iterator[Held]:
        for program in (self._program, self._adapted):
            if program is not None:
                yield from program.storages()

    def attach_adapters(self, bank: Bank) -> None:
        del bank
        self._adapted = self._recorded(adapted=True)

    @torch.inference_mode()
    def _recorded(self, adapted: bool = False) -> Program:
        parts = self._parts
        # The pages of a new cache count as free until they are written for the first time.
        room = found.free_bytes(torch.device("cpu")) - parts.cache.num_bytes
        hidden = None if parts.pipeline.is_first else parts.pipeline.empty(_NUM_REHEARSED)
        return record(
            parts.workers.pool,
            partial(self._rehearse, hidden, adapted),
            self._limits,
            max(0, room),
            hidden,
        )

    def _rehearse(self, hidden: Tensor | None, adapted: bool) -> list[Tensor]:
        """A sample step for recording, of which one token is sampled: logits and tokens.

        `hidden`: of the stage before. A stage before the last returns the hidden states of all tokens.
        """
        parts = self._parts
        two = torch.zeros(_NUM_REHEARSED, dtype=torch.int32)
        whole, last = (AdapterRows(two), AdapterRows(two[:1])) if adapted else (None, None)
        batch = StepBatch(
            positions=two,
            token_slots=two,
            tables=parts.slots.tables,
            spans=[Span(0, 2, 0)],
            kv=parts.cache.layers,
            adapters=whole,
            logits_indices=LogitsIndices(two[:1], last),
        )
        with prompt_spans(parts.workers.pool, batch):
            hidden = parts.network(two if hidden is None else hidden, batch)
        if not parts.pipeline.is_last:
            return [hidden]
        logits = parts.network.logits(hidden, last)
        return [logits, NativeOps(parts.workers.pool).argmax(logits)]

    def refuses(self, shape: StepShape) -> str | None:
        if shape.adapted and self._adapted is None:
            return "no adapters were recorded"
        if shape.draft_length:
            return "heads draft in the step"
        return self._refuses_results(shape) if self._parts.pipeline.is_last else None

    def _refuses_results(self, shape: StepShape) -> str | None:
        if shape.scores_prompts or shape.needs_all_hidden:
            return "all hidden states are read"
        # Draft tokens kept from an earlier step may exceed the program's capacity.
        if shape.num_sampled > self._limits.rows:
            return "more sampled positions than recorded"
        return None

    def launch(self, inputs: StepInputs) -> PendingStep:
        program = self._program
        if inputs.shape.adapted and self._adapted is not None:
            program = self._adapted
        self._write(inputs)
        pipeline, num_tokens = self._parts.pipeline, inputs.shape.num_tokens
        if program.inputs is not None:
            program.inputs[:num_tokens] = pipeline.receive(num_tokens)
        if pipeline.is_last:
            return self._sample(program, inputs)
        program.run(self._inputs, draw=False)
        pipeline.send(program.results[0][:num_tokens].clone())  # the next step overwrites them
        return PASSED_ON

    def _sample(self, program: Program, inputs: StepInputs) -> PendingStep:
        sampling, count = self._parts.sampling, len(inputs.sampled)
        assert isinstance(sampling, HostSampling)
        logits, tokens = program.results
        greedy = sampling.sampler.all_greedy([each.slot for each in inputs.requests])
        program.run(self._inputs, draw=greedy)
        if greedy:
            results = sampling.accept(inputs, tokens[:count, 0].tolist())
        else:
            results = sampling.results(inputs, logits[:count])
        return CompletedStep(inputs.result(results))

    def _write(self, inputs: StepInputs) -> None:
        into, slots = self._inputs, self._parts.slots
        inputs.pack(into.tokens)
        if not inputs.knows_all_tokens:
            ids, _, token_slots = into.tokens[:, : inputs.shape.num_tokens]
            last = ids < 0
            ids[last] = slots.last_on_host[token_slots[last]]
        into.write(
            num_tokens=inputs.shape.num_tokens,
            rows=[(span.first, span.count, span.start) for span in inputs.spans],
            slots=inputs.slots,
            prompts=inputs.prompt_spans(),
            sampled=inputs.sampled if self._parts.pipeline.is_last else [],
        )
        if inputs.shape.adapted:
            into.adapters[: inputs.shape.num_tokens] = inputs.token_adapters


def try_program(parts: RunnerParts, limits: ProgramLimits) -> tuple[list[Executor], Choice]:
    """The recorded program, if every operation can be recorded, and the choice with its reason."""
    try:
        executor = ProgramExecutor(parts, limits)
    except Unrecordable as error:
        return [], Choice(_WHAT, "operator by operator", f"cannot be recorded: {error}")
    return [executor], executor.choice
