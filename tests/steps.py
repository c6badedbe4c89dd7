"""A step's batch as the eager executor builds it, and the tokens of an engine's steps."""

from __future__ import annotations

from torch import Tensor

from windlass.core.sampling import SamplingParams
from windlass.core.types import NewRequest, StepOptions, StepPlan
from windlass.engine import Engine
from windlass.kernels.batch import LayerKV, StepBatch
from windlass.runner.eager import ReferenceMetadata, step_batch
from windlass.runner.inputs import SlotFacts, StepInputs
from windlass.runner.slots import SlotTables


def make_inputs(plan: StepPlan, slots: SlotTables) -> StepInputs:
    """Apply a plan to the slots, and return the step's inputs."""
    facts = SlotFacts()
    facts.apply(plan)
    return StepInputs(plan, facts, slots.apply(plan))


def make_batch(plan: StepPlan, slots: SlotTables, kv: list[LayerKV]) -> tuple[Tensor, StepBatch]:
    """The token ids and the batch of a step that reads all hidden states."""
    plan = plan._replace(options=StepOptions(needs_all_hidden=True))
    return step_batch(make_inputs(plan, slots), slots, kv, ReferenceMetadata(slots))


def generate(
    engine: Engine, prompts: list[list[int]], params: SamplingParams, adapter: str = ""
) -> list[list[int]]:
    """The output tokens of requests that run at the same time."""
    tokens: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    for index, prompt in enumerate(prompts):
        engine.add(NewRequest(str(index), prompt, params, adapter=adapter))
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            tokens[output.request_id] += output.tokens
    return list(tokens.values())
