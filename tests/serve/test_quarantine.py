"""Requests that were running when the engine died: two strikes, one suspect at a time."""

from __future__ import annotations

import pytest

from windlass.core.sampling import SamplingParams
from windlass.core.types import NewRequest
from windlass.errors import RequestBlocked
from windlass.serve.messages import Add
from windlass.serve.quarantine import BLOCKED_S, MAX_SUSPECTS, Quarantine, Suspects, fingerprint

HOW = "the engine process was ended by signal 9"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def add(request_id: str, content: str = "") -> Add:
    return Add(NewRequest(request_id, [1], SamplingParams()), (content or request_id).encode())


def new_request(**changes: object) -> NewRequest:
    values: dict[str, object] = {
        "request_id": "a",
        "prompt": [1, 2],
        "sampling": SamplingParams(),
        **changes,
    }
    return NewRequest(**values)  # type: ignore[arg-type]


def test_a_resent_request_has_the_same_fingerprint() -> None:
    first = fingerprint(new_request())
    assert first == fingerprint(new_request(request_id="b", priority=3, cache_salt="other"))
    others = [
        new_request(prompt=[1, 3]),
        new_request(prompt=[1]),
        new_request(adapter="x"),
        new_request(sampling=SamplingParams(temperature=0.5)),
        new_request(sampling=SamplingParams(structured_outputs={"regex": "a+"})),  # type: ignore[arg-type]
    ]
    fingerprints = {first, *map(fingerprint, others)}
    assert len(fingerprints) == 1 + len(others)


def test_requests_without_a_strike_are_never_held() -> None:
    quarantine = Quarantine()
    assert all(quarantine.enter(add(str(number))) for number in range(100))
    assert quarantine.leave("7", completed=True) == []
    assert quarantine.num_held == 0


def test_suspects_run_one_at_a_time_beside_others() -> None:
    quarantine = Quarantine()
    quarantine.suspects.strike([b"a", b"b", b"c"], HOW)
    assert quarantine.enter(add("a"))
    assert quarantine.enter(add("other"))
    assert not quarantine.enter(add("b"))
    assert not quarantine.enter(add("c"))
    assert quarantine.num_held == 2
    assert quarantine.leave("other", completed=True) == []
    assert quarantine.leave("a", completed=True) == [add("b")]
    assert quarantine.leave("b", completed=False) == [add("c")]
    assert quarantine.num_held == 0


def test_a_held_request_that_is_aborted_never_runs() -> None:
    quarantine = Quarantine()
    quarantine.suspects.strike([b"a", b"b"], HOW)
    quarantine.enter(add("a"))
    quarantine.enter(add("b"))
    assert quarantine.leave("b", completed=False) == []
    assert quarantine.leave("a", completed=True) == []


def test_equal_requests_are_released_when_one_completes() -> None:
    quarantine = Quarantine()
    quarantine.suspects.strike([b"same"], HOW)
    names = ["1", "2", "3", "4"]
    assert [quarantine.enter(add(name, "same")) for name in names] == [True, False, False, False]
    released = quarantine.leave("1", completed=True)
    assert [each.request.request_id for each in released] == ["2", "3", "4"]


def test_equal_requests_of_one_failure_get_one_strike() -> None:
    suspects = Suspects()
    suspects.strike([b"same", b"same", b"same"], HOW)
    suspects.check([b"same"])
    suspects.strike([b"same", b"same"], HOW)
    with pytest.raises(RequestBlocked, match="failed 2 times"):
        suspects.check([b"same"])


def test_the_second_strike_blocks_for_an_hour() -> None:
    clock = Clock()
    suspects = Suspects(clock)
    suspects.strike([b"a"], "first")
    suspects.check([b"a"])
    suspects.strike([b"a"], HOW)
    with pytest.raises(RequestBlocked, match=r"signal 9.*60 min") as blocked:
        suspects.check([b"b", b"a"])
    assert "again" not in str(blocked.value)
    clock.now = BLOCKED_S + 1
    suspects.check([b"a"])


