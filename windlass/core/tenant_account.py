"""The account of one tenant: what the scheduler has served it."""

from __future__ import annotations

from windlass.core.trace import BLOCKERS


class TenantAccount:
    """What one tenant has been served, and what it holds. Only FairShare changes it; accounting.py adds to `head_s`."""

    __slots__ = (
        "contended",
        "counter",
        "head_s",
        "last_seen",
        "mean_prompt",
        "name",
        "num_requests",
        "num_running",
        "service",
        "weight",
    )

    def __init__(self, name: str, counter: float = 0.0) -> None:
        self.name = name
        self.weight = 1.0
        self.counter = counter  # cost of the computed tokens over the weight; never falls
        self.num_requests = 0
        self.num_running = 0
        self.mean_prompt = 0.0  # computed tokens of a prompt, without cached ones
        self.last_seen = 0.0
        self.service = (
            0.0  # cost over weight, of steps before which several tenants had queued requests
        )
        self.contended = 0.0  # the number of those steps
        self.head_s = [0.0] * len(BLOCKERS)  # while its request was the head, seconds by blocker

    @property
    def num_waiting(self) -> int:
        return self.num_requests - self.num_running
