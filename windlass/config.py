"""Everything a user can set: frozen, checked when made, read and never written afterwards.

Facts that are found out at run time have their own types (`Capacity` in core). A field's `help` is
the text of its command line flag; `flags` are further names that users of other engines know.
No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from windlass.errors import ConfigError
from windlass.lora_config import LoraConfig as LoraConfig
from windlass.settings import DType as DType
from windlass.settings import Quantization as Quantization
from windlass.settings import at_least
from windlass.settings import flag as flag
from windlass.settings import option as option
from windlass.settings import split_options as split_options
from windlass.speculative_config import MAX_SPEC_TOKENS as MAX_SPEC_TOKENS
from windlass.speculative_config import SpecConfig as SpecConfig

LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
Device = Literal["auto", "cpu", "cuda"]
KVCacheDType = Literal["auto", "fp8", "fp8_e4m3", "int8"]
PromptRounding = Literal["coarse", "fine"]
Batching = Literal["continuous", "static", "none"]
PolicyName = Literal["fcfs", "priority"]
ProfileName = Literal["chat", "batch", "hybrid"]

AUTO = -1  # for whole numbers: choose it, and say why
MAX_THREADS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, from where, in which arithmetic."""

    model: str = option("default", "Hub id, folder, .gguf file, or 'default'.")
    served_model_name: str | None = option(None, "The name in the API; default: the model's own.")
    tokenizer: str | None = option(None, "Folder or tokenizer.json to use instead of the model's.")
    dtype: DType = option(
        "auto", "Arithmetic; float32 dequantises the weights and is the reference."
    )
    quantization: Quantization | None = option(
        None, "Round 16-bit weights to this while they are loaded.", "-q"
    )
    quantize_head: bool = option(False, "With --quantization: the LM head too.")
    device: Device = option("auto", "Where to compute.")
    load_format: LoadFormat = option("auto", "How to read weights; dummy makes random ones.")
    revision: str | None = option(None, "Branch, tag or commit of a hub model.")
    download_dir: str | None = option(None, "Where downloaded models are kept.")
    hf_token: str | None = option(None, "Token for private or gated hub models.")
    hf_overrides: Mapping[str, Any] = option({}, "JSON merged over the model's config.json.")
    max_model_len: int | None = option(
        None, "Longest prompt plus output; -1: what the KV cache holds; default: the model's own."
    )
    seed: int = option(0, "Seed for dummy weights and for requests that bring none.")
    generation_config: Literal["auto", "none"] = option(
        "auto", "Take sampling defaults from the model's generation_config.json, or none."
    )
    enforce_eager: bool = option(
        False, "Run every step operator by operator, not as one that was recorded."
    )
    plain_kernels: bool = option(
        False, "Use only the plain torch version of every operation, to compare with."
    )
    num_threads: int = option(AUTO, "CPU threads for computing; -1: as many as there are cores.")

    def __post_init__(self) -> None:
        if self.max_model_len is not None and self.max_model_len != AUTO:
            at_least(self, 1, "max_model_len")
        if self.num_threads != AUTO:
            at_least(self, 1, "num_threads")
        if self.num_threads > MAX_THREADS:
            raise ConfigError(
                f"--num-threads must be at most {MAX_THREADS}, got {self.num_threads}. Leave it "
                "out to use one thread for each core."
            )
        if self.quantize_head and self.quantization is None:
            raise ConfigError(
                "--quantize-head does nothing without --quantization. Add one, such as "
                "--quantization int8."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = option(16, "Tokens per KV block.")
    memory_share: float | None = option(
        None,
        "Share of a GPU's memory to use, or of the free memory on a CPU; default: by profile.",
        "--gpu-memory-utilization",
    )
    kv_cache_memory_bytes: int | None = option(
        None, "Exact size of the KV cache, such as 4GiB; overrides the share."
    )
    num_blocks: int | None = option(
        None, "Exact number of KV blocks; overrides both.", "--num-gpu-blocks-override"
    )
    kv_cache_dtype: KVCacheDType = option(
        "auto",
        "How keys and values are stored: as they are computed, or rounded to one byte, which holds "
        "twice the tokens: fp8 for GPUs, int8 for CPUs.",
    )
    prefix_caching: bool = option(
        True, "Keep computed blocks for later prompts that start alike.", "--enable-prefix-caching"
    )

    def __post_init__(self) -> None:
        at_least(self, 1, "block_size", "num_blocks", "kv_cache_memory_bytes")
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"--block-size must be a power of two, got {self.block_size}.")
        share = self.memory_share
        if share is not None and not 0.0 < share <= 1.0:
            raise ConfigError(
                f"--memory-share must be above 0 and at most 1, got {share}. Example: 0.85."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Who computes when, and how prompts. None: set by the profile."""

    profile: ProfileName | None = option(
        None,
        "Starting point: chat (latency), batch (throughput), hybrid; "
        "default: hybrid on a GPU, short steps on a CPU.",
    )
    max_num_seqs: int | None = option(None, "Most requests that run at once.")
    max_num_batched_tokens: int | None = option(None, "Most tokens computed in one step.")
    long_prefill_token_threshold: int = option(
        0, "Most prompt tokens of one request in one step; 0: the whole budget."
    )
    enable_chunked_prefill: bool = option(
        True, "Cut long prompts into chunks that share steps with running requests."
    )
    prompt_rounding: PromptRounding = option(
        "coarse",
        "Inputs of int4 products on a CPU, for tokens of prompts: coarse rounds 192 with one scale, "
        "which is faster; fine 32, as for tokens that are generated.",
    )
    scheduling_policy: PolicyName = option("fcfs", "Order of waiting requests.")
    batching: Batching = option(
        "continuous", "static and none are baselines that benchmarks compare with."
    )
    overlap: bool = option(
        True,
        "Plan and launch a step while the last one's tokens are on their way (CUDA).",
        "--async-scheduling",
    )
    max_batch_size: int = option(8, "Static batching: start when so many wait.")
    max_wait_ms: float = option(50.0, "Static batching: start after so long with fewer.")

    def __post_init__(self) -> None:
        at_least(self, 1, "max_num_seqs", "max_num_batched_tokens", "max_batch_size")
        at_least(self, 0, "long_prefill_token_threshold", "max_wait_ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarConfig:
    """Limits of grammars that clients send: JSON schemas, regular expressions, choices, GBNF, Lark."""

    grammar_compile_timeout: float = option(
        5.0, "CPU seconds that compiling a grammar may take; one that needs more gets 400."
    )
    grammar_memory_bytes: int = option(
        512 * 2**20,
        "Memory that a grammar may take, and that all grammars in use may take together; one that "
        "needs more gets 400.",
        "--grammar-memory",
    )
    grammar_step_timeout: float = option(
        0.1,
        "CPU seconds that a request may spend on its grammar at one token, beyond a tenth of this at "
        "each; one that needs more ends with an error.",
    )

    def __post_init__(self) -> None:
        for name in ("grammar_compile_timeout", "grammar_step_timeout"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{flag(name)} must be above 0, got {getattr(self, name)!r}.")
        at_least(self, 16 * 2**20, "grammar_memory_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """The HTTP side."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 for all.")
    port: int = option(8000, "Port to listen on; 0: a free one.")
    uds: str | None = option(None, "Unix socket to listen on instead of host and port.")
    api_key: tuple[str, ...] = option(
        (),
        "Key that clients must send; may be given several times. Prefer --api-key-file or "
        "$WINDLASS_API_KEY, which do not show in the process list.",
    )
    api_key_file: tuple[str, ...] = option(
        (), "File with further keys, one per line; may be given several times."
    )
    admin_key: tuple[str, ...] = option(
        (),
        "Key for admin endpoints (adapters, sleep, cache), beside what other keys do; may be given "
        "several times. Prefer --admin-key-file or $WINDLASS_ADMIN_KEY.",
    )
    admin_key_file: tuple[str, ...] = option(
        (), "File with further admin keys, one per line; may be given several times."
    )
    lora_root: tuple[str, ...] = option(
        (), "Folder below which adapters may be loaded by the API; may be given several times."
    )
    ssl_keyfile: str | None = option(None, "TLS key file.")
    ssl_certfile: str | None = option(None, "TLS certificate file.")
    ssl_ca_certs: str | None = option(None, "TLS CA certificates that clients are checked with.")
    allowed_origins: tuple[str, ...] = option((), "Origins that browsers may call from (CORS).")
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Host name that requests may be addressed to, beside localhost and --host; may be given "
        "several times; *: any. Default: checked only when --host is a loopback address.",
    )
    root_path: str = option("", "Path prefix behind a reverse proxy.")
    chat_template: str | None = option(None, "File with a jinja template to use instead.")
    default_chat_template_kwargs: Mapping[str, Any] = option({}, "JSON given to every template.")
    max_num_queued_reqs: int = option(1024, "Most requests that wait; more get 429.")
    max_num_queued_tokens: int | None = option(None, "Most prompt tokens that wait; more get 429.")
    max_body_bytes: int = option(4 * 2**20, "Largest request body; more gets 413.")
    max_buffered_body_bytes: int = option(
        256 * 2**20, "Largest sum of the request bodies that are being received; more gets 503."
    )
    max_url_bytes: int = option(8 * 2**10, "Longest URL; more gets 414.")
    max_header_bytes: int = option(32 * 2**10, "Largest sum of a request's headers; more gets 431.")
    max_header_fields: int = option(100, "Most headers of a request; more gets 431.")
    max_connections: int = option(
        AUTO, "Most open connections; more get 503; -1: by the limit of open files (ulimit -n)."
    )
    max_stream_buffer_bytes: int = option(
        2**20, "Largest part of a stream that may wait for its reader before the server hangs up."
    )
    header_timeout: float = option(20.0, "Seconds for a client to send a request's headers.")
    body_timeout: float = option(
        30.0, "Seconds in which a body must advance by --min-transfer-rate; else it gets 408."
    )
    write_timeout: float = option(
        30.0, "Seconds in which a reader that lags must take --min-transfer-rate, or is cut off."
    )
    keep_alive_timeout: float = option(30.0, "Seconds that an idle connection is kept open.")
    min_transfer_rate: int = option(
        512, "Bytes per second below which a body or a lagging reader counts as stalled."
    )
    max_logprobs: int = option(20, "Most logprobs a request may ask for; -1: no limit.")
    stream_interval: int = option(1, "Tokens per streamed chunk.")
    shutdown_timeout: float = option(30.0, "Seconds to finish running requests after SIGTERM.")
    hang_timeout: float = option(
        120.0,
        "Seconds without a heartbeat until the engine counts as hung; it is killed and restarted "
        "half as long again later. 0: never.",
    )
    enable_log_requests: bool = option(False, "Log every request.")
    enable_request_id_headers: bool = option(False, "Answer with X-Request-Id.")
    enable_force_include_usage: bool = option(False, "Usage in every stream, asked for or not.")
    price_per_hour: float | None = option(
        None, "Dollars that this machine costs an hour: adds costs to metrics and to answers."
    )
    record_traffic: str | None = option(
        None, "Append requests and answers to this JSONL file, as calibration data for quantize."
    )
    record_share: float = option(0.1, "Share of the requests to record, chosen by their ids.")
    record_max_bytes: int = option(64 * 2**20, "Record no more than this many bytes.")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be between 0 and 65535, got {self.port}.")
        at_least(self, 1, "max_num_queued_reqs", "max_num_queued_tokens", "max_body_bytes")
        at_least(self, 1, "stream_interval")
        at_least(self, 0, "shutdown_timeout", "hang_timeout", "price_per_hour")
        self._check_transport()
        for key in self.api_key:
            check_key(key, "--api-key")
        for key in self.admin_key:
            check_key(key, "--admin-key")
        at_least(self, 1, "record_max_bytes")
        if not 0.0 < self.record_share <= 1.0:
            raise ConfigError(
                f"--record-share must be above 0 and at most 1, got {self.record_share}."
            )
        for root in self.lora_root:
            if not Path(root).is_dir():
                raise ConfigError(f"--lora-root: no such folder: {root}")
        if self.lora_root and not (self.admin_key or self.admin_key_file):
            raise ConfigError("--lora-root does nothing without --admin-key KEY.")
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise ConfigError("--ssl-keyfile and --ssl-certfile go together; one is missing.")
        if self.chat_template is not None and not Path(self.chat_template).is_file():
            raise ConfigError(f"--chat-template: no such file: {self.chat_template}")

    def _check_transport(self) -> None:
        at_least(self, 1, "max_url_bytes", "max_header_bytes", "max_header_fields")
        at_least(self, 1, "max_stream_buffer_bytes", "min_transfer_rate")
        if self.max_connections != AUTO:
            at_least(self, 1, "max_connections")
        for name in ("header_timeout", "body_timeout", "write_timeout", "keep_alive_timeout"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{flag(name)} must be above 0, got {getattr(self, name)}. A connection "
                    "without a time limit can be held for ever; choose a large number instead."
                )
        if self.max_buffered_body_bytes < self.max_body_bytes:
            raise ConfigError(
                f"--max-buffered-body-bytes ({self.max_buffered_body_bytes}) is below "
                f"--max-body-bytes ({self.max_body_bytes}): the largest body would never be taken."
            )
        for host in self.allowed_hosts:
            if host != "*" and (not host or set(host) & set("/*@ ,")):
                raise ConfigError(
                    f"--allowed-hosts {host!r}: expected one host name or address, without scheme "
                    "and path, such as api.example.com; * allows any."
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GateConfig:
    """How good a model must be against a reference; `gate_...` is what a server tries it on."""

    min_agreement: float | None = option(
        None, "Least share of positions where both would choose the same token: 0.99 or 99%."
    )
    max_ppl_increase: float | None = option(
        None, "Most that the perplexity may grow: 0.003 or 0.3%."
    )
    max_kl: float | None = option(None, "Most mean KL divergence from the reference, in nats.")
    gate_data: str | None = option(
        None, "Measure the quality on this before serving, and refuse to start when it is missed."
    )
    gate_against: str | None = option(None, "The gate's reference; default: the same model.")
    gate_against_options: str | None = option(
        None, "The reference's own options: dtype=bfloat16,block_size=32."
    )
    gate_context: int = option(512, "Tokens of the gate's windows.")
    gate_max_windows: int = option(64, "Most windows that the gate measures.")

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
    """The scheduler's numbers after the profile was applied."""

    max_num_seqs: int
    max_num_batched_tokens: int
    memory_share: float
    seqs_reason: str
    tokens_reason: str


# Starting points: sequences, tokens per step, share of a GPU's memory.
_PROFILES: dict[ProfileName, tuple[int, int, float]] = {
    "chat": (32, 4096, 0.70),
    "batch": (256, 32768, 0.95),
    "hybrid": (128, 16384, 0.85),
}
# A CPU computes some hundred tokens a second: a longer step would stall every stream for long.
_ON_CPU = (32, 512, 0.25)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All that the engine needs: `EngineConfig.of(model="default", max_num_seqs=8)`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculation: SpecConfig = field(default_factory=SpecConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    grammar: GrammarConfig = field(default_factory=GrammarConfig)

    @classmethod
    def of(cls, **options: Any) -> EngineConfig:
        """Sort flat options into their sections; an unknown one is an error with the nearest name."""
        sections = {
            "model": ModelConfig,
            "cache": CacheConfig,
            "scheduler": SchedulerConfig,
            "speculation": SpecConfig,
            "lora": LoraConfig,
            "grammar": GrammarConfig,
        }
        return cls(**split_options(sections, options))

    def limits(self, device: Literal["cpu", "cuda"]) -> Limits:
        """Apply the profile to what was left open."""
        wish = self.scheduler
        if wish.profile is None and device == "cpu":
            (seqs, tokens, share), reason = _ON_CPU, "short steps, since this is a CPU"
        else:
            profile = wish.profile or "hybrid"
            (seqs, tokens, share), reason = _PROFILES[profile], f"profile {profile}"
        seqs_reason = reason if wish.max_num_seqs is None else "as set"
        seqs = wish.max_num_seqs or seqs
        if wish.batching != "continuous":
            seqs = wish.max_batch_size if wish.batching == "static" else 1
            seqs_reason = f"batching {wish.batching}"
        tokens_reason = reason if wish.max_num_batched_tokens is None else "as set"
        tokens = wish.max_num_batched_tokens or max(tokens, seqs)
        if tokens < seqs:
            raise ConfigError(
                f"--max-num-batched-tokens ({tokens}) is below --max-num-seqs ({seqs}): running "
                f"requests could not all advance in a step. Raise the first to {seqs} or more."
            )
        share = self.cache.memory_share or share
        return Limits(seqs, tokens, share, seqs_reason, tokens_reason)
