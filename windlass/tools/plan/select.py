"""`select_quantization`: every way to hold a model, what fits and is good enough, and the fastest.

A way is a format of the weights and a type of the KV cache. Weights are not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from windlass.config import EngineConfig
from windlass.errors import ConfigError
from windlass.kernels.batch import Heads
from windlass.kernels.ops import choose_ops
from windlass.kernels.select import Need
from windlass.models.card import load_hparams, open_checkpoint
from windlass.models.hparams import HParams
from windlass.models.source import resolve
from windlass.runner.device import (
    choose_device,
    choose_kv_format,
    choose_threads,
    free_bytes,
    gib,
)
from windlass.tools.plan import memory as space
from windlass.tools.plan import speed
from windlass.tools.plan.formats import FORMATS, Target, Weighed, Weighing, weigh
from windlass.tools.plan.quality import Measured, Retention, find, read_records, typical, typical_kv

_USUAL_CONTEXT = 4096
# Estimates that are as near as this are the same; then the better quality decides.
_SAME_SPEED = 0.97


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to hold the model."""

    format: str
    kv_dtype: str
    held: str
    weight_bytes: int
    kv_bytes_per_token: int
    step_bytes: int  # an estimate of what the largest step takes
    total_bytes: int  # at the context and concurrency that were asked for
    missing_bytes: int  # what the memory lacks for that; 0: it fits
    most_requests: dict[int, int]  # how many fit, by context
    grid: dict[int, dict[int, float | None]]  # decode tok/s by context and requests, if they fit
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
    """What was asked, all candidates, and the choice among them."""

    model: str
    stored: str
    memory_bytes: int
    memory_source: str
    context: int
    concurrency: int
    min_quality: float
    step_tokens: int
    machine: speed.Machine
    candidates: list[Candidate]
    refused: dict[str, str]  # formats that the model cannot have, and why
    best: Candidate | None
    shortfall: str  # when there is no best: what comes nearest, and what it lacks


@dataclass(frozen=True, slots=True)
class _Asked:
    """The question, checked."""

    memory: int
    memory_source: str
    context: int
    concurrency: int
    min_quality: float
    kv_dtypes: tuple[str, ...]
    step_tokens: int


def select_quantization(
    model: str = "default",
    *,
    memory: int | None = None,
    min_quality: float = 0.0,
    context: int | None = None,
    concurrency: int = 8,
    kv_cache_dtype: str | None = None,
    bandwidth: float | None = None,
    formats: Sequence[str] = FORMATS,
    records: Path | None = None,
    **options: Any,
) -> Plan:
    """List the formats of a model, and choose the fastest that fits and is good enough.

    `memory` in bytes (default: what is free), `bandwidth` in bytes a second (default: measured),
    `records`: a folder of what `windlass eval` wrote, `options` those of `LLM`. With device="cuda"
    a GPU that is not in this machine can be planned for, if memory and bandwidth are given.
    """
    if concurrency < 1:
        raise ConfigError(f"--concurrency must be at least 1, got {concurrency}.")
    if bandwidth is not None and bandwidth <= 0:
        raise ConfigError(f"--bandwidth must be above 0, got {bandwidth:g}. Example: 4800GB/s.")
    config = EngineConfig.of(model=model, max_num_seqs=concurrency, **options)
    target = _target(config, memory, bandwidth)
    measured = read_records(records) if records is not None else []
    files = resolve(config.model)
    hparams = load_hparams(files, config.model)
    asked = _asked(
        config, hparams, target, memory, context, concurrency, min_quality, kv_cache_dtype
    )
    checkpoint = open_checkpoint(files, config.model)
    weighing = weigh(config.model, hparams, checkpoint, target, formats)
    choose_threads(config.model)
    if bandwidth is not None:
        machine = speed.given(target.device, bandwidth)
    else:
        # A CPU's 16-bit products are not estimated, so only the usual ones need be measured.
        on_cpu = target.device.type == "cpu"
        machine = speed.measure(target.device, torch.float32 if on_cpu else torch.bfloat16)
    block_size = config.cache.block_size
    judge = _Judge(files.name, hparams, asked, weighing, target, machine, measured, block_size)
    candidates, refused = judge.candidates()
    best = _best(candidates, min_quality)
    return Plan(
        files.name,
        weighing.stored,
        asked.memory,
        asked.memory_source,
        asked.context,
        concurrency,
        min_quality,
        asked.step_tokens,
        machine,
        candidates,
        weighing.refused | refused,
        best,
        "" if best else _shortfall(candidates, asked),
    )


