"""Compares the rate of a server with the rate of its engine alone, for several --http-workers.

    python benchmarks/scripts/http_rate.py benchmarks/models/qwen3-0.6b --workers 1 4 \
        --clients 256 1000 -o benchmarks/h200-http-qwen3-0.6b.json

All clients stream: each sends the next request as soon as its last one has ended. The clients are
processes of their own with a parser that only counts events, so that they are not what is measured.
--trace prints where the time went: engine steps, idle device, the way of a request. With --fixed-step-ms
the device is replaced by one that needs so long for a step, to measure the host's part without a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import http_trace
import psutil
from http_breakdown import ClientRequest, Window, load, show_steps, show_way
from script_record import add_record_arguments, save_record

from windlass.tools.common.summary import percentile

READY_S = 400
START_S = 60  # for the client processes
TAIL_BYTES = 2048  # has the last event, with the usage


@dataclass(frozen=True, slots=True)
class Load:
    """What each client process sends."""

    port: int
    first_client: int  # number of its first client
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
    requests: list[ClientRequest] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)  # of each client process: share of a core

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    def add(self, other: Measured) -> None:
        self.num_tokens += other.num_tokens
        self.num_failed += other.num_failed
        self.began, self.ended = min(self.began, other.began), max(self.ended, other.ended)
        self.ttft += other.ttft
        self.gaps += other.gaps
        self.requests += other.requests
        self.busy += other.busy


def message(load: Load, prompt: Sequence[int]) -> bytes:
    """The bytes of one request."""
    body = {
        "prompt": prompt,
        "max_tokens": load.output_len,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text = json.dumps(body)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{load.port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n"
    )
    return (head + text).encode()


async def request(load: Load, client: int, sent: bytes, measured: Measured) -> None:
    """Send one request and read its stream. A token that ends inside a character has no event."""
    began = last = first = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", load.port)
    writer.write(sent)
    num_events, tail, response_id = 0, b"", b""
    while chunk := await reader.read(65536):
        now = time.perf_counter()
        found = chunk.count(b"data: {")
        if found:
            if num_events:
                measured.gaps.append(now - last)
            else:
                first = now
                response_id = chunk.partition(b'"id":"')[2].partition(b'"')[0]
            last = now
            num_events += found
        tail = (tail + chunk)[-TAIL_BYTES:]
    writer.close()
    ended = time.perf_counter()
    measured.began, measured.ended = min(measured.began, began), max(measured.ended, ended)
    measured.ttft.append(first - began)
    is_whole = b"[DONE]" in tail and b'"completion_tokens":%d' % load.output_len in tail
    measured.num_tokens += load.output_len if is_whole else 0
    measured.num_failed += not is_whole
    measured.requests.append(
        ClientRequest(
            client=client,
            request_id=f"{response_id.decode()}-0",
            began=began,
            first=first,
            ended=ended,
        )
    )


async def run_clients(load: Load, barrier: Barrier) -> Measured:
    """Make all messages, wait for the other processes, then run the clients."""
    generator = random.Random(load.seed)
    left = [
        message(load, [generator.randrange(3, 200) for _ in range(load.input_len)])
        for _ in range(load.num_requests)
    ]
    measured = Measured()

    async def client(number: int) -> None:
        while left:
            await request(load, number, left.pop(), measured)

    barrier.wait(START_S)
    start, cpu_start = time.perf_counter(), time.process_time()
    numbers = range(load.first_client, load.first_client + load.num_clients)
    await asyncio.gather(*map(client, numbers))
    cpu_s = time.process_time() - cpu_start
    measured.busy.append(cpu_s / (time.perf_counter() - start))
    return measured


_barrier: Barrier | None = None  # of the client processes; a pool passes it only to new processes


def start_clients(barrier: Barrier) -> None:
    global _barrier
    _barrier = barrier


def client_process(load: Load) -> Measured:
    assert _barrier is not None
    try:
        import uvloop
    except ImportError:
        return asyncio.run(run_clients(load, _barrier))
    return uvloop.run(run_clients(load, _barrier))


def split_load(
    args: argparse.Namespace, port: int, num_clients: int, num_requests: int
) -> list[Load]:
    """The share of each client process: equally many requests per client, so that all end together."""
    count = min(args.client_processes, num_clients)
    shares = [num_clients * index // count for index in range(count + 1)]
    sizes = [num_requests * share // num_clients for share in shares]
    return [
        Load(
            port=port,
            first_client=shares[index],
            num_clients=shares[index + 1] - shares[index],
            num_requests=sizes[index + 1] - sizes[index],
            input_len=args.input_len,
            output_len=args.output_len,
            seed=random.randrange(2**32),
        )
        for index in range(count)
    ]


def drive(args: argparse.Namespace, port: int, num_clients: int, num_requests: int) -> Measured:
    """Run all client processes; the sum of what they measured."""
    loads = split_load(args, port, num_clients, num_requests)
    spawn = multiprocessing.get_context("spawn")
    total = Measured()
    with spawn.Pool(len(loads), start_clients, (spawn.Barrier(len(loads)),)) as pool:
        for each in pool.map(client_process, loads, chunksize=1):
            total.add(each)
    return total


def engine_options(args: argparse.Namespace, clients: int) -> dict[str, Any]:
    options: dict[str, Any] = {
        "max_model_len": args.input_len + args.output_len + 16,
        "max_num_seqs": max(256, min(clients, 1024)),
    }
    if not list(Path(args.model).glob("*.safetensors")) and Path(args.model).is_dir():
        options["load_format"] = "dummy"
    for name in ("quantization", "profile", "max_num_batched_tokens"):
        if (value := getattr(args, name)) is not None:
            options[name] = value
    return options


def offline(args: argparse.Namespace, clients: int) -> float:
    """Output tokens per second of the engine in this process, for the same requests."""
    if args.trace:
        http_trace.trace_engine()
    from windlass import LLM, SamplingParams

    llm = LLM(args.model, **engine_options(args, clients))
    params = SamplingParams(temperature=0, max_tokens=args.output_len, ignore_eos=True)

    def run(count: int) -> Window:
        prompts = [[random.randrange(3, 200) for _ in range(args.input_len)] for _ in range(count)]
        start = time.perf_counter()
        llm.generate(prompts, params)
        return Window(start, time.perf_counter())

    run(min(clients, args.num_requests))
    window = run(args.num_requests)
    if args.trace:
        show_steps(http_trace.recorder.found(), window, args.num_requests / clients)
    return float(args.num_requests * args.output_len / (window.ended - window.began))


def serve(args: argparse.Namespace, workers: int, clients: int) -> dict[str, Any]:
    flags = [
        part
        for name, value in engine_options(args, clients).items()
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]
    flags += ["--http-workers", str(workers), "--max-num-queued-reqs", "4096"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) if args.trace else None
        with started(args.model, *flags, trace=folder) as (port, pid):
            drive(args, port, clients, clients)  # warm-up
            before = cpu_seconds(pid)
            measured = drive(args, port, clients, args.num_requests)
            after = cpu_seconds(pid)
        if folder is not None:
            processes = load(folder)
            show(processes, measured, args.num_requests / clients)
            roles = {each["pid"]: each["role"] for each in processes}
            shares = {
                roles.get(each, "other"): (after[each] - before[each]) / measured.seconds
                for each in before
                if each in after
            }
            print("  cores used: " + ", ".join(f"{k} {v:.2f}" for k, v in shares.items()))
    assert not measured.num_failed, f"{measured.num_failed} requests failed"
    return {
        "http_workers": workers,
        "clients": clients,
        "tok_s": round(measured.num_tokens / measured.seconds, 1),
        "ttft_p50_ms": round(1e3 * percentile(sorted(measured.ttft), 50), 1),
        "ttft_p99_ms": round(1e3 * percentile(sorted(measured.ttft), 99), 1),
        "itl_p50_ms": round(1e3 * percentile(sorted(measured.gaps), 50), 2),
        "itl_p99_ms": round(1e3 * percentile(sorted(measured.gaps), 99), 2),
    }


def cpu_seconds(server: int) -> dict[int, float]:
    """CPU seconds so far of the server's processes, by process id."""
    parent = psutil.Process(server)
    times = {each.pid: each.cpu_times() for each in (parent, *parent.children(recursive=True))}
    return {pid: each.user + each.system for pid, each in times.items()}


