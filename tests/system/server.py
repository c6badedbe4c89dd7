"""A real server process, which runs the command of a user."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests import warm_start

_URL = re.compile(r"serves at (http://\S+)")


@dataclass
class Server:
    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    url: str = ""

    @property
    def output(self) -> str:
        return "".join(self.lines)


@contextmanager
def serving(*flags: str, timeout_s: float = 120) -> Iterator[Server]:
    """`windlass serve` on a free port; waits until it is ready and ends it afterwards."""
    command = [sys.executable, "-m", "windlass.cli", "serve", "--port", "0", *flags]
    process = warm_start.start(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    server = Server(process)
    ready = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            server.lines.append(line)
            if found := _URL.search(line):
                server.url = found.group(1)
                ready.set()
        ready.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        ready.wait(timeout_s)
        assert server.url, f"the server did not start:\n{server.output}"
        yield server
    finally:
        process.terminate()
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join()
        assert process.stdout is not None
        process.stdout.close()
