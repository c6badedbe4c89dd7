"""How an engine is seen from the server: its health, its backlog, and how often it may die."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often a dead engine is started again before the server gives up."""

    max_restarts: int = 5
    window_s: float = 600.0
    first_pause_s: float = 0.5
    max_pause_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Health:
    ok: bool
    reason: str = ""
    status: str = "unavailable"  # in a word, where it is not ok


@dataclass(frozen=True, slots=True)
class Backlog:
    """What waits for the engine, requests that it has not seen yet included."""

    num_running: int
    num_waiting: int
    num_unseen: int
    num_tokens: int
