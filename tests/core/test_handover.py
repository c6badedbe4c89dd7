"""A request that one scheduler begins and another one ends."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from windlass.core.blocks import BlockPool
from windlass.core.handover import HandedBlocks, PeerRecord, Transfers
from windlass.core.kv_layout import KVLayout
from windlass.core.limits import SchedulerLimits
from windlass.core.sampling import SamplingParams
from windlass.core.scheduler import Scheduler, SchedulerOptions
from windlass.core.types import NewRequest, Output, RowResult, StepResult
from windlass.errors import RequestError

STOP = 9


def make_scheduler() -> Scheduler:
    limits = SchedulerLimits(
        max_num_seqs=4,
        max_num_batched_tokens=8,
        max_model_len=64,
        layout=KVLayout.unsized(4),
        num_blocks=64,
    )
    return Scheduler(limits, BlockPool(64), SchedulerOptions(eos_ids=(STOP,)))


def run(scheduler: Scheduler, request: NewRequest, token_at: dict[int, int]) -> list[Output]:
    """Run a request; the token at position p is `token_at[p]`, or 1."""
    scheduler.add(request, 0.0)
    outputs, now = [], 0.0
    while scheduler.has_work:
        now += 1.0
        plan = scheduler.plan(now)
        ends = (row.start + row.num_tokens for row in plan.rows)
        rows = [
            RowResult([token_at.get(end, 1)] if row.sample else [])
            for row, end in zip(plan.rows, ends, strict=True)
        ]
        outputs += scheduler.commit(plan, StepResult(rows), now)
    return outputs


def request(num_prompt: int = 13, **options: object) -> NewRequest:
    sampling = {"max_tokens": 5, **options.pop("sampling", {})}  # type: ignore[dict-item]
    return NewRequest("a", list(range(10, 10 + num_prompt)), SamplingParams(**sampling), **options)  # type: ignore[arg-type]


def test_the_first_token_ends_the_request() -> None:
    (output,) = run(make_scheduler(), request(hand_over=True), {13: 7})
    assert (output.tokens, output.finish) == ([7], "handover")
    assert output.timeline is not None
    assert output.timeline.num_output == 1


@pytest.mark.parametrize(
    ("options", "token", "finish"),
    [
        ({}, STOP, "stop"),
        ({"sampling": {"max_tokens": 1}}, 7, "length"),
        ({"num_prompt": 63, "sampling": {"max_tokens": None}}, 7, "length"),  # the context is full
    ],
)
def test_a_request_that_ends_is_not_handed_over(options: dict, token: int, finish: str) -> None:
    (output,) = run(make_scheduler(), request(hand_over=True, **options), {13: token, 63: token})
    assert (output.tokens, output.finish) == ([token], finish)


def test_the_other_scheduler_goes_on() -> None:
    tokens = {13: 7, 14: 3, 15: 4, 16: 5, 17: 6}
    whole = run(make_scheduler(), request(), tokens)
    begun = run(make_scheduler(), request(hand_over=True), tokens)
    ended = run(make_scheduler(), request(generated=(7,)), tokens)
    found = [token for output in begun + ended for token in output.tokens]
    assert found == [token for output in whole for token in output.tokens] == [7, 3, 4, 5, 6]
    last = ended[-1]
    assert last.finish == "length"
    assert last.timeline is not None
    assert last.timeline.num_output == 5
    assert last.timeline.num_prompt == 13


def test_a_request_with_all_its_tokens_is_refused() -> None:
    with pytest.raises(RequestError, match="5 of at most 5 output tokens"):
        make_scheduler().add(request(generated=(1, 2, 3, 4, 5)), 0.0)


class Export:
    """A store that holds what a test puts into it."""

    def __init__(self) -> None:
        self.stored: set[bytes] = set()
        self.expected: list[bytes] = []

    def expect(self, keys: Sequence[bytes]) -> None:
        self.expected += keys

    def contains(self, key: bytes) -> bool:
        return key in self.stored

    def hand_over(self, keys: Sequence[bytes]) -> HandedBlocks:
        found = [PeerRecord(key, 1) for key in keys if key in self.stored]
        return HandedBlocks("0", found, len(keys) - len(found))


def test_a_prompt_is_handed_over_when_all_blocks_are_stored() -> None:
    export = Export()
    saved: list[bytes] = []
    transfers = Transfers(export, saved.extend)
    transfers.begin("a", [b"1", b"2", b"3"], 0.0)
    assert export.expected == saved == [b"1", b"2", b"3"]
    export.stored |= {b"1", b"3"}
    assert transfers.ended(0.05) == []
    assert transfers.ended(0.2) == []
    assert saved[3:] == [b"2"]  # once more
    export.stored.add(b"2")
    ((name, handed),) = transfers.ended(0.21)
    assert (name, len(handed.records), handed.num_failed) == ("a", 3, 0)
    assert not transfers


def test_a_prompt_whose_blocks_are_not_stored_is_handed_over_without_them() -> None:
    export = Export()
    transfers = Transfers(export, lambda _keys: None)
    transfers.begin("a", [b"1", b"2"], 0.0)
    export.stored.add(b"1")
    assert transfers.ended(4.9) == []
    ((_, handed),) = transfers.ended(5.1)
    assert [each.key for each in handed.records] == [b"1"]
    assert handed.num_failed == 1
