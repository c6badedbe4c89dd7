"""Renders chat templates in a process of their own, which is killed when a render takes too long.

A template is a program that comes with a model. A thread that runs an endless loop cannot be ended,
and `{{ 'x' * 10**10 }}` takes all memory; a process can be killed, and its memory has a limit. It
also keeps the event loop free while long conversations are rendered.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

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
_START_TIMEOUT_S = 60.0  # Python starts and imports jinja2, perhaps from a slow disk


class Renderer(Protocol):
    """Makes prompts of conversations."""

    async def render(self, job: RenderJob) -> str:
        """The prompt's text. What the template refuses is a RequestError with its message."""
        ...


class _Process:
    """One life of the process, from its start to its end."""

    def __init__(self, source: TemplateSource) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, its_pipe = spawn.Pipe()
        self._process = spawn.Process(
            target=template_main, args=(source, its_pipe), name="windlass-template"
        )
        self._process.start()
        its_pipe.close()
        # Without this an interpreter that ends by an error would wait for the process forever.
        atexit.register(self._process.kill)

    def send(self, job: RenderJob) -> None:
        self._pipe.send_bytes(encode(job))

    def receive(self, timeout_s: float) -> Reply | None:
        """The next reply; None: it did not come in time. EOFError, OSError: the process ended."""
        if not self._pipe.poll(timeout_s):
            return None
        return decode_reply(self._pipe.recv_bytes())

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.join()
        self._pipe.close()
        atexit.unregister(self._process.kill)


class TemplateProcess:
    """A Renderer that owns the process; one that takes too long is killed and replaced.

    `facts` are what the trial at start found, for the log. A template that cannot render the
    simplest conversation in time is a ConfigError. Made and closed outside of `render`'s thread.
    """

    def __init__(self, source: TemplateSource) -> None:
        self._source = source
        # One render at a time, in a thread that waits for the process.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="windlass-template")
        self._closed = False
        self._process, self.facts = _start(source)

    async def render(self, job: RenderJob) -> str:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._render, job)

    def close(self) -> None:
        """End the process; a render that runs is given up."""
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
                    f"the chat template makes a prompt of {num_chars:,} characters of these "
                    f"messages, and the model's context holds at most {job.max_chars:,}. Send "
                    "fewer or shorter ones.",
                    "messages",
                )
            case Refused(message, param):
                raise RequestError(message, param)
        raise AssertionError(f"a render was answered with {reply}")

    def _restart(self) -> None:
        if self._closed:
            return
        _log.warning("the process that renders chat templates is started again")
        self._process.close()
        self._process, _ = _start(self._source)


def _start(source: TemplateSource) -> tuple[_Process, tuple[str, ...]]:
    """Start a process and wait for its trial of the template, whose findings are returned."""
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
            case Ready(facts):
                return process, tuple(facts)
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
