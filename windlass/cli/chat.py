"""`windlass chat`: a conversation in the terminal, or with lines from a pipe."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from windlass.cli.command import Options
from windlass.cli.flags import Adapter, option
from windlass.cli.sampling import SAMPLING_OPTIONS, sampling_params
from windlass.cli.starting import starting
from windlass.core.sampling import SamplingParams
from windlass.errors import RequestError, UnsupportedError

if TYPE_CHECKING:
    from windlass.llm import LLM

_KEYS = "/exit  /clear  /system TEXT   ctrl-C stops the response, ctrl-D exits"


def chat(
    options: Options,
    system: Annotated[str | None, option("TEXT", "Initial system message.")] = None,
    adapter: Adapter = "",
) -> int:
    """Chat with a model in the terminal.

    Commands: /exit exits, /clear clears the conversation, /system TEXT sets the system message,
    ctrl-C stops the response, ctrl-D exits.
    """
    requested = options.only(SAMPLING_OPTIONS)
    sampling_params(requested)  # rejects a bad value before the model is loaded
    with starting(options.model):
        from windlass.llm import LLM

        llm = LLM(**options.engine_values())
    if llm.card.chat_template is None:
        raise UnsupportedError(
            f"the model {llm.card.name!r} has no chat template, so it cannot chat. Use an "
            "instruct model, or windlass generate."
        )
    sampling = sampling_params({"max_tokens": None}, llm.card.default_sampling, requested)
    Conversation(
        llm, sampling, system=system, at_terminal=sys.stdin.isatty(), adapter=adapter
    ).run()
    return 0


class Conversation:
    """Owns the messages. A line that starts with / is a command; others go to the model."""

    def __init__(
        self,
        llm: LLM,
        sampling: SamplingParams,
        *,
        system: str | None,
        at_terminal: bool,
        adapter: str = "",
    ) -> None:
        self._llm = llm
        self._sampling = sampling
        self._system = system
        self._at_terminal = at_terminal
        self._adapter = adapter
        self._messages: list[dict[str, str]] = []

    def run(self) -> None:
        if self._at_terminal:
            if find_spec("readline") is not None:
                import readline  # noqa: F401 - gives input() its line editing

            typer.echo(f"{self._llm.card.name}\n{_KEYS}\n")
        for line in self._lines():
            if line == "/exit":
                return
            if line.startswith("/"):
                self._run_command(line)
            elif line:
                self._respond(line)

    def _lines(self) -> Iterator[str]:
        while True:
            try:
                yield input("> " if self._at_terminal else "").strip()
            except EOFError:
                return

    def _run_command(self, line: str) -> None:
        command, _, text = line.partition(" ")
        if command == "/clear":
            self._messages.clear()
        elif command == "/system":
            self._system = text.strip() or None
        else:
            typer.echo(f"unknown command {command}. {_KEYS}", err=True)

    def _respond(self, text: str) -> None:
        """Stream the response. A message that the engine rejects is removed again."""
        self._messages.append({"role": "user", "content": text})
        system = [{"role": "system", "content": self._system}] if self._system else []
        try:
            response = self._stream(system + self._messages)
        except RequestError as error:
            if not self._at_terminal:
                raise
            self._messages.pop()
            typer.secho(f"{error} (/clear starts a new conversation.)", fg="red", err=True)
            return
        self._messages.append({"role": "assistant", "content": response})

    def _stream(self, messages: list[dict[str, str]]) -> str:
        chunks: list[str] = []
        with interruptible() as interrupts:
            for chunk in self._llm.stream_chat(messages, self._sampling, self._adapter):
                chunks.append(chunk)
                typer.echo(chunk, nl=False)
                if interrupts.received:
                    break
        typer.echo()
        return "".join(chunks)


class _Interrupts:
    """Records the first ctrl-C, so that a step completes; raises on the second."""

    def __init__(self) -> None:
        self.received = False

    def __call__(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self.received:
            raise KeyboardInterrupt
        self.received = True


@contextmanager
def interruptible() -> Iterator[_Interrupts]:
    """Record ctrl-C inside the block instead of raising."""
    interrupts = _Interrupts()
    before = signal.signal(signal.SIGINT, interrupts)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)
