"""`select_quantization`: all formats of a model with their sizes, speed and quality, and the best.

A candidate is a weight format with a KV cache type. Weights are not read. Sizes of weights and KV
cache are exact; what a step needs is estimated from its largest tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from windlass.config import EngineConfig
from windlass.core.kv_layout import KVLayout
from windlass.errors import ConfigError
from windlass.kernels.ops import choose_ops
from windlass.models.card import load_hparams, open_checkpoint
from windlass.models.network import block_size_of, kernel_need
from windlass.models.source import resolve
from windlass.runner.copies import step_bytes, why_no_copies
from windlass.runner.device import (
    choose_device,
    choose_kv_format,
    choose_threads,
    free_bytes,
    gib,
    whole_bytes,
)
from windlass.runner.kv_copies import reserved_bytes
from windlass.tools.plan.formats import FORMATS, FormatSize, FormatSizes, Target
from windlass.tools.plan.quality import (
    Retention,
    find,
    read_records,
    typical,
    typical_kv,
)
from windlass.tools.plan.speed import Machine, given_machine, measure_machine

_DEFAULT_CONTEXT = 4096
_NEARLY = 0.99  # of the best quality
_SAME_SPEED = 0.97  # speeds at least this near to the best count as equal; then quality decides
# The default for a device comes first, then the faster 8-bit type.
_KV_DTYPES = {"cpu": ("auto", "int8", "fp8"), "cuda": ("auto", "fp8", "int8")}
_GRID_CONCURRENCIES = (1, 4, 16, 64, 256)
_GRID_CONTEXTS = (1024, 4096, 16384, 65536, 262144)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One weight format with one KV cache type. Its fields are keys of `plan --json`."""

    format: str
    kv_dtype: str
    held: str  # forms of the weights in memory
    weight_bytes: int
    copy_bytes: int  # of which 16-bit copies of packed weights
    kv_bytes_per_token: int
    state_bytes_per_sequence: int  # of recurrent states; 0: the model has none
    step_bytes: int  # estimate for the largest step
    offload_bytes: int  # beside the KV cache, for copies of its blocks in host memory
    total_bytes: int  # at the requested context and concurrency
    missing_bytes: int  # beyond the memory; 0: it fits
    most_requests: dict[int, int]  # max requests that fit, by context
    grid: dict[int, dict[int, float | None]]  # decode tok/s by context and requests
    tok_s_one: float | None  # decode, one request; None: not estimated
    tok_s_all: float | None  # decode, all requests together
    quality: Retention
    options: dict[str, Any]  # of `serve` and `LLM`

    @property
    def fits(self) -> bool:
        return self.missing_bytes == 0

    @property
    def name(self) -> str:
        return self.format if self.kv_dtype == "auto" else f"{self.format}, {self.kv_dtype} KV"


@dataclass(frozen=True, slots=True)
class Plan:
    """The request, all candidates, and the best of them. Its fields are keys of `plan --json`."""

    model: str
    stored: str
    memory_bytes: int
    memory_source: str
    context: int
    concurrency: int
    min_quality: float
    step_tokens: int
    machine: Machine
    candidates: list[Candidate]
    refused: dict[str, str]  # formats that the model cannot have, and why
    best: Candidate | None
    faster: Candidate | None  # the best without a limit of the quality, if none was given
    shortfall: str  # without a best: the nearest candidate, and what it lacks


@dataclass(frozen=True, slots=True)
class _MemoryNeed:
    """Memory of one candidate, as a function of context and number of requests."""

    weight_bytes: int
    layout: KVLayout
    step_bytes: int  # of the largest step
    step_tokens: int
    row_bytes: int  # logits, per running request
    spare_blocks: int  # reserved by the runner
    offload_bytes: int  # for copies of KV blocks

    def kv_bytes(self, context: int, concurrency: int) -> int:
        """Return the bytes of the blocks of all requests, one of which is in a prefill."""
        return self._prefill_bytes(context) + (concurrency - 1) * self.layout.bytes_for(context)

    def total_bytes(self, context: int, concurrency: int) -> int:
        return (
            self._fixed_bytes + self.kv_bytes(context, concurrency) + concurrency * self.row_bytes
        )

    def max_requests(self, context: int, memory: int) -> int:
        """Return how many requests fit; 0 if the weights alone do not."""
        left = memory - self._fixed_bytes - self._prefill_bytes(context) - self.row_bytes
        return 0 if left < 0 else 1 + left // (self.layout.bytes_for(context) + self.row_bytes)

    def _prefill_bytes(self, context: int) -> int:
        """Return the bytes of a request with chunks in two steps, as the overlapped loop has."""
        return self.layout.bytes_for(context, 2 * self.step_tokens)

    @property
    def _fixed_bytes(self) -> int:
        spare = self.spare_blocks * self.layout.block_bytes
        return self.weight_bytes + self.step_bytes + self.offload_bytes + spare


