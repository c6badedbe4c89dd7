"""Measures copies of KV blocks to host memory and back: bytes per second by number of blocks.

    python benchmarks/scripts/kv_copies.py -o benchmarks/h200-kv-copies.json
    python benchmarks/scripts/kv_copies.py --device cpu --num-blocks 64

The KV cache has the shape of Llama-3.1-8B. Reads and writes go through the engine's own BlockCopies.
The limit is one copy of a large pinned tensor. `beside steps`: the time of GEMMs in a captured graph, as
a step has them, with reads and writes in flight over the time without.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch

from windlass.core.types import BlockId
from windlass.kernels.batch import KVCache, attention_layout
from windlass.runner.kv_copies import make_block_copies
from windlass.runner.kv_records import BlockCopies, PendingCopy
from windlass.tools.common.record import Record

LAYERS, KV_HEADS, DIM = 32, 8, 128
COUNTS = (1, 4, 16, 64, 256, 1024)
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
REPEATS = 5
LIMIT_BYTES = 256 * 2**20
_NOTES = (
    "read: device to host; write: host to device. gb_s: 1e9 bytes per second, from the call until the copy is "
    "done, median of 5. call_us: until the call returns. compute_us: time that a read takes on the stream of the "
    "steps. rows: consecutive in host memory, or scattered. limit_gb_s: one copy of 256 MiB of pinned memory."
)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds until a call returned, and until its copy was done."""

    call_s: float
    done_s: float


def time_copy(copy: Callable[[], PendingCopy]) -> Timing:
    copy().wait()
    calls, whole = [], []
    for _ in range(REPEATS):
        start = time.perf_counter()
        pending = copy()
        calls.append(time.perf_counter() - start)
        pending.wait()
        whole.append(time.perf_counter() - start)
    return Timing(median(calls), median(whole))


def compute_us(copy: Callable[[], PendingCopy]) -> float:
    """Microseconds that a copy takes on the current stream."""
    took = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # Work in the queue: the stream does not wait for the host between the two events.
        torch.cuda._sleep(20_000_000)
        start.record()
        pending = copy()
        end.record()
        pending.wait()
        end.synchronize()
        took.append(start.elapsed_time(end) * 1e3)
    return median(took)


def limit_gb_s(to_host: bool) -> float:
    host = torch.empty(LIMIT_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(LIMIT_BYTES, dtype=torch.uint8, device="cuda")
    target, source = (host, device) if to_host else (device, host)
    took = []
    for _ in range(REPEATS + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        took.append(time.perf_counter() - start)
    return LIMIT_BYTES / median(took[1:]) / 1e9


def measure(
    copies: BlockCopies, counts: Sequence[int], settings: dict[str, Any]
) -> list[dict[str, Any]]:
    """One row per number of blocks, place of the rows and direction."""
    on_cuda = copies.layout.device.type == "cuda"
    random = Random(0)
    rows = []
    for count in counts:
        blocks = [BlockId(i) for i in random.sample(range(copies.layout.num_blocks), count)]
        places = {
            "consecutive": list(range(count)),
            "scattered": random.sample(range(copies.rows.num_ready), count),
        }
        for place, chosen in places.items():
            for name in ("read", "write"):

                def copy(name: str = name, chosen: list[int] = chosen) -> PendingCopy:
                    if name == "read":
                        return copies.read(blocks, chosen)  # noqa: B023 - called in this iteration
                    return copies.write(chosen, blocks)  # noqa: B023

                timing = time_copy(copy)
                num_bytes = count * copies.record_bytes
                row = {
                    **settings,
                    "copy": name,
                    "blocks": count,
                    "mib": round(num_bytes / 2**20, 2),
                    "rows": place,
                    "gb_s": round(num_bytes / timing.done_s / 1e9, 2),
                    "done_us": round(timing.done_s * 1e6, 1),
                    "call_us": round(timing.call_s * 1e6, 1),
                }
                if on_cuda and name == "read":
                    row["compute_us"] = round(compute_us(copy), 1)
                rows.append(row)
    return rows


def beside_steps(copies: BlockCopies, count: int) -> dict[str, Any]:
    """The slowdown of a captured step by reads and writes of `count` blocks each."""
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    torch.mm(x, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(80):
            torch.mm(x, x)
    half = copies.layout.num_blocks // 2
    count = min(count, half, copies.rows.num_ready // 2)
    first = [BlockId(i) for i in range(count)]
    second = [BlockId(half + i) for i in range(count)]

    def step(with_copies: bool) -> float:
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        pending = []
        if with_copies:
            pending.append(copies.read(first, range(count)))
            pending.append(copies.write(range(count, 2 * count), second))
        graph.replay()
        end.record()
        end.synchronize()
        for each in pending:
            each.wait()
        return start.elapsed_time(end)

    alone, beside = (median([step(each) for _ in range(REPEATS + 1)]) for each in (False, True))
    return {
        "copy": "beside steps",
        "blocks": count,
        "mib": round(2 * count * copies.record_bytes / 2**20, 2),
        "step_ms": round(alone, 3),
        "step_with_copies_ms": round(beside, 3),
        "slowdown": round(beside / alone, 4),
    }


def open_copies(args: argparse.Namespace, dtype: torch.dtype) -> tuple[BlockCopies, float]:
    """Copies of a new cache, and the bytes per second of preparing its host memory."""
    layout = attention_layout(
        (None,) * LAYERS,
        num_kv_heads=KV_HEADS,
        dim=DIM,
        block_size=args.block_size,
        dtype=dtype,
    )
    cache = KVCache(layout, args.num_blocks, dtype, torch.device(args.device))
    start = time.perf_counter()
    copies = make_block_copies([cache], args.num_blocks * layout.block_bytes)
    copies.rows.wait_ready()
    took = time.perf_counter() - start
    return copies, args.num_blocks * layout.block_bytes / took


def show(row: dict[str, Any]) -> str:
    return "  ".join(f"{key} {value}" for key, value in row.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--num-blocks", type=int, default=2048)
    parser.add_argument("--kv", nargs="+", default=["bf16", "fp8"], choices=DTYPES)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    on_cuda = args.device == "cuda"
    limits = {name: round(limit_gb_s(name == "read"), 2) for name in ("read", "write") if on_cuda}
    rows: list[dict[str, Any]] = [
        {"copy": name, "limit_gb_s": limit} for name, limit in limits.items()
    ]
    counts = [count for count in COUNTS if count <= args.num_blocks]
    for kv in args.kv:
        copies, prepared = open_copies(args, DTYPES[kv])
        rows.append({"kv": kv, "copy": "prepare", "gb_s": round(prepared / 1e9, 2)})
        rows += measure(copies, counts, {"kv": kv})
        if on_cuda:
            rows += [{"kv": kv, **beside_steps(copies, count)} for count in (16, 64, 256)]
        copies.close()
    for row in rows:
        print(show(row))
    if args.output is not None:
        settings = {key: value for key, value in vars(args).items() if key != "output"}
        Record("kv-copies", rows, _NOTES, settings | {"limits": limits}).save(args.output)


if __name__ == "__main__":
    main()
