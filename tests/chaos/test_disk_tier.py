"""A server that is killed while its engine writes the disk tier: what it left changes no token."""

from __future__ import annotations

import contextlib
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.conftest import wait_until
from tests.serve.tiny_model import write_tiny_model
from tests.system.server import serving

PROMPTS = [
    f"{number}. " + "The quick brown fox jumps over the lazy dog. " * 9 for number in range(6)
]
FLAGS = "--device cpu --dtype float32 --num-blocks 300 --num-threads 1 --block-size 16"


def choices(url: str, prompt: str) -> Any:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"]


@pytest.mark.slow
def test_a_server_that_is_killed_while_it_writes(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    flags = (str(write_tiny_model(tmp_path / "model")), *FLAGS.split())
    root = tmp_path / "cache"
    with serving(*flags) as server:
        want = [choices(server.url, prompt) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        for num_more in (1, 25):  # of all 150 records
            num_before = len(list(root.glob("*/*.kv")))
            with serving(*flags, "--prefix-cache-dir", str(root)) as server:

                def send(prompt: str, url: str = server.url) -> None:
                    with contextlib.suppress(httpx.HTTPError):  # its server is killed
                        choices(url, prompt)

                sent = [pool.submit(send, prompt) for prompt in PROMPTS]
                wait_until(lambda num=num_before + num_more: len(list(root.glob("*/*.kv"))) >= num)
                server.process.send_signal(signal.SIGKILL)
                server.process.wait()
                for each in sent:
                    each.result()
    with serving(*flags, "--prefix-cache-dir", str(root)) as server:
        assert [choices(server.url, prompt) for prompt in PROMPTS] == want
        metrics = httpx.get(f"{server.url}/metrics").text
    lines = [line for line in metrics.splitlines() if 'tier="disk"' in line]
    values = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines}
    assert values["windlass:kv_tier_loads_total"] > 0
    assert values["windlass:kv_tier_corrupt_records_total"] == 0
