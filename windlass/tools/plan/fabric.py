"""The time of collectives between the GPUs of one machine.

A message takes the fastest of three algorithms:

    one-shot   every rank reads the tensors of all others and adds them       one synchronisation
    two-shot   every rank adds its part of all tensors, then reads the sums   two synchronisations
    ring       neighbours pass parts on, once to add and once to share        2 (n - 1) hops

Nothing here is measured: one GPU has no link. `Fabric.assumptions` names the sources.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from windlass.tools.plan.kernel_times import Assumption

CollectiveKind = Literal["all-reduce", "reduce-scatter", "all-gather", "all-to-all", "send"]


@dataclass(frozen=True, slots=True)
class Collective:
    """One exchange of a step. `num_bytes`: of the whole result, on every rank that gets it.

    Of a reduce-scatter, the results of all ranks together.
    """

    kind: CollectiveKind
    num_bytes: int
    num_ranks: int


@dataclass(frozen=True, slots=True)
class Fabric:
    """Links between GPUs, all of which reach all others at full speed (NVSwitch)."""

    bandwidth: float = 450e9  # bytes per second that a GPU can send, and receive
    share: float = 0.8  # of the bandwidth that large messages reach
    launch_s: float = 2e-6  # per collective
    sync_s: float = 3e-6  # per synchronisation of all ranks
    hop_s: float = 1.5e-6  # per neighbour of a ring

    def seconds(self, collective: Collective) -> float:
        ranks, num_bytes = collective.num_ranks, collective.num_bytes
        if ranks == 1:
            return 0.0
        return self.launch_s + min(self._algorithms(collective.kind, num_bytes, ranks).values())

    def algorithm(self, collective: Collective) -> str:
        found = self._algorithms(collective.kind, collective.num_bytes, collective.num_ranks)
        return min(found, key=lambda name: found[name])

    def _algorithms(self, kind: CollectiveKind, num_bytes: int, ranks: int) -> dict[str, float]:
        rate = self.bandwidth * self.share
        others = (ranks - 1) / ranks * num_bytes / rate  # each rank's part of the result, from all
        if kind == "send":
            return {"direct": self.sync_s + num_bytes / rate}
        if kind in ("reduce-scatter", "all-gather", "all-to-all"):
            return {"direct": self.sync_s + others}
        return {
            "one-shot": self.sync_s + (ranks - 1) * num_bytes / rate,
            "two-shot": 2 * self.sync_s + 2 * others,
            "ring": 2 * (ranks - 1) * self.hop_s + 2 * others,
        }

    @property
    def assumptions(self) -> list[Assumption]:
        return [
            Assumption(
                "link bandwidth",
                f"{self.bandwidth / 1e9:,.0f} GB/s per GPU and direction",
                "vendor: NVLink 4, 900 GB/s in both directions together; --link-bandwidth",
            ),
            Assumption(
                "link share", f"{self.share:g} of it for large messages", "assumed, not measured"
            ),
            Assumption(
                "collective latency",
                f"{self.launch_s * 1e6:g} µs, and {self.sync_s * 1e6:g} µs per synchronisation or "
                f"{self.hop_s * 1e6:g} µs per ring hop",
                "assumed, not measured: published one-shot all-reduces of a few KiB take 5 to 8 µs",
            ),
            Assumption(
                "all-reduce",
                "the fastest of one-shot, two-shot and ring for each message",
                "assumed; it does not overlap with kernels",
            ),
        ]
