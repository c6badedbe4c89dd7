"""Keys of `windlass serve` reach neither the process list nor the engine process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.cli.conftest import Invoke
from windlass.cli.bench_serve import _headers
from windlass.cli.command import Options
from windlass.cli.secrets import hide_arguments, with_environment_keys
from windlass.errors import ConfigError

ROOT = Path(__file__).parents[2]


def test_keys_are_removed_from_the_environment(tmp_path: Path) -> None:
    environment = {"WINDLASS_API_KEY": "one", "WINDLASS_ADMIN_KEY": "boss", "HOME": "/"}
    given = {"api_key": ["two"], "lora_root": [str(tmp_path)]}
    config = Options(with_environment_keys(given, environment)).serve()
    assert (config.api_key, config.admin_key) == (("two", "one"), ("boss",))
    assert environment == {"HOME": "/"}  # child processes inherit it
    assert with_environment_keys(given, environment) == given


@pytest.mark.parametrize("name", ["WINDLASS_API_KEY", "WINDLASS_ADMIN_KEY"])
def test_an_empty_variable_is_rejected(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"\${name} is empty"):
        with_environment_keys({}, {name: ""})


def test_the_cluster_secret_is_removed_from_the_environment() -> None:
    environment = {"WINDLASS_CLUSTER_SECRET": "a long enough secret"}
    two = {"nnodes": 2, "tensor_parallel_size": 2}
    parallel = Options(with_environment_keys(two, environment)).engine().parallel
    assert parallel.cluster_secret == "a long enough secret"
    assert environment == {}
    one = with_environment_keys({}, {"WINDLASS_CLUSTER_SECRET": "a long enough secret"})
    assert one == {}, "with one machine there is no use for it"


PROGRAM = """
import sys
from tests.serve.fakes import CARD, counting
from windlass.serve.client import EngineClient
from windlass.serve.launch import serve
from windlass import start

def fake_serve(_config, serve_config, _on_ready, **_sources):
    client = EngineClient(counting())
    def on_ready(_report, url):
        print(url, flush=True)
    return serve(client, lambda: CARD, serve_config, on_ready)

if __name__ == "__main__":
    start.serve = fake_serve
    from windlass.cli.main import app
    app()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="argv is overwritten on Linux only")
def test_keys_do_not_show_in_the_process_list(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    flags = ["--api-key", "s3cret-one", "--api-key=s3cret-two", "--admin-key", "s3cret-boss"]
    command = [sys.executable, str(program), "serve", "--port", "0", *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "WINDLASS_API_KEY": "s3cret-env"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("http")
            server = psutil.Process(process.pid)
            children = server.children(recursive=True)
            assert children
            for each in (server, *children):
                assert "s3cret" not in " ".join(each.cmdline())
            assert "--port" in server.cmdline()
            for each in children:
                assert "s3cret" not in " ".join(each.environ().values())
        finally:
            process.terminate()
            process.wait(20)


def test_other_arguments_may_be_any_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = os.fsdecode(b"caf\xe9.gguf")
    monkeypatch.setattr(sys, "argv", ["windlass", "serve", odd, "--hf-token=t0ken"])
    hide_arguments(["t0ken"])
    assert sys.argv == ["windlass", "serve", odd, "--hf-token=xxxxx"]


def test_missing_arguments_need_no_hiding() -> None:
    hide_arguments([])
    hide_arguments(["no argument of this process"])


@pytest.mark.parametrize(
    "line",
    [
        "explain id --api-key s3cret --url http://127.0.0.1:9",
        "memory --key s3cret --url http://127.0.0.1:9",
        "bench serve --api-key s3cret --port 9 --ready-check-timeout-sec 0.1",
        "bench serve --header s3cret=1 --port 9 --ready-check-timeout-sec 0.1",
        "inspect /nowhere --hf-token s3cret",
    ],
)
def test_every_command_hides_its_secrets(
    line: str, windlass: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["windlass", *line.split()])
    assert windlass(*line.split()).code in (1, 2)
    assert "s3cret" not in " ".join(sys.argv)
    assert sys.argv[1] == line.split()[0]


def test_commands_read_the_same_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, object] = {"api_key": None, "header": None}
    monkeypatch.setenv("OPENAI_API_KEY", "theirs")
    assert _headers(given) == {"Authorization": "Bearer theirs"}
    monkeypatch.setenv("WINDLASS_API_KEY", "ours")
    assert _headers(given) == {"Authorization": "Bearer ours"}
