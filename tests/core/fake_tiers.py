"""KV tiers of the fake runner: slow, small, lossy."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from windlass.core.types import StepPlan, TierStats

if TYPE_CHECKING:
    from tests.core.world import Entry


@dataclass
class FakeStores:
    """Tiers of `sizes` records each. A load takes up to `delay` polls, and fails at the rate `loss`.

    `lies`: the rate at which records that are not stored are found, as after a file was deleted.
    """

    names: tuple[str, ...] = ("host",)
    sizes: tuple[int, ...] = (10**6,)
    delay: int = 0
    loss: float = 0.0
    lies: float = 0.0
    seconds: tuple[float, ...] = (0.0, 0.0)  # per record
    keeps_prompts: bool = False
    prompt_token_s: float = 0.0
    random: Random = field(default_factory=lambda: Random(0))

    def __post_init__(self) -> None:
        self.num_ended = self.num_loads = self.num_failed = self.num_saves = 0
        self.is_saving = False
        self.records: list[OrderedDict[bytes, list[Entry | None]]] = [
            OrderedDict() for _ in self.names
        ]
        self.pages: list[list[Entry | None]] = []
        self.writing: dict[int, list] = {}  # block -> [polls left, key, record]

    def find(self, key: bytes) -> int | None:
        if self.lies and self.random.random() < self.lies:
            return self.random.randrange(len(self.names))
        return next((at for at, found in enumerate(self.records) if key in found), None)

    def lacks(self, key: bytes) -> bool:
        return any(key not in found for found in self.records)

    def record_s(self, tier: int) -> float:
        return self.seconds[tier]

    def apply(self, plan: StepPlan) -> None:
        """The runner's part: saves are copied before anything of the plan is computed."""
        for block, key in plan.saves:
            assert block not in self.writing
            self.num_saves += self.lacks(key)
            for size, found in zip(self.sizes, self.records, strict=True):
                if self.random.random() >= self.loss:
                    found[key] = list(self.pages[block])
                    found.move_to_end(key)
                while len(found) > size:
                    found.popitem(last=False)
        for row in plan.rows:
            assert not self.writing.keys() & set(row.blocks)
        for key, block in plan.loads:
            assert block not in self.writing
            record = next((found[key] for found in self.records if key in found), None)
            if self.random.random() < self.loss:
                record = None
            self.pages[block] = [None] * len(self.pages[block])
            self.writing[block] = [self.random.randint(0, self.delay), key, record]

    def poll(self) -> list[tuple[bytes, bool]]:
        ended = []
        for block, load in list(self.writing.items()):
            left, key, record = load
            load[0] -= 1
            if left > 0:
                continue
            if record is not None:
                self.pages[block] = list(record)
            del self.writing[block]
            ended.append((key, record is not None))
        self.num_ended += len(ended)
        self.num_loads += len(ended)
        self.num_failed += sum(not ok for _, ok in ended)
        return ended

    def clear(self) -> None:
        self.records[0].clear()

    def stats(self) -> list[TierStats]:
        return [
            TierStats(name=name, num_records=len(found), num_loads=self.num_loads)
            for name, found in zip(self.names, self.records, strict=True)
        ]
