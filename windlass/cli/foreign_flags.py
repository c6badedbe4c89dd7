"""Flags of vLLM, SGLang and llama.cpp's server, and what each means here.

foreign.py applies the table to a command line or a config file; docs/flags.md shows it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from windlass.errors import ConfigError

Takes = Literal["nothing", "value", "maybe", "values"]

MODEL = "MODEL"  # the positional argument
VLLM, SGLANG, LLAMA = "vLLM", "SGLang", "llama.cpp"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignFlag:
    """A flag of another engine: it has an equivalent, or has no effect, or is refused.

    takes: "maybe" is an optional on, off or auto; "values" are all words up to the next flag.
    ours: our flags; the last one takes the value. values: their values and ours.
    translate: makes our arguments from the value, where a renaming is not enough.
    sampling: sampling field that the flag sets for all requests of a command without the flag `ours`.
    unset: values with which the flag is dropped. refusal: why other values are refused, and what to use.
    """

    names: tuple[str, ...]
    engines: str
    takes: Takes
    ours: str = ""
    values: Mapping[str, str] | None = None
    translate: Callable[[str], list[str]] | None = None
    sampling: str = ""
    unset: tuple[str, ...] = ()
    note: str = ""
    refusal: str = ""

    @property
    def extends_ours(self) -> bool:
        """Whether it is a flag of ours that takes further values here."""
        return self.ours in self.names

    def apply(self, given: str, value: str, known: Collection[str]) -> tuple[list[str], str]:
        """Our arguments for `given` with `value`, and a line for the log; raises if it is refused.

        known: the flags of the command.
        """
        shown = f"{given} {value}".strip()
        if value in self.unset:
            return [], f"{shown}: {self.note}" if self.note else ""
        if self.refusal:
            raise ConfigError(f"{shown}: {self.refusal}")
        if self.sampling and self.ours not in known:
            return ["--override-generation-config", _sampling_default(self.sampling, value)], ""
        if self.translate is not None:
            words = self.translate(value)
        else:
            words = self.ours.split() + ([self._ours_of(value)] if self.takes != "nothing" else [])
        if not self.ours:
            words = []
        return words, "" if words else f"{shown}: {self.note}"

    def _ours_of(self, value: str) -> str:
        return (self.values or {}).get(value.lower(), value)


def _alias(names: str, engines: str, ours: str, takes: Takes = "value", **more: Any) -> ForeignFlag:
    return ForeignFlag(names=tuple(names.split()), engines=engines, takes=takes, ours=ours, **more)


def _ignored(
    names: str,
    engines: str,
    takes: Takes,
    note: str,
    unset: tuple[str, ...] = (),
    refusal: str = "",
) -> ForeignFlag:
    return ForeignFlag(
        names=tuple(names.split()),
        engines=engines,
        takes=takes,
        note=note,
        unset=unset,
        refusal=refusal,
    )


def _refused(names: str, engines: str, refusal: str, *, unset: tuple[str, ...] = ()) -> ForeignFlag:
    return ForeignFlag(
        names=tuple(names.split()),
        engines=engines,
        takes="value" if unset else "nothing",
        refusal=refusal,
        unset=unset,
    )


def _json(value: str, flag: str) -> dict[str, Any]:
    try:
        found = json.loads(value)
    except ValueError as error:
        raise ConfigError(f"{flag} {value!r} is not JSON: {error}.") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{flag} {value!r}: expected a JSON object.")
    return found


_SPEC_METHODS = {
    "ngram": "ngram",
    "draft_model": "draft",
    "standalone": "draft",
    "draft-simple": "draft",
    "medusa": "medusa",
    "eagle": "eagle",
    "eagle3": "eagle",
    "draft-eagle3": "eagle",
    "mtp": "mtp",
    "nextn": "mtp",
    "deepseek_mtp": "mtp",
    "draft-mtp": "mtp",
    "ngram-simple": "ngram",
    "none": "none",
}
_SPEC_KEYS = {
    "model": "--spec-model",
    "num_speculative_tokens": "--spec-tokens",
    "prompt_lookup_min": "--spec-ngram-min",
    "prompt_lookup_max": "--spec-ngram-max",
    "quantization": "--spec-quantization",
}


def _spec_method(name: str) -> str:
    if name.lower() not in _SPEC_METHODS:
        raise ConfigError(
            f"speculation method {name!r} is unknown. Known: {', '.join(_SPEC_METHODS)}; "
            "windlass serve --help lists those of --spec."
        )
    return _SPEC_METHODS[name.lower()]


def _speculative_config(value: str) -> list[str]:
    """{"method": "ngram", "num_speculative_tokens": 4} as --spec ngram --spec-tokens 4."""
    given = _json(value, "--speculative-config")
    method = given.pop("method", "draft_model" if "model" in given else None)
    if not isinstance(method, str):
        raise ConfigError(
            f"--speculative-config {value}: needs a method: {', '.join(_SPEC_METHODS)}."
        )
    words = ["--spec", _spec_method(method)]
    for key, setting in given.items():
        if key == "draft_tensor_parallel_size" and setting == 1:
            continue
        if key not in _SPEC_KEYS:
            raise ConfigError(
                f"--speculative-config: {key!r} has no equivalent. Known: method, "
                f"{', '.join(_SPEC_KEYS)}; see --spec in windlass serve --help."
            )
        words += [_SPEC_KEYS[key], str(setting)]
    return words


def _hf_override(key: str, flag: str, is_json: bool = False) -> Callable[[str], list[str]]:
    def made(value: str) -> list[str]:
        setting: Any = _json(value, flag) if is_json else float(value)
        return ["--hf-overrides", json.dumps({key: setting})]

    return made


def _sampling_default(field: str, value: str) -> str:
    try:
        return json.dumps({field: float(value) if "." in value else int(value)})
    except ValueError as error:
        raise ConfigError(f"{field}: {value!r} is not a number.") from error


def _adapter(value: str) -> list[str]:
    """NAME=FOLDER, or vLLM's and SGLang's JSON with a name and a path."""
    if value.startswith("{"):
        given = _json(value, "--lora-modules")
        name = given.get("name", given.get("lora_name"))
        path = given.get("path", given.get("lora_path"))
        if not isinstance(name, str) or not isinstance(path, str):
            raise ConfigError(f"--lora-modules {value}: needs a name and a path.")
        value = f"{name}={path}"
    return ["--lora-modules", value]


def _address(value: str) -> list[str]:
    host, colon, port = value.rpartition(":")
    if not colon:
        raise ConfigError(f"--dist-init-addr {value!r}: expected HOST:PORT.")
    return ["--master-addr", host, "--master-port", port]


def _split(flag: str) -> Callable[[str], list[str]]:
    """Comma-separated values as a repeated flag."""
    return lambda value: [word for item in value.split(",") for word in (flag, item.strip())]


_CODE = "Windlass never runs code that comes with a model or is named on the command line."
_KERNELS = "kernels are chosen for the device; windlass inspect shows which, and why."
_GRAPHS = "sizes of captured graphs are chosen from --max-num-seqs; --enforce-eager captures none."
_TEXT_ONLY = "models have text inputs only."
_LOGGED = "--log-level sets the level of a server's log, and --enable-log-requests adds a line per request."
_ONE_GPU = "choose GPUs with CUDA_VISIBLE_DEVICES."
_WHOLE = "the whole model is on one kind of device; --device cpu uses no GPU."
_DISAGGREGATED = (
    "use --role prefill, and --role decode with --prefill-servers; see docs/disaggregation.md."
)
_HOST_KV = "give the size of host memory for KV blocks with --kv-offload-gb."
_METRICS = "GET /metrics is always on, with these metrics."
_RECOMPUTE = "preempted requests are recomputed, not swapped."
_ALL_CORS = "CORS allows every method and header, and no credentials."
_STORED = "the format of a quantised checkpoint is read from the checkpoint; --quantization is for 16-bit weights."
_NOT_COMPILED = "nothing is compiled by torch; --enforce-eager disables captured graphs."
_LLGUIDANCE = "grammars are compiled by llguidance."
_DTYPES = {"half": "float16", "fp16": "float16", "float": "float32", "fp32": "float32"}
_DTYPES |= {"bf16": "bfloat16"}
_CACHE_TYPES = {"q8_0": "int8", "f16": "auto", "bf16": "auto", "fp8_e4m3": "fp8"}
_TOOL_PARSERS = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "qwen3_xml": "qwen3_coder",
    "qwen3_coder": "qwen3_coder",
    "glm": "glm45",
    "glm47": "glm45",
    "deepseekv3": "deepseek",
    "deepseekv31": "deepseek",
    "deepseek_v3": "deepseek",
    "deepseek_v31": "deepseek",
    "openai": "harmony",
    "gpt-oss": "harmony",
    "granite-20b-fc": "granite",
}
_REASONING_PARSERS = {
    "deepseek_r1": "think",
    "deepseek-r1": "think",
    "deepseek_v3": "think",
    "deepseek-v3": "think",
    "qwen3": "think",
    "qwen3-thinking": "think",
    "glm45": "think",
    "kimi": "think",
    "seed_oss": "seed",
    "openai_gptoss": "auto",
    "gpt-oss": "auto",
}

_MODEL_FLAGS = (
    _alias("--model --model-path -m --hf-repo -hf -hfr", f"{VLLM}, {SGLANG}, {LLAMA}", MODEL),
    _alias("--tokenizer-path", SGLANG, "--tokenizer"),
    _alias("--dtype", f"{VLLM}, {SGLANG}", "--dtype", values=_DTYPES),
    _alias("--context-length --ctx-size -c", f"{SGLANG}, {LLAMA}", "--max-model-len", unset=("0",)),
    _alias("--alias -a", LLAMA, "--served-model-name", translate=_split("--served-model-name")),
    _alias("--random-seed -s", f"{SGLANG}, {LLAMA}", "--seed", unset=("-1",)),
    _alias("-hft", LLAMA, "--hf-token"),
    _alias("--json-model-override-args", SGLANG, "--hf-overrides"),
    _alias(
        "--rope-scaling",
        VLLM,
        "--hf-overrides",
        translate=_hf_override("rope_scaling", "--rope-scaling", is_json=True),
    ),
    _alias("--rope-theta", VLLM, "--hf-overrides", translate=_hf_override("rope_theta", "")),
    _alias("--disable-cuda-graph", SGLANG, "--enforce-eager", takes="nothing"),
    _alias("--threads -t", LLAMA, "--num-threads"),
    _alias(
        "--sampling-defaults",
        SGLANG,
        "--generation-config",
        values={"openai": "none", "model": "auto"},
    ),
    _alias(
        "--quantization -q",
        f"{VLLM}, {SGLANG}",
        "--quantization",
        values={"bitsandbytes": "nf4", "w8a8_int8": "w8a8"},
        unset=(
            *("awq", "gptq", "awq_marlin", "gptq_marlin", "marlin", "moe_wna16"),
            *("compressed-tensors", "gguf", "mxfp4", "auto"),
        ),
        note=_STORED,
    ),
    _alias(
        "--gpu-layers --n-gpu-layers -ngl",
        LLAMA,
        "--device",
        translate=lambda value: ["--device", "cpu"] if value == "0" else [],
        note=_WHOLE,
    ),
    _ignored("--flash-attn -fa", LLAMA, "maybe", _KERNELS),
    _ignored("--threads-batch -tb", LLAMA, "value", "prompts use the threads of --num-threads."),
    _ignored(
        "--mlock --mmap --no-mmap --no-host --repack --no-repack -nr --direct-io --check-tensors",
        LLAMA,
        "nothing",
        "weights are read and repacked once, layer by layer.",
    ),
    _ignored(
        "--numa --load-mode -lm --prio --poll",
        LLAMA,
        "value",
        "threads are placed by the OS; numactl sets the nodes.",
    ),
    _ignored(
        "--tokenizer-mode --config-format",
        f"{VLLM}, {SGLANG}",
        "value",
        "formats are recognised from the files.",
        unset=("auto", "hf", "fast"),
        refusal="tokenizers and configs are read in the hub's format and from GGUF. Leave it out.",
    ),
    _alias("--task", VLLM, "--task", values={"embedding": "embed"}),
    _alias(
        "--runner --convert",
        VLLM,
        "--task",
        values={"pooling": "embed", "classify": "score"},
        unset=("auto", "generate", "none"),
    ),
    _alias(
        "--embedding --embeddings --is-embedding", f"{SGLANG}, {LLAMA}", "--task embed", "nothing"
    ),
    _alias("--rerank --reranking", LLAMA, "--task score", "nothing"),
    _alias("--pooling", LLAMA, "--pooling-type"),
    _ignored(
        "--safetensors-load-strategy --ignore-patterns --model-loader-extra-config",
        VLLM,
        "value",
        "safetensors are memory-mapped and read layer by layer.",
    ),
    _ignored(
        "--use-tqdm-on-load --no-use-tqdm-on-load --skip-server-warmup --warmup --no-warmup",
        f"{VLLM}, {SGLANG}, {LLAMA}",
        "nothing",
        "start-up shows its phases, and has no warm-up of its own to skip.",
    ),
    _refused(
        "--trust-remote-code",
        f"{VLLM}, {SGLANG}",
        f"{_CODE} An architecture that transformers itself has runs with --model-impl transformers; "
        "windlass inspect MODEL says what a model needs.",
    ),
    _refused(
        "--code-revision --tool-parser-plugin --reasoning-parser-plugin --middleware", VLLM, _CODE
    ),
    _refused("--worker-cls --scheduler-cls --logits-processors --io-processor-plugin", VLLM, _CODE),
    _refused(
        "--tokenizer-revision --hf-config-path",
        VLLM,
        "one --revision holds for the whole repository. Give another folder with --tokenizer, or "
        "change the config with --hf-overrides.",
    ),
    _refused(
        "--skip-tokenizer-init",
        f"{VLLM}, {SGLANG}",
        "the server needs a tokenizer. --tokenizer FILE gives another one; prompts may be token ids.",
    ),
    _refused(
        "--model-url -mu --docker-repo -dr",
        LLAMA,
        "download the file, and give its path; or org/name:FILE.gguf for one of the hub.",
    ),
    _refused("--hf-file -hff", LLAMA, "write the file behind the repository: org/name:FILE.gguf."),
    _refused(
        "--cpu-moe -cmoe --n-cpu-moe -ncmoe --override-tensor -ot --no-kv-offload -nkvo",
        LLAMA,
        f"{_WHOLE} windlass plan MODEL --memory SIZE lists formats that fit.",
    ),
    _refused(
        "--control-vector --control-vector-scaled --slot-save-path --rpc", LLAMA, "not supported."
    ),
    _refused("--mmproj -mm --mmproj-url -mmu", LLAMA, _TEXT_ONLY),
    _refused(
        "--rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx",
        LLAMA,
        'set the model\'s rope_scaling with --hf-overrides, for example \'{"rope_scaling": {"rope_type": "yarn", "factor": 4}}\'.',
    ),
    _ignored(
        "--limit-mm-per-prompt --mm-processor-kwargs --mm-processor-cache-gb --allowed-local-media-path",
        VLLM,
        "value",
        _TEXT_ONLY,
    ),
    _ignored(
        "--no-mmproj --enable-multimodal --language-model-only",
        f"{VLLM}, {SGLANG}, {LLAMA}",
        "nothing",
        _TEXT_ONLY,
    ),
)

_CACHE_FLAGS = (
    _alias("--mem-fraction-static --memory-ratio", SGLANG, "--memory-share"),
    _alias("--page-size", SGLANG, "--block-size"),
    _alias("--disable-radix-cache", SGLANG, "--no-prefix-caching", takes="nothing"),
    _alias("--no-cache-prompt", LLAMA, "--no-prefix-caching", takes="nothing"),
    _alias("--cache-prompt", LLAMA, "--prefix-caching", takes="nothing"),
    _alias(
        "--cache-type-k -ctk --cache-type-v -ctv", LLAMA, "--kv-cache-dtype", values=_CACHE_TYPES
    ),
    _ignored("--swap-space --preemption-mode", VLLM, "value", _RECOMPUTE),
    _ignored(
        "--prefix-caching-hash-algo --radix-eviction-policy --cache-reuse",
        f"{VLLM}, {SGLANG}, {LLAMA}",
        "value",
        "cached blocks are found by a cryptographic hash of all tokens before them, and the least recently used are evicted.",
    ),
    _ignored(
        "--calculate-kv-scales --use-v2-block-manager --disable-hybrid-kv-cache-manager --kv-unified -kvu --swa-full",
        f"{VLLM}, {LLAMA}",
        "nothing",
        "layers with windows, states or full attention share one pool of blocks.",
    ),
    _ignored(
        "--defrag-thold -dt --keep --cache-ram -cram --ctx-checkpoints",
        LLAMA,
        "value",
        "a paged KV cache needs neither defragmentation nor slots.",
    ),
    _refused(
        "--cpu-offload-gb",
        VLLM,
        f"{_WHOLE} --quantization int8 or int4 halves or quarters the weights.",
        unset=("0", "0.0"),
    ),
    _alias("--kv-offloading-size", VLLM, "--kv-offload-gb"),
    _alias("--hicache-size", SGLANG, "--kv-offload-gb"),
    _refused("--enable-hierarchical-cache --hicache-ratio", SGLANG, _HOST_KV),
    _refused(
        "--max-total-tokens",
        SGLANG,
        "give the KV cache's size with --kv-cache-memory-bytes, or --num-blocks: tokens divided by --block-size.",
    ),
    _refused(
        "--context-shift", LLAMA, "a request ends at --max-model-len; shorten the conversation."
    ),
    _ignored("--no-context-shift", LLAMA, "nothing", "a request ends at --max-model-len."),
)

_SCHEDULER_FLAGS = (
    _alias(
        "--max-running-requests --parallel -np",
        f"{SGLANG}, {LLAMA}",
        "--max-num-seqs",
        unset=("-1",),
    ),
    _alias(
        "--chunked-prefill-size --ubatch-size -ub",
        f"{SGLANG}, {LLAMA}",
        "--max-num-batched-tokens",
        translate=lambda value: (
            ["--no-enable-chunked-prefill"]
            if value == "-1"
            else ["--max-num-batched-tokens", value]
        ),
    ),
    _alias("--schedule-policy", SGLANG, "--scheduling-policy"),
    _alias("--enable-priority-scheduling", SGLANG, "--scheduling-policy priority", takes="nothing"),
    _alias("--disable-overlap-schedule", SGLANG, "--no-overlap", takes="nothing"),
    _ignored(
        "--max-prefill-tokens --batch-size -b",
        f"{SGLANG}, {LLAMA}",
        "value",
        "--max-num-batched-tokens limits the tokens of a step.",
    ),
    _ignored("--cont-batching -cb", LLAMA, "nothing", "batching is continuous."),
    _alias("--no-cont-batching -nocb", LLAMA, "--batching none", takes="nothing"),
    _ignored(
        "--max-num-partial-prefills --max-long-partial-prefills --num-scheduler-steps --scheduler-delay-factor --num-lookahead-slots --schedule-conservativeness",
        f"{VLLM}, {SGLANG}",
        "value",
        "prompts of all requests share the tokens of a step; --long-prefill-token-threshold limits one request's.",
    ),
    _ignored(
        "--cuda-graph-max-bs --cuda-graph-bs --cuda-graph-sizes --cudagraph-capture-sizes --max-cudagraph-capture-size --max-seq-len-to-capture",
        f"{VLLM}, {SGLANG}",
        "values",
        _GRAPHS,
    ),
    _ignored("--compilation-config -cc -O", VLLM, "value", _NOT_COMPILED),
    _ignored("-O0 -O1 -O2 -O3", VLLM, "nothing", _NOT_COMPILED),
    _ignored(
        "--enable-torch-compile --enable-mixed-chunk --disable-cuda-graph-padding --enable-tokenizer-batch-encode --enable-dbo",
        f"{VLLM}, {SGLANG}",
        "nothing",
        _KERNELS,
    ),
    _ignored(
        "--attention-backend --prefill-attention-backend --decode-attention-backend --sampling-backend --moe-runner-backend --fp8-gemm-backend --kernel-config --attention-config",
        f"{VLLM}, {SGLANG}",
        "value",
        _KERNELS,
    ),
    _refused(
        "--enable-deterministic-inference",
        SGLANG,
        'determinism is a field of requests: "deterministic": true makes one batch-invariant.',
    ),
)

_SPEC_FLAGS = (
    _alias("--speculative-config -sc", VLLM, "--spec …", translate=_speculative_config),
    _alias(
        "--speculative-algorithm --spec-type",
        f"{SGLANG}, {LLAMA}",
        "--spec",
        translate=lambda value: ["--spec", _spec_method(value)],
    ),
    _alias("--speculative-draft-model-path --speculative-draft-model", SGLANG, "--spec-model"),
    _alias("--model-draft -md --spec-draft-model", LLAMA, "--spec draft --spec-model"),
    _alias(
        "--speculative-num-draft-tokens --draft-max --draft --spec-draft-n-max",
        f"{SGLANG}, {LLAMA}",
        "--spec-tokens",
    ),
    _alias("--speculative-draft-model-quantization", SGLANG, "--spec-quantization"),
    _alias("--spec-default", LLAMA, "--spec auto", takes="nothing"),
    _ignored(
        "--speculative-num-steps --speculative-eagle-topk --draft-min --draft-p-min --spec-draft-n-min --spec-draft-p-min",
        f"{SGLANG}, {LLAMA}",
        "value",
        "the governor decides how many draft tokens are verified, up to --spec-tokens.",
    ),
    _ignored(
        "--gpu-layers-draft --n-gpu-layers-draft -ngld --spec-draft-ngl --threads-draft -td",
        LLAMA,
        "value",
        "a draft model runs on the model's device, with its threads.",
    ),
)

_PARALLEL_FLAGS = (
    _alias("--tp-size --tp", SGLANG, "--tensor-parallel-size"),
    _alias("--pp-size --pp", SGLANG, "--pipeline-parallel-size"),
    _alias("--dp-size --dp", SGLANG, "--data-parallel-size"),
    _alias(
        "--expert-parallel-size --ep-size --ep",
        SGLANG,
        "--enable-expert-parallel",
        unset=("1",),
        translate=lambda _: ["--enable-expert-parallel"],
    ),
    _alias("-ep", VLLM, "--enable-expert-parallel", takes="nothing"),
    _alias(
        "--dist-init-addr --nccl-init-addr",
        SGLANG,
        "--master-addr --master-port",
        translate=_address,
    ),
    _ignored(
        "--distributed-executor-backend --data-parallel-backend",
        VLLM,
        "value",
        "ranks are processes that the server starts.",
        unset=("mp", "uni"),
        refusal="ranks are processes that the server starts; Ray and external launchers are not supported.",
    ),
    _ignored(
        "--disable-custom-all-reduce --enable-p2p-check --fully-sharded-loras --enable-flashinfer-allreduce-fusion",
        f"{VLLM}, {SGLANG}",
        "nothing",
        "how ranks exchange tensors is chosen from the devices; see --distributed-backend.",
    ),
    _ignored(
        "--moe-a2a-backend --all2all-backend --deepep-mode",
        f"{VLLM}, {SGLANG}",
        "value",
        "--expert-combine chooses how ranks sum the results of experts.",
    ),
    _ignored(
        "--nccl-port --dist-timeout --max-parallel-loading-workers",
        f"{VLLM}, {SGLANG}",
        "value",
        "ports between ranks are chosen by themselves.",
    ),
    _refused(
        "--enable-eplb --eplb-config",
        f"{VLLM}, {SGLANG}",
        "windlass balance-experts places experts by their recorded load (--record-expert-load, --expert-placement).",
    ),
    _refused(
        "--enable-dp-attention",
        SGLANG,
        "--data-parallel-size makes whole replicas; --tensor-parallel-size divides attention.",
    ),
    _refused(
        "--split-mode -sm --tensor-split -ts",
        LLAMA,
        "--tensor-parallel-size N splits every layer evenly, --pipeline-parallel-size N gives each device some of the layers.",
        unset=("none",),
    ),
    _refused("--main-gpu -mg --base-gpu-id --gpu-id-step -dev", f"{SGLANG}, {LLAMA}", _ONE_GPU),
    _refused(
        "--decode-context-parallel-size -dcp --attention-context-parallel-size",
        f"{VLLM}, {SGLANG}",
        "context parallelism is not supported; --enable-sequence-parallel divides prompts over ranks.",
        unset=("1",),
    ),
    _refused(
        "--kv-transfer-config --kv-events-config --disaggregation-mode",
        f"{VLLM}, {SGLANG}",
        _DISAGGREGATED,
    ),
    _ignored(
        "--headless",
        VLLM,
        "nothing",
        "a node with --node-rank above 0 has ranks only, and no server.",
    ),
    _refused(
        "--data-parallel-address --data-parallel-rank",
        VLLM,
        "replicas are on one machine; start one server per machine behind a load balancer.",
    ),
)

_LORA_FLAGS = (
    _alias("--lora-modules", VLLM, "--lora-modules", takes="values", translate=_adapter),
    _alias(
        "--lora-paths",
        SGLANG,
        "--enable-lora --lora-modules",
        takes="values",
        translate=lambda value: ["--enable-lora", *_adapter(value)],
    ),
    _alias("--max-loras-per-batch", SGLANG, "--max-loras"),
    _alias("--max-loaded-loras", SGLANG, "--max-cpu-loras"),
    _ignored(
        "--lora-backend --lora-eviction-policy --lora-target-modules --max-lora-chunk-size --lora-extra-vocab-size",
        f"{VLLM}, {SGLANG}",
        "values",
        "adapters may be of any linear layer; the least recently used ones leave the device.",
    ),
    _refused(
        "--lora --lora-scaled --lora-init-without-apply",
        LLAMA,
        "give adapters in PEFT's format: --enable-lora --lora-modules NAME=FOLDER.",
    ),
)

_SERVER_FLAGS = (
    _alias("--admin-api-key", SGLANG, "--admin-key"),
    _alias("--ssl-key-file", LLAMA, "--ssl-keyfile"),
    _alias("--ssl-cert-file", LLAMA, "--ssl-certfile"),
    _alias("--cors-origins", LLAMA, "--allowed-origins", translate=_split("--allowed-origins")),
    _alias("--fastapi-root-path --api-prefix", f"{SGLANG}, {LLAMA}", "--root-path"),
    _alias("--chat-template-file", LLAMA, "--chat-template"),
    _alias("--chat-template-kwargs", LLAMA, "--default-chat-template-kwargs"),
    _alias("--tool-call-parser", f"{VLLM}, {SGLANG}", "--tool-call-parser", values=_TOOL_PARSERS),
    _alias(
        "--reasoning-parser", f"{VLLM}, {SGLANG}", "--reasoning-parser", values=_REASONING_PARSERS
    ),
    _alias("--reasoning-format", LLAMA, "--reasoning-parser", unset=("auto", "deepseek")),
    _alias("--log-requests", SGLANG, "--enable-log-requests", takes="nothing"),
    _alias("--disable-log-requests", VLLM, "--no-enable-log-requests", takes="nothing"),
    _alias("--max-queued-requests", SGLANG, "--max-num-queued-reqs"),
    _alias("--watchdog-timeout", SGLANG, "--hang-timeout"),
    _alias("--h11-max-incomplete-event-size", VLLM, "--max-header-bytes"),
    _alias("--h11-max-header-count", VLLM, "--max-header-fields"),
    _ignored(
        "--enable-auto-tool-choice --jinja --prefill-assistant",
        f"{VLLM}, {LLAMA}",
        "nothing",
        "tool calls are read from every model's output, with the parser of its chat template.",
    ),
    _ignored(
        "--chat-template-content-format",
        VLLM,
        "value",
        "content parts are rendered as the template expects them.",
    ),
    _ignored(
        "--enable-prompt-tokens-details --enable-cache-report",
        f"{VLLM}, {SGLANG}",
        "nothing",
        "usage always has the cached tokens.",
    ),
    _ignored(
        "--enable-metrics --metrics --enable-server-load-tracking --enable-mfu-metrics --enable-per-request-metrics",
        f"{VLLM}, {SGLANG}, {LLAMA}",
        "nothing",
        _METRICS,
    ),
    _ignored(
        "--enable-sleep-mode --sleep-on-idle",
        f"{VLLM}, {SGLANG}",
        "nothing",
        "an idle server uses no CPU, and POST /sleep is always on, with --admin-key.",
    ),
    _alias(
        "--api-server-count -asc --tokenizer-worker-num --threads-http",
        f"{VLLM}, {SGLANG}, {LLAMA}",
        "--http-workers",
    ),
    _alias("--ui --webui", LLAMA, "--console", "nothing"),
    _alias("--no-ui --no-webui", LLAMA, "--no-console", "nothing"),
    _refused(
        "--reasoning-budget",
        LLAMA,
        'a field of requests: "thinking_token_budget": N.',
        unset=("-1",),
    ),
    _refused(
        "--disable-fastapi-docs",
        VLLM,
        "GET /docs describes the API and nothing else; a proxy can hide it.",
    ),
    _ignored("--slots --props", LLAMA, "nothing", "GET /slots and GET /props are always on."),
    _alias("--disable-log-stats", VLLM, "--log-stats-interval 0", "nothing"),
    _alias("--log-jsonl", LLAMA, "--log-format json", "nothing"),
    _ignored(
        "--disable-uvicorn-access-log --log-disable",
        f"{VLLM}, {LLAMA}",
        "nothing",
        _LOGGED,
    ),
    _ignored(
        "--uvicorn-log-level --log-level-http --log-requests-level --max-log-len --log-config-file --verbosity -lv --decode-log-interval",
        f"{VLLM}, {SGLANG}, {LLAMA}",
        "value",
        _LOGGED,
    ),
    _ignored(
        "--verbose -v --log-verbose --log-prefix --log-timestamps --show-time-cost --enable-request-time-stats-logging",
        f"{SGLANG}, {LLAMA}",
        "nothing",
        _LOGGED,
    ),
    _ignored(
        "--allowed-methods --allowed-headers --cors-methods --cors-headers",
        f"{VLLM}, {LLAMA}",
        "value",
        _ALL_CORS,
    ),
    _ignored(
        "--guided-decoding-backend --structured-outputs-config --grammar-backend",
        f"{VLLM}, {SGLANG}",
        "value",
        _LLGUIDANCE,
    ),
    _ignored(
        "--timeout -to",
        LLAMA,
        "value",
        "connections have limits of their own; docs/serving.md lists them.",
    ),
    _refused(
        "--allow-credentials --cors-credentials",
        f"{VLLM}, {LLAMA}",
        "keys are sent as headers, so browsers need no credentials.",
    ),
    _refused(
        "--collect-detailed-traces --enable-trace",
        f"{VLLM}, {SGLANG}",
        "--otlp-traces-endpoint URL exports a trace per request, with a span per phase.",
    ),
    _refused(
        "--enable-log-outputs --log-prompts-dir",
        f"{VLLM}, {LLAMA}",
        "--log-bodies logs requests and responses; --record-traffic FILE writes a share of them.",
    ),
    _refused(
        "--return-tokens-as-token-ids",
        VLLM,
        'a field of requests: "return_tokens_as_token_ids": true.',
    ),
    _refused(
        "--grpc-mode --ssl-cert-reqs --no-jinja",
        f"{VLLM}, {SGLANG}, {LLAMA}",
        "not supported.",
    ),
    _refused(
        "--grammar --grammar-file --json-schema -j --json-schema-file",
        LLAMA,
        "a field of requests: response_format, or structured_outputs.",
    ),
)

# `chat` and `generate` have flags of these names; a server's become defaults for its requests.
_SAMPLING_FLAGS = (
    *(
        _alias(names, LLAMA, ours, sampling=field)
        for names, ours, field in (
            ("--temp --temperature", "--temperature", "temperature"),
            ("--top-p", "--top-p", "top_p"),
            ("--top-k", "--top-k", "top_k"),
            ("--min-p", "--min-p", "min_p"),
            ("--repeat-penalty", "--repetition-penalty", "repetition_penalty"),
            ("--predict --n-predict -n", "--max-tokens", "max_new_tokens"),
        )
    ),
    _refused(
        "--samplers --mirostat --typical --dry-multiplier --xtc-probability --top-nsigma --dynatemp-range",
        LLAMA,
        "not supported; windlass generate --help lists the sampling parameters.",
    ),
)

FOREIGN_FLAGS = {
    "Model": _MODEL_FLAGS,
    "KV cache": _CACHE_FLAGS,
    "Scheduler and kernels": _SCHEDULER_FLAGS,
    "Speculation": _SPEC_FLAGS,
    "Several devices": _PARALLEL_FLAGS,
    "Adapters": _LORA_FLAGS,
    "Server": _SERVER_FLAGS,
    "Sampling": _SAMPLING_FLAGS,
}
BY_NAME = {name: row for rows in FOREIGN_FLAGS.values() for row in rows for name in row.names}
