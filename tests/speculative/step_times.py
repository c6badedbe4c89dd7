"""Step times as Speculation reports them to the governor."""

from __future__ import annotations

from windlass.core.speculation.governor import StepTime


def plain(seconds: float, num_rows: int = 1, draft_length: int = 0) -> StepTime:
    """A step without drafts; a probe for `draft_length` draft tokens found none."""
    return StepTime(
        num_rows=num_rows,
        num_tokens=num_rows,
        num_sampled=num_rows,
        has_drafts=False,
        draft_length=draft_length,
        step_s=seconds,
    )


def drafted(
    seconds: float,
    *,
    num_tokens: int,
    num_rows: int = 1,
    num_sampled: int | None = None,
    draft_length: int = 0,
    draft_s: float | None = 0.0,
) -> StepTime:
    """A step that verified drafts, or that was followed by drafting."""
    return StepTime(
        num_rows=num_rows,
        num_tokens=num_tokens,
        num_sampled=num_rows if num_sampled is None else num_sampled,
        has_drafts=num_tokens > num_rows,
        draft_length=draft_length,
        step_s=seconds,
        draft_s=draft_s,
    )
