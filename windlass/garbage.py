"""Settings of Python's garbage collector for processes that handle thousands of events per second."""

from __future__ import annotations

import gc

# Net allocations between two collections. A step with hundreds of rows, or a burst of HTTP requests,
# allocates thousands of objects, and reference counting frees nearly all of them.
_THRESHOLD = 50_000


def tune_garbage_collector() -> None:
    """Exempt the process's permanent objects from collection, and collect less often."""
    gc.collect()
    gc.freeze()
    first, *others = gc.get_threshold()
    if 0 < first < _THRESHOLD:
        gc.set_threshold(_THRESHOLD, *others)
