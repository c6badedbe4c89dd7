"""Makes schedulers from named options and parts."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from windlass.core.blocks import BlockPool
from windlass.core.limits import SchedulerLimits
from windlass.core.scheduler import Scheduler, SchedulerOptions, SchedulerParts


def make_scheduler(limits: SchedulerLimits, pool: BlockPool, **given: Any) -> Scheduler:
    """`given`: fields of `SchedulerOptions` and `SchedulerParts`."""
    parts = {
        field.name: given.pop(field.name) for field in fields(SchedulerParts) if field.name in given
    }
    return Scheduler(limits, pool, SchedulerOptions(**given), SchedulerParts(**parts))
