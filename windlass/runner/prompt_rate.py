"""Measures how fast prompts are computed, before the first request."""

from __future__ import annotations

from time import perf_counter

from windlass.core.card import Capacity
from windlass.core.types import Row, SlotId, SlotInit, StepPlan
from windlass.runner.runner import Runner

_MAX_TOKENS = 2048
_NUM_STEPS = 2


def measure_prompt_token_s(
    runner: Runner, capacity: Capacity, max_num_batched_tokens: int, max_model_len: int
) -> float:
    """Seconds per token of a prompt that fills a step. Writes into the first blocks of the cache."""
    num_groups, size = len(capacity.layout.groups), capacity.block_size
    room = capacity.num_blocks // num_groups * size
    count = min(max_num_batched_tokens, max_model_len - 1, room, _MAX_TOKENS)
    if count < 1:
        return 0.0
    slot, tokens = SlotId(0), [0] * count
    row = Row.unowned(slot, tuple(tokens), blocks=range(-(-count // size) * num_groups))
    init = SlotInit.greedy(slot, tokens, num_prompt=count)
    runner.run(StepPlan([row], [init], freed=[slot]))  # compiles, and touches the memory
    again, times = StepPlan([row._replace(blocks=())]), []
    for _ in range(_NUM_STEPS):
        began = perf_counter()
        runner.run(again)
        times.append(perf_counter() - began)
    return min(times) / count
