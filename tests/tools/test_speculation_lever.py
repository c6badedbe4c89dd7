"""The speculation benchmark: ratios of consecutive runs with equal tokens."""

from __future__ import annotations

from random import Random
from statistics import mean

import pytest

from windlass.errors import EngineError
from windlass.tools.bench.speculation import _median_and_error, _row, _Run, _Workload, _workloads
from windlass.tools.common.report import COLUMNS


def run(seconds: float, decode_tok_s: float, tokens: list[list[int]]) -> _Run:
    return _Run(seconds, tokens, decode_tok_s, 5, 10, 7)


def test_a_row_compares_consecutive_runs() -> None:
    off = [run(4.0, 10.0, [[1, 2]]), run(6.0, 8.0, [[1, 2]]), run(5.0, 9.0, [[1, 2]])]
    on = [run(2.0, 20.0, [[1, 2]]), run(4.0, 16.0, [[1, 2]]), run(2.5, 18.0, [[1, 2]])]
    row = _row(_Workload("w", [], 1), [off], on)
    assert (row["speedup"], row["decode_speedup"]) == (2.0, 2.0)
    assert row["speedup_error"] is None  # too few runs
    assert (row["off_seconds"], row["on_seconds"]) == ([[4.0, 6.0, 5.0]], [2.0, 4.0, 2.5])
    assert (row["drafted"], row["accepted"]) == (10, 7)
    shown = {name for key in COLUMNS["speculation"] for name in key.split("/")}
    assert shown <= {"spec", *row}
    assert row["acceptance_length"] == 2.4


def test_the_control_row_shows_the_difference_of_two_equal_engines() -> None:
    first, second = [run(4.0, 10.0, [[1]])] * 2, [run(5.0, 8.0, [[1]])] * 2
    row = _row(_Workload("w", [], 2), [first, second], [run(4.5, 9.0, [[1]])] * 2)
    assert (row["control"], row["speedup"], row["decode_speedup"]) == (0.8, 0.994, 1.0)
    assert row["runs"] == 2


def test_the_error_is_reported_for_many_runs() -> None:
    off = [run(seconds, 1.0, [[1]]) for seconds in (1.0, 1.0, 2.0, 2.0, 9.0)]
    on = [run(seconds, 1.0, [[1]]) for seconds in (1.0, 1.1, 2.1, 2.0, 4.0)]
    row = _row(_Workload("w", [], 2), [off], on)
    assert row["speedup"] == 1.0, "the host was busy in one of them"
    assert row["speedup_error"] == pytest.approx(0.024, abs=0.001)


def test_the_error_is_that_of_a_median() -> None:
    random, errors = Random(1), []
    for _ in range(200):
        _, error = _median_and_error([random.gauss(1.0, 0.1) for _ in range(100)])
        errors.append(error)
    assert mean(errors) == pytest.approx(1.2533 * 0.1 / 10, rel=0.1)


def test_differing_tokens_are_an_error() -> None:
    with pytest.raises(EngineError, match="w: the tokens differ"):
        _row(_Workload("w", [], 1), [[run(1.0, 1.0, [[1]])]], [run(1.0, 1.0, [[2]])])
    off, on = [run(1.0, 1.0, [[1, 2, 3], [4]])], [run(1.0, 1.0, [[1, 9, 3, 5], [4]])]
    assert _row(_Workload("w", [], 1), [off], on, exact=False)["alike"] == 0.5


def test_workloads_have_the_requested_concurrency() -> None:
    assert [(each.concurrency, len(each.prompts)) for each in _workloads(5, None, True)] == [
        (1, 8),
        (1, 8),
        (5, 5),
        (5, 5),
    ]
    own = [[{"role": "user", "content": str(i)}] for i in range(3)]
    assert [len(each.prompts) for each in _workloads(5, own, False)] == [8, 3, 5, 5]
