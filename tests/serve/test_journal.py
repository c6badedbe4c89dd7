"""The journal of running requests, as read after the engine died."""

from __future__ import annotations

import os
from pathlib import Path

from windlass.core.sampling import SamplingParams
from windlass.core.types import NewRequest, SlotId, SlotInit, StepPlan
from windlass.serve.journal import Journal, read_journal
from windlass.serve.messages import Add


def add(request_id: str, **sampling: object) -> Add:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    return Add(NewRequest(request_id, [1], params), request_id.rjust(16).encode())


def admission(request_id: str, slot: int) -> SlotInit:
    return SlotInit(
        request_id=request_id,
        slot=SlotId(slot),
        tokens=[1],
        num_prompt=1,
        sampling=SamplingParams(),
        stop_ids=frozenset(),
        seed=0,
    )


def names(path: Path) -> list[str]:
    return sorted(each.decode().strip() for each in read_journal(path))


def test_requests_are_listed_from_their_slot_to_their_end(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    for name in ("a", "b", "c"):
        journal.adding(add(name))
        assert names(path) == [name]
    journal.added()
    assert names(path) == []
    journal.planned(StepPlan([], [admission("a", 0), admission("b", 1)]))
    assert names(path) == ["a", "b"]
    journal.planned(StepPlan([], [admission("c", 1)], [SlotId(1)]))  # b was preempted
    assert names(path) == ["a", "c"]
    journal.ended(["a"])
    assert names(path) == ["c"]
    assert [each.decode().strip() for each in journal.running()] == ["c"]
    journal.planned(StepPlan([], [admission("b", 2)]))
    assert names(path) == ["b", "c"]
    journal.ended(["b", "c", "unknown"])
    assert names(path) == []
    journal.close()


def test_requests_with_a_grammar_are_listed_from_their_arrival(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.adding(add("a", structured_outputs={"regex": "a"}))
    journal.added()
    assert names(path) == ["a"]
    journal.ended(["a"])
    assert names(path) == []
    journal.close()


def test_untracked_requests_are_not_listed(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.adding(add("a"))
    journal.adding(Add(NewRequest("probe", [1], SamplingParams())))
    assert names(path) == []
    journal.planned(StepPlan([], [admission("probe", 0)]))
    assert names(path) == []
    journal.close()


def test_a_missing_or_truncated_file_lists_complete_entries(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    assert read_journal(path) == frozenset()
    path.write_bytes(b"\x02")
    assert read_journal(path) == frozenset()
    journal = Journal(path)
    journal.adding(add("a"))
    assert names(path) == ["a"]
    os.truncate(path, 10)
    assert read_journal(path) == frozenset()
    journal.close()