def _target(config: EngineConfig, memory: int | None, bandwidth: float | None) -> Target:
    if config.model.device == "cuda" and not torch.cuda.is_available():
        if memory is None or bandwidth is None:
            raise ConfigError(
                "--device cuda: torch sees no CUDA device here. To plan for a GPU elsewhere, say "
                "what it has: --memory 24GiB --bandwidth 900GB/s."
            )
        return Target(torch.device("cuda"), present=False)
    return Target(choose_device(config.model).device, present=True)


def _asked(
    config: EngineConfig,
    hparams: HParams,
    target: Target,
    memory: int | None,
    context: int | None,
    concurrency: int,
    min_quality: float,
    kv_dtype: str | None,
) -> _Asked:
    if memory is not None and memory < 1:
        raise ConfigError(f"--memory must be above 0, got {memory}. Example: 8GiB.")
    if not 0 <= min_quality <= 1:
        raise ConfigError(f"--min-quality must be from 0 to 1, got {min_quality:g}. Example: 0.95.")
    if context is not None and not 1 <= context <= hparams.max_positions:
        raise ConfigError(
            f"--context must be from 1 to the model's {hparams.max_positions} positions, got {context}."
        )
    kinds = space.KV_DTYPES[target.device.type]
    if kv_dtype is not None and kv_dtype not in kinds:
        raise ConfigError(
            f"--kv-cache-dtype must be one of {', '.join(sorted(kinds))}; got {kv_dtype!r}."
        )
    source = "as given"
    if memory is None:
        memory = free_bytes(target.device)
        source = "free now" if target.device.type == "cpu" else "free now on the GPU"
    on_cuda = target.device.type == "cuda"
    tokens = config.limits("cuda" if on_cuda else "cpu").max_num_batched_tokens
    return _Asked(
        memory,
        source,
        context if context is not None else min(_USUAL_CONTEXT, hparams.max_positions),
        concurrency,
        min_quality,
        kinds if kv_dtype is None else (kv_dtype,),
        tokens,
    )


