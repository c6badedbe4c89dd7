"""Progress bar on stderr: the current rung, finished rungs, tokens per second, and the time left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class ProgressBar:
    """Shows the current variant, its phase and its speed."""

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
        """Count generated tokens of the phase."""
        self._tokens += count
        self._show()

    def done(self) -> None:
        self._progress.advance(self._task)

    def _show(self) -> None:
        if self._progress.disable:
            return
        seconds = max(1e-9, time.monotonic() - self._since)
        speed = f", {self._tokens / seconds:,.0f} tok/s" if self._tokens else ""
        text = f"{self._title}: {self._phase}{speed}" if self._phase else self._title
        self._progress.update(self._task, description=text)


@contextmanager
def progress_bar(total: int, shown: bool) -> Iterator[ProgressBar]:
    """A bar over `total` rows."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=Console(stderr=True), disable=not (shown and total))
    with bar:
        yield ProgressBar(bar, bar.add_task("", total=total))
