"""The options of KV tiers."""

from __future__ import annotations

import pytest

from windlass.config import EngineConfig
from windlass.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"kv_offload_gb": 0}, "--kv-offload-gb must be above 0 and finite, got 0"),
        ({"kv_offload_gb": float("inf")}, "--kv-offload-gb must be above 0 and finite, got inf"),
        ({"prefix_cache_dir": "/x", "prefix_cache_gb": -1.0}, "--prefix-cache-gb must be above 0"),
        ({"prefix_cache_gb": 5.0}, "does nothing without --prefix-cache-dir"),
        ({"kv_offload_gb": 1.0, "prefix_caching": False}, "Leave out --no-prefix-caching"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, object], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        EngineConfig.of(**options)