@dataclass(frozen=True, slots=True)
class _Judge:
    """Says of one format and one KV type what it takes and gives."""

    model: str
    hparams: HParams
    asked: _Asked
    weighing: Weighing
    target: Target
    machine: speed.Machine
    records: list[Measured]
    block_size: int

    def candidates(self) -> tuple[list[Candidate], dict[str, str]]:
        """Every format with every KV type, and the KV types that the device refuses."""
        found, refused = [], {}
        for weights in self.weighing.formats:
            for kv_dtype in self.asked.kv_dtypes:
                try:
                    found.append(self.candidate(weights, kv_dtype))
                except ConfigError as error:
                    refused[f"{kv_dtype} KV"] = str(error)
        return found, refused

    def candidate(self, weights: Weighed, kv_dtype: str) -> Candidate:
        asked, hparams = self.asked, self.hparams
        need = self._need(weights, kv_dtype)
        total = need.total_bytes(asked.context, asked.concurrency)
        kv_options = {} if kv_dtype == "auto" else {"kv_cache_dtype": kv_dtype}
        lengths = space.contexts(hparams.max_positions, asked.context)
        return Candidate(
            weights.name,
            kv_dtype,
            weights.held,
            weights.weight_bytes,
            need.token_bytes,
            need.step_bytes + asked.concurrency * need.row_bytes,
            total,
            max(0, total - asked.memory),
            {length: need.most_requests(length, asked.memory) for length in lengths},
            {
                length: {
                    count: self._tok_s(weights, need.token_bytes, count, length)
                    for count in sorted({*space.CONCURRENCIES, asked.concurrency})
                }
                for length in lengths
            },
            self._tok_s(weights, need.token_bytes, 1, asked.context),
            self._tok_s(weights, need.token_bytes, asked.concurrency, asked.context),
            self._quality(weights, kv_dtype),
            {
                **weights.options,
                **kv_options,
                "max_model_len": asked.context,
                "max_num_seqs": asked.concurrency,
                "kv_cache_memory_bytes": need.kv_bytes(asked.context, asked.concurrency),
            },
        )

    def _need(self, weights: Weighed, kv_dtype: str) -> space.Need:
        hparams, size, device = self.hparams, weights.dtype.itemsize, self.target.device
        on_gpu = self.target.present and device.type == "cuda"  # can be asked what it can do
        return space.Need(
            weights.weight_bytes,
            choose_kv_format(
                kv_dtype, hparams, weights.dtype, device, on_gpu, self._native(weights)
            ).token_bytes,
            self.block_size,
            space.step_bytes(hparams, self.asked.step_tokens, size),
            space.row_bytes(hparams, size),
            spare_blocks=1 if self.machine.device == "cuda" else 0,
        )

    def _native(self, weights: Weighed) -> bool:
        """Whether a CPU's own kernels will compute, and not as the float32 reference."""
        hparams, device = self.hparams, self.target.device
        if device.type != "cpu" or weights.options.get("dtype") == "float32":
            return False
        heads = Heads(hparams.num_heads, hparams.num_kv_heads, hparams.head_dim)
        return choose_ops(Need(device, weights.dtype, heads, hparams.rope.dim)).is_native

    def _tok_s(self, weights: Weighed, token_bytes: int, rows: int, context: int) -> float | None:
        """With contexts that are full; 16-bit products are too slow on most CPUs to be guessed."""
        if self.machine.device == "cpu" and weights.dtype.itemsize == 2:
            return None
        kv_bytes = rows * speed.kv_tokens_read(self.hparams, context) * token_bytes
        seconds = self.machine.step_seconds(
            weights.read_bytes + kv_bytes, rows * weights.num_weights, self.hparams.num_layers
        )
        return round(rows / seconds, 1)

    def _quality(self, weights: Weighed, kv_dtype: str) -> Retention:
        """Measured together, else each on its own: measured where there is a record, or typical."""
        quantization = weights.options.get("quantization")
        head = bool(weights.options.get("quantize_head"))
        is_file = self.weighing.quality.basis != "reference"  # quantised by others
        look_up = partial(find, self.records, self.model, quantization, head)
        together = look_up(kv_dtype, is_file) if kv_dtype != "auto" else None
        if together is not None:
            return together
        kept = self.weighing.quality
        if quantization is not None or is_file:
            usual = kept if quantization is None else typical(quantization, head)
            kept = look_up("auto", is_file) or usual
        alone = (
            find(self.records, self.model, None, False, kv_dtype) if kv_dtype != "auto" else None
        )
        return kept.times(alone or typical_kv(kv_dtype))


def _best(candidates: list[Candidate], min_quality: float) -> Candidate | None:
    """The fastest with all requests, then with one; of those about as fast, the best."""
    good = [item for item in candidates if item.fits and item.quality.meets(min_quality)]
    if not good:
        return None
    near = _fastest(_fastest(good, "tok_s_all"), "tok_s_one")
    return max(near, key=lambda item: item.quality.value or 0.0)


def _fastest(
    candidates: list[Candidate], figure: Literal["tok_s_all", "tok_s_one"]
) -> list[Candidate]:
    """All that are about as fast as the fastest."""
    speeds = [getattr(item, figure) or 0.0 for item in candidates]
    least = _SAME_SPEED * max(speeds)
    return [item for item, each in zip(candidates, speeds, strict=True) if each >= least]


def _shortfall(candidates: list[Candidate], asked: _Asked) -> str:
    """What comes nearest, and by how much it misses."""
    good = [item for item in candidates if item.quality.meets(asked.min_quality)]
    if not good:
        known = [item for item in candidates if item.quality.value is not None]
        if not known:
            return "the quality of these formats is not known; measure it with windlass eval."
        nearest = max(known, key=lambda item: (item.quality.value or 0.0, -item.total_bytes))
        kept = nearest.quality.value or 0.0
        return (
            f"no format is expected to keep {asked.min_quality:g}: the nearest is {nearest.name}, "
            f"with {kept:.3f} ({nearest.quality.basis}), {asked.min_quality - kept:.3f} too little."
        )
    nearest = min(good, key=lambda item: item.total_bytes)
    room = nearest.most_requests[asked.context]
    instead = (
        f"it would fit with --concurrency {room}"
        if room
        else f"not even one request of {asked.context:,} tokens fits"
    )
    return (
        f"nothing fits into {gib(asked.memory)}: the nearest is {nearest.name}, which needs "
        f"{gib(nearest.total_bytes)} for {asked.concurrency} requests of {asked.context:,} tokens, "
        f"{gib(nearest.missing_bytes)} too much; {instead}."
    )
