"""`windlass config`: effective values, their sources, and errors, without starting anything."""

from __future__ import annotations

import inspect
import json
import math
from dataclasses import fields
from pathlib import Path

import pytest

from tests.cli.conftest import Invoke
from windlass.cli.main import app
from windlass.config import EngineConfig, GateConfig, ServeConfig
from windlass.errors import ConfigError

SECTIONS = [type(getattr(EngineConfig(), item.name)) for item in fields(EngineConfig)]
NUMBERS = [
    (section, item.name)
    for section in (*SECTIONS, ServeConfig, GateConfig)
    for item in fields(section)
    if "float" in str(item.type)
]


def test_values_and_sources(
    windlass: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("port: 9000\nprofile: chat\nmax-num-queued-reqs: 5\n")
    monkeypatch.setenv("WINDLASS_API_KEY", "hunter2")
    args = ("--config", str(file), "--port", "9001", "--max-num-seqs", "7")
    shown = windlass("config", *args).out
    lines = {line.split()[0]: line.split()[1:] for line in shown.splitlines()}
    assert lines["--port"] == ["9001", "flag"]
    assert lines["--max-num-queued-reqs"] == ["5", "file", "live"]
    assert lines["--max-num-seqs"] == ["7", "flag", "live"]
    assert lines["--max-num-batched-tokens"] == ["4096", "profile", "live"]
    assert lines["--api-key"] == ['"(set)"', "environment"]
    assert "--host" not in lines
    assert "the configuration is valid" in shown
    assert "hunter2" not in shown
    assert '"127.0.0.1"' in windlass("config", *args, "--all").out
    settings = json.loads(windlass("config", *args, "--json").out)["settings"]
    assert settings["host"] == {
        "value": "127.0.0.1",
        "default": "127.0.0.1",
        "source": "default",
        "live": False,
    }
    assert settings["port"]["source"] == "flag"


def test_limits_without_profile_depend_on_the_device(windlass: Invoke) -> None:
    def max_num_seqs(*args: str) -> tuple[object, str]:
        found = json.loads(windlass("config", "--json", *args).out)["settings"]["max_num_seqs"]
        return found["value"], found["source"]

    assert max_num_seqs() == (None, "default")
    assert max_num_seqs("--device", "cpu") == (32, "profile")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--device", "cuda"], (35.0, "profile")),
        (["--device", "cuda", "--slo-tpot-ms", "60"], (60.0, "flag")),
        (["--device", "cuda", "--no-enable-chunked-prefill"], (None, "default")),
        (["--device", "cpu"], (None, "default")),
        (["--device", "auto"], (None, "default")),
    ],
)
def test_the_chat_profile_has_a_latency_target_on_a_gpu(
    windlass: Invoke, args: list[str], expected: tuple[object, str]
) -> None:
    found = windlass("config", "--json", "--profile", "chat", *args).out
    setting = json.loads(found)["settings"]["slo_tpot_ms"]
    assert (setting["value"], setting["source"]) == expected


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--slo-admission"], "--slo-admission needs --slo-ttft-ms"),
        (["--max-num-seqs", "9", "--max-num-batched-tokens", "8"], "is below"),
        (["--keys-file", "{folder}/keys.yaml"], "--keys-file {folder}/keys.yaml has no `tenants:`"),
        (["--config", "{folder}/bad.yaml"], "unknown option 'prot' for this command"),
        (["--fallback", "max_tokens=few"], "--fallback"),
    ],
)
def test_what_a_server_would_refuse_is_an_error(
    windlass: Invoke, tmp_path: Path, args: list[str], message: str
) -> None:
    (tmp_path / "bad.yaml").write_text("prot: 1\n")
    (tmp_path / "keys.yaml").write_text("keys: []\n")
    (tmp_path / "keys.yaml").chmod(0o600)
    done = windlass("config", *(each.format(folder=tmp_path) for each in args))
    assert done.code == 2
    assert message.format(folder=tmp_path) in " ".join(done.err.split())


def test_the_options_are_those_of_the_server() -> None:
    groups = {each.name: each for each in app.registered_commands}

    def names(command: str) -> set[str]:
        callback = groups[command].callback
        assert callback is not None
        return set(inspect.signature(callback).parameters)

    assert names("config") - names("serve") == {"as_json", "show_all"}
    assert names("serve") <= names("config")


@pytest.mark.parametrize(("section", "name"), NUMBERS)
def test_no_option_accepts_nan(section: type, name: str) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}"):
        section(**{name: math.nan})


def test_the_price_is_finite(windlass: Invoke) -> None:
    outcome = windlass("config", "--price-per-hour", "inf")
    assert outcome.code == 2
    assert "--price-per-hour must be a number, got inf." in outcome.err
