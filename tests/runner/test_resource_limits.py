"""Settings that ask for more memory than there is: one paragraph with the numbers, no traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runner.test_deterministic import CONFIG
from windlass import LLM
from windlass.config import EngineConfig
from windlass.errors import ConfigError
from windlass.runner import device, program

MIB = 2**20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"kv_cache_memory_bytes": 2**50}, r"--kv-cache-memory-bytes .*1048576\.0 GiB"),
        ({"num_blocks": 2**40}, r"--num-blocks 1099511627776"),
        ({"num_blocks": 10, "max_num_seqs": 2**40}, r"--max-num-seqs 1099511627776"),
        ({"num_blocks": 10, "max_num_batched_tokens": 2**40}, r"--max-num-batched-tokens"),
    ],
)
def test_more_memory_than_the_machine_has_is_refused(
    folder: Path, options: dict[str, int], flag: str
) -> None:
    with pytest.raises(ConfigError, match=flag) as refused:
        LLM(str(folder), load_format="dummy", device="cpu", **options)
    assert "\n" not in str(refused.value)
    assert "free" in str(refused.value)


def test_more_threads_than_the_limit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--num-threads.*1024.*100000"):
        EngineConfig.of(num_threads=100000)


@pytest.mark.parametrize("free", [50 * MIB, 100 * MIB])
def test_a_cache_is_refused_before_it_is_allocated(
    folder: Path, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    """Linux would hand out more than there is, and kill the process when it is used."""
    monkeypatch.setattr(device, "free_bytes", lambda _device: free)
    with pytest.raises(ConfigError, match=r"--kv-cache-memory-bytes 101\.0 MiB"):
        LLM(str(folder), load_format="dummy", device="cpu", kv_cache_memory_bytes=101 * MIB)


def test_memory_of_steps_is_counted_with_the_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages of a new cache are not touched yet, so that the system still calls them free."""
    for module in (device, program):
        monkeypatch.setattr(module, "free_bytes", lambda _device: 100 * MIB)
    cache = {"kv_cache_memory_bytes": 100 * MIB - 1024}
    with pytest.raises(ConfigError, match="beside the KV cache"):
        LLM(str(folder), load_format="dummy", device="cpu", **cache)
