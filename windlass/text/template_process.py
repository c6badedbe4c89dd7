"""Renders chat templates in a separate process, which is killed when a render takes too long.

A template is a program that comes with a model. A thread in an endless loop cannot be stopped, and
`{{ 'x' * 10**10 }}` takes all memory; a process can be killed, and its memory has a limit. The event
loop also stays free while a long conversation is rendered.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from windlass.child_process import start_child
from windlass.errors import CapacityError, ConfigError, RequestError, WorkerDied
from windlass.text.template_worker import (
    GIVE_ANOTHER,
    Booted,
    Ready,
    Refused,
    RenderJob,
    Reply,
    TemplateSource,
    Text,
    TooLong,
    Unusable,
    decode_reply,
    encode,
    template_main,
)

_log = logging.getLogger("windlass.serve")

RENDER_TIMEOUT_S = 5.0  # a conversation of 4,096 messages takes a tenth of a second
_START_TIMEOUT_S = 300.0  # Python starts and imports jinja2, possibly on a busy machine


class Renderer(Protocol):
    """Renders conversations into prompts."""

    async def render(self, job: RenderJob) -> str:
        """Return the prompt's text. Raises RequestError with the template's message if it refuses."""
        ...


class _Process:
    """One run of the process, from start to end."""

    def __init__(self, source: TemplateSource) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, child_pipe = spawn.Pipe()
        self._process = spawn.Process(
            target=template_main, args=(source, child_pipe), name="windlass-template"
        )
        start_child(self._process)
        child_pipe.close()
        # Otherwise an interpreter that exits after an error would wait for the process forever.
        atexit.register(self._process.kill)

    def send(self, job: RenderJob) -> None:
        self._pipe.send_bytes(encode(job))

    def receive(self, timeout_s: float) -> Reply | None:
        """Receive a reply. None: timed out. Raises EOFError or OSError if the process ended."""
        if not self._pipe.poll(timeout_s):
            return None
        return decode_reply(self._pipe.recv_bytes())

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """Kill the process and release its resources."""
        self._process.kill()
        self._process.join()
        self._pipe.close()
        atexit.unregister(self._process.kill)


class TemplateProcess:
    """A Renderer that owns the process, and replaces a process that takes too long.

    `warnings` lists conversations that the template cannot render, for the log. A template that
    cannot render the simplest conversation in time raises ConfigError. Construct and close it
    outside of the thread that renders.
    """

    def __init__(self, source: TemplateSource) -> None:
        self._source = source
        # One render at a time, in a thread that waits for the reply.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="windlass-template")
        self._closed = False
        self._process, self.warnings = _start(source)

    async def render(self, job: RenderJob) -> str:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._render, job)

    def close(self) -> None:
        """End the process and abandon a running render."""
        self._closed = True
        self._process.kill()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._process.close()

    def _render(self, job: RenderJob) -> str:
        try:
            self._process.send(job)
            reply = self._process.receive(RENDER_TIMEOUT_S)
        except (EOFError, OSError) as error:
            self._restart()
            if job.template is not None:
                raise RequestError(
                    "the process that renders chat templates ended while it used this template. "
                    "Simplify it, or leave the field out.",
                    "chat_template",
                ) from error
            raise WorkerDied(
                "the process that renders chat templates ended. Send the request again."
            ) from error
        match reply:
            case None:
                self._restart()
                raise RequestError(
                    "the model's chat template was stopped: it took longer than "
                    f"{RENDER_TIMEOUT_S:g} s to render these messages. Send fewer or shorter ones.",
                    "messages",
                )
            case Text(text):
                return text
            case TooLong(num_chars):
                raise CapacityError(
                    f"the chat template renders these messages to {num_chars:,} characters, and the "
                    f"model's context holds at most {job.max_chars:,}. Send fewer or shorter ones.",
                    "messages",
                )
            case Refused(message, param):
                raise RequestError(message, param)
        raise AssertionError(f"a render was answered with {reply}")

    def _restart(self) -> None:
        if self._closed:
            return
        _log.warning("restarting the process that renders chat templates")
        self._process.close()
        self._process, _ = _start(self._source)


def _start(source: TemplateSource) -> tuple[_Process, tuple[str, ...]]:
    """Start a process and return it with the template's warnings."""
    process = _Process(source)
    try:
        reply = process.receive(_START_TIMEOUT_S)
        if isinstance(reply, Booted):
            reply = process.receive(RENDER_TIMEOUT_S)
            if reply is None:
                raise ConfigError(
                    "the chat template was stopped: it took longer than "
                    f"{RENDER_TIMEOUT_S:g} s to render three short conversations. {GIVE_ANOTHER}"
                )
        match reply:
            case Ready(warnings):
                return process, tuple(warnings)
            case Unusable(message):
                raise ConfigError(message)
        raise WorkerDied(
            f"the process that renders chat templates did not start within {_START_TIMEOUT_S:g} s."
        )
    except (EOFError, OSError) as error:
        process.close()
        raise WorkerDied("the process that renders chat templates ended at its start.") from error
    except BaseException:
        process.close()
        raise
