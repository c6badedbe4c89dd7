"""Files and batches, with the OpenAI client against a real server."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types import Batch
from starlette.requests import Request
from starlette.responses import Response

from tests import warm_start
from tests.serve.conftest import Server, running, wait_until
from tests.serve.fakes import Options, counting
from windlass.config import ServeConfig
from windlass.errors import ConfigError
from windlass.serve.batch import runner
from windlass.serve.batch.dispatch import Dispatcher
from windlass.serve.batch.lines import LineRules
from windlass.serve.batch.runner import BatchRunner
from windlass.serve.batch.service import make_batch_service
from windlass.serve.batch.store import BatchRecord, FileRecord, Page, Store
from windlass.serve.live_config import LiveConfig

ROOT = Path(__file__).parents[2]
ENDED = ("completed", "failed", "expired", "cancelled")
CHAT = "/v1/chat/completions"


DEEP = (
    b'{"custom_id": "x", "method": "POST", "url": "/v1/chat/completions", "body": {"model": '
    + b"[" * 10_000
    + b"]" * 10_000
    + b"}}\n"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batches") / "data"


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with running(data_dir=str(folder), max_file_bytes=100_000) as server:
        yield server


def line(custom_id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    if url == CHAT:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3} | body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def jsonl(*lines: Any) -> bytes:
    return b"".join(each if isinstance(each, bytes) else dumped(each) for each in lines)


def dumped(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


def submit(client: OpenAI, text: bytes, **options: Any) -> Batch:
    file = client.files.create(file=("in.jsonl", text), purpose="batch")
    options = {"endpoint": CHAT, "completion_window": "24h"} | options
    return client.batches.create(input_file_id=file.id, **options)


def ended(client: OpenAI, batch: Batch) -> Batch:
    found = [batch]

    def has_ended() -> bool:
        found.append(client.batches.retrieve(batch.id))
        return found[-1].status in ENDED

    wait_until(has_ended)
    return found[-1]


def read(client: OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(text) for text in client.files.content(file_id).text.splitlines()]


def test_a_batch_completes(server: Server) -> None:
    client = server.openai
    text = jsonl(*(line(f"r{i}", max_tokens=i + 1) for i in range(5)), line("bad", temperature="x"))
    batch = submit(client, text, metadata={"team": "search"})
    assert (batch.status, batch.object, batch.metadata) == (
        "validating",
        "batch",
        {"team": "search"},
    )
    batch = ended(client, batch)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 6, "completed": 5, "failed": 1}
    assert batch.created_at <= batch.in_progress_at <= batch.completed_at  # type: ignore[operator]
    assert batch.expires_at == batch.created_at + 86_400
    results = read(client, batch.output_file_id)
    assert [each["custom_id"] for each in results] == [f"r{i}" for i in range(5)]
    for i, each in enumerate(results):
        assert each["error"] is None
        assert each["response"]["status_code"] == 200
        body = each["response"]["body"]
        assert body["object"] == "chat.completion"
        assert body["usage"]["completion_tokens"] == i + 1
    numbers = [each["response"]["body"]["usage"] for each in results]
    assert batch.usage is not None
    assert batch.usage.input_tokens == sum(each["prompt_tokens"] for each in numbers)
    assert batch.usage.output_tokens == 1 + 2 + 3 + 4 + 5
    assert batch.usage.total_tokens == batch.usage.input_tokens + 15
    direct = server.chat(max_tokens=5).json()["choices"]
    assert results[4]["response"]["body"]["choices"] == direct
    (refused,) = read(client, batch.error_file_id)
    assert refused["custom_id"] == "bad"
    assert refused["response"]["status_code"] == 400
    assert refused["response"]["body"]["error"]["param"] == "temperature"
    assert client.files.retrieve(batch.output_file_id or "").purpose == "batch_output"


@pytest.mark.parametrize(
    ("url", "body", "kind"),
    [
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 2}, "text_completion"),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 2}, "response"),
        ("/v1/embeddings", {"input": ["Hi", "you"]}, "list"),
    ],
)
def test_other_endpoints(server: Server, url: str, body: dict[str, Any], kind: str) -> None:
    client = server.openai
    batch = ended(client, submit(client, jsonl(line("a", url, **body)), endpoint=url))
    (result,) = read(client, batch.output_file_id)
    assert result["response"]["body"]["object"] == kind


@pytest.mark.parametrize(
    ("bad", "code", "words"),
    [
        (b"{nonsense\n", "invalid_json_line", "not valid JSON"),
        (dumped(line("ok")), "duplicate_custom_id", "'ok' was used"),
        (dumped(line("x", "/v1/completions", prompt="Hi")), "invalid_url", "url must be"),
        (dumped(line("x", model="gpt-9")), "model_not_found", "gpt-9"),
        (dumped(line("x", stream=True)), "invalid_request", "stream"),
        (dumped({**line("x"), "method": "GET"}), "invalid_method", "POST"),
        (dumped({"custom_id": "x"}), "missing_required_parameter", "method"),
        (dumped({**line("x"), "body": []}), "invalid_request", "object"),
        (dumped(line("")), "invalid_custom_id", "1 to"),
        (b"[]\n", "missing_required_parameter", "object"),
        (DEEP, "invalid_json_line", "not valid JSON"),
    ],
)
def test_bad_lines_fail_the_batch_with_their_numbers(
    server: Server, bad: bytes, code: str, words: str
) -> None:
    client = server.openai
    batch = ended(client, submit(client, jsonl(line("ok"), b"\n", bad)))
    assert batch.status == "failed"
    assert batch.failed_at is not None
    assert batch.errors is not None
    assert batch.errors.data is not None
    (error,) = batch.errors.data
    assert (error.code, error.line) == (code, 3)
    assert words in (error.message or "")
    assert batch.output_file_id is None
    assert batch.error_file_id is None


def test_an_empty_file_fails(server: Server) -> None:
    batch = ended(server.openai, submit(server.openai, b"\n\n"))
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert batch.errors.data[0].code == "empty_file"


def test_a_cancelled_batch_has_a_line_for_every_request(server: Server) -> None:
    client = server.openai
    slow = {"messages": [{"role": "user", "content": "SLOW"}], "max_tokens": 1500}
    batch = submit(client, jsonl(line("quick"), *(line(f"s{i}", **slow) for i in range(3))))

    def counted() -> int:
        counts = client.batches.retrieve(batch.id).request_counts
        return counts.completed if counts is not None else 0

    wait_until(lambda: counted() == 1)
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = ended(client, batch)
    assert batch.status == "cancelled"
    assert batch.cancelled_at is not None
    assert [each["custom_id"] for each in read(client, batch.output_file_id)] == ["quick"]
    errors = read(client, batch.error_file_id)
    assert [each["custom_id"] for each in errors] == ["s0", "s1", "s2"]
    assert {each["error"]["code"] for each in errors} == {"batch_cancelled"}
    wait_until(lambda: server.http.get("/load").json()["num_requests_running"] == 0)
    with pytest.raises(openai.ConflictError, match="cancelled cannot be cancelled"):
        client.batches.cancel(batch.id)


def test_lists_have_pages(server: Server) -> None:
    client = server.openai
    made = [submit(client, jsonl(line("a"))).id for _ in range(3)]
    page = client.batches.list(limit=2)
    assert [each.id for each in page.data] == made[:0:-1]
    assert page.has_more
    assert [each.id for each in client.batches.list(limit=1)][:3] == made[::-1]
    files = [each.id for each in client.files.list(purpose="batch", order="asc", limit=2)]
    assert len(files) == len(set(files)) > 3
    for bad in ("limit=0", "limit=x", "after=batch_nothing"):
        assert server.http.get(f"/v1/batches?{bad}").status_code == 400


def test_files(server: Server, folder: Path) -> None:
    client = server.openai
    name = "../../etc/été.jsonl"
    text = b"x" * 70_000 + b"\r\n--boundary"
    file = client.files.create(
        file=(name, text),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert (file.bytes, file.purpose, file.status) == (len(text), "batch", "processed")
    assert file.filename == "été.jsonl"
    assert file.expires_at == file.created_at + 3600
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).read() == text
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
    assert {path.name for path in folder.iterdir()} <= {
        "batches.sqlite",
        "batches.sqlite-wal",
        "batches.sqlite-shm",
        "files",
        "lock",
    }
    for path in (folder, folder / "files", *(folder / "files").iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
        assert path.name in ("data", "files") or path.name.startswith("file-")


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        ({"files": {"file": b"x" * 100_001}, "data": {"purpose": "batch"}}, 413, "100,000"),
        ({"files": {"file": b"x" * 900_000}, "data": {"purpose": "batch"}}, 413, "100,000"),
        ({"files": {"file": b"x"}}, 400, "purpose is missing"),
        ({"files": {"file": b"x"}, "data": {"purpose": "vision"}}, 400, "'vision'"),
        ({"files": {"file": b"x"}, "data": {"purpose": "batch", "x": "1"}}, 400, "unknown field"),
        ({"files": {"other": b"x"}, "data": {"purpose": "batch"}}, 400, "file is missing"),
        ({"json": {}}, 415, "multipart/form-data"),
        (
            {
                "content": b"--b\r\nno end",
                "headers": {"Content-Type": "multipart/form-data; boundary=b"},
            },
            400,
            "ends within",
        ),
        (
            {
                "files": {"file": b"x"},
                "data": {"purpose": "batch"},
                "headers": {"Origin": "http://evil.example"},
            },
            403,
            "evil.example",
        ),
    ],
)
def test_bad_uploads(
    server: Server, folder: Path, options: dict[str, Any], status: int, words: str
) -> None:
    before = set((folder / "files").iterdir())
    response = server.http.post("/v1/files", **options)
    assert response.status_code == status, response.text
    assert words in response.json()["error"]["message"]
    assert set((folder / "files").iterdir()) == before
    assert server.metric("http_buffered_body_bytes") == 0


@pytest.mark.parametrize("http_workers", [1, 2])
def test_an_upload_is_not_kept_in_memory(tmp_path: Path, http_workers: int) -> None:
    limits = {"max_buffered_body_bytes": 2**22, "max_body_bytes": 2**19}
    with running(data_dir=str(tmp_path / "d"), http_workers=http_workers, **limits) as server:
        text = b"0123456789abcde\n" * 2**20
        file = server.openai.files.create(file=("big.jsonl", text), purpose="batch")
        assert server.openai.files.content(file.id).read() == text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"completion_window": "soon"}, "completion_window"),
        ({"endpoint": "/v1/images"}, "endpoint"),
        ({"input_file_id": "file-nothing"}, "id"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, None),
    ],
)
def test_bad_batches(server: Server, body: dict[str, Any], param: str | None) -> None:
    file = server.openai.files.create(file=("a", jsonl(line("a"))), purpose="batch")
    given = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"} | body
    response = server.http.post("/v1/batches", json=given)
    assert response.status_code == (404 if param == "id" else 400), response.text
    if param is not None:
        assert response.json()["error"]["param"] == param


def test_an_input_file_cannot_be_deleted_while_it_is_used(server: Server) -> None:
    client = server.openai
    slow = {"messages": [{"role": "user", "content": "SLOW"}], "max_tokens": 1500}
    batch = submit(client, jsonl(line("a", **slow)))
    with pytest.raises(openai.ConflictError, match=batch.id):
        client.files.delete(batch.input_file_id)
    client.batches.cancel(batch.id)
    ended(client, batch)
    assert client.files.delete(batch.input_file_id).deleted


def test_keys_do_not_see_each_other(tmp_path: Path) -> None:
    with running(data_dir=str(tmp_path / "data"), api_key=("one", "two")) as server:
        one, two = (
            OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
            for key in ("one", "two")
        )
        batch = ended(one, submit(one, jsonl(line("a"))))
        assert batch.status == "completed"
        assert len(read(one, batch.output_file_id)) == 1
        for call in (
            lambda: two.batches.retrieve(batch.id),
            lambda: two.batches.cancel(batch.id),
            lambda: two.files.content(batch.output_file_id or ""),
            lambda: two.files.retrieve(batch.input_file_id),
            lambda: two.files.delete(batch.input_file_id),
            lambda: two.batches.create(
                input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                call()
        assert two.batches.list().data == []
        assert two.files.list().data == []
        assert server.http.get("/v1/files").status_code == 401


def test_without_a_folder_files_are_refused() -> None:
    with running() as server, pytest.raises(openai.BadRequestError, match="--data-dir"):
        server.openai.files.create(file=("a", b"x"), purpose="batch")


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        make_batch_service(LiveConfig(ServeConfig(data_dir=str(tmp_path))), None)  # type: ignore[arg-type]


def test_a_full_disk_holds_up_a_batch_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "RETRY_S", 0.01)
    stores = []
    make = runner.BatchRunner.__init__

    def remember(self: Any, store: Any, *args: Any) -> None:
        stores.append(store)
        make(self, store, *args)

    monkeypatch.setattr(runner.BatchRunner, "__init__", remember)
    with running(data_dir=str(tmp_path / "data")) as server:
        client = server.openai
        slow = {"messages": [{"role": "user", "content": "SLOW"}], "max_tokens": 60}
        batch = submit(client, jsonl(*(line(f"a{i}", logprobs=True, **slow) for i in range(3))))
        wait_until(lambda: client.batches.retrieve(batch.id).status == "in_progress")
        connection = stores[0].database._connection
        full = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count={full}")

        def problem() -> str:
            errors = client.batches.retrieve(batch.id).errors
            return str(errors.data[0].message) if errors and errors.data else ""

        wait_until(lambda: "is full" in problem())
        assert client.batches.retrieve(batch.id).status == "in_progress"
        assert server.chat(max_tokens=1).status_code == 200
        connection.execute("PRAGMA max_page_count=1000000")
        batch = ended(client, batch)
        assert batch.status == "completed"
        assert batch.errors is None
        assert len(read(client, batch.output_file_id)) == 3


PROGRAM = """
import sys
from tests.serve.fakes import CARD, counting
from windlass.config import ServeConfig
from windlass.serve.client import EngineClient
from windlass.serve.launch import serve

