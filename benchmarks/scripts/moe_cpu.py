"""Measures mixture-of-experts layers on this CPU: microseconds per layer and bytes read per second.

    python benchmarks/scripts/moe_cpu.py --rows 1,8,128 --threads 2

Layers have the sizes of granite-3.1-1b-a400m and random weights of the forms of Q4_K_M: int4 gate_up,
int8 (Q6_K) or int4 down. They take turns, so that weights come from memory. The median of 9 passes is
compared with the time to read the chosen experts at the bandwidth of a copy.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from windlass.kernels.experts import ExpertMLP, ExpertWeights, Routing
from windlass.kernels.native.experts import NativeExperts
from windlass.kernels.native.pool import Workers
from windlass.kernels.packed import Int4Group, Int8Group, Packed

EXPERTS, TOP_K, HIDDEN, INNER, LAYERS = 32, 8, 1024, 512, 24
PASSES = 9


def int4(num_out: int, num_in: int) -> Packed:
    codes = torch.randint(0, 256, (num_out, num_in // 2), dtype=torch.uint8)
    scales = (torch.rand(num_out, num_in // 32) / 100).half()
    return Int4Group(codes, scales, (-7.5 * scales.float()).half())


def int8(num_out: int, num_in: int) -> Packed:
    codes = torch.randint(-32, 32, (num_out, num_in), dtype=torch.int8)
    return Int8Group(codes, (torch.rand(num_out, num_in // 16) / 100).half())


def layer(kernel: NativeExperts, down: Callable[[int, int], Packed]) -> ExpertMLP:
    weights = ExpertWeights(
        gate_up=int4(EXPERTS * 2 * INNER, HIDDEN),
        down=down(EXPERTS * HIDDEN, INNER),
        routing=Routing(num_experts=EXPERTS, top_k=TOP_K, normalised=True),
    )
    return kernel.prepare(weights, torch.float32)


def pass_seconds(layers: list[ExpertMLP], x: Tensor, logits: list[Tensor]) -> float:
    start = time.perf_counter()
    for mlp, each in zip(layers, logits, strict=True):
        mlp.apply(x, each)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", default="1,8,128")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    kernel = NativeExperts(Workers(options.threads))
    torch.manual_seed(0)
    # Q4_K_M stores half of the down projections as Q6_K.
    layers = [layer(kernel, int8 if i % 2 else int4) for i in range(LAYERS)]
    for rows in map(int, options.rows.split(",")):
        x = torch.randn(rows, HIDDEN)
        logits = [torch.randn(rows, EXPERTS) for _ in layers]
        seconds = median(pass_seconds(layers, x, logits) for _ in range(PASSES))
        used = [len(each.topk(TOP_K).indices.unique()) for each in logits]
        num_bytes = sum(
            mlp.num_bytes * count / EXPERTS for mlp, count in zip(layers, used, strict=True)
        )
        print(
            f"{rows:5} rows: {seconds / LAYERS * 1e6:8.1f} us per layer, "
            f"{num_bytes / seconds / 1e9:5.1f} GB/s, {sum(used) / LAYERS:.1f} experts used"
        )


if __name__ == "__main__":
    main()
