"""Measures the mixture-of-experts kernels of a GPU: microseconds per layer, and the share of bandwidth.

    python benchmarks/scripts/moe_kernels.py
    python benchmarks/scripts/moe_kernels.py --models qwen3 --forms bf16 --tune

A captured graph runs several layers with their own random weights, more than the L2 cache holds.
Tokens choose experts at random. --tune tries tilings for each number of tokens and prints the fastest
plans, as they are written in PLANS of windlass/kernels/triton/experts.py.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import median

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from windlass.kernels.experts import ExpertActivation, ExpertMLP, ExpertWeights, Routing
from windlass.kernels.packed import Float8, Packed, Table4
from windlass.kernels.triton.experts import Plan, Tiling, TritonExperts, TritonMLP

CUDA = torch.device("cuda")
DTYPE = torch.bfloat16
MAX_LAYERS = 8
MIN_LAYERS = 3
COLD_BYTES = 300e6  # min bytes that a graph reads, six times the L2 cache of an H200
WEIGHT_BYTES = 30e9  # max bytes of all layers
REPLAYS = 7
PEAK, ACHIEVABLE = 4.8e12, 4.2e12  # bytes per second of an H200
TOKENS = (1, 8, 64, 256, 512, 1024, 2048, 16384)
FEW_ROWS = (  # of a tile: up to 32
    *(Tiling(64, 128, 4, stages) for stages in (3, 4)),
    Tiling(64, 64, 4, 6),
    Tiling(128, 64, 4, 4),
    Tiling(128, 128, 4, 3),
    Tiling(128, 128, 8, 4),
)
MANY_ROWS = (  # up to 128
    *(Tiling(128, 64, 8, stages) for stages in (3, 4)),
    *(Tiling(256, 64, 8, stages) for stages in (3, 4)),
    Tiling(128, 64, 4, 3),
    Tiling(128, 128, 8, 3),
    Tiling(64, 64, 4, 4),
)
MOST_ROWS = (Tiling(128, 64, 8, 4), Tiling(64, 64, 4, 3))


@dataclass(frozen=True, slots=True)
class Model:
    """The sizes of a model's experts."""

    hidden: int
    inner: int
    num_experts: int
    top_k: int
    activation: ExpertActivation = field(default_factory=ExpertActivation)
    forms: tuple[str, ...] = ("bf16", "fp8", "fp8-block")


MODELS = {
    "qwen3": Model(2048, 768, 128, 8),
    "v2-lite": Model(2048, 1408, 64, 6),
    "gpt-oss": Model(
        *(2880, 2880, 32, 4), ExpertActivation(kind="clamped", interleaved=True), ("bf16", "mxfp4")
    ),
}


