"""Which numbers of tensor-parallel ranks, pipeline stages and replicas serve a model best.

Memory is exact up to the estimate of a step (models/rank_weights.py). Times are a model: kernels of
divided weights (kernel_times.py), collectives (fabric.py), and the stages of a pipeline. Every
assumption is part of the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from windlass.config import EngineConfig
from windlass.errors import ConfigError, ShardError
from windlass.models.card import load_hparams, open_checkpoint
from windlass.models.network import block_size_of
from windlass.models.rank_weights import (
    MAX_RANKS,
    RankDemand,
    RankNetwork,
    RankShape,
    fullest_rank,
    rank_kv_layout,
    smallest_fit,
)
from windlass.models.source import resolve
from windlass.models.stages import Stage
from windlass.runner.copies import step_bytes, why_no_copies
from windlass.runner.device import gib, kv_dtype
from windlass.runner.sequence_parallel import MIN_TOKENS
from windlass.tools.common.price import Price, gpu_price, price_of
from windlass.tools.plan.fabric import Fabric
from windlass.tools.plan.formats import Target, meta_parts
from windlass.tools.plan.kernel_times import (
    Assumption,
    KernelKind,
    KernelTimes,
    read_kernel_times,
)
from windlass.tools.plan.rank_work import RankWork, StepSize

BATCHES = (1, 8, 64, 256)
PROMPT = 2048  # tokens of the prompt whose TTFT is estimated
_SAME_SPEED = 0.97  # of the fastest: counts as equal
_RESERVE_BYTES = 3 * 2**30
_GPU = "H200"  # whose kernels were measured
_GPU_MEMORY = 139 * 2**30


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    memory: int
    memory_source: str
    price: Price  # of one


@dataclass(frozen=True, slots=True)
class Batch:
    """Decoding with some concurrent requests on all GPUs together."""

    requests: int
    fits: bool  # whether their KV fits at the planned context
    tok_s: float
    tpot_ms: float
    communication: float  # share of the kernels' and collectives' time
    bubble: float  # share of the time in which a pipeline stage waits
    usd_per_million: float | None


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to use all GPUs. Its fields are keys of `plan --json`."""

    tp: int
    pp: int
    ep: int  # ranks that divide the experts; 1: every rank has a part of each
    replicas: int
    weight_bytes: int  # of the fullest rank, as the following
    step_bytes: int
    kv_token_bytes: int
    kv_bytes: int  # left for the KV cache; below 0: does not fit
    max_tokens: int  # in the KV caches of all replicas
    batches: tuple[Batch, ...]
    ttft_ms: float
    ttft_communication: float
    split_ttft_ms: float  # with --enable-sequence-parallel
    # Of a prompt's step with expert parallelism, by --expert-combine.
    expert_combine_ms: dict[str, float]

    @property
    def fits(self) -> bool:
        return self.max_tokens > 0

    @property
    def name(self) -> str:
        return shape_name(RankShape(self.tp, self.pp, self.ep > 1), self.replicas)

    def batch(self, requests: int) -> Batch:
        return next(each for each in self.batches if each.requests == requests)

    @property
    def options(self) -> dict[str, int | bool]:
        """Of `serve`, without those at their default."""
        sizes = {
            "tensor_parallel_size": self.tp,
            "pipeline_parallel_size": self.pp,
            "data_parallel_size": self.replicas,
        }
        chosen: dict[str, int | bool] = {name: n for name, n in sizes.items() if n > 1}
        return chosen | ({"enable_expert_parallel": True} if self.ep > 1 else {})


def shape_name(shape: RankShape, replicas: int = 1) -> str:
    """tp 4, pp 2, ep 4, 2 replicas"""
    parts = [f"tp {shape.tp}"]
    parts += [f"pp {shape.pp}"] if shape.pp > 1 else []
    parts += [f"ep {shape.ep}"] if shape.ep > 1 else []
    return ", ".join(parts + ([f"{replicas} replicas"] if replicas > 1 else []))


