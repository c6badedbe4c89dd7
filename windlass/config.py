"""All user settings, as frozen dataclasses that are validated on construction.

Facts found at run time have their own types (`Capacity` in core). A field's `help` is the help text
of its command line flag; `flags` are further names, which other engines use. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from windlass.errors import ConfigError
from windlass.lora_config import LoraConfig as LoraConfig
from windlass.parallel_config import CombineRule as CombineRule
from windlass.parallel_config import ParallelConfig as ParallelConfig
from windlass.parallel_config import Role as Role
from windlass.serve_config import MAX_HTTP_WORKERS as MAX_HTTP_WORKERS
from windlass.serve_config import MIN_HANG_TIMEOUT_S as MIN_HANG_TIMEOUT_S
from windlass.serve_config import MIN_LOG_INTERVAL_S as MIN_LOG_INTERVAL_S
from windlass.serve_config import ServeConfig as ServeConfig
from windlass.serve_config import check_key as check_key
from windlass.settings import AUTO as AUTO
from windlass.settings import MAX_TIMEOUT_S, at_least, refuse_unused
from windlass.settings import DType as DType
from windlass.settings import Quantization as Quantization
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

MAX_THREADS = 1024


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
    dequantized_copies: bool | None = option(
        None,
        "On a GPU, keep a 16-bit copy of 4- and 8-bit weights for steps of more than 64 tokens: faster, for "
        "2 bytes of memory per weight. Default: if the copies take at most an eighth of the GPU's memory, "
        "and a quarter of what is otherwise left for the KV cache.",
    )
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
        "Starting point: chat (latency; on a GPU, --slo-tpot-ms 35), batch (throughput), hybrid; "
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
        "Rounding of activations in quantised GEMMs on a CPU, for prompt tokens: fine is int8 with one scale per "
        "32 values, as for generated tokens. coarse is faster: one scale per 192 values for int4 weights with "
        "VNNI or NEON, and bfloat16 with AMX. On other CPUs prompts are always fine.",
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
            if value is not None and value > 1000 * MAX_TIMEOUT_S:
                raise ConfigError(
                    f"{flag(name)} must be at most {1000 * MAX_TIMEOUT_S:g}, got {value:g}."
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
    default_tpot_ms: float | None = None  # target of the profile, unless --slo-tpot-ms sets one


@dataclass(frozen=True, slots=True)
class _Profile:
    """Default limits."""

    max_num_seqs: int
    max_num_batched_tokens: int
    memory_share: float  # of a GPU's memory, or of a CPU's free memory
    tpot_ms: float | None = None  # target on a GPU


_PROFILES: dict[ProfileName, _Profile] = {
    "chat": _Profile(32, 4096, 0.70, tpot_ms=35.0),
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
        can_shorten = settings.batching == "continuous" and settings.enable_chunked_prefill
        # Replicas have GPUs of their own, but share a CPU's memory.
        return Limits(
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            memory_share=share / self.parallel.data_parallel_size if device == "cpu" else share,
            seqs_reason=seqs_reason,
            tokens_reason=tokens_reason,
            default_tpot_ms=profile.tpot_ms if device == "cuda" and can_shorten else None,
        )
