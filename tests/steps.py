"""A step's batch as the eager executor builds it."""

from __future__ import annotations

from torch import Tensor

from windlass.core.types import StepOptions, StepPlan
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
