"""Times the kernels of divided weights on one GPU, and compares them with the plan of several GPUs.

    python benchmarks/scripts/sharded_shapes.py -o benchmarks/h200-sharded-shapes.json
    python benchmarks/scripts/sharded_shapes.py --quick

For Llama-3.1-70B and DeepSeek-V3 in fp8: every weight, the experts (a part of each, or whole experts)
and attention, whole and as a rank of 2, 4 and 8 has them. Weights are random. A captured graph runs
copies with more bytes than the L2 cache holds. Routing is even: all experts get equally many tokens.
`windlass plan --devices` reads the record. After --max-seconds the rest is left out; the exit status is
1 if a kernel failed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from windlass.config import EngineConfig
from windlass.core.moe import Routing
from windlass.core.types import Row, SlotId, SlotInit, StepPlan
from windlass.kernels.attention_options import AttentionOptions, RopeOptions
from windlass.kernels.batch import KVCache, LayerKV, StepBatch
from windlass.kernels.experts import ExpertKernels, ExpertWeights
from windlass.kernels.gemm_io import Inputs, QuantisedInputs
from windlass.kernels.latent import LatentWeights
from windlass.kernels.linears import Linears
from windlass.kernels.ops import Ops, choose_ops
from windlass.kernels.packed import Float8, Packed
from windlass.kernels.prepared import Prepared
from windlass.layers.attention import Attention
from windlass.layers.linear import Linear
from windlass.layers.mla import MLA, AbsorbedWeight
from windlass.layers.moe import Experts
from windlass.layers.stored import StoredWeight
from windlass.models.network import kernel_need, kv_layout
from windlass.models.rank_weights import CountedRank, RankShape
from windlass.parallel.mesh import Mesh
from windlass.runner.eager import Metadata, ReferenceMetadata, step_batch
from windlass.runner.inputs import SlotFacts, StepInputs
from windlass.runner.slots import SlotTables
from windlass.tools.common.price import Price
from windlass.tools.common.record import Record
from windlass.tools.plan.fabric import Fabric
from windlass.tools.plan.kernel_times import (
    KINDS,
    RECORD_NAME,
    Kernel,
    KernelTimes,
    check,
    fit,
    measured_kernel,
)
from windlass.tools.plan.rank_work import RankWork, StepSize
from windlass.tools.plan.scaling import Gpu, ScalingModel

Call = Callable[[], object]
Timer = Callable[[Sequence[Call]], float]  # seconds per call
Log = Callable[[str], None]

ROOT = Path(__file__).parents[1] / "models"
MODELS: dict[str, Mapping[str, Any]] = {
    "llama-3.1-70b": {"quantization": "fp8", "quantize_head": True},
    "deepseek-v3": {},
}
COLD_BYTES = 300e6  # min bytes that a graph reads: five times the L2 cache of an H200
MAX_COPIES = 16
MAX_BYTES = 30e9  # of all copies of one weight
REPLAYS = 5
CONTEXT = 2048
BLOCK_SIZE = 16
HEAD_TOKENS = 256  # a head never multiplies more rows
_NOTES = (
    "us: median time of one call in a captured graph over copies that exceed the L2 cache. bytes: weights, "
    "or keys and values, and activations that it must read and write; flops: 2 per multiply-add. "
    "predicted_us: the default rates of windlass/tools/plan/kernel_times.py. share: the part of the "
    "weight that a rank has; 'of experts': whole experts. Attention has 2,048 tokens of context; more than "
    "256 tokens are one prompt, whose attention includes RoPE and the write to the KV cache. Routing is "
    "even and without groups. 16-bit GEMMs are torch's."
)


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure."""

    models: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: MODELS)
    folder: Path = ROOT
    shares: tuple[int, ...] = (1, 2, 4, 8)
    tokens: tuple[int, ...] = (1, 8, 64, 256, 2048)
    context: int = CONTEXT
    device: torch.device = field(default_factory=lambda: torch.device("cuda"))
    dtype: torch.dtype = torch.bfloat16
    max_seconds: float = 240.0

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel to time. `make` allocates its copies, of `copy_bytes` each."""

    model: str
    weight: str
    share: str
    tokens: int
    kernel: Kernel
    sizes: tuple[int, ...]  # cases with equal sizes and kinds are measured once
    copy_bytes: float
    make: Callable[[int], tuple[list[Call], str]]  # from the number of copies: calls, kernel name

    @property
    def key(self) -> object:
        return self.kernel.kind, self.tokens, self.sizes

    @property
    def num_copies(self) -> int:
        needed = int(COLD_BYTES / max(1.0, self.kernel.num_bytes)) + 1
        return max(1, min(MAX_COPIES, needed, int(MAX_BYTES / max(1.0, self.copy_bytes))))


def graph_seconds(calls: Sequence[Call]) -> float:
    """Time of one call: the median of some replays of a graph of all calls."""
    calls[0]()  # compiles the kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    took = []
    for _ in range(REPLAYS + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        took.append(start.elapsed_time(end))
    return median(took[1:]) / 1e3 / len(calls)


def loop_seconds(calls: Sequence[Call]) -> float:
    """Time of one call on a CPU."""
    calls[0]()
    took = []
    for _ in range(REPLAYS):
        started = time.perf_counter()
        for call in calls:
            call()
        took.append(time.perf_counter() - started)
    return median(took) / len(calls)


def random_weight(kind: str, outputs: int, inputs: int, settings: Settings) -> Packed | Tensor:
    """A random weight in the form of a kind of kernel."""
    shape, device = (outputs, inputs), settings.device
    values = torch.randn(shape, device=device, dtype=settings.dtype) / 30
    if not kind.startswith("fp8"):
        return values
    codes = (values * 30).to(torch.float8_e4m3fn)
    if kind == "fp8":
        return Float8(codes, torch.full((outputs, 1), 1 / 30, device=device), "token")
    blocks = -(-outputs // 128), -(-inputs // 128)
    return Float8(codes, torch.full(blocks, 1 / 30, device=device), "block", block=(128, 128))


def gemm_inputs(prepared: Prepared, tokens: int, num_in: int, settings: Settings) -> Inputs:
    """Inputs as the norm before a GEMM gives them: quantised if the GEMM wants that."""
    x = torch.randn(tokens, num_in, device=settings.device, dtype=settings.dtype)
    if prepared.input_quant(tokens) is None:
        return x
    scales = torch.ones(tokens, 1, device=settings.device)
    return QuantisedInputs(x.to(torch.float8_e4m3fn), scales, settings.dtype)


def make_gemms(
    kind: str, sizes: tuple[int, int], tokens: int, settings: Settings
) -> Callable[[int], tuple[list[Call], str]]:
    def make(copies: int) -> tuple[list[Call], str]:
        linears = Linears(settings.device, settings.dtype)
        gemms = [linears.prepare(random_weight(kind, *sizes, settings)) for _ in range(copies)]
        x = gemm_inputs(gemms[0].prepared, tokens, sizes[1], settings)
        return [partial(gemm.prepared.apply, x) for gemm in gemms], gemms[0].kernel

    return make


def even_logits(routing: Routing, ranks: int, tokens: int, settings: Settings) -> Tensor:
    """Router logits with which every rank and each of its experts gets equally many tokens."""
    local = routing.num_experts // ranks
    pairs = torch.arange(tokens * routing.top_k, device=settings.device)
    chosen = (pairs % ranks * local + pairs // ranks % local).view(tokens, routing.top_k)
    shape = tokens, routing.num_experts
    logits = torch.rand(shape, device=settings.device)
    return logits.scatter_(1, chosen, 5 + torch.rand(chosen.shape, device=settings.device)).to(
        settings.dtype
    )


def stacked(kind: str, count: int, sizes: tuple[int, int], settings: Settings) -> Packed | Tensor:
    """`count` experts with the same random values."""
    one = random_weight(kind, *sizes, settings)
    if isinstance(one, Tensor):
        return one.repeat(count, 1)
    assert isinstance(one, Float8)
    codes = one.codes.view(torch.uint8).repeat(count, 1).view(torch.float8_e4m3fn)
    return replace(one, codes=codes, scales=one.scales.repeat(count, 1))


def make_experts(
    experts: Experts, ranks: int, tokens: int, settings: Settings
) -> Callable[[int], tuple[list[Call], str]]:
    """`ranks`: that divide the experts; 1: every rank has a part of each."""
    inner, hidden = experts.down.num_in, experts.gate_up.num_in
    routing = replace(experts.routing, num_groups=1, top_groups=1)
    count = len(experts.down.parts)
    prepared = experts.down.prepared
    form = "bf16" if prepared is None else prepared.form
    kind = "bf16" if not form.startswith("fp8") else "fp8 blocks" if "blocks" in form else "fp8"
    names = None if count == routing.num_experts else tuple(range(count))

    def make(copies: int) -> tuple[list[Call], str]:
        kernels = ExpertKernels(settings.device, settings.dtype)
        logits = even_logits(routing, ranks, tokens, settings)
        x = torch.randn(tokens, hidden, device=settings.device, dtype=settings.dtype)
        made = [
            kernels.prepare(
                ExpertWeights(
                    gate_up=stacked(kind, count, (2 * inner, hidden), settings),
                    down=stacked(kind, count, (hidden, inner), settings),
                    routing=routing,
                    experts=names,
                )
            )
            for _ in range(copies)
        ]
        return [partial(each.mlp.apply, x, logits) for each in made], made[0].kernel

    return make


@dataclass(frozen=True, slots=True)
class Attended:
    """Attention of one rank: its kernels, KV pages of some layers, and a step."""

    ops: Ops
    cache: KVCache
    batch: StepBatch


def attended(
    work: RankWork, attention: Attention | MLA, rows: Sequence[tuple[int, int]], *, copies: int,
    settings: Settings, kv_dtype: torch.dtype,
) -> Attended:  # fmt: skip
    """A step of rows (start, tokens), with the KV cache of `copies` layers."""
    mesh = Mesh(tp=CountedRank(0, work.tp))
    device, coded = settings.device, kv_dtype.itemsize == 1
    need = kernel_need(
        work.hparams,
        device=device,
        dtype=settings.dtype,
        kv_dtype=kv_dtype if coded else None,
        mesh=mesh,
    )
    hparams = replace(
        work.hparams, num_layers=copies, sliding_windows=(None,) * copies, layer_ropes=()
    )
    layout = kv_layout(hparams, BLOCK_SIZE, kv_dtype, mesh)
    per_row = [-(-(start + count) // BLOCK_SIZE) for start, count in rows]
    cache = KVCache(layout, sum(per_row) + 2, kv_dtype, device)
    slots = SlotTables(len(rows), max(per_row), BLOCK_SIZE, device, scratch=sum(per_row))
    plan = _plan(rows, per_row)
    facts = SlotFacts()
    facts.apply(plan)
    inputs = StepInputs(plan, facts, slots.apply(plan))
    slots.send(inputs.grown)  # else all rows would read one block, from the L2 cache
    fill(cache)
    metadata = _metadata(slots, attention, len(rows))
    _, batch = step_batch(inputs, slots, cache.layers, metadata)
    return Attended(choose_ops(need), cache, batch)


def fill(cache: KVCache) -> None:
    """Write random keys and values, or random codes with one scale."""
    for layer in cache.layers:
        assert isinstance(layer, LayerKV)
        for pages, scales in (
            (layer.keys, layer.key_scales),
            (layer.values, layer.value_scales),
        ):
            if scales is None:
                pages.normal_()
            else:
                pages.view(torch.uint8).random_(0, 64)  # e4m3 codes up to 2
                scales.fill_(1.0)


def _plan(rows: Sequence[tuple[int, int]], per_row: Sequence[int]) -> StepPlan:
    made, admitted, used = [], [], 0
    for i, ((start, count), num_blocks) in enumerate(zip(rows, per_row, strict=True)):
        blocks = range(used, used + num_blocks)
        used += num_blocks
        slot, end = SlotId(i), start + count
        admitted.append(SlotInit.greedy(slot, [0] * end, num_prompt=end))
        made.append(Row.unowned(slot, (0,) * count, start=start, blocks=blocks))
    return StepPlan(made, admitted)


def _metadata(slots: SlotTables, attention: Attention | MLA, rows: int) -> Metadata:
    if slots.device.type == "cpu":
        return ReferenceMetadata(slots)
    properties = torch.cuda.get_device_properties(slots.device)
    return device_metadata(slots, attention, rows, properties.multi_processor_count)


def device_metadata(
    slots: SlotTables, attention: Attention | MLA, rows: int, multiprocessors: int
) -> Metadata:
    """As the executors of a GPU make it; all heads of MLA share one latent."""
    from windlass.kernels.triton.attention import tile_tokens
    from windlass.kernels.triton.latent import decode_parts
    from windlass.runner.cuda.metadata import DeviceMetadata

    if isinstance(attention, MLA):
        group, parts = attention.heads.num_q, decode_parts(attention.heads.num_q)
    else:
        group, parts = attention.heads.group, attention.heads.num_kv
    return DeviceMetadata(
        slots,
        tile=tile_tokens(group),
        num_kv_heads=parts,
        num_positions=rows,
        multiprocessors=multiprocessors,
    )


class Cases:
    """Lists the kernels of one model at one share."""

    def __init__(self, model: str, work: RankWork, *, share: int, ranks: int, settings: Settings) -> None:  # fmt: skip
        """`ranks`: that divide the experts, 1 or `share`."""
        self._model = model
        self._work = work
        self._ranks = ranks
        self._settings = settings
        self._share = f"1/{share}" if ranks == 1 else f"1/{share} of experts"

    def gemms(self) -> Iterator[Case]:
        """The linear layers, each kind of layer once."""
        for name, layer in self._weights():
            if isinstance(layer, Linear):
                for tokens in self._settings.tokens:
                    if name != "lm_head" or tokens <= HEAD_TOKENS:
                        yield self._gemm(name, layer, tokens)

    def _weights(self) -> Iterator[tuple[str, nn.Module]]:
        network = self._work.network
        for index in dict.fromkeys(network.same_as):
            for path, module in network.layer(index).named_modules():
                if isinstance(module, StoredWeight | Experts):
                    yield path, module
        yield "lm_head", network.head

    def _gemm(self, name: str, layer: StoredWeight, tokens: int) -> Case:
        kernel = self._work.gemm(layer, tokens)
        sizes = sum(layer.parts.values()), layer.num_in
        return self._case(
            name,
            tokens,
            kernel=kernel,
            sizes=sizes,
            copy_bytes=kernel.num_bytes,
            make=make_gemms(kernel.kind, sizes, tokens, self._settings),
        )

    def _case(self, weight: str, tokens: int, **values: Any) -> Case:
        return Case(model=self._model, weight=weight, share=self._share, tokens=tokens, **values)

    def experts(self) -> Iterator[Case]:
        for name, layer in self._weights():
            if isinstance(layer, Experts):
                for tokens in self._settings.tokens:
                    yield self._experts(name, layer, tokens)

    def _experts(self, name: str, layer: Experts, tokens: int) -> Case:
        num_local = len(layer.down.parts)
        pairs = max(1, tokens * layer.routing.top_k // self._ranks)
        kernel = self._work.grouped(layer, pairs, min(1.0, pairs / num_local))
        return self._case(
            name,
            tokens,
            kernel=kernel,
            sizes=(num_local, layer.down.num_in, layer.gate_up.num_in),
            copy_bytes=float(layer.num_bytes),
            make=make_experts(layer, self._ranks, tokens, self._settings),
        )

    def norms(self) -> Iterator[Case]:
        hidden, settings = self._work.hparams.hidden_size, self._settings

        def make_norm(tokens: int) -> Callable[[int], tuple[list[Call], str]]:
            def make(copies: int) -> tuple[list[Call], str]:
                need = kernel_need(self._work.hparams, device=settings.device, dtype=settings.dtype)
                norm = choose_ops(need).add_rms_norm
                x, weight = (
                    torch.randn(*shape, device=settings.device, dtype=settings.dtype)
                    for shape in ((tokens, hidden), (hidden,))
                )
                streams = [x.clone() for _ in range(copies)]
                return [partial(norm, x, each, weight, 1e-5) for each in streams], "norm"

            return make

        for tokens in settings.tokens:
            kernel = self._work.norm(tokens)
            yield self._case(
                "norm",
                tokens,
                kernel=kernel,
                sizes=(hidden,),
                copy_bytes=kernel.num_bytes,
                make=make_norm(tokens),
            )

    def attention(self) -> Iterator[Case]:
        """Attention over the work's KV type, and the projections that MLA absorbs."""
        block = self._work.network.layer(0)
        attention = block.self_attn
        assert isinstance(attention, Attention | MLA)
        for tokens in self._settings.tokens:
            yield self._attention(attention, tokens)
        if isinstance(attention, MLA) and attention.kv_b_proj is not None:
            for tokens in self._settings.tokens:
                if tokens <= HEAD_TOKENS:  # prompts do not absorb it
                    yield from self._absorbed(attention, attention.kv_b_proj, tokens)

    def _rows(self, tokens: int) -> tuple[list[tuple[int, int]], StepSize]:
        context = self._settings.context
        if tokens > HEAD_TOKENS:
            return [(0, tokens)], StepSize.prefill(tokens)
        return [(context - 1, 1)] * tokens, StepSize.decode(tokens, context)

    def _attention(self, attention: Attention | MLA, tokens: int) -> Case:
        work, settings = self._work, self._settings
        rows, size = self._rows(tokens)
        kernel = work.attend(attention, 0, size)
        (kept, *_) = work.layout.groups
        kv_dtype = torch.float8_e4m3fn if kept.item_bytes == 1 else settings.dtype

        def make(copies: int) -> tuple[list[Call], str]:
            made = attended(
                work, attention, rows, copies=copies, settings=settings, kv_dtype=kv_dtype
            )
            if size.has_prompts:
                return _prompt_calls(made, attention, tokens, settings)
            heads, batch = attention.heads, made.batch
            queries = settings.random(tokens, heads.num_q, heads.dim)
            if isinstance(attention, MLA):
                run, scale, rank = made.ops.latent_attention, attention.scale, attention.heads.rank
                return [
                    partial(run, queries, kv, batch, scale, rank) for kv in made.cache.layers
                ], "latent_attention"
            options = AttentionOptions(scale=heads.dim**-0.5, window=None, soft_cap=None)
            attend = made.ops.attention
            return [
                partial(attend, queries, kv, batch, options) for kv in made.cache.layers
            ], "attention"

        stored = 1 if kept.item_bytes == 1 else 2
        return self._case(
            f"attention, {stored}-byte KV",
            tokens,
            kernel=kernel,
            sizes=(attention.heads.num_q, stored),
            copy_bytes=kernel.num_bytes,
            make=make,
        )

    def _absorbed(self, attention: MLA, layer: AbsorbedWeight, tokens: int) -> Iterator[Case]:
        work, settings, heads = self._work, self._settings, attention.heads
        rows, _ = self._rows(tokens)
        kernel = work.absorbed(layer, tokens)

        def make_for(part: str) -> Callable[[int], tuple[list[Call], str]]:
            def make(copies: int) -> tuple[list[Call], str]:
                made = attended(
                    work, attention, rows, copies=1, settings=settings, kv_dtype=settings.dtype
                )
                weights = [random_latent_weights(attention, settings) for _ in range(copies)]
                (kv,), batch, ops = made.cache.layers, made.batch, made.ops

                if part == "outputs":
                    mixed = settings.random(tokens, heads.num_q, heads.rank)
                    return [
                        partial(ops.latent_outputs, mixed, each, batch) for each in weights
                    ], "latent_outputs"
                q = settings.random(tokens, heads.num_q * heads.query_dim)
                projected = settings.random(tokens, heads.dim)
                angles = torch.rand(
                    settings.context + tokens, heads.rope_dim, device=settings.device
                )
                return [
                    partial(ops.latent_queries, projected, q, heads, each, angles, kv, batch)
                    for each in weights
                ], "latent_queries"

            return make

        for part in ("queries", "outputs"):
            yield self._case(
                f"kv_b_proj, {part}",
                tokens,
                kernel=kernel,
                sizes=(heads.num_q, heads.rank, part == "outputs"),
                copy_bytes=kernel.num_bytes,
                make=make_for(part),
            )