def random_form(form: str, experts: int, outputs: int, inputs: int) -> Packed | Tensor:
    """A random weight; all experts have the same values."""
    one = torch.randn(outputs, inputs, device=CUDA, dtype=torch.bfloat16) / 30
    rows = experts * outputs
    if form == "bf16":
        return one.repeat(experts, 1)
    if form == "mxfp4":
        codes = torch.randint(0, 256, (outputs, inputs // 2), device=CUDA, dtype=torch.uint8)
        levels = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12], device=CUDA, dtype=torch.int8)
        scales = torch.full((rows, inputs // 32), 2.0**-6, device=CUDA, dtype=torch.float32)
        return Table4(codes.repeat(experts, 1), torch.cat([levels, -levels]), scales, unit=0.5)
    codes = (one * 30).to(torch.float8_e4m3fn).view(torch.uint8).repeat(experts, 1)
    codes = codes.view(torch.float8_e4m3fn)
    if form == "fp8":
        return Float8(codes, torch.full((rows, 1), 1 / 30, device=CUDA), "token")
    assert form == "fp8-block", form
    scales = torch.full((rows // 128, -(-inputs // 128)), 1 / 30, device=CUDA)
    return Float8(codes, scales, "block", block=(128, 128))


def random_weights(model: Model, form: str) -> ExpertWeights:
    experts, hidden, inner = model.num_experts, model.hidden, model.inner
    biased = model.activation.kind == "clamped"

    def bias(size: int) -> Tensor | None:
        return torch.randn(experts, size, device=CUDA).bfloat16() if biased else None

    return ExpertWeights(
        gate_up=random_form(form, experts, 2 * inner, hidden),
        down=random_form(form, experts, hidden, inner),
        routing=Routing(num_experts=experts, top_k=model.top_k, normalised=True),
        activation=model.activation,
        gate_up_bias=bias(2 * inner),
        down_bias=bias(hidden),
    )


def microseconds(layers: Sequence[ExpertMLP], model: Model, tokens: int) -> float:
    """Median time per layer of a captured graph."""
    x = torch.randn(tokens, model.hidden, device=CUDA, dtype=torch.bfloat16)
    shape = tokens, model.num_experts
    logits = [torch.rand(shape, device=CUDA).bfloat16() for _ in layers]
    layers[0].apply(x, logits[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer, own in zip(layers, logits, strict=True):
            layer.apply(x, own)
    took = []
    for _ in range(REPLAYS + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        took.append(start.elapsed_time(end))
    return median(took[1:]) * 1e3 / len(layers)


class Layers:
    """Layers of one model in one form; they can be prepared again with other plans."""

    def __init__(self, model: Model, form: str) -> None:
        self.model = model
        self.refusal = TritonExperts().refuse(random_weights_of_one(model, form), CUDA, DTYPE)
        if self.refusal is not None:
            return
        kernel = TritonExperts()
        first = kernel.prepare(random_weights(model, form), DTYPE)
        self.layer_bytes = first.num_bytes
        few = int(COLD_BYTES / (self.layer_bytes * min(1, model.top_k / model.num_experts))) + 1
        count = max(MIN_LAYERS, min(MAX_LAYERS, few, int(WEIGHT_BYTES / self.layer_bytes)))
        self._layers: list[TritonMLP] = [first]
        for _ in range(count - 1):
            self._layers.append(kernel.prepare(random_weights(model, form), DTYPE))

    def time(self, tokens: int, plans: Sequence[Plan] | None = None) -> float:
        """Microseconds per layer; infinite if a tile does not fit into shared memory."""
        layers = self._layers
        if plans is not None:
            layers = [layer.with_plans(plans) for layer in layers]
        try:
            return microseconds(layers, self.model, tokens)
        except OutOfResources:
            return float("inf")

    def report(self, name: str, tokens: int, took: float) -> str:
        """One line: time, bytes that must be read, and how close that is to the limits."""
        model = self.model
        pairs = tokens * model.top_k
        unread = (1 - model.top_k / model.num_experts) ** tokens  # share of the experts, on average
        num_bytes = self.layer_bytes * (1 - unread)
        flops = 6 * pairs * model.hidden * model.inner
        rate = num_bytes / took * 1e6
        return (
            f"{name:18} {tokens:6} {took:9.1f} us {num_bytes / 1e6:8.1f} MB {rate / PEAK:6.1%} of peak "
            f"{rate / ACHIEVABLE:6.1%} of achievable {flops / took / 1e6:7.1f} TFLOP/s"
        )


def random_weights_of_one(model: Model, form: str) -> ExpertWeights:
    """The weights of so few experts that a token chooses all of them."""
    return random_weights(replace(model, num_experts=model.top_k), form)


def candidates(model: Model, tokens: int) -> Iterator[Plan]:
    """Plans to try: row counts near the average of an expert, each with all tilings."""
    average = tokens * model.top_k / model.num_experts
    for rows in (1, 16, 32, 64, 128, 256):
        if rows == 1 and average > 1:
            continue
        if rows > 1 and not min(average / 2, 128) <= rows <= max(16, 4 * average):
            continue
        for tiling in FEW_ROWS if rows <= 32 else MANY_ROWS if rows <= 128 else MOST_ROWS:
            yield Plan(float("inf"), rows, tiling, tiling)


def compile_plans(model: Model, form: str, plans: Sequence[Plan]) -> None:
    """Fill Triton's cache on disk. Kernels do not depend on the number of experts."""
    weights = random_weights_of_one(model, form)
    x = torch.randn(4, model.hidden, device=CUDA, dtype=DTYPE)
    for plan in plans:
        mlp = TritonExperts(plans=(plan,)).prepare(weights, DTYPE)
        with suppress(OutOfResources):
            mlp.apply(x, torch.randn(4, model.top_k, device=CUDA, dtype=DTYPE))


def tune(layers: Layers, tokens: int) -> tuple[float, Plan]:
    """The fastest plan: the best tiling of each GEMM, measured while the other keeps one tiling."""
    best: tuple[float, Plan] | None = None
    by_rows: dict[int, list[Plan]] = {}
    for plan in candidates(layers.model, tokens):
        by_rows.setdefault(plan.rows, []).append(plan)
    for plans in by_rows.values():
        fixed = plans[0]
        firsts = [replace(plan, down=fixed.down) for plan in plans]
        _, gate_up = min(((layers.time(tokens, [p]), p) for p in firsts), key=lambda m: m[0])
        seconds = [replace(plan, gate_up=gate_up.gate_up) for plan in plans]
        found = min(((layers.time(tokens, [p]), p) for p in seconds), key=lambda m: m[0])
        print(f"    {tokens} tokens, {found[0]:.1f} us: {found[1]}", flush=True)
        best = found if best is None or found[0] < best[0] else best
    assert best is not None
    return best


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated")
    parser.add_argument("--forms", default="bf16,fp8,fp8-block,mxfp4", help="comma-separated")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="comma-separated")
    parser.add_argument("--tune", action="store_true", help="try tilings, print the fastest")
    parser.add_argument("--processes", type=int, default=12, help="that compile, with --tune")
    args = parser.parse_args()
    counts = [int(text) for text in args.tokens.split(",")]
    begin = time.perf_counter()
    chosen = [
        (name, form)
        for name in args.models.split(",")
        for form in MODELS[name].forms
        if form in args.forms.split(",")
    ]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, mp_context=spawn) as pool:
        for name, form in chosen:
            layers = Layers(MODELS[name], form)
            title = f"{name} {form}"
            if layers.refusal is not None:
                print(f"{title:18} refused: {layers.refusal}")
                continue
            if args.tune:
                plans = list({p: None for n in counts for p in candidates(MODELS[name], n)})
                shares = [plans[i :: args.processes] for i in range(args.processes)]
                list(
                    pool.map(
                        compile_plans, [MODELS[name]] * len(shares), [form] * len(shares), shares
                    )
                )
            for tokens in counts:
                print(layers.report(title, tokens, layers.time(tokens)), flush=True)
                if args.tune:
                    took, plan = tune(layers, tokens)
                    print(layers.report("  best", tokens, took), plan, flush=True)
            del layers
    print(f"{torch.cuda.get_device_name()}, {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
