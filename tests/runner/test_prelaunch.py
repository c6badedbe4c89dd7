"""Whether a plan matches the step that was launched before it."""

from __future__ import annotations

from typing import Any

import pytest

from windlass.core.types import BlockId, Row, SlotId, StepPlan
from windlass.runner.cuda.prelaunch import ExpectedRow, Prelaunched

LAUNCHED: Any = None  # the computation is not tested here


def row(slot: int, start: int, *tokens: int, **other: Any) -> Row:
    given = {"blocks": (), "sample": True, "num_drafts": len(tokens) - 1, **other}
    return Row(str(slot), SlotId(slot), start, len(tokens), tokens, **given)


def prelaunched() -> Prelaunched:
    following = [ExpectedRow(SlotId(3), 17, (5, 6, 7)), ExpectedRow(SlotId(1), 9, (8, 9, 4))]
    return Prelaunched(following, LAUNCHED, num_drafts=2)


EXPECTED = StepPlan([row(3, 17, 5, 6, 7), row(1, 9, 8, 9, 4)])


@pytest.mark.parametrize(
    "rows",
    [
        EXPECTED.rows,
        [EXPECTED.rows[0], row(1, 9, 8, 9)],
        [row(3, 17, 5), row(1, 9, 8)],
        [EXPECTED.rows[0]._replace(blocks=(BlockId(4),)), EXPECTED.rows[1]],
    ],
    ids=["the same", "fewer draft tokens", "no draft tokens", "with new blocks"],
)
def test_matching_plans_use_the_prelaunched_step(rows: list[Row]) -> None:
    assert prelaunched().is_for(StepPlan(rows))


@pytest.mark.parametrize(
    "rows",
    [
        EXPECTED.rows[:1],
        EXPECTED.rows[::-1],
        [EXPECTED.rows[0], row(1, 10, 8, 9, 4)],
        [EXPECTED.rows[0], row(1, 9, 8, 9, 5)],
        [EXPECTED.rows[0], row(1, 9, 8, 9, 4, 6)],
        [EXPECTED.rows[0], row(1, 9, 8, 9, 4, sample=False)],
        [EXPECTED.rows[0], row(1, 9, 8, 9, 4, num_drafts=0)],
        [*EXPECTED.rows, row(2, 0, 1)],
    ],
    ids=[
        *("one ended", "another order", "elsewhere", "another draft token", "more draft tokens"),
        *("a prompt's", "a prompt of as many", "one more"),
    ],
)
def test_other_plans_do_not_use_the_prelaunched_step(rows: list[Row]) -> None:
    assert not prelaunched().is_for(StepPlan(rows))


@pytest.mark.parametrize(
    "changed",
    [{"freed": [SlotId(7)]}, {"copies": [(BlockId(1), BlockId(2))]}, {"adapters": [(1, "a")]}],
    ids=lambda changed: next(iter(changed)),
)
def test_plans_that_change_slots_do_not_use_the_prelaunched_step(changed: dict[str, Any]) -> None:
    assert not prelaunched().is_for(EXPECTED._replace(**changed))
