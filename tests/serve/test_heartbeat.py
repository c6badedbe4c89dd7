"""The heartbeat measures silence of the engine, not pauses of the HTTP process."""

from __future__ import annotations

from tests.serve.test_quarantine import Clock
from windlass.serve.health import Heartbeat


def silent_for(heartbeat: Heartbeat, clock: Clock, seconds: float) -> None:
    """Advance the clock with regular ticks."""
    for _ in range(round(seconds / heartbeat.interval_s)):
        clock.now += heartbeat.interval_s
        heartbeat.tick()


def test_a_silent_engine_is_late_and_then_lost() -> None:
    clock = Clock()
    heartbeat = Heartbeat(8.0, clock)
    silent_for(heartbeat, clock, 8.0)
    assert (heartbeat.is_late, heartbeat.is_lost) == (False, False)
    silent_for(heartbeat, clock, 1.0)
    assert (heartbeat.is_late, heartbeat.is_lost) == (True, False)
    silent_for(heartbeat, clock, 4.0)
    assert (heartbeat.is_late, heartbeat.is_lost) == (True, True)
    heartbeat.heard()
    assert (heartbeat.is_late, heartbeat.is_lost) == (False, False)


def test_a_pause_of_the_http_process_is_not_silence() -> None:
    """A stopped process, or one with a blocked event loop, receives no heartbeat."""
    clock = Clock()
    heartbeat = Heartbeat(8.0, clock)
    clock.now += 1000.0
    heartbeat.tick()
    assert not heartbeat.is_late


def test_a_paused_heartbeat_is_not_late() -> None:
    clock = Clock()
    heartbeat = Heartbeat(8.0, clock)
    with heartbeat.paused():
        silent_for(heartbeat, clock, 100.0)
    assert not heartbeat.is_late
    silent_for(heartbeat, clock, 9.0)
    assert heartbeat.is_late


def test_without_a_timeout_nothing_is_late() -> None:
    clock = Clock()
    heartbeat = Heartbeat(0.0, clock)
    clock.now += 1000.0
    heartbeat.tick()
    assert not heartbeat.is_late
    assert not heartbeat.is_lost
