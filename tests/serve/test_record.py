"""Recorded traffic: its content, the omitted fields, and the size limit."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from openai import BadRequestError

from tests.serve.conftest import running
from tests.serve.fakes import Bytes
from windlass.config import ServeConfig
from windlass.errors import ConfigError
from windlass.serve.live_config import LiveConfig
from windlass.serve.record import Recorder, make_recorder


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_only_roles_and_texts_are_written(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    with running(record_traffic=str(path), record_share=1.0, api_key=("secret",)) as server:
        client = server.openai.with_options(api_key="secret")
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello", "name": "jane"},
        ]
        for stream in (False, True):
            response = client.chat.completions.create(
                model="counter",
                messages=messages,  # type: ignore[arg-type]
                max_tokens=3,
                stream=stream,
                user="jane@example.org",
                extra_body={"cache_salt": "tenant-7", "request_id": f"call-{stream}"},
            )
            if stream:
                list(response)  # type: ignore[call-overload]
        client.completions.create(
            model="counter", prompt=["one", "two"], max_tokens=2, n=2, user="jane@example.org"
        )
        client.completions.create(model="counter", prompt=[104, 105], max_tokens=1)
        with pytest.raises(BadRequestError):
            client.completions.create(model="counter", prompt="refused", max_tokens=-1)
    chat = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": lines(path)[0]["messages"][-1]["content"]},  # type: ignore[index]
        ]
    }
    assert len(chat["messages"][-1]["content"]) == 3
    written = lines(path)
    assert written[:2] == [chat, chat]
    assert [record["text"][:3] for record in written[2:]] == ["one", "two", "hic"]  # type: ignore[index]
    assert len(written) == 5
    raw = path.read_text()
    for word in ("jane", "secret", "tenant", "call-", "chatcmpl"):
        assert word not in raw
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def test_recording_stops_at_the_size_limit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "traffic.jsonl"
    with running(record_traffic=str(path), record_share=1.0, record_max_bytes=100) as server:
        for _ in range(5):
            assert server.complete(max_tokens=20).status_code == 200
    assert 0 < path.stat().st_size <= 100
    assert len(lines(path)) == 2
    assert caplog.text.count("recording stops") == 1


def test_the_recorded_share_depends_on_the_id(tmp_path: Path) -> None:
    config = LiveConfig(
        ServeConfig(record_traffic="traffic", record_share=0.25, record_max_bytes=1000)
    )
    recorder = Recorder(tmp_path / "t.jsonl", config, Bytes())
    chosen = [recorder.chooses(f"cmpl-{i}") for i in range(4000)]
    recorder.close()
    again = Recorder(tmp_path / "t.jsonl", config, Bytes())
    assert chosen == [again.chooses(f"cmpl-{i}") for i in range(4000)]
    again.close()
    assert 0.22 < sum(chosen) / 4000 < 0.28


def test_a_bad_path_is_an_error_at_start(tmp_path: Path) -> None:
    config = ServeConfig(record_traffic=str(tmp_path / "no" / "t.jsonl"))
    with pytest.raises(ConfigError, match=r"--record-traffic .*cannot be written"):
        make_recorder(LiveConfig(config), Bytes())
    with pytest.raises(ConfigError, match="--record-share"):
        ServeConfig(record_share=0.0)
