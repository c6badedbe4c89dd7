"""Data parallelism with real engines: a server with two replicas, OpenAI's client, a killed replica."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
import torch

from tests import warm_start
from tests.lora.folders import write_adapter, write_model
from tests.system.server import Server, serving
from windlass import LLM, AsyncLLM, SamplingParams
from windlass.config import EngineConfig
from windlass.errors import ConfigError
from windlass.machine import device as machine_device
from windlass.machine.topology import Core, CpuSlot, Topology, process_topology
from windlass.runner import device
from windlass.runner.device import claim_devices
from windlass.start import cpu_slots, make_client

OPTIONS = {
    "load_format": "dummy",
    "device": "cpu",
    "dtype": "float32",
    "num_blocks": 200,
    "max_num_seqs": 4,
}
PROMPTS = [" ".join(f"w{(7 * n + i * i) % 96}" for i in range(40 + n)) for n in range(6)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)


@dataclass
class Pair:
    server: Server
    root: Path
    http: httpx.Client
    openai: openai.OpenAI

    def stream(self, prompt: str) -> str:
        chunks = self.openai.completions.create(
            model="base",
            prompt=prompt,
            max_tokens=150,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        return "".join(chunk.choices[0].text for chunk in chunks)

    def complete(self, model: str, prompt: str) -> str:
        reply = self.openai.completions.create(
            model=model, prompt=prompt, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
        )
        return reply.choices[0].text

    def metric(self, name: str, replica: int) -> float:
        lines = self.http.get("/metrics").text.splitlines()
        head = f'windlass:{name}{{model_name="base",replica="{replica}"}} '
        return next(float(line.removeprefix(head)) for line in lines if line.startswith(head))

    def engines(self) -> list[int]:
        """The engine processes: the children of the server that have loaded torch."""
        pid = self.server.process.pid
        threads = Path(f"/proc/{pid}/task").iterdir()
        children = [c for t in threads for c in (t / "children").read_text().split()]
        return [int(c) for c in children if "libtorch" in Path(f"/proc/{c}/maps").read_text()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[str]:
    """The texts of one engine."""
    llm = LLM(str(model), **OPTIONS)
    return [each.outputs[0].text for each in llm.generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    root = tmp_path_factory.mktemp("adapters")
    flags = [
        text
        for key, value in OPTIONS.items()
        for text in (f"--{key.replace('_', '-')}", str(value))
    ]
    flags += ["-dp", "2", "--enable-lora", "--max-loras", "2", "--max-lora-rank", "8"]
    flags += ["--lora-root", str(root), "--admin-key", "boss"]
    with (
        warm_start.cold(),  # so that only engines have loaded torch
        serving(str(model), *flags) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
    ):
        http.headers["Authorization"] = "Bearer boss"
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        yield Pair(server, root, http, client)


def test_tokens_equal_those_of_one_engine(pair: Pair, expected: list[str]) -> None:
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(pair.stream, PROMPTS)) == expected
    assert all(pair.metric("generation_tokens_total", replica) > 0 for replica in (0, 1))
    assert pair.metric("engine_up", 0) == pair.metric("engine_up", 1) == 1
    assert "replicas" in pair.server.output


def test_conversations_keep_their_cached_prefix(pair: Pair) -> None:
    """Of each turn, all full blocks of the turn before are cached, also with turns of others between."""
    prompts = [" ".join(f"w{(11 * n + 3 * i) % 96}" for i in range(30)) for n in range(6)]
    for turn in range(4):
        for at, prompt in enumerate(prompts):
            reply = pair.openai.completions.create(model="base", prompt=prompt, max_tokens=1)
            assert reply.usage is not None
            details = reply.usage.prompt_tokens_details
            cached = (details.cached_tokens if details is not None else 0) or 0
            if turn:
                assert cached >= (reply.usage.prompt_tokens - 20) // 16 * 16 > 0
            prompts[at] = prompt + f" w{turn} w9" * 10


def test_adapters_are_loaded_by_all_replicas_or_none(pair: Pair) -> None:
    folder = write_adapter(pair.root / "good", seed=2)
    body = {"lora_name": "good", "lora_path": str(folder)}
    assert pair.http.post("/v1/load_lora_adapter", json=body).json()["status"] == "loaded"
    with ThreadPoolExecutor(6) as pool:  # enough for both replicas
        texts = list(pool.map(lambda _: pair.complete("good", PROMPTS[0]), range(12)))
    assert len(set(texts)) == 1
    assert texts[0] != pair.complete("base", PROMPTS[0])
    assert [pair.metric("lora_adapters_loaded", replica) for replica in (0, 1)] == [1, 1]
    wrong = write_adapter(pair.root / "wide", seed=2, rank=16)
    body = {"lora_name": "wide", "lora_path": str(wrong)}
    assert pair.http.post("/v1/load_lora_adapter", json=body).status_code == 400
    body = {"lora_name": "good"}
    assert pair.http.post("/v1/unload_lora_adapter", json=body).json()["status"] == "unloaded"
    with pytest.raises(openai.NotFoundError):
        pair.complete("good", PROMPTS[0])


def test_a_killed_replica_disturbs_no_stream_of_the_other(pair: Pair, expected: list[str]) -> None:
    stop = threading.Event()

    def streams(at: int) -> list[str]:
        """Whole texts and errors, until `stop`."""
        found = []
        while not stop.is_set():
            try:
                found.append(pair.stream(PROMPTS[at]))
            except openai.APIError as error:
                found.append(f"error: {error}")
        return found

    for name in ("kept", "gone"):
        folder = write_adapter(pair.root / name, seed=3)
        body = {"lora_name": name, "lora_path": str(folder)}
        assert pair.http.post("/v1/load_lora_adapter", json=body).status_code == 200
    shutil.rmtree(pair.root / "gone")
    first, second = pair.engines()
    with ThreadPoolExecutor(6) as pool:
        try:
            running = [pool.submit(streams, at) for at in range(6)]
            wait_until(lambda: all(pair.metric("num_requests_running", r) for r in (0, 1)))
            os.kill(first, signal.SIGKILL)
            wait_until(lambda: pair.http.get("/health").json()["status"] == "degraded")
            assert pair.http.get("/health").status_code == 200
            wait_until(lambda: pair.http.get("/health").json() == {"status": "ok"})
        finally:
            stop.set()
        results = [each.result(60) for each in running]
    errors = [text for texts in results for text in texts if text.startswith("error")]
    assert 0 < len(errors) <= 6
    assert all("the engine process was ended by signal 9" in each for each in errors)
    for at, texts in enumerate(results):
        whole = [text for text in texts if not text.startswith("error")]
        assert whole
        assert set(whole) == {expected[at]}
    assert second in pair.engines()
    assert first not in pair.engines()
    assert len(pair.engines()) == 2
    # The restarted replica cannot load one of the adapters: no replica has it any more.
    wait_until(lambda: [pair.metric("lora_adapters_loaded", r) for r in (0, 1)] == [1, 1])
    names = [entry["id"] for entry in pair.http.get("/v1/models").json()["data"]]
    assert names == ["base", "kept"]
    texts = [pair.complete("kept", prompt) for prompt in PROMPTS * 2]
    assert texts[:6] == texts[6:]


def wait_until(condition: Callable[[], bool], hang_guard_s: float = 60.0) -> None:
    end = time.monotonic() + hang_guard_s
    while not condition():
        assert time.monotonic() < end, "the condition is still false"
        time.sleep(0.02)


@pytest.mark.slow
def test_the_offline_api(model: Path, expected: list[str]) -> None:
    """AsyncLLM starts a process per replica, and further ranks of each; LLM refuses."""
    with pytest.raises(ConfigError, match=r"data_parallel_size is 2.*AsyncLLM"):
        LLM(str(model), data_parallel_size=2, **OPTIONS)

    async def main() -> list[str]:
        options = {**OPTIONS, "data_parallel_size": 2, "tensor_parallel_size": 2}
        async with AsyncLLM(str(model), **options) as llm:
            results = await asyncio.gather(*(llm.generate(p, GREEDY) for p in PROMPTS))
            return [each.outputs[0].text for each in results]

    assert asyncio.run(main()) == expected


# ---- devices ---------------------------------------------------------------------------------


def claimed(monkeypatch: pytest.MonkeyPatch, replica: int, visible: str | None, **options) -> str:
    """CUDA_VISIBLE_DEVICES of a replica on a machine with four GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    claim_devices(EngineConfig.of(**options), replica)
    return os.environ.get("CUDA_VISIBLE_DEVICES", "all")


