"""A server process with the counting model, which tests can signal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tests import warm_start
from tests.serve.conftest import wait_until

ROOT = Path(__file__).parents[2]

_PROGRAM = """
import json, logging, sys
from tests.serve.fakes import CARD, counting
from windlass.config import ServeConfig
from windlass.serve.client import EngineClient
from windlass.serve.launch import serve

if __name__ == "__main__":
    logging.basicConfig(level="INFO", stream=sys.stdout, format="%(message)s")
    options = json.loads(sys.argv[1])
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    config = ServeConfig(port=0, shutdown_timeout=5.0, **options)
    on_ready = lambda _report, url: print("ready", url, flush=True)
    sys.exit(serve(EngineClient(counting()), lambda: CARD, config, on_ready))
"""


class ServerProcess:
    """A running server: its url, and the lines that it has written."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        wait_until(lambda: bool(self.url) or not self._reader.is_alive())
        assert self.url, "".join(self.lines)

    @property
    def url(self) -> str:
        return next((line.split()[1] for line in self.lines if line.startswith("ready ")), "")

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    def wait_for_line(self, text: str, count: int = 1) -> None:
        """Wait until so many lines of the log contain `text`."""
        wait_until(lambda: sum(text in line for line in self.lines) >= count)

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        finally:
            self.process.kill()
            self._reader.join()
            assert self.process.stdout is not None
            self.process.stdout.close()


@contextmanager
def server_process(
    folder: Path, *, popen: dict[str, Any] | None = None, **options: Any
) -> Iterator[ServerProcess]:
    """Run a server with these options of ServeConfig in a process of its own."""
    program = folder / "program.py"
    program.write_text(_PROGRAM)
    start = partial(subprocess.Popen, text=True, **popen) if popen else warm_start.start
    process = start(
        [sys.executable, str(program), json.dumps(options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    server = ServerProcess(process)
    try:
        yield server
    finally:
        server.close()