@dataclass(frozen=True, slots=True)
class ScalingPlan:
    """All layouts of a model on some GPUs, and the best. Its fields are keys of `plan --json`."""

    model: str
    format: str
    gpu: str
    devices: int
    memory_bytes: int  # of one GPU
    context: int
    concurrency: int
    layouts: list[Layout]
    refused: dict[str, str]
    best: Layout | None
    reason: str  # for the best, or why nothing fits
    checked: str  # against measured kernels
    assumptions: list[Assumption]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingQuery:
    """What to plan. None: every number that divides the devices."""

    devices: int
    tp: int | None = None
    pp: int | None = None
    expert_parallel: bool = False  # only with expert parallelism; else with and without
    context: int | None = None
    concurrency: int = 64

    def __post_init__(self) -> None:
        used = RankShape(tp=1 if self.tp is None else self.tp, pp=1 if self.pp is None else self.pp)
        if not 1 <= self.devices <= MAX_RANKS:
            raise ConfigError(f"--devices must be from 1 to {MAX_RANKS}, got {self.devices}.")
        if self.concurrency < 1:
            raise ConfigError(f"--concurrency must be at least 1, got {self.concurrency}.")
        if self.devices % used.num_ranks:
            raise ConfigError(
                f"--devices {self.devices} is no multiple of the {used.num_ranks} ranks of "
                f"--tensor-parallel-size {used.tp} x --pipeline-parallel-size {used.pp}."
            )

    def shapes(self, has_experts: bool) -> Iterator[RankShape]:
        """The shapes to compare; those that were asked for, even if they are refused."""
        divisors = [size for size in range(1, self.devices + 1) if self.devices % size == 0]
        for tp in divisors if self.tp is None else [self.tp]:
            for pp in divisors if self.pp is None else [self.pp]:
                if self.devices % (tp * pp):
                    continue
                if not self.expert_parallel:
                    yield RankShape(tp, pp)
                if (self.expert_parallel and self.tp is not None) or (has_experts and tp > 1):
                    yield RankShape(tp, pp, expert_parallel=True)


def plan_on_h200(
    config: EngineConfig,
    query: ScalingQuery,
    *,
    memory: int | None = None,
    link_bandwidth: float | None = None,
    price_per_hour: float | None = None,
    records: Path | None = None,
) -> ScalingPlan:
    """Compare layouts. `records`: a folder that may have measured kernels of divided weights."""
    if config.model.device == "cpu":
        raise ConfigError("--device cpu: only GPUs are planned together. Omit the flag.")
    if memory is not None and memory < 1:
        raise ConfigError(f"--memory must be above 0, got {memory}. Example: 139GiB.")
    if link_bandwidth is not None and link_bandwidth <= 0:
        raise ConfigError(
            f"--link-bandwidth must be above 0, got {link_bandwidth:g}. Example: 450GB/s."
        )
    gpu = Gpu(
        name=_GPU,
        memory=_GPU_MEMORY if memory is None else memory,
        memory_source="what an H200 has free" if memory is None else "--memory",
        price=gpu_price(_GPU) if price_per_hour is None else price_of(price_per_hour, "cuda"),
    )
    fabric = Fabric() if link_bandwidth is None else Fabric(bandwidth=link_bandwidth)
    times = read_kernel_times(records, _GPU)
    return ScalingModel(config, gpu=gpu, times=times, fabric=fabric).plan(query)


@dataclass(frozen=True, slots=True)
class _StageTime:
    """Seconds of one rank of a stage in one step."""

    kernels: float
    collectives: float

    @property
    def total(self) -> float:
        return self.kernels + self.collectives


