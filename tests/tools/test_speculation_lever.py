"""The figures of speculation: ratios of runs that took turns, and only of the same tokens."""

from __future__ import annotations

from random import Random
from statistics import mean

import pytest

from windlass.errors import EngineError
from windlass.tools.bench.speculation import _middle, _row, _Run, _Work, _works
from windlass.tools.common.report import COLUMNS


def run(seconds: float, decode_tok_s: float, tokens: list[list[int]]) -> _Run:
    return _Run(seconds, tokens, decode_tok_s, 5, 10, 7)


def test_a_row_compares_runs_that_followed_each_other() -> None:
    off = [run(4.0, 10.0, [[1, 2]]), run(6.0, 8.0, [[1, 2]]), run(5.0, 9.0, [[1, 2]])]
    on = [run(2.0, 20.0, [[1, 2]]), run(4.0, 16.0, [[1, 2]]), run(2.5, 18.0, [[1, 2]])]
    row = _row(_Work("w", [], 1), [off], on)
    assert (row["speedup"], row["decode_speedup"]) == (2.0, 2.0)
    assert row["speedup_error"] is None  # of three runs little can be told
    assert (row["off_seconds"], row["on_seconds"]) == ([[4.0, 6.0, 5.0]], [2.0, 4.0, 2.5])
    assert (row["drafted"], row["accepted"]) == (10, 7)
    shown = {name for key in COLUMNS["speculation"] for name in key.split("/")}
    assert shown <= {"spec", *row}
    assert row["acceptance_length"] == 2.4


def test_a_second_engine_without_guesses_says_how_much_engines_differ() -> None:
    first, second = [run(4.0, 10.0, [[1]])] * 2, [run(5.0, 8.0, [[1]])] * 2
    row = _row(_Work("w", [], 2), [first, second], [run(4.5, 9.0, [[1]])] * 2)
    assert (row["control"], row["speedup"], row["decode_speedup"]) == (0.8, 0.994, 1.0)
    assert row["runs"] == 2


def test_of_many_runs_the_error_is_told() -> None:
    off = [run(seconds, 1.0, [[1]]) for seconds in (1.0, 1.0, 2.0, 2.0, 9.0)]
    on = [run(seconds, 1.0, [[1]]) for seconds in (1.0, 1.1, 2.1, 2.0, 4.0)]
    row = _row(_Work("w", [], 2), [off], on)
    assert row["speedup"] == 1.0, "the host was busy in one of them"
    assert row["speedup_error"] == pytest.approx(0.024, abs=0.001)


def test_the_error_is_that_of_a_median() -> None:
    random, errors = Random(1), []
    for _ in range(200):
        _, error = _middle([random.gauss(1.0, 0.1) for _ in range(100)])
        errors.append(error)
    assert mean(errors) == pytest.approx(1.2533 * 0.1 / 10, rel=0.1)


def test_other_tokens_are_an_error_and_no_figure() -> None:
    with pytest.raises(EngineError, match="w: the tokens differ"):
        _row(_Work("w", [], 1), [[run(1.0, 1.0, [[1]])]], [run(1.0, 1.0, [[2]])])
    off, on = [run(1.0, 1.0, [[1, 2, 3], [4]])], [run(1.0, 1.0, [[1, 9, 3, 5], [4]])]
    assert _row(_Work("w", [], 1), [off], on, exact=False)["alike"] == 0.5


def test_as_many_at_once_as_asked_for() -> None:
    assert [(work.at_once, len(work.prompts)) for work in _works(5, None, True)] == [
        (1, 8),
        (1, 8),
        (5, 5),
        (5, 5),
    ]
    own = [[{"role": "user", "content": str(i)}] for i in range(3)]
    assert [len(work.prompts) for work in _works(5, own, False)] == [8, 3, 5, 5]
