"""Which graph sizes are captured at start, later, and which one a step uses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from windlass.runner.assemble import _RunnerBuilder
from windlass.runner.cuda import graphs
from windlass.runner.cuda.decode import graph_sizes
from windlass.runner.cuda.graphs import CapturedSizes
from windlass.runner.cuda.mixed import mixed_sizes


def test_all_sizes_are_captured_at_start_the_largest_first() -> None:
    sizes = CapturedSizes(graph_sizes(100), lazy=False)
    assert sizes.at_start == graph_sizes(100)[::-1]
    assert [sizes.fit(count) for count in (1, 3, 9, 65, 100)] == [1, 4, 16, 80, 100]
    assert sizes.next_missing() is None


def test_a_lazy_start_captures_powers_of_two_and_the_largest() -> None:
    sizes = CapturedSizes(graph_sizes(200), lazy=True)
    assert sizes.at_start == [200, 128, 64, 32, 16, 8, 4, 2, 1]
    assert [sizes.fit(count) for count in (1, 3, 17, 33, 65, 129)] == [1, 4, 32, 64, 128, 200]
    assert CapturedSizes(mixed_sizes(600), lazy=True).at_start == [640, 512, 256, 128, 64, 32]
    assert CapturedSizes([5], lazy=True).at_start == [5]


def test_steps_pad_until_their_size_is_captured() -> None:
    sizes = CapturedSizes(graph_sizes(64), lazy=True)
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
    sizes = CapturedSizes(graph_sizes(64), lazy=True)
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
    assert builder.captures_lazily() == (value == "some sizes at start, the others while idle")
    (choice,) = builder.choices
    assert choice.value == value
    assert "--lazy-capture" in choice.reason
    model.lazy_capture = False
    assert not builder.captures_lazily()
    assert len(builder.choices) == 1