def _prompt_calls(
    made: Attended, attention: Attention | MLA, tokens: int, settings: Settings
) -> tuple[list[Call], str]:
    """RoPE, the write to the KV cache and attention of a prompt, with each layer's pages."""
    if isinstance(attention, MLA):
        latent = attention.heads
        weights = random_latent_weights(attention, settings)
        run = partial(
            made.ops.attend_latent,
            settings.random(tokens, latent.dim),
            settings.random(tokens, latent.num_q * latent.query_dim),
            latent,
            weights,
            cos_sin=torch.rand(tokens, latent.rope_dim, device=settings.device),
            batch=made.batch,
            scale=attention.scale,
        )
        return [partial(run, kv=kv) for kv in made.cache.layers], "attend_latent"
    heads = attention.heads
    attend = partial(
        made.ops.attend,
        settings.random(tokens, (heads.num_q + 2 * heads.num_kv) * heads.dim),
        heads,
        RopeOptions(torch.rand(tokens, heads.dim, device=settings.device)),
        batch=made.batch,
        options=AttentionOptions(scale=heads.dim**-0.5, window=None, soft_cap=None),
    )
    return [partial(attend, kv=kv) for kv in made.cache.layers], "attend"


def random_latent_weights(attention: MLA, settings: Settings) -> LatentWeights:
    heads = attention.heads
    both = settings.random(heads.num_q, heads.nope_dim + heads.value_dim, heads.rank) / 16
    keys, values = both.split([heads.nope_dim, heads.value_dim], dim=1)
    norm = torch.ones(heads.rank, device=settings.device, dtype=settings.dtype)
    return LatentWeights(norm=norm, eps=1e-6, keys=keys, values=values, joint=both)