def test_each_replica_sees_its_own_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    two = {"data_parallel_size": 2, "tensor_parallel_size": 2}
    assert claimed(monkeypatch, 0, None) == "all"
    assert claimed(monkeypatch, 1, None, data_parallel_size=4) == "1"
    assert claimed(monkeypatch, 1, None, **two) == "2,3"
    assert claimed(monkeypatch, 1, "7,5,3,1", **two) == "3,1"
    assert claimed(monkeypatch, 1, None, data_parallel_size=2, device="cpu") == "all"
    with pytest.raises(ConfigError, match="replicas of 2 GPUs need 6 GPUs, and torch sees 4"):
        claimed(monkeypatch, 0, None, data_parallel_size=3, tensor_parallel_size=2)


def test_replicas_divide_the_cores_and_the_memory_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = tuple(Core(0, (number,)) for number in range(8))
    for module in (device, machine_device):
        monkeypatch.setattr(module, "process_topology", lambda: Topology(cores, 8, 8, 1))
    config = EngineConfig.of(device="cpu", data_parallel_size=4)
    claim_devices(config, 3)
    before = torch.get_num_threads()
    try:
        assert device.choose_threads(config.model, CpuSlot(3, 4)).count == 2
        assert device.claimed_cpus(config.parallel) == CpuSlot(0, 4)
    finally:
        torch.set_num_threads(before)
    assert config.limits("cpu").memory_share == EngineConfig().limits("cpu").memory_share / 4
    assert config.limits("cuda").memory_share == EngineConfig().limits("cuda").memory_share


def test_more_replicas_than_cpus_are_refused_before_any_starts() -> None:
    num_cpus = process_topology().num_usable_cpus
    config = EngineConfig.of(device="cpu", data_parallel_size=num_cpus + 1)
    message = f"at least one CPU, and {num_cpus} are allowed. Use at most {num_cpus} replicas"
    for refuse in (lambda: claim_devices(config, 0), lambda: make_client(config)):
        with pytest.raises(ConfigError, match=message):
            refuse()


def test_engines_of_a_server_divide_the_cores() -> None:
    """The model keeps all cores beside idle models of --fallback, whose ranks get a part each."""
    model = EngineConfig.of(data_parallel_size=2)
    fallbacks = [EngineConfig.of(tensor_parallel_size=2), EngineConfig()]
    assert cpu_slots([model, *fallbacks]) == [CpuSlot(0, 2), CpuSlot(2, 5), CpuSlot(4, 5)]
    assert cpu_slots([EngineConfig()]) == [CpuSlot(0, 1)]


def test_replicas_run_on_one_machine() -> None:
    with pytest.raises(ConfigError, match="runs on one machine, and --nnodes is 2"):
        EngineConfig.of(data_parallel_size=2, nnodes=2, tensor_parallel_size=2)
