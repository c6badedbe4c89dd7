"""What the scheduler of a config gets from the config's profile."""

from __future__ import annotations

import pytest

from windlass.config import EngineConfig
from windlass.core.card import Capacity
from windlass.core.kv_layout import KVLayout
from windlass.core.make_scheduler import make_scheduler
from windlass.core.slo import NoSlo, SloController


@pytest.mark.parametrize(
    ("options", "device", "tpot_s"),
    [
        ({}, "cuda", None),
        ({"profile": "chat"}, "cpu", None),
        ({"profile": "chat"}, "cuda", 0.035),
        ({"profile": "chat", "slo_tpot_ms": 60}, "cuda", 0.06),
        ({"profile": "chat", "batching": "static"}, "cuda", None),
    ],
)
def test_the_chat_profile_has_a_latency_target_on_a_gpu(
    options: dict[str, object], device: str, tpot_s: float | None
) -> None:
    config = EngineConfig.of(**options)
    capacity = Capacity(64, KVLayout.unsized(16), 1, "as set")
    scheduler = make_scheduler(config, config.limits(device), capacity=capacity, max_model_len=256)
    if tpot_s is None:
        assert isinstance(scheduler._slo, NoSlo)
    else:
        assert isinstance(scheduler._slo, SloController)
        assert scheduler._slo.targets.tpot_s == tpot_s