def list_cases(settings: Settings) -> list[Case]:
    """All kernels; equal ones once. GEMMs come first, whole weights before parts."""
    groups: dict[str, list[Case]] = {"gemms": [], "experts": [], "attention": [], "norms": []}
    for model, options in settings.models.items():
        for kv_type in ("auto", "fp8"):
            scaling = _scaling_model(settings.folder / model, kv_type, options)
            has_experts = scaling.hparams.moe is not None
            for share in settings.shares:
                cases = Cases(
                    model,
                    scaling.work(RankShape(tp=share)),
                    share=share,
                    ranks=1,
                    settings=settings,
                )
                groups["attention"] += cases.attention()
                if kv_type != "auto":
                    continue
                groups["gemms"] += cases.gemms()
                groups["norms"] += cases.norms()
                groups["experts"] += cases.experts()
                if has_experts and share > 1:
                    divided = RankShape(tp=share, expert_parallel=True)
                    groups["experts"] += Cases(
                        model,
                        scaling.work(divided),
                        share=share,
                        ranks=share,
                        settings=settings,
                    ).experts()
    unique = {case.key: case for group in groups.values() for case in reversed(group)}
    return [case for group in groups.values() for case in group if unique[case.key] is case]


def _scaling_model(folder: Path, kv_type: str, options: Mapping[str, Any]) -> ScalingModel:
    config = EngineConfig.of(
        model=str(folder), load_format="dummy", kv_cache_dtype=kv_type, **options
    )
    gpu = Gpu("any", 2**40, "not used", Price(None, "not used"))
    return ScalingModel(config, gpu=gpu, times=KernelTimes(), fabric=Fabric())


