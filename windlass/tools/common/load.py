"""Builds a load (requests and arrival times) from a named workload or a trace, as text or token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from windlass.core.card import ModelCard
from windlass.errors import ConfigError
from windlass.settings import at_least
from windlass.text.chat_template import ChatTemplate
from windlass.tools.common.arrivals import Arrivals
from windlass.tools.common.jsonl import raise_problems
from windlass.tools.common.request_files import read_request_file
from windlass.tools.common.requests import Request, TextRequest
from windlass.tools.common.text_workload import Sizes, make_requests
from windlass.tools.common.texts import Writer, measure_scale

Log = Callable[[str], None]


def writer_for(card: ModelCard) -> Writer:
    """A text writer whose lengths are in this model's tokens."""
    return Writer(measure_scale(lambda text: len(card.tokenizer.encode(text))))


def tokenize(
    requests: Sequence[TextRequest], card: ModelCard, template_prompts: bool = True
) -> list[Request]:
    """Tokenize as the server does. `template_prompts`: send a plain prompt as a user message."""
    template = None
    if card.chat_template is not None:
        template = ChatTemplate(card.chat_template, card.special_tokens)
    tokenized = []
    for request in requests:
        prompt = request.as_prompt()
        if isinstance(prompt, list):
            tokens = prompt
        elif template is not None and (request.messages or template_prompts):
            text = template.render(request.as_messages())
            tokens = card.tokenizer.encode(text, add_special=False)
        else:
            tokens = card.tokenizer.encode(prompt)
        tokenized.append(Request(tokens, request.max_tokens, request.at, request.follows))
    return tokenized


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of a named workload or of a file, and their arrivals."""

    name: str = "chat"  # one of TEXT_WORKLOADS; of a file, one of FILE_FORMATS
    path: Path | None = None
    sizes: Sizes = field(default_factory=Sizes)
    arrivals: Arrivals = field(default_factory=Arrivals)
    max_concurrency: int | None = None
    skip_bad_lines: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(self, 1, "max_concurrency")

    @property
    def title(self) -> str:
        return self.name if self.path is None else self.path.name

    @property
    def arrivals_title(self) -> str:
        """4 req/s, max concurrency 8"""
        limit = self.max_concurrency
        return self.arrivals.title + ("" if limit is None else f", max concurrency {limit}")

    def texts(self, writer: Writer, draw: int = 0, log: Log = lambda _: None) -> list[TextRequest]:
        """The requests as text, without arrival times. Another `draw` of a workload gives other texts.

        Invalid lines of a file raise, or are skipped and logged.
        """
        if self.path is None:
            return make_requests(self.name, self.sizes, writer=writer, seed=f"{self.seed} {draw}")
        read = read_request_file(
            self.name, self.path, sizes=self.sizes, writer=writer, seed=str(self.seed)
        )
        if not self.skip_bad_lines:
            raise_problems(self.path, read.problems)
        for problem in read.problems:
            log(f"{self.path}: skipped: {problem}")
        if not read.requests:
            raise ConfigError(f"{self.path} has no valid line.")
        return read.requests

    def requests(self, card: ModelCard, log: Log = lambda _: None, draw: int = 0) -> list[Request]:
        """The requests in token ids, with arrival times that do not depend on the draw."""
        try:
            texts = self.texts(writer_for(card), draw, log)
        except ConfigError as error:
            raise ConfigError(str(error).replace("--dataset-path", "--trace")) from error
        return tokenize(self.arrivals.set(texts, f"{self.seed} 0"), card)