class ScalingModel:
    """Memory and times of one model on one kind of GPU."""

    def __init__(
        self, config: EngineConfig, *, gpu: Gpu, times: KernelTimes, fabric: Fabric
    ) -> None:
        self._gpu, self._times, self._fabric = gpu, times, fabric
        files = resolve(config.model)
        self.model, self.hparams = files.name, load_hparams(files, config.model)
        made = meta_parts(
            config.model,
            self.hparams,
            checkpoint=open_checkpoint(files, config.model),
            target=Target(torch.device("cuda"), present=False),
        )
        self._parts, self._format = made.parts, made.choice
        self._kv_dtype = kv_dtype(config.cache.kv_cache_dtype) or made.parts.dtype
        self._block_size = block_size_of(config.cache.block_size, self.hparams)
        self._limits = config.limits("cuda")
        self._copies = config.model.dequantized_copies
        self._networks: dict[tuple[int, bool], RankNetwork] = {}
        self._kinds: set[KernelKind] = set()

    def plan(self, query: ScalingQuery) -> ScalingPlan:
        context = self._context(query.context)
        shapes = list(query.shapes(self.hparams.moe is not None))
        if not shapes:  # expert parallelism on one device, or without experts
            RankShape(tp=1, expert_parallel=True).check(self.hparams)
        layouts: list[Layout] = []
        refused: dict[str, str] = {}
        for shape in shapes:
            try:
                layouts.append(self._layout(shape, query, context))
            except (ConfigError, ShardError) as error:
                if len(shapes) == 1:
                    raise
                refused[shape_name(shape)] = str(error)
        if not layouts:
            raise ConfigError("; ".join(f"{name}: {why}" for name, why in refused.items()))
        best = _best(layouts, query.concurrency)
        reason = (
            self._why_nothing_fits(layouts, context)
            if best is None
            else _why_best(best, layouts, query.concurrency)
        )
        return ScalingPlan(
            model=self.model,
            format=self._format,
            gpu=self._gpu.name,
            devices=query.devices,
            memory_bytes=self._gpu.memory,
            context=context,
            concurrency=query.concurrency,
            layouts=layouts,
            refused=refused,
            best=best,
            reason=reason,
            checked=self._times.verdict(self._kinds),
            assumptions=list(self._assumptions(context)),
        )

    def _context(self, given: int | None) -> int:
        longest = self.hparams.max_positions
        if given is not None and not 1 <= given <= longest:
            raise ConfigError(
                f"--context must be from 1 to the model's {longest} positions, got {given}."
            )
        return given or min(PROMPT, longest)

    def work(self, shape: RankShape, min_split_tokens: int | None = None) -> RankWork:
        """The work of the fullest rank; it does not depend on the number of stages.

        `min_split_tokens`: see RankWork.
        """
        key = shape.tp, shape.expert_parallel
        if key not in self._networks:
            self._networks[key] = fullest_rank(self.hparams, self._parts, shape)
        return RankWork(
            network=self._networks[key],
            hparams=self.hparams,
            tp=shape.tp,
            layout=rank_kv_layout(
                self.hparams, shape.tp, block_size=self._block_size, dtype=self._kv_dtype
            ),
            item_bytes=self._parts.dtype.itemsize,
            min_split_tokens=min_split_tokens,
        )

    def _layout(self, shape: RankShape, query: ScalingQuery, context: int) -> Layout:
        shape.check(self.hparams)
        work, replicas = self.work(shape), query.devices // shape.num_ranks
        stages = work.network.stages(shape.pp)
        usable = int(self._gpu.memory * self._limits.memory_share) - _RESERVE_BYTES
        step = work.step_bytes(self._limits.max_num_batched_tokens, self._limits.max_num_seqs)
        held = self._stage_bytes(work.network, stages)
        left = [
            (usable - step - num_bytes, work.layout.stage(stage.layers))
            for stage, num_bytes in zip(stages, held, strict=True)
        ]
        # All stages have the same number of blocks.
        num_blocks = min(num_bytes // layout.block_bytes for num_bytes, layout in left)
        tokens = num_blocks // len(work.layout.groups) * self._block_size
        max_tokens = max(0, tokens) * replicas
        times = {
            rows: self._stage_times(work, stages, StepSize.decode(rows, context))
            for _, rows in {_micro_batches(n, replicas, shape.pp) for n in _requests(query)}
        }
        prompt = self._prompt_times(work, stages)
        split = self._prompt_times(self.work(shape, MIN_TOKENS["cuda"]), stages)
        return Layout(
            tp=shape.tp,
            pp=shape.pp,
            ep=shape.ep,
            replicas=replicas,
            weight_bytes=max(held),
            step_bytes=step,
            kv_token_bytes=max(layout.token_bytes for _, layout in left),
            kv_bytes=min(num_bytes for num_bytes, _ in left),
            max_tokens=max_tokens,
            batches=tuple(
                self._batch(requests, shape=shape, times=times, query=query, max_tokens=max_tokens)
                for requests in _requests(query)
            ),
            ttft_ms=self._ttft_ms(prompt),
            ttft_communication=_share(prompt),
            split_ttft_ms=self._ttft_ms(split),
            expert_combine_ms={
                rule: _ms(sum(map(self._fabric.seconds, found)))
                for rule, found in work.expert_combine(PROMPT).items()
                if shape.ep > 1
            },
        )

    def _stage_bytes(self, network: RankNetwork, stages: Sequence[Stage]) -> list[int]:
        """Bytes of each stage's weights, with the 16-bit copies that a start makes."""
        held, copies = map(network.stage_bytes, stages), map(network.stage_copies, stages)
        sizes = list(zip(held, copies, strict=True))
        memory = self._gpu.memory
        usable = int(memory * self._limits.memory_share) - step_bytes(
            self.hparams,
            tokens=self._limits.max_num_batched_tokens,
            rows=self._limits.max_num_seqs,
            itemsize=self._parts.dtype.itemsize,
        )
        made = self._copies is None and not any(
            why_no_copies(copied, memory=memory, left=usable - packed) for packed, copied in sizes
        )
        # --dequantized-copies counts as weights already.
        return [packed + made * copied for packed, copied in sizes]

    def _prompt_times(self, work: RankWork, stages: Sequence[Stage]) -> list[_StageTime]:
        """Of the largest step of a prompt."""
        size = StepSize.prefill(min(PROMPT, self._limits.max_num_batched_tokens))
        return self._stage_times(work, stages, size)

    def _ttft_ms(self, prompt: Sequence[_StageTime]) -> float:
        chunks = -(-PROMPT // self._limits.max_num_batched_tokens)
        slowest = max(each.total for each in prompt)
        return _ms(sum(each.total for each in prompt) + (chunks - 1) * slowest)

    def _stage_times(
        self, work: RankWork, stages: Sequence[Stage], size: StepSize
    ) -> list[_StageTime]:
        found = []
        for stage in stages:
            part = work.stage(stage, size)
            self._kinds |= {kernel.kind for kernel in part.kernels}
            found.append(
                _StageTime(
                    kernels=sum(map(self._times.seconds, part.kernels)),
                    collectives=sum(map(self._fabric.seconds, part.collectives)),
                )
            )
        return found

    def _batch(
        self,
        requests: int,
        *,
        shape: RankShape,
        times: Mapping[int, Sequence[_StageTime]],
        query: ScalingQuery,
        max_tokens: int,
    ) -> Batch:
        """A cycle in which every request gets a token: micro-batches go through the stages in turn."""
        count, rows = _micro_batches(requests, query.devices // shape.num_ranks, shape.pp)
        stages = times[rows]
        once = sum(each.total for each in stages)
        cycle = max(once, count * max(each.total for each in stages))
        cost = self._gpu.price.per_million(requests / cycle)
        return Batch(
            requests=requests,
            fits=requests * self._context(query.context) <= max_tokens,
            tok_s=round(requests / cycle, 1),
            tpot_ms=_ms(cycle),
            communication=_share(stages),
            bubble=round(1 - count * once / (shape.pp * cycle), 4),
            usd_per_million=None if cost is None else round(cost * query.devices, 3),
        )

    def _why_nothing_fits(self, layouts: Sequence[Layout], context: int) -> str:
        """Name the layout that comes nearest, and the fewest GPUs that would do."""
        nearest = max(layouts, key=lambda item: item.kv_bytes)
        memory = int(self._gpu.memory * self._limits.memory_share)
        demand = RankDemand(
            kv_tokens=context,
            block_size=self._block_size,
            kv_dtype=self._kv_dtype,
            other_bytes=_RESERVE_BYTES + nearest.step_bytes,
        )
        shape = smallest_fit(self.hparams, self._parts, demand=demand, memory=memory)
        enough = (
            f"not even {MAX_RANKS} of these GPUs hold it"
            if shape is None
            else f"the smallest number of these GPUs that holds one request of {context:,} tokens is "
            f"{shape.num_ranks} ({shape_name(shape)})"
        )
        return (
            f"nothing fits: the nearest is {nearest.name}, whose fullest GPU needs "
            f"{gib(nearest.weight_bytes)} for weights, {gib(nearest.step_bytes)} for steps and "
            f"{gib(_RESERVE_BYTES)} in reserve, of {gib(memory)}; {enough}."
        )

    def _assumptions(self, context: int) -> Iterator[Assumption]:
        limits, gpu = self._limits, self._gpu
        yield Assumption("memory of a GPU", gib(gpu.memory), gpu.memory_source)
        yield Assumption(
            "memory share", f"{limits.memory_share:g} of it", "the profile, or --memory-share"
        )
        yield Assumption(
            "weights and KV cache",
            "exact: the layers' own shards, before a kernel repacks them",
            "counted on a rank's network of meta tensors",
        )
        yield Assumption(
            "reserve",
            f"{gib(_RESERVE_BYTES)} per GPU for captured graphs, buffers of collectives and KV offload, and the process",
            "assumed, not measured",
        )
        yield Assumption(
            "steps",
            f"activations of {limits.max_num_batched_tokens:,} tokens and logits of "
            f"{limits.max_num_seqs:,} requests",
            "estimated from the largest tensors",
        )
        yield from self._times.assumptions(sorted(self._kinds))
        yield from self._fabric.assumptions
        yield Assumption(
            "decode steps",
            f"every request has {context:,} tokens; the host's work overlaps with the GPUs'",
            "--context; one GPU: measured by the records of whole steps",
        )
        if self.hparams.moe is not None:
            yield Assumption(
                "routing",
                "all experts are equally likely; the busiest of n ranks has sqrt(2 ln n) deviations more "
                "pairs than the mean. Every rank has all tokens, and the ranks all-reduce what their "
                "experts give, as CUDA graphs do",
                "assumed; skewed routing is slower",
            )
        yield Assumption(
            "pipeline",
            "as many micro-batches as stages, or as requests if there are fewer; stages of about equal "
            "bytes; a prompt's chunks follow each other",
            "how the engine schedules",
        )
        yield Assumption("price", gpu.price.reason, "list price, or --price-per-hour")


def _requests(query: ScalingQuery) -> list[int]:
    return sorted({*BATCHES, query.concurrency})


def _micro_batches(requests: int, replicas: int, pp: int) -> tuple[int, int]:
    """Micro-batches of the replica with the most requests, and the rows of each."""
    own = -(-requests // replicas)
    count = min(pp, own)
    return count, -(-own // count)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _share(stages: Iterable[_StageTime]) -> float:
    found = list(stages)
    return round(sum(each.collectives for each in found) / sum(each.total for each in found), 4)


def _best(layouts: Sequence[Layout], concurrency: int) -> Layout | None:
    """The fastest with the planned requests; of equally fast ones, the one with the shortest TTFT."""
    good = [item for item in layouts if item.batch(concurrency).fits]
    if not good:
        good = [item for item in layouts if item.fits]
    if not good:
        return None
    fastest = max(item.batch(concurrency).tok_s for item in good)
    near = [item for item in good if item.batch(concurrency).tok_s >= _SAME_SPEED * fastest]
    return min(near, key=lambda item: item.ttft_ms)


def _why_best(best: Layout, layouts: Sequence[Layout], concurrency: int) -> str:
    own = best.batch(concurrency)
    text = (
        f"{best.name}: {own.tok_s:,.0f} tok/s with {concurrency} requests, "
        f"{own.communication:.0%} of the time in collectives"
    )
    if not own.fits:
        text += f"; its KV caches hold {best.max_tokens:,} tokens, too few for all at full context"
    others = [item for item in layouts if item.fits and item is not best]
    if not others:
        return text + "; no other layout fits."
    rival = max(others, key=lambda item: item.batch(concurrency).tok_s)
    speed = own.tok_s / rival.batch(concurrency).tok_s
    ttft = best.ttft_ms / rival.ttft_ms
    return (
        f"{text}; {speed:.2f} x the speed of {rival.name} at {ttft:.2f} x its TTFT, with room for "
        f"{best.max_tokens:,} instead of {rival.max_tokens:,} tokens."
    )
