"""Progress bar on stderr: the current rung, finished rungs, tokens per second, and the time left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class ProgressBar:
    """Receives the progress of a run. This base class shows nothing."""

    def begin(self, title: str) -> None:
        """Start a variant."""

    def phase(self, text: str) -> None:
        """Start a phase of the variant."""

    def tokens(self, count: int) -> None:
        """Count generated tokens."""

    def done(self) -> None:
        """Finish the variant."""


class _RichBar(ProgressBar):
    """Shows the progress on one line of the terminal."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task
        self._title = self._phase = ""
        self._tokens = 0
        self._since = time.monotonic()

    def begin(self, title: str) -> None:
        self._title = title
        self.phase("")

    def phase(self, text: str) -> None:
        self._phase, self._tokens, self._since = text, 0, time.monotonic()
        self._show()

    def tokens(self, count: int) -> None:
        self._tokens += count
        self._show()

    def done(self) -> None:
        self._progress.advance(self._task)

    def _show(self) -> None:
        seconds = max(1e-9, time.monotonic() - self._since)
        speed = f", {self._tokens / seconds:,.0f} tok/s" if self._tokens else ""
        text = f"{self._title}: {self._phase}{speed}" if self._phase else self._title
        self._progress.update(self._task, description=text)


@contextmanager
def progress_bar(total: int, shown: bool) -> Iterator[ProgressBar]:
    """A bar over `total` rows."""
    if not shown or not total:
        yield ProgressBar()
        return
    from rich import progress as rich_progress
    from rich.console import Console

    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TimeElapsedColumn(),
        rich_progress.TimeRemainingColumn(),
    )
    with rich_progress.Progress(*columns, console=Console(stderr=True)) as progress:
        yield _RichBar(progress, progress.add_task("", total=total))
