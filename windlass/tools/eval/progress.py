"""A bar on stderr that shows the figures as they settle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from windlass.tools.eval.metrics import Tally
from windlass.tools.eval.run import Watch

# The figures move slowly, and computing them looks at every token so far.
_UPDATES = 100


@contextmanager
def bar(shown: bool) -> Iterator[Watch]:
    """What `measure` reports to."""
    if not shown:
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import Progress

    progress = Progress(console=Console(stderr=True))
    task = progress.add_task("windows", total=None)

    def watch(done: int, total: int, tally: Tally) -> None:
        progress.start()  # not before there is something to show
        if done == total or done % max(1, total // _UPDATES) == 0:
            progress.update(task, completed=done, total=total, description=_figures(tally))

    try:
        yield watch
    finally:
        progress.stop()


def _figures(tally: Tally) -> str:
    quality = tally.quality()
    text = f"perplexity {quality.perplexity:.3f}"
    if quality.against is None:
        return text
    return f"{text}, agreement {quality.against.agreement:.2%}, KL {quality.against.kl_mean:.5f}"
