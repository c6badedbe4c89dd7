"""The rank processes that a test has started."""

from __future__ import annotations

import multiprocessing
from multiprocessing.process import BaseProcess


def rank_processes() -> list[BaseProcess]:
    return [
        each for each in multiprocessing.active_children() if each.name.startswith("windlass-rank")
    ]
