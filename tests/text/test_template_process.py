"""Chat templates run in a process that is killed when a render exceeds its time or memory limit."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from windlass.errors import CapacityError, ConfigError, RequestError, WorkerDied
from windlass.text import template_process
from windlass.text.template_process import TemplateProcess
from windlass.text.template_worker import RenderJob, TemplateSource

PLAIN = "{{ bos }}{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
# Reached only by conversations of five messages: the probe at start must pass.
TRAPS = {
    "loops": ENDLESS,
    "recursion": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "one call into C": "{{ ((messages | length) ** (10 ** 8)) % 7 }}",
}


@pytest.fixture(autouse=True)
def _short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "RENDER_TIMEOUT_S", 2.0)


@contextmanager
def started(text: str, **defaults: Any) -> Iterator[TemplateProcess]:
    process = TemplateProcess(TemplateSource(text, {"bos": "<s>"}, defaults))
    try:
        yield process
    finally:
        process.close()
        assert multiprocessing.active_children() == []


def conversation(num_messages: int, max_chars: int = 10_000, **options: Any) -> RenderJob:
    user = {"role": "user", "content": "x"}
    return RenderJob(messages=[user] * num_messages, max_chars=max_chars, **options)


def render(process: TemplateProcess, job: RenderJob) -> str:
    return asyncio.run(process.render(job))


def test_the_process_renders_like_the_template() -> None:
    source = PLAIN + "{% if think %}T{% endif %}{% if add_generation_prompt %}>{% endif %}"
    with started(source, think=True) as process:
        assert render(process, conversation(2)) == "<s>user:x\nuser:x\nT>"
        assert render(process, conversation(1, options={"think": False})) == "<s>user:x\n>"
        job = conversation(1, add_generation_prompt=False)
        assert render(process, job) == "<s>user:x\nT"


def test_refusals_name_their_field() -> None:
    with started(PLAIN + "{{ 1 / (messages | length - 4) }}") as process:
        with pytest.raises(RequestError, match=r"line 2: .*zero") as caught:
            render(process, conversation(4))
        assert caught.value.param == "messages"
        with pytest.raises(RequestError, match="must not set") as caught:
            render(process, conversation(1, options={"messages": []}))
        assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize("trap", TRAPS)
def test_an_endless_render_is_stopped(trap: str) -> None:
    text = PLAIN + "{% if messages | length == 5 %}" + TRAPS[trap] + "{% endif %}"
    with started(text) as process:
        with pytest.raises(RequestError, match=r"was stopped|GiB of memory"):
            render(process, conversation(5))
        assert render(process, conversation(1)) == "<s>user:x\n"  # from the replacement process


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces the limit")
@pytest.mark.parametrize(
    "bomb", ["{{ messages[0].content * 10**10 }}", "{{ messages[0].content.ljust(10**10) }}"]
)
def test_memory_is_limited(bomb: str) -> None:
    with started(PLAIN + "{% if messages | length == 5 %}" + bomb + "{% endif %}") as process:
        with pytest.raises(RequestError, match=r"GiB of memory|refused"):
            render(process, conversation(5))
        assert render(process, conversation(1)) == "<s>user:x\n"


def test_a_prompt_that_cannot_fit_is_refused_in_the_process() -> None:
    with (
        started(PLAIN) as process,
        pytest.raises(CapacityError, match=r"703 characters.* holds at most 500") as caught,
    ):
        render(process, conversation(100, max_chars=500))
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{% for m in messages %}", "does not parse"),
        ("{{ raise_exception('no users here') }}", "no users here"),
        (ENDLESS, "was stopped: it took longer than 2 s .*--chat-template"),
    ],
)
def test_an_unusable_template_is_an_error_at_start(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TemplateProcess(TemplateSource(text))
    assert multiprocessing.active_children() == []


def test_warnings_of_the_probe_are_returned() -> None:
    source = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
    with started(source) as process:
        assert process.warnings == ("the chat template drops system messages",)


def test_a_process_that_died_is_replaced() -> None:
    with started(PLAIN) as process:
        (child,) = multiprocessing.active_children()
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        with pytest.raises(WorkerDied, match="Send the request again"):
            render(process, conversation(1))
        assert render(process, conversation(1)) == "<s>user:x\n"


def test_closing_abandons_a_render() -> None:
    async def close_while_rendering(process: TemplateProcess) -> None:
        rendering = asyncio.create_task(process.render(conversation(5)))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(process.close)
        with pytest.raises(WorkerDied):
            await rendering

    text = PLAIN + "{% if messages | length == 5 %}" + ENDLESS + "{% endif %}"
    process = TemplateProcess(TemplateSource(text))
    asyncio.run(close_while_rendering(process))
    assert multiprocessing.active_children() == []
