"""No process of a server outlives it, and none ends before it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests import warm_start
from tests.serve.conftest import wait_until
from tests.serve.tiny_model import write_tiny_model
from windlass.text.template_process import TemplateProcess
from windlass.text.template_worker import RenderJob, TemplateSource

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

ROOT = Path(__file__).parents[2]


def test_a_process_outlives_the_thread_that_started_it() -> None:
    """The kernel kills a child whose starting thread has ended."""
    made: list[TemplateProcess] = []
    source = TemplateSource("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    starter = threading.Thread(target=lambda: made.append(TemplateProcess(source)))
    with warm_start.cold():  # a nursery's child belongs to the main thread
        starter.start()
        starter.join()
    job = RenderJob(messages=[{"role": "user", "content": "Hi"}], max_chars=10)
    assert asyncio.run(made[0].render(job)) == "Hi"
    made[0].close()


def descendants(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            yield child
            yield from descendants(child)


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"  # a zombie waits for its new parent


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server with every kind of process, in a process of its own."""
    folder = write_tiny_model(tmp_path / "model")
    arguments = "--device cpu --port 0 --tensor-parallel-size 2 --http-workers 2 --num-blocks 64"
    command = [sys.executable, "-m", "windlass.cli", "serve", str(folder), *arguments.split()]
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if "http://" in line:
                yield process, "http://" + line.partition("http://")[2].split()[0]
                break
        else:
            raise AssertionError("the server did not start")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_killed_server_leaves_no_process(server: tuple[subprocess.Popen[str], str]) -> None:
    process, url = server
    body = {"prompt": "Hi", "max_tokens": 3, "structured_outputs": {"regex": "[a-z]+"}}
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
    found = list(descendants(process.pid))
    commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in found]
    assert any("text.grammar.worker" in each for each in commands)  # the grammar sandbox
    # The engine, a rank, two HTTP workers, a template process of each process that renders.
    assert len(found) >= 6, commands
    os.kill(found[-1], signal.SIGSTOP)
    process.kill()
    process.wait()
    wait_until(lambda: not any(map(is_alive, found)))
