"""Compares the rate of a server with the rate of its engine alone, for several --http-workers.

    python benchmarks/scripts/http_rate.py benchmarks/models/qwen3-0.6b --workers 1 4 \
        --clients 256 1000 -o benchmarks/h200-http-qwen3-0.6b.json

All clients stream: each sends the next request as soon as its last one has ended. The clients are
processes of their own with a parser that only counts events, so that they are not what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from script_record import add_record_arguments, save_record

from windlass.tools.common.summary import percentile

READY_S = 400
TAIL_BYTES = 2048  # has the last event, with the usage


@dataclass(frozen=True, slots=True)
class Load:
    """What each client process sends."""

    port: int
    num_clients: int
    num_requests: int
    input_len: int
    output_len: int
    seed: int


@dataclass(slots=True)
class Measured:
    """Counts and times of some requests; times are of one clock for all processes."""

    num_tokens: int = 0
    num_failed: int = 0
    began: float = float("inf")
    ended: float = 0.0
    ttft: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def add(self, other: Measured) -> None:
        self.num_tokens += other.num_tokens
        self.num_failed += other.num_failed
        self.began, self.ended = min(self.began, other.began), max(self.ended, other.ended)
        self.ttft += other.ttft
        self.gaps += other.gaps


async def request(load: Load, prompt: Sequence[int], measured: Measured) -> None:
    """Send one request and read its stream. A token that ends inside a character has no event."""
    body = {
        "prompt": prompt,
        "max_tokens": load.output_len,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{load.port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", load.port)
    began = last = time.monotonic()
    measured.began = min(measured.began, began)
    writer.write(head.encode() + text)
    num_events, tail = 0, b""
    while chunk := await reader.read(65536):
        now = time.monotonic()
        found = chunk.count(b"data: {")
        if found and not num_events:
            measured.ttft.append(now - began)
        elif found:
            measured.gaps.append(now - last)
        if found:
            last = now
        num_events += found
        tail = (tail + chunk)[-TAIL_BYTES:]
    writer.close()
    measured.ended = max(measured.ended, time.monotonic())
    is_whole = b"[DONE]" in tail and b'"completion_tokens":%d' % load.output_len in tail
    measured.num_tokens += load.output_len if is_whole else 0
    measured.num_failed += not is_whole


async def run_clients(load: Load) -> Measured:
    generator = random.Random(load.seed)
    left = [
        [generator.randrange(3, 200) for _ in range(load.input_len)]
        for _ in range(load.num_requests)
    ]
    measured = Measured()

    async def client() -> None:
        while left:
            await request(load, left.pop(), measured)

    await asyncio.gather(*(client() for _ in range(load.num_clients)))
    return measured


def client_process(load: Load) -> Measured:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(run_clients(load))
    return uvloop.run(run_clients(load))


def drive(args: argparse.Namespace, port: int, num_clients: int, num_requests: int) -> Measured:
    """Run all client processes; the sum of what they measured."""
    count = args.client_processes
    loads = [
        Load(
            port=port,
            num_clients=num_clients // count + (index < num_clients % count),
            num_requests=num_requests // count + (index < num_requests % count),
            input_len=args.input_len,
            output_len=args.output_len,
            seed=random.randrange(2**32),
        )
        for index in range(count)
    ]
    total = Measured()
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        for each in pool.map(client_process, [load for load in loads if load.num_clients]):
            total.add(each)
    return total


def engine_options(args: argparse.Namespace, clients: int) -> dict[str, Any]:
    options: dict[str, Any] = {
        "max_model_len": args.input_len + args.output_len + 16,
        "max_num_seqs": max(256, min(clients, 1024)),
    }
    if not list(Path(args.model).glob("*.safetensors")) and Path(args.model).is_dir():
        options["load_format"] = "dummy"
    if args.quantization:
        options["quantization"] = args.quantization
    return options


def offline(args: argparse.Namespace, clients: int) -> float:
    """Output tokens per second of the engine in this process, for the same requests."""
    from windlass import LLM, SamplingParams

    llm = LLM(args.model, **engine_options(args, clients))
    params = SamplingParams(temperature=0, max_tokens=args.output_len, ignore_eos=True)

    def seconds(count: int) -> float:
        prompts = [[random.randrange(3, 200) for _ in range(args.input_len)] for _ in range(count)]
        start = time.perf_counter()
        llm.generate(prompts, params)
        return time.perf_counter() - start

    seconds(min(clients, args.num_requests))
    return args.num_requests * args.output_len / seconds(args.num_requests)


def serve(args: argparse.Namespace, workers: int, clients: int) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = [
        part
        for name, value in engine_options(args, clients).items()
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]
    command = [sys.executable, "-m", "windlass.cli", "serve", args.model, "--port", str(port)]
    command += ["--http-workers", str(workers), "--max-num-queued-reqs", "4096", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            wait_ready(server)
            drive(args, port, clients, clients)  # warm-up
            measured = drive(args, port, clients, args.num_requests)
        finally:
            server.terminate()
            server.wait(60)
    seconds = measured.ended - measured.began
    assert not measured.num_failed, f"{measured.num_failed} requests failed"
    return {
        "http_workers": workers,
        "clients": clients,
        "tok_s": round(measured.num_tokens / seconds, 1),
        "ttft_p50_ms": round(1e3 * percentile(sorted(measured.ttft), 50), 1),
        "ttft_p99_ms": round(1e3 * percentile(sorted(measured.ttft), 99), 1),
        "itl_p50_ms": round(1e3 * percentile(sorted(measured.gaps), 50), 2),
        "itl_p99_ms": round(1e3 * percentile(sorted(measured.gaps), 99), 2),
    }


def wait_ready(server: subprocess.Popen[str]) -> None:
    assert server.stdout is not None
    end = time.monotonic() + READY_S
    for line in server.stdout:
        if "serves at" in line:
            return
        assert time.monotonic() < end, "the server did not start"
    raise RuntimeError("the server ended at its start; see above")


@contextmanager
def serving(model: str, *flags: str) -> Iterator[int]:
    """A server of the model, ready on a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    command = [sys.executable, "-m", "windlass.cli", "serve", model, "--port", str(port), *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            wait_ready(server)
            yield port
        finally:
            server.terminate()
            server.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--quantization")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--clients", type=int, nargs="+", default=[256])
    parser.add_argument("--client-processes", type=int, default=6)
    parser.add_argument("--num-requests", type=int, default=1024)
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=256)
    add_record_arguments(parser)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    model = " ".join(filter(None, (Path(args.model).name, args.quantization)))
    for clients in args.clients:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            rate = pool.apply(offline, (args, clients))
        offline_row = {"http_workers": "offline", "clients": clients, "tok_s": round(rate, 1)}
        rows.append({"model": model, **offline_row})
        print(rows[-1], flush=True)
        for workers in args.workers:
            row = serve(args, workers, clients)
            rows.append({"model": model, **row, "of_offline": round(row["tok_s"] / rate, 3)})
            print(rows[-1], flush=True)
    save_record("http-rate", rows, args)


if __name__ == "__main__":
    main()