def measure(settings: Settings, timer: Timer, log: Log, save: Callable[[Record], None]) -> Record:
    """Time all cases until the time is over. `save` gets the record so far, now and then."""
    started, rows, left_out = time.perf_counter(), [], 0
    cases = list_cases(settings)
    log(f"{len(cases)} kernels")
    for number, case in enumerate(cases):
        if time.perf_counter() - started > settings.max_seconds:
            left_out = len(cases) - number
            log(f"{left_out} kernels are left out after {settings.max_seconds:g} s")
            break
        rows.append(measure_case(case, timer))
        log(_line(rows[-1]))
        if number % 50 == 49:
            save(_record(settings, rows, 0))
    record = _record(settings, rows, left_out)
    save(record)
    for line in summary(rows):
        log(line)
    return record


def _record(settings: Settings, rows: list[dict[str, Any]], left_out: int) -> Record:
    chosen = {
        "models": dict(settings.models),
        "shares": settings.shares,
        "tokens": settings.tokens,
        "context": settings.context,
        "left_out": left_out,
    }
    return Record(RECORD_NAME, rows, _NOTES, chosen)


def measure_case(case: Case, timer: Timer) -> dict[str, Any]:
    """One row of the record; a kernel that fails has no time but an error."""
    predicted = KernelTimes().seconds(case.kernel) * 1e6
    row: dict[str, Any] = {
        "model": case.model,
        "weight": case.weight,
        "share": case.share,
        "tokens": case.tokens,
        "kind": case.kernel.kind,
        "kernel": "",
        "sizes": list(case.sizes),
        "bytes": case.kernel.num_bytes,
        "flops": case.kernel.num_flops,
        "us": None,
        "predicted_us": round(predicted, 2),
        "ratio": None,
    }
    try:
        calls, row["kernel"] = case.make(case.num_copies)
        row["us"] = round(timer(calls) * 1e6, 3)
        row["ratio"] = round(predicted / row["us"], 3)
    except Exception as error:  # of any kernel: the record names it, and the rest is measured
        row["error"] = f"{type(error).__name__}: {error}"
    torch.cuda.empty_cache()  # copies have other sizes in the next case
    return row