def select_quantization(
    model: str = "default",
    *,
    memory: int | None = None,
    min_quality: float | None = 0.0,
    context: int | None = None,
    concurrency: int = 8,
    kv_cache_dtype: str | None = None,
    bandwidth: float | None = None,
    formats: Sequence[str] = FORMATS,
    records: Path | None = None,
    **options: Any,
) -> Plan:
    """List the formats of a model, and choose the fastest that fits and has enough quality.

    `memory`: bytes (default: free memory). `min_quality` None: nearly the best quality that fits. `bandwidth`: bytes per second (default: measured).
    `records`: a folder with results of `windlass eval`. `options`: those of `LLM`. device="cuda"
    plans for a GPU that is not in this machine if memory and bandwidth are given.
    """
    if concurrency < 1:
        raise ConfigError(f"--concurrency must be at least 1, got {concurrency}.")
    if bandwidth is not None and bandwidth <= 0:
        raise ConfigError(f"--bandwidth must be above 0, got {bandwidth:g}. Example: 4800GB/s.")
    if memory is not None and memory < 1:
        raise ConfigError(f"--memory must be above 0, got {memory}. Example: 8GiB.")
    if min_quality is not None and not 0 <= min_quality <= 1:
        raise ConfigError(f"--min-quality must be from 0 to 1, got {min_quality:g}. Example: 0.95.")
    config = EngineConfig.of(model=model, max_num_seqs=concurrency, **options)
    selection = _Selection(
        config,
        memory=memory,
        context=context,
        concurrency=concurrency,
        kv_dtype=kv_cache_dtype,
        bandwidth=bandwidth,
        formats=formats,
        records=records,
    )
    candidates, refused = selection.candidates()
    limit = nearly_best_quality(candidates) if min_quality is None else min_quality
    best = _best(candidates, limit)
    return Plan(
        model=selection.model,
        stored=selection.sizes.stored,
        memory_bytes=selection.memory,
        memory_source=selection.memory_source,
        context=selection.context,
        concurrency=concurrency,
        min_quality=limit,
        step_tokens=selection.step_tokens,
        machine=selection.machine,
        candidates=candidates,
        refused=selection.sizes.refused | refused,
        best=best,
        faster=_best(candidates, 0.0) if min_quality is None else None,
        shortfall="" if best else selection.shortfall(candidates, min_quality or 0.0),
    )


def _target(config: EngineConfig, memory: int | None, bandwidth: float | None) -> Target:
    if config.model.device == "cuda" and not torch.cuda.is_available():
        if memory is None or bandwidth is None:
            raise ConfigError(
                "--device cuda: torch finds no CUDA device here. To plan for another machine's GPU, "
                "give its memory and bandwidth: --memory 24GiB --bandwidth 900GB/s."
            )
        return Target(torch.device("cuda"), present=False)
    return Target(choose_device(config.model).device, present=True)


