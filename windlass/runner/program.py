"""Computes steps on the CPU with one recorded native program: one native call per step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from windlass.core.card import Choice
from windlass.errors import ConfigError
from windlass.kernels.batch import AdapterRows, LogitsIndices, Span, StepBatch
from windlass.kernels.native.ops import NativeOps, prompt_spans
from windlass.kernels.native.program import Program, ProgramInputs, ProgramLimits, record
from windlass.kernels.native.record import Unrecordable
from windlass.kernels.storages import Held
from windlass.lora.bank import Bank
from windlass.runner.device import (
    free_bytes,
    gib,
)
from windlass.runner.eager import RunnerParts
from windlass.runner.executor import PASSED_ON, CompletedStep, Executor, PendingStep
from windlass.runner.inputs import StepInputs, StepShape
from windlass.runner.sampling import HostSampling

_WHAT = "steps"
_NUM_SAMPLE_TOKENS = 2  # tokens


class _Variant(NamedTuple):
    """A kind of program; all kinds compute logits and tokens."""

    adapted: bool = False  # LoRA rows
    hidden: Literal["none", "sampled", "all"] = "none"  # positions whose hidden states it returns


class ProgramExecutor(Executor):
    """Owns the recorded programs and their input arrays."""

    name = "program"

    def __init__(self, parts: RunnerParts, limits: ProgramLimits) -> None:
        """Record the program. Raises Unrecordable if an operation cannot be recorded."""
        self._parts = parts
        self._limits = limits
        self._program = self._recorded(_Variant())
        # None if memory is short. Programs that return hidden states are recorded at first use.
        self._programs: dict[_Variant, Program | None] = {_Variant(): self._program}
        self._has_adapters = False
        self._inputs = ProgramInputs(limits, parts.slots.tables)

    @property
    def choice(self) -> Choice:
        size = f"{self._program.num_commands} commands, {gib(self._program.num_bytes)}"
        return Choice(_WHAT, f"one native call ({size})", "every operation is native")

    def storages(self) -> Iterator[Held]:
        for program in self._programs.values():
            if program is not None:
                yield from program.storages()

    def attach_adapters(self, bank: Bank) -> None:
        del bank
        self._has_adapters = True
        adapted = _Variant(adapted=True)
        self._programs[adapted] = self._recorded(adapted)

    def _program_for(self, shape: StepShape) -> Program | None:
        """The program for a step, recorded at first use; None if memory is short."""
        hidden: Literal["none", "sampled", "all"] = "none"
        if shape.pools and self._parts.pipeline.is_last:
            hidden = "all" if shape.needs_all_hidden else "sampled"
        variant = _Variant(shape.adapted, hidden)
        if variant not in self._programs:
            try:
                self._programs[variant] = self._recorded(variant, cache_is_written=True)
            except ConfigError:
                self._programs[variant] = None
        return self._programs[variant]

    @torch.inference_mode()
    def _recorded(self, variant: _Variant, cache_is_written: bool = False) -> Program:
        parts = self._parts
        room = free_bytes(torch.device("cpu"))
        if not cache_is_written:  # pages count as free until they are written for the first time
            room -= parts.cache.num_bytes
        hidden = None if parts.pipeline.is_first else parts.pipeline.empty(_NUM_SAMPLE_TOKENS)
        return record(
            parts.workers.pool,
            partial(self._sample_step, hidden, variant),
            limits=self._limits,
            max_bytes=max(0, room),
            inputs=hidden,
        )

    def _sample_step(self, hidden: Tensor | None, variant: _Variant) -> list[Tensor]:
        """A sample step for recording, of which one token is sampled: logits, tokens, hidden states.

        `hidden`: of the stage before. A stage before the last returns the hidden states of all tokens.
        """
        parts, reads_all = self._parts, variant.hidden == "all"
        ops, two = NativeOps(parts.workers.pool), torch.zeros(_NUM_SAMPLE_TOKENS, dtype=torch.int32)
        whole, last = (AdapterRows(two), AdapterRows(two[:1])) if variant.adapted else (None, None)
        batch = StepBatch(
            positions=two,
            token_slots=two,
            tables=parts.slots.tables,
            spans=[Span(0, 2, 0)],
            kv=parts.cache.layers,
            adapters=whole,
            logits_indices=None if reads_all else LogitsIndices(two[:1], last),
        )
        with prompt_spans(parts.workers.pool, batch):
            hidden = parts.network(two if hidden is None else hidden, batch)
        if not parts.pipeline.is_last:
            return [hidden]
        sampled = ops.gather(hidden, two[:1]) if reads_all else hidden
        logits = parts.network.logits(sampled, last)
        results = [logits, ops.argmax(logits)]
        return results if variant.hidden == "none" else [*results, hidden]

    def refuses(self, shape: StepShape) -> str | None:
        if shape.adapted and not self._has_adapters:
            return "no adapters were recorded"
        if shape.draft_length:
            return "heads draft in the step"
        return self._refuses_results(shape) if self._parts.pipeline.is_last else None

    def _refuses_results(self, shape: StepShape) -> str | None:
        if shape.scores_prompts or (shape.needs_all_hidden and not shape.pools):
            return "all hidden states are read"
        # Draft tokens kept from an earlier step may exceed the program's capacity.
        if shape.num_sampled > self._limits.rows:
            return "more sampled positions than recorded"
        if shape.pools and self._program_for(shape) is None:
            return "no memory for a program that pools"
        return None

    def launch(self, inputs: StepInputs) -> PendingStep:
        program = self._program_for(inputs.shape)
        assert program is not None, "refused"
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
        logits, tokens, *hidden = program.results
        greedy = sampling.sampler.all_greedy([each.slot for each in inputs.requests])
        program.run(self._inputs, draw=greedy)
        if greedy:
            results = sampling.accept(inputs, tokens[:count, 0].tolist())
        else:
            results = sampling.results(inputs, logits[:count])
        vectors = None
        if hidden:
            pending = self._parts.pooler.start(
                inputs, hidden[0], gathered=not inputs.shape.needs_all_hidden
            )
            vectors = pending.wait()
        return CompletedStep(inputs.result(results, vectors=vectors))

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
