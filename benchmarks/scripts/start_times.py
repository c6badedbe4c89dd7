"""Measures how long a model takes to answer: cold, from the page cache, and from both levels of sleep.

    python benchmarks/scripts/start_times.py -o benchmarks/start-times.json

Every start is a real server, and ends with the first token of a request. The model's files are copied, so
that no other process holds them in the page cache; a cold start evicts the copy before.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from windlass.config import ModelConfig
from windlass.models.source import resolve
from windlass.tools.common.record import Record

READY_S = 600.0
_ROW = re.compile(r"│\s*(.+?)\s*│\s*([\d.]+) s\s*│\s*time to start")


def copy_files(source: Path, folder: Path) -> Path:
    """Copy a model's file or folder into `folder`; returns the copy."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / source.name
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copyfile(source, target)
    return target


def phases_of(lines: Iterable[str]) -> dict[str, float]:
    """The seconds of each phase in the table that a server prints when it is ready."""
    found = (_ROW.search(line) for line in lines)
    return {row[1]: float(row[2]) for row in found if row is not None}


def evict(path: Path) -> None:
    """Drop a file or the files of a folder from the page cache."""
    for file in (each for each in (path, *path.rglob("*")) if each.is_file()):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # dirty pages stay
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def call(port: int, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer admin"},
    )
    with urllib.request.urlopen(request, timeout=READY_S) as response:
        found: dict[str, Any] = json.load(response)
        return found


def first_token_s(port: int) -> float:
    """Seconds of a request for one token."""
    began = time.perf_counter()
    call(port, "/v1/completions", {"prompt": "A windlass is", "max_tokens": 1})
    return time.perf_counter() - began


@contextmanager
def server(path: Path, folder: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Run a server; yields its port and the seconds of its start by phase."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    key = folder / "admin.key"
    key.write_text("admin\n")
    key.chmod(0o600)
    command = [sys.executable, "-m", "windlass.cli", "serve", str(path), "--port", str(port)]
    command += ["--admin-key-file", str(key), "--log-level", "error"]
    began = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"}
    )
    assert process.stdout is not None
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "serves at" in line:
                break
        else:
            raise SystemExit(f"the server ended with code {process.wait()}: {' '.join(command)}")
        total = time.perf_counter() - began
        phases = phases_of(lines)
        rest = total - sum(phases.values())
        yield port, {"processes and HTTP": rest, **phases}
    finally:
        process.terminate()
        process.communicate()


def measure(path: Path, folder: Path) -> dict[str, dict[str, float]]:
    """One start of each kind, by phase."""
    found: dict[str, dict[str, float]] = {}
    evict(path)
    with server(path, folder) as (port, phases):
        found["cold"] = {**phases, "first token": first_token_s(port)}
    with server(path, folder) as (port, phases):
        found["warm"] = {**phases, "first token": first_token_s(port)}
        for level in (1, 2):
            call(port, "/admin/sleep", {"level": level})
            wake_s = float(call(port, "/admin/wake", {})["seconds"])
            found[f"wake_{level}"] = {"wake": wake_s, "first token": first_token_s(port)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="default")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = copy_files(Path(resolve(ModelConfig(model=args.model)).path), folder)
        runs = [measure(path, folder) for _ in range(args.repeats)]
    rows = []
    for kind in runs[0]:
        by_total = sorted((run[kind] for run in runs), key=lambda each: sum(each.values()))
        totals = [round(sum(each.values()), 3) for each in by_total]
        fastest = {name: round(seconds, 3) for name, seconds in by_total[0].items()}
        row = {
            "start": kind,
            "min": totals[0],
            "median": round(median(totals), 3),
            "max": totals[-1],
        }
        rows.append({**row, "phases": fastest})
        print(json.dumps(rows[-1]))
    if args.output is not None:
        settings = {"model": args.model, "repeats": args.repeats}
        notes = (
            "Seconds; phases are those of the fastest start, which other programs disturbed least. Cold: "
            "the model's files are not in the page cache."
        )
        Record(name="start-times", rows=rows, settings=settings, notes=notes).save(args.output)


if __name__ == "__main__":
    main()
