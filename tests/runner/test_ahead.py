"""Whether a plan asks for just what was launched before it was made."""

from __future__ import annotations

from typing import Any

import pytest

from windlass.core.types import BlockId, Row, SlotId, StepPlan
from windlass.runner.prelaunch import ExpectedRow, Prelaunched

LAUNCHED: Any = None  # what is computed plays no part here


def row(slot: int, start: int, *tokens: int, **other: Any) -> Row:
    given = {"blocks": (), "sample": True, "num_drafts": len(tokens) - 1, **other}
    return Row(str(slot), SlotId(slot), start, len(tokens), tokens, **given)


def ahead() -> Prelaunched:
    following = [ExpectedRow(SlotId(3), 17, (5, 6, 7)), ExpectedRow(SlotId(1), 9, (8, 9, 4))]
    return Prelaunched(following, LAUNCHED, num_drafts=2)


WANTED = StepPlan([row(3, 17, 5, 6, 7), row(1, 9, 8, 9, 4)])


@pytest.mark.parametrize(
    "rows",
    [
        WANTED.rows,
        [WANTED.rows[0], row(1, 9, 8, 9)],
        [row(3, 17, 5), row(1, 9, 8)],
        [WANTED.rows[0]._replace(blocks=(BlockId(4),)), WANTED.rows[1]],
    ],
    ids=["the same", "fewer guesses", "no guesses", "with new blocks"],
)
def test_it_is_for_such_rows(rows: list[Row]) -> None:
    assert ahead().is_for(StepPlan(rows))


@pytest.mark.parametrize(
    "rows",
    [
        WANTED.rows[:1],
        WANTED.rows[::-1],
        [WANTED.rows[0], row(1, 10, 8, 9, 4)],
        [WANTED.rows[0], row(1, 9, 8, 9, 5)],
        [WANTED.rows[0], row(1, 9, 8, 9, 4, 6)],
        [WANTED.rows[0], row(1, 9, 8, 9, 4, sample=False)],
        [WANTED.rows[0], row(1, 9, 8, 9, 4, num_drafts=0)],
        [*WANTED.rows, row(2, 0, 1)],
    ],
    ids=[
        *("one ended", "another order", "elsewhere", "another guess", "more guesses"),
        *("a prompt's", "a prompt of as many", "one more"),
    ],
)
def test_it_is_not_for_others(rows: list[Row]) -> None:
    assert not ahead().is_for(StepPlan(rows))


@pytest.mark.parametrize(
    "changed",
    [{"freed": [SlotId(7)]}, {"copies": [(BlockId(1), BlockId(2))]}, {"adapters": [(1, "a")]}],
    ids=lambda changed: next(iter(changed)),
)
def test_nobody_comes_or_goes_and_nothing_is_copied(changed: dict[str, Any]) -> None:
    assert not ahead().is_for(WANTED._replace(**changed))
