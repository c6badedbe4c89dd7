"""Step times as a runner would tell them to the governor."""

from __future__ import annotations

from windlass.speculative.governor import StepTime


def plain(seconds: float, num_rows: int = 1, depth: int = 0) -> StepTime:
    """A step without drafts; `depth` were looked for, for nothing."""
    return StepTime(
        num_rows=num_rows,
        num_tokens=num_rows,
        num_sampled=num_rows,
        has_drafts=False,
        depth=depth,
        step_s=seconds,
    )


def drafted(
    seconds: float,
    *,
    num_tokens: int,
    num_rows: int = 1,
    num_sampled: int | None = None,
    depth: int = 0,
    draft_s: float | None = 0.0,
) -> StepTime:
    """A step that verified drafts, or after which some were made."""
    return StepTime(
        num_rows=num_rows,
        num_tokens=num_tokens,
        num_sampled=num_rows if num_sampled is None else num_sampled,
        has_drafts=num_tokens > num_rows,
        depth=depth,
        step_s=seconds,
        draft_s=draft_s,
    )