def show(processes: list[dict[str, Any]], measured: Measured, num_waves: float) -> None:
    """Print the breakdown of a traced run."""
    window = Window(measured.began, measured.ended)
    for each in processes:
        if each["role"] == "windlass-engine":
            show_steps(each, window, num_waves)
    show_way(processes, measured.requests)
    print("  cores used by clients: " + " ".join(f"{share:.2f}" for share in measured.busy))


def wait_ready(server: subprocess.Popen[str]) -> None:
    assert server.stdout is not None
    end = time.monotonic() + READY_S
    for line in server.stdout:
        if "serves at" in line:
            return
        assert time.monotonic() < end, "the server did not start"
    raise RuntimeError("the server ended at its start; see above")


@contextmanager
def started(model: str, *flags: str, trace: Path | None = None) -> Iterator[tuple[int, int]]:
    """A server of the model, ready on a free port; yields the port and the server's process id.

    `trace`: its processes write what they have recorded into this folder when they end.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    start = ["-m", "windlass.cli"] if trace is None else [http_trace.__file__]
    command = [sys.executable, *start, "serve", model, "--port", str(port), *flags]
    environment = os.environ if trace is None else {**os.environ, http_trace.FOLDER: str(trace)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            wait_ready(server)
            yield port, server.pid
        finally:
            server.terminate()
            server.wait(60)


@contextmanager
def serving(model: str, *flags: str) -> Iterator[int]:
    """A server of the model, ready on a free port."""
    with started(model, *flags) as (port, _pid):
        yield port


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--quantization")
    parser.add_argument("--profile")
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--clients", type=int, nargs="+", default=[256])
    parser.add_argument("--client-processes", type=int, default=6)
    parser.add_argument("--num-requests", type=int, default=1024)
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument(
        "--no-offline", dest="offline", action="store_false", help="measure only the server"
    )
    parser.add_argument("--trace", action="store_true", help="print where the time went")
    parser.add_argument("--fixed-step-ms", type=float, help="replace the device, with --trace")
    parser.add_argument("--fixed-token-us", type=float, default=0.0, help="added for each token")
    add_record_arguments(parser)
    args = parser.parse_args()
    if args.fixed_step_ms is not None:
        if not args.trace:
            parser.error("--fixed-step-ms needs --trace.")
        os.environ[http_trace.STEP_MS] = str(args.fixed_step_ms)
        os.environ[http_trace.TOKEN_US] = str(args.fixed_token_us)
    rows: list[dict[str, Any]] = []
    model = " ".join(filter(None, (Path(args.model).name, args.quantization, args.profile)))
    for clients in args.clients:
        rate = None
        if args.offline:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                rate = pool.apply(offline, (args, clients))
            offline_row = {"http_workers": "offline", "clients": clients, "tok_s": round(rate, 1)}
            rows.append({"model": model, **offline_row})
            print(rows[-1], flush=True)
        for workers in args.workers:
            row = serve(args, workers, clients)
            of_offline = None if rate is None else round(row["tok_s"] / rate, 3)
            rows.append({"model": model, **row, "of_offline": of_offline})
            print(rows[-1], flush=True)
    save_record("http-rate", rows, args)


if __name__ == "__main__":
    main()