if __name__ == "__main__":
    config = ServeConfig(port=0, data_dir=sys.argv[1], max_num_batch_reqs=4)
    sys.exit(serve(EngineClient(counting()), lambda: CARD, config, lambda _, url: print(url, flush=True)))
"""


def test_kill_9_loses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    program, data = tmp_path / "program.py", tmp_path / "data"
    program.write_text(PROGRAM)
    slow = {"messages": [{"role": "user", "content": "SLOW"}], "max_tokens": 4}
    names = [f"request-{i}" for i in range(60)]
    batch: Batch | None = None
    num_done = 0
    for _ in range(3):
        process = warm_start.start(
            [sys.executable, str(program), str(data)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert process.stdout is not None
        try:
            client = OpenAI(base_url=f"{process.stdout.readline().strip()}/v1", api_key="none")
            if batch is None:
                batch = submit(client, jsonl(*(line(name, **slow) for name in names)))
            before, num_done = num_done, _num_done(client, batch.id)
            assert num_done >= before  # what was counted is still there
            while num_done < before + 9:
                time.sleep(0.02)
                num_done = _num_done(client, batch.id)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
    assert batch is not None
    assert 0 < num_done < len(names)
    with running(data_dir=str(data)) as server:
        batch = ended(server.openai, batch)
        assert batch.status == "completed"
        results = read(server.openai, batch.output_file_id)
        assert [each["custom_id"] for each in results] == names
        assert batch.request_counts is not None
        assert batch.request_counts.completed == len(names)


def _num_done(client: OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    return counts.completed if counts is not None else 0


def test_requests_that_fail_with_the_engine_end_in_the_error_file(tmp_path: Path) -> None:
    with running(data_dir=str(tmp_path / "data")) as server:
        client = server.openai
        crash = {"messages": [{"role": "user", "content": "CRASH"}]}
        batch = ended(client, submit(client, jsonl(line("good"), line("bad", **crash))))
        assert batch.status == "completed"
        assert [each["custom_id"] for each in read(client, batch.output_file_id)] == ["good"]
        (error,) = read(client, batch.error_file_id)
        assert error["response"]["status_code"] == 422


def test_head_is_answered_where_get_is(server: Server) -> None:
    for path in ("/health", "/health/live", "/health/ready", "/ping", "/v1/models", "/v1/batches"):
        response = server.http.head(path)
        assert (response.status_code, response.content) == (200, b"")
        assert int(response.headers["content-length"]) > 0
    assert httpx.head(f"{server.url}/v1/nothing").status_code == 404


def test_a_live_request_overtakes_a_batch(tmp_path: Path) -> None:
    options = Options(max_num_seqs=1)
    with running(counting(options), data_dir=str(tmp_path / "d"), max_num_batch_reqs=8) as server:
        client = server.openai
        slow = {"messages": [{"role": "user", "content": "SLOW"}], "max_tokens": 20}
        batch = submit(client, jsonl(*(line(f"r{i}", **slow) for i in range(8))))
        wait_until(lambda: _num_done(client, batch.id) >= 1)
        assert server.chat(max_tokens=1).status_code == 200
        assert _num_done(client, batch.id) < 8  # in order of arrival, it would be the last
        assert ended(client, batch).status == "completed"


def test_a_batch_expires(tmp_path: Path) -> None:
    now = [1_000_000.0]
    calls: list[str] = []

    async def answer(request: Request) -> Response:
        calls.append((await request.json())["say"])
        if calls[-1] == "wait":
            await asyncio.Event().wait()
        return Response(b'{"said": true}')

    async def main() -> tuple[BatchRecord, list[dict[str, Any]]]:
        store = Store(tmp_path / "data", lambda: now[0])
        store.path_of("file-a").write_bytes(
            jsonl(*(line(name, "/x", say=name) for name in ("quick", "wait")))
        )
        record = FileRecord(
            id="file-a", owner="me", filename="a", purpose="batch", bytes=1, created_at=0
        )
        await store.add_file(record)
        await store.add_batch(
            BatchRecord(
                id="batch_a",
                owner="me",
                status="validating",
                endpoint="/x",
                input_file_id="file-a",
                completion_window="1h",
                created_at=store.now(),
                expires_at=store.now() + 3_600,
                output_expires_after_s=7_200,
            )
        )
        rules = LineRules(urls=("/x",), max_body_bytes=1_000)
        batches = BatchRunner(store, Dispatcher({"/x": answer}, 2), lambda _: rules)
        running = asyncio.create_task(batches.run_forever())
        while (await store.batch("batch_a", "me"))[1].completed == 0:
            await asyncio.sleep(0.01)
        now[0] += 3_600
        batches.wake()
        while (await store.batch("batch_a", "me"))[0].status != "expired":
            await asyncio.sleep(0.01)
        batch = (await store.batch("batch_a", "me"))[0]
        errors = store.path_of(batch.error_file_id or "").read_text().splitlines()
        now[0] += 7_200
        await store.delete_expired_files()
        files = (await store.files("me", Page(None, 10), None))[0]
        assert [each.id for each in files] == ["file-a"]
        running.cancel()
        await asyncio.wait([running])
        store.database.close()
        return batch, [json.loads(text) for text in errors]

    batch, errors = asyncio.run(main())
    assert calls == ["quick", "wait"]
    assert (batch.expired_at, batch.completed, batch.failed) == (1_003_600, 1, 1)
    assert [(each["custom_id"], each["error"]["code"]) for each in errors] == [
        ("wait", "batch_expired")
    ]
