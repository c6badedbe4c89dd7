"""Which graph sizes are captured at start, later, and which one a step uses."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from windlass.runner import assemble
from windlass.runner.assemble import _RunnerBuilder
from windlass.runner.cuda import graphs
from windlass.runner.cuda.decode import graph_sizes
from windlass.runner.cuda.graph_memory import bytes_of_others
from windlass.runner.cuda.graphs import AtStart, CapturedSizes
from windlass.runner.cuda.mixed import mixed_sizes
from windlass.start_log import untimed


def test_all_sizes_are_captured_at_start_the_largest_first() -> None:
    sizes = CapturedSizes(graph_sizes(100), AtStart.ALL)
    assert sizes.at_start == graph_sizes(100)[::-1]
    assert [sizes.fit(count) for count in (1, 3, 9, 65, 100)] == [1, 4, 16, 80, 100]
    assert sizes.next_missing() is None


def test_a_lazy_start_captures_powers_of_two_and_the_largest() -> None:
    sizes = CapturedSizes(graph_sizes(200), AtStart.SPREAD)
    assert sizes.at_start == [200, 128, 64, 32, 16, 8, 4, 2, 1]
    assert [sizes.fit(count) for count in (1, 3, 17, 33, 65, 129)] == [1, 4, 32, 64, 128, 200]
    assert CapturedSizes(mixed_sizes(600), AtStart.SPREAD).at_start == [640, 512, 256, 128, 64, 32]
    assert CapturedSizes([5], AtStart.SPREAD).at_start == [5]


def test_to_measure_memory_only_the_ends_are_captured() -> None:
    sizes = CapturedSizes(graph_sizes(64), AtStart.ENDS)
    assert sizes.at_start == [64, 1]
    assert (sizes.next_missing(), sizes.next_missing()) == (56, 48)
    assert list(sizes.missing) == graph_sizes(64)[1:-3]
    assert CapturedSizes([5], AtStart.ENDS).at_start == [5]


MIB = 2**20


class Sized:
    """An executor whose next graphs take `num_bytes` each on a device, two graphs per size."""

    def __init__(self, device: dict[str, int], num_missing: int, num_bytes: int) -> None:
        self._device = device
        self.num_missing = num_missing
        self._num_bytes = num_bytes

    def capture_next(self) -> bool:
        count = min(2, self.num_missing)
        self.num_missing -= count
        self._device["free"] -= count * self._num_bytes
        return count > 0


@pytest.mark.parametrize(
    ("missing", "num_bytes", "least", "most"),
    [
        (0, 9 * MIB, 0, 0),
        (2, 9 * MIB, 0, 0),  # both are captured
        (44, MIB, 40 * MIB, 60 * MIB),
        (44, 0, 0, 20 * MIB),
        (44, -MIB, 0, 20 * MIB),  # another process has freed memory
    ],
)
def test_the_estimate_of_graphs_is_at_least_their_bytes(
    missing: int, num_bytes: int, least: int, most: int
) -> None:
    device = {"free": 1000 * MIB}
    executors: Any = [Sized(device, missing, num_bytes), Sized(device, 0, 5)]
    free: Callable[[], int] = lambda: device["free"]  # noqa: E731
    found = bytes_of_others(executors, free)
    assert least <= found <= most
    left = executors[0].num_missing * num_bytes
    assert found >= left


def test_steps_pad_until_their_size_is_captured() -> None:
    sizes = CapturedSizes(graph_sizes(64), AtStart.SPREAD)
    sizes.ran(20)
    assert sizes.fit(20) == 32
    assert sizes.next_missing() == 24  # a step asked for it
    assert sizes.fit(20) == 24
    rest = [sizes.next_missing() for _ in range(4)]
    assert rest == [56, 48, 40, None]
    assert [sizes.fit(count) for count in range(1, 65)] == [
        next(size for size in graph_sizes(64) if size >= count) for count in range(1, 65)
    ]


def test_a_size_that_is_asked_for_often_is_captured_without_an_idle_moment() -> None:
    sizes = CapturedSizes(graph_sizes(64), AtStart.SPREAD)
    for _ in range(graphs._PATIENCE - 1):
        sizes.ran(20)
        sizes.ran(64)  # captured already
    assert sizes.fit(20) == 32
    sizes.ran(20)
    assert sizes.fit(20) == 24
    assert sizes.next_missing() == 56


@pytest.mark.parametrize(
    ("triton", "eager", "ranks", "value"),
    [
        (True, False, 1, "some sizes at start, the others while idle"),
        (True, False, 2, "all at start"),
        (True, True, 1, "none"),
        (False, False, 1, "none"),
    ],
)
def test_the_start_up_table_says_when_graphs_are_captured(
    triton: bool, eager: bool, ranks: int, value: str
) -> None:
    builder: Any = _RunnerBuilder.__new__(_RunnerBuilder)
    builder.choices = []
    model = SimpleNamespace(lazy_capture=True, enforce_eager=eager)
    builder._config = SimpleNamespace(model=model)
    mesh = SimpleNamespace(world=SimpleNamespace(size=ranks))
    parts = SimpleNamespace(ops=SimpleNamespace(is_triton=triton), mesh=mesh)
    builder._loaded = SimpleNamespace(parts=parts, network=SimpleNamespace(why_eager=None))
    is_lazy = value == "some sizes at start, the others while idle"
    assert builder.sizes_at_start() is (AtStart.SPREAD if is_lazy else AtStart.ALL)
    (choice,) = builder.choices
    assert choice.value == value
    assert "--lazy-capture" in choice.reason
    model.lazy_capture = False
    assert builder.sizes_at_start() is AtStart.ALL
    assert len(builder.choices) == 1


@pytest.mark.parametrize(
    ("used", "at_start", "graphs_bytes", "warns"),
    [
        (70 * MIB, AtStart.ALL, 70 * MIB, False),
        (70 * MIB, AtStart.SPREAD, 90 * MIB, False),  # the others follow
        (100 * MIB, AtStart.ALL, 100 * MIB, True),
        (-MIB, AtStart.ALL, 0, False),  # another process has freed memory
    ],
)
def test_graphs_that_take_more_than_estimated_are_reported(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    used: int,
    at_start: AtStart,
    graphs_bytes: int,
    warns: bool,
) -> None:
    free = [1000 * MIB, 1000 * MIB - used - 500 * MIB]
    monkeypatch.setattr(assemble, "free_after_sync", lambda _: free.pop(0))
    builder: Any = _RunnerBuilder.__new__(_RunnerBuilder)
    builder._phase = untimed
    builder._loaded = SimpleNamespace(parts=SimpleNamespace(device="cuda"))
    monkeypatch.setattr(builder, "sizes_at_start", lambda: at_start, raising=False)
    cache = SimpleNamespace(num_bytes=500 * MIB)
    monkeypatch.setattr(builder, "make", lambda *_, **__: ("runner", cache), raising=False)
    reserved = {"graphs": 90 * MIB, "activations": 5}
    assert builder.make_measured(7, reserved) == ("runner", cache)
    assert reserved == {"graphs": graphs_bytes, "activations": 5}
    assert ("10.0 MiB more than was left" in caplog.text) == warns
