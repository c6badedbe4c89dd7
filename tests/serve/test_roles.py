"""Prefill and decode servers of a real model, in processes as on different hosts: the tokens of one server."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import Server, wait_until
from tests.serve.test_disaggregation import explained, peer_loads, strip
from tests.serve.tiny_model import serving, write_tiny_adapter, write_tiny_model
from tests.system import server as system
from windlass.errors import ConfigError

PROMPT = "The quick brown fox jumps over the lazy dog. " * 4
SECRET = "0123456789abcdef0123"
ENGINE = {"num_threads": 1, "block_size": 16}
DECODE = {
    **ENGINE,
    "role": "decode",
    "cluster_secret": SECRET,
    "min_prefill_tokens": 32,
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def secret_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secret") / "cluster.secret"
    path.write_text(SECRET + "\n")
    return path


@contextmanager
def prefill_server(
    folder: Path, secret_file: Path, port: int, *options: str
) -> Iterator[system.Server]:
    """`windlass serve --role prefill`, in a process of its own."""
    flags = "--device cpu --dtype float32 --num-blocks 200 --max-num-seqs 8 --num-threads 1"
    with system.serving(
        str(folder),
        *flags.split(),
        *("--block-size", "16", "--role", "prefill", "--prefill-listen", f"127.0.0.1:{port}"),
        *("--cluster-secret-file", str(secret_file), "--kv-transfer-gb", "0.02"),
        *options,
    ) as server:
        yield server


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def prefill(folder: Path, secret_file: Path, port: int) -> Iterator[system.Server]:
    with prefill_server(folder, secret_file, port) as server:
        yield server


@pytest.fixture(scope="module")
def apart(folder: Path, prefill: system.Server, port: int) -> Iterator[Server]:
    assert prefill.url
    with serving(folder, **DECODE, prefill_servers=(f"127.0.0.1:{port}",)) as server:
        yield server


@pytest.fixture(scope="module")
def together(folder: Path) -> Iterator[Server]:
    with serving(folder, **ENGINE) as server:
        yield server


@pytest.mark.parametrize(
    "body",
    [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 7, "n": 2},
        {"temperature": 0, "repetition_penalty": 1.5},
        {"temperature": 0, "logprobs": 3},
        {"temperature": 0, "prompt_logprobs": 1},
        {"temperature": 1.0, "seed": 5, "structured_outputs": {"regex": "[a-c]{12}"}},
        {"temperature": 0, "max_tokens": 2},
        {"temperature": 0, "max_tokens": 1},
    ],
    ids=str,
)
def test_tokens_equal_those_of_one_server(
    apart: Server, together: Server, body: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    prompt = f"{request.node.name}: {PROMPT}"
    full = {"prompt": prompt, "max_tokens": 24, "return_token_ids": True, **body}
    before = peer_loads(apart, 0)
    got, expected = (each.complete(**full).json() for each in (apart, together))
    assert strip(got["choices"]) == strip(expected["choices"])
    assert got["usage"] == expected["usage"]
    found = explained(apart, got)
    assert min(found["seconds"].values()) >= 0
    if full["max_tokens"] == 1:
        assert found["handover"]["reason"] == "one token"
    else:
        wait_until(lambda: peer_loads(apart, 0) > before)
        assert found["handover"]["engines"] == 2
        assert found["handover"]["blocks"] == len(prompt) // 16
        assert found["handover"]["reason"] is None
        assert found["handover"]["seconds"] >= 0


def test_the_decode_server_computes_less_than_a_block(apart: Server) -> None:
    computed = apart.client.replicas[0].stats.num_prompt_tokens_computed
    reply = apart.complete(prompt="Only once. " + PROMPT, max_tokens=6, temperature=0).json()
    left = reply["usage"]["prompt_tokens"] % 16
    stats = apart.client.replicas[0]
    wait_until(lambda: stats.stats.num_prompt_tokens_computed == computed + left)


def test_many_requests_at_once(apart: Server, together: Server) -> None:
    bodies = [
        {"prompt": f"{number} " + PROMPT * (1 + number % 2), "max_tokens": 16, "temperature": 0}
        for number in range(12)
    ]
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda body: apart.complete(**body).json()["choices"], bodies))
    assert found == [together.complete(**body).json()["choices"] for body in bodies]


def test_an_aborted_stream_leaves_nothing(apart: Server, prefill: system.Server) -> None:
    import httpx

    for number in range(4):
        chunks = apart.openai.completions.create(
            model=apart.openai.models.list().data[0].id,
            prompt=f"abort {number} " + PROMPT,
            max_tokens=200,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(chunks))
        chunks.close()
    wait_until(lambda: apart.client.num_in_flight == 0)
    wait_until(lambda: apart.client.replicas[0].stats.num_used_blocks == 0)
    wait_until(lambda: not apart.client.prefill_servers[0].untraced)
    handovers = apart.client.handovers
    wait_until(lambda: handovers is not None and handovers.num_open == 0)
    metrics = httpx.get(f"{prefill.url}/metrics").text
    assert "windlass:num_requests_running" in metrics


def refused(folder: Path, port: int, **options: Any) -> str:
    """The error with which a decode server does not start."""
    with (
        pytest.raises(AssertionError) as caught,
        serving(folder, **{**DECODE, **options}, prefill_servers=(f"127.0.0.1:{port}",)),
    ):
        pass
    assert isinstance(caught.value.__cause__, ConfigError)
    return str(caught.value.__cause__)


def test_a_wrong_secret_is_refused(folder: Path, prefill: system.Server, port: int) -> None:
    message = refused(folder, port, cluster_secret="another secret of 24 ch.")
    assert "its cluster secret is not that of the prefill server" in message
    wait_until(lambda: "is refused: its cluster secret" in prefill.output)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 32}, "the KV block size is 32 on the decode server, and 16 on the prefill"),
        ({"kv_cache_dtype": "int8"}, "the type of the KV cache is int8 on the decode server"),
    ],
)
def test_other_options_are_refused_by_name(
    folder: Path, prefill: system.Server, port: int, options: dict[str, Any], message: str
) -> None:
    assert prefill.url
    assert message in refused(folder, port, **options)


def test_another_model_is_refused_by_name(
    tmp_path: Path, prefill: system.Server, port: int
) -> None:
    assert prefill.url
    other = write_tiny_model(tmp_path, seed=1)
    assert "the digest of the model's files is " in refused(other, port)


class Relay:
    """Forwards TCP to a port. `hold`: links for records stop after so many bytes from the server."""

    def __init__(self, port: int) -> None:
        self.hold: int | None = None
        self.is_held = threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.listener.getsockname()[1])
        self._target = port
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:  # it was killed
                client.close()
                continue
            is_records = threading.Event()
            for origin, target in ((client, server), (server, client)):
                work = (origin, target, is_records, origin is server)
                threading.Thread(target=self._copy, args=work, daemon=True).start()

    def _copy(
        self,
        origin: socket.socket,
        target: socket.socket,
        is_records: threading.Event,
        from_server: bool,
    ) -> None:
        num_bytes = 0
        try:
            while data := origin.recv(65536):
                if not from_server and b"records" in data:
                    is_records.set()
                num_bytes += len(data)
                limit = self.hold if from_server and is_records.is_set() else None
                if limit is not None and num_bytes > limit:
                    self.is_held.set()
                    continue
                target.sendall(data)
        except OSError:
            pass
        for each in (origin, target):
            each.close()


@pytest.mark.slow
def test_a_killed_prefill_server_is_replaced_by_this_one(
    folder: Path, secret_file: Path, together: Server
) -> None:
    """In mid-transfer; other streams go on, and a new prefill server is used."""
    port = free_port()
    relay = Relay(port)
    body = {"prompt": "Killed. " + PROMPT, "max_tokens": 12, "temperature": 0}
    other = {"prompt": "short", "max_tokens": 300, "temperature": 0, "ignore_eos": True}
    with (
        ThreadPoolExecutor(2) as pool,
        prefill_server(folder, secret_file, port) as prefill,
        serving(folder, **DECODE, prefill_servers=(f"127.0.0.1:{relay.port}",)) as front,
    ):
        (server,) = front.client.prefill_servers
        assert server.health().ok
        relay.hold = 3000  # in the first of the records
        stream = pool.submit(front.complete, **other)
        reply = pool.submit(front.complete, **body)
        assert relay.is_held.wait(60)
        prefill.process.send_signal(signal.SIGKILL)
        prefill.process.wait()
        assert reply.result().json()["choices"] == together.complete(**body).json()["choices"]
        assert stream.result().json()["choices"] == together.complete(**other).json()["choices"]
        wait_until(lambda: not server.health().ok)
        health = front.http.get("/health").json()
        assert health["status"] == "degraded"
        assert f"the prefill server at 127.0.0.1:{relay.port} is lost" in str(health)
        body["prompt"] = "Later. " + PROMPT
        found = front.complete(**body).json()
        assert found["choices"] == together.complete(**body).json()["choices"]
        assert explained(front, found)["handover"]["reason"] == "no prefill engine"
        relay.hold = None
        with prefill_server(folder, secret_file, port):
            wait_until(lambda: server.health().ok)
            body["prompt"] = "Much later. " + PROMPT
            found = front.complete(**body).json()
            assert found["choices"] == together.complete(**body).json()["choices"]
            assert explained(front, found)["handover"]["engines"] == 2
            wait_until(lambda: peer_loads(front, 0) > 0)
    relay.listener.close()


def test_a_slow_transfer_is_given_up(
    folder: Path, prefill: system.Server, port: int, together: Server
) -> None:
    assert prefill.url
    relay = Relay(port)
    relay.hold = 3000
    body = {"prompt": "Slow. " + PROMPT, "max_tokens": 12, "temperature": 0}
    with serving(
        folder,
        **DECODE,
        prefill_servers=(f"127.0.0.1:{relay.port}",),
        kv_transfer_timeout=0.5,
    ) as front:
        reply = front.complete(**body).json()
        assert relay.is_held.is_set()
        assert reply["choices"] == together.complete(**body).json()["choices"]
        assert front.client.prefill_servers[0].health().ok
        assert peer_loads(front, 0) < len(body["prompt"]) // 16
    relay.listener.close()


@pytest.mark.slow
def test_adapters_and_ranks(folder: Path, secret_file: Path, tmp_path: Path) -> None:
    """Two ranks on each side; one adapter is the same on both hosts, and one has only its name in common."""
    port = free_port()
    paths = {}
    for host in ("prefill", "decode"):
        (tmp_path / host).mkdir()
        paths[host] = {
            "same": write_tiny_adapter(tmp_path / host / "same"),
            "other": write_tiny_adapter(tmp_path / host / "other", seed=len(host)),
        }
    modules = {
        host: tuple(f"{name}={path}" for name, path in paths[host].items()) for host in paths
    }
    lora = {"enable_lora": True, "lora_modules": modules["decode"]}
    flags = ("--tensor-parallel-size", "2", "--enable-lora", "--lora-modules", *modules["prefill"])
    with (
        prefill_server(folder, secret_file, port, *flags),
        serving(
            folder,
            **DECODE,
            **lora,
            tensor_parallel_size=2,
            prefill_servers=(f"127.0.0.1:{port}",),
        ) as apart,
        serving(folder, **ENGINE, **lora) as together,
    ):
        base = together.http.get("/v1/models").json()["data"][0]["id"]
        tokens = []
        for model, reason in ((base, None), ("same", None), ("other", "prefill engine refused")):
            num_before = peer_loads(apart, 0)
            body = {"model": model, "prompt": f"{model}: {PROMPT}", "max_tokens": 12}
            full = {**body, "temperature": 0, "return_token_ids": True}
            got, expected = (each.complete(**full).json() for each in (apart, together))
            assert strip(got["choices"]) == strip(expected["choices"])
            assert got["usage"] == expected["usage"]
            found = explained(apart, got)["handover"]
            assert found["reason"] == reason
            if reason is None:
                assert found["engines"] == 2
                assert found["blocks"] == len(body["prompt"]) // 16
                wait_until(lambda before=num_before: peer_loads(apart, 0) > before)
            tokens.append(got["choices"][0]["token_ids"])
        assert tokens[0] != tokens[1] != tokens[2]
