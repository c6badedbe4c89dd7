"""A fake adapter store with controlled read times, and a runner that checks its slots."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.core.world import FakeRunner
from windlass.core.types import AdapterSize, RowResult, StepPlan, StepResult
from windlass.errors import AdapterConflict, CheckpointError


@dataclass
class FakeShelf:
    """A read takes `delay` calls of `ready`; names in `broken` fail."""

    known: Iterable[str] = ()
    max_in_memory: int = 4
    delay: int = 1
    broken: set[str] = field(default_factory=set)
    num_loads: int = 0

    def __post_init__(self) -> None:
        self.names: list[str] = list(self.known)
        self.there: list[str] = []  # least recently used first
        self.coming: dict[str, int] = {}
        self.held: list[str] = []
        self._num_checks = self._num_registered = 0

    @property
    def num_ended(self) -> int:
        """Grows on every check while reads are pending, since calls of `ready` advance them."""
        self._num_checks += bool(self.coming)
        return self._num_checks

    @property
    def num_in_memory(self) -> int:
        return len(self.there)

    def register(self, name: str, folder: str, *roots: str) -> None:  # noqa: ARG002
        if name in self.names:
            raise AdapterConflict(f"{name} is there")
        self.names.append(name)
        self._num_registered += 1

    def version(self, name: str) -> str:
        return f"{name}, registration {self._num_registered}"

    def unregister(self, name: str) -> None:
        self.names.remove(name)
        self.coming.pop(name, None)
        if name in self.there:
            self.there.remove(name)

    def ready(self, name: str) -> bool:
        assert name in self.names
        if name in self.there:
            self.there.remove(name)
            self.there.append(name)
            return True
        left = self.coming.setdefault(name, self.delay)
        self.coming[name] -= 1
        if left > 0:
            return False
        del self.coming[name]
        if name in self.broken:
            raise CheckpointError(f"{name} is broken")
        self.num_loads += 1
        self.there.append(name)
        for old in list(self.there[:-1]):
            if len(self.there) > self.max_in_memory and old not in self.held:
                self.there.remove(old)
        return True

    def get(self, name: str) -> str:
        assert name in self.there, f"{name} was not ready when a plan named it"
        return name

    def in_memory(self, name: str) -> bool:
        return name in self.there

    def size(self, name: str) -> AdapterSize | None:
        return AdapterSize(8, 1000) if name in self.there else None

    def hold(self, name: str) -> None:
        self.held.append(name)

    def drop(self, name: str) -> None:
        self.held.remove(name)


class AdaptedRunner(FakeRunner):
    """Checks that each row's slot contains the adapter of its request."""

    def attach(self, shelf: FakeShelf, adapter_of: dict[str, str]) -> None:
        self.shelf = shelf
        self.adapter_of = adapter_of  # adapters by request
        self.bank: dict[int, str] = {}
        self.max_at_once = 0

    def run(self, plan: StepPlan) -> StepResult:
        for slot, name in plan.adapters:
            self.bank[slot] = self.shelf.get(name)
        self.max_at_once = max(self.max_at_once, len({row.adapter for row in plan.rows} - {0}))
        return super().run(plan)

    def _run_row(self, row) -> RowResult:
        name = self.adapter_of.get(row.request_id, "")
        assert self.bank.get(row.adapter, "") == name
        assert bool(row.adapter) == bool(name)
        return super()._run_row(row)
