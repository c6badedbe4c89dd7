"""The model of more threads than were measured."""

from __future__ import annotations

import pytest
from thread_scaling import Scaling, rows_of


def scaling(one_s: float, two_s: float, step_bytes: float = 0.0) -> Scaling:
    return Scaling(
        one_s=one_s,
        two_s=two_s,
        step_bytes=step_bytes,
        thread_bandwidth=10e9,
        max_bandwidth=40e9,
    )


def test_amdahl() -> None:
    assert scaling(1.0, 0.5).serial == 0
    assert scaling(1.0, 0.5).seconds(8) == pytest.approx(1 / 8)
    assert scaling(1.0, 0.55).serial == pytest.approx(0.1)
    assert scaling(1.0, 0.55).seconds(10**6) == pytest.approx(0.1, rel=1e-4)
    assert scaling(1.0, 0.45).serial == 0  # faster than twice: noise


def test_memory_bounds_a_step() -> None:
    found = scaling(1.0, 0.5, step_bytes=4e9)
    assert found.seconds(2) == 0.5
    assert found.limit(2) == "serial part"
    assert found.seconds(16) == pytest.approx(0.1)
    assert found.limit(16) == "memory"
    assert found.reading(1) == 0.4


def test_rows() -> None:
    rows = rows_of("decode of 8", scaling(1.0, 0.5), tokens=8)
    assert [(row["threads"], row["kind"], row["tok_s"]) for row in rows[:3]] == [
        (1, "measured", 8.0),
        (2, "measured", 16.0),
        (4, "modelled", 32.0),
    ]