def _line(row: Mapping[str, Any]) -> str:
    name = f"{row['model']} {row['weight']}, {row['share']}, {row['tokens']} tokens"
    if row["us"] is None:
        return f"{name}: {row['error']}"
    rate, flops = row["bytes"] / row["us"] / 1e6, row["flops"] / row["us"] / 1e6
    return (
        f"{name:60} {row['us']:10.1f} us, predicted {row['predicted_us']:10.1f}  {rate:6.2f} TB/s "
        f"{flops:8.1f} TFLOP/s  {row['kernel']}"
    )


def summary(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Errors of each kind, with the default rates and with fitted ones."""
    points = [measured_kernel(row) for row in rows if row["us"]]
    fitted = fit(points, "this run")
    lines = []
    for kind in KINDS:
        own = [point for point in points if point.kernel.kind == kind]
        if own:
            before = check(own, KernelTimes().rates[kind])
            after = check(own, fitted.rates[kind])
            lines.append(
                f"{kind}: {len(own)} kernels, median error {before.median_error:.0%} with the default "
                f"rates, {after.median_error:.0%} fitted; worst {after.worst_error:.0%} ({after.worst})"
            )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, help="write the record as JSON")
    parser.add_argument("--quick", action="store_true", help="whole and 1/8, 1 and 64 tokens")
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated")
    parser.add_argument("--max-seconds", type=float, default=240.0)
    args = parser.parse_args()
    unknown = [name for name in args.models.split(",") if name not in MODELS]
    if unknown:
        parser.error(f"--models: no {', '.join(unknown)}. Known: {', '.join(MODELS)}.")
    settings = Settings(
        models={name: MODELS[name] for name in args.models.split(",")},
        max_seconds=args.max_seconds,
    )
    if args.quick:
        settings = replace(settings, shares=(1, 8), tokens=(1, 64))
    torch.manual_seed(0)
    record = measure(
        settings,
        graph_seconds,
        lambda text: print(text, flush=True),
        lambda record: record.save(args.output) if args.output else None,
    )
    return int(any(row["us"] is None for row in record.rows))


if __name__ == "__main__":
    sys.exit(main())
