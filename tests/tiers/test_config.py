"""The options of KV tiers."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from windlass import LLM
from windlass.config import EngineConfig
from windlass.errors import ConfigError
from windlass.start import make_client, open_prefill_port

DECODE = {"role": "decode", "prefill_servers": "127.0.0.1:1"}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"kv_offload_gb": 0}, "--kv-offload-gb must be above 0 and finite, got 0"),
        ({"kv_offload_gb": float("inf")}, "--kv-offload-gb must be above 0 and finite, got inf"),
        ({"prefix_cache_dir": "/x", "prefix_cache_gb": -1.0}, "--prefix-cache-gb must be above 0"),
        ({"prefix_cache_gb": 5.0}, "does nothing without --prefix-cache-dir"),
        ({"kv_offload_gb": 1.0, "prefix_caching": False}, "Leave out --no-prefix-caching"),
        ({"role": "decode"}, "--role decode needs --prefill-servers HOST:PORT"),
        ({"prefill_servers": "a:1"}, "--prefill-servers does nothing without --role decode"),
        ({"prefill_listen": "a:1"}, "--prefill-listen does nothing without --role prefill"),
        ({"kv_transfer_timeout": 3.0}, "--kv-transfer-timeout does nothing without --role decode"),
        ({"kv_transfer_gb": 3.0}, "does nothing without --prefill-replicas or --role prefill"),
        ({**DECODE, "kv_transfer_gb": 3.0}, "--kv-transfer-gb does nothing without"),
        ({"min_prefill_tokens": 5}, "does nothing without --prefill-replicas or --role decode"),
        (
            {"max_pinned_share": 0.1, "prefix_caching": False},
            "does nothing without --prefix-caching",
        ),
        ({"max_batch_size": 4}, "--max-batch-size does nothing without --batching static"),
        ({"max_wait_ms": 5.0}, "--max-wait-ms does nothing without --batching static"),
        ({**DECODE, "kv_transfer_timeout": 0.0}, "--kv-transfer-timeout must be above 0"),
        ({**DECODE, "prefill_servers": "a"}, "--prefill-servers must be HOST:PORT, got 'a'"),
        (
            {**DECODE, "prefill_servers": "a:1,a:0"},
            "--prefill-servers must be HOST:PORT, got 'a:0'",
        ),
        ({**DECODE, "prefill_servers": "a:1,a:1"}, "names a server twice: a:1, a:1"),
        (
            {**DECODE, "tensor_parallel_size": 2, "nnodes": 2},
            "--role decode hands KV blocks over through memory that all ranks of an engine share",
        ),
        (
            {**DECODE, "data_parallel_size": 2, "prefill_replicas": 1},
            "--role decode and --prefill-replicas are two ways",
        ),
        ({"role": "prefill", "prefill_listen": "x:y"}, "--prefill-listen must be HOST:PORT"),
        ({"role": "prefill", "data_parallel_size": 2}, "Start a prefill server for each device"),
        ({"cluster_secret": "s" * 20}, "does nothing without --nnodes, --role prefill or"),
        (
            {**DECODE, "cluster_secret": "s" * 20, "cluster_secret_file": "f"},
            "are both given. Use one",
        ),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, object], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        EngineConfig.of(**options)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"prefix_caching": False}, "Leave out --no-prefix-caching"),
        ({"prefill_servers": "10.0.0.1:1"}, "--prefill-servers 10.0.0.1 can be reached from other"),
        (
            {"cluster_secret": "short"},
            "--cluster-secret has 5 characters, and at least 16 are needed",
        ),
    ],
)
def test_decode_servers_that_cannot_work_are_refused(
    options: dict[str, object], error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        make_client(EngineConfig.of(**{**DECODE, **options}))


def test_a_prefill_server_needs_a_secret_and_a_free_port() -> None:
    config = EngineConfig.of(role="prefill", prefill_listen="0.0.0.0:29600")
    with pytest.raises(ConfigError, match=r"--prefill-listen 0\.0\.0\.0 can be reached from other"):
        open_prefill_port(config.parallel)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        config = EngineConfig.of(role="prefill", prefill_listen=address, kv_transfer_gb=0.001)
        with pytest.raises(
            ConfigError, match=f"--prefill-listen {address} cannot be bound: Address"
        ):
            open_prefill_port(config.parallel)


def test_addresses_of_prefill_servers() -> None:
    config = EngineConfig.of(
        role="decode", prefill_servers=["a:1,b:2", "[::1]:3"], data_parallel_size=2
    )
    assert config.parallel.prefill_addresses == ["a:1", "b:2", "[::1]:3"]
    assert config.parallel.roles == ("decode", "decode", "prefill", "prefill", "prefill")


def test_a_directory_of_others_is_refused_before_weights_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("windlass.runner.load.load_network", None)
    shared = tmp_path / "kv"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(ConfigError, match="has mode 0777, so that other users can change it"):
        LLM(
            "benchmarks/models/smollm2-135m",
            load_format="dummy",
            device="cpu",
            prefix_cache_dir=str(shared),
        )
