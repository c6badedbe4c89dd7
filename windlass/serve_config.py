"""Options of the HTTP server, and their validation. Does not import torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from windlass.errors import ConfigError
from windlass.settings import AUTO, MAX_TIMEOUT_S, at_least, flag, option, refuse_unused

MAX_HTTP_WORKERS = 64
MIN_LOG_INTERVAL_S = 0.05
MIN_HANG_TIMEOUT_S = 0.5  # an idle engine sends a heartbeat several times as often
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#@\sA-Z]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """The HTTP server."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0: all addresses.")
    port: int = option(8000, "Port to listen on; 0: a free port.")
    uds: str | None = option(None, "Unix socket to listen on instead of host and port.")
    uds_mode: str = option(
        "600", "Permissions of --uds, octal: 660 lets the server's group connect."
    )
    api_key: tuple[str, ...] = option(
        (),
        "Key that clients must send; repeatable. Prefer --api-key-file or $WINDLASS_API_KEY, which "
        "the process list does not show.",
        secret=True,
    )
    api_key_file: tuple[str, ...] = option((), "File with further keys, one per line; repeatable.")
    admin_key: tuple[str, ...] = option(
        (),
        "Key for admin endpoints (adapters, sleep, cache) and all others; repeatable. Prefer "
        "--admin-key-file or $WINDLASS_ADMIN_KEY.",
        secret=True,
    )
    admin_key_file: tuple[str, ...] = option(
        (), "File with further admin keys, one per line; repeatable."
    )
    keys_file: str | None = option(
        None,
        "YAML or JSON file with tenants: their keys as hashes (windlass keys), weight, limits, rights "
        "and budget; read again on SIGHUP.",
    )
    share_prefix_cache: bool = option(
        False, "Let tenants share cached prefixes; timing then reveals what others have sent."
    )
    lora_root: tuple[str, ...] = option(
        (), "The API loads adapters only from inside this folder; repeatable."
    )
    ssl_keyfile: str | None = option(None, "TLS key file.")
    ssl_certfile: str | None = option(None, "TLS certificate file.")
    ssl_ca_certs: str | None = option(None, "TLS CA certificates for verifying clients.")
    enable_ssl_refresh: bool = option(
        False,
        "Load the TLS files again whenever they change; SIGHUP loads them in any case.",
    )
    allowed_origins: tuple[str, ...] = option(
        (), "Origin that browsers may send requests from (CORS); repeatable.", live=True
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Accepted Host header beside localhost and --host; repeatable; *: any. Default: checked only "
        "when --host is a loopback address.",
        live=True,
    )
    root_path: str = option("", "Path prefix behind a reverse proxy.")
    chat_template: str | None = option(
        None, "File with a Jinja template that replaces the model's."
    )
    score_template: str | None = option(
        None,
        "File with a Jinja template that writes a query and a document into the prompt of a model that "
        "scores pairs; its `messages` have the roles query and document.",
    )
    default_chat_template_kwargs: Mapping[str, Any] = option(
        {}, "JSON object with variables for every chat template."
    )
    tool_call_parser: str = option(
        "auto",
        "How the model writes tool calls: hermes, llama3_json, pythonic, mistral, qwen3_coder, glm45, "
        "deepseek, harmony, granite, json. auto: as its chat template says.",
    )
    unknown_fields: Literal["error", "warn", "ignore"] = option(
        "warn",
        "Unknown fields of request bodies: error: 400; warn: a line in the log, and their names in the "
        "response header X-Windlass-Unknown-Fields.",
        live=True,
    )
    trust_request_chat_template: bool = option(
        False, "Let requests bring their own chat template (field chat_template)."
    )
    reasoning_parser: str = option(
        "auto",
        "The tags of the model's reasoning: think, mistral, seed, none. auto: as its chat template says.",
    )
    max_num_queued_reqs: int = option(
        1024, "Maximum number of queued requests; more get 429.", live=True
    )
    max_num_queued_tokens: int | None = option(
        None, "Maximum number of queued prompt tokens; more get 429.", live=True
    )
    slo_admission: bool = option(
        False,
        "Refuse requests with 429 whose predicted time to the first token exceeds --slo-ttft-ms.",
        live=True,
    )
    max_body_bytes: int = option(
        4 * 2**20, "Maximum size of a request body; a larger one gets 413.", live=True
    )
    max_buffered_body_bytes: int = option(
        256 * 2**20,
        "Maximum total size of request bodies being received; beyond that: 503.",
        live=True,
    )
    max_url_bytes: int = option(
        8 * 2**10, "Maximum length of a URL; a longer one gets 414.", live=True
    )
    max_header_bytes: int = option(
        32 * 2**10, "Maximum total size of a request's headers; beyond that: 431.", live=True
    )
    max_header_fields: int = option(
        100, "Maximum number of headers of a request; beyond that: 431.", live=True
    )
    http_workers: int = option(
        AUTO,
        "Processes that receive requests, tokenize and send responses; -1: one on a CPU, and on a GPU "
        "one per four cores, at most four.",
    )
    max_connections: int = option(
        AUTO, "Maximum number of open connections; more get 503; -1: from ulimit -n."
    )
    max_stream_buffer_bytes: int = option(
        2**20,
        "Maximum unread bytes of a stream; a client that reads slower is disconnected.",
        live=True,
    )
    header_timeout: float = option(
        20.0, "Seconds for a client to send the headers of a request.", live=True
    )
    body_timeout: float = option(
        30.0,
        "Seconds after which a body that arrives slower than --min-transfer-rate gets 408.",
        live=True,
    )
    write_timeout: float = option(
        30.0,
        "Seconds after which a client that reads slower than --min-transfer-rate is disconnected.",
        live=True,
    )
    keep_alive_timeout: float = option(
        30.0, "Seconds until an idle connection is closed.", live=True
    )
    min_transfer_rate: int = option(
        512,
        "Bytes per second below which a sending or reading client counts as stalled.",
        live=True,
    )
    max_logprobs: int = option(
        20, "Maximum logprobs per token of a request; -1: no limit.", live=True
    )
    stream_interval: int = option(1, "Tokens per streamed chunk.", live=True)
    fallback: tuple[str, ...] = option(
        (),
        "MODEL,option=value,... that answers requests which the server's own model cannot answer in time, "
        "or max_tokens=N for a shorter answer; repeatable, in this order. A model needs its own "
        "memory_share.",
    )
    fallback_wait_ms: float = option(
        2000.0,
        "Predicted wait beyond which requests with fallback: auto are answered by --fallback.",
    )
    shutdown_timeout: float = option(
        30.0, "Seconds to finish running requests after SIGTERM.", live=True
    )
    hang_timeout: float = option(
        120.0,
        "Seconds without a heartbeat until the engine process counts as hung; it is killed and "
        "restarted after 1.5 times this. 0: never.",
        live=True,
    )
    retry_on_restart: bool = option(
        False,
        "When the engine dies, rerun the requests whose clients have received nothing yet in the "
        "restarted engine, instead of answering 503.",
        live=True,
    )
    log_format: Literal["text", "json"] = option(
        "text", "Format of the log; json: one object per line."
    )
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "Minimum level of logged lines.", live=True
    )
    log_stats_interval: float = option(
        10.0,
        "Seconds between lines with the throughput in the log, while requests run; 0: none.",
        live=True,
    )
    metrics_prefix: Literal["windlass", "vllm", "both"] = option(
        "windlass",
        "Prefix of the metrics that vLLM has too: windlass:NAME, vllm:NAME or both. All others are "
        "windlass:NAME.",
    )
    max_metric_tenants: int = option(
        100, "Maximum number of tenants with their own label in /metrics; others are 'other'."
    )
    console: bool = option(True, "Serve the web console at /.")
    enable_log_requests: bool | None = option(
        None,
        "Log a line per request: how it ended, tokens, times, cost; never texts or keys. Default: with "
        "--log-format json.",
        live=True,
    )
    log_bodies: bool = option(
        False,
        "Log the bodies of requests and responses too, up to 16 KiB each: prompts and outputs of all "
        "clients are then in the log.",
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "URL of an OpenTelemetry collector (OTLP over HTTP) that gets a trace per request; needs "
        "windlass-llm[otel]. Default: from OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or "
        "OTEL_EXPORTER_OTLP_ENDPOINT.",
    )
    enable_request_id_headers: bool = option(False, "Answer with X-Request-Id.", live=True)
    enable_force_include_usage: bool = option(False, "Include usage in every stream.", live=True)
    price_per_hour: float | None = option(
        None,
        "Cost of this machine in dollars per hour: adds costs to metrics and responses.",
        live=True,
    )
    data_dir: str | None = option(
        None, "Private folder for /v1/files and /v1/batches; without it, both are refused."
    )
    usage_db: str | None = option(
        None,
        "SQLite file with the usage of each tenant and key; default: usage.sqlite in --data-dir.",
    )
    max_file_bytes: int = option(
        200 * 2**20, "Maximum size of an uploaded file; a larger one gets 413.", live=True
    )
    max_data_bytes: int = option(
        16 * 2**30, "Size of --data-dir beyond which uploads are refused with 507.", live=True
    )
    max_num_batch_reqs: int | None = option(
        None, "Maximum number of concurrent batch requests; default: half of --max-num-seqs."
    )
    record_traffic: str | None = option(
        None, "Append requests and responses to this JSONL file, as calibration data for quantize."
    )
    record_share: float = option(
        0.1, "Share of requests to record, selected by request id.", live=True
    )
    record_max_bytes: int = option(64 * 2**20, "Maximum size of the recorded file.", live=True)

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be between 0 and 65535, got {self.port}.")
        at_least(self, 1, "max_num_queued_reqs", "max_num_queued_tokens", "max_body_bytes")
        at_least(self, 1, "stream_interval")
        at_least(self, 0, "shutdown_timeout", "price_per_hour")
        if self.hang_timeout != 0 and not self.hang_timeout >= MIN_HANG_TIMEOUT_S:
            raise ConfigError(
                f"--hang-timeout must be 0 (never) or at least {MIN_HANG_TIMEOUT_S} (seconds), got "
                f"{self.hang_timeout}: an engine that works would be killed."
            )
        for name in ("shutdown_timeout", "hang_timeout"):
            if getattr(self, name) > MAX_TIMEOUT_S:
                raise ConfigError(
                    f"{flag(name)} must be at most {MAX_TIMEOUT_S:g}, got {getattr(self, name):g}."
                )
        at_least(self, 0, "max_metric_tenants")
        if not 0.0 < self.fallback_wait_ms < math.inf:
            raise ConfigError(
                f"--fallback-wait-ms must be a number above 0, got {self.fallback_wait_ms}."
            )
        if self.price_per_hour == math.inf:
            raise ConfigError("--price-per-hour must be a number, got inf.")
        if self.log_stats_interval != 0 and not self.log_stats_interval >= MIN_LOG_INTERVAL_S:
            raise ConfigError(
                f"--log-stats-interval must be 0 or at least {MIN_LOG_INTERVAL_S} (seconds), got "
                f"{self.log_stats_interval}."
            )
        self._check_transport()
        for key in self.api_key:
            check_key(key, "--api-key")
        for key in self.admin_key:
            check_key(key, "--admin-key")
        at_least(self, 1, "record_max_bytes", "max_file_bytes", "max_data_bytes")
        at_least(self, 1, "max_num_batch_reqs")
        if not 0.0 < self.record_share <= 1.0:
            raise ConfigError(
                f"--record-share must be above 0 and at most 1, got {self.record_share}."
            )
        if self.record_traffic is None:
            refuse_unused(self, "--record-traffic FILE", "record_share", "record_max_bytes")
        if self.data_dir is None:
            files = ("max_file_bytes", "max_data_bytes", "max_num_batch_reqs")
            refuse_unused(self, "--data-dir FOLDER", *files)
        if self.log_bodies and not self.logs_requests:
            raise ConfigError("--log-bodies does nothing with --no-enable-log-requests.")
        for root in self.lora_root:
            if not Path(root).is_dir():
                raise ConfigError(f"--lora-root: no such folder: {root}")
        if self.lora_root and not (self.admin_key or self.admin_key_file or self.keys_file):
            raise ConfigError("--lora-root does nothing without --admin-key KEY.")
        if not re.fullmatch("0?[0-7]{3}", self.uds_mode):
            raise ConfigError(f"--uds-mode is octal, such as 660; got {self.uds_mode!r}.")
        if self.uds is None:
            refuse_unused(self, "--uds PATH", "uds_mode")
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise ConfigError("--ssl-keyfile and --ssl-certfile go together: give both.")
        for name in ("ssl_ca_certs", "enable_ssl_refresh"):
            if getattr(self, name) and not self.ssl_certfile:
                raise ConfigError(f"{flag(name)} needs --ssl-certfile and --ssl-keyfile.")
        for name in ("chat_template", "score_template"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"{flag(name)}: no such file: {path}")

    @property
    def logs_requests(self) -> bool:
        """Whether each request is a line in the log."""
        if self.enable_log_requests is None:
            return self.log_format == "json" or self.log_bodies
        return self.enable_log_requests

    def _check_transport(self) -> None:
        # A server accepts PATCH /admin/config in any case, so that each limit can be raised again.
        at_least(self, 64, "max_url_bytes")
        at_least(self, 512, "max_header_bytes")
        at_least(self, 10, "max_header_fields")
        at_least(self, 1, "max_stream_buffer_bytes", "min_transfer_rate")
        if self.http_workers != AUTO:
            at_least(self, 1, "http_workers")
        if self.http_workers > MAX_HTTP_WORKERS:
            raise ConfigError(
                f"--http-workers must be at most {MAX_HTTP_WORKERS}, got {self.http_workers}."
            )
        if self.max_connections != AUTO:
            at_least(self, 1, "max_connections")
        for name in ("header_timeout", "body_timeout", "write_timeout", "keep_alive_timeout"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{flag(name)} must be above 0, got {getattr(self, name)}. A connection "
                    "without a time limit can stay open for ever; choose a large number instead."
                )
        if self.max_buffered_body_bytes < self.max_body_bytes:
            raise ConfigError(
                f"--max-buffered-body-bytes ({self.max_buffered_body_bytes}) is below "
                f"--max-body-bytes ({self.max_body_bytes}): a body of maximum size would never be accepted."
            )
        for host in self.allowed_hosts:
            if host != "*" and (not host or set(host) & set("/*@ ,")):
                raise ConfigError(
                    f"--allowed-hosts {host!r}: expected a host name or address without scheme and "
                    "path, for example api.example.com; * allows any."
                )
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"--allowed-origins {origin!r:.200}: expected a scheme and a host in lower case, as "
                    "browsers send them, for example https://shop.example:8443; * allows any."
                )


def check_key(key: str, source: str) -> None:
    """Refuse a key that would let everybody in, or that no client could send."""
    if not key.strip():
        raise ConfigError(
            f"{source} is empty: anybody could use the server. Give a key, or leave it out."
        )
    if any(char.isspace() or not char.isprintable() for char in key):
        raise ConfigError(
            f"{source} has a space or a control character, which no Authorization header can carry."
        )
