"""Every command as a user types it: results on stdout, a paragraph and an exit code for errors."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import typer

from tests.cli.conftest import Invoke
from windlass import __version__
from windlass.cli.chat import interruptible
from windlass.cli.main import _SECTIONS, app
from windlass.cli.prompts import jobs_from_file, parse_line
from windlass.core.expert_load import ExpertLoad, read_placements
from windlass.errors import RequestError
from windlass.kernels.native.compiler import find_compilers

DUMMY = ("--load-format", "dummy", "--num-blocks", "64", "--num-threads", "1")


def test_version(windlass: Invoke) -> None:
    assert windlass("--version").out == f"windlass {__version__}\n"


def test_help_lists_every_command_with_a_whole_sentence(windlass: Invoke) -> None:
    text = windlass("--help").out
    assert "..." not in text.partition("Run:")[2]
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    listed = [name for names in _SECTIONS.values() for name in names]
    assert sorted(listed) == sorted(commands)


@pytest.mark.parametrize("group", ["bench", "cache", "cluster"])
def test_help_of_a_group_has_whole_sentences(windlass: Invoke, group: str) -> None:
    assert "..." not in windlass(group, "--help").out.partition("Commands:")[2]


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "windlass", "--version"]
    assert subprocess.check_output(command, text=True) == f"windlass {__version__}\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["serve", "--prot", "1"], "No such option: --prot"),
        (["serv"], "No such command 'serv'"),
        (["serve", "--port", "x"], "Invalid value for '--port': 'x' is not a whole number."),
        (["serve", "--spec", "ngram", "--spec-tokens", "2.5"], "'2.5' is not a whole number."),
        (["serve", "--spec-threshold", "much"], "'much' is not a number."),
        (["serve", "--port", "70000"], "--port must be between 0 and 65535"),
        (["serve", "--dtype", "int3"], "is not one of 'auto'"),
        (["serve", "--max-body-bytes", "4X"], "'4X' is not a size"),
        (["serve", "--hf-overrides", "{"], "is not JSON"),
        (["serve", "--hf-overrides", "[1]"], "expected a JSON object"),
        (["serve", "--ssl-keyfile", "k"], "--ssl-keyfile and --ssl-certfile go together"),
        (["generate"], "neither is given"),
        (["generate", "-p", "x", "--prompts", "y"], "not both"),
        (["generate", "-p", "x", "--temperature", "-1"], "temperature must be in"),
        (["generate", "-p", "x", "-o", "no/such/folder/out"], "No such file"),
        (["generate", "no-such-model", "-p", "x"], "'no-such-model' was not found"),
        (["chat", "--top-p", "2"], "top_p must be in"),
        (["chat", "--n", "2"], "No such option: --n"),
        (["inspect", "no-such-model"], "'no-such-model' was not found"),
        (["balance-experts", "gone.json", "-o", "p.json", "-tp", "2"], "gone.json: cannot be read"),
        (["balance-experts", "x", "-o", "p.json", "-tp", "1"], "must be at least 2, got 1"),
    ],
)
def test_errors_are_a_paragraph_and_exit_code_2(
    windlass: Invoke, args: list[str], message: str
) -> None:
    outcome = windlass(*args)
    assert outcome.code == 2
    assert message in outcome.err
    assert "Traceback" not in outcome.err


def test_an_unknown_flag_suggests_the_nearest(windlass: Invoke) -> None:
    assert "--port" in windlass("serve", "--prot", "1").err.splitlines()[-1]
    assert "--max-num-seqs" in windlass("inspect", "--max-num-seq", "1").err.splitlines()[-1]


def test_traceback_flag_shows_the_traceback() -> None:
    command = [sys.executable, "-m", "windlass.cli", "inspect", "no-such-model"]
    started = [
        subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"WINDLASS_TRACEBACK": flag},
        )
        for flag in ("0", "1")
    ]
    shown = ["Traceback" in process.communicate()[1] for process in started]
    assert [process.returncode for process in started] == [2, 1]
    assert shown == [False, True]


def test_no_flag_is_cut_off_in_help(windlass: Invoke) -> None:
    for command in ("serve", "chat", "generate", "inspect"):
        outcome = windlass(command, "--help")
        assert outcome.code == 0
        assert "…" not in outcome.out
        assert "\nScheduler:\n" in outcome.out


# ---- inspect -------------------------------------------------------------------------------------


def test_inspect_describes_a_model(windlass: Invoke, chat_model: Path) -> None:
    outcome = windlass("inspect", str(chat_model), *DUMMY)
    assert outcome.code == 0
    for found in ("LlamaForCausalLM", "renders", "qkv_proj", "136.6 KiB"):
        assert found in outcome.out


def test_inspect_as_json(windlass: Invoke, bare_model: Path) -> None:
    found = json.loads(windlass("inspect", str(bare_model), *DUMMY, "--json").out)
    assert found["spec"]["num_layers"] == 2
    assert found["chat_template"]["present"] is False
    chosen = {item["operation"]: item for item in found["kernels"]}
    native = bool(find_compilers()[0])
    assert chosen["attention"]["kernel"] == ("native" if native else "torch")
    assert "CUDA" in chosen["attention"]["refusals"]["triton"]
    # keys and values, 2 layers, 2 heads of 8, halves where the native kernels read them
    assert found["estimate"]["kv_bytes_per_token"] == 2 * 2 * 2 * 8 * (2 if native else 4)


def test_inspect_lists_stored_tensors(windlass: Invoke, chat_model: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    for file in chat_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file({"x.weight": torch.zeros(4, 8)}, tmp_path / "model.safetensors")
    found = json.loads(windlass("inspect", str(tmp_path), "--json", "--tensors").out)
    assert found["formats"] == [{"format": "f32", "tensors": 1, "bytes": 128}]
    assert found["tensors"] == [
        {"name": "x.weight", "format": "f32", "shape": [4, 8], "bytes": 128}
    ]
    assert "x.weight" in windlass("inspect", str(tmp_path), "--tensors").out


def test_inspect_reports_a_failing_template(
    windlass: Invoke, chat_model: Path, tmp_path: Path
) -> None:
    for file in chat_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ messages[9].content.upper() }}")
    found = json.loads(windlass("inspect", str(tmp_path), *DUMMY, "--json").out)
    assert "cannot render" in found["chat_template"]["error"]


# ---- generate ------------------------------------------------------------------------------------


def test_generate_prints_texts(windlass: Invoke, bare_model: Path) -> None:
    args = ("generate", str(bare_model), *DUMMY, "-p", "one", "-p", "two", "--max-tokens", "3")
    outcome = windlass(*args, "--temperature", "0", "--no-progress")
    assert outcome.code == 0
    assert "requests: 2, prompt tokens: 6, generated tokens: 6" in outcome.err
    assert windlass(*args, "--temperature", "0", "--no-progress").out == outcome.out


def test_generate_writes_jsonl(windlass: Invoke, chat_model: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    conversation = [{"role": "user", "content": "x"}]
    lines = [
        {"id": "chat", "messages": conversation, "n": 2, "max_tokens": 2, "logprobs": 0},
        {"prompt": "a"},
    ]
    prompts.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    flags = ("--max-tokens", "4", "--prompts", str(prompts), "-o", str(out))
    outcome = windlass("generate", str(chat_model), *DUMMY, *flags)
    assert (outcome.code, outcome.out) == (0, "")
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(item["id"], item.get("index")) for item in records] == [
        ("chat", 0),
        ("chat", 1),
        ("2", None),
    ]
    assert records[0]["messages"] == conversation
    assert len(records[0]["logprobs"]) == 2
    assert records[2]["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": 4,
        "cached_tokens": 0,
    }
    assert records[2]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "expected an object"),
        ("{}", "needs either prompt or messages"),
        ('{"prompt": "a", "messages": []}', "needs either"),
        ('{"prompt": 1}', "prompt must be a string"),
        ('{"messages": []}', "at least one message"),
        ('{"messages": [{"role": "user"}]}', "a message needs role and content"),
        ('{"prompt": "a", "temprature": 1}', "Did you mean 'temperature'"),
        ('{"prompt": "a", "temperature": "hot"}', "temperature must be in"),
        ('{"prompt": "a", "id": null}', "id must be"),
    ],
)
def test_a_malformed_line_is_rejected(line: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        parse_line(line, "1")


def test_a_malformed_line_is_reported_before_the_model_is_loaded(
    windlass: Invoke, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"prompt": }\n')
    with pytest.raises(RequestError, match="line 3: is not JSON"):
        jobs_from_file(str(file))
    outcome = windlass("generate", "no-such-model", "--prompts", str(file))
    assert outcome.code == 2
    assert "line 3" in outcome.err


def test_a_file_without_prompts_is_an_error(windlass: Invoke) -> None:
    outcome = windlass("generate", "--prompts", "-", stdin="\n")
    assert (outcome.code, "holds no prompts" in outcome.err) == (2, True)


# ---- chat ----------------------------------------------------------------------------------------


def test_chat_reads_lines_from_a_pipe(windlass: Invoke, chat_model: Path) -> None:
    args = ("chat", str(chat_model), *DUMMY, "--temperature", "0", "--max-tokens", "4")
    once = windlass(*args, stdin="Hello\n")
    assert once.code == 0
    again = windlass(*args, stdin="Hello\n/clear\n/system\n\n/what\nHello\n/exit\nnever read\n")
    assert again.out == once.out * 2
    assert "unknown command /what" in again.err


def test_chat_uses_the_system_message(windlass: Invoke, chat_model: Path) -> None:
    args = ("chat", str(chat_model), *DUMMY, "--temperature", "0", "--max-tokens", "8")
    by_flag = windlass(*args, "--system", "Be brief", stdin="Hello\n")
    by_command = windlass(*args, stdin="/system Be brief\nHello\n")
    assert by_flag.out == by_command.out


def test_chat_needs_a_template(windlass: Invoke, bare_model: Path) -> None:
    outcome = windlass("chat", str(bare_model), *DUMMY, stdin="Hello\n")
    assert (outcome.code, "has no chat template" in outcome.err) == (2, True)


def test_chat_ends_when_a_piped_message_is_rejected(windlass: Invoke, chat_model: Path) -> None:
    outcome = windlass("chat", str(chat_model), *DUMMY, stdin="x" * 500 + "\n")
    assert (outcome.code, "Shorten the prompt" in outcome.err) == (2, True)


def test_the_first_ctrl_c_is_recorded_and_the_second_raises() -> None:
    with interruptible() as interrupts:
        signal.raise_signal(signal.SIGINT)
        assert interrupts.received
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


# ---- serve ---------------------------------------------------------------------------------------


def test_serve_prints_its_choices_and_responds(chat_model: Path) -> None:
    command = [sys.executable, "-m", "windlass.cli", "serve", str(chat_model), *DUMMY]
    with subprocess.Popen(
        [*command, "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        try:
            shown = _until_ready(server)
            url = re.search(r"serves at (\S+)", shown)
            assert url is not None
            with urllib.request.urlopen(f"{url[1]}/health", timeout=30) as answer:
                assert answer.status == 200
            server.send_signal(signal.SIGINT)
            assert server.wait(timeout=60) == 0
        finally:
            server.kill()
    for found in ("kernels", "load weights", "weights", "/v1/chat/completions"):
        assert found in shown


def _until_ready(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    shown = ""
    while "curl" not in shown:
        line = server.stdout.readline()
        assert line, f"the server ended: {shown}"
        shown += line
    return shown


def test_serve_refuses_a_port_in_use(windlass: Invoke, chat_model: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        outcome = windlass("serve", str(chat_model), *DUMMY, "--port", port)
    assert (outcome.code, "cannot listen on" in outcome.err) == (2, True)


def test_balance_experts_shows_the_imbalance_before_and_after(
    windlass: Invoke, tmp_path: Path
) -> None:
    load, output = tmp_path / "load.json", tmp_path / "placement.json"
    ExpertLoad({1: (90, 80, 10, 20), 2: (1, 1, 1, 1)}).write(str(load))
    args = ("balance-experts", str(load), "-o", str(output), "-tp", "2")
    shown = windlass(*args)
    assert shown.code == 0
    assert shown.out.splitlines() == [
        "layer  before  after",
        "    1    1.70   1.00",
        "    2    1.00   1.00",
        "worst    1.70   1.00",
    ]
    assert read_placements(str(output))[1].ranks == ((0, 2), (1, 3))
    assert json.loads(windlass(*args, "--json").out)["1"] == {"before": 1.7, "after": 1.0}
    ExpertLoad({1: (0, 0)}).write(str(load))
    assert "no token was counted" in windlass(*args).err
