"""Keys and tokens appear in nothing that a server writes, answers or shows to other processes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests import warm_start
from tests.serve.conftest import wait_until
from tests.serve.tiny_model import write_tiny_model
from tests.system.server import Server, serving
from windlass.cli.secrets import with_environment_keys
from windlass.config import ModelConfig, ParallelConfig, ServeConfig
from windlass.handshake import Identity

MARK = "s3cr3t-mark"  # in every secret, and in nothing else
CLIENT, ADMIN = f"{MARK}-client-flag", f"{MARK}-admin-flag"
VARIABLES = {
    "WINDLASS_API_KEY": f"{MARK}-client-variable",
    "WINDLASS_ADMIN_KEY": f"{MARK}-admin-variable",
    "WINDLASS_CLUSTER_SECRET": f"{MARK}-cluster-variable",
    "HF_TOKEN": f"{MARK}-token-variable",
}
WRONG = f"{MARK}-wrong"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder)
    files = []
    for flag in ("--api-key-file", "--admin-key-file"):
        file = folder / flag
        file.write_text(f"{MARK}{flag}\n")
        file.chmod(0o600)
        files += [flag, str(file)]
    flags = [
        "--api-key",
        CLIENT,
        f"--admin-key={ADMIN}",
        "--hf-token",
        f"{MARK}-token-flag",
        *files,
    ]
    engine = ["--device", "cpu", "--dtype", "float32", "--num-blocks", "64", "--max-num-seqs", "4"]
    rest = [
        "--enable-lora",
        "--lora-root",
        str(folder),
        "--http-workers",
        "2",
        "--price-per-hour",
        "1",
    ]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in VARIABLES.items():
            patch.setenv(name, value)
        # Cold, so that only the engine has loaded torch: a test looks for it.
        with warm_start.cold(), serving(str(folder), *flags, *engine, *rest) as started:
            yield started


def _processes(server: Server) -> list[psutil.Process]:
    main = psutil.Process(server.process.pid)
    return [main, *main.children(recursive=True)]


def _answers(url: str) -> Iterator[str]:
    """Heads and bodies of responses to good and bad requests, with all keys."""
    body = {"prompt": "Hi", "max_tokens": 2}
    with httpx.Client(base_url=url, timeout=30) as http:
        for key in (WRONG, CLIENT, ADMIN, VARIABLES["WINDLASS_ADMIN_KEY"], f"{MARK}--api-key-file"):
            headers = {"Authorization": f"Bearer {key}"}
            paths = (
                "/metrics",
                "/console/info",
                "/console/state",
                "/v1/models",
                "/props",
                "/slots",
            )
            for path in (*paths, "/load", "/cost", "/memory", "/openapi.json", "/nothing"):
                yield _text(http.get(path, headers=headers))
            response = http.post("/v1/completions", json=body, headers=headers)
            yield _text(response)
            if response.status_code == 200:
                explained = f"/v1/requests/{response.json()['id']}/explain"
                yield _text(http.get(explained, headers=headers))
            yield _text(http.post("/v1/completions", json={"prompt": 3}, headers=headers))
            load = {"lora_name": "a", "lora_path": "/nowhere"}
            yield _text(http.post("/v1/load_lora_adapter", json=load, headers=headers))
            yield _text(http.post("/admin/sleep", content=b"{", headers=headers))


def _text(response: httpx.Response) -> str:
    return f"{response.status_code} {response.headers} {response.text}"


def test_no_answer_contains_a_secret(server: Server) -> None:
    answers = list(_answers(server.url))
    statuses = {answer[:3] for answer in answers}
    assert {"200", "400", "401", "403"} <= statuses, "all kinds of answers were seen"
    assert [answer for answer in answers if MARK in answer] == []


def test_no_process_shows_a_secret_to_others(server: Server) -> None:
    processes = _processes(server)
    assert len(processes) >= 4
    for process in processes:
        assert MARK not in " ".join(process.cmdline()), process
    for child in processes[1:]:
        environment = Path(f"/proc/{child.pid}/environ").read_bytes()
        assert MARK.encode() not in environment, child


def test_neither_the_log_nor_a_crash_shows_a_secret(server: Server) -> None:
    engine = next(
        each
        for each in _processes(server)[1:]
        if any("libtorch" in entry.path for entry in each.memory_maps())
    )
    engine.send_signal(signal.SIGABRT)  # faulthandler writes the stacks of all threads
    wait_until(lambda: "Fatal Python error" in server.output and "restart" in server.output)
    assert MARK not in server.output


def test_secrets_are_not_in_the_repr_of_a_config() -> None:
    configs = (
        ServeConfig(api_key=(MARK,), admin_key=(MARK,)),
        ModelConfig(hf_token=MARK),
        ParallelConfig(nnodes=2, tensor_parallel_size=2, cluster_secret=MARK * 2),
        Identity({}, MARK.encode()),
    )
    assert [each for each in configs if MARK in repr(each)] == []


@pytest.mark.parametrize("given", [{}, {"hf_token": "flag"}])
def test_the_token_of_the_hub_is_removed_from_the_environment(given: dict[str, str]) -> None:
    environment = {"HF_TOKEN": "variable", "HOME": "/"}
    values = with_environment_keys(given, environment)
    assert values["hf_token"] == given.get("hf_token", "variable")
    assert environment == {"HOME": "/"}