def test_completion_clears_the_strike() -> None:
    quarantine = Quarantine()
    quarantine.suspects.strike([b"a"], HOW)
    quarantine.enter(add("a"))
    quarantine.leave("a", completed=True)
    quarantine.suspects.strike([b"a"], HOW)
    quarantine.suspects.check([b"a"])


def test_an_abort_keeps_the_strike() -> None:
    quarantine = Quarantine()
    quarantine.suspects.strike([b"a"], HOW)
    quarantine.enter(add("a"))
    quarantine.leave("a", completed=False)
    quarantine.suspects.strike([b"a"], HOW)
    with pytest.raises(RequestBlocked):
        quarantine.suspects.check([b"a"])


def test_untracked_requests_get_no_strikes() -> None:
    quarantine = Quarantine()
    probe = Add(NewRequest("probe", [1], SamplingParams()))
    for _ in range(3):
        quarantine.suspects.strike([b""], HOW)
    quarantine.suspects.check([probe.fingerprint])
    assert quarantine.enter(probe)


def test_the_table_is_bounded_and_keeps_blocked_requests() -> None:
    suspects = Suspects(Clock())
    for _ in range(2):
        suspects.strike([b"poison"], HOW)
    suspects.strike([str(number).encode() for number in range(2 * MAX_SUSPECTS)], HOW)
    assert len(suspects) == MAX_SUSPECTS
    with pytest.raises(RequestBlocked):
        suspects.check([b"poison"])


def test_blocked_in_flight_lists_requests_with_blocked_content() -> None:
    quarantine = Quarantine()
    quarantine.suspects.strike([b"a", b"b"], HOW)
    for each in (add("a"), add("b"), add("a2", "a")):
        quarantine.enter(each)
    quarantine.suspects.strike([b"a"], HOW)
    assert list(quarantine.blocked_in_flight()) == ["a", "a2"]


def test_engine_ended_clears_requests_in_flight() -> None:
    quarantine = Quarantine()
    quarantine.suspects.strike([b"a", b"b"], HOW)
    quarantine.enter(add("a"))
    quarantine.enter(add("b"))
    assert quarantine.engine_ended(["a", "b"]) == []
    assert quarantine.num_held == 0
    assert quarantine.leave("a", completed=False) == []
    assert quarantine.enter(add("b"))


def test_the_end_of_an_engine_releases_the_next_suspect() -> None:
    """Only one suspect runs at a time in all engines."""
    quarantine = Quarantine()
    quarantine.suspects.strike([b"a", b"b", b"c"], HOW)
    assert quarantine.enter(add("a"))
    assert not quarantine.enter(add("b"))
    assert not quarantine.enter(add("c"))
    assert [each.request.request_id for each in quarantine.engine_ended(["a"])] == ["b"]
    assert quarantine.engine_ended(["unknown"]) == []
    assert quarantine.is_held("c")


def test_clients_share_strikes_and_hold_their_own_requests() -> None:
    suspects = Suspects()
    own, other = Quarantine(suspects), Quarantine(suspects)
    suspects.strike([b"a", b"b"], HOW)
    assert own.enter(add("1", "a"))
    assert other.enter(add("2", "b"))
    assert not other.enter(add("3", "a"))
    assert own.leave("1", completed=True) == []
    assert [each.request.request_id for each in other.leave("2", completed=False)] == ["3"]
    assert (b"a" in suspects, b"b" in suspects) == (False, True)


def test_strikes_of_one_failure_that_arrive_one_by_one_count_once() -> None:
    suspects = Suspects()
    for incident in ("replica 1", "replica 1", ""):
        assert suspects.blocked(b"a") is None
        suspects.strike([b"a"], HOW, incident)
    assert suspects.blocked(b"a") is not None


def test_what_another_process_has_blocked_is_blocked_here() -> None:
    clock = Clock()
    suspects = Suspects(clock)
    suspects.strike([b"a"], HOW)
    suspects.block(b"a", HOW)
    suspects.block(b"", HOW)
    assert len(suspects) == 1
    clock.now = BLOCKED_S - 60
    suspects.block(b"a", HOW)  # it does not begin anew
    with pytest.raises(RequestBlocked, match="for 1 min"):
        suspects.check([b"a"])
