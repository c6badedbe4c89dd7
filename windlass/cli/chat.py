"""`windlass chat`: a conversation in the terminal, or line by line from a pipe."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from windlass.cli.command import Options
from windlass.cli.flags import Adapter, option
from windlass.cli.sampling import SAMPLING_OPTIONS, sampling_params
from windlass.core.sampling import SamplingParams
from windlass.errors import RequestError, UnsupportedError

if TYPE_CHECKING:
    from windlass.llm import LLM

_KEYS = "/exit  /clear  /system TEXT   ctrl-C stops an answer, ctrl-D ends"


def chat(
    options: Options,
    system: Annotated[str | None, option("TEXT", "The system message to start with.")] = None,
    adapter: Adapter = "",
) -> int:
    """Talk to a model in the terminal.

    While talking: /exit ends, /clear forgets what was said, /system TEXT sets the system message,
    ctrl-C stops an answer, ctrl-D ends.
    """
    wishes = options.only(SAMPLING_OPTIONS)
    sampling_params(wishes)  # a bad value is refused before the model is loaded
    from windlass.llm import LLM

    llm = LLM(**options.engine_values())
    if llm.card.chat_template is None:
        raise UnsupportedError(
            f"the model {llm.card.name!r} has no chat template, so it cannot hold a conversation. "
            "Use an instruct model, or windlass generate."
        )
    sampling = sampling_params({"max_tokens": None}, llm.card.default_sampling, wishes)
    Conversation(llm, sampling, system, sys.stdin.isatty(), adapter).run()
    return 0


class Conversation:
    """Owns what was said. A line that begins with / is for us, every other one for the model."""

    def __init__(
        self,
        llm: LLM,
        sampling: SamplingParams,
        system: str | None,
        at_terminal: bool,
        adapter: str = "",
    ) -> None:
        self._llm = llm
        self._sampling = sampling
        self._system = system
        self._at_terminal = at_terminal
        self._adapter = adapter
        self._said: list[dict[str, str]] = []

    def run(self) -> None:
        if self._at_terminal:
            import readline  # noqa: F401 - gives input() its line editing

            typer.echo(f"{self._llm.card.name}\n{_KEYS}\n")
        for line in self._lines():
            if line == "/exit":
                return
            if line.startswith("/"):
                self._obey(line)
            elif line:
                self._answer(line)

    def _lines(self) -> Iterator[str]:
        while True:
            try:
                yield input("> " if self._at_terminal else "").strip()
            except EOFError:
                return

    def _obey(self, line: str) -> None:
        command, _, text = line.partition(" ")
        if command == "/clear":
            self._said.clear()
        elif command == "/system":
            self._system = text.strip() or None
        else:
            typer.echo(f"{command} is not known. {_KEYS}", err=True)

    def _answer(self, text: str) -> None:
        """Stream the answer; a question that cannot be answered is taken back."""
        self._said.append({"role": "user", "content": text})
        opening = [{"role": "system", "content": self._system}] if self._system else []
        try:
            answer = self._stream(opening + self._said)
        except RequestError as error:
            if not self._at_terminal:
                raise
            self._said.pop()
            typer.secho(f"{error} (/clear starts anew.)", fg="red", err=True)
            return
        self._said.append({"role": "assistant", "content": answer})

    def _stream(self, messages: list[dict[str, str]]) -> str:
        pieces: list[str] = []
        with interruptible() as interrupts:
            for piece in self._llm.stream_chat(messages, self._sampling, self._adapter):
                pieces.append(piece)
                typer.echo(piece, nl=False)
                if interrupts.came:
                    break
        typer.echo()
        return "".join(pieces)


class _Interrupts:
    """Notes the first ctrl-C, so that no step is torn apart; raises the second."""

    def __init__(self) -> None:
        self.came = False

    def __call__(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self.came:
            raise KeyboardInterrupt
        self.came = True


@contextmanager
def interruptible() -> Iterator[_Interrupts]:
    """Inside, ctrl-C is noted instead of raised."""
    interrupts = _Interrupts()
    before = signal.signal(signal.SIGINT, interrupts)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)
