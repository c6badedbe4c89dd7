"""The commands of README and docs are valid as written; light ones run, with small models and free ports."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import typer
import yaml
from typer.testing import CliRunner

from tests.models.comparison import save_tiny
from tests.serve.conftest import Server, running
from tests.serve.fakes import CARD
from windlass.cli.command import ModelCommand, Options
from windlass.cli.main import app
from windlass.core.expert_load import ExpertLoad
from windlass.tools.common.record import read_record

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = ("windlass ", "make ", "curl ", "python benchmarks/", "pip ")

# What stands for something of the reader's.
PLACEHOLDERS = {"...": "", "flags": "", "LIBRARY": "library.so", "FOLDER": "folder"}
# Commands that run here: they load no model, or a tiny one, and end within seconds.
LIGHT = (
    "windlass inspect",
    "windlass plan MODEL --device cuda",
    "windlass plan benchmarks/models/llama-3.1-8b",
    "windlass plan MODEL --memory 24GiB",
    "windlass balance-experts load.json",
    "windlass bench report benchmarks/",
    "windlass explain ID",
    "windlass memory",
)


class Written(NamedTuple):
    """A command of a page."""

    page: str
    text: str


def _commands() -> Iterator[Written]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        blocks = re.findall(r"(?:^    .*\n)+", text, flags=re.MULTILINE)
        blocks += re.findall(r"^```(?:sh|bash|shell)\n(.*?)^```", text, flags=re.M | re.S)
        blocks += [f"{code}\n" for code in re.findall(r"^\| `(windlass [^`]+)` \|", text, re.M)]
        for block in blocks:
            joined = re.sub(r"\\\n\s*", " ", block)
            for line in joined.splitlines():
                # Two spaces or # separate a command from the text about it.
                line = re.split(r"\s+#|(?<=\S)\s{4,}(?=windlass )", line.strip())[0].strip()
                line = re.sub(r"\s{4,}\S.*$", "", line)
                if line.startswith(PROGRAMS):
                    yield Written(page.name, line)


COMMANDS = sorted(set(_commands()))


def _of(program: str) -> list[Written]:
    return [each for each in COMMANDS if each.text.startswith(program)]


def _words(text: str) -> list[str]:
    """The words of a windlass command behind `windlass`, with optional parts."""
    words = shlex.split(re.sub(r"[\[\]](?![^']*')", " ", text))[1:]
    return [word for word in (PLACEHOLDERS.get(word, word) for word in words) if word]


def _name(written: Written) -> str:
    return f"{written.page}: {written.text}"


def test_every_page_is_read() -> None:
    """A change of the pages' layout must not make the other tests empty."""
    counted = {program: len(_of(program)) for program in PROGRAMS}
    assert counted["windlass "] >= 75
    assert min(counted.values()) >= 1
    for light in LIGHT:
        assert any(each.text.startswith(light) for each in COMMANDS), light


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that commands read."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
    save_tiny("Llama", {"max_position_embeddings": 16384}, folder / "MODEL")
    text = (ROOT / "docs" / "serving.md").read_text()
    (block,) = re.findall(r"^```yaml\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    for name in ("serve.yaml", "windlass.yaml"):
        (folder / name).write_text(block)
    ExpertLoad({0: (5, 1, 1, 1, 5, 1, 1, 1)}).write(str(folder / "load.json"))
    return folder


@pytest.mark.parametrize("written", _of("windlass "), ids=_name)
def test_a_command_is_accepted(
    written: Written, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its flags exist and fit together; nothing is loaded."""
    monkeypatch.chdir(folder)
    group = typer.main.get_command(app)
    words = _words(written.text)
    context = group.make_context("windlass", words[:1])
    command = group
    while hasattr(command, "commands"):
        name = words.pop(0)
        assert name in command.commands, f"there is no command {name}"
        command = command.commands[name]
    parsed = command.make_context(command.name, words, parent=context)
    if isinstance(command, ModelCommand):
        given = {k: v for k, v in parsed.params.items() if v is not None and v != []}
        if "config_file" in given:
            return
        options = Options(given)
        options.engine()
        if command.name == "serve":
            options.serve()
            options.gate()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server with the default model's name."""
    with running(card=replace(CARD, name="SmolLM2-135M-Instruct")) as server:
        yield server


@pytest.mark.parametrize(
    "written", [each for each in _of("windlass ") if each.text.startswith(LIGHT)], ids=_name
)
def test_a_light_command_runs(
    written: Written, folder: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    words = _words(written.text)
    if "--url" in words:
        words[words.index("--url") + 1] = server.url
        reply = server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
        words = [reply.json()["id"] if word == "ID" else word for word in words]
    if words[0] == "inspect":
        words += ["--load-format", "dummy", "--device", "cpu"]  # it has no tokenizer
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output


def test_a_config_file_of_the_docs_is_valid(folder: Path) -> None:
    from windlass.cli.config_file import read_config
    from windlass.cli.options import ENGINE_OPTIONS, MODEL_ARGUMENT, SERVE_OPTIONS

    found = read_config(folder / "serve.yaml", [MODEL_ARGUMENT, *ENGINE_OPTIONS, *SERVE_OPTIONS])
    assert len(found) == len(yaml.safe_load((folder / "serve.yaml").read_text()))


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
@pytest.mark.parametrize("written", _of("make "), ids=_name)
def test_a_target_of_make_exists(written: Written) -> None:
    done = subprocess.run(
        ["make", "-n", *shlex.split(written.text)[1:]], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("written", _of("curl "), ids=_name)
def test_a_request_declares_its_body(written: Written) -> None:
    """curl declares a form by default, which the server refuses."""
    assert "Content-Type: application/json" in written.text or " -d " not in written.text


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_the_first_request_of_the_readme(server: Server) -> None:
    (written,) = [each for each in _of("curl ") if each.page == "README.md"]
    words = shlex.split(written.text.replace("http://127.0.0.1:8000", server.url))
    done = subprocess.run([*words, "-s"], capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]


def _python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.M | re.S)


def test_the_figures_of_the_readme_are_those_of_the_benchmarks() -> None:
    readme = (ROOT / "README.md").read_text()
    rows = re.findall(
        r"^\| (?:H200|2 CPU cores).*? \| ([\d.,]+) \| ([\d.,]+) \| ([\d.]+) \|$",
        readme,
        flags=re.MULTILINE,
    )
    assert len(rows) >= 6
    benchmarks = (ROOT / "docs" / "benchmarks.md").read_text()
    for other, own, ratio in rows:
        assert f"| {other} |" in benchmarks
        assert f"| {own} |" in benchmarks
        assert float(own.replace(",", "")) / float(other.replace(",", "")) == pytest.approx(
            float(ratio), abs=0.0051
        )
    found = read_record(ROOT / "benchmarks" / "h200-vllm.json").rows
    ratios = [row["ratio"] for row in found if "copies" not in row["model"]]  # once per figure
    as_fast = sum(ratio >= 1.0 for ratio in ratios)
    assert f"or faster in {as_fast} of {len(ratios)} measured rows" in readme


def test_the_client_of_the_readme(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = [each for each in _python_blocks(ROOT / "README.md") if "OpenAI(" in each]
    exec(block.replace("http://127.0.0.1:8000", server.url), {})
    assert capsys.readouterr().out


@pytest.mark.model
def test_the_offline_api_of_the_readme() -> None:
    (block,) = [each for each in _python_blocks(ROOT / "README.md") if 'LLM("default")' in each]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", block], capture_output=True, text=True, env=environment, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 3


@pytest.mark.parametrize("written", _of("python benchmarks/"), ids=_name)
def test_a_script_exists_and_has_the_flags(written: Written) -> None:
    words = shlex.split(written.text)
    source = (ROOT / words[1]).read_text()
    for flag in (word for word in words if word.startswith("-")):
        assert f'"{flag}"' in source or flag.lstrip("-").replace("-", "_") in source, flag


@pytest.mark.parametrize("written", _of("pip "), ids=_name)
def test_an_extra_exists(written: Written) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in re.findall(r"\[(\w+)\]", written.text):
        assert extra in project["optional-dependencies"]
