"""All user settings, as frozen dataclasses that are validated on construction.

Facts found at run time have their own types (`Capacity` in core). A field's `help` is the help text
of its command line flag; `flags` are further names, which other engines use. No torch here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from windlass.errors import ConfigError
from windlass.lora_config import LoraConfig as LoraConfig
from windlass.parallel_config import CombineRule as CombineRule
from windlass.parallel_config import ParallelConfig as ParallelConfig
from windlass.parallel_config import Role as Role
from windlass.settings import DType as DType
from windlass.settings import Quantization as Quantization
from windlass.settings import at_least, refuse_unused
from windlass.settings import flag as flag
from windlass.settings import option as option
from windlass.settings import split_options as split_options
from windlass.speculative_config import MAX_SPEC_TOKENS as MAX_SPEC_TOKENS
from windlass.speculative_config import SpecConfig as SpecConfig

ModelImpl = Literal["auto", "windlass", "transformers"]
LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
Device = Literal["auto", "cpu", "cuda"]
KVCacheDType = Literal["auto", "fp8", "fp8_e4m3", "int8"]
PoolingType = Literal["last", "mean"]
PromptRounding = Literal["coarse", "fine"]
Batching = Literal["continuous", "static", "none"]
Task = Literal["auto", "generate", "embed", "score"]
PolicyName = Literal["fcfs", "priority"]
SchemaStrictness = Literal["strict", "relaxed"]
ProfileName = Literal["chat", "batch", "hybrid"]

AUTO = -1  # for integers: the engine chooses the value and reports the reason
MAX_THREADS = 1024
MAX_HTTP_WORKERS = 64
MIN_LOG_INTERVAL_S = 0.05
MIN_HANG_TIMEOUT_S = 0.5  # an idle engine sends a heartbeat several times as often
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#@\sA-Z]+")
_MAX_TIMEOUT_S = 1e7  # about 115 days; timers cannot wait much longer


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model, its source, and its arithmetic."""

    model: str = option("default", "Hub id, folder, .gguf file, or 'default'.")
    served_model_name: tuple[str, ...] = option(
        (),
        "Model name in the API; repeatable: the first is the one in responses; default: the model's "
        "own name.",
    )
    tokenizer: str | None = option(
        None, "Folder or tokenizer.json that replaces the model's tokenizer."
    )
    dtype: DType = option(
        "auto",
        "Data type of the computation; float32 dequantises the weights and is the reference.",
    )
    quantization: Quantization | None = option(
        None, "Quantise 16-bit weights to this format at load time.", "-q"
    )
    quantize_head: bool = option(False, "With --quantization: quantise the LM head too.")
    device: Device = option("auto", "Device to run on.")
    model_impl: ModelImpl = option(
        "auto",
        "Code that computes the network: Windlass' own, or transformers', which is slower; auto uses "
        "transformers for architectures that Windlass does not have.",
    )
    load_format: LoadFormat = option("auto", "Format of the weights; dummy makes random weights.")
    revision: str | None = option(None, "Branch, tag or commit of a hub model.")
    download_dir: str | None = option(None, "Folder for downloaded models.")
    hf_token: str | None = option(
        None, "Token for private or gated models on the hub; also $HF_TOKEN.", secret=True
    )
    hf_overrides: Mapping[str, Any] = option({}, "JSON object merged into the model's config.json.")
    max_model_len: int | None = option(
        None,
        "Maximum length of prompt plus output; -1: what the KV cache holds; default: the model's.",
    )
    task: Task = option(
        "auto",
        "Kinds of requests to serve. auto: text if the model has an LM head, and embeddings or scores; "
        "generate: text only; embed, score: embeddings or scores only.",
    )
    pooling_type: PoolingType | None = option(
        None,
        "Hidden states that make an embedding: of the last position, or the mean over all positions; "
        "default: as the model's files say, else last.",
    )
    seed: int = option(0, "Seed of dummy weights and of requests without a seed.")
    generation_config: Literal["auto", "none"] = option(
        "auto", "Read sampling defaults from the model's generation_config.json, or use none."
    )
    override_generation_config: Mapping[str, Any] = option(
        {}, "JSON object with sampling defaults that replace those of generation_config.json."
    )
    enforce_eager: bool = option(
        False, "Run every step operator by operator, without captured graphs or programs."
    )
    lazy_capture: bool = option(
        False,
        "On CUDA, capture graphs of some sizes at start and the others while the server is idle: it is "
        "ready earlier, but its first steps pad more.",
    )
    plain_kernels: bool = option(
        False, "Use the torch reference implementation of every operation.", "--reference-kernels"
    )
    num_threads: int = option(
        AUTO,
        "CPU threads of the computation of each process; -1: one per physical core of a NUMA node, divided "
        "among the processes, within the CPU quota.",
    )

    def __post_init__(self) -> None:
        if self.max_model_len is not None and self.max_model_len != AUTO:
            at_least(self, 1, "max_model_len")
        if self.num_threads != AUTO:
            at_least(self, 1, "num_threads")
        if self.num_threads > MAX_THREADS:
            raise ConfigError(
                f"--num-threads must be at most {MAX_THREADS}, got {self.num_threads}. Omit "
                "it to use one thread per physical core."
            )
        if self.quantize_head and self.quantization is None:
            raise ConfigError(
                "--quantize-head does nothing without --quantization. Add for example "
                "--quantization int8."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int | None = option(
        None,
        "Tokens per KV block, a power of two; default: 16, or more for a model with recurrent states, "
        "of which each block keeps a copy.",
    )
    memory_share: float | None = option(
        None,
        "Share of a GPU's memory to use, or of a CPU's free memory, which replicas divide; default: by "
        "profile.",
        "--gpu-memory-utilization",
    )
    kv_cache_memory_bytes: int | None = option(
        None, "Exact size of the KV cache, for example 4GiB; overrides --memory-share."
    )
    num_blocks: int | None = option(
        None,
        "Exact number of KV blocks; overrides the size and the share.",
        "--num-gpu-blocks-override",
    )
    kv_cache_dtype: KVCacheDType = option(
        "auto",
        "Data type of the KV cache: the compute dtype, or one byte per value, which holds twice the tokens: "
        "fp8 for GPUs, int8 for CPUs.",
    )
    prefix_caching: bool = option(
        True,
        "Reuse computed KV blocks for prompts with the same prefix.",
        "--enable-prefix-caching",
    )
    kv_offload_gb: float | None = option(
        None,
        "GiB of host memory, of all ranks together, for cached KV blocks that the device has no room "
        "for; a prompt finds its prefix there as well.",
    )
    prefix_cache_dir: str | None = option(
        None,
        "Folder for cached KV blocks, which outlive the server; --prefix-cache-gb is its limit.",
    )
    prefix_cache_gb: float | None = option(
        None, "Maximum size of --prefix-cache-dir in GiB; default: 20."
    )
    max_pinned_share: float = option(
        0.25,
        "Max share of the KV blocks that named prefixes (POST /admin/kv/save) keep from eviction.",
    )

    def __post_init__(self) -> None:
        at_least(self, 1, "block_size", "num_blocks", "kv_cache_memory_bytes")
        self._check_tiers()
        if self.block_size is not None and self.block_size & (self.block_size - 1):
            raise ConfigError(f"--block-size must be a power of two, got {self.block_size}.")
        share = self.memory_share
        if share is not None and not 0.0 < share <= 1.0:
            raise ConfigError(
                f"--memory-share must be above 0 and at most 1, got {share}. Example: 0.85."
            )
        if not 0.0 <= self.max_pinned_share <= 1.0:
            raise ConfigError(
                f"--max-pinned-share must be between 0 and 1, got {self.max_pinned_share}. Example: 0.25."
            )

    def _check_tiers(self) -> None:
        for name in ("kv_offload_gb", "prefix_cache_gb"):
            size = getattr(self, name)
            if size is not None and not 0.0 < size < math.inf:
                raise ConfigError(f"{flag(name)} must be above 0 and finite, got {size:g}.")
        if self.prefix_cache_gb is not None and self.prefix_cache_dir is None:
            raise ConfigError("--prefix-cache-gb does nothing without --prefix-cache-dir DIR.")
        if not self.prefix_caching:
            refuse_unused(self, "--prefix-caching", "max_pinned_share")
        if self.has_tiers and not self.prefix_caching:
            raise ConfigError(
                "--kv-offload-gb and --prefix-cache-dir extend the prefix cache. Leave out "
                "--no-prefix-caching."
            )

    @property
    def has_tiers(self) -> bool:
        """Whether cached KV blocks are kept beyond the device."""
        return self.kv_offload_gb is not None or self.prefix_cache_dir is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Batching, scheduling order and prompt processing. None: set by the profile."""

    profile: ProfileName | None = option(
        None,
        "Starting point: chat (latency), batch (throughput), hybrid; "
        "default: hybrid on a GPU, short steps on a CPU.",
    )
    max_num_seqs: int | None = option(None, "Maximum number of running requests.", live=True)
    max_num_batched_tokens: int | None = option(
        None, "Maximum number of tokens per step.", live=True
    )
    long_prefill_token_threshold: int = option(
        0, "Maximum prompt tokens of one request per step; 0: all tokens of the step."
    )
    enable_chunked_prefill: bool = option(
        True, "Split long prompts into chunks that share steps with running requests."
    )
    prompt_rounding: PromptRounding = option(
        "coarse",
        "Group size of int8 activations in int4 GEMMs on a CPU, for prompt tokens: coarse is one scale "
        "per 192 values, which is faster with VNNI or NEON; fine one per 32, as for generated tokens. Without "
        "them, and with AMX, prompts are always fine.",
        "--prompt-activation-groups",
    )
    scheduling_policy: PolicyName = option(
        "fcfs", "Order of queued requests; with several tenants, the order within each tenant."
    )
    fair_share: bool = option(
        True, "Share the engine between tenants by weight; without it, one queue serves all."
    )
    batching: Batching = option(
        "continuous", "Batching; static and none are baselines for benchmarks."
    )
    overlap: bool = option(
        True,
        "Plan and launch a step before the tokens of the previous step have arrived (CUDA).",
        "--async-scheduling",
    )
    max_batch_size: int = option(8, "Static batching: start when this many requests are queued.")
    max_wait_ms: float = option(50.0, "Static batching: start a smaller batch after this time.")
    slo_tpot_ms: float | None = option(
        None,
        "Target of the time per output token: prompt tokens per step, running requests and draft tokens "
        "are limited so that 99 % of the steps are shorter.",
        live=True,
    )
    slo_ttft_ms: float | None = option(
        None,
        "Target of the time to the first token: prompts that would miss it get longer steps, while running "
        "requests have time to spare; see also --slo-admission.",
        live=True,
    )

    def __post_init__(self) -> None:
        at_least(self, 1, "max_num_seqs", "max_num_batched_tokens", "max_batch_size")
        at_least(self, 0, "long_prefill_token_threshold", "max_wait_ms")
        for name in ("slo_tpot_ms", "slo_ttft_ms"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < math.inf:
                raise ConfigError(f"{flag(name)} must be above 0, got {value}.")
            if value is not None and value > 1000 * _MAX_TIMEOUT_S:
                raise ConfigError(
                    f"{flag(name)} must be at most {1000 * _MAX_TIMEOUT_S:g}, got {value:g}."
                )
        if self.batching != "static":
            refuse_unused(self, "--batching static", "max_batch_size", "max_wait_ms")
        if self.slo_tpot_ms is not None and not self.enable_chunked_prefill:
            raise ConfigError(
                "--slo-tpot-ms needs chunked prefill, since it limits the prompt tokens of a step. Drop "
                "--no-enable-chunked-prefill."
            )
        if self.slo_tpot_ms is not None and self.batching != "continuous":
            raise ConfigError(f"--slo-tpot-ms does not work with --batching {self.batching}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarConfig:
    """Limits for clients' grammars: JSON schemas, regular expressions, choices, GBNF, Lark."""

    grammar_compile_timeout: float = option(
        5.0, "Maximum CPU seconds to compile a grammar; beyond that the request gets 400."
    )
    grammar_memory_bytes: int = option(
        512 * 2**20,
        "Maximum memory of one grammar, and of all grammars in use together; beyond that the request "
        "gets 400.",
        "--grammar-memory",
    )
    grammar_step_timeout: float = option(
        0.1,
        "Maximum CPU seconds of a request's grammar at one token, plus a tenth of this per token; "
        "beyond that the request ends with an error.",
    )
    schema_strictness: SchemaStrictness = option(
        "relaxed",
        "Keywords of a JSON schema that no grammar enforces (uniqueItems, not, contains, if): relaxed "
        "ignores them and names them in a response header and the log; strict: the request gets 400.",
    )

    def __post_init__(self) -> None:
        for name in ("grammar_compile_timeout", "grammar_step_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{flag(name)} must be above 0, got {getattr(self, name)!r}.")
        at_least(self, 16 * 2**20, "grammar_memory_bytes")


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
            if getattr(self, name) > _MAX_TIMEOUT_S:
                raise ConfigError(
                    f"{flag(name)} must be at most {_MAX_TIMEOUT_S:g}, got {getattr(self, name):g}."
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


def check_server(serve: ServeConfig, engine: EngineConfig) -> None:
    """Refuse options of a server that do not fit those of its engine."""
    if serve.lora_root and not engine.lora.enable_lora:
        raise ConfigError("--lora-root does nothing without --enable-lora.")
    check_slo(serve, engine.scheduler)


def check_slo(serve: ServeConfig, scheduler: SchedulerConfig) -> None:
    """Refuse targets of latency, and their admission control, that would have no effect."""
    if serve.slo_admission and scheduler.slo_ttft_ms is None:
        raise ConfigError("--slo-admission needs --slo-ttft-ms.")
    has_effect = serve.slo_admission or scheduler.slo_tpot_ms is not None
    if scheduler.slo_ttft_ms is not None and not has_effect:
        raise ConfigError("--slo-ttft-ms does nothing without --slo-tpot-ms or --slo-admission.")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class GateConfig:
    """Quality limits against a reference model; `gate_*`: how a server measures them at start-up."""

    min_agreement: float | None = option(
        None, "Minimum top-1 agreement with the reference model, for example 0.99 or 99%."
    )
    max_ppl_increase: float | None = option(
        None, "Maximum relative increase of the perplexity, for example 0.003 or 0.3%."
    )
    max_kl: float | None = option(None, "Maximum mean KL divergence from the reference, in nats.")
    gate_data: str | None = option(
        None, "Text to measure the quality on at start-up; the server exits if it misses a limit."
    )
    gate_against: str | None = option(None, "Reference model of the gate; default: the same model.")
    gate_against_options: str | None = option(
        None, "Options of the reference model: dtype=bfloat16,block_size=32."
    )
    gate_context: int = option(512, "Tokens per window of the gate.")
    gate_max_windows: int = option(64, "Maximum number of windows that the gate measures.")

    def __post_init__(self) -> None:
        at_least(self, 0, "min_agreement", "max_ppl_increase", "max_kl")
        at_least(self, 1, "gate_max_windows")
        at_least(self, 2, "gate_context")
        if self.min_agreement is not None and self.min_agreement > 1:
            raise ConfigError(
                f"--min-agreement must be at most 1, got {self.min_agreement:g}. "
                "Write 99 per cent as 0.99 or 99%."
            )

    @property
    def has_limits(self) -> bool:
        limits = (self.min_agreement, self.max_ppl_increase, self.max_kl)
        return any(limit is not None for limit in limits)


@dataclass(frozen=True, slots=True)
class Limits:
    """The scheduler's limits after applying the profile."""

    max_num_seqs: int
    max_num_batched_tokens: int
    memory_share: float
    seqs_reason: str
    tokens_reason: str


@dataclass(frozen=True, slots=True)
class _Profile:
    """Default limits."""

    max_num_seqs: int
    max_num_batched_tokens: int
    memory_share: float  # of a GPU's memory, or of a CPU's free memory


_PROFILES: dict[ProfileName, _Profile] = {
    "chat": _Profile(32, 4096, 0.70),
    "batch": _Profile(256, 32768, 0.95),
    "hybrid": _Profile(128, 16384, 0.85),
}
# A CPU computes a few hundred tokens per second: a longer step would stall every stream.
_CPU_PROFILE = _Profile(32, 512, 0.25)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All settings of an engine: `EngineConfig.of(model="default", max_num_seqs=8)`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculation: SpecConfig = field(default_factory=SpecConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    grammar: GrammarConfig = field(default_factory=GrammarConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    @classmethod
    def of(cls, **options: Any) -> EngineConfig:
        """Make a config from flat options. An unknown option raises, with the nearest name."""
        sections = {
            "model": ModelConfig,
            "cache": CacheConfig,
            "scheduler": SchedulerConfig,
            "speculation": SpecConfig,
            "lora": LoraConfig,
            "grammar": GrammarConfig,
            "parallel": ParallelConfig,
        }
        return cls(**split_options(sections, options))

    def limits(self, device: Literal["cpu", "cuda"]) -> Limits:
        """Apply the profile to the limits that are not set."""
        settings = self.scheduler
        if settings.profile is None and device == "cpu":
            profile, reason = _CPU_PROFILE, "short steps, since this is a CPU"
        else:
            name = settings.profile or "hybrid"
            profile, reason = _PROFILES[name], f"profile {name}"
        seqs_reason = reason if settings.max_num_seqs is None else "as set"
        seqs = settings.max_num_seqs or profile.max_num_seqs
        if settings.batching != "continuous":
            seqs = settings.max_batch_size if settings.batching == "static" else 1
            seqs_reason = f"batching {settings.batching}"
        tokens_reason = reason if settings.max_num_batched_tokens is None else "as set"
        tokens = settings.max_num_batched_tokens or max(profile.max_num_batched_tokens, seqs)
        if tokens < seqs:
            raise ConfigError(
                f"--max-num-batched-tokens ({tokens}) is below --max-num-seqs ({seqs}): a step "
                f"could not advance all running requests. Raise the first to {seqs} or more."
            )
        share = self.cache.memory_share or profile.memory_share
        # Replicas have GPUs of their own, but share a CPU's memory.
        return Limits(
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            memory_share=share / self.parallel.data_parallel_size if device == "cpu" else share,
            seqs_reason=seqs_reason,
            tokens_reason=tokens_reason,
        )