class _Selection:
    """One call of `select_quantization`: computes memory, speed and quality of each candidate."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        memory: int | None,
        context: int | None,
        concurrency: int,
        kv_dtype: str | None,
        bandwidth: float | None,
        formats: Sequence[str],
        records: Path | None,
    ) -> None:
        self._target = target = _target(config, memory, bandwidth)
        self._records = read_records(records) if records is not None else []
        files = resolve(config.model)
        self.model = files.name
        self._hparams = hparams = load_hparams(files, config.model)
        longest = hparams.max_positions
        if context is not None and not 1 <= context <= longest:
            raise ConfigError(
                f"--context must be from 1 to the model's {longest} positions, got {context}."
            )
        on_gpu = target.device.type == "cuda"
        device: Literal["cpu", "cuda"] = "cuda" if on_gpu else "cpu"
        known = _KV_DTYPES[device]
        if kv_dtype is not None and kv_dtype not in known:
            raise ConfigError(
                f"--kv-cache-dtype must be one of {', '.join(sorted(known))}; got {kv_dtype!r}."
            )
        self._kv_dtypes = known if kv_dtype is None else (kv_dtype,)
        self.memory = free_bytes(target.device) if memory is None else memory
        self._whole_memory = whole_bytes(target.device) if memory is None else memory
        self._copies = config.model.dequantized_copies
        self.memory_source = "as given"
        if memory is None:
            self.memory_source = "free now on the GPU" if on_gpu else "free now"
        self.context = min(_DEFAULT_CONTEXT, longest) if context is None else context
        self._concurrency = concurrency
        self.step_tokens = config.limits(device).max_num_batched_tokens
        self._cache = config.cache
        self._block_size = block_size_of(config.cache.block_size, hparams)
        checkpoint = open_checkpoint(files, config.model)
        self.sizes = FormatSizes(
            config.model, hparams, checkpoint=checkpoint, target=target, names=formats
        )
        choose_threads(config.model)
        if bandwidth is not None:
            self.machine = given_machine(target.device, bandwidth)
        else:
            # 16-bit GEMMs on a CPU are not estimated, so float32 is enough there.
            dtype = torch.bfloat16 if on_gpu else torch.float32
            self.machine = measure_machine(target.device, dtype)

    def candidates(self) -> tuple[list[Candidate], dict[str, str]]:
        """Return every format with every KV type, and the KV types that the device refuses."""
        found, refused = [], {}
        for weights in self.sizes.formats:
            for kv_dtype in self._kv_dtypes:
                try:
                    found.append(self._candidate(weights, kv_dtype))
                except ConfigError as error:
                    refused[f"{kv_dtype} KV"] = str(error)
        return found, refused

    def _candidate(self, weights: FormatSize, kv_dtype: str) -> Candidate:
        longest = self._hparams.max_positions
        need = self._need(weights, kv_dtype)
        copies = self._copy_bytes(weights, need)
        need = replace(need, weight_bytes=need.weight_bytes + copies)
        total = need.total_bytes(self.context, self._concurrency)
        kv_options = {} if kv_dtype == "auto" else {"kv_cache_dtype": kv_dtype}
        shorter = (length for length in _GRID_CONTEXTS if length < longest)
        contexts = sorted({*shorter, self.context, longest})
        counts = sorted({*_GRID_CONCURRENCIES, self._concurrency})
        tok_s = partial(self._tok_s, weights, need.layout)
        return Candidate(
            format=weights.name,
            kv_dtype=kv_dtype,
            held=weights.held,
            weight_bytes=need.weight_bytes,
            copy_bytes=copies,
            kv_bytes_per_token=need.layout.token_bytes,
            state_bytes_per_sequence=need.layout.state_bytes,
            step_bytes=need.step_bytes + self._concurrency * need.row_bytes,
            offload_bytes=need.offload_bytes,
            total_bytes=total,
            missing_bytes=max(0, total - self.memory),
            most_requests={length: need.max_requests(length, self.memory) for length in contexts},
            grid={length: {count: tok_s(count, length) for count in counts} for length in contexts},
            tok_s_one=tok_s(1, self.context),
            tok_s_all=tok_s(self._concurrency, self.context),
            quality=self._quality(weights, kv_dtype),
            options={
                **weights.options,
                **kv_options,
                "max_model_len": self.context,
                "max_num_seqs": self._concurrency,
                "kv_cache_memory_bytes": need.kv_bytes(self.context, self._concurrency),
            },
        )

    def _need(self, weights: FormatSize, kv_dtype: str) -> _MemoryNeed:
        hparams, itemsize, device = self._hparams, weights.dtype.itemsize, self._target.device
        on_gpu = self._target.present and device.type == "cuda"  # its kernels can be queried
        kv_format = choose_kv_format(
            kv_dtype,
            hparams,
            block_size=self._block_size,
            dtype=weights.dtype,
            device=device,
            triton=on_gpu,
            native=self._has_native_kernels(weights),
        )
        of_step = partial(step_bytes, hparams, itemsize=itemsize)
        return _MemoryNeed(
            weight_bytes=weights.weight_bytes,
            layout=kv_format.layout,
            step_bytes=of_step(tokens=self.step_tokens, rows=0),
            step_tokens=self.step_tokens,
            row_bytes=of_step(tokens=0, rows=1),
            spare_blocks=1 if self.machine.device == "cuda" else 0,
            offload_bytes=reserved_bytes(self._cache, kv_format.layout.block_bytes, device),
        )

    def _copy_bytes(self, weights: FormatSize, need: _MemoryNeed) -> int:
        """Bytes of the copies that a start with the candidate's options makes."""
        if self._copies is not None:
            return weights.copy_bytes if self._copies else 0
        held = need.weight_bytes + need.kv_bytes(self.context, self._concurrency)
        left = self.memory - held - need.step_bytes - self._concurrency * need.row_bytes
        refused = why_no_copies(weights.copy_bytes, memory=self._whole_memory, left=left)
        return 0 if refused else weights.copy_bytes

    def _has_native_kernels(self, weights: FormatSize) -> bool:
        """Whether a CPU's native kernels compute, and not the float32 reference."""
        hparams, device = self._hparams, self._target.device
        if device.type != "cpu" or weights.options.get("dtype") == "float32":
            return False
        return choose_ops(kernel_need(hparams, device=device, dtype=weights.dtype)).is_native

    def _tok_s(
        self, weights: FormatSize, layout: KVLayout, rows: int, context: int
    ) -> float | None:
        """Estimate decode speed with full contexts. 16-bit GEMMs vary too much between CPUs."""
        if self.machine.device == "cpu" and weights.dtype.itemsize == 2:
            return None
        moe = self._hparams.moe
        experts = 0 if moe is None else weights.expert_bytes * moe.routing.share_read(rows)
        kv_bytes = rows * layout.bytes_read(context)
        seconds = self.machine.step_seconds(
            weights.read_bytes + experts + kv_bytes,
            rows * weights.num_weights,
            self._hparams.num_layers,
        )
        return round(rows / seconds, 1)

    def _quality(self, weights: FormatSize, kv_dtype: str) -> Retention:
        """Combine weights and KV type: measured together, else each measured or typical."""
        quantization = weights.options.get("quantization")
        head = bool(weights.options.get("quantize_head"))
        is_quantised_file = self.sizes.quality.basis != "reference"
        look_up = partial(find, self._records, self.model, quantization, head)
        together = look_up(kv_dtype, is_quantised_file) if kv_dtype != "auto" else None
        if together is not None:
            return together
        retention = self.sizes.quality
        if quantization is not None or is_quantised_file:
            usual = retention if quantization is None else typical(quantization, head)
            retention = look_up("auto", is_quantised_file) or usual
        alone = (
            find(self._records, self.model, None, False, kv_dtype) if kv_dtype != "auto" else None
        )
        return retention.times(alone or typical_kv(kv_dtype))

    def shortfall(self, candidates: list[Candidate], min_quality: float) -> str:
        """Name the nearest candidate, and what it lacks."""
        good = [item for item in candidates if item.quality.meets(min_quality)]
        if not good:
            known = [item for item in candidates if item.quality.value is not None]
            if not known:
                return "the quality of these formats is unknown; measure it with windlass eval."
            nearest = max(known, key=lambda item: (item.quality.value or 0.0, -item.total_bytes))
            value = nearest.quality.value or 0.0
            return (
                f"no format is expected to reach a quality of {min_quality:g}: the nearest is "
                f"{nearest.name}, with {value:.3f} ({nearest.quality.basis}), "
                f"{min_quality - value:.3f} too little."
            )
        nearest = min(good, key=lambda item: item.total_bytes)
        max_requests = nearest.most_requests[self.context]
        instead = (
            f"it would fit with --concurrency {max_requests}"
            if max_requests
            else f"not even one request of {self.context:,} tokens fits"
        )
        return (
            f"nothing fits into {gib(self.memory)}: the nearest is {nearest.name}, which needs "
            f"{gib(nearest.total_bytes)} for {self._concurrency} requests of {self.context:,} tokens, "
            f"{gib(nearest.missing_bytes)} too much; {instead}."
        )


def nearly_best_quality(candidates: list[Candidate]) -> float:
    """The limit that keeps 4 bits out where 16 or 8 bits fit."""
    known = [item.quality.value for item in candidates if item.fits and item.quality.value]
    return round(_NEARLY * max(known), 4) if known else 0.0


def _best(candidates: list[Candidate], min_quality: float) -> Candidate | None:
    """Choose the fastest with all requests, then with one; among equally fast, the best quality."""
    good = [item for item in candidates if item.fits and item.quality.meets(min_quality)]
    if not good:
        return None
    near = _fastest(_fastest(good, "tok_s_all"), "tok_s_one")
    return max(near, key=lambda item: item.quality.value or 0.0)


def _fastest(
    candidates: list[Candidate], figure: Literal["tok_s_all", "tok_s_one"]
) -> list[Candidate]:
    """Return the candidates within 3 % of the fastest."""
    speeds = [getattr(item, figure) or 0.0 for item in candidates]
    slowest = _SAME_SPEED * max(speeds)
    return [item for item, each in zip(candidates, speeds, strict=True) if each >= slowest]
