"""`windlass run-batch`: a real tiny model, and runs that are killed."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import warm_start
from tests.cli.conftest import Invoke
from windlass.errors import ConfigError
from windlass.tools.run_batch import RunBatch, _PartialResults

ROOT = Path(__file__).parents[2]


def line(custom_id: str, prompt: str = "Hi", **body: Any) -> str:
    body = {"prompt": prompt, "max_tokens": 4} | body
    fields = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(fields) + "\n"


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def test_a_file_runs_with_a_real_model(
    windlass: Invoke,
    chat_model: Path,
    tmp_path: Path,
) -> None:
    chat = {
        "custom_id": "c",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    }
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(line("a") + "\n" + json.dumps(chat) + "\n" + line("bad", max_tokens="x"))
    flags = ["--load-format", "dummy", "--served-model-name", "tiny", "--num-blocks", "64"]
    command = ["run-batch", str(chat_model), "-i", str(source), "-o", str(output), *flags]
    outcome = windlass(*command)
    assert outcome.code == 0, outcome.err
    assert "2 requests completed, 1 failed" in outcome.err
    found = results(output)
    assert [each["custom_id"] for each in found] == ["a", "c", "bad"]
    assert [each["response"]["status_code"] for each in found] == [200, 200, 400]
    assert found[1]["response"]["body"]["object"] == "chat.completion"
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl"}
    outcome = windlass(*command)
    assert outcome.code == 2
    assert "exists already" in outcome.err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (line("a") + line("a"), "line 2: the custom_id 'a' was used"),
        (line("a", model="gpt"), "line 1: the model 'gpt' does not exist"),
        ("", "no requests"),
    ],
)
def test_bad_files_are_refused_before_the_model_is_loaded(
    windlass: Invoke,
    bare_model: Path,
    tmp_path: Path,
    text: str,
    words: str,
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(text)
    command = ["run-batch", str(bare_model), "--load-format", "dummy"]
    outcome = windlass(*command, "-i", str(source), "-o", str(output))
    assert outcome.code == 2
    assert words in outcome.err
    assert not output.exists()


PROGRAM = """
if __name__ == "__main__":  # the engine process imports this file, too
    import sys
    import time
    from pathlib import Path
    from types import SimpleNamespace
    from tests.serve.fakes import CARD, Options, counting
    from windlass.config import EngineConfig, ServeConfig
    from windlass.errors import EngineError
    from windlass.serve.client import EngineClient
    from windlass.tools import run_batch

    run_batch.open_model = lambda config: SimpleNamespace(card=CARD, source=None)
    run_batch.make_client = lambda config: EngineClient(None)
    run_batch.build_replicas = lambda config, source: [counting(Options(max_num_seqs=2))]
    run = run_batch.RunBatch(Path(sys.argv[1]), Path(sys.argv[2]), False)
    try:
        print(run_batch.run_batch(run, EngineConfig(), ServeConfig()))
    except EngineError as error:
        sys.exit(str(error))
"""


def test_killed_runs_resume(tmp_path: Path) -> None:
    program, source, output = (tmp_path / name for name in ("program.py", "in.jsonl", "out.jsonl"))
    program.write_text(PROGRAM)
    names = [f"request-{i}" for i in range(40)]
    source.write_text("".join(line(name, "SLOW") for name in names))
    command = [sys.executable, str(program), str(source), str(output)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    database = tmp_path / "out.jsonl.partial" / "results.sqlite"
    num_done = 0
    for _ in range(2):
        process = warm_start.start(command, env=environment)
        try:
            before, num_done = num_done, _num_done(database)
            assert num_done >= before
            while num_done < before + 6:
                assert process.poll() is None
                time.sleep(0.02)
                num_done = _num_done(database)
        finally:
            process.kill()
            process.wait()
    assert 0 < num_done < len(names)
    assert not output.exists()
    source.write_text(source.read_text() + line("more"))
    with pytest.raises(ConfigError, match="begun with other options: input_sha256"):
        _PartialResults(RunBatch(source, output, False), "counter")
    source.write_text("".join(line(name, "SLOW") for name in names))
    with warm_start.start(command, env=environment, stdout=subprocess.PIPE) as ended:
        assert ended.communicate()[0] == f"Counts(completed={len(names)}, failed=0)\n"
    assert [each["custom_id"] for each in results(output)] == names
    assert not database.parent.exists()


def _num_done(database: Path) -> int:
    try:
        connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
        with connection:
            return int(connection.execute("SELECT COUNT(*) FROM results").fetchone()[0])
    except sqlite3.OperationalError:  # not created yet
        return 0
