"""A bar on stderr: which rung is measured, how many are done, tokens a second, and the time left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from windlass.tools.ladder.run import Bar


class _Silent:
    """For who wants no bar."""

    def begin(self, title: str) -> None: ...

    def phase(self, text: str) -> None: ...

    def tokens(self, count: int) -> None: ...

    def done(self) -> None: ...


class _Shown:
    """Owns a line of the terminal."""

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
def watched(total: int, shown: bool) -> Iterator[Bar]:
    """Over so many rows."""
    if not shown or not total:
        yield _Silent()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.progress import TimeRemainingColumn as Left

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), Left(), console=Console(stderr=True)) as progress:
        yield _Shown(progress, progress.add_task("", total=total))
